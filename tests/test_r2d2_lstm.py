"""R2D2 against brute force, float64, the environments' own ledgers and its own specification."""

import math
import re
import sys
from collections import Counter
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ROOT, fail_with, read_scalars
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_contract import find_run, load, run_main

from algos import r2d2_lstm as r2d2
from algos.r2d2_lstm import Args, Player, QNetwork, SequenceReplay, compute_targets, r2d2_loss

CPU = torch.device("cpu")
LEDGERS = ("Ledger-v0", "SameStepLedger-v0", "ReusedLedger-v0")


def describe(obs_space=None, num_actions=4):
    """What networks and replays need to know of environments."""
    obs_space = obs_space or gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    actions = gym.spaces.Discrete(num_actions)
    return SimpleNamespace(num_envs=1, single_observation_space=obs_space, single_action_space=actions)


def make_args(env_id, *lengths, **more):
    """Settings for a probe environment; `lengths` are burn_in, learn_length and n_step."""
    lengths = dict(zip(("burn_in", "learn_length", "n_step"), lengths, strict=False))
    return Args(env_id=f"probe_envs:{env_id}-v0", **({"hidden_size": 6, "gamma": 0.9} | lengths | more))


def make_parts(args, agent=None, epsilons=None, seed=0):
    """Network, player and replay as `train` makes them."""
    envs = r2d2.make_envs(args, args.num_envs)
    r2d2.seed_everything(seed)
    agent = agent or QNetwork(envs, args)
    epsilons = r2d2.epsilon_ladder(args.num_envs, args.epsilon) if epsilons is None else epsilons
    return agent, Player(agent, envs, args, epsilons, CPU, seed), SequenceReplay(envs, args, CPU)


def play(parts, args, rounds=1):
    """Collect `rounds` times; returns the number of steps."""
    _, player, replay = parts
    return sum(r2d2.collect_steps(player, player.act, replay, args)[1] for _ in range(rounds))


def get_ledgers(envs):
    return [env.unwrapped for env in envs.unwrapped.envs]


def get_windows(replay):
    """The windows that the replay holds."""
    return {name: x[: replay.num_added] for name, x in replay.data.items()}


def run(folder, flags, *more):
    """A whole run of r2d2_lstm.py in `folder`."""
    return run_main(r2d2, folder, *flags.split(), *more)


class Recorder:
    """In place of a QNetwork: prefers random actions, counts the steps in `state`, notes what it is shown."""

    def __init__(self):
        self.seen, self.reward_sums = [], torch.ones(2).double()

    def __call__(self, obs, last_action, last_reward, state):
        shown = obs[:, 0].clone(), last_action[:, 0].tolist(), last_reward[:, 0].tolist(), state.clone()
        self.seen += zip(*shown, strict=True)
        return torch.rand(*obs.shape[:2], 4), state + 1.0


# Windows


def expect_windows(num_steps, is_over, args):
    """The first trained step of each window of an episode: of a running one, those that are complete."""
    m = args.learn_length
    starts = [t for t in range(0, num_steps, m) if is_over or t + m + args.n_step - 1 <= num_steps]
    if is_over and args.last_window == "overlap":
        starts[-1] = max(0, min(starts[-1], num_steps - m))
    return starts


def look_up(ledgers):
    """(environment, episode, step) of every observation in the ledgers, an episode's last one included."""
    found = {}
    for env, ledger in enumerate(ledgers):
        for number, episode in enumerate(ledger.episodes):
            for step, (obs, *_) in enumerate(episode):
                found[obs.tobytes()] = env, number, step
            if episode:
                found[episode[-1][3].tobytes()] = env, number, len(episode)
    return found


def check_windows(replay, ledgers, args):
    """Hold all windows against the ledgers.

    Returns (environment, episode, first trained step) of each window, and how often each step is trained.
    """
    windows = {name: x.numpy() for name, x in get_windows(replay).items()}
    places, found, trained = look_up(ledgers), [], Counter()
    burn_in, m, n = args.burn_in, args.learn_length, args.n_step
    for i in range(len(windows["end"])):
        env, number, step = places[windows["obs"][i, burn_in].tobytes()]
        episode, end, is_warm = ledgers[env].episodes[number], windows["end"][i], step >= burn_in
        found.append((env, number, step))
        last = min(len(episode), step + m + n - 1)  # the step of the observation at `end`
        assert end == last - step + burn_in and windows["is_warm"][i] == is_warm
        assert windows["is_terminated"][i] == (last == len(episode) and episode[-1][4])
        assert (windows["state"][i] == step - burn_in * is_warm).all()  # a Recorder counts steps
        for slot in range(0 if is_warm else burn_in, burn_in + m + n):
            t = step + min(slot, end) - burn_in  # the last reading fills up the window
            obs = episode[t][0] if t < len(episode) else episode[-1][3]
            action, reward = episode[t - 1][1:3] if t > 0 else (-1, 0.0)
            np.testing.assert_array_equal(windows["obs"][i, slot], obs)
            assert windows["last_action"][i, slot] == action
            assert windows["last_reward"][i, slot] == np.float32(reward)
        trained.update((env, number, step + t) for t in range(min(m, end - burn_in)))
    return found, trained


