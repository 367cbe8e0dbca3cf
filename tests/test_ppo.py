"""PPO against brute force, closed forms, float64 and its own specification."""

import itertools
import math
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from brute_force import assert_close, compare_rollout
from helpers import fail_with, read_scalars
from scripts import (
    call_main,
    edit_script,
    find_run,
    import_file,
    load,
    read_scores,
    run_main,
    watch_optimizers,
)
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


def test_advantages_are_sums_in_float32_whatever_type_the_values_have():
    """A network under autocast gives values in bfloat16, whose sums would lose digits in each step."""
    torch.manual_seed(3)
    rewards, ends = torch.randn(200, 3), torch.zeros(200, 3, dtype=torch.bool)
    values = torch.randn(201, 3).bfloat16()
    found = ppo.compute_gae(rewards, values, ends, ends, 0.99, 0.95)
    expected = ppo.compute_gae(rewards.double(), values.float(), ends, ends, 0.99, 0.95)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y.float(), rtol=1e-5, atol=1e-5)


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


# The first weights, and Adam


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_first_weights_are_orthogonal_with_the_usual_gains(env_id):
    """The square root of 2, and in the last layers 0.01 for the policy and 1 for the value; biases are 0."""
    agent = Agent(ppo.make_envs(Args(env_id=env_id), 1), norm_obs=False)
    for network, last_gain in ((agent.actor, 0.01), (agent.critic, 1.0)):
        layers = [layer for layer in network if isinstance(layer, torch.nn.Linear)]
        assert [len(layer.weight) for layer in layers[:2]] == [64, 64] and len(layers) == 3
        for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
            weight = layer.weight if layer.out_features <= layer.in_features else layer.weight.T
            torch.testing.assert_close(
                weight @ weight.T, gain**2 * torch.eye(len(weight)), rtol=1e-4, atol=2e-6
            )
            assert not layer.bias.any()
    if env_id == "Pendulum-v1":
        assert agent.actor_logstd.tolist() == [0]  # a standard deviation of 1


