"""PPO against brute force, closed forms, float64 and its own specification."""

import importlib.util
import itertools
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
from torch.nn.utils import parameters_to_vector

from algos import ppo
from algos.ppo import Agent, Args, Batch, RunningMeanStd, compute_gae, ppo_loss

BOX, DISCRETE = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
CPU = torch.device("cpu")


def make_agent(space, obs_dim=4):
    """Make an agent in float64 for actions of this space."""
    torch.manual_seed(1)
    box = gym.spaces.Box(-np.inf, np.inf, (obs_dim,))
    envs = SimpleNamespace(single_action_space=space, single_observation_space=box)
    return Agent(envs, norm_obs=False).double()


def make_parts(args, seed=0):
    """Make environments, agent and storage as `train` does."""
    envs = ppo.make_envs(args, args.num_envs)
    ppo.seed_everything(seed)
    agent, storage = Agent(envs, args.norm_obs), ppo.RolloutStorage(envs, args.num_steps)
    storage.obs[-1], _ = envs.reset(seed=seed)
    return envs, agent, storage


def collect(args, parts):
    """Collect a rollout; return its training data, and (step, environment) of each row."""
    envs, agent, storage = parts
    ppo.collect_rollout(agent, envs, storage, args.gamma, CPU)
    return ppo.compute_batch(agent, storage, args, CPU), np.argwhere(storage.lengths[1:] > 0)


@torch.no_grad()
def make_batch(agent, num_rows=12):
    """Make random rows, on-policy for `agent`."""
    obs = torch.randn(num_rows, 4, dtype=torch.float64)
    params = agent.get_policy_params(obs)
    actions = agent.get_distribution(params).sample().double()
    log_probs = agent.get_distribution(params).log_prob(actions).sum(-1)
    values = agent.critic(obs).squeeze(-1)
    advantages, noise = torch.randn(2, num_rows, dtype=torch.float64)
    return Batch(obs, actions, params, log_probs, values, advantages, values + noise)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def run(folder, flags, *more):
    """Run ppo.py as a whole in `folder`."""
    return run_main(ppo, folder, *flags.split(), *more)


# Episode boundaries


