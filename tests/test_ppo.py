"""PPO against brute force, closed forms, float64 and its own specification."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from brute_force import assert_close, compare_rollout
from helpers import read_scalars
from scripts import load, run_main
from torch.distributions import Categorical, Normal
from torch.nn.utils import parameters_to_vector

from algos import ppo
from algos.ppo import Agent, Args, Batch, RunningMeanStd, ppo_loss

BOX, DISCRETE = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)
CPU = torch.device("cpu")
run = partial(run_main, ppo)


def make_agent(space):
    """Make an agent in float64 for actions of this space."""
    torch.manual_seed(1)
    box = gym.spaces.Box(-np.inf, np.inf, (4,))
    envs = SimpleNamespace(single_action_space=space, single_observation_space=box)
    return Agent(envs, norm_obs=False).double()


def make_parts(args):
    """Make environments, agent and storage as `train` does."""
    envs = ppo.make_envs(args, args.num_envs)
    ppo.seed_everything(0)
    agent, storage = Agent(envs, args.norm_obs), ppo.RolloutStorage(envs, args.num_steps)
    storage.obs[-1], _ = envs.reset(seed=0)
    return envs, agent, storage


def collect(args, parts):
    """Collect a rollout and compute its batch."""
    envs, agent, storage = parts
    ppo.collect_rollout(agent, partial(ppo.sample_actions, agent), envs, storage, args.gamma, CPU)
    return ppo.compute_batch(agent, storage, args, CPU)


@torch.no_grad()
def make_batch(agent, num_rows=12):
    """Make random rows, on-policy for `agent`."""
    obs = torch.randn(num_rows, 4, dtype=torch.float64)
    pi = agent.get_distribution(obs)
    actions = pi.sample().double()
    values = agent.critic(obs).squeeze(-1)
    advantages, noise = torch.randn(2, num_rows, dtype=torch.float64)
    return Batch(obs, actions, pi.log_prob(actions).sum(-1), values, advantages, values + noise)


# Rollouts and running statistics


@pytest.mark.parametrize("is_normalized", [False, True])
def test_rollouts_hold_the_environments_own_transitions(is_normalized):
    """Compare rows, sums of episodes, advantages and statistics with what the environments recorded.

    Observations are normalized by the statistics of the rollouts before, rewards by those of this one too.
    Ratios are one at the first update.
    """
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=5, num_steps=40, gamma=0.9, gae_lambda=0.8)
    args.norm_obs = args.norm_reward = is_normalized
    envs, agent, storage = parts = make_parts(args)
    center, scale, reward_scale, num_finished = 0.0, 1.0, 1.0, 0
    for _ in range(2):
        batch = collect(args, parts)
        _, metrics = ppo_loss(agent, batch, args)
        assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clipfrac"] == 0
        assert len(batch.obs) == (storage.lengths[1:] > 0).sum() < storage.lengths[1:].size
        episodes = [[e for e in env.unwrapped.episodes if e] for env in envs.unwrapped.envs]
        ledgers = [list(itertools.chain(*x)) for x in episodes]
        if is_normalized:
            rewards = [[step[2] for step in e] for ledger in episodes for e in ledger]
            starts = [e[: i + 1] for e in rewards for i in range(len(e))]
            reward_scale = np.std([sum(0.9**k * r for k, r in enumerate(reversed(e))) for e in starts])
        for b, steps in enumerate(ledgers):
            num_finished += compare_rollout(agent, storage, batch, b, steps, center, scale, reward_scale)
        if is_normalized:
            seen = np.array([step[0] for steps in ledgers for step in steps])
            center, scale = seen.mean(0), seen.std(0)
            assert_close(agent.normalize.mean, center)
            assert_close(agent.normalize.var, scale**2)
            assert agent.normalize.count == agent.return_stats.count == len(seen)
    assert num_finished > 20


@pytest.mark.parametrize(
    ("shape", "center", "deviation"),
    [((2, 3), 50, 3), ((), -1e12, 3), ((), 1.7e9, 0)],
)
def test_running_statistics_equal_numpys_on_all_rows(shape, center, deviation):
    """Also if no row or one is added, at first too, and if the numbers are large.

    Such as a Unix time or a northing in metres. What the statistics normalize is cut at ten.
    """
    rng = np.random.default_rng(1)
    stats, rows = RunningMeanStd(shape), rng.normal(center, deviation, (40, *shape))
    for x in np.split(rows, [0, 10, 10, 11, 25]):
        stats.update(torch.tensor(x))
    scale = np.sqrt(rows.var(0) + 1e-8)
    np.testing.assert_allclose(stats.mean, rows.mean(0), rtol=1e-14)
    np.testing.assert_allclose(stats.var, rows.var(0), rtol=1e-5, atol=1e-9)
    assert stats.count == 40
    others = rng.normal(center, 20, (20, *shape))
    assert_close(stats(torch.tensor(others)), ((others - rows.mean(0)) / scale).clip(-10, 10))
    assert_close(stats.scale(torch.tensor(others)), (others / scale).clip(-10, 10))


def test_networks_are_in_training_mode_in_the_update_alone(tmp_path, monkeypatch):
    """As dropout and batch norm need it. A rollout's batch is computed with the policy that acted."""
    found = {}

    def watch(name, function, agent, *rest):
        found.setdefault(name, set()).add(agent.actor.training)
        return function(agent, *rest)

    for name in ("sample_actions", "compute_batch", "ppo_loss", "evaluate"):
        monkeypatch.setattr(ppo, name, partial(watch, name, getattr(ppo, name)))
    run(tmp_path, "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 1 --eval-interval 2")
    assert found.pop("ppo_loss") == {True} and [*found.values()] == [{False}] * 3


