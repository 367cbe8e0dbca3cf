"""PPO against brute force, closed forms, float64 and its own specification."""

import copy
import math
import re
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import ROOT, read_result, read_scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal, kl_divergence

from algos import ppo
from algos.ppo import Agent, Args, compute_gae, ppo_loss
from envs_shared.gym_tasks import scores as gym_scores
from envs_shared.gym_tasks.normalization import BoxUnits, RewardScaler, RunningMeanStd

BOX, DISCRETE = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
MULTI = gym.spaces.MultiDiscrete([2, 5, 3])
COLUMNS = ("obs", "actions", "log_probs", "values", "advantages", "returns", "valid", "policy_params")


CPU = torch.device("cpu")


def make_trained_parts(args, seed=0):
    """Environments, agent, storage and reward scaler as `train` makes them."""
    torch.manual_seed(seed)
    envs = ppo.make_envs(args, args.num_envs, seed, vectorization=args.vectorization)
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs)
    storage = ppo.RolloutStorage(envs, agent, args.num_steps, CPU)
    return envs, agent, storage, RewardScaler(args.num_envs, args.gamma)


def collect(args, parts):
    """A rollout of `parts` and what the update gets of it, [T, B, ...] by name."""
    envs, agent, storage, scaler = parts
    ppo.collect_rollout(agent, agent.sample, envs, storage)
    ppo.compute_targets(agent, storage, scaler, args)
    return {name: x.unflatten(0, (args.num_steps, args.num_envs)) for name, x in storage.rollout.items()}


def make_minibatch(agent, num_rows=12, obs_dim=4, seed=0):
    """Random rows as `update_minibatch` gathers them, on-policy for `agent`."""
    g = torch.Generator().manual_seed(seed)
    dtype = next(agent.parameters()).dtype
    obs = torch.randn(num_rows, obs_dim, generator=g, dtype=dtype)
    with torch.no_grad():
        params = agent.get_policy_params(obs)
        actions = agent.sample(obs)
        log_probs = agent.get_distribution(params).log_prob(actions).sum(-1)
        values = agent.get_value(obs)
    advantages, noise = torch.randn(2, num_rows, generator=g, dtype=dtype)
    valid = torch.ones(num_rows, dtype=dtype)
    return dict(
        zip(
            COLUMNS, (obs, actions, log_probs, values, advantages, values + noise, valid, params), strict=True
        )
    )


