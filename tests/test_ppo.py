"""PPO against brute force, closed forms, float64 and its own specification."""

import copy
import importlib.util
import math
import sys
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, read_scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import find_run, load, run_main
from torch.distributions import Categorical, Normal, kl_divergence

from algos import ppo
from algos.ppo import Agent, Args, Batch, RunningMeanStd, compute_gae, ppo_loss

BOX, DISCRETE = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
CPU = torch.device("cpu")


def describe(space, obs_dim=4):
    """What an agent needs to know of its environments."""
    box = gym.spaces.Box(-np.inf, np.inf, (obs_dim,))
    return SimpleNamespace(single_action_space=space, single_observation_space=box)


def make_parts(args, seed=0):
    """Environments, agent and storage as `train` makes them."""
    envs = ppo.make_envs(args, args.num_envs)
    ppo.seed_everything(seed)
    agent, storage = Agent(envs, args.norm_obs), ppo.RolloutStorage(envs, args.num_steps)
    storage.obs[-1], _ = envs.reset(seed=seed)
    return envs, agent, storage


def collect(args, parts):
    """A rollout of `parts`: its training data, and for each row of them (step, environment)."""
    envs, agent, storage = parts
    ppo.collect_rollout(agent, envs, storage, args.gamma, CPU)
    return ppo.compute_batch(agent, storage, args, CPU), np.argwhere(storage.lengths[1:] > 0)


def make_batch(agent, num_rows=12, obs_dim=4, seed=0):
    """Random rows, on-policy for `agent`."""
    g = torch.Generator().manual_seed(seed)
    dtype = next(agent.parameters()).dtype
    obs = torch.randn(num_rows, obs_dim, generator=g, dtype=dtype)
    with torch.no_grad():
        params = agent.get_policy_params(obs)
        actions = agent.get_distribution(params).sample().to(dtype)
        log_probs = agent.get_distribution(params).log_prob(actions).sum(-1)
        values = agent.critic(obs).squeeze(-1)
    advantages, noise = torch.randn(2, num_rows, generator=g, dtype=dtype)
    return Batch(obs, actions, params, log_probs, values, advantages, values + noise)


def shake(agent, scale):
    """Move the policy away from the one that acted."""
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(scale * torch.randn_like(p))


def flat_gradient(agent, loss):
    agent.zero_grad()
    loss.backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in agent.parameters()]
    )


def run(folder, flags, *more):
    """A whole run of ppo.py in `folder`."""
    return run_main(ppo, folder, *flags.split(), *more)


# Episode boundaries