@settings(max_examples=60, deadline=None)
@given(
    env_id=st.sampled_from(LEDGERS),
    last_window=st.sampled_from(("mask", "overlap", "null")),
    p_ends=st.lists(st.sampled_from((0.0, 0.02, 0.1, 0.4, 1.0)), min_size=1, max_size=3),
    lengths=st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 6)),
    num_steps=st.integers(1, 30),
    buffer_size=st.one_of(st.just(300), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
@example("Ledger-v0", "overlap", [0.1, 0.4], (3, 5, 2), 20, 300, 0)
@example("SameStepLedger-v0", "overlap", [0.1, 1.0], (6, 4, 6), 7, 300, 1)
@example("SameStepLedger-v0", "null", [0.1, 0.02], (1, 3, 1), 7, 5, 2)
def test_every_step_of_an_episode_is_trained_in_one_window_and_windows_are_true(
    env_id, last_window, p_ends, lengths, num_steps, buffer_size, seed
):
    """A replay that is too small for all windows holds the newest ones."""
    args = make_args(env_id[:-3], *lengths, num_envs=len(p_ends), hidden_size=2, num_steps=num_steps)
    args.last_window, args.buffer_size = last_window, buffer_size
    parts = _, player, replay = make_parts(args, Recorder(), seed=seed)
    ledgers = get_ledgers(player.envs)
    for ledger, p_end in zip(ledgers, p_ends, strict=True):
        ledger.p_end = p_end
    taken = play(parts, args, max(60 // num_steps, 1))
    replay.add(player)  # what was read last
    assert taken == sum(len(episode) for ledger in ledgers for episode in ledger.episodes)
    found, trained = check_windows(replay, ledgers, args)
    num_expected = 0
    for env, ledger in enumerate(ledgers):
        expected, steps = [], set()
        for number, episode in enumerate(ledger.episodes):
            is_over = bool(episode) and any(episode[-1][4:])
            starts = expect_windows(len(episode), is_over, args)
            expected += [(env, number, start) for start in starts]
            num_trained = len(episode) if is_over else len(starts) * args.learn_length
            steps |= {(env, number, t) for t in range(num_trained)}
        mine = [x for x in found if x[0] == env]
        assert sorted(mine) == expected[len(expected) - len(mine) :]
        num_expected += len(expected)
        if buffer_size == 300:
            counts = {step: count for step, count in trained.items() if step[0] == env}
            assert counts.keys() == steps and (last_window == "overlap" or set(counts.values()) <= {1})
    assert replay.num_added == num_expected < 300 and len(found) == min(num_expected, buffer_size)


def test_the_page_shows_the_windows_that_the_replay_holds():
    """The drawing of an episode of 12 steps: step by step, what a window takes it for."""
    args, found, starts = Args(burn_in=4, learn_length=5, n_step=2, buffer_size=10, hidden_size=1), [], []
    replay = SequenceReplay(describe(gym.spaces.Box(0, 12, (1,))), args, CPU)
    for t in range(13):
        reading, is_over = (np.float32([t]), t - 1, 0.0, torch.full((2, 1), float(t))), [t == 12]
        replay.add(SimpleNamespace(read=[(0, reading)], is_over=is_over, terminated=is_over))
    windows = get_windows(replay)
    for obs, end, is_warm, state in zip(*map(windows.get, ("obs", "end", "is_warm", "state")), strict=True):
        kinds = ("b" * 4 if is_warm else " " * 4) + "L" * 5 + "t" * 2
        kinds = (kinds[:end] + "t")[: len(kinds)]
        found.append([(int(x), kind) for x, kind in zip(obs[:, 0], kinds, strict=False) if kind != " "])
        starts.append(f"{'stored' if is_warm else 'zero'} state at step {int(state[0, 0])}")
    page = (ROOT / "docs" / "r2d2_lstm.md").read_text()
    head, *lines = re.search(r"```\n(step .*?)```", page, re.S)[1].splitlines()
    columns = [(match.start(), int(match[0])) for match in re.finditer(r"\d+", head)]
    drawn = [[(step, x[at]) for at, step in columns if x[at : at + 1] in ("b", "L", "t")] for x in lines]
    assert drawn == found and len(found) == 3
    assert all(start in line for start, line in zip(starts, lines, strict=True))


# Targets and the loss


def test_rescaling_is_the_textbooks_and_its_inverse_undoes_it():
    magnitudes = torch.logspace(-8, 6, 1000, dtype=torch.float64)
    x, eps = torch.cat((-magnitudes, torch.zeros(1), magnitudes)), 1e-3
    torch.testing.assert_close(r2d2.value_rescale(x), x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x)
    root = (1 + 4 * eps * (x.abs() + 1 + eps)).sqrt()
    inverse = x.sign() * (((root - 1) / (2 * eps)) ** 2 - 1)  # which loses digits
    torch.testing.assert_close(r2d2.inverse_value_rescale(x), inverse, rtol=1e-9, atol=1e-11)
    round_trip = r2d2.inverse_value_rescale(r2d2.value_rescale(x.float()))
    torch.testing.assert_close(round_trip, x.float(), rtol=1e-6, atol=0.0)  # float32 loses nothing


def brute_force_target(q, target_q, rewards, end, is_terminated, t, gamma, n_step):
    """y_t of eq. 2 for one window, in float64: q and target_q [m + n, A], rewards [m + n - 1]."""
    eps, total, k = 1e-3, 0.0, min(t + n_step, end)
    for i in range(t, k):
        total += gamma ** (i - t) * rewards[i]
    if not (is_terminated and k == end):
        y = target_q[k][np.argmax(q[k])]
        root = math.sqrt(1 + 4 * eps * (abs(y) + 1 + eps))
        total += gamma ** (k - t) * math.copysign(((root - 1) / (2 * eps)) ** 2 - 1, y)
    return math.copysign(math.sqrt(abs(total) + 1) - 1, total) + eps * total


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.floats(0, 1), st.integers(0, 2**31))
def test_targets_equal_brute_force(learn_length, n_step, gamma, seed):
    rng, num_windows, length = np.random.default_rng(seed), 7, learn_length + n_step
    q, target_q = rng.normal(size=(2, num_windows, length, 3)) * 5
    rewards = rng.normal(size=(num_windows, length - 1)) * 10
    end, is_terminated = rng.integers(1, length, num_windows), rng.random(num_windows) < 0.5
    floats = (torch.tensor(x, dtype=torch.float32) for x in (q, target_q, rewards))
    found = compute_targets(*floats, torch.tensor(end), torch.tensor(is_terminated), gamma, n_step)
    assert found.shape == (num_windows, learn_length)
    for i, window in enumerate(zip(q, target_q, rewards, end, is_terminated, strict=True)):
        expected = [brute_force_target(*window, t, gamma, n_step) for t in range(min(learn_length, end[i]))]
        expected += [0.0] * (learn_length - len(expected))
        np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_padding_far_beyond_the_end_is_finite(gamma):
    """The discount over the steps from the padding back to the end would be gamma to the power of -79."""
    end, is_terminated = torch.ones(2, dtype=torch.int64), torch.tensor([True, False])
    targets = compute_targets(*torch.randn(2, 2, 81, 3), torch.randn(2, 80), end, is_terminated, gamma, 1)
    assert targets.isfinite().all() and targets[:, 0].all()


@pytest.fixture
def float64(monkeypatch):
    """Let networks, replay and loss compute in double precision."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_windows(args):
    """Eight random windows of all kinds, as the replay has them; the parts that hold nothing are filled too."""
    length = args.burn_in + args.learn_length + args.n_step
    windows = {
        "obs": torch.randn(8, length, 3),
        "last_action": torch.randint(4, (8, length)),
        "last_reward": torch.randn(8, length) * 3,
        "state": torch.randn(8, 2, args.hidden_size),
        "end": torch.randint(args.burn_in + 1, length, (8,)),
        "is_terminated": torch.arange(8) % 2 == 1,
        "is_warm": torch.arange(8) < 4,
    }
    windows["end"][3:5] = length - 1
    windows["last_action"][0, 0] = -1  # its burn-in begins with an episode
    windows["last_action"][6:, args.burn_in] = -1  # first windows of episodes
    windows["last_reward"][6:, args.burn_in] = 0.0
    windows["state"][6:] = 0.0
    return windows


def walk(network, windows, i, args):
    """Q [m + n, A] of the steps of window i after its burn-in, which is without gradient, one step at a time."""
    state, q = windows["state"][i : i + 1] * (args.state_init == "stored"), []
    for t in range(0 if windows["is_warm"][i] else args.burn_in, windows["obs"].shape[1]):
        if t == args.burn_in:
            state, q = state.detach(), []
        step = (windows[name][i : i + 1, t : t + 1] for name in ("obs", "last_action", "last_reward"))
        q_of_step, state = network(*step, state)
        q.append(q_of_step[0, 0])
    return torch.stack(q)


def naive_loss(agent, target, windows, importance, rms, args):
    """Eq. 2 to 4 as loops over windows and steps: two means of METRICS, of which the first is the loss; priorities."""
    losses, errors, first = [], [], args.burn_in + 1
    for i, weight in enumerate(importance):
        end, rewards = windows["end"][i].item() - args.burn_in, windows["last_reward"][i, first:] / rms
        q, target_q = walk(agent, windows, i, args), walk(target, windows, i, args)
        window = (
            q.detach().numpy(),
            target_q.detach().numpy(),
            rewards.tolist(),
            end,
            windows["is_terminated"][i],
        )
        num_steps = min(args.learn_length, end)
        y = [brute_force_target(*window, t, args.gamma, args.n_step) for t in range(num_steps)]
        y += [0.0] * (args.learn_length - num_steps) * (args.last_window == "null")
        actions = windows["last_action"][i, first : first + len(y)]
        errors.append((torch.tensor(y) - q[torch.arange(len(y)), actions]).abs())
        losses.append(weight * errors[-1].square() / 2)
    priorities = [0.9 * x.max() + 0.1 * x.mean() for x in errors]
    return torch.cat(losses).mean(), torch.cat(errors).mean(), torch.stack(priorities).detach()


@pytest.mark.parametrize("lengths", [(0, 3, 2), (2, 4, 1), (3, 2, 5), (1, 1, 1)])
@pytest.mark.parametrize("more", [{}, {"state_init": "zero"}, {"last_window": "null"}])
def test_loss_and_gradients_equal_loops(float64, lengths, more):
    """What fills up a window has no effect, except that null steps are trained towards zero."""
    torch.manual_seed(7)
    args = make_args("Ledger", *lengths, **more)
    agent, target = QNetwork(describe(), args), QNetwork(describe(), args)
    for p in (*agent.parameters(), *target.parameters()):
        p.data *= 2.0
    agent.reward_sums.copy_(torch.tensor([4.0, 36.0]))
    windows, importance = make_windows(args), torch.linspace(0.3, 1.0, 8)
    loss, metrics, count, priorities = r2d2_loss(agent, target, windows, importance, args)
    (loss / count).backward()
    grads = {name: p.grad.clone() for name, p in agent.named_parameters()}
    agent.zero_grad()
    expected, error, expected_priorities = naive_loss(agent, target, windows, importance, 3.0, args)
    expected.backward()
    torch.testing.assert_close(metrics / count, torch.stack((expected, error)).detach())
    torch.testing.assert_close(loss / count, expected)
    torch.testing.assert_close(priorities, expected_priorities)
    for name, p in agent.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, msg=name)
    assert agent.core.weight_hh_l0.grad.abs().max() > 1e-3


# Priorities and updates


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_samples_follow_the_priorities(monkeypatch, alpha):
    """Those of zero are never drawn, also by the lowest and the highest random number."""
    replay = SequenceReplay(describe(), Args(hidden_size=2, buffer_size=7), CPU)
    priority = replay.data["priority"]
    priority[:] = torch.tensor([0.25, 3.0, 0.5, 0.0, 1.0, 1e-8, 0.0])
    exponents = {} if alpha == 0.9 else {"alpha": alpha, "beta": 0.6}  # those of the paper by default
    p = torch.where(priority > 0, priority.double() ** alpha, 0)
    p /= p.sum()
    torch.manual_seed(0)
    replay.batch_windows = 1000
    index, weights = replay.sample(**exponents)
    counts = torch.bincount(index, minlength=7)
    assert ((counts - 1000 * p).abs() < 2).all() and not counts[[3, 6]].any()  # which is stratified
    expected = p[index] ** -0.6
    torch.testing.assert_close(weights.double(), expected / expected.max(), rtol=1e-5, atol=0.0)
    replay.batch_windows = 64
    for noise, place, drawn in ((0.0, 0, 0), (1 - 2**-53, -1, 5)):
        monkeypatch.setattr(torch, "rand_like", lambda x, dtype, n=noise: torch.full(x.shape, n, dtype=dtype))
        assert replay.sample(**exponents)[0][place] == drawn
    for priority[1] in (
        math.nan,
        math.inf,
    ):  # the sample is still one of windows, and its weights show the fault
        index, weights = replay.sample(**exponents)
        assert ((index >= 0) & (index < 7)).all() and not weights.isfinite().all()


def test_new_windows_get_the_largest_priority():
    args = make_args("Ledger", num_envs=2, buffer_size=200)
    parts = _, _, replay = make_parts(args, Recorder())
    priority = replay.data["priority"]
    play(parts, args, 3)
    n = replay.num_added
    assert n > 5 and priority.tolist() == [1.0] * n + [0.0] * (200 - n)
    priority[:n] = torch.linspace(0.2, 0.7, n)
    play(parts, args)
    assert replay.num_added > n
    expected = torch.cat((torch.linspace(0.2, 0.7, n), torch.full((replay.num_added - n,), 0.7)))
    torch.testing.assert_close(priority[: replay.num_added], expected)
    assert not priority[replay.num_added :].any()


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_an_update_learns_from_what_it_samples_and_writes_priorities(float64, max_grad_norm):
    """A window whose errors are zero can still be drawn."""
    args = make_args(
        "Ledger", 2, 3, 2, num_envs=3, batch_size=26, buffer_size=90, max_grad_norm=max_grad_norm
    )
    parts = agent, _, replay = make_parts(args)
    play(parts, args, 3)
    target, before = QNetwork(describe(), args), deepcopy(agent)
    agent.reward_sums.copy_(torch.tensor([2.0, 25.0]))
    priority = replay.data["priority"]
    priority[: replay.num_added] = torch.rand(replay.num_added) + 0.1
    expected_priority, rng_state = priority.clone(), torch.get_rng_state()
    index, importance = replay.sample()
    assert len(index) == 8 and importance.min() < 0.8  # windows of 3 steps each
    windows = {name: x[index] for name, x in replay.data.items()}
    loss, error, expected_priority[index] = naive_loss(
        before, target, windows, importance, math.sqrt(12.5), args
    )
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in before.parameters()])
    torch.set_rng_state(rng_state)
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    metrics = r2d2.update_network(agent, target, optimizer, replay, args)
    torch.testing.assert_close(priority, expected_priority)
    torch.testing.assert_close(metrics, torch.stack((loss, error, norm)).detach())
    for p, q in zip(agent.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q - 0.1 * q.grad * min(1.0, max_grad_norm / norm))
    assert all(p.grad is None or not p.grad.any() for p in target.parameters())
    with mock.patch.object(r2d2, "sequence_priority", lambda errors, _: torch.zeros(len(errors))):
        r2d2.update_network(agent, target, optimizer, replay, args)
    assert priority[: replay.num_added].min() == 1e-8


# Acting


def test_exploration_follows_the_ladder():
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    np.testing.assert_allclose(r2d2.epsilon_ladder(4, 0.4), expected, rtol=1e-5)
    assert r2d2.epsilon_ladder(1, 0.3).tolist() == pytest.approx([0.3])
    epsilons = torch.tensor([0.0, 0.2, 0.6, 1.0])
    q = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(20, 1, 4)
    args = make_args("SameStepLedger", num_envs=20)
    _, player, _ = make_parts(args, lambda *inputs: (q, inputs[-1]), epsilons.repeat(5))
    for _ in range(300):
        player.step(player.act)
    ledgers = get_ledgers(player.envs)
    for i, epsilon in enumerate(epsilons.tolist()):
        actions = [step[1] for ledger in ledgers[i::4] for episode in ledger.episodes for step in episode]
        frequencies = np.bincount(actions, minlength=4) / 1500
        np.testing.assert_allclose(frequencies, epsilon / 4 + (1 - epsilon) * np.eye(4)[1], atol=0.05)
        assert epsilon > 0 or frequencies[1] == 1.0


def test_a_run_gives_each_environment_its_epsilon(tmp_path, monkeypatch):
    """The ladder in training, of which the second of two processes has every second; and 0 in evaluations."""
    given, init = [], Player.__init__
    monkeypatch.setattr(Player, "__init__", lambda *args: given.append(args[4].tolist()) or init(*args))
    flags = "--env-id probe_envs:Fixed-v0 --num-steps 2 --hidden-size 2 --buffer-size 9 --eval-episodes 3"
    flags += " --num-envs 4 --epsilon 0.5 --total-timesteps 8"
    run(tmp_path, flags)
    ladder = [0.5 ** (1 + 7 * i / 3) for i in range(4)]
    assert given == [pytest.approx(ladder), [0.0] * 3]
    monkeypatch.setattr(r2d2, "RANK", 1)
    monkeypatch.setattr(r2d2, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))  # the other has the same
    r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])
    assert given[2:] == [pytest.approx(ladder[1::2])] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("env_id", LEDGERS)
@pytest.mark.parametrize("caller", ["collect_steps", "evaluate"])
def test_a_player_is_shown_action_reward_and_state_of_its_own_episode(monkeypatch, env_id, caller):
    """At the beginning of an episode there is none of them. Scores are of each environment's first episode."""
    args = make_args(env_id[:-3], num_envs=3, hidden_size=2, eval_episodes=20)
    recorder, made, make_envs = Recorder(), [], r2d2.make_envs
    monkeypatch.setattr(r2d2, "make_envs", lambda *a: made.append(make_envs(*a)) or made[-1])
    if caller == "evaluate":
        scores = r2d2.evaluate(recorder, args, CPU, 4)
    else:
        play(make_parts(args, recorder, torch.tensor([0.0, 0.5, 1.0])), args, 8)
    ledgers = get_ledgers(made[0])
    places, num_first = look_up(ledgers), 0
    for obs, action, reward, state in recorder.seen:
        env, number, step = places[obs.numpy().tobytes()]
        expected = ledgers[env].episodes[number][step - 1][1:3] if step > 0 else (-1, 0.0)
        assert (action, reward) == (expected[0], np.float32(expected[1])) and (state == step).all()
        num_first += step == 0
    assert num_first > 20 and len(recorder.seen) > 2 * num_first
    if caller == "evaluate":
        episodes = [ledger.episodes[0] for ledger in ledgers]
        returns, lengths = [sum(x[2] for x in e) for e in episodes], [len(e) for e in episodes]
        expected = {"return": np.mean(returns), "return_std": np.std(returns), "length": np.mean(lengths)}
        assert scores == pytest.approx({f"eval/episodic_{k}": x for k, x in expected.items()}, rel=1e-5)
        assert max(len(ledger.episodes) for ledger in ledgers) > 2


def test_evaluations_repeat_themselves_and_cut_an_episode_without_end():
    args = make_args("Ledger", eval_episodes=8)
    agent, *_ = make_parts(args)
    scores = [r2d2.evaluate(agent, args, CPU, stream) for stream in (2, 2, 3)]
    assert scores[0] == scores[1] != scores[2]
    args, q = make_args("HalfEndless", eval_episodes=2), torch.zeros(2, 1, 2)
    scores = r2d2.evaluate(lambda *inputs: (q, inputs[-1]), args, CPU, 2)  # every second seed never ends
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2


# Networks and observations


def test_the_heads_are_dueling():
    """The mean of Q over the actions is the value."""
    agent, value = QNetwork(describe(), Args(hidden_size=6)), []
    agent.value.register_forward_hook(lambda module, inputs, output: value.append(output[..., 0]))
    q, _ = agent(torch.randn(2, 3, 3), torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2, 2, 6))
    torch.testing.assert_close(q.mean(-1), value[0])
    assert q.std(-1).min() > 0


def test_forget_gates_open_for_one_step_to_the_memory_span():
    core = QNetwork(describe(), Args(hidden_size=3, memory_span=100.0)).core
    forget = (core.bias_ih_l0 + core.bias_hh_l0)[3:6].sigmoid()
    torch.testing.assert_close(forget, torch.tensor([1 / 2, 10 / 11, 100 / 101]))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("last_action_reward", [False, True])
def test_without_last_action_and_reward_a_feed_forward_network_has_no_memory(recurrent, last_action_reward):
    """--no-recurrent --no-last-action-reward: Q of the observation alone; with either, of more."""
    args = Args(hidden_size=6, recurrent=recurrent, last_action_reward=last_action_reward)
    agent, rest = QNetwork(describe(), args), (torch.tensor([[0], [3]]), torch.tensor([[0.0], [5.0]]))
    for state, is_same in (
        (torch.rand(2, 2, 6), not recurrent and not last_action_reward),
        (torch.zeros(2, 2, 6), not last_action_reward),
    ):
        q, _ = agent(torch.ones(2, 1, 3), *rest, state)  # the same observation twice
        assert torch.allclose(q[0], q[1]) == is_same


@pytest.mark.parametrize("layout", ["CHW", "HWC", "HW"])
@pytest.mark.parametrize("size", ["Small", ""])
def test_images_of_all_layouts_are_kept_as_bytes_and_read_in_units_of_255(layout, size):
    """They are convolved if both sides have 36 pixels or more; small ones become a vector."""
    args = make_args(f"{size}Picture{layout}", num_envs=2, buffer_size=9)
    agent, player, replay = make_parts(args)
    env = get_ledgers(player.envs)[0]
    np.testing.assert_array_equal(player.obs[0], env.observe(0))
    assert player.obs.dtype == replay.data["obs"].dtype == torch.uint8
    assert isinstance(agent.encoder[0], torch.nn.Flatten if size else torch.nn.Conv2d)
    pixels = torch.tensor(np.stack([env.pixels(t) for t in range(3)])) / 255.0
    pixels = pixels[:, :1] if layout == "HW" else pixels
    if size:
        pixels = pixels.permute(0, *(1 + x for x in env.order)).flatten(1)
    found = agent.encode(torch.tensor(np.stack([env.observe(t) for t in range(3)])).unsqueeze(0))
    torch.testing.assert_close(found[0], agent.encoder(pixels), rtol=1e-4, atol=1e-6)
    assert found.std() > 0


def test_features_of_the_convolutions():
    """84 pixels a side give the 3136 features of Mnih et al. 2015."""
    envs = describe(gym.spaces.Box(0, 255, (4, 84, 84), np.uint8))
    layers = QNetwork(envs, Args(hidden_size=4)).encoder
    assert layers[-2].in_features == 64 * 7 * 7 and layers[0].in_channels == 4
    sizes = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in layers if hasattr(x, "stride")]
    assert sizes == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]