def gradients(agent, minibatch, args):
    """Flat gradient of the loss on `minibatch`."""
    agent.zero_grad()
    ppo_loss(agent, minibatch, minibatch["valid"].sum(), args)[0].backward()
    return torch.cat([p.grad.flatten() for p in agent.parameters()])


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
    same_step=st.booleans(),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_gae_equals_brute_force_per_episode(seed, num_steps, p_end, same_step, gamma, lam):
    rng = np.random.default_rng(seed)
    num_envs = 3
    terminated, truncated = rng.random((2, num_steps, num_envs)) < p_end  # both at once happens too
    prev_done = rng.random(num_envs) < p_end
    valid = np.ones((num_steps, num_envs), bool)
    if not same_step:  # a step after a done only resets: no flags, no reward
        for t in range(num_steps):
            valid[t] = ~(prev_done if t == 0 else terminated[t - 1] | truncated[t - 1])
            terminated[t] &= valid[t]
            truncated[t] &= valid[t]
    rewards = rng.normal(size=(num_steps, num_envs)) * valid
    values = rng.normal(size=(num_steps + 1, num_envs)) * 10
    final_values = rng.normal(size=(num_steps, num_envs)) * 10
    done = terminated | truncated
    next_values = np.where(done, final_values, values[1:]) if same_step else values[1:]

    tensors = [torch.tensor(x, dtype=torch.float32) for x in (rewards, values, final_values)]
    flags = torch.tensor(terminated), torch.tensor(truncated)
    advantages, returns = compute_gae(*tensors[:2], *flags, gamma, lam, tensors[2] if same_step else None)
    for b in range(num_envs):
        expected = brute_force_advantages(
            rewards[:, b], values[:-1, b], next_values[:, b], done[:, b], terminated[:, b], gamma, lam
        )
        rows = valid[:, b]
        np.testing.assert_allclose(advantages[rows, b], expected[rows], rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(returns[rows, b], (expected + values[:-1, b])[rows], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("env_id", ["Ledger-v0", "SameStepLedger-v0"])
def test_rollouts_hold_the_environments_own_transitions(env_id):
    """Two rollouts of real environments: rows, steps, episode returns and advantages as in the environments' ledger."""
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=5, num_steps=40, gamma=0.9, gae_lambda=0.8)
    parts = make_trained_parts(args)
    envs, agent, storage, _ = parts
    ledgers = [e.unwrapped for e in envs.envs.unwrapped.envs]
    position = [0] * 5  # transitions of each ledger already seen
    for _ in range(2):
        rollout = collect(args, parts)
        for b, ledger in enumerate(ledgers):
            rows = rollout["valid"][:, b] > 0
            truth = [step for episode in ledger.episodes for step in episode][position[b] :]
            position[b] += len(truth)
            obs, actions, rewards, next_obs, terminated, truncated = map(np.array, zip(*truth, strict=True))
            assert rows.sum() == len(truth)  # the step count is the environment's own
            np.testing.assert_array_equal(rollout["obs"][rows, b], obs)
            np.testing.assert_array_equal(rollout["actions"][rows, b, 0], actions)
            np.testing.assert_allclose(storage.rewards[rows, b], rewards, rtol=1e-6)
            with torch.no_grad():
                values, next_values = (
                    agent.get_value(torch.tensor(obs)),
                    agent.get_value(torch.tensor(next_obs)),
                )
            expected = brute_force_advantages(
                rewards, values.numpy(), next_values.numpy(), terminated | truncated, terminated, 0.9, 0.8
            )
            np.testing.assert_allclose(rollout["advantages"][rows, b], expected, rtol=1e-4, atol=1e-5)
            returns = rollout["returns"] - rollout["values"]
            np.testing.assert_allclose(returns[rows, b], expected, rtol=1e-4, atol=1e-5)
    finished = [
        sum(step[2] for step in e) for led in ledgers for e in led.episodes if e and (e[-1][4] or e[-1][5])
    ]
    seen = storage.episodes[storage.episodes[..., 1] > 0][:, 0]
    assert len(seen) > 10 and np.isin(np.round(seen, 4), np.round(np.float32(finished), 4)).all()


@pytest.mark.parametrize(
    ("env_id", "low", "high"),
    [("Endless-v0", 9.9, 10.1), ("SameStepEndless-v0", 9.9, 10.1), ("EndlessTerminating-v0", 3.0, 6.0)],
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id, low, high):
    """Truncation must not cut the value: V = 1 / (1 - 0.9) = 10. Termination after 10 steps gives far less."""
    flags = "--gamma 0.9 --num-envs 8 --num-steps 32 --total-timesteps 6400 --learning-rate 1e-2".split()
    ppo.main(["--env-id", f"probe_envs:{env_id}", *flags, "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    agent = Agent(1, gym.spaces.Discrete(2))
    agent.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True)["agent"])
    value = agent.get_value(torch.ones(1)).item()
    assert low < value < high
    iterations = torch.load(path / "checkpoint.pt", weights_only=True)["iteration"]
    resets = 0 if env_id.startswith("SameStep") else sum(t % 11 == 10 for t in range(32 * iterations))
    assert result["env_steps"] == 8 * (32 * iterations - resets)


# The objective


def float64_agent(space, obs_dim=4):
    torch.manual_seed(1)
    return Agent(obs_dim, space).double()


@pytest.mark.parametrize("space", [DISCRETE, MULTI, BOX])
def test_loss_equals_a_float64_loop(space):
    """Clipped and unclipped rows, clipped and unclipped values, entropy: eq. 7 and 9 written as a loop over rows."""
    agent = float64_agent(space)
    minibatch = make_minibatch(agent)
    with torch.no_grad():  # move the policy away, so that ratios differ from one and some are clipped
        for p in agent.parameters():
            p.add_(0.05 * torch.randn_like(p))
    args = Args(clip_coef=0.05, clip_vloss=True, ent_coef=0.3, vf_coef=0.7)
    loss, metrics = ppo_loss(agent, minibatch, minibatch["valid"].sum(), args)
    total, num_clipped = 0.0, 0
    for i in range(12):
        obs, action = minibatch["obs"][i], minibatch["actions"][i]
        out = agent.actor(obs)
        if space is BOX:
            parts = [Normal(out[a], agent.actor_logstd[a].exp()) for a in range(2)]
        else:
            sizes = [3] if space is DISCRETE else [2, 5, 3]
            parts = [Categorical(logits=out.reshape(len(sizes), -1)[k, :n]) for k, n in enumerate(sizes)]
        log_prob = sum(p.log_prob(a) for p, a in zip(parts, action, strict=True))
        ratio = math.exp((log_prob - minibatch["log_probs"][i]).item())
        num_clipped += abs(ratio - 1) > 0.05
        advantage, old, ret = (minibatch[k][i].item() for k in ("advantages", "values", "returns"))
        surrogate = min(ratio * advantage, min(max(ratio, 0.95), 1.05) * advantage)
        value = agent.critic(obs).item()
        near = old + min(max(value - old, -0.05), 0.05)
        value_error = max((value - ret) ** 2, (near - ret) ** 2) / 2
        total += -surrogate + 0.7 * value_error - 0.3 * sum(p.entropy() for p in parts).item()
    assert 0 < num_clipped < 12
    assert loss.item() == pytest.approx(total / 12, rel=1e-9)
    assert metrics[ppo.METRICS.index("clipfrac")].item() == pytest.approx(num_clipped / 12)


def test_gradient_at_the_old_policy_is_the_policy_gradient():
    agent = float64_agent(BOX)
    minibatch = make_minibatch(agent)
    found = gradients(agent, minibatch, Args(vf_coef=0.0))
    agent.zero_grad()
    pi = agent.get_distribution(agent.get_policy_params(minibatch["obs"]))
    (-pi.log_prob(minibatch["actions"]).sum(-1) * minibatch["advantages"]).mean().backward()
    expected = torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in agent.parameters()]
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("space", [MULTI, BOX])
def test_kl_penalty_is_equation_8(space):
    agent = float64_agent(space)
    minibatch = make_minibatch(agent)
    old = copy.deepcopy(agent)
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.1 * torch.randn_like(p))
    loss, _ = ppo_loss(agent, minibatch, torch.tensor(12.0), Args(kl_coef=0.5, vf_coef=0.0))
    pi, pi_old = (a.get_distribution(a.get_policy_params(minibatch["obs"])) for a in (agent, old))
    ratio = (pi.log_prob(minibatch["actions"]).sum(-1) - pi_old.log_prob(minibatch["actions"]).sum(-1)).exp()
    kl = kl_divergence(pi_old, pi).sum(-1)
    assert kl.mean() > 1e-3
    assert loss.item() == pytest.approx(-(ratio * minibatch["advantages"] - 0.5 * kl).mean().item(), rel=1e-9)


