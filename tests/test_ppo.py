"""PPO against brute force, closed forms, float64 and its own specification."""

import copy
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import capture_stand_in, read_result, read_scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, Normal, kl_divergence

from algos import ppo
from algos.ppo import Agent, Args, compute_gae, ppo_loss

BOX, DISCRETE = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
MULTI = gym.spaces.MultiDiscrete([2, 5, 3])
COLUMNS = ("obs", "actions", "log_probs", "values", "advantages", "returns", "valid", "policy_params")


def make_trained_parts(args, seed=0):
    """Environments, agent and storage as `train` makes them."""
    torch.manual_seed(seed)
    envs, obs = ppo.make_envs(args, args.num_envs, seed, args.vectorization, torch.device("cpu"), None)
    agent = Agent(envs.obs_dim, envs.single_action_space, args.norm_obs)
    storage = ppo.RolloutStorage(envs, agent, args.num_steps, torch.device("cpu"))
    storage.obs[-1] = obs
    return envs, agent, storage


def make_minibatch(agent, num_rows=12, obs_dim=4, seed=0):
    """Random rows as `update_minibatch` gathers them, on-policy for `agent`."""
    g = torch.Generator().manual_seed(seed)
    dtype = next(agent.parameters()).dtype
    obs = torch.randn(num_rows, obs_dim, generator=g, dtype=dtype)
    with torch.no_grad():
        params = agent.get_policy_params(obs)
        actions = agent.act(obs)
        log_probs = agent.get_distribution(params).log_prob(actions).sum(-1)
        values = agent.get_value(obs)
    advantages, noise = torch.randn(2, num_rows, generator=g, dtype=dtype)
    valid = torch.ones(num_rows, dtype=dtype)
    return dict(zip(COLUMNS, (obs, actions, log_probs, values, advantages, values + noise, valid, params), strict=True))


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
    found_valid = ppo.find_valid(flags[0] | flags[1], torch.tensor(prev_done), same_step)
    assert np.array_equal(found_valid.numpy(), valid)
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
    envs, agent, storage = make_trained_parts(args)
    ledgers = [e.unwrapped for e in envs.envs.unwrapped.envs]
    position = [0] * 5  # transitions of each ledger already seen
    for _ in range(2):
        ppo.collect_rollout(agent.act, envs, storage)
        ppo.compute_targets(agent, storage, args)
        for b, ledger in enumerate(ledgers):
            rows = storage.valid[:, b] > 0
            truth = [step for episode in ledger.episodes for step in episode][position[b] :]
            position[b] += len(truth)
            obs, actions, rewards, next_obs, terminated, truncated = map(np.array, zip(*truth, strict=True))
            assert rows.sum() == len(truth)  # the step count is the environment's own
            np.testing.assert_array_equal(storage.obs[:-1][rows, b], obs)
            np.testing.assert_array_equal(storage.actions[rows, b, 0], actions)
            np.testing.assert_allclose(storage.rewards[rows, b], rewards, rtol=1e-6)
            with torch.no_grad():
                values, next_values = agent.get_value(torch.tensor(obs)), agent.get_value(torch.tensor(next_obs))
            expected = brute_force_advantages(
                rewards, values.numpy(), next_values.numpy(), terminated | truncated, terminated, 0.9, 0.8
            )
            np.testing.assert_allclose(storage.advantages[rows, b], expected, rtol=1e-4, atol=1e-5)
    finished = [sum(step[2] for step in e) for led in ledgers for e in led.episodes if e and (e[-1][4] or e[-1][5])]
    seen = storage.episodes[storage.episodes[..., 1] > 0][:, 0]
    assert len(seen) > 10 and np.isin(np.round(seen, 4), np.round(np.float32(finished), 4)).all()


@pytest.mark.parametrize(
    ("env_id", "low", "high"),
    [("Endless-v0", 9.8, 10.2), ("SameStepEndless-v0", 9.8, 10.2), ("EndlessTerminating-v0", 3.0, 6.0)],
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id, low, high):
    """Truncation must not cut the value: V = 1 / (1 - 0.9) = 10. Termination after 10 steps gives far less."""
    flags = "--gamma 0.9 --num-envs 8 --total-timesteps 19200 --eval-episodes 8 --learning-rate 3e-3".split()
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
def test_kl_penalty_is_equation_5(space):
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
    values, returns = torch.tensor([[1.0, 2.0, 90.0]]), torch.tensor([[1.5, 3.5, -7.0]])
    found = ppo.explained_variance(values, returns, torch.tensor([[1.0, 1.0, 0.0]]))
    assert found == pytest.approx(1 - np.var([0.5, 1.5]) / np.var([1.5, 3.5]))
    assert math.isnan(ppo.explained_variance(values, torch.ones(1, 3), torch.ones(1, 3)))