def test_discrete_observations_become_one_hot_and_tuples_flat():
    """Discrete(3, start=3), and a Tuple of a number and a vector."""
    _, player, _ = make_parts(make_args("Shifted", num_envs=20), Recorder())
    truth = np.array([env.obs for env in get_ledgers(player.envs)])
    assert len(set(truth)) == 3 and player.obs.tolist() == np.eye(3)[truth - 3].tolist()
    agent = mock.Mock(side_effect=lambda obs, *rest: (torch.zeros(20, 1, 2), rest[-1]))
    _, player, _ = make_parts(make_args("Pair", num_envs=20), agent)
    for t in (0, 1, 2, 3, 0):
        assert player.obs.tolist() == [[*np.eye(4)[t], -t, 0.5]] * 20
        player.step(player.act)


def test_minigrids_cells_are_ones_and_zeros_of_a_byte_each():
    """One object, color and state of each cell, and the direction; the text is left out."""
    pytest.importorskip("minigrid")
    args = Args(env_id="MiniGrid-MemoryS7-v0", num_envs=2, hidden_size=4, buffer_size=9)
    _, player, replay = make_parts(args)
    assert replay.data["obs"].dtype == player.obs.dtype == torch.uint8
    assert replay.data["obs"].shape[2:] == (4 + 7 * 7 * 20,) and player.obs.max() == 1
    assert (player.obs.sum(1) == 1 + 7 * 7 * 3).all() and (player.obs[:, :4].sum(1) == 1).all()