def test_rows_without_weight_change_nothing():
    """A reset row with absurd numbers leaves loss and gradient as if it were not there."""
    agent = float64_agent(BOX)
    minibatch = make_minibatch(agent)
    fewer = {k: v[:10] for k, v in minibatch.items()}
    minibatch["valid"][10:] = 0.0
    for name, value in (("log_probs", -2000.0), ("advantages", 1e6), ("returns", -1e6), ("values", 1e6)):
        minibatch[name][10:] = value
    count = minibatch["valid"].sum()
    normalized = ppo.normalize_advantages(minibatch["advantages"], minibatch["valid"], count)[:10]
    expected = (fewer["advantages"] - fewer["advantages"].mean()) / fewer["advantages"].std(correction=0)
    torch.testing.assert_close(normalized, expected, rtol=1e-6, atol=1e-6)
    args = Args(clip_vloss=True, ent_coef=0.1)
    torch.testing.assert_close(gradients(agent, minibatch, args), gradients(agent, fewer, args))
    found, expected = (ppo_loss(agent, m, m["valid"].sum(), args)[1] for m in (minibatch, fewer))
    torch.testing.assert_close(found, expected)


def test_minibatches_of_one_row_stay_finite_and_learn(tmp_path):
    one = torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor(1.0)
    assert ppo.normalize_advantages(*one).item() == 3.0
    flags = "--num-envs 2 --num-steps 4 --num-minibatches 8 --update-epochs 2 --total-timesteps 64 --eval-episodes 2"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    state = torch.load(read_result(tmp_path)[0] / "checkpoint.pt", weights_only=True)["agent"]
    assert all(x.isfinite().all() for x in state.values())


def test_explained_variance_counts_valid_rows_only():
    rollout = {"values": torch.tensor([1.0, 2.0, 90.0]), "returns": torch.tensor([1.5, 3.5, -7.0])}
    found = ppo.explained_variance(rollout | {"valid": torch.tensor([1.0, 1.0, 0.0])})
    assert found == pytest.approx(1 - np.var([0.5, 1.5]) / np.var([1.5, 3.5]))
    assert not math.isfinite(
        ppo.explained_variance(rollout | {"returns": torch.ones(3), "valid": torch.ones(3)})
    )


# Action spaces


@pytest.mark.parametrize("space", [DISCRETE, MULTI])
def test_samples_follow_the_logits(space):
    torch.manual_seed(0)
    agent = Agent(2, space)
    obs = torch.randn(2).expand(20_000, 2)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
        actions = agent.sample(obs)
        probs = agent.get_distribution(agent.get_policy_params(obs[:1])).probs[0]
    sizes = [3] if space is DISCRETE else [2, 5, 3]
    for k, n in enumerate(sizes):
        frequency = torch.bincount(actions[:, k], minlength=probs.shape[-1]) / len(actions)
        assert frequency[n:].sum() == 0 and probs[k, n:].sum() == 0  # padding is never sampled
        np.testing.assert_allclose(frequency, probs[k], atol=4 * math.sqrt(0.25 / len(actions)))


def test_gaussian_samples_have_the_policys_mean_and_deviation():
    torch.manual_seed(0)
    agent = Agent(2, BOX)
    with torch.no_grad():
        agent.actor_logstd.copy_(torch.tensor([-1.0, 0.5]))
        obs = torch.randn(2).expand(50_000, 2)
        actions, mean = agent.sample(obs), agent.actor(obs[0])
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(actions.std(0), np.exp([-1.0, 0.5]), rtol=0.02)


@pytest.mark.parametrize(
    ("env_id", "optimum", "tolerance", "flags"),
    [
        ("Digits-v0", 2.0, 0.01, ""),
        ("SameStepShifted-v0", 1.0, 0.01, ""),
        ("Shifted-v0", 1.0, 0.01, "--num-steps 64"),
        ("Aim-v0", 0.0, 0.15, "--norm-obs"),  # a random policy gets about -1.5
        ("FarAim-v0", 0.0, 0.15, "--norm-obs"),  # in a box [2, 50], distances in half-widths
    ],
)
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, optimum, tolerance, flags):
    for seed in (11, 12):
        base = ["--env-id", f"probe_envs:{env_id}", "--total-timesteps", "4096"]
        ppo.main(
            [
                *base,
                "--num-envs",
                "16",
                "--num-steps",
                "32",
                *flags.split(),
                "--seed",
                str(seed),
                "--run-dir",
                str(tmp_path / str(seed)),
            ]
        )
        _, result = read_result(tmp_path / str(seed))
        assert result["metrics"]["eval/episodic_return"] == pytest.approx(optimum, abs=tolerance)