# The objective


@pytest.mark.parametrize("space", [DISCRETE, BOX])
@pytest.mark.parametrize("clip_vloss", [False, True])
def test_loss_equals_a_float64_loop(space, clip_vloss):
    """Write eq. 7 and 9 as a loop over rows, some with a clipped ratio and some with a clipped value."""
    agent = make_agent(space)
    batch = make_batch(agent)
    with torch.no_grad():
        for x in agent.parameters():  # so that ratios differ from one
            x += 0.05 * torch.randn_like(x)
    args = Args(clip_coef=0.05, clip_vloss=clip_vloss, ent_coef=0.3, vf_coef=0.7)
    loss, metrics = ppo_loss(agent, batch, args)
    num_clipped_values, losses, expected = 0, [], []
    for i in range(len(batch.obs)):
        row = Batch(*(x[i : i + 1] for x in batch))
        pi = Categorical(logits=agent.actor(row.obs))
        if space is BOX:
            pi = Normal(agent.actor(row.obs), agent.actor_logstd.exp())
        actions = row.actions if space is BOX else row.actions[:, 0]
        log_ratio = (pi.log_prob(actions).sum() - row.log_probs).item()
        ratio, old, advantage, target = math.exp(log_ratio), *map(float, row[3:6])
        policy_loss = -min(ratio * advantage, min(max(ratio, 0.95), 1.05) * advantage)
        value = agent.critic(row.obs).item()
        value_loss = (value - target) ** 2 / 2
        if clip_vloss:
            near_loss = (old + min(max(value - old, -0.05), 0.05) - target) ** 2 / 2
            num_clipped_values += near_loss > value_loss
            value_loss = max(value_loss, near_loss)
        entropy = pi.entropy().sum().item()
        is_clipped = float(abs(ratio - 1) > 0.05)
        losses.append(policy_loss + 0.7 * value_loss - 0.3 * entropy)
        expected.append([value_loss, policy_loss, entropy, -log_ratio, ratio - 1 - log_ratio, is_clipped])
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-9)
    assert [x.item() for x in metrics.values()] == pytest.approx(np.mean(expected, 0), rel=1e-8, abs=1e-12)
    assert 0 < metrics["clipfrac"] < 1 and (not clip_vloss or 0 < num_clipped_values < 12)