# Action spaces


@pytest.mark.parametrize("space", [DISCRETE, MULTI])
def test_samples_follow_the_logits(space):
    torch.manual_seed(0)
    agent = Agent(2, space)
    obs = torch.randn(2).expand(20_000, 2)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(100)
        actions = agent.act(obs)
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
        actions, mean = agent.act(obs), agent.actor(obs[0])
    np.testing.assert_allclose(actions.mean(0), mean, atol=0.03)
    np.testing.assert_allclose(actions.std(0), np.exp([-1.0, 0.5]), rtol=0.02)


@pytest.mark.parametrize(
    ("env_id", "optimum", "tolerance", "flags"),
    [
        ("Digits-v0", 2.0, 0.01, ""),
        ("SameStepShifted-v0", 1.0, 0.01, ""),
        ("Shifted-v0", 1.0, 0.01, "--num-steps 64"),
        ("Aim-v0", 0.0, 0.1, "--norm-obs --total-timesteps 20480"),  # a random policy gets about -1.5
    ],
)
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, optimum, tolerance, flags):
    for seed in (11, 12):
        base = ["--env-id", f"probe_envs:{env_id}", "--total-timesteps", "10240", "--eval-episodes", "200"]
        ppo.main([*base, *flags.split(), "--seed", str(seed), "--run-dir", str(tmp_path / str(seed))])
        _, result = read_result(tmp_path / str(seed))
        assert result["metrics"]["eval/episodic_return"] == pytest.approx(optimum, abs=tolerance)


def test_box_actions_are_clipped_for_the_environment_alone():
    args = Args(env_id="probe_envs:Aim-v0", num_envs=4, num_steps=16)
    envs, agent, storage = make_trained_parts(args)
    ppo.collect_rollout(agent.act, envs, storage)  # the environment asserts that its actions lie in the box
    assert storage.actions.abs().max() > 1.0
    ppo.compute_targets(agent, storage, args)
    pi = Normal(agent.actor(storage.obs[:-1]), agent.actor_logstd.exp())
    torch.testing.assert_close(storage.log_probs, pi.log_prob(storage.actions).sum(-1))


# Normalization


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_running_statistics_equal_numpys_on_all_rows(sizes, seed):
    rng = np.random.default_rng(seed)
    stats = ppo.RunningMeanStd((3,))
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


def test_discounted_sums_restart_after_a_done_and_carry_over():
    rewards, done = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[False], [True], [False]])
    start = torch.tensor([10.0])
    assert ppo.discount_rewards(rewards, done, start, 0.5).flatten().tolist() == [6.0, 5.0, 4.0]
    assert start.item() == 4.0


def test_statistics_are_saved_and_frozen_in_evaluation(tmp_path, capsys):
    flags = "--env-id Pendulum-v1 --norm-obs --norm-reward --num-envs 4 --total-timesteps 2048 --eval-episodes 5"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    state = torch.load(path / "checkpoint.pt", weights_only=True)["agent"]
    assert state["obs_stats.count"] > 2000 and state["return_stats.var"] > 1
    assert abs(state["obs_stats.var"][2] - 1) > 0.1  # angular velocity: far from the initial variance
    capsys.readouterr()
    before = (path / "checkpoint.pt").read_bytes()
    ppo.main(["--evaluate", str(path / "checkpoint.pt")])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(printed["eval/episodic_return"]) == pytest.approx(result["metrics"]["eval/episodic_return"], abs=0.01)
    assert (path / "checkpoint.pt").read_bytes() == before


# Logging


def test_cleanrls_tags_are_all_there(tmp_path):
    flags = "--num-envs 4 --total-timesteps 1024 --eval-episodes 2 --eval-interval 2"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    scalars = read_scalars(path)
    charts = "episodic_return episodic_length learning_rate SPS".split()
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance".split()
    assert {f"charts/{x}" for x in charts} | {f"losses/{x}" for x in losses} <= scalars.keys()
    steps = [0, *(step for step, _ in scalars["charts/learning_rate"][:-1])]
    assert [v for _, v in scalars["charts/learning_rate"]] == pytest.approx([4e-3 * (1 - s / 1024) for s in steps])
    assert len(scalars["eval/episodic_return"]) == math.ceil(len(steps) / 2)
    assert scalars["charts/SPS"][-1][0] == result["env_steps"]