def test_box_actions_are_in_units_of_the_box_and_inside_it():
    """The environment asserts that its actions lie in the box; what is learned from are the policy's own numbers."""
    args = Args(env_id="probe_envs:FarAim-v0", num_envs=4, num_steps=16)
    parts = make_trained_parts(args)
    rollout = collect(args, parts)
    assert rollout["actions"].abs().max() > 1.0
    pi = Normal(parts[1].actor(rollout["obs"]), parts[1].actor_logstd.exp())
    torch.testing.assert_close(rollout["log_probs"], pi.log_prob(rollout["actions"]).sum(-1))
    units = BoxUnits(gym.spaces.Box(np.float32([2, -np.inf, 0]), np.float32([50, np.inf, np.inf])))
    actions = torch.tensor([[-1.0, -7.0, 3.0], [0.0, 0.5, -3.0], [1.5, 9.0, 0.0]])
    expected = torch.tensor([[2.0, -7.0, 3.0], [26.0, 0.5, 0.0], [50.0, 9.0, 0.0]])
    torch.testing.assert_close(units(actions), expected)
    space = gym.spaces.Box(np.float32([2, -3]), np.float32([50, 1]))
    agent = Agent(2, space)
    torch.testing.assert_close(agent.get_action(torch.zeros(5, 2)), torch.tensor([[26.0, -1.0]] * 5))


def test_what_cannot_be_filmed_is_told_before_training(tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        ppo.main(["--env-id", "probe_envs:Fixed-v0", "--capture-video", "--run-dir", str(tmp_path / "runs")])
    assert (
        error.value.code == 2 and "to be filmed" in capsys.readouterr().err and not list(tmp_path.iterdir())
    )


@pytest.mark.parametrize("vectorization", ["auto", "async"])
def test_wrappers_added_in_make_env_are_everywhere(tmp_path, monkeypatch, vectorization):
    """In training, in evaluation and in films; without any, the environment's own vector form stays in use."""
    assert type(ppo.make_envs(Args(), 2, 1).envs.unwrapped).__name__ == "CartPoleVectorEnv"
    monkeypatch.setattr(
        ppo, "make_env", lambda *args, **kwargs: gym.wrappers.TimeLimit(gym.make(*args, **kwargs), 7)
    )
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 64 --eval-episodes 2 --capture-video".split()
    ppo.main([*flags, "--vectorization", vectorization, "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    assert result["metrics"]["eval/episodic_length"] == 7
    assert {length for _, length in read_scalars(path)["charts/episodic_length"]} == {7.0}
    films = {
        film.parent.name for film in path.glob("videos_*/env0-episode-*.mp4") if film.stat().st_size > 1000
    }
    assert {"videos_final", f"videos_step_{result['env_steps']}"} <= films


# Normalization


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_running_statistics_equal_numpys_on_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    stats = RunningMeanStd((3,))
    kept = []
    for n in sizes:
        x, valid = rng.normal(50, 3, (n, 2, 3)), rng.random((n, 2)) < 0.7
        stats.update(torch.tensor(x), torch.tensor(valid))
        kept.append(x[valid])
    kept = np.concatenate(kept)
    if len(kept):
        np.testing.assert_allclose(stats.mean, kept.mean(0), rtol=1e-9)
        np.testing.assert_allclose(stats.var, kept.var(0), rtol=1e-6, atol=1e-9)
    assert stats.count == len(kept)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """The running return restarts after a done and carries over to the next rollout."""
    rewards, done = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[False], [True], [False]])
    scaler = RewardScaler(1, 0.5)
    scaler.running_return.fill_(10.0)
    scaled = scaler(rewards, done, torch.ones(3, 1))
    assert scaler.running_return.item() == 4.0
    returns = [6.0, 5.0, 4.0]
    np.testing.assert_allclose(scaled.flatten(), [1, 2, 4] / np.std(returns), rtol=1e-5)
    scaled = scaler(rewards, done, torch.ones(3, 1))
    np.testing.assert_allclose(scaled.flatten(), [1, 2, 4] / np.std([*returns, 3.0, 3.5, 4.0]), rtol=1e-5)
    other = RewardScaler(2, 0.5)
    other.load_state_dict(scaler.state_dict())  # another number of environments: their returns begin anew
    assert other.stats.mean == scaler.stats.mean and other.running_return.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("env_id", "period"), [("Fixed-v0", 6), ("SameStepFixed-v0", 5)])