@pytest.mark.parametrize(
    ("env_id", "package"), [("MiniGrid-MemoryS7-v0", "minigrid"), ("ALE/Pong-v5", "ale_py")]
)
def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch, capsys, env_id, package):
    for name in (package, f"{package}.wrappers"):
        monkeypatch.setitem(sys.modules, name, None)
    line = fail_with(capsys, r2d2.make_envs, Args(env_id=env_id), 1)
    assert f"--env-id {env_id}: " in line and package in line.split(": ", 3)[3]


@pytest.mark.parametrize(("mode", "shape"), [("sync", (210, 160, 3)), ("auto", (1, 84, 84))])
def test_images_of_atari(mode, shape):
    """Only Atari's own vector form makes small grey ones."""
    pytest.importorskip("ale_py")
    args = Args(env_id="ALE/Pong-v5", vectorization=mode)
    envs = r2d2.make_envs(args, 1)
    assert envs.single_observation_space.shape == shape
    network = QNetwork(envs, args)
    envs.close()
    assert network.is_image and network.encode(torch.zeros(1, 2, *shape)).shape == (1, 2, 64)


# Learning


QUICK = "--num-envs 32 --num-steps 4 --learning-rate 3e-3 --hidden-size 32 --target-interval 20"
QUICK += " --learning-starts 500 --buffer-size 2000"