def test_episodes_that_end_together_are_logged_as_their_mean(tmp_path):
    import probe_envs

    probe_envs.Fixed.made = 0
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
    envs, _ = ppo.make_envs(args, 4, 0, "auto", torch.device("cpu"), None)
    obs = envs.reset(ppo.seed_everything(5, 0, 0, 0))
    ppo.seed_everything(5)
    agent = Agent(3, envs.single_action_space)
    storage = ppo.RolloutStorage(envs, agent, 16, torch.device("cpu"))
    storage.obs[-1] = obs
    ppo.seed_everything(5, 2, 0, 0)
    ppo.collect_rollout(agent.act, envs, storage)
    ppo.compute_targets(agent, storage, args)
    expected = 0.5 * (storage.values[:-1] - storage.returns).square().mean()
    assert scalars["losses/value_loss"][0][1] == pytest.approx(expected.item(), rel=1e-5)
    assert scalars["losses/approx_kl"][0][1] == pytest.approx(0.0, abs=1e-6)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    counts = []
    update = ppo.update_minibatch
    monkeypatch.setattr(ppo, "update_minibatch", lambda *a: (counts.append(1), update(*a)))
    for name, flags in (("all", []), ("stopped", ["--target-kl", "1e-9"])):
        counts.clear()
        base = "--env-id Pendulum-v1 --num-envs 8 --total-timesteps 512 --eval-episodes 1".split()
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
        ("--vectorization torch --capture-video", "--capture-video"),
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
    ppo.main([*"--num-envs 4 --total-timesteps 128 --eval-episodes 1".split(), "--run-dir", str(tmp_path)])
    path = str(read_result(tmp_path)[0] / "checkpoint.pt")
    for flags in (["--resume", path, "--env-id", "Acrobot-v1"], ["--evaluate", path, "--env-id", "Acrobot-v1"]):
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
        "--env-id probe_envs:GlobalRandom-v0",
        "--env-id FrozenLake-v1",
    ],
)
def test_resume_is_bit_equal(tmp_path, monkeypatch, flags):
    """2N iterations in one go against a run cut off after N, resumed in a run folder of its own."""
    base = [*flags.split(), "--num-envs", "4", "--total-timesteps", "1536", "--checkpoint-interval", "3"]
    if "eval-episodes" not in flags:
        base += ["--eval-episodes", "2"]
    ppo.main([*base, "--run-dir", str(tmp_path / "whole")])
    save = ppo.save_checkpoint

    def save_and_die(path, checkpoint):
        save(path, checkpoint)
        if checkpoint["iteration"] == 6:
            raise RuntimeError("cut off")

    monkeypatch.setattr(ppo, "save_checkpoint", save_and_die)
    with pytest.raises(RuntimeError, match="cut off"):
        ppo.main([*base, "--run-dir", str(tmp_path / "cut")])
    monkeypatch.undo()
    (cut,) = (tmp_path / "cut").glob("*/checkpoint.pt")
    ppo.main(["--resume", str(cut), "--run-dir", str(tmp_path / "resumed")])
    ends = [torch.load(read_result(tmp_path / n)[0] / "checkpoint.pt", weights_only=True) for n in ("whole", "resumed")]
    assert ends[0]["iteration"] == ends[1]["iteration"] >= 12
    assert ends[0]["global_step"] == ends[1]["global_step"]
    for name, value in ends[0]["agent"].items():
        assert torch.equal(value, ends[1]["agent"][name]), name
    assert torch.load(cut, weights_only=True)["iteration"] == 6  # another --run-dir leaves the old folder alone


def test_environments_that_cannot_be_saved_restart_and_say_so(tmp_path, capsys):
    flags = "--env-id probe_envs:Opaque-v0 --num-envs 4 --total-timesteps 128 --eval-episodes 1"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path = read_result(tmp_path)[0] / "checkpoint.pt"
    capsys.readouterr()
    ppo.main(["--resume", str(path), "--total-timesteps", "512", "--run-dir", str(tmp_path / "more")])
    assert "start from a reset" in capsys.readouterr().out
    assert read_result(tmp_path / "more")[1]["env_steps"] >= 512


def test_episodes_without_end_are_cut_off_in_evaluation(tmp_path, capsys):
    """Without a time limit an evaluation must still end, and the trained weights are safe before it starts."""
    flags = "--env-id probe_envs:NoLimit-v0 --num-envs 2 --total-timesteps 64 --eval-episodes 2"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    metrics = read_result(tmp_path)[1]["metrics"]
    assert metrics["eval/episodic_return"] == metrics["eval/episodic_length"] == 10_000
    assert "2 episodes were cut off" in capsys.readouterr().out


def test_losses_that_are_not_finite_stop_the_run(tmp_path):
    flags = "--env-id probe_envs:Broken-v0 --num-envs 2 --total-timesteps 1024 --eval-episodes 2"
    with pytest.raises(SystemExit, match="no longer finite"):
        ppo.main([*flags.split(), "--run-dir", str(tmp_path)])