@pytest.mark.parametrize(("norm_adv", "max_grad_norm"), [(True, 1e9), (False, 1e9), (True, 0.01)])
def test_a_step_is_the_policy_gradient_at_the_old_policy(norm_adv, max_grad_norm):
    """With normalized advantages if they are asked for, and not further than the largest norm."""
    args, agent = Args(norm_adv=norm_adv, max_grad_norm=max_grad_norm), make_agent(BOX)
    batch = make_batch(agent)
    advantages, values = batch.advantages, agent.critic(batch.obs).squeeze(-1)
    if norm_adv:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    log_probs = agent.get_distribution(batch.obs).log_prob(batch.actions).sum(-1)
    loss = -log_probs * advantages + args.vf_coef * (values - batch.returns).square() / 2
    gradients = torch.autograd.grad(loss.mean(), [*agent.parameters()])
    gradient, before = parameters_to_vector(gradients), parameters_to_vector(agent.parameters())
    _, metrics = ppo_loss(agent, batch._replace(advantages=advantages), args)
    found = ppo.update_minibatch(agent, torch.optim.SGD(agent.parameters(), 1.0), args, batch)
    step = before - parameters_to_vector(agent.parameters())
    torch.testing.assert_close(step, gradient * min(1, max_grad_norm / gradient.norm()), rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found, metrics, rtol=1e-6, atol=1e-9, check_dtype=False)


# Actions and evaluations


def test_actions_are_drawn_from_the_policy():
    """Compare frequencies with a softmax, then means and standard deviations with those of a Gaussian."""
    logits, mean, deviation = torch.tensor([[1.0, -1.0, 0.5], [0.3, -2.0, 0.0], [0.4, 1.6, 1.0]])
    pi = Categorical(logits=logits.expand(20_000, 1, -1))
    draws = make_agent(DISCRETE).sample(pi)
    assert draws.shape == (20_000, 1)
    np.testing.assert_allclose(draws[:, 0].bincount() / 20_000, logits.softmax(-1), atol=0.014)
    pi = Normal(mean[:2].expand(20_000, -1), deviation[:2].expand(20_000, -1))
    draws = make_agent(BOX).sample(pi)
    np.testing.assert_allclose(draws.mean(0), mean[:2], atol=0.05)
    np.testing.assert_allclose(draws.std(0), deviation[:2], rtol=0.03)


def test_actions_are_in_units_of_their_space():
    bounded = gym.spaces.Box(np.float32([[2], [-3]]), np.float32([[50], [1]]))
    half_bounded = gym.spaces.Box(np.float32([2, 0]), np.float32([50, np.inf]))
    for space, actions, expected in (
        (bounded, [[-1.0, 0.0], [0.5, 7.0]], [[[2.0], [-1.0]], [[38.0], [1.0]]]),
        # The component without an upper bound is not scaled, whatever the other one is
        (half_bounded, [[0.5, -1.0], [60.0, 99.0]], [[38.0, 0.0], [50.0, 99.0]]),
    ):
        assert make_agent(space).to_env(torch.tensor(actions)).tolist() == expected


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
    logits = agent.actor(agent.normalize(torch.tensor(obs)))
    assert logits.argmax(-1).tolist() == actions.tolist()


# Logging