@pytest.mark.parametrize(
    ("env_id", "num_steps"),
    [
        ("Shifted-v0", 6000),
        ("Quadrants-v0", 4500),
        pytest.param("SameStepQuadrants-v0", 6000, marks=pytest.mark.slow),
    ],
)
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, num_steps):
    """Numbers and actions that do not start at 0, and pictures."""
    flags = f"--env-id probe_envs:{env_id} --total-timesteps {num_steps} --eval-episodes 200 --seed 11"
    flags += f" --burn-in 0 --learn-length 1 --replay-ratio 2 --batch-size 32 {QUICK}"
    scores = read_scalars(run(tmp_path, flags).path)["eval/episodic_return"]
    assert scores[-1][1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("env_id", "num_steps"),
    [
        ("Endless-v0", 16_000),
        pytest.param("SameStepEndless-v0", 16_000, marks=pytest.mark.slow),
        pytest.param("EndlessTerminating-v0", 48_000, marks=pytest.mark.slow),  # the LSTM learns to count
    ],
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id, num_steps):
    """Truncation must not cut the value: 1 / (1 - 0.9) = 10. Termination leaves the rewards to come."""
    flags = f"{QUICK} --env-id probe_envs:{env_id} --gamma 0.9 --total-timesteps {num_steps} --burn-in 4"
    flags += " --learn-length 6 --n-step 3 --buffer-size 1000 --batch-size 384 --memory-span 1"
    checkpoint = load(run(tmp_path, flags).path / "checkpoint.pt")
    agent = QNetwork(describe(gym.spaces.Box(-1, 1, (1,)), 2), Args(hidden_size=32))
    agent.load_state_dict(checkpoint["agent"])
    actions, rewards = torch.tensor([[-1] + [0] * 9]), torch.tensor([[0.0] + [1.0] * 9])
    with torch.no_grad():
        q, _ = agent(torch.ones(1, 10, 1), actions, rewards, torch.zeros(1, 2, 32))
    values = r2d2.inverse_value_rescale(q[0].max(-1).values)
    rewards_left = np.arange(10, 0, -1) if "Terminating" in env_id else np.inf
    np.testing.assert_allclose(values, np.full(10, (1 - 0.9**rewards_left) / (1 - 0.9)), rtol=0.05, atol=0.3)


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [("--seed 11", 0.98, 1.0), ("--no-recurrent --total-timesteps 4000", -0.4, 0.4)],
)
def test_the_lstm_remembers_what_only_the_stored_states_hold(tmp_path, flags, low, high):
    """No window holds both the cue, shown at step 0, and step 4, at which it is asked for."""
    base = f"--env-id probe_envs:Recall-v0 {QUICK} --total-timesteps 16000 --batch-size 96 --burn-in 2"
    base += " --learn-length 3 --n-step 2 --replay-ratio 4 --eval-episodes 100"
    scores = read_scalars(run(tmp_path, base, *flags.split()).path)["eval/episodic_return"]
    assert low <= scores[-1][1] <= high