def test_adam_has_an_epsilon_of_1e_5(tmp_path):
    """And else the options of torch."""
    with watch_optimizers() as steps:
        run(tmp_path, "--num-envs 4 --num-steps 32 --total-timesteps 256 --eval-episodes 0")
    options = torch.optim.Adam([torch.zeros(1)], eps=1e-5, fused=True).param_groups[0]
    expected = {key: x for key, x in options.items() if key not in ("params", "lr")}
    assert [{key: x for key, x in groups[0].items() if key != "lr"} for groups in steps] == [expected] * 60


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
    upper_bounded = gym.spaces.Box(np.float32([-np.inf, -3]), np.float32([5, 1]))
    for space, actions, expected in (
        (bounded, [[-1.0, 0.0], [0.5, 7.0]], [[[2.0], [-1.0]], [[38.0], [1.0]]]),
        # The component without an upper bound is not scaled, whatever the other one is
        (half_bounded, [[0.5, -1.0], [60.0, 99.0]], [[38.0, 0.0], [50.0, 99.0]]),
        (upper_bounded, [[0.5, 0.0], [-60.0, 9.0], [7.0, -9.0]], [[0.5, -1.0], [-60.0, 1.0], [5.0, -3.0]]),
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


def test_each_stream_and_seed_has_evaluated_episodes_of_its_own(monkeypatch, tmp_path):
    """By their first observations: --evaluate plays other episodes than those that chose best.pt."""
    made, make_envs = [], ppo.make_envs
    args = Args(env_id="probe_envs:Ledger-v0", eval_episodes=5)
    _, agent, _ = make_parts(args)
    monkeypatch.setattr(ppo, "make_envs", lambda *args: made.append(make_envs(*args)) or made[-1])
    settings = ((1, ppo.EVALUATION), (1, ppo.EVALUATION), (1, ppo.FINAL_EVALUATION), (2, ppo.EVALUATION))
    for args.seed, stream in settings:
        ppo.evaluate(agent, args, CPU, stream, tmp_path)
    firsts = [{tuple(env.unwrapped.episodes[0][0][0]) for env in envs.unwrapped.envs} for envs in made]
    assert firsts[0] == firsts[1] and len(firsts[0] | firsts[2] | firsts[3]) == 3 * 5


def test_an_evaluated_episode_without_end_is_cut_and_one_line_says_so(capsys, tmp_path):
    """Every second seed never ends, the others end after four steps."""
    args = Args(env_id="probe_envs:HalfEndless-v0", num_envs=2, eval_episodes=2)
    _, agent, _ = make_parts(args)
    scores = ppo.evaluate(agent, args, CPU, 2, tmp_path)
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2
    assert capsys.readouterr().err == "1 evaluated episodes were cut at 10000 steps\n"


@pytest.mark.parametrize("where", ["obs", "reward"])
def test_what_is_not_finite_in_an_evaluation_ends_it_with_one_line(where, tmp_path, capsys):
    """Which names the environment, the second of three. Nothing of this kind has happened in training."""
    args = Args(env_id="probe_envs:Fixed-v0", num_envs=3, eval_episodes=3)
    _, agent, _ = make_parts(args)
    args.env_id, probe_envs.Fixed.made = f"probe_envs:NotFinite{where}-v0", 0
    name = {"obs": "an observation", "reward": "a reward"}[where]
    line = fail_with(capsys, ppo.evaluate, agent, args, CPU, 2, tmp_path)
    assert line.endswith(f"{args.env_id}: {name} of environment 1 is not finite, or too large for float32")


def test_a_run_does_not_log_a_score_that_is_not_finite(tmp_path, capsys):
    """The environments of its evaluation are the first ones that are not finite."""
    flags = "--env-id probe_envs:NotFinitereward-v0 --num-envs 1 --num-steps 8 --num-minibatches 1"
    probe_envs.Fixed.made = 0
    flags = f"{flags} --total-timesteps 64 --eval-episodes 2 --eval-interval 1 --run-dir {tmp_path}"
    line = fail_with(capsys, ppo.main, flags.split())
    assert "a reward of environment 0 is not finite" in line  # the fourth that is made
    path = find_run(tmp_path)
    assert load(path / "checkpoint.pt")["progress"]["iteration"] == 1 and not (path / "best.pt").exists()


# Environments


def test_vectorization_chooses_the_vector_environment(tmp_path):
    """With auto the task's own, if it has one. The first line names it, and processes change no number."""
    flags = "--num-envs 4 --num-steps 16 --total-timesteps 128 --eval-episodes 2 --vectorization"
    kinds = {"auto": "CartPoleVectorEnv", "sync": "SyncVectorEnv", "async": "AsyncVectorEnv"}
    agents = {}
    for mode, kind in kinds.items():
        done = run(tmp_path / mode, flags, mode)
        assert done.out.splitlines()[0].endswith(f": {kind}, 4 environments, cpu, 0 of 128 steps done")
        agents[mode] = load(done.path / "checkpoint.pt")["agent"]
    torch.testing.assert_close(agents["sync"], agents["async"], rtol=0, atol=0)
    done = run(tmp_path / "Pendulum", flags, "auto --env-id Pendulum-v1")
    assert ": SyncVectorEnv, " in done.out


def test_a_wrapper_has_an_effect_whatever_the_vectorization(tmp_path):
    """Also if the task has a vector environment of its own, which takes no wrappers."""
    change = "wrappers = []  #", "wrappers = [gym.wrappers.TimeAwareObservation]  #"
    module = import_file("edited_copy", edit_script("ppo", tmp_path, change))
    for mode in ("auto", "sync", "async"):
        envs = module.make_envs(module.Args(vectorization=mode), 2)
        assert envs.single_observation_space.shape == (5,), mode
        envs.close()


@pytest.mark.parametrize("env_id", ["probe_envs:Number-v0", "probe_envs:OtherNumber-v0"])
def test_a_number_without_a_dimension_is_an_observation(env_id, tmp_path):
    """Also if a vector environment of its own says as a string how it resets."""
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 40 --eval-episodes 2 --env-id"
    agent = load(run(tmp_path, flags, env_id).path / "checkpoint.pt")["agent"]
    assert agent["actor.1.weight"].shape == (64, 1)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_a_box_of_whole_numbers_is_no_space_of_actions(dtype, monkeypatch, capsys):
    """Whose numbers the environment would get as floats, or cut off."""
    monkeypatch.setattr(probe_envs.Fixed, "action_space", gym.spaces.Box(0, 3, (2,), dtype))
    line = fail_with(capsys, ppo.make_envs, Args(env_id="probe_envs:Fixed-v0"), 2)
    assert "actions must be Discrete or a Box of floats, not Box(0, 3, (2,)" in line


@pytest.mark.parametrize("where", ["making", "reset", "step"])
def test_an_environment_that_raises_shows_its_own_traceback(where, tmp_path):
    """Whole: from `main` to the line of the environment, with its own words, and not a line of ours."""
    flags = "--num-envs 2 --num-steps 16 --total-timesteps 64 --eval-episodes 0 --env-id"
    with pytest.raises(KeyError, match="a key that is missing") as raised:
        run(tmp_path, flags, f"probe_envs:Broken{where}-v0")
    frames = [entry.name for entry in raised.traceback]
    assert frames[-1] == "look_up" and "main" in frames and "train" in frames
    assert raised.value.__suppress_context__ is False


def test_capture_video_films_the_first_environment_of_each_evaluation(tmp_path):
    """The videos open, with a frame for each step; --evaluate makes one, too.

    Frames have the size of one environment, and differ.
    """
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("moviepy")
    flags = "--num-envs 4 --num-steps 16 --num-minibatches 1 --total-timesteps 60 --eval-episodes 1"
    path = run(tmp_path / "filmed", flags, "--capture-video").path
    ((step, length),) = read_scalars(path)["eval/episodic_length"]
    out, _ = call_main(ppo, f"--evaluate {path / 'best.pt'} --eval-episodes 2")
    num_frames = {}
    for file in path.glob("videos_*/*-episode-0.mp4"):
        meta, *frames = ffmpeg.read_frames(str(file))
        assert meta["source_size"] == (600, 400) and len({*frames}) > 0.8 * len(frames)
        num_frames[file.parent.name] = len(frames)
    assert num_frames.pop(f"videos_{step}") in (length, length + 1)  # the writer may round one off
    assert num_frames.keys() == {"videos_best"} and num_frames["videos_best"] > 8
    assert read_scores(out)["eval/episodic_length"] > 8
    assert not [*run(tmp_path / "unfilmed", flags).path.glob("videos_*")]


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


@pytest.mark.parametrize(
    ("target_kl", "num_epochs"),
    [(None, 4), (0, 4), (1e-9, 1), (0.0249, 1), (0.0251, 2), (0.0449, 2), (0.0451, 3), (0.0651, 4)],
)
def test_target_kl_is_compared_with_the_mean_over_an_epoch(target_kl, num_epochs, tmp_path, monkeypatch):
    """Not with the sum or the last minibatch, and not with means over the epochs before."""
    update, num_updates = ppo.update_minibatch, itertools.count()

    def update_minibatch(*args):
        # 0.01, 0.02, 0.03, 0.04 in the minibatches of the first epoch, and 0.02 more in each later one
        epoch, minibatch = divmod(next(num_updates) % (4 * num_epochs), 4)
        return update(*args) | {"approx_kl": torch.tensor(0.01 * (minibatch + 1) + 0.02 * epoch)}

    monkeypatch.setattr(ppo, "update_minibatch", update_minibatch)
    flags = "--env-id Pendulum-v1 --num-envs 4 --num-steps 32 --total-timesteps 384 --eval-episodes 0"
    flags += " --update-epochs 4" + (f" --target-kl {target_kl}" if target_kl is not None else "")
    path = run(tmp_path, flags).path
    assert next(num_updates) == 3 * 4 * num_epochs
    logged = [x for _, x in read_scalars(path)["losses/approx_kl"]]  # of the last epoch
    assert logged == pytest.approx([0.025 + 0.02 * (num_epochs - 1)] * 3)


def test_each_epoch_trains_on_all_rows_in_an_order_of_its_own(tmp_path, monkeypatch):
    """In minibatches of equal size. Rows that fill up the last one are those that came first."""
    batches, compute_batch, minibatches, update = [], ppo.compute_batch, [], ppo.update_minibatch
    monkeypatch.setattr(ppo, "compute_batch", lambda *a: batches.append(compute_batch(*a)) or batches[-1])
    monkeypatch.setattr(ppo, "update_minibatch", lambda *a: minibatches.append(a[-1]) or update(*a))
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 32 --total-timesteps 300 --eval-episodes 0"
    run(tmp_path, flags, "--update-epochs 5 --num-minibatches 4")
    orders = []
    for i, batch in enumerate(batches):
        num_rows = len(batch.obs)
        assert 100 < num_rows < 128 and len(batch.obs.unique(dim=0)) == num_rows
        for epoch in range(5):
            parts = minibatches[20 * i + 4 * epoch :][:4]
            assert {len(x) for part in parts for x in part} == {32}
            whole = Batch(*map(torch.cat, zip(*parts, strict=True)))
            order = (whole.obs[:, None] == batch.obs).all(-1).nonzero()[:, 1]
            for found, rows in zip(whole, batch, strict=True):
                assert torch.equal(found, rows[order])
            assert sorted(order[:num_rows].tolist()) == [*range(num_rows)]
            assert torch.equal(order[num_rows:], order[: 128 - num_rows])
            orders.append(tuple(order.tolist()))
    assert len({*orders}) == len(orders) == 5 * len(batches) == 15


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


@pytest.mark.parametrize("flags", ["", "--no-norm-reward"])
def test_clipped_rewards_are_a_share_of_those_that_are_not_zero(flags):
    """In the rollout itself: its first row is of the one before. The share is not logged without any."""
    args = Args(num_envs=2, num_steps=4, norm_reward=not flags)
    _, agent, storage = make_parts(args)
    agent.return_stats.var.fill_(4.0)  # a standard deviation of 2, so that the limit is 20
    batch = make_batch(make_agent(DISCRETE))
    assert "charts/clipped_rewards" not in ppo.summarize(agent, storage, batch, args)
    storage.rewards[:] = [[99, 99], [0, 19.9], [0, -21], [25, 0], [1, 0]]
    expected = {} if flags else {"charts/clipped_rewards": 0.5}
    scalars = ppo.summarize(agent, storage, batch, args)
    assert {name: x for name, x in scalars.items() if "clipped" in name} == expected


def test_a_rollout_of_one_row_is_trained_on_and_has_no_explained_variance(tmp_path):
    """Its other step only resets the environment."""
    flags = "--env-id probe_envs:Noise-v0 --num-envs 1 --num-steps 2 --num-minibatches 1 --eval-episodes 0"
    path = run(tmp_path, flags, "--total-timesteps 3").path
    scalars = read_scalars(path)
    assert [step for step, _ in scalars["losses/value_loss"]] == [1, 2, 3]
    assert "losses/explained_variance" not in scalars
    assert all(x.isfinite().all() for x in load(path / "checkpoint.pt")["agent"].values())


def test_the_statistics_of_a_run_are_of_sums_discounted_by_gamma(tmp_path):
    """Episodes have ten rewards of 1, and a step that resets after them."""
    flags = "--env-id probe_envs:Endless-v0 --num-envs 4 --num-steps 8 --total-timesteps 90 --eval-episodes 0"
    checkpoint = load(run(tmp_path, flags, "--gamma 0.9 --gae-lambda 0.5").path / "checkpoint.pt")
    lengths = [1 + t % 11 for t in range(8 * checkpoint["progress"]["iteration"]) if t % 11 < 10]
    sums = np.array([(1 - 0.9**x) / (1 - 0.9) for x in lengths])
    assert checkpoint["progress"]["step"] == checkpoint["agent"]["return_stats.count"] == 4 * len(sums) >= 90
    assert checkpoint["agent"]["return_stats.mean"].item() == pytest.approx(sums.mean(), rel=1e-6)
    assert checkpoint["agent"]["return_stats.var"].item() == pytest.approx(sums.var(), rel=1e-5)


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