def test_returns_that_scale_rewards_end_with_their_episodes(env_id, period):
    """In rollouts of an environment: episodes of five steps, with or without a row after each that only resets."""
    import probe_envs

    probe_envs.Fixed.made = 0
    args = ppo.Args(env_id=f"probe_envs:{env_id}", num_envs=3, num_steps=8, gamma=0.5, norm_reward=True)
    parts = make_trained_parts(args)
    ranks = []
    for num_rollouts in (1, 2, 3):
        rollout = collect(args, parts)
        ranks = ranks or parts[2].rewards[0].tolist()  # the reward of each step
        assert len(set(ranks)) == 3
        steps = [t % period for t in range(8 * num_rollouts) if t % period < 5]  # in the episode
        returns = [rank * sum(0.5**k for k in range(step + 1)) for rank in ranks for step in steps]
        stats = parts[3].stats
        assert stats.count.item() == len(returns) and stats.mean.item() == pytest.approx(
            np.mean(returns), rel=1e-5
        )
        assert stats.var.item() == pytest.approx(np.var(returns), rel=1e-5)
        assert rollout["valid"].sum() == 3 * sum(
            t % period < 5 for t in range(8 * num_rollouts - 8, 8 * num_rollouts)
        )


def test_statistics_are_saved_and_frozen_in_evaluation(tmp_path, capsys):
    flags = (
        "--env-id Pendulum-v1 --norm-obs --norm-reward --num-envs 4 --total-timesteps 2048 --eval-episodes 5"
    )
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
    state = checkpoint["agent"]
    assert state["normalize.count"].item() == pytest.approx(
        result["env_steps"], abs=0.5
    )  # rows that only reset aside
    assert result["env_steps"] > 2000 and checkpoint["reward_scaler"]["stats.var"] > 1
    assert abs(state["normalize.var"][2] - 1) > 0.1  # angular velocity: far from the initial variance
    capsys.readouterr()
    before = (path / "checkpoint.pt").read_bytes()
    ppo.main(["--evaluate", str(path / "checkpoint.pt")])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(printed["eval/episodic_return"]) == pytest.approx(
        result["metrics"]["eval/episodic_return"], abs=0.01
    )
    assert (path / "checkpoint.pt").read_bytes() == before


# Logging


def test_cleanrls_tags_are_all_there(tmp_path):
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 1024 --eval-episodes 2 --eval-interval 2"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    scalars = read_scalars(path)
    charts = "episodic_return episodic_length learning_rate SPS".split()
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    assert {f"charts/{x}" for x in charts} | {f"losses/{x}" for x in losses} <= scalars.keys()
    steps = [0, *(step for step, _ in scalars["charts/learning_rate"][:-1])]
    assert [v for _, v in scalars["charts/learning_rate"]] == pytest.approx(
        [4e-3 * (1 - s / 1024) for s in steps]
    )
    assert len(scalars["eval/episodic_return"]) == math.ceil(len(steps) / 2)
    assert scalars["charts/SPS"][-1][0] == result["env_steps"]