# Training


SMALL = "--num-envs 4 --learning-starts 100 --batch-size 128 --buffer-size 60 --hidden-size 8"
SMALL += " --target-interval 5 --eval-episodes 1 --replay-ratio 2"
NUM_UPDATES, NUM_DUE = 6, 7  # places in a checkpoint's progress


def test_updates_keep_to_the_replay_ratio_and_copy_the_target(tmp_path, monkeypatch):
    update, is_equal = r2d2.update_network, []

    def watch(agent, target, *rest):
        pairs = zip(agent.parameters(), target.parameters(), strict=True)
        is_equal.append(all(torch.equal(a, b) for a, b in pairs))
        return update(agent, target, *rest)

    monkeypatch.setattr(r2d2, "update_network", watch)
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 7 --total-timesteps 1500 --burn-in 2"
    flags += " --learning-starts 0 --learn-length 3 --n-step 2 --batch-size 15 --buffer-size 60"
    flags += " --replay-ratio 0.7 --target-interval 7 --hidden-size 8 --eval-episodes 1"
    path = run(tmp_path, flags).path
    checkpoint, scalars = load(path / "checkpoint.pt"), read_scalars(path)
    num_windows, num_updates = checkpoint["num_added"], len(is_equal)
    assert num_windows > 500 and num_updates == checkpoint["progress"][NUM_UPDATES] > 60
    assert 0.7 * num_windows / 5 == pytest.approx(num_updates + checkpoint["progress"][NUM_DUE] % 1)
    assert scalars["charts/num_updates"][-1][1] == num_updates
    assert is_equal == [i % 7 == 0 for i in range(num_updates)]