def brute_force_advantages(rewards, values, next_values, terminated, truncated, gamma, lam):
    """Sum (gamma lambda)^k delta_{t+k} up to the end of the episode or of the data, straight from eq. 11."""
    advantages = []
    for t in range(len(rewards)):
        total = 0.0
        for k in range(t, len(rewards)):
            future = 0.0 if terminated[k] else next_values[k]
            total += (gamma * lam) ** (k - t) * (rewards[k] + gamma * future - values[k])
            if terminated[k] or truncated[k]:
                break
        advantages.append(total)
    return np.array(advantages)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 30), st.floats(0, 0.6), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_brute_force_per_episode(seed, num_steps, p_end, gamma, lam):
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, num_steps, 3)) < p_end  # both at once happens too
    rewards, values = rng.normal(size=(num_steps, 3)), rng.normal(size=(num_steps + 1, 3)) * 10
    data = map(torch.tensor, (rewards, values, terminated, truncated))
    advantages, returns = compute_gae(*data, gamma, lam)
    for b in range(3):
        data = (x[:, b] for x in (rewards, values[:-1], values[1:], terminated, truncated))
        expected = brute_force_advantages(*data, gamma, lam)
        np.testing.assert_allclose(advantages[:, b], expected, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(returns[:, b], expected + values[:-1, b], rtol=1e-5, atol=1e-4)


def test_rollouts_hold_the_environments_own_transitions():
    """Compare rows, sums of episodes and advantages of two rollouts with what the environments recorded."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=5, num_steps=40, gamma=0.9, gae_lambda=0.8)
    args.norm_reward = False
    parts = envs, agent, storage = make_parts(args)
    num_seen, num_finished = [0] * 5, 0
    for _ in range(2):
        batch, index = collect(args, parts)
        for b, env in enumerate(envs.unwrapped.envs):
            episodes = env.unwrapped.episodes
            truth = [step for episode in episodes for step in episode][num_seen[b] :]
            num_seen[b] += len(truth)
            obs, actions, rewards, next_obs, terminated, truncated = map(np.array, zip(*truth, strict=True))
            rows = index[:, 1] == b
            np.testing.assert_array_equal(batch.obs[rows], obs)
            np.testing.assert_array_equal(batch.actions[rows, 0], actions)
            with torch.no_grad():
                values, next_values = (agent.critic(torch.tensor(x))[:, 0].numpy() for x in (obs, next_obs))
            data = rewards, values, next_values, terminated, truncated
            expected = brute_force_advantages(*data, 0.9, 0.8)
            assert_close(batch.values[rows], values)
            assert_close(batch.advantages[rows], expected)
            assert_close(batch.returns[rows], expected + values)
            ends = np.flatnonzero(storage.terminated[1:, b] | storage.truncated[1:, b])
            finished = [[step[2] for step in e] for e in episodes if e and (e[-1][4] or e[-1][5])]
            finished = finished[-len(ends) :]
            discounted = [sum(0.9**k * r for k, r in enumerate(reversed(e))) for e in finished]
            assert storage.lengths[1:][ends, b].tolist() == [len(e) for e in finished]
            assert_close(storage.returns[1:][ends, b], [sum(e) for e in finished])
            assert_close(storage.discounted[1:][ends, b], discounted)
            num_finished += len(ends)
    assert num_finished > 20


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "probe_envs:FarAim-v0"])
def test_a_batch_is_on_policy(env_id):
    """Ratios are one at the first update, for actions as the policy drew them, whatever box they lie in."""
    args = Args(env_id=env_id, num_envs=4, num_steps=40, norm_obs=True)
    parts = make_parts(args)
    for _ in range(2):
        batch, index = collect(args, parts)
        _, metrics = ppo_loss(parts[1], batch, args)
        assert metrics[ppo.METRICS.index("approx_kl")].abs().max() < 1e-5
        assert torch.equal(batch.actions, torch.tensor(parts[2].actions[:-1][tuple(index.T)]))
    assert 1 <= batch.actions.abs().max() < 6


def test_value_of_an_endless_task_with_a_time_limit(tmp_path):
    """Truncation must not cut the value: V = 1 / (1 - 0.9) = 10. Termination after 10 steps gives 6 at most."""
    flags = "--gamma 0.9 --num-envs 8 --num-steps 32 --total-timesteps 6400 --learning-rate 1e-2"
    flags += " --no-norm-reward --eval-episodes 0 --env-id probe_envs:Endless-v0"
    checkpoint = load(run(tmp_path, flags).path / "checkpoint.pt")
    agent = make_agent(gym.spaces.Discrete(2), obs_dim=1).float()
    agent.load_state_dict(checkpoint["agent"])
    assert agent.critic(torch.ones(1)).item() == pytest.approx(10, abs=0.1)
    iterations, steps, *_ = checkpoint["progress"]
    assert steps == 8 * sum(t % 11 < 10 for t in range(32 * iterations))  # reset steps do not count


# The objective


@pytest.mark.parametrize("space", [DISCRETE, BOX])
@pytest.mark.parametrize(("clip_vloss", "kl_coef"), [(False, 0.0), (True, 0.0), (False, 0.5)])
def test_loss_equals_a_float64_loop(space, clip_vloss, kl_coef):
    """Write eq. 7 to 9 as a loop over rows, some with a clipped ratio and some with a clipped value."""
    agent = make_agent(space)
    batch = make_batch(agent)
    with torch.no_grad():
        for x in agent.parameters():  # so that ratios differ from one
            x += 0.05 * torch.randn_like(x)
    args = Args(clip_coef=0.05, clip_vloss=clip_vloss, ent_coef=0.3, vf_coef=0.7, kl_coef=kl_coef)
    losses, metrics = ppo_loss(agent, batch, args)
    num_clipped, num_clipped_values = 0, 0
    for i, row in enumerate(Batch(*rows) for rows in zip(*batch, strict=True)):
        if space is BOX:
            pi = Normal(agent.actor(row.obs), agent.actor_logstd.exp())
            pi_old = Normal(row.policy_params[:2], row.policy_params[2:].exp())
        else:
            pi, pi_old = Categorical(logits=agent.actor(row.obs)), Categorical(logits=row.policy_params)
        log_ratio = (pi.log_prob(row.actions).sum() - row.log_probs).item()
        ratio, old, advantage, target = math.exp(log_ratio), *map(float, row[4:])
        policy_loss = -min(ratio * advantage, min(max(ratio, 0.95), 1.05) * advantage)
        if kl_coef:
            policy_loss = 0.5 * kl_divergence(pi_old, pi).sum().item() - ratio * advantage
        value = agent.critic(row.obs).item()
        value_loss = (value - target) ** 2 / 2
        if clip_vloss:
            near_loss = (old + min(max(value - old, -0.05), 0.05) - target) ** 2 / 2
            num_clipped_values += near_loss > value_loss
            value_loss = max(value_loss, near_loss)
        entropy = pi.entropy().sum().item()
        is_clipped = float(abs(ratio - 1) > 0.05)
        num_clipped += is_clipped
        assert losses[i].item() == pytest.approx(policy_loss + 0.7 * value_loss - 0.3 * entropy, rel=1e-9)
        expected = [value_loss, policy_loss, entropy, -log_ratio, ratio - 1 - log_ratio, is_clipped]
        assert metrics[:, i].tolist() == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert 0 < num_clipped < 12 and (not clip_vloss or 0 < num_clipped_values < 12)


@pytest.mark.parametrize(("norm_adv", "max_grad_norm"), [(True, 1e9), (False, 1e9), (True, 0.01)])
def test_a_step_is_the_policy_gradient_at_the_old_policy(norm_adv, max_grad_norm):
    """With normalized advantages if they are asked for, and not further than the largest norm."""
    args, agent = Args(norm_adv=norm_adv, max_grad_norm=max_grad_norm), make_agent(BOX)
    batch = make_batch(agent)
    advantages, values = batch.advantages, agent.critic(batch.obs).squeeze(-1)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    log_probs = agent.get_distribution(agent.get_policy_params(batch.obs)).log_prob(batch.actions).sum(-1)
    loss = -log_probs * advantages + args.vf_coef * (values - batch.returns).square() / 2
    gradients = torch.autograd.grad(loss.mean(), [*agent.parameters()])
    gradient, before = parameters_to_vector(gradients), parameters_to_vector(agent.parameters())
    _, metrics = ppo_loss(agent, batch._replace(advantages=advantages), args)
    found = ppo.update_minibatch(agent, torch.optim.SGD(agent.parameters(), 1.0), batch, args)
    step = before - parameters_to_vector(agent.parameters())
    torch.testing.assert_close(step, gradient * min(1, max_grad_norm / gradient.norm()), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found, metrics.mean(1), rtol=1e-6, atol=1e-9)


def test_minibatches_of_one_row_or_none_stay_finite(tmp_path):
    flags = "--num-envs 2 --num-steps 4 --num-minibatches 9 --update-epochs 2 --total-timesteps 64 --eval-episodes 2"
    assert all(x.isfinite().all() for x in run(tmp_path, flags).weights.values())


# Action and observation spaces


def test_actions_are_drawn_from_the_policy():
    """Compare frequencies with a softmax, then means and standard deviations with those of a Gaussian."""
    found, biases = [], (torch.tensor([1.0, -1.0, 0.5]), torch.tensor([0.3, -2.0]))
    for env_id, bias in zip(("Shifted-v0", "Aim-v0"), biases, strict=True):
        args = Args(env_id=f"probe_envs:{env_id}", num_envs=50, num_steps=400)
        envs, agent, storage = make_parts(args)
        agent.actor[-1].weight.data.zero_()  # so that its biases alone set the policy
        agent.actor[-1].bias.data.copy_(bias)
        if agent.is_continuous:
            agent.actor_logstd.data.copy_(torch.tensor([-1.0, 0.5]))
        ppo.collect_rollout(agent, envs, storage, 0.9, CPU)
        found.append(storage.actions[:-1].reshape(20_000, -1))
    frequency = np.bincount(found[0][:, 0].astype(int)) / 20_000
    np.testing.assert_allclose(frequency, biases[0].softmax(-1), atol=0.014)
    np.testing.assert_allclose(found[1].mean(0), biases[1], atol=0.05)
    np.testing.assert_allclose(found[1].std(0), np.exp([-1.0, 0.5]), rtol=0.03)


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


def test_observations_become_flat_and_discrete_ones_one_hot():
    """From their starts: Discrete(3, start=3) and MultiDiscrete([2, 3], start=[1, -1])."""
    found = []
    for env_id in ("Shifted-v0", "Sums-v0"):
        envs = ppo.make_envs(Args(env_id=f"probe_envs:{env_id}"), 20)
        obs, _ = envs.reset(seed=1)
        found += [obs, np.array([env.unwrapped.obs for env in envs.unwrapped.envs])]
    assert len(set(found[1])) == 3 and np.array_equal(found[0], np.eye(3)[found[1] - 3])
    first, second = found[3].T
    assert np.array_equal(found[2], np.concatenate((np.eye(2)[first - 1], np.eye(3)[second + 1]), 1))
    for env_id in ("Aim-v0", "Unsupporteddict-v0"):  # a Box [2, 1] and a Dict of one Box
        assert ppo.make_envs(Args(env_id=f"probe_envs:{env_id}"), 3).observation_space.shape == (3, 2)


def test_actions_are_in_units_of_their_space():
    def convert(space, actions):
        return make_agent(space).to_env(torch.tensor(actions)).tolist()

    bounded = gym.spaces.Box(np.float32([[2], [-3]]), np.float32([[50], [1]]))
    expected = [[[2.0], [-1.0]], [[38.0], [1.0]], [[2.0], [1.0]]]
    assert convert(bounded, [[-1.0, 0.0], [0.5, 7.0], [-2.0, 1.0]]) == expected
    half_bounded = gym.spaces.Box(np.float32([2, 0]), np.float32([50, np.inf]))
    assert convert(half_bounded, [[3.0, -1.0], [60.0, 99.0]]) == [[3, 0], [50, 99]]
    assert convert(gym.spaces.Discrete(3, start=-1), [[0], [1], [2]]) == [-1, 0, 1]


# Environments


@pytest.mark.parametrize("vectorization", ["auto", "sync", "async"])
def test_wrappers_of_a_user_count_in_training_evaluation_and_films(tmp_path, vectorization):
    """In a copy of the script that a user has edited."""
    text, old = (ROOT / "algos" / "ppo.py").read_text(), "wrappers = []"
    assert text.count(old) == 1
    path = tmp_path / "edited.py"
    path.write_text(text.replace(old, "wrappers = [lambda env: gym.wrappers.TimeLimit(env, 7)]"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = edited = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(edited)
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 64 --eval-episodes 2 --vectorization".split()
    film = ["--capture-video"] if vectorization == "auto" else []
    done = run_main(edited, tmp_path / "runs", *flags, vectorization, *film)
    kind = "Async" if vectorization == "async" else "Sync"
    assert f"2 environments in {kind}VectorEnv" in done.out  # as its first line says
    scalars = read_scalars(done.path)
    for tag in ("eval/episodic_length", "charts/episodic_length"):
        assert {length for _, length in scalars[tag]} == {7.0}
    films = {x.parent.name for x in done.path.glob("videos_*/*.mp4") if x.stat().st_size > 1000}
    assert films == {f"videos_{step}" for step, _ in scalars["eval/episodic_length"] if film}


def test_without_wrappers_the_tasks_own_vector_form_is_used_and_filmed(tmp_path):
    for flags, name in (
        ({}, "CartPoleVectorEnv"),
        ({"vectorization": "sync"}, "SyncVectorEnv"),
        ({"env_id": "Pendulum-v1"}, "SyncVectorEnv"),
    ):
        envs = ppo.make_envs(Args(**flags), 2)
        assert type(envs.unwrapped).__name__ == name and envs.render_mode is None
    args = Args(capture_video=True, eval_episodes=2)
    agent = make_parts(args)[1]
    with torch.no_grad():  # a pole that falls soon, as it is pushed to one side only
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 9.0]))
    scores = ppo.evaluate(agent, args, CPU, 2, tmp_path / "films")
    (film,) = tmp_path.glob("films/*.mp4")
    assert film.stat().st_size > 1000 and 5 < scores["eval/episodic_length"] < 15


# Normalization


@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_running_statistics_equal_numpys_on_all_rows(sizes, seed):
    """What they normalize is cut at ten."""
    rng = np.random.default_rng(seed)
    stats, rows = RunningMeanStd(3), rng.normal(50, 3, (10 + sum(sizes), 3))
    for x in np.split(rows, np.cumsum([10, *sizes])[:-1]):
        stats.update(torch.tensor(x))
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-6, atol=1e-9)
    assert stats.count.tolist() == [len(rows)] * 3
    others = rng.normal(0, 100, (20, 3))
    for center in (True, False):
        expected = (others - center * rows.mean(0)) / rows.std(0)
        assert_close(stats(torch.tensor(others), center), expected.clip(-10, 10))


def test_observations_are_normalized_by_the_statistics_of_the_rollouts_before():
    """The statistics then add all steps that do not only reset."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=3, num_steps=20, norm_obs=True)
    parts = _, agent, storage = make_parts(args)
    seen = np.zeros((0, 3))
    for _ in range(3):
        mean, var = (seen.mean(0), seen.var(0)) if len(seen) else (0.0, 1.0)
        batch, index = collect(args, parts)
        raw = storage.obs[:-1][tuple(index.T)]
        assert_close(batch.obs, (raw - mean) / np.sqrt(var + 1e-8))
        seen = np.concatenate((seen, raw))
        np.testing.assert_allclose(agent.normalize.mean, seen.mean(0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(agent.normalize.var, seen.var(0), rtol=1e-6)
        assert agent.normalize.count[0] == len(seen)


@pytest.mark.parametrize("norm_reward", [True, False])
def test_rewards_are_divided_by_the_deviation_of_discounted_returns(norm_reward):
    """In environments with rewards 0, 1, 2, and episodes of five steps and a step that only resets."""
    args = Args(env_id="probe_envs:Fixed-v0", num_envs=3, num_steps=8, gamma=0.5, gae_lambda=1.0)
    args.norm_reward = norm_reward
    parts = envs, agent, storage = make_parts(args)
    ranks, stats = np.array([env.unwrapped.rank for env in envs.unwrapped.envs]), agent.return_stats
    for num_rollouts in (1, 2, 3):
        batch, index = collect(args, parts)
        steps = [t % 6 for t in range(8 * num_rollouts) if t % 6 < 5]  # in the episode
        returns = [rank * sum(0.5**k for k in range(step + 1)) for rank in ranks for step in steps]
        assert stats.count == len(returns) * norm_reward
        if norm_reward:
            assert stats.mean.item() == pytest.approx(np.mean(returns), rel=1e-5)
            assert stats.var.item() == pytest.approx(np.var(returns), rel=1e-5)
        # The return of the last step of an episode is its reward
        is_last = storage.terminated[1:][tuple(index.T)]
        assert is_last.any()
        scale = np.std(returns) if norm_reward else 1.0
        assert_close(batch.returns[is_last], ranks[index[is_last, 1]] / scale)


# Evaluation


def test_an_evaluation_scores_the_first_episode_of_each_environment(monkeypatch, tmp_path):
    """With the most likely actions, by the environments' records; the statistics of observations stay."""
    made, make_envs = [], ppo.make_envs
    args = Args(env_id="probe_envs:Ledger-v0", eval_episodes=30, norm_obs=True)
    parts = _, agent, _ = make_parts(args)
    collect(args, parts)  # so that there are statistics
    before = {name: x.clone() for name, x in agent.state_dict().items()}
    monkeypatch.setattr(ppo, "make_envs", lambda *args: made.append(make_envs(*args)) or made[-1])
    scores = ppo.evaluate(agent, args, CPU, 2, tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in agent.state_dict().items())
    ledgers = [env.unwrapped.episodes for env in made[0].unwrapped.envs]
    episodes = [ledger[0] for ledger in ledgers]
    assert all(e[-1][4] or e[-1][5] for e in episodes) and max(map(len, ledgers)) > 2
    returns, lengths = [sum(step[2] for step in e) for e in episodes], [len(e) for e in episodes]
    expected = {"return": np.mean(returns), "return_std": np.std(returns), "length": np.mean(lengths)}
    assert scores == pytest.approx({f"eval/episodic_{name}": x for name, x in expected.items()}, rel=1e-5)
    obs, actions = (np.array([step[i] for e in episodes for step in e]) for i in (0, 1))
    params = agent.get_policy_params(agent.normalize(torch.tensor(obs)))
    assert params.argmax(-1).tolist() == actions.tolist()
    again, other = (ppo.evaluate(agent, args, CPU, stream, tmp_path) for stream in (2, 3))
    assert again == scores != other


def test_an_episode_without_end_is_cut(tmp_path):
    """One of two consecutive seeds never ends, the other ends after four steps."""
    args = Args(env_id="probe_envs:HalfEndless-v0", eval_episodes=2)
    scores = ppo.evaluate(make_parts(args)[1], args, CPU, 2, tmp_path)
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2


def test_the_best_policy_is_kept_and_ties_go_to_the_later(tmp_path, monkeypatch, capsys):
    """--evaluate then plays other episodes than those that chose it."""
    scores, streams, evaluate = [1.0, 3.0, 3.0, 2.0, 2.0, 0.0], [], ppo.evaluate

    def score(agent, args, device, stream, folder):
        streams.append(stream)
        found = evaluate(agent, args, device, stream, folder)
        return found | {"eval/episodic_return": scores[len(streams) - 1]}

    monkeypatch.setattr(ppo, "evaluate", score)
    flags = "--num-envs 16 --num-steps 32 --total-timesteps 2048 --eval-episodes 2 --eval-interval 1"
    done = run(tmp_path, flags)
    best, last = (load(done.path / f"{name}.pt")["progress"] for name in ("best", "checkpoint"))
    assert (best[0], last[0]) == (3, 5) and (*best[4:], *last[4:]) == (3.0, 3.0, 3.0, 2.0)
    assert done.out.splitlines()[-1].endswith("return of best.pt 3.0, of the last policy 2.0")
    ppo.main(["--evaluate", str(done.path / "best.pt")])
    assert streams[:5] == [2] * 5 and streams[5] not in (0, 1, 2)


# Logging


@pytest.fixture
def rates(monkeypatch):
    """Learning rates of the optimizer, one for each call of update_minibatch."""
    found, update = [], ppo.update_minibatch
    get_rate = lambda agent, optimizer, *_: found.append(optimizer.param_groups[0]["lr"])  # noqa: E731
    monkeypatch.setattr(ppo, "update_minibatch", lambda *args: get_rate(*args) or update(*args))
    return found


def test_cleanrls_tags_are_all_there_and_the_learning_rate_falls(tmp_path, rates):
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 2 --eval-interval 2"
    scalars = read_scalars(run(tmp_path / "falls", flags).path)
    charts = "episodic_return episodic_length learning_rate SPS cpu_seconds".split()
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    evals = "episodic_return episodic_return_std episodic_length".split()
    names = [("charts", charts), ("losses", losses), ("eval", evals)]
    assert scalars.keys() == {f"{group}/{name}" for group, names in names for name in names}
    steps, logged = zip(*scalars["charts/learning_rate"], strict=True)
    assert logged == pytest.approx([4e-3 * (1 - step / 512) for step in (0, *steps[:-1])])
    assert rates[::20] == rates[19::20] == pytest.approx(logged)
    assert len(scalars["eval/episodic_return"]) == math.ceil(len(steps) / 2)
    rates.clear()
    run(tmp_path / "stays", flags, "--no-anneal-lr")
    assert set(rates) == {4e-3}


def test_target_kl_stops_the_epochs(tmp_path, rates):
    flags = "--env-id Pendulum-v1 --num-envs 8 --num-steps 32 --total-timesteps 512 --eval-episodes 0"
    for target_kl, num_epochs in (("None", 5), ("1e-9", 1)):
        rates.clear()
        run(tmp_path / target_kl, flags, "--target-kl", target_kl)
        assert len(rates) == 2 * 4 * num_epochs


def test_scalars_are_means_of_episodes_that_ended_since_the_last_one(tmp_path):
    """With episodes of 5 steps and a reset, and rollouts of 4: nothing is logged where none ended."""
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 2 --num-steps 4 --total-timesteps 46 --eval-episodes 1"
    scalars = read_scalars(run(tmp_path, flags).path)
    steps = [step for step, _ in scalars["charts/learning_rate"]]
    ended = [min(s for s in steps if s >= 10 * k) for k in range(1, 1 + steps[-1] // 10)]
    assert len(steps) > len(ended) > 2
    assert scalars["charts/episodic_length"] == [(step, 5.0) for step in ended]
    (value,) = {x for _, x in scalars["charts/episodic_return"]}
    assert (
        value % 5 == 2.5
    )  # rewards of 0 and 1 a step, or more if environments were made to see their spaces
    assert [step for step, _ in scalars["charts/episodic_return"]] == ended


def test_seconds_of_evaluations_are_not_trainings(tmp_path, monkeypatch):
    """On a clock that tells how often it was asked, which an evaluation does many times."""
    evaluate = ppo.evaluate
    monkeypatch.setattr(ppo.time, "process_time", itertools.count().__next__)
    monkeypatch.setattr(ppo, "evaluate", lambda *a: [time.process_time() for _ in range(99)] and evaluate(*a))
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 1 --eval-interval 1"
    path = run(tmp_path, flags).path
    assert [x for _, x in read_scalars(path)["charts/cpu_seconds"]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert load(path / "checkpoint.pt")["progress"][3] == 5.0


def test_losses_are_means_over_all_minibatches(tmp_path, monkeypatch):
    """With frozen weights their mean is the loss of the whole rollout."""
    batches, compute_batch = [], ppo.compute_batch
    monkeypatch.setattr(ppo, "compute_batch", lambda *a: batches.append(compute_batch(*a)) or batches[-1])
    flags = "--env-id Pendulum-v1 --num-envs 4 --num-steps 16 --num-minibatches 8 --update-epochs 1"
    flags += " --learning-rate 1e-20 --total-timesteps 64 --eval-episodes 0 --seed 5"
    scalars = read_scalars(run(tmp_path, flags).path)
    ((*_, values, _, returns),) = batches
    explained = 1 - (returns - values).var() / returns.var()
    value_loss = 0.5 * (values - returns).square().mean()
    assert scalars["losses/value_loss"][0][1] == pytest.approx(value_loss.item(), rel=1e-5)
    assert scalars["losses/explained_variance"][0][1] == pytest.approx(explained.item(), rel=1e-4)
    assert scalars["losses/approx_kl"][0][1] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_what_is_not_finite_ends_the_run_with_one_line(tmp_path, capsys, where):
    """It names the step and the environment. The earlier checkpoint stays."""
    flags = f"--env-id probe_envs:NotFinite{where}-v0 --num-envs 2 --num-steps 16 --eval-episodes 0 --run-dir"
    with pytest.raises(SystemExit) as stop:
        ppo.main([*flags.split(), str(tmp_path)])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    words = "observations, rewards or losses are not finite at step 28"
    assert line.endswith(f"ppo.py: error: probe_envs:NotFinite{where}-v0: {words}") and stop.value.code == 2
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# Learning

HALFCHEETAH = (  # a tenth of the full run
    "--env-id HalfCheetah-v5 --norm-obs --total-timesteps 100000 --num-envs 8 --num-steps 256 --num-minibatches 32"
    " --update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95 --eval-episodes 5"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "seeds", "least"),
    [
        ("", (501, 502, 503, 504), 475),  # CartPole is solved
        ("--env-id Pendulum-v1 --norm-obs --total-timesteps 300000", (1, 2), -300),  # at random -1200
        pytest.param(HALFCHEETAH, (1, 2), 300, marks=pytest.mark.release),  # at random -280
    ],
)
def test_tasks_are_learned_by_the_end(tmp_path, flags, seeds, least):
    """By the last policy itself, and with seeds that were not used to choose settings."""
    for seed in seeds:
        path = run(tmp_path / str(seed), f"{flags} --seed {seed}").path
        scores = read_scalars(path)["eval/episodic_return"][-1][1], load(path / "best.pt")["progress"][4]
        assert min(scores) >= least