def test_scalars_are_of_episodes_that_ended_since_the_last_one(tmp_path):
    """Episodes of 5 steps and a reset, rollouts of 4: nothing is logged where none ended, old ones are not repeated."""
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 2 --num-steps 4 --total-timesteps 46 --eval-episodes 1"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    scalars = read_scalars(read_result(tmp_path)[0])
    steps = [step for step, _ in scalars["charts/learning_rate"]]
    ended = [
        min(s for s in steps if s >= 10 * k) for k in range(1, 1 + steps[-1] // 10)
    ]  # real steps of both
    assert len(steps) > len(ended) > 2
    for tag in ("episodic_return", "episodic_length", "return_last_20"):
        assert [step for step, _ in scalars[f"charts/{tag}"]] == ended, tag


def test_seconds_and_steps_of_evaluations_are_not_trainings(tmp_path, monkeypatch):
    """The clock of the curves stands still in an evaluation, that of result.json does not."""
    evaluate, spent = ppo.evaluate, 0.3

    def slow(*args):
        start = time.process_time()
        while time.process_time() < start + spent:
            pass
        return evaluate(*args)

    monkeypatch.setattr(ppo, "evaluate", slow)
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 1 --eval-interval 1".split()
    ppo.main([*flags, "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    scalars = read_scalars(path)
    num_evaluations = len(scalars["eval/episodic_return"])
    assert num_evaluations == 5
    for tag, total in (("cpu_seconds", result["cpu_seconds"]), ("wall_seconds", result["wall_seconds"])):
        assert total - scalars[f"charts/{tag}"][-1][1] > spent * num_evaluations


def test_evaluation_leaves_trainings_random_numbers_alone(tmp_path, monkeypatch):
    """Even where the environments draw from torch's generator."""
    play, ends = ppo.play_episodes, []
    monkeypatch.setattr(ppo, "play_episodes", lambda *args: play(*args) if torch.rand(5).sum() else None)
    for interval in ("1", "100"):
        flags = "--num-envs 4 --num-steps 32 --total-timesteps 384 --eval-episodes 1 --eval-interval".split()
        ppo.main([*flags, interval, "--run-dir", str(tmp_path / interval)])
        ends.append(
            torch.load(read_result(tmp_path / interval)[0] / "checkpoint.pt", weights_only=True)["agent"]
        )
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


def test_the_best_policy_is_kept_and_ties_go_to_the_later(tmp_path, monkeypatch, capsys):
    """Scores by the clock: 1, 3, 3, 2, and 2 for the last policy."""
    scores, evaluate, streams = [1.0, 3.0, 3.0, 2.0, 2.0], ppo.evaluate, []

    def score(agent, args, device, num_episodes, stream, folder):
        streams.append((stream, num_episodes))
        found = evaluate(agent, args, device, num_episodes, stream, folder)
        return found | (
            {"eval/episodic_return": scores[len(streams) - 1]} if len(streams) <= len(scores) else {}
        )

    monkeypatch.setattr(ppo, "evaluate", score)
    flags = "--num-envs 16 --num-steps 32 --total-timesteps 2048 --eval-episodes 12 --eval-interval 1".split()
    ppo.main([*flags, "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    best, last = (torch.load(path / f"{name}.pt", weights_only=True) for name in ("best", "checkpoint"))
    assert (best["iteration"], last["iteration"]) == (3, 5) and best["best_return"] == 3.0
    assert (
        streams[:5] == [(3, 10)] * 5 and streams[5:] == [(4, 12)] * 2
    )  # fresh episodes at the end, for both
    monkeypatch.undo()
    capsys.readouterr()
    for name, kind in (("checkpoint", "eval"), ("best", "best")):
        ppo.main(["--evaluate", str(path / f"{name}.pt")])
        printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
        found = float(printed["eval/episodic_return"])
        assert found == pytest.approx(result["metrics"][f"{kind}/episodic_return"], abs=0.006)
    assert result["metrics"]["eval/episodic_return"] != result["metrics"]["best/episodic_return"]


def test_evaluations_by_default_are_about_ten_and_a_fifth_of_all_steps(tmp_path):
    flags = "--num-envs 16 --num-steps 32 --total-timesteps 20480 --eval-episodes 100".split()
    ppo.main([*flags, "--run-dir", str(tmp_path)])
    path, _ = read_result(tmp_path)
    steps = [step for step, _ in read_scalars(path)["eval/episodic_return"]]
    checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
    assert 3 <= len(steps) <= 10 and min(np.diff([0, *steps])) >= 0.08 * 20480
    assert (
        checkpoint["eval_steps"] <= checkpoint["global_step"] / 4 + 2 * 10 * 500
    )  # the last ones may go beyond


def test_episodes_that_end_together_are_logged_as_their_mean(tmp_path):
    import probe_envs

    probe_envs.Fixed.made = -2  # two are made to see what `make_env` adds
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 6 --total-timesteps 40 --eval-episodes 1"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    scalars = read_scalars(path)
    # rewards 0, 1, 2, 3 a step in four environments; 5 steps an episode, then one reset row that counts nowhere
    assert scalars["charts/episodic_return"] == [(20, 7.5), (40, 7.5)]
    assert scalars["charts/episodic_length"] == [(20, 5.0), (40, 5.0)]
    assert result["env_steps"] == 40


def test_losses_are_means_over_all_minibatches(tmp_path):
    """With frozen weights their mean is the loss of the whole rollout, which that of the last minibatch is not."""
    flags = "--env-id Pendulum-v1 --num-envs 4 --num-steps 16 --num-minibatches 8 --update-epochs 1 --no-anneal-lr"
    flags += " --learning-rate 1e-20 --total-timesteps 64 --eval-episodes 1 --seed 5"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    scalars = read_scalars(read_result(tmp_path)[0])
    args = Args(env_id="Pendulum-v1", num_envs=4, num_steps=16, seed=5)
    envs = ppo.make_envs(args, 4, ppo.seed_everything(5, 0, 0, 0))
    ppo.seed_everything(5, 1)
    agent = Agent(3, envs.single_action_space)
    ppo.seed_everything(5, 2, 0, 0)
    parts = envs, agent, ppo.RolloutStorage(envs, agent, 16, CPU), RewardScaler(4, args.gamma)
    rollout = collect(args, parts)
    expected = 0.5 * (rollout["values"] - rollout["returns"]).square().mean()
    assert scalars["losses/value_loss"][0][1] == pytest.approx(expected.item(), rel=1e-5)
    assert scalars["losses/approx_kl"][0][1] == pytest.approx(0.0, abs=1e-6)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    counts = []
    update = ppo.update_minibatch
    monkeypatch.setattr(ppo, "update_minibatch", lambda *a: (counts.append(1), update(*a))[1])
    for name, flags in (("all", []), ("stopped", ["--target-kl", "1e-9"])):
        counts.clear()
        base = (
            "--env-id Pendulum-v1 --num-envs 8 --num-steps 32 --total-timesteps 512 --eval-episodes 1".split()
        )
        ppo.main([*base, *flags, "--run-dir", str(tmp_path / name)])
        assert len(counts) == 2 * 4 * (5 if name == "all" else 1)


# Bad input: one line that names the flag, exit code 2, nothing written


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id NoSuch-v0", "--env-id"),
        ("--env-id a_missing_module:Task-v0", "pip install a_missing_module"),
        ("--env-id probe_envs:Unsupporteddict-v0", "Dict observations"),
        ("--env-id probe_envs:Unsupportedimage-v0", "image observations"),
        ("--env-id Pendulum-v1 --vectorization torch", "--vectorization torch"),
        ("--num-envs 0", "--num-envs"),
        ("--num-steps -5", "--num-steps"),
        ("--total-timesteps 0", "--total-timesteps"),
        ("--num-envs 3 --num-steps 5 --num-minibatches 4", "--num-minibatches 4"),
        ("--update-epochs 0", "--update-epochs"),
        ("--learning-rate nan", "--learning-rate"),
        ("--gamma 1.5", "--gamma"),
        ("--gae-lambda -0.1", "--gae-lambda"),
        ("--clip-coef -1", "--clip-coef"),
        ("--target-kl 0", "--target-kl"),
        ("--env-id CartPole-v1 --num-envs 1000000000", "memory does not hold"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        ppo.main(flags.split())
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_environment_is_refused(tmp_path, capsys):
    ppo.main(
        [
            *"--num-envs 4 --num-steps 32 --total-timesteps 128 --eval-episodes 1".split(),
            "--run-dir",
            str(tmp_path),
        ]
    )
    path = str(read_result(tmp_path)[0] / "checkpoint.pt")
    for flags in (
        ["--resume", path, "--env-id", "Acrobot-v1"],
        ["--evaluate", path, "--env-id", "Acrobot-v1"],
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            ppo.main(flags)
        assert error.value.code == 2 and "trained with CartPole-v1" in capsys.readouterr().err


# Resume


@pytest.mark.parametrize(
    "flags",
    [
        "--env-id CartPole-v1",
        "--env-id CartPole-v1 --vectorization torch",
        "--env-id Pendulum-v1 --norm-obs --norm-reward",
        "--env-id probe_envs:SameStepLedger-v0 --eval-episodes 1",
        "--env-id FrozenLake-v1",
    ],
)
def test_resume_is_bit_equal(tmp_path, monkeypatch, flags):
    """2N iterations in one go against a run cut off after N and resumed in its folder; scalars and best.pt too."""
    base = [
        *flags.split(),
        "--num-envs",
        "4",
        "--num-steps",
        "32",
        "--total-timesteps",
        "1536",
        "--checkpoint-interval",
        "3",
    ]
    if "eval-episodes" not in flags:
        base += ["--eval-episodes", "2"]
    ppo.main([*base, "--run-dir", str(tmp_path / "whole")])
    save = ppo.save_checkpoint

    def save_and_die(path, args, progress, parts):
        save(path, args, progress, parts)
        if path.name == "checkpoint.pt" and progress["iteration"] == 6:
            raise RuntimeError("cut off")

    monkeypatch.setattr(ppo, "save_checkpoint", save_and_die)
    with pytest.raises(RuntimeError, match="cut off"):
        ppo.main([*base, "--run-dir", str(tmp_path / "cut")])
    monkeypatch.undo()
    (cut,) = (tmp_path / "cut").glob("*/checkpoint.pt")
    ppo.main(["--resume", str(cut)])
    paths = [read_result(tmp_path / name)[0] for name in ("whole", "cut")]
    for name in ("checkpoint.pt", "best.pt"):
        whole, resumed = (torch.load(path / name, weights_only=True) for path in paths)
        assert whole["iteration"] == resumed["iteration"] and whole["global_step"] == resumed["global_step"]
        assert whole.get("best_return") == resumed.get("best_return")
        for key, value in whole["agent"].items():
            assert torch.equal(value, resumed["agent"][key]), key


def test_a_checkpoint_does_not_hold_the_rollout(tmp_path):
    """Not even through a view of its last row: this one has 590 KB."""
    flags = "--num-envs 4 --num-steps 4096 --total-timesteps 32 --update-epochs 1 --eval-episodes 1".split()
    ppo.main([*flags, "--run-dir", str(tmp_path)])
    path, _ = read_result(tmp_path)
    assert (path / "checkpoint.pt").stat().st_size < 300_000 and (path / "best.pt").stat().st_size < 100_000


def test_environments_that_cannot_be_saved_restart_and_say_so(tmp_path, capsys):
    flags = (
        "--env-id probe_envs:Opaque-v0 --num-envs 4 --num-steps 32 --total-timesteps 128 --eval-episodes 1"
    )
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path = read_result(tmp_path)[0] / "checkpoint.pt"
    capsys.readouterr()
    ppo.main(["--resume", str(path), "--total-timesteps", "512"])
    assert "episodes start anew" in capsys.readouterr().out
    assert read_result(tmp_path)[1]["env_steps"] >= 512


def test_episodes_without_end_are_cut_off_in_evaluation(tmp_path, monkeypatch, capsys):
    """Without a time limit an evaluation must still end, and the trained weights are safe before it starts."""
    assert gym_scores.MAX_STEPS == 10_000
    monkeypatch.setattr(gym_scores, "MAX_STEPS", 500)
    flags = (
        "--env-id probe_envs:NoLimit-v0 --num-envs 2 --num-steps 32 --total-timesteps 64 --eval-episodes 2"
    )
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    metrics = read_result(tmp_path)[1]["metrics"]
    assert metrics["eval/episodic_return"] == metrics["eval/episodic_length"] == 500
    assert "2 episodes were cut off" in capsys.readouterr().out


def test_losses_that_are_not_finite_stop_the_run(tmp_path):
    flags = (
        "--env-id probe_envs:Broken-v0 --num-envs 2 --num-steps 32 --total-timesteps 1024 --eval-episodes 2"
    )
    with pytest.raises(SystemExit, match="no longer finite"):
        ppo.main([*flags.split(), "--run-dir", str(tmp_path)])


def test_rewards_of_reset_rows_stay_out_of_reward_normalization():
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, num_steps=20, norm_reward=True)
    stats = []
    for noise in (0.0, 1e6):
        envs, agent, storage, scaler = make_trained_parts(args)
        ppo.collect_rollout(agent, agent.sample, envs, storage)
        done = (storage.terminated + storage.truncated)[1:] > 0
        storage.rewards[1:][done[:-1]] += noise  # a reset row may carry any reward
        ppo.compute_targets(agent, storage, scaler, args)
        stats.append(scaler.stats.var.item())
    assert done[:-1].any() and stats[0] == stats[1]


# Compiled and captured paths


@pytest.mark.slow
def test_compiled_loss_equals_eager():
    for space in (MULTI, BOX):
        torch.manual_seed(0)
        agent = Agent(4, space)
        minibatch = make_minibatch(agent, num_rows=32)
        count, args = torch.tensor(32.0), Args(ent_coef=0.1, clip_vloss=True)
        results = []
        for loss_fn in (ppo_loss, torch.compile(ppo_loss)):
            agent.zero_grad()
            loss, metrics = loss_fn(agent, minibatch, count, args)
            loss.backward()
            results.append([loss.detach(), metrics, *(p.grad.clone() for p in agent.parameters())])
        for eager, compiled in zip(*results, strict=True):
            torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vectorization", ["torch", "auto"])
def test_cuda_graphs_equal_eager(tmp_path, vectorization):
    states = []
    for graphs in ("--cuda-graphs", "--no-cuda-graphs"):
        flags = [
            "--vectorization",
            vectorization,
            graphs,
            "--total-timesteps",
            "8192",
            "--eval-episodes",
            "4",
        ]
        ppo.main([*flags, "--run-dir", str(tmp_path / graphs)])
        path, _ = read_result(tmp_path / graphs)
        states.append(torch.load(path / "checkpoint.pt", weights_only=True, map_location="cpu")["agent"])
    for name, eager in states[1].items():
        torch.testing.assert_close(states[0][name], eager, rtol=1e-3, atol=1e-4)


# Learning


def test_the_lines_of_the_page_act_with_a_trained_policy(tmp_path, monkeypatch):
    """docs/ppo.md, "The policy in your own code", as it stands there, in an episode of the user's own."""
    flags = "--num-envs 16 --num-steps 32 --total-timesteps 20480 --eval-episodes 10".split()
    ppo.main([*flags, "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ppo.md").read_text(), re.S)
    monkeypatch.syspath_prepend(ROOT / "algos")
    names = {}
    exec(code.replace("runs/.../best.pt", str(path / "best.pt")), names)
    env, agent, steps = names["env"], names["agent"], 0
    assert names["action"].shape == (1,)
    obs, over = env.reset(seed=1)[0], False
    while not over:
        obs, _, terminated, truncated, _ = env.step(agent.get_action(torch.from_numpy(obs)).item())
        steps, over = steps + 1, terminated or truncated
    assert steps > 100 and result["metrics"]["best/episodic_return"] > 100  # a random policy lasts 22 steps


@pytest.mark.slow
def test_cartpole_ends_with_what_it_learned(tmp_path):
    """Seeds that were not used to choose the defaults: solved at the end, by the last policy itself."""
    found = []
    for seed in range(501, 505):
        ppo.main(["--seed", str(seed), "--run-dir", str(tmp_path / str(seed))])
        metrics = read_result(tmp_path / str(seed))[1]["metrics"]
        found.append((metrics["eval/episodic_return"], metrics["best/episodic_return"]))
    assert min(found) >= (475.0, 475.0), found


@pytest.mark.slow
def test_pendulum_is_learned_with_normalization(tmp_path):
    """Two seeds that no setting was chosen on; a random policy gets about -1200, a good one -150 to -250."""
    for seed in (1, 2):
        flags = f"--env-id Pendulum-v1 --norm-obs --norm-reward --total-timesteps 300000 --seed {seed}"
        ppo.main([*flags.split(), "--run-dir", str(tmp_path / str(seed))])
        assert read_result(tmp_path / str(seed))[1]["metrics"]["eval/episodic_return"] > -300


@pytest.mark.slow
@pytest.mark.release
def test_halfcheetah_starts_to_run(tmp_path):
    """A tenth of the full run: a random policy gets about -280."""
    flags = "--env-id HalfCheetah-v5 --norm-obs --norm-reward --total-timesteps 100000 --num-envs 8 --num-steps 256"
    flags += " --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95"
    for seed in (1, 2):
        ppo.main(
            [
                *flags.split(),
                "--eval-episodes",
                "5",
                "--seed",
                str(seed),
                "--run-dir",
                str(tmp_path / str(seed)),
            ]
        )
        assert read_result(tmp_path / str(seed))[1]["metrics"]["eval/episodic_return"] > 300