def test_the_log_of_a_run(tmp_path, monkeypatch):
    """The rate falls, and losses are means over the rollout, here of nearly frozen weights."""
    batches, compute_batch, rates, update = [], ppo.compute_batch, [], ppo.update_minibatch

    def update_minibatch(agent, optimizer, *rest):
        rates.append(optimizer.param_groups[0]["lr"].item())
        return update(agent, optimizer, *rest)

    monkeypatch.setattr(ppo, "update_minibatch", update_minibatch)
    monkeypatch.setattr(ppo, "compute_batch", lambda *a: batches.append(compute_batch(*a)) or batches[-1])
    flags = "--num-envs 4 --num-steps 32 --total-timesteps 512 --eval-episodes 0"
    scalars = read_scalars(run(tmp_path, flags, "--learning-rate", 1e-9).path)
    steps, logged = zip(*scalars["charts/learning_rate"], strict=True)
    expected = pytest.approx([1e-9 * (1 - step / 512) for step in (0, *steps[:-1])], rel=1e-6, abs=0)
    assert rates[::20] == rates[19::20] == expected and logged == expected
    for i, batch in enumerate(batches):
        values, returns = batch.values, batch.returns
        explained = 1 - (returns - values).var().item() / returns.var().item()
        value_loss = (returns - values).square().mean().item() / 2
        assert scalars["losses/value_loss"][i][1] == pytest.approx(value_loss, rel=0.03)
        assert scalars["losses/explained_variance"][i][1] == pytest.approx(explained, rel=1e-4)


def test_target_kl_stops_the_epochs(tmp_path, monkeypatch):
    found, update = [], ppo.update_minibatch
    monkeypatch.setattr(ppo, "update_minibatch", lambda *a: found.append(update(*a)) or found[-1])
    flags = "--env-id Pendulum-v1 --num-envs 8 --num-steps 32 --total-timesteps 512 --eval-episodes 0"
    for target_kl, num_epochs in (("0", 5), ("1e-9", 1)):
        found.clear()
        run(tmp_path / target_kl, flags, "--target-kl", target_kl)
        assert len(found) == 2 * 4 * num_epochs


def test_logged_returns_are_means_of_the_episodes_that_ended(tmp_path):
    """With episodes of 5 steps and a reset, and rollouts of 4: nothing is logged where none ended."""
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 2 --num-steps 4 --total-timesteps 46 --eval-episodes 0"
    path = run(tmp_path, flags, "--num-minibatches 8 --no-norm-adv").path  # of one row
    assert all(x.isfinite().all() for x in load(path / "checkpoint.pt")["agent"].values())
    scalars = read_scalars(path)
    steps = [step for step, _ in scalars["charts/learning_rate"]]
    ended = [min(s for s in steps if s >= 10 * k) for k in range(1, 1 + steps[-1] // 10)]
    assert len(steps) > len(ended) > 2
    assert scalars["charts/episodic_length"] == [(step, 5.0) for step in ended]
    (value,) = {x for _, x in scalars["charts/episodic_return"]}
    assert value % 5 == 2.5  # of two ranks that follow each other


# Learning

PROBE = "--total-timesteps 4096 --num-envs 16 --num-steps 32 --env-id probe_envs:"
PENDULUM = "--env-id Pendulum-v1 --norm-obs --total-timesteps 300000"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("flags", "seeds", "least"),
    [
        (f"{PROBE}Shifted-v0 --num-steps 64", [11], 0.99),  # the optimum is 1
        (f"{PROBE}Sums-v0 --num-steps 64", [11], 0.99),
        (f"{PROBE}Aim-v0 --norm-obs", [11], -0.15),  # the optimum is 0, and a random policy gets about -1.5
        (f"{PROBE}FarAim-v0 --norm-obs", [11], -0.15),  # in a box [2, 50], distances in half-widths
        pytest.param("", [501, 502, 503, 504], 475, marks=slow),  # CartPole is solved
        pytest.param(PENDULUM, [1, 2], -300, marks=slow),  # at random -1200
    ],
)
def test_tasks_are_learned_by_the_end(tmp_path, flags, seeds, least):
    """By the last policy itself, and with seeds that were not used to choose settings."""
    for seed in seeds:
        path = run(tmp_path / str(seed), f"{flags} --seed {seed}").path
        last_score = read_scalars(path)["eval/episodic_return"][-1][1]
        assert min(last_score, load(path / "best.pt")["progress"]["best_score"]) >= least