def test_rewards_of_reset_rows_stay_out_of_reward_normalization():
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, num_steps=20, norm_reward=True)
    stats = []
    for noise in (0.0, 1e6):
        envs, agent, storage = make_trained_parts(args)
        ppo.collect_rollout(agent.act, envs, storage)
        done = (storage.terminated + storage.truncated) > 0
        storage.rewards[1:][done[:-1]] += noise  # a reset row may carry any reward
        ppo.compute_targets(agent, storage, args)
        stats.append(agent.return_stats.var.item())
    assert done[:-1].any() and stats[0] == stats[1]


def test_video_of_environment_0(tmp_path):
    flags = "--num-envs 2 --total-timesteps 256 --eval-episodes 1 --capture-video"
    ppo.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, _ = read_result(tmp_path)
    videos = list(path.glob("videos_from_step_0/*.mp4"))
    assert {"env0-episode-0.mp4", "env0-episode-1.mp4"} <= {v.name for v in videos}
    assert all(v.stat().st_size > 1000 for v in videos)


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


@pytest.mark.parametrize("flags", ["--vectorization torch", "--env-id Pendulum-v1 --norm-obs --norm-reward"])
def test_capture_undoes_its_warm_up(tmp_path, monkeypatch, flags):
    """The captured path with a stand-in that warms up and undoes, on the CPU: the same weights as without capture.

    Fails if a tensor that a step changes is missing from the list that `train` hands to `capture_graph`.
    """
    monkeypatch.setattr(ppo, "capture_graph", capture_stand_in)
    ends = []
    for capture in (True, False):
        monkeypatch.setattr(ppo, "can_capture", lambda args, device, capture=capture: capture)
        base = "--num-envs 4 --total-timesteps 640 --eval-episodes 1".split()
        ppo.main([*base, *flags.split(), "--run-dir", str(tmp_path / str(capture))])
        path, _ = read_result(tmp_path / str(capture))
        ends.append(torch.load(path / "checkpoint.pt", weights_only=True)["agent"])
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vectorization", ["torch", "auto"])
def test_cuda_graphs_equal_eager(tmp_path, vectorization):
    states = []
    for graphs in ("--cuda-graphs", "--no-cuda-graphs"):
        flags = ["--vectorization", vectorization, graphs, "--total-timesteps", "8192", "--eval-episodes", "4"]
        ppo.main([*flags, "--run-dir", str(tmp_path / graphs)])
        path, _ = read_result(tmp_path / graphs)
        states.append(torch.load(path / "checkpoint.pt", weights_only=True, map_location="cpu")["agent"])
    for name, eager in states[1].items():
        torch.testing.assert_close(states[0][name], eager, rtol=1e-3, atol=1e-4)


# Learning


@pytest.mark.slow
def test_cartpole_is_solved_in_five_cpu_seconds(run_script, tmp_path):
    """Seeds 1 to 10, none of them used to choose the defaults."""
    solved, stays_solved = [], []
    for seed in range(1, 11):
        run = run_script("ppo", "--seed", seed, "--run-dir", tmp_path / str(seed))
        assert run.returncode == 0, run.stderr
        metrics = read_result(tmp_path / str(seed))[1]["metrics"]
        solved.append(metrics.get("solved_cpu_seconds", math.inf))
        stays_solved.append(metrics["eval/episodic_return"])
    print("CPU-seconds until solved", solved, "return of the final policy", stays_solved)
    assert sum(x <= 5.0 for x in solved) >= 9, solved
    assert sum(x >= 490.0 for x in stays_solved) >= 9, stays_solved


@pytest.mark.slow
def test_pendulum_is_learned_with_normalization(tmp_path):
    """Two seeds that no setting was chosen on; a random policy gets about -1200, a good one -150 to -250."""
    for seed in (1, 2):
        flags = f"--env-id Pendulum-v1 --norm-obs --norm-reward --total-timesteps 300000 --seed {seed}"
        ppo.main([*flags.split(), "--run-dir", str(tmp_path / str(seed))])
        assert read_result(tmp_path / str(seed))[1]["metrics"]["eval/episodic_return"] > -300


@pytest.mark.slow
def test_halfcheetah_starts_to_run(tmp_path):
    """A tenth of the full run: a random policy gets about -280."""
    flags = "--env-id HalfCheetah-v5 --norm-obs --norm-reward --total-timesteps 100000 --num-envs 8 --num-steps 256"
    flags += " --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --gamma 0.99 --gae-lambda 0.95"
    for seed in (1, 2):
        ppo.main([*flags.split(), "--eval-episodes", "5", "--seed", str(seed), "--run-dir", str(tmp_path / str(seed))])
        assert read_result(tmp_path / str(seed))[1]["metrics"]["eval/episodic_return"] > 300