def test_logged_returns_are_those_of_the_less_exploring_half(tmp_path):
    """Steps that only reset count nowhere, and rewards of 0 do not count in the root mean square."""
    probe_envs.Fixed.made = 0
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 6 --total-timesteps 40 --eval-episodes 1"
    flags += " --learning-starts 20 --buffer-size 9 --batch-size 2 --learn-length 3 --learning-rate 4e-3"
    path = run(tmp_path, flags).path
    scalars = read_scalars(path)
    # Rewards 0, 1, 2, 3 a step in four environments; 5 steps an episode, then one that resets
    assert scalars["charts/episodic_return"] == [(20, 12.5), (40, 12.5)]
    assert scalars["charts/episodic_length"] == [(20, 5.0), (40, 5.0)]
    assert [x for _, x in scalars["charts/learning_rate"]] == pytest.approx([4e-3, 2e-3])
    names = "losses/q_loss losses/td_error losses/grad_norm eval/episodic_return_std charts/num_updates"
    assert {*names.split()} <= scalars.keys()
    count, squares = load(path / "checkpoint.pt")["agent"]["reward_sums"].tolist()
    assert (count, squares) == pytest.approx((30, 10 * (1 + 4 + 9)))


@pytest.mark.parametrize("norm_reward", [True, False])
def test_statistics_of_same_step_episodes(norm_reward):
    """Returns of the less exploring environments, and the root mean square of rewards, or 1."""
    args = make_args("SameStepLedger", num_envs=5, num_steps=60, norm_reward=norm_reward)
    agent, player, replay = make_parts(args)
    assert agent.reward_sums[0] == agent.reward_sums[1] > 0 and agent.reward_sums.dtype == torch.float64
    episodes, num_steps, _ = r2d2.collect_steps(player, player.act, replay, args)
    ledgers = get_ledgers(player.envs)
    ended = [e for ledger in ledgers[2:] for e in ledger.episodes if e and any(e[-1][4:])]
    expected = sorted((sum(x[2] for x in e), len(e)) for e in ended)
    assert num_steps == 300 and len(expected) > 20
    np.testing.assert_allclose(sorted(episodes), expected, rtol=1e-6, atol=1e-9)
    rewards = [step[2] for ledger in ledgers for e in ledger.episodes for step in e]
    count, squares = agent.reward_sums
    expected = np.mean(np.square(rewards)) if norm_reward else 1.0
    assert (squares / count).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("NotFiniteobs", "observation of environment 1 is not finite in step 3"),
        ("SameStepNotFiniteobs", "observation of environment 1 is not finite in step 3"),
        ("NotFinitereward", "reward of environment 1 is not finite in step 3"),
        ("NoLimit", r"losses are not finite at step \d+"),
    ],
)
def test_what_is_not_finite_ends_the_run_with_one_line(tmp_path, capsys, env_id, words):
    """The line names the environment and the step. The earlier checkpoint stays."""
    probe_envs.Fixed.made = 0
    flags = f"--env-id probe_envs:{env_id}-v0 {SMALL} --learning-rate 1e30 --run-dir {tmp_path}"
    line = fail_with(capsys, r2d2.main, flags.split())
    assert re.search(f"error: probe_envs:{env_id}-v0: {words}$", line)
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