def brute_force_advantages(rewards, values, next_values, ends, terminated, gamma, lam):
    """sum_k (gamma lambda)^k delta_{t+k} up to the end of the episode or of the data, straight from eq. 11."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            future = 0.0 if terminated[k] else next_values[k]
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * future - values[k])
            if ends[k]:
                break
        advantages.append(total)
    return np.array(advantages)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_steps=st.integers(1, 30),
    p_end=st.floats(0, 0.6),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_equals_brute_force_per_episode(seed, num_steps, p_end, gamma, lam):
    rng = np.random.default_rng(seed)
    num_envs = 3
    terminated, truncated = rng.random((2, num_steps, num_envs)) < p_end  # both at once happens too
    valid = np.ones((num_steps, num_envs), bool)
    for t in range(num_steps):  # a step after an end only resets: no flags, no reward
        valid[t] = rng.random(num_envs) > p_end if t == 0 else ~(terminated[t - 1] | truncated[t - 1])
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
    rewards = rng.normal(size=(num_steps, num_envs)) * valid
    values = rng.normal(size=(num_steps + 1, num_envs)) * 10
    done = terminated | truncated

    tensors = [torch.tensor(x, dtype=torch.float32) for x in (rewards, values)]
    advantages, returns = compute_gae(*tensors, torch.tensor(terminated), torch.tensor(truncated), gamma, lam)
    for b in range(num_envs):
        expected = brute_force_advantages(
            rewards[:, b], values[:-1, b], values[1:, b], done[:, b], terminated[:, b], gamma, lam
        )
        rows = valid[:, b]
        np.testing.assert_allclose(advantages[rows, b], expected[rows], rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(returns[rows, b], (expected + values[:-1, b])[rows], rtol=1e-4, atol=2e-4)


def test_rollouts_hold_the_environments_own_transitions():
    """Two rollouts of real environments: rows, sums of episodes and advantages as in the environments' ledgers."""
    args = Args(
        env_id="probe_envs:Ledger-v0", num_envs=5, num_steps=40, gamma=0.9, gae_lambda=0.8, norm_reward=False
    )
    parts = make_parts(args)
    envs, agent, storage = parts
    ledgers = [e.unwrapped for e in envs.unwrapped.envs]
    position = [0] * 5  # transitions of each ledger already seen
    num_finished = 0
    for _ in range(2):
        batch, index = collect(args, parts)
        for b, ledger in enumerate(ledgers):
            rows, steps = index[:, 1] == b, index[index[:, 1] == b][:, 0]
            truth = [step for episode in ledger.episodes for step in episode][position[b] :]
            position[b] += len(truth)
            obs, actions, rewards, next_obs, terminated, truncated = map(np.array, zip(*truth, strict=True))
            assert (
                rows.sum() == len(truth) == (storage.lengths[1:, b] > 0).sum()
            )  # the environment's own steps
            np.testing.assert_array_equal(batch.obs[rows], obs)
            np.testing.assert_array_equal(batch.actions[rows, 0], actions)
            np.testing.assert_allclose(storage.rewards[1:][steps, b], rewards, rtol=1e-6)
            np.testing.assert_array_equal(storage.obs[1:][steps, b], next_obs)
            np.testing.assert_array_equal(storage.terminated[1:][steps, b], terminated)
            np.testing.assert_array_equal(storage.truncated[1:][steps, b], truncated)
            with torch.no_grad():
                values, next_values = (
                    agent.critic(torch.tensor(x)).squeeze(-1).numpy() for x in (obs, next_obs)
                )
            expected = brute_force_advantages(
                rewards, values, next_values, terminated | truncated, terminated, 0.9, 0.8
            )
            np.testing.assert_allclose(batch.advantages[rows], expected, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(batch.values[rows], values, rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(
                batch.returns[rows] - batch.values[rows], expected, rtol=1e-4, atol=1e-5
            )
            # Lengths and returns at the ends of episodes
            ends = np.flatnonzero(storage.terminated[1:, b] | storage.truncated[1:, b])
            finished = [e for e in ledger.episodes if e and (e[-1][4] or e[-1][5])][-len(ends) :]
            assert storage.lengths[1:][ends, b].tolist() == [len(e) for e in finished]
            returns = [sum(step[2] for step in e) for e in finished]
            np.testing.assert_allclose(storage.returns[1:][ends, b], returns, rtol=1e-4, atol=1e-5)
            discounted = [
                sum(0.9 ** (len(e) - 1 - i) * step[2] for i, step in enumerate(e)) for e in finished
            ]
            np.testing.assert_allclose(storage.discounted[1:][ends, b], discounted, rtol=1e-4, atol=1e-5)
            num_finished += len(ends)
    assert num_finished > 20


def test_a_batch_is_on_policy():
    """Ratios are one at the first update, and what acted is what the batch holds."""
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        args = Args(env_id=env_id, num_envs=4, num_steps=40, norm_obs=True)
        parts = make_parts(args)
        for _ in range(2):
            batch, index = collect(args, parts)
            _, metrics = ppo_loss(parts[1], batch, args)
            torch.testing.assert_close(
                metrics[ppo.METRICS.index("approx_kl")].abs().max().item(), 0.0, atol=1e-5, rtol=0
            )
            assert torch.equal(batch.actions, torch.tensor(parts[2].actions[:-1][tuple(index.T)]))


@pytest.mark.parametrize(
    ("env_id", "low", "high"), [("Endless-v0", 9.9, 10.1), ("EndlessTerminating-v0", 3.0, 6.0)]
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id, low, high):
    """Truncation must not cut the value: V = 1 / (1 - 0.9) = 10. Termination after 10 steps gives far less."""
    flags = (
        "--gamma 0.9 --num-envs 8 --num-steps 32 --total-timesteps 6400 --learning-rate 1e-2 --no-norm-reward"
    )
    checkpoint = load(
        run(tmp_path, f"{flags} --eval-episodes 0 --env-id probe_envs:{env_id}").path / "checkpoint.pt"
    )
    agent = Agent(describe(gym.spaces.Discrete(2), 1), norm_obs=False)
    agent.load_state_dict(checkpoint["agent"])
    assert low < agent.critic(torch.ones(1)).item() < high
    iterations, steps, *_ = checkpoint["progress"]
    resets = sum(t % 11 == 10 for t in range(32 * iterations))
    assert steps == 8 * (32 * iterations - resets)


def test_steps_that_only_reset_change_nothing():
    """Whatever reward and observation they carry, nor do they move statistics."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, num_steps=40, norm_obs=True)
    found = []
    for noise in (0.0, 1e6):
        parts = envs, agent, storage = make_parts(args)
        ppo.collect_rollout(agent, envs, storage, args.gamma, CPU)
        is_reset = storage.lengths[1:] == 0
        assert is_reset.sum() > 5
        storage.rewards[1:][is_reset] += noise
        storage.discounted[1:][is_reset] += noise
        storage.actions[:-1][is_reset] = 1
        batch = ppo.compute_batch(agent, storage, args, CPU)
        assert len(batch.obs) == (~is_reset).sum()
        found.append([*batch, *agent.state_dict().values()])
        del parts
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


# The objective


def float64_agent(space):
    torch.manual_seed(1)
    return Agent(describe(space), norm_obs=False).double()


@pytest.mark.parametrize("space", [DISCRETE, BOX])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_equals_a_float64_loop(space, clip_vloss):
    """Clipped and unclipped rows, clipped and unclipped values, entropy: eq. 7 and 9 written as a loop over rows."""
    agent = float64_agent(space)
    batch = make_batch(agent)
    shake(agent, 0.05)  # so that ratios differ from one and some are clipped
    args = Args(clip_coef=0.05, clip_vloss=clip_vloss, ent_coef=0.3, vf_coef=0.7)
    losses, metrics = ppo_loss(agent, batch, args)
    num_clipped, clipped_values = 0, 0
    for i in range(12):
        obs, action = batch.obs[i], batch.actions[i]
        out = agent.actor(obs)
        if space is BOX:
            parts = [Normal(out[a], agent.actor_logstd[a].exp()) for a in range(2)]
        else:
            parts = [Categorical(logits=out)]
        log_ratio = (
            sum(p.log_prob(a) for p, a in zip(parts, action, strict=True)) - batch.log_probs[i]
        ).item()
        ratio = math.exp(log_ratio)
        num_clipped += abs(ratio - 1) > 0.05
        advantage, old, ret = (x[i].item() for x in (batch.advantages, batch.values, batch.returns))
        surrogate = min(ratio * advantage, min(max(ratio, 0.95), 1.05) * advantage)
        value = agent.critic(obs).item()
        near = old + min(max(value - old, -0.05), 0.05)
        value_error = (value - ret) ** 2 / 2
        if clip_vloss:
            clipped_values += (near - ret) ** 2 / 2 > value_error
            value_error = max(value_error, (near - ret) ** 2 / 2)
        entropy = sum(p.entropy() for p in parts).item()
        assert losses[i].item() == pytest.approx(-surrogate + 0.7 * value_error - 0.3 * entropy, rel=1e-9)
        kl = ratio - 1 - log_ratio
        expected = [value_error, -surrogate, entropy, -log_ratio, kl, float(abs(ratio - 1) > 0.05)]
        assert metrics[:, i].tolist() == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert 0 < num_clipped < 12 and (not clip_vloss or 0 < clipped_values < 12)


def test_gradient_at_the_old_policy_is_the_policy_gradient():
    agent = float64_agent(BOX)
    batch = make_batch(agent)
    found = flat_gradient(agent, ppo_loss(agent, batch, Args(vf_coef=0.0))[0].mean())
    pi = agent.get_distribution(agent.get_policy_params(batch.obs))
    expected = flat_gradient(agent, (-pi.log_prob(batch.actions).sum(-1) * batch.advantages).mean())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("space", [DISCRETE, BOX])
def test_kl_penalty_is_equation_8(space):
    agent = float64_agent(space)
    batch = make_batch(agent)
    old = copy.deepcopy(agent)
    shake(agent, 0.1)
    loss, _ = ppo_loss(agent, batch, Args(kl_coef=0.5, vf_coef=0.0))
    pi, pi_old = (a.get_distribution(a.get_policy_params(batch.obs)) for a in (agent, old))
    ratio = (pi.log_prob(batch.actions).sum(-1) - pi_old.log_prob(batch.actions).sum(-1)).exp()
    kl = kl_divergence(pi_old, pi).sum(-1)
    assert kl.mean() > 1e-3
    torch.testing.assert_close(loss, -(ratio * batch.advantages - 0.5 * kl), rtol=1e-9, atol=1e-12)


def test_a_step_follows_the_mean_over_the_rows_with_normalized_advantages():
    """And not further than the largest norm of the gradient."""
    args, agent = Args(max_grad_norm=1e9), float64_agent(BOX)
    batch = make_batch(agent)
    before = torch.cat([p.detach().flatten() for p in agent.parameters()])
    a = batch.advantages
    normalized = batch._replace(advantages=(a - a.mean()) / a.std(correction=0))
    losses, metrics = ppo_loss(agent, normalized, args)
    gradient = flat_gradient(agent, losses.mean())
    for args.max_grad_norm, scale in ((1e9, 1.0), (0.01, 0.01 / gradient.norm())):
        other = float64_agent(BOX)
        found = ppo.update_minibatch(other, torch.optim.SGD(other.parameters(), 1.0), batch, args)
        after = torch.cat([p.detach().flatten() for p in other.parameters()])
        torch.testing.assert_close(before - after, gradient * scale, rtol=1e-4, atol=1e-8)
        torch.testing.assert_close(found, metrics.mean(1), rtol=1e-6, atol=1e-9)
    unchanged = Args(max_grad_norm=1e9, norm_adv=False)
    other = float64_agent(BOX)
    gradient = flat_gradient(agent, ppo_loss(agent, batch, unchanged)[0].mean())
    ppo.update_minibatch(other, torch.optim.SGD(other.parameters(), 1.0), batch, unchanged)
    after = torch.cat([p.detach().flatten() for p in other.parameters()])
    torch.testing.assert_close(before - after, gradient, rtol=1e-6, atol=1e-9)


def test_minibatches_of_one_row_or_none_stay_finite(tmp_path):
    flags = "--num-envs 2 --num-steps 4 --num-minibatches 9 --update-epochs 2 --total-timesteps 64 --eval-episodes 2"
    assert all(x.isfinite().all() for x in run(tmp_path, flags).weights.values())


# Action and observation spaces


class Still:
    """Environments that stand still: all observations are zero."""

    def __init__(self, space, num_envs):
        self.num_envs, self.single_action_space = num_envs, space
        self.single_observation_space = gym.spaces.Box(-1, 1, (2,))

    def step(self, actions):
        ends = np.zeros(self.num_envs, bool)
        return np.zeros((self.num_envs, 2)), np.zeros(self.num_envs), ends, ends, {}


def sample(space, set_policy):
    """Agent and actions [N, A] of a rollout in environments that stand still."""
    ppo.seed_everything(0)
    envs = Still(space, 500)
    agent, storage = Agent(envs, norm_obs=False), ppo.RolloutStorage(envs, 100)
    with torch.no_grad():
        set_policy(agent)
    ppo.collect_rollout(agent, envs, storage, 0.9, CPU)
    return agent, storage.actions[:-1].reshape(50_000, -1)


def test_samples_follow_the_logits():
    logits = torch.tensor([1.0, -1.0, 0.5])
    _, actions = sample(DISCRETE, lambda agent: agent.actor[-1].bias.copy_(logits))
    frequency = np.bincount(actions[:, 0].astype(int), minlength=3) / len(actions)
    np.testing.assert_allclose(frequency, logits.softmax(-1), atol=4 * math.sqrt(0.25 / len(actions)))


def test_gaussian_samples_have_the_policys_mean_and_deviation():
    def set_policy(agent):
        agent.actor[-1].bias.copy_(torch.tensor([0.3, -2.0]))
        agent.actor_logstd.copy_(torch.tensor([-1.0, 0.5]))

    _, actions = sample(BOX, set_policy)
    np.testing.assert_allclose(actions.mean(0), [0.3, -2.0], atol=0.03)
    np.testing.assert_allclose(actions.std(0), np.exp([-1.0, 0.5]), rtol=0.02)


@pytest.mark.parametrize(
    ("env_id", "optimum", "tolerance", "flags"),
    [
        ("Shifted-v0", 1.0, 0.01, "--num-steps 64"),
        ("Sums-v0", 1.0, 0.01, "--num-steps 64"),
        ("Aim-v0", 0.0, 0.15, "--norm-obs"),  # a random policy gets about -1.5
        ("FarAim-v0", 0.0, 0.15, "--norm-obs"),  # in a box [2, 50], distances in half-widths
    ],
)
@pytest.mark.parametrize("seed", [11, 12])
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, optimum, tolerance, flags, seed):
    base = f"--env-id probe_envs:{env_id} --total-timesteps 4096 --num-envs 16 --num-steps 32 --seed {seed} "
    scores = read_scalars(run(tmp_path, base + flags).path)["eval/episodic_return"]
    assert scores[-1][1] == pytest.approx(optimum, abs=tolerance)


def test_discrete_observations_become_one_hot_from_their_starts():
    envs = ppo.make_envs(Args(env_id="probe_envs:Shifted-v0"), 20)  # Discrete(3, start=3)
    obs, _ = envs.reset(seed=1)
    truth = [env.unwrapped.obs for env in envs.unwrapped.envs]
    assert len(set(truth)) == 3 and obs.tolist() == np.eye(3)[np.array(truth) - 3].tolist()
    envs = ppo.make_envs(Args(env_id="probe_envs:Sums-v0"), 20)  # MultiDiscrete([2, 3], start=[1, -1])
    obs, _ = envs.reset(seed=1)
    first, second = np.array([env.unwrapped.obs for env in envs.unwrapped.envs]).T
    assert np.array_equal(obs, np.concatenate((np.eye(2)[first - 1], np.eye(3)[second + 1]), 1))


def test_observations_of_two_dimensions_and_dicts_become_flat():
    args = Args(env_id="probe_envs:Aim-v0", num_envs=3, num_steps=8)
    batch, _ = collect(args, make_parts(args))  # observations [2, 1]
    assert batch.obs.shape[1] == 2
    envs = ppo.make_envs(Args(env_id="probe_envs:Unsupporteddict-v0"), 2)  # a Dict of one Box
    assert envs.single_observation_space.shape == (2,)


def test_actions_are_in_units_of_their_space():
    agent = Agent(describe(gym.spaces.Box(np.float32([[2], [-3]]), np.float32([[50], [1]]))), norm_obs=False)
    actions = torch.tensor([[-1.0, 0.0], [0.5, 7.0], [-2.0, 1.0]])
    assert agent.to_env(actions).tolist() == [[[2.0], [-1.0]], [[38.0], [1.0]], [[2.0], [1.0]]]
    agent = Agent(describe(gym.spaces.Box(np.float32([2, 0]), np.float32([50, np.inf]))), norm_obs=False)
    assert agent.to_env(torch.tensor([[3.0, -1.0], [60.0, 99.0]])).tolist() == [[3.0, 0.0], [50.0, 99.0]]
    agent = Agent(describe(gym.spaces.Discrete(3, start=-1)), norm_obs=False)
    actions = agent.to_env(torch.tensor([[0], [1], [2]]))
    assert actions.tolist() == [-1, 0, 1] and actions.dtype == np.int64


def test_box_actions_are_learned_from_as_the_policy_drew_them():
    """The environment asserts that its actions lie in the box."""
    args = Args(env_id="probe_envs:FarAim-v0", num_envs=4, num_steps=16)
    parts = make_parts(args)
    batch, _ = collect(args, parts)
    assert batch.actions.abs().max() > 1.0
    pi = Normal(parts[1].actor(batch.obs), parts[1].actor_logstd.exp())
    torch.testing.assert_close(batch.log_probs, pi.log_prob(batch.actions).sum(-1))


# Environments


def edit_script(folder, old, new):
    """The module of a copy of ppo.py with one text replaced, as a user does it."""
    text = (ROOT / "algos" / "ppo.py").read_text()
    assert text.count(old) == 1
    path = folder / "edited.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
def test_wrappers_of_a_user_count_in_training_evaluation_and_films(tmp_path, vectorization):
    edited = edit_script(tmp_path, "wrappers = []", "wrappers = [lambda env: gym.wrappers.TimeLimit(env, 7)]")
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 64 --eval-episodes 2 --vectorization".split()
    film = ["--capture-video"] if vectorization == "auto" else []
    path = run_main(edited, tmp_path / "runs", *flags, vectorization, *film).path
    scalars = read_scalars(path)
    assert {length for _, length in scalars["eval/episodic_length"]} == {7.0}
    assert {length for _, length in scalars["charts/episodic_length"]} == {7.0}
    if film:
        films = list(path.glob("videos_*/*.mp4"))
        assert {x.parent.name for x in films} == {
            f"videos_{step}" for step, _ in scalars["eval/episodic_length"]
        }
        assert all(x.stat().st_size > 1000 for x in films)


def test_a_wrapper_that_sets_an_attribute_counts(tmp_path):
    """No wrapper object shows it; the first line of a run says that single environments are used then."""
    line = "wrappers = [lambda env: setattr(env.unwrapped, 'force_mag', 1.0) or env]"
    edited = edit_script(tmp_path, "wrappers = []", line)
    envs = edited.make_envs(Args(), 3)
    assert [env.unwrapped.force_mag for env in envs.unwrapped.envs] == [1.0] * 3
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 64 --eval-episodes 0"
    assert "2 environments in SyncVectorEnv" in run_main(edited, tmp_path / "edited", *flags.split()).out
    assert "2 environments in CartPoleVectorEnv" in run(tmp_path / "same", flags).out
    assert (
        "2 environments in AsyncVectorEnv" in run(tmp_path / "async", flags, "--vectorization", "async").out
    )


def test_without_wrappers_the_tasks_own_vector_form_is_used():
    assert type(ppo.make_envs(Args(), 2).unwrapped).__name__ == "CartPoleVectorEnv"
    assert type(ppo.make_envs(Args(vectorization="sync"), 2).unwrapped).__name__ == "SyncVectorEnv"
    assert type(ppo.make_envs(Args(env_id="Pendulum-v1"), 2).unwrapped).__name__ == "SyncVectorEnv"
    assert ppo.make_envs(Args(), 2).render_mode is None


def test_films_of_a_tasks_own_vector_form(tmp_path):
    """A pole that falls soon, as the agent pushes it to one side only."""
    args = Args(capture_video=True, eval_episodes=2)
    agent = make_parts(args)[1]
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 9.0]))
    scores = ppo.evaluate(agent, args, CPU, 2, tmp_path / "films")
    (film,) = tmp_path.glob("films/*.mp4")
    assert film.stat().st_size > 1000 and 5 < scores["eval/episodic_length"] < 15


# Normalization


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_running_statistics_equal_numpys_on_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    stats, rows = RunningMeanStd(3), rng.normal(5000, 3, (1 + sum(sizes), 3))
    for x in np.split(rows, np.cumsum([1, *sizes])[:-1]):
        stats.update(torch.tensor(x))
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-6, atol=1e-9)
    assert stats.count.tolist() == [len(rows)] * 3


def test_what_is_normalized_is_cut_at_ten():
    stats = RunningMeanStd(2)
    stats.mean.copy_(torch.tensor([5.0, 0.0]))
    stats.var.copy_(torch.tensor([4.0, 0.01]))
    found = stats(torch.tensor([[9.0, -0.5], [-99.0, 2.0]]))
    torch.testing.assert_close(found, torch.tensor([[2.0, -5.0], [-10.0, 10.0]]))
    torch.testing.assert_close(stats(torch.tensor([9.0, -0.5]), center=False), torch.tensor([4.5, -5.0]))
    assert found.dtype == torch.float32


def test_observations_are_normalized_by_the_statistics_of_the_rollouts_before():
    """With the same ones in acting and learning; then those of all true steps are added."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=3, num_steps=20, norm_obs=True)
    parts = _, agent, storage = make_parts(args)
    seen = np.zeros((0, 3))
    for _ in range(3):
        mean, var = (seen.mean(0), seen.var(0)) if len(seen) else (0.0, 1.0)
        batch, index = collect(args, parts)
        raw = storage.obs[:-1][tuple(index.T)]
        np.testing.assert_allclose(batch.obs, (raw - mean) / np.sqrt(var + 1e-8), rtol=1e-4, atol=1e-5)
        seen = np.concatenate((seen, raw))
        np.testing.assert_allclose(agent.normalize.mean, seen.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(agent.normalize.var, seen.var(0), rtol=1e-6)
        assert agent.normalize.count[0] == len(seen)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """Of environments with rewards 0, 1, 2, episodes of five steps and then a step that only resets."""
    import probe_envs

    probe_envs.Fixed.made = 0
    args = Args(env_id="probe_envs:Fixed-v0", num_envs=3, num_steps=8, gamma=0.5, gae_lambda=1.0)
    parts = _, agent, storage = make_parts(args)
    ranks = [env.unwrapped.rank for env in parts[0].unwrapped.envs]
    for num_rollouts in (1, 2, 3):
        batch, index = collect(args, parts)
        steps = [t % 6 for t in range(8 * num_rollouts) if t % 6 < 5]  # in the episode
        returns = [rank * sum(0.5**k for k in range(step + 1)) for rank in ranks for step in steps]
        stats = agent.return_stats
        assert stats.count.item() == len(returns) and stats.mean.item() == pytest.approx(
            np.mean(returns), rel=1e-5
        )
        assert stats.var.item() == pytest.approx(np.var(returns), rel=1e-5)
        assert len(index) == 3 * sum(t % 6 < 5 for t in range(8 * num_rollouts - 8, 8 * num_rollouts))
        # The return to learn at the last step of an episode is its reward, measured in those deviations
        is_last = storage.terminated[1:][tuple(index.T)]
        expected = np.array(ranks)[index[is_last][:, 1]] / np.std(returns)
        assert is_last.any()
        np.testing.assert_allclose(batch.returns[is_last], expected, rtol=1e-4, atol=1e-5)


def test_rewards_as_they_are_without_normalization():
    import probe_envs

    probe_envs.Fixed.made = 0
    args = Args(env_id="probe_envs:Fixed-v0", num_envs=3, num_steps=8, norm_reward=False)
    parts = make_parts(args)
    batch, index = collect(args, parts)
    is_last = parts[2].terminated[1:][tuple(index.T)]
    ranks = np.array([env.unwrapped.rank for env in parts[0].unwrapped.envs])
    np.testing.assert_allclose(batch.returns[is_last], ranks[index[is_last][:, 1]], rtol=1e-5, atol=1e-5)
    assert parts[1].return_stats.count == 0


def test_statistics_are_saved_and_frozen_in_evaluation(tmp_path, capsys):
    flags = "--env-id Pendulum-v1 --norm-obs --num-envs 4 --total-timesteps 2048 --eval-episodes 5"
    path = run(tmp_path, flags).path
    checkpoint = load(path / "checkpoint.pt")
    state, steps = checkpoint["agent"], checkpoint["progress"][1]
    assert state["normalize.count"].tolist() == [steps] * 3 and state["return_stats.count"].tolist() == [
        steps
    ]
    assert steps > 2000 and state["return_stats.var"] > 1
    assert abs(state["normalize.var"][2] - 1) > 0.1  # angular velocity: far from the initial variance
    before = (path / "checkpoint.pt").read_bytes()
    ppo.main(["--evaluate", str(path / "checkpoint.pt")])
    assert (path / "checkpoint.pt").read_bytes() == before


# Evaluation


def test_an_evaluation_scores_the_first_episode_of_each_environment(monkeypatch, tmp_path):
    """By the environments' own ledgers, with the most likely actions; a policy that learned nothing is not needed."""
    made, make_envs = [], ppo.make_envs
    monkeypatch.setattr(ppo, "make_envs", lambda *args: made.append(make_envs(*args)) or made[-1])
    args = Args(env_id="probe_envs:Ledger-v0", eval_episodes=30)
    agent = make_parts(args)[1]
    made.clear()
    scores = ppo.evaluate(agent, args, CPU, 2, tmp_path)
    ledgers = [env.unwrapped for env in made[0].unwrapped.envs]
    episodes = [ledger.episodes[0] for ledger in ledgers]
    assert all(e[-1][4] or e[-1][5] for e in episodes) and max(len(led.episodes) for led in ledgers) > 2
    returns, lengths = [sum(step[2] for step in e) for e in episodes], [len(e) for e in episodes]
    expected = {"return": np.mean(returns), "return_std": np.std(returns), "length": np.mean(lengths)}
    assert scores == pytest.approx({f"eval/episodic_{name}": x for name, x in expected.items()}, rel=1e-5)
    obs, actions = (np.array([step[i] for e in episodes for step in e]) for i in (0, 1))
    assert agent.get_policy_params(torch.tensor(obs)).argmax(-1).tolist() == actions.tolist()
    assert (
        ppo.evaluate(agent, args, CPU, 2, tmp_path) == scores != ppo.evaluate(agent, args, CPU, 3, tmp_path)
    )


def test_an_episode_without_end_is_cut(tmp_path):
    args = Args(
        env_id="probe_envs:HalfEndless-v0", eval_episodes=2
    )  # one of two consecutive seeds never ends
    scores = ppo.evaluate(make_parts(args)[1], args, CPU, 2, tmp_path)
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2


def test_the_best_policy_is_kept_and_ties_go_to_the_later(tmp_path, monkeypatch):
    scores, streams, evaluate = [1.0, 3.0, 3.0, 2.0, 2.0], [], ppo.evaluate

    def score(agent, args, device, stream, folder):
        streams.append(stream)
        return evaluate(agent, args, device, stream, folder) | {
            "eval/episodic_return": scores[len(streams) - 1]
        }

    monkeypatch.setattr(ppo, "evaluate", score)
    flags = "--num-envs 16 --num-steps 32 --total-timesteps 2048 --eval-episodes 2 --eval-interval 1"
    done = run(tmp_path, flags)
    best, last = (load(done.path / f"{name}.pt") for name in ("best", "checkpoint"))
    assert (best["progress"][0], last["progress"][0]) == (3, 5) and best["progress"][4:] == (3.0, 3.0)
    assert last["progress"][4:] == (3.0, 2.0)
    assert done.out.splitlines()[-1].endswith("return of best.pt 3.0, of the last policy 2.0")
    assert streams == [2] * 5


def test_evaluate_plays_other_episodes_than_those_that_chose_the_best(tmp_path, monkeypatch, capsys):
    path = run(tmp_path, "--num-envs 4 --num-steps 16 --total-timesteps 64 --eval-episodes 2").path
    streams, evaluate = [], ppo.evaluate
    monkeypatch.setattr(ppo, "evaluate", lambda *args: streams.append(args[3]) or evaluate(*args))
    for name in ("best.pt", "checkpoint.pt"):
        ppo.main(["--evaluate", str(path / name), "--eval-episodes", "4"])
    assert len(set(streams)) == 1 and streams[0] not in (0, 1, 2)


# Logging


def test_cleanrls_tags_are_all_there_and_the_learning_rate_falls(tmp_path):
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 1024 --eval-episodes 2 --eval-interval 2"
    scalars = read_scalars(run(tmp_path, flags).path)
    charts = "episodic_return episodic_length learning_rate SPS cpu_seconds".split()
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    evals = "episodic_return episodic_return_std episodic_length".split()
    names = [("charts", charts), ("losses", losses), ("eval", evals)]
    assert scalars.keys() == {f"{group}/{name}" for group, names in names for name in names}
    steps = [0, *(step for step, _ in scalars["charts/learning_rate"][:-1])]
    assert [x for _, x in scalars["charts/learning_rate"]] == pytest.approx(
        [4e-3 * (1 - s / 1024) for s in steps]
    )
    assert len(scalars["eval/episodic_return"]) == math.ceil(len(steps) / 2)


def test_the_learning_rate_that_is_logged_is_the_optimizers(tmp_path, monkeypatch):
    rates, update = [], ppo.update_minibatch

    def record(agent, optimizer, batch, args):
        rates.append(optimizer.param_groups[0]["lr"])
        return update(agent, optimizer, batch, args)

    monkeypatch.setattr(ppo, "update_minibatch", record)
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 0 --learning-rate 0.01"
    scalars = read_scalars(run(tmp_path / "falls", flags).path)
    assert rates[::20] == pytest.approx([x for _, x in scalars["charts/learning_rate"]])
    assert rates[0] == 0.01 and rates[-1] < 0.003 and rates == sorted(rates, reverse=True)
    rates.clear()
    run(tmp_path / "stays", flags, "--no-anneal-lr")
    assert set(rates) == {0.01}


def test_scalars_are_of_episodes_that_ended_since_the_last_one(tmp_path):
    """Episodes of 5 steps and a reset, rollouts of 4: nothing is logged where none ended, old ones are not repeated."""
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 2 --num-steps 4 --total-timesteps 46 --eval-episodes 1"
    scalars = read_scalars(run(tmp_path, flags).path)
    steps = [step for step, _ in scalars["charts/learning_rate"]]
    ended = [
        min(s for s in steps if s >= 10 * k) for k in range(1, 1 + steps[-1] // 10)
    ]  # real steps of both
    assert len(steps) > len(ended) > 2
    for tag in ("episodic_return", "episodic_length"):
        assert [step for step, _ in scalars[f"charts/{tag}"]] == ended, tag


def test_episodes_that_end_together_are_logged_as_their_mean(tmp_path):
    import probe_envs

    probe_envs.Fixed.made = 0
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 6 --total-timesteps 40 --eval-episodes 0"
    scalars = read_scalars(run(tmp_path, flags).path)
    # Rewards 0, 1, 2, 3 a step in four environments, or later ones if others were made to look at their spaces
    (first, second), lengths = scalars["charts/episodic_return"], scalars["charts/episodic_length"]
    assert first[1] == second[1] and (first[1] - 7.5) % 5 == 0 and (first[0], second[0]) == (20, 40)
    assert lengths == [(20, 5.0), (40, 5.0)]  # the step that resets counts nowhere


def test_seconds_of_evaluations_are_not_trainings(tmp_path, monkeypatch):
    evaluate, spent = ppo.evaluate, 0.3

    def slow(*args):
        start = time.process_time()
        while time.process_time() < start + spent:
            pass
        return evaluate(*args)

    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 1 --eval-interval 1"
    monkeypatch.setattr(ppo, "evaluate", slow)
    start = time.process_time()
    path = run(tmp_path, flags).path
    total = time.process_time() - start
    scalars = read_scalars(path)
    assert len(scalars["eval/episodic_return"]) == 5
    (*_, (_, seconds)) = scalars["charts/cpu_seconds"]
    assert 0 < seconds < total - spent * 5
    assert load(path / "checkpoint.pt")["progress"][3] == pytest.approx(seconds)


def test_evaluation_leaves_trainings_random_numbers_alone(tmp_path):
    """Even where the environments draw from the global generators."""
    import probe_envs

    found = []
    for interval in (1, 100):
        probe_envs.Fixed.made = 0
        flags = "--env-id probe_envs:GlobalNoise-v0 --num-envs 4 --num-steps 32 --total-timesteps 384 --eval-episodes 2"
        found.append(run(tmp_path / str(interval), flags, "--eval-interval", interval))
    many, few = (len(read_scalars(x.path)["eval/episodic_return"]) for x in found)
    assert many == 4 and few == 1
    assert all(torch.equal(x, found[1].weights[name]) for name, x in found[0].weights.items())


def test_losses_are_means_over_all_minibatches(tmp_path):
    """With frozen weights their mean is the loss of the whole rollout, which that of the last minibatch is not."""
    flags = "--env-id Pendulum-v1 --num-envs 4 --num-steps 16 --num-minibatches 8 --update-epochs 1 --no-anneal-lr"
    flags += " --learning-rate 1e-20 --total-timesteps 64 --eval-episodes 0 --seed 5"
    scalars = read_scalars(run(tmp_path, flags).path)
    args = Args(env_id="Pendulum-v1", num_envs=4, num_steps=16, seed=5)
    envs = ppo.make_envs(args, 4)
    ppo.seed_everything(5, 0)
    agent, storage = Agent(envs, norm_obs=False), ppo.RolloutStorage(envs, 16)
    storage.obs[-1], _ = envs.reset(seed=ppo.seed_everything(5, 1, 0, 0))
    ppo.seed_everything(5, 1, 1, 0)
    batch, _ = collect(args, (envs, agent, storage))
    expected = 0.5 * (batch.values - batch.returns).square().mean()
    assert scalars["losses/value_loss"][0][1] == pytest.approx(expected.item(), rel=1e-5)
    assert scalars["losses/approx_kl"][0][1] == pytest.approx(0.0, abs=1e-6)
    unexplained = (batch.returns - batch.values).var() / batch.returns.var()
    assert scalars["losses/explained_variance"][0][1] == pytest.approx(1 - unexplained.item(), rel=1e-4)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    counts, update = [], ppo.update_minibatch
    monkeypatch.setattr(ppo, "update_minibatch", lambda *a: (counts.append(1), update(*a))[1])
    flags = "--env-id Pendulum-v1 --num-envs 8 --num-steps 32 --total-timesteps 512 --eval-episodes 0"
    for name, more in (("all", ()), ("stopped", ("--target-kl", "1e-9"))):
        counts.clear()
        run(tmp_path / name, flags, *more)
        assert len(counts) == 2 * 4 * (5 if name == "all" else 1)


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_what_is_not_finite_ends_the_run_with_one_line(tmp_path, capsys, where):
    """That names the step and the environment. The checkpoint of before stays."""
    flags = f"--env-id probe_envs:NotFinite{where}-v0 --num-envs 2 --num-steps 16 --eval-episodes 0 --run-dir"
    with pytest.raises(SystemExit) as stop:
        ppo.main([*flags.split(), str(tmp_path)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stop.value.code == 2 and len(lines) == 1
    words = f"ppo.py: error: probe_envs:NotFinite{where}-v0: observations, rewards or losses are not finite at step 28"
    assert lines[0].endswith(words)
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# Learning


@pytest.mark.slow
def test_cartpole_ends_with_what_it_learned(tmp_path):
    """Seeds that were not used to choose the defaults: solved at the end, by the last policy itself."""
    found = []
    for seed in range(501, 505):
        done = run(tmp_path / str(seed), f"--seed {seed}")
        found.append(
            (
                read_scalars(done.path)["eval/episodic_return"][-1][1],
                load(done.path / "best.pt")["progress"][4],
            )
        )
    assert min(found) >= (475.0, 475.0), found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_pendulum_is_learned_with_normalization(tmp_path, seed):
    """Seeds that no setting was chosen on; a random policy gets about -1200, a good one -150 to -250."""
    flags = f"--env-id Pendulum-v1 --norm-obs --total-timesteps 300000 --seed {seed}"
    assert read_scalars(run(tmp_path, flags).path)["eval/episodic_return"][-1][1] > -300


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("seed", [1, 2])
def test_halfcheetah_starts_to_run(tmp_path, seed):
    """A tenth of the full run: a random policy gets about -280."""
    flags = "--env-id HalfCheetah-v5 --norm-obs --total-timesteps 100000 --num-envs 8 --num-steps 256"
    flags += " --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95"
    flags += f" --eval-episodes 5 --seed {seed}"
    assert read_scalars(run(tmp_path, flags).path)["eval/episodic_return"][-1][1] > 300