# Resume


def test_a_checkpoint_holds_all_that_a_resumed_run_starts_with(tmp_path):
    """A run that is resumed, and neither acts nor learns, writes the same again."""
    path = (
        run(tmp_path, f"--env-id probe_envs:Ledger-v0 {SMALL} --total-timesteps 900").path / "checkpoint.pt"
    )
    ends = [load(path)]
    with mock.patch.object(r2d2, "collect_steps", lambda *args: ([], 64, 0)):
        r2d2.main(["--resume", str(path), "--total-timesteps", "1200", "--eval-episodes", "0"])
    ends.append(load(path))
    assert ends[1]["progress"][1] > ends[0]["progress"][1]
    for end in ends:
        end["optimizer"], end["progress"] = end["optimizer"]["state"], end["progress"][NUM_UPDATES]
        del end["args"]
    assert ends[0]["num_added"] > 60 and ends[0]["optimizer"]
    torch.testing.assert_close(*ends, rtol=0, atol=0)
    assert any(not torch.equal(x, ends[0]["target"][name]) for name, x in ends[0]["agent"].items())


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_resumed_run_trains_at_once_or_fills_its_replay_first(tmp_path, has_replay):
    """No run trains before its replay holds --learning-starts steps."""
    flags = f"--env-id probe_envs:Endless-v0 {SMALL} --total-timesteps 600 --learning-starts 200"
    flags += " --learn-length 4 --burn-in 2 --eval-interval 3"
    path = run(tmp_path, flags, *([] if has_replay else ["--no-checkpoint-replay"])).path
    first = load(path / "checkpoint.pt")
    assert ("replay" in first) == ("num_added" in first) == has_replay
    assert "replay" not in load(path / "best.pt")
    r2d2.main(["--resume", str(path / "checkpoint.pt"), "--total-timesteps", "1500", "--checkpoint-replay"])
    second, step = load(path / "checkpoint.pt"), first["progress"][1]
    updates = {s: n for s, n in read_scalars(path)["charts/num_updates"] if s > step}
    assert len(updates) > 10 and max(updates.values()) > first["progress"][NUM_UPDATES] + 10
    waiting = [s - step for s, n in updates.items() if n == first["progress"][NUM_UPDATES]]
    assert waiting == ([] if has_replay else [60, 120, 176])  # with 16, 32 and 48 windows of 4 steps
    assert any(not torch.equal(x, second["agent"][name]) for name, x in first["agent"].items())


def test_evaluate_plays_other_episodes_and_a_checkpoint_that_does_not_fit_is_one_line(
    tmp_path, monkeypatch, capsys
):
    """Other episodes than those that chose the best."""
    streams, evaluate = [], r2d2.evaluate
    monkeypatch.setattr(r2d2, "evaluate", lambda *args: streams.append(args[3]) or evaluate(*args))
    path = run(tmp_path, f"{SMALL} --total-timesteps 164").path
    for name in ("best.pt", "checkpoint.pt"):
        r2d2.main(["--evaluate", str(path / name), "--eval-episodes", "2"])
    assert streams == [2, 3, 3]
    content = (path / "checkpoint.pt").read_bytes()
    for flags in ("--evaluate --no-last-action-reward", "--resume --buffer-size 61", "--resume --burn-in 9"):
        mode, *flags = flags.split()
        line = fail_with(capsys, r2d2.main, [mode, str(path / "checkpoint.pt"), *flags])
        assert "checkpoint.pt: does not fit the environment or flags" in line
    assert (path / "checkpoint.pt").read_bytes() == content
