"""R2D2 against brute force, float64, the environments' own ledgers and its own specification."""

import math
import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from conftest import ROOT, read_scalars
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_contract import find_run, load, run_main

from algos import r2d2_lstm as r2d2
from algos.r2d2_lstm import Args, Player, QNetwork, SequenceReplay, compute_targets, r2d2_loss

CPU = torch.device("cpu")
LEDGERS = ("Ledger-v0", "SameStepLedger-v0", "ReusedLedger-v0")
LENGTHS = [(0, 3, 2), (2, 4, 1), (3, 2, 5), (1, 1, 1)]  # burn_in, learn_length, n_step


def describe(obs_dim=3, num_actions=4, num_envs=1):
    """What networks and replays need to know of environments."""
    spaces = gym.spaces.Box(-np.inf, np.inf, (obs_dim,), np.float32), gym.spaces.Discrete(num_actions)
    names = "single_observation_space", "single_action_space"
    return SimpleNamespace(num_envs=num_envs, **dict(zip(names, spaces, strict=True)))


def make_args(burn_in, learn_length, n_step, **more):
    more = {"hidden_size": 6, "gamma": 0.9} | more
    return Args(burn_in=burn_in, learn_length=learn_length, n_step=n_step, **more)


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


def get_ledgers(player):
    return [env.unwrapped for env in player.envs.unwrapped.envs]


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


class Table:
    """In place of a QNetwork: one value everywhere; its gradient shows which steps are trained."""

    reward_sums = torch.ones(2).double()

    def __call__(self, obs, last_action, last_reward, state):
        self.q = torch.full((*obs.shape[:2], 16), 5.0, requires_grad=True)
        return self.q, state


def find_trained(windows, args):
    """The action that eq. 3 trains at each step of the windows [N, m], -1 if none."""
    agent, num_windows = Table(), len(windows["end"])
    args = replace(args, recurrent=False)  # which needs no burn-in
    loss, _, count, _ = r2d2_loss(agent, Table(), windows, torch.ones(num_windows), args)
    loss.backward()
    is_trained = agent.q.grad != 0  # [N, m + n, A]
    assert (is_trained.sum(-1) <= 1).all() and not is_trained[:, args.learn_length :].any()
    assert is_trained.sum() == count
    is_trained = is_trained[:, : args.learn_length].int()
    return torch.where(is_trained.any(-1), is_trained.argmax(-1), -1)


# The rescaling of values


def test_rescaling_is_the_textbooks_and_its_inverse_undoes_it():
    magnitudes = torch.logspace(-8, 6, 1000, dtype=torch.float64)
    x, eps = torch.cat((-magnitudes, magnitudes)), 1e-3
    torch.testing.assert_close(r2d2.value_rescale(x), x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x)
    root = (1 + 4 * eps * (x.abs() + 1 + eps)).sqrt()
    inverse = x.sign() * (((root - 1) / (2 * eps)) ** 2 - 1)  # which loses digits
    torch.testing.assert_close(r2d2.inverse_value_rescale(x), inverse, rtol=1e-9, atol=1e-11)
    for function in (r2d2.value_rescale, r2d2.inverse_value_rescale):  # float32 against float64
        torch.testing.assert_close(function(x.float()).double(), function(x), rtol=1e-6, atol=0.0)
    round_trip = r2d2.inverse_value_rescale(r2d2.value_rescale(x.float()))
    torch.testing.assert_close(round_trip, x.float(), rtol=1e-6, atol=0.0)
    zero = torch.zeros(1)
    assert r2d2.value_rescale(zero).item() == r2d2.inverse_value_rescale(zero).item() == 0.0


# Windows


def store_episode(args, num_steps):
    """A replay of an episode that terminates: step t shows t, takes action t, and gets the reward 10 (t + 1)."""
    replay = SequenceReplay(describe(obs_dim=1), args, CPU)
    for t in range(num_steps + 1):
        reading = np.float32([t]), t - 1, 10.0 * t, torch.full((2, args.hidden_size), float(t))
        is_over = [t == num_steps]
        replay.add(SimpleNamespace(read=[(0, reading)], is_over=is_over, terminated=is_over))
    return replay


@pytest.mark.parametrize(
    ("last_window", "learn_length", "expected"),
    [
        ("mask", 3, [[0, 1, 2], [3, 4, 5]]),
        ("mask", 4, [[0, 1, 2, 3], [4, 5]]),
        ("overlap", 3, [[0, 1, 2], [3, 4, 5]]),
        ("overlap", 4, [[0, 1, 2, 3], [2, 3, 4, 5]]),
        ("overlap", 7, [[0, 1, 2, 3, 4, 5]]),
        ("null", 3, [[0, 1, 2], [3, 4, 5]]),
        ("null", 4, [[0, 1, 2, 3], [4, 5, 6, 6]]),
        ("null", 7, [[0, 1, 2, 3, 4, 5, 6]]),
    ],
)
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("burn_in", [0, 2])
def test_an_episode_of_six_steps_is_arranged_in_three_ways(
    last_window, learn_length, expected, n_step, burn_in
):
    """The steps that are trained. A null step shows the last observation and is worth nothing."""
    args = make_args(burn_in, learn_length, n_step, last_window=last_window, buffer_size=10, hidden_size=1)
    replay = store_episode(args, 6)
    windows = get_windows(replay)
    trained, obs = find_trained(windows, args), windows["obs"][..., 0]
    found = [x[burn_in:][:learn_length][a >= 0].tolist() for x, a in zip(obs, trained, strict=True)]
    assert found == expected
    targets = []

    def record(*inputs):
        targets.append(compute_targets(*inputs))
        return targets[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r2d2, "compute_targets", record)
        find_trained(windows, args)
    for i, steps in enumerate(expected):
        is_warm = steps[0] >= burn_in
        assert windows["is_warm"][i] == is_warm
        assert (windows["state"][i] == steps[0] - burn_in * is_warm).all()
        real = [step for step in steps if step < 6]
        assert trained[i, : len(real)].tolist() == real  # which are the actions, too
        assert windows["last_reward"][i, burn_in + 1 :][: len(real)].tolist() == [10.0 * t + 10 for t in real]
        assert windows["is_terminated"][i] == (steps[0] + learn_length + n_step > 6)
        assert windows["end"][i] == burn_in + min(6 - steps[0], learn_length + n_step - 1)
        assert ((targets[0][i] == 0).tolist()) == [k >= len(real) for k in range(learn_length)]


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
    windows = get_windows(replay)
    actions = find_trained(windows, args).tolist()
    windows = {name: x.numpy() for name, x in windows.items()}
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
        beyond = episode[-1][1] if args.last_window == "null" else -1
        true_actions = [x[1] for x in episode[step : step + m]]
        assert actions[i] == true_actions + [beyond] * (m - len(true_actions))
        trained.update((env, number, step + t) for t in range(len(true_actions)))
    return found, trained


@settings(max_examples=60, deadline=None)
@given(
    env_id=st.sampled_from(LEDGERS),
    last_window=st.sampled_from(("mask", "overlap", "null")),
    p_ends=st.lists(st.sampled_from((0.0, 0.02, 0.1, 0.4, 1.0)), min_size=1, max_size=3),
    burn_in=st.integers(0, 6),
    learn_length=st.integers(1, 5),
    n_step=st.integers(1, 6),
    num_steps=st.integers(1, 30),
    buffer_size=st.one_of(st.just(300), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
@example("Ledger-v0", "overlap", [0.1, 0.4], 3, 5, 2, 20, 300, 0)
@example("SameStepLedger-v0", "overlap", [0.1, 1.0], 6, 4, 6, 7, 300, 1)
@example("SameStepLedger-v0", "null", [0.1, 0.02], 1, 3, 1, 7, 5, 2)
def test_every_step_of_an_episode_is_trained_in_one_window_and_windows_are_true(
    env_id, last_window, p_ends, burn_in, learn_length, n_step, num_steps, buffer_size, seed
):
    """A replay that is too small for all windows holds the newest ones."""
    lengths = {"burn_in": burn_in, "learn_length": learn_length, "n_step": n_step, "num_steps": num_steps}
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=len(p_ends), hidden_size=2, **lengths)
    args.last_window, args.buffer_size = last_window, buffer_size
    parts = _, player, replay = make_parts(args, Recorder(), seed=seed)
    ledgers = get_ledgers(player)
    for ledger, p_end in zip(ledgers, p_ends, strict=True):
        ledger.p_end = p_end
    taken = play(parts, args, max(60 // num_steps, 1))
    replay.add(player)  # what was read last
    assert taken == sum(len(episode) for ledger in ledgers for episode in ledger.episodes)
    found, trained = check_windows(replay, ledgers, args)
    num_expected, is_once = 0, last_window != "overlap"
    for env, ledger in enumerate(ledgers):
        expected, steps = [], set()
        for number, episode in enumerate(ledger.episodes):
            is_over = bool(episode) and any(episode[-1][4:])
            starts = expect_windows(len(episode), is_over, args)
            expected += [(env, number, start) for start in starts]
            num_trained = len(episode) if is_over else len(starts) * learn_length
            steps |= {(env, number, t) for t in range(num_trained)}
        mine = [x for x in found if x[0] == env]
        assert sorted(mine) == expected[len(expected) - len(mine) :]
        num_expected += len(expected)
        if buffer_size == 300:
            counts = {step: count for step, count in trained.items() if step[0] == env}
            assert counts.keys() == steps and (not is_once or set(counts.values()) <= {1})
    assert replay.num_added == num_expected < 300 and len(found) == min(num_expected, buffer_size)


def test_the_page_shows_the_windows_that_the_replay_holds():
    """The drawing of an episode of 12 steps: step by step, what a window takes it for."""
    args = make_args(4, 5, 2, buffer_size=10, hidden_size=1)
    windows, found, starts = get_windows(store_episode(args, 12)), [], []
    for obs, end, is_warm, state in zip(
        *(windows[name] for name in ("obs", "end", "is_warm", "state")), strict=True
    ):
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


@pytest.mark.parametrize("env_id", LEDGERS[:2])
@pytest.mark.parametrize(("burn_in", "learn_length"), [(0, 3), (2, 4), (7, 3)])
def test_stored_states_are_those_of_the_whole_episode(env_id, burn_in, learn_length):
    args = make_args(burn_in, learn_length, 2, env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=5)
    args.buffer_size = 500
    parts = agent, player, replay = make_parts(args)
    ledgers = get_ledgers(player)
    for ledger in ledgers:
        ledger.p_end = 0.03
    play(parts, args, 8)
    windows, places, num_zero = get_windows(replay), look_up(ledgers), 0
    for obs, state, is_warm in zip(*(windows[x] for x in ("obs", "state", "is_warm")), strict=True):
        env, number, step = places[obs[burn_in].numpy().tobytes()]
        before = ledgers[env].episodes[number][: step - burn_in if is_warm else step]
        if before:
            last_action = torch.tensor([[-1, *(x[1] for x in before[:-1])]])
            last_reward = torch.tensor([[0.0, *(x[2] for x in before[:-1])]])
            seen = torch.tensor(np.array([x[0] for x in before]))[None]
            with torch.no_grad():
                _, expected = agent(seen, last_action, last_reward, torch.zeros(1, 2, 5))
            torch.testing.assert_close(state, expected[0], rtol=1e-5, atol=1e-6)
        assert before or not state.any()
        num_zero += not before
    assert 5 < num_zero < replay.num_added - 10


# Targets and the loss


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
    for i in range(num_windows):
        assert not found[i, end[i] :].any()
        for t in range(min(learn_length, end[i])):
            one = q[i], target_q[i], rewards[i], end[i], is_terminated[i]
            expected = brute_force_target(*one, t, gamma, n_step)
            assert found[i, t].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_padding_far_beyond_the_end_is_finite(gamma):
    """The discount over the steps from the padding back to the end would be gamma to the power of -79."""
    end, is_terminated = torch.ones(2, dtype=torch.int64), torch.tensor([True, False])
    targets = compute_targets(*torch.randn(2, 2, 81, 3), torch.randn(2, 80), end, is_terminated, gamma, 1)
    assert targets.isfinite().all() and targets[:, 0].all()


def make_windows(args, num_windows=8, obs_dim=3, num_actions=4, seed=0):
    """Random windows of all kinds, as the replay has them; the parts that hold nothing are filled too."""
    rng, length = np.random.default_rng(seed), args.burn_in + args.learn_length + args.n_step
    end = rng.integers(args.burn_in + 1, length, num_windows)
    end[:2], is_warm = length - 1, rng.random(num_windows) < 0.5
    windows = {
        "obs": rng.normal(size=(num_windows, length, obs_dim)),
        "last_action": rng.integers(0, num_actions, (num_windows, length)),
        "last_reward": rng.normal(size=(num_windows, length)) * 3,
        "state": rng.normal(size=(num_windows, 2, args.hidden_size)),
        "end": end,
        "is_terminated": np.arange(num_windows) % 2 == 1,
        "is_warm": is_warm,
    }
    for i in np.flatnonzero(~is_warm)[::2]:  # first windows of episodes
        windows["state"][i], windows["last_action"][i, args.burn_in] = 0.0, -1
        windows["last_reward"][i, args.burn_in] = 0.0
    if is_warm.any():  # one whose burn-in begins with an episode
        windows["last_action"][np.flatnonzero(is_warm)[0], 0] = -1
    windows = {name: torch.from_numpy(np.array(x)) for name, x in windows.items()}
    return {name: x.float() if x.is_floating_point() else x for name, x in windows.items()}


def make_networks(args):
    """Agent and target network with different weights; rewards have the root mean square 3."""
    torch.manual_seed(7)
    agent, target = QNetwork(describe(), args), QNetwork(describe(), args)
    with torch.no_grad():
        for p in (*agent.parameters(), *target.parameters()):
            p.mul_(2.0)
    agent.reward_sums.copy_(torch.tensor([4.0, 36.0]))
    return agent, target.requires_grad_(False)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("state_init", ["stored", "zero"])
def test_unroll_equals_one_step_at_a_time(lengths, state_init):
    """A warm window begins with its burn-in, another one after it."""
    args = make_args(*lengths, state_init=state_init)
    agent, _ = make_networks(args)
    windows = make_windows(args)
    steps = [windows[name] for name in ("obs", "last_action", "last_reward")]
    assert not args.burn_in or len(windows["is_warm"].unique()) == 2
    with torch.no_grad():
        found = r2d2.unroll(agent, windows, args)
        for i, is_warm in enumerate(windows["is_warm"]):
            state, q = windows["state"][i : i + 1] * (state_init == "stored"), []
            for t in range(0 if is_warm else args.burn_in, steps[0].shape[1]):
                one, state = agent(*(x[i : i + 1, t : t + 1] for x in steps), state)
                q.append(one[0, 0])
            torch.testing.assert_close(found[i], torch.stack(q[args.burn_in * is_warm :]))


def naive_q(weights, obs, last_action, last_reward, h, c):
    """Q values [A] and the LSTM's next state, from single steps and a dict of float64 weights."""

    def layer(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    one_hot = torch.zeros(4, dtype=torch.float64)
    if last_action >= 0:
        one_hot[last_action] = 1.0
    x = torch.cat((layer("encoder.1", obs).relu(), one_hot, last_reward.reshape(1)))
    gates = weights["core.weight_ih_l0"] @ x + weights["core.bias_ih_l0"]
    gates = gates + weights["core.weight_hh_l0"] @ h + weights["core.bias_hh_l0"]
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    advantage = layer("advantage.2", layer("advantage.0", h).relu())
    value = layer("value.2", layer("value.0", h).relu())
    return value + advantage - advantage.mean(), h, c


def naive_loss(weights, target_weights, windows, importance, rms, args):
    """Eq. 2 to 4 as loops over windows and steps in float64: loss, priorities and two means of METRICS."""
    windows = {k: v.double() if v.is_floating_point() else v for k, v in windows.items()}
    total, priorities, sums, count = 0.0, [], np.zeros(2), 0
    for n in range(len(importance)):
        end = int(windows["end"][n]) - args.burn_in
        all_q = []
        for w in (weights, target_weights):
            h, c = windows["state"][n] * (args.state_init == "stored")
            q = []
            for t in range(0 if windows["is_warm"][n] else args.burn_in, args.burn_in + end + 1):
                if t == args.burn_in:
                    h, c = h.detach(), c.detach()
                step = (windows[name][n, t] for name in ("obs", "last_action", "last_reward"))
                value, h, c = naive_q(w, *step, h, c)
                q += [value] if t >= args.burn_in else []
            all_q.append(q)
        q, target_q = ([x.detach().numpy() for x in part] for part in all_q)
        rewards = (windows["last_reward"][n, args.burn_in + 1 :] / rms).tolist()
        ends, errors = (end, windows["is_terminated"][n]), []
        for t in range(min(args.learn_length, end)):
            y = brute_force_target(q, target_q, rewards, *ends, t, args.gamma, args.n_step)
            error = y - all_q[0][t][windows["last_action"][n, args.burn_in + t + 1]]
            total = total + importance[n].double() * error**2 / 2
            errors.append(abs(error.item()))
            sums += importance[n].item() * error.item() ** 2 / 2, abs(error.item())
        priorities.append(0.9 * max(errors) + 0.1 * sum(errors) / len(errors))
        count += len(errors)
    return total / count, priorities, sums / count


def run_loss(agent, target, windows, importance, args):
    """Loss, priorities and metrics, and the gradients by name, of means over the trained steps."""
    agent.zero_grad()
    loss, metrics, count, priorities = r2d2_loss(agent, target, windows, importance, args)
    (loss / count).backward()
    gradients = {name: p.grad.clone() for name, p in agent.named_parameters()}
    return loss.detach() / count, priorities, metrics / count, gradients


def get_weights(network):
    """Parameters in float64, with gradients of their own."""
    return {name: p.detach().double().requires_grad_() for name, p in network.named_parameters()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("state_init", ["stored", "zero"])
def test_loss_and_gradients_equal_float64_loops(lengths, state_init):
    args = make_args(*lengths, state_init=state_init)
    agent, target = make_networks(args)
    windows, importance = make_windows(args), torch.linspace(0.3, 1.0, 8)
    loss, priorities, metrics, grads = run_loss(agent, target, windows, importance, args)
    weights = get_weights(agent)
    naive = naive_loss(weights, get_weights(target), windows, importance, 3.0, args)
    expected, expected_priorities, expected_metrics = naive
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    np.testing.assert_allclose(priorities, expected_priorities, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics, expected_metrics, rtol=1e-4, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.double(), weights[name].grad, rtol=1e-3, atol=1e-5, msg=name)
    assert grads["core.weight_hh_l0"].abs().max() > 1e-3


@pytest.mark.parametrize("lengths", LENGTHS)
def test_padding_changes_nothing_and_real_steps_do(lengths):
    args = make_args(*lengths)
    agent, target = make_networks(args)
    windows, importance = make_windows(args), torch.linspace(0.3, 1.0, 8)
    before = run_loss(agent, target, windows, importance, args)
    slots = torch.arange(windows["obs"].shape[1])
    is_before = (slots < args.burn_in) & ~windows["is_warm"].unsqueeze(1)
    is_padding = (slots > windows["end"].unsqueeze(1)) | is_before  # [N, L]
    padded = {name: x.clone() for name, x in windows.items()}
    padded["obs"][is_padding] = 50.0
    padded["last_reward"][is_padding] = -70.0
    padded["last_action"][is_padding] = 3
    padded["last_action"][is_before] = -1
    after = run_loss(agent, target, padded, importance, args)
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-8)
    for n, slot in (~is_padding).nonzero().tolist():
        changed = {name: x.clone() for name, x in windows.items()}
        changed["obs"][n, slot] += 1.0
        has_effect = not (windows["is_terminated"][n] and slot == windows["end"][n])  # no value is read there
        with torch.no_grad():
            priorities = r2d2_loss(agent, target, changed, importance, args)[3]
        differs = (priorities != before[1]).tolist()
        assert differs == [has_effect and i == n for i in range(8)], (n, slot)


def test_null_steps_are_trained_towards_zero():
    """With the last action, and they count in the means."""
    args = make_args(1, 3, 2, last_window="null")
    agent, target = make_networks(args)
    windows = make_windows(args)
    for name in ("obs", "last_action", "last_reward"):  # as the replay fills up its windows
        for i, end in enumerate(windows["end"]):
            windows[name][i, end:] = windows[name][i, end]
    null, mask = (
        r2d2_loss(agent, target, windows, torch.ones(8), replace(args, last_window=x))
        for x in ("null", "mask")
    )
    q, losses = r2d2.unroll(agent, windows, args), []
    for i, end in enumerate((windows["end"] - args.burn_in).tolist()):
        last_action = windows["last_action"][i, -1]
        losses += [0.5 * q[i, t, last_action].item() ** 2 for t in range(end, 3)]
    assert len(losses) > 3 and null[2] == 24 and mask[2] == 24 - len(losses)
    assert (null[0] - mask[0]).item() == pytest.approx(sum(losses), rel=1e-4)


# Priorities


def test_priority_of_a_worked_example():
    errors = torch.tensor([[1.0, -2.0, 6.0], [-3.0, 9.0, 9.0]])
    is_trained = torch.tensor([[True, True, True], [True, False, False]])
    found = r2d2.sequence_priority(errors, is_trained)
    torch.testing.assert_close(found, torch.tensor([0.9 * 6 + 0.1 * 3, 3.0]))


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_samples_follow_the_priorities(monkeypatch, alpha):
    replay = SequenceReplay(describe(), Args(hidden_size=2, buffer_size=7), CPU)
    priority = replay.data["priority"]
    priority[:] = torch.tensor([0.0, 3.0, 0.5, 0.0, 1.0, 1e-8, 0.0])
    exponents = {} if alpha == 0.9 else {"alpha": alpha, "beta": 0.6}  # those of the paper by default
    p = torch.where(priority > 0, priority.double() ** alpha, 0)
    p /= p.sum()
    replay.batch_windows = 1000
    torch.manual_seed(0)
    index, weights = replay.sample(**exponents)
    counts = torch.bincount(index, minlength=7)
    assert ((counts - 1000 * p).abs() < 2).all()  # stratified sampling allows no more
    assert not counts[[0, 3, 6]].any()
    expected = p[index] ** -0.6
    torch.testing.assert_close(weights.double(), expected / expected.max(), rtol=1e-5, atol=0.0)
    replay.batch_windows = 1
    singles = torch.cat([replay.sample(**exponents)[0] for _ in range(4000)])
    np.testing.assert_allclose(torch.bincount(singles, minlength=7) / 4000, p, atol=0.03)
    priority[0] = 0.25  # a replay is filled from its first place on
    for noise, drawn in (
        (0.0, 0),
        (1 - 2**-53, 5),
    ):  # the lowest and the highest point; the last place is empty
        monkeypatch.setattr(torch, "rand_like", lambda x, dtype, n=noise: torch.full(x.shape, n, dtype=dtype))
        replay.batch_windows = 64
        index, _ = replay.sample(**exponents)
        assert index[-1 if noise else 0] == drawn
    for broken in (math.nan, math.inf):  # the sample is still one of windows, and its weights show the fault
        priority[1], replay.batch_windows = broken, 3
        index, weights = replay.sample(**exponents)
        assert ((index >= 0) & (index < 7)).all() and not weights.isfinite().all()


def test_new_windows_get_the_largest_priority():
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, hidden_size=2, buffer_size=200)
    parts = make_parts(args, Recorder())
    replay = parts[2]
    priority = replay.data["priority"]
    play(parts, args, 3)
    n = replay.num_added
    assert n > 5 and priority.tolist() == [1.0] * n + [0.0] * (200 - n)
    priority[:n] = torch.linspace(0.2, 0.7, n)
    play(parts, args)
    assert replay.num_added > n
    torch.testing.assert_close(priority[:n], torch.linspace(0.2, 0.7, n))
    assert (priority[n : replay.num_added] == priority[n - 1]).all()
    assert not priority[replay.num_added :].any()


@pytest.mark.parametrize("max_grad_norm", [1e9, 1e-3])
def test_an_update_learns_from_what_it_samples_and_writes_priorities(max_grad_norm):
    args = make_args(2, 3, 2, env_id="probe_envs:Ledger-v0", num_envs=3, batch_size=26, buffer_size=90)
    args.max_grad_norm = max_grad_norm
    parts = agent, _, replay = make_parts(args)
    play(parts, args, 3)
    target = QNetwork(describe(), args)
    agent.reward_sums.copy_(torch.tensor([2.0, 25.0]))
    priority = replay.data["priority"]
    priority[: replay.num_added] = torch.rand(replay.num_added) + 0.1
    expected_priority, rng_state = priority.clone(), torch.get_rng_state()
    index, importance = replay.sample()
    assert len(index) == 8 and importance.min() < 0.8  # windows of 3 steps each
    windows = {name: x[index] for name, x in replay.data.items()}
    weights, target_weights = get_weights(agent), get_weights(target)
    naive = naive_loss(weights, target_weights, windows, importance, math.sqrt(12.5), args)
    naive[0].backward()
    norm = math.sqrt(sum(x.grad.square().sum().item() for x in weights.values()))
    expected_priority[index] = torch.tensor(naive[1], dtype=torch.float32)
    torch.set_rng_state(rng_state)
    metrics = r2d2.update_network(agent, target, torch.optim.SGD(agent.parameters(), 0.1), replay, args)
    torch.testing.assert_close(priority, expected_priority, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics, [*naive[2], norm], rtol=1e-4, atol=1e-5)
    assert metrics[0].item() == pytest.approx(naive[0].item(), rel=1e-4) and norm > 1e-2
    for name, p in agent.named_parameters():
        step = 0.1 * weights[name].grad * min(1.0, max_grad_norm / norm)
        torch.testing.assert_close(p.double(), weights[name] - step, rtol=1e-4, atol=1e-6, msg=name)
    assert all(torch.equal(p, target_weights[name].float()) for name, p in target.named_parameters())


def test_an_error_of_zero_leaves_a_window_that_can_be_drawn():
    args = make_args(0, 1, 1, env_id="probe_envs:Ledger-v0", num_envs=2, batch_size=2, buffer_size=9)
    parts = agent, _, replay = make_parts(args)
    play(parts, args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(r2d2, "sequence_priority", lambda errors, _: torch.zeros(len(errors)))
        optimizer = torch.optim.SGD(agent.parameters(), 0.1)
        for _ in range(50):
            r2d2.update_network(agent, agent, optimizer, replay, args)
    assert set(replay.data["priority"].tolist()) == {np.float32(1e-8)}


# Acting


def test_exploration_follows_the_ladder():
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    np.testing.assert_allclose(r2d2.epsilon_ladder(4, 0.4), expected, rtol=1e-5)
    assert r2d2.epsilon_ladder(1, 0.3).tolist() == pytest.approx([0.3])
    epsilons = torch.tensor([0.0, 0.2, 0.6, 1.0])
    args = Args(env_id="probe_envs:SameStepLedger-v0", num_envs=20, num_steps=300, hidden_size=1)
    q = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(20, 1, 4)
    _, player, _ = make_parts(args, lambda *inputs: (q, inputs[-1]), epsilons.repeat(5))
    for _ in range(300):
        player.step(player.act)
    ledgers = get_ledgers(player)
    for i, epsilon in enumerate(epsilons.tolist()):
        actions = [step[1] for ledger in ledgers[i::4] for episode in ledger.episodes for step in episode]
        frequencies = np.bincount(actions, minlength=4) / 1500
        np.testing.assert_allclose(frequencies, epsilon / 4 + (1 - epsilon) * np.eye(4)[1], atol=0.05)
        assert epsilon > 0 or frequencies[1] == 1.0


def test_a_run_gives_each_environment_its_epsilon(tmp_path, monkeypatch):
    """The ladder in training, of which the second of two processes has every second; and 0 in evaluations."""
    given = []

    class Watched(Player):
        def __init__(self, agent, envs, args, epsilons, device, seed):
            given.append(epsilons.tolist())
            super().__init__(agent, envs, args, epsilons, device, seed)

    monkeypatch.setattr(r2d2, "Player", Watched)
    flags = "--env-id probe_envs:Fixed-v0 --num-steps 2 --hidden-size 2 --buffer-size 9 --eval-episodes 3"
    run(tmp_path, f"{flags} --num-envs 4 --epsilon 0.5 --total-timesteps 8")
    ladder = [0.5 ** (1 + 7 * i / 3) for i in range(4)]
    assert given == [pytest.approx(ladder), [0.0] * 3]
    given.clear()
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2)):
        monkeypatch.setattr(r2d2, name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))  # the other has the same
    r2d2.main(
        [*f"{flags} --num-envs 4 --epsilon 0.5 --total-timesteps 8".split(), "--run-dir", str(tmp_path)]
    )
    assert given == [pytest.approx(ladder[1::2])] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("env_id", LEDGERS)
@pytest.mark.parametrize("caller", ["collect_steps", "evaluate"])
def test_a_player_is_shown_action_reward_and_state_of_its_own_episode(monkeypatch, env_id, caller):
    """At the beginning of an episode there is none of them."""
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=2, eval_episodes=20)
    recorder, made, make_envs = Recorder(), [], r2d2.make_envs
    monkeypatch.setattr(r2d2, "make_envs", lambda *a: made.append(make_envs(*a)) or made[-1])
    if caller == "evaluate":
        scores = r2d2.evaluate(recorder, args, CPU, 4)
    else:
        play(make_parts(args, recorder, torch.tensor([0.0, 0.5, 1.0])), args, 8)
    ledgers = [env.unwrapped for env in made[0].unwrapped.envs]
    places, num_first = look_up(ledgers), 0
    for obs, action, reward, state in recorder.seen:
        env, number, step = places[obs.numpy().tobytes()]
        expected = ledgers[env].episodes[number][step - 1][1:3] if step > 0 else (-1, 0.0)
        assert (action, reward) == (expected[0], np.float32(expected[1])) and (state == step).all()
        num_first += step == 0
    assert num_first > 20 and len(recorder.seen) > 2 * num_first
    if caller == "evaluate":  # the first episode of each environment
        episodes = [ledger.episodes[0] for ledger in ledgers]
        returns, lengths = [sum(x[2] for x in e) for e in episodes], [len(e) for e in episodes]
        expected = {"return": np.mean(returns), "return_std": np.std(returns), "length": np.mean(lengths)}
        assert scores == pytest.approx({f"eval/episodic_{k}": x for k, x in expected.items()}, rel=1e-5)
        assert max(len(ledger.episodes) for ledger in ledgers) > 2


def test_evaluations_are_greedy_and_repeat_themselves():
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=1, hidden_size=4, eval_episodes=8)
    agent, *_ = make_parts(args)
    actions = []
    agent.register_forward_hook(lambda module, inputs, output: actions.append(output[0][:, 0].argmax(-1)))
    with pytest.MonkeyPatch.context() as patch:
        step = Player.step
        taken = []
        patch.setattr(Player, "step", lambda player, act: taken.append(step(player, act) or player))
        scores = r2d2.evaluate(agent, args, CPU, 2)
    ledgers = get_ledgers(taken[0])
    for i, ledger in enumerate(ledgers):
        episode = ledger.episodes[0]
        assert [x[1] for x in episode] == [a[i].item() for a in actions[: len(episode)]]
    assert r2d2.evaluate(agent, args, CPU, 2) == scores != r2d2.evaluate(agent, args, CPU, 3)


def test_an_episode_without_end_is_cut():
    args = Args(env_id="probe_envs:HalfEndless-v0", eval_episodes=2, hidden_size=1)
    q = torch.zeros(2, 1, 2)
    scores = r2d2.evaluate(lambda *inputs: (q, inputs[-1]), args, CPU, 2)  # every second seed never ends
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2


def remember_suits(obs, last_action, last_reward, state):
    """Keeps the last three suits in `state`, and answers with the oldest."""
    suits = state[:, 0]  # [B, 3]
    q = torch.nn.functional.one_hot(suits[:, 0].long(), 4).float()
    suits = torch.cat((suits[:, 1:], obs[:, 0].argmax(-1, keepdim=True).float()), 1)
    return q.unsqueeze(1), torch.stack((suits, state[:, 1]), 1)


def test_a_player_with_perfect_memory_gets_the_optimum_of_the_default_task():
    args = Args(eval_episodes=4, hidden_size=3)
    scores = r2d2.evaluate(remember_suits, args, CPU, 4)
    assert scores["eval/episodic_return"] == pytest.approx(1.0, abs=1e-6)
    forgetful = r2d2.evaluate(lambda *x: remember_suits(*x[:3], torch.zeros_like(x[3])), args, CPU, 4)
    assert forgetful["eval/episodic_return"] < 0.0


# Networks and observations


def test_forget_gates_open_for_one_step_to_the_memory_span():
    core = QNetwork(describe(), Args(hidden_size=3, memory_span=100.0)).core
    forget = (core.bias_ih_l0 + core.bias_hh_l0)[3:6].sigmoid()
    torch.testing.assert_close(forget, torch.tensor([1 / 2, 10 / 11, 100 / 101]))
    assert not core.bias_hh_l0.any()


def test_without_last_action_and_reward_a_feed_forward_network_has_no_memory():
    """--no-recurrent --no-last-action-reward: Q of the observation alone; with either, of more."""
    obs, rest = torch.ones(2, 1, 3), (torch.tensor([[0], [3]]), torch.tensor([[0.0], [5.0]]))
    for recurrent in (False, True):
        for last_action_reward in (False, True):
            args = Args(hidden_size=6, recurrent=recurrent, last_action_reward=last_action_reward)
            agent = QNetwork(describe(), args)
            q, _ = agent(obs, *rest, torch.rand(2, 2, 6))  # the same observation twice
            assert torch.allclose(q[0], q[1]) == (not recurrent and not last_action_reward)
            q, _ = agent(obs, *rest, torch.zeros(2, 2, 6))
            assert torch.allclose(q[0], q[1]) == (not last_action_reward)


def test_the_heads_are_dueling():
    """The mean of Q over the actions is the value."""
    agent = QNetwork(describe(), Args(hidden_size=6))
    inputs = torch.randn(2, 3, 3), torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2, 2, 6)
    q, _ = agent(*inputs)
    values = []
    agent.value.register_forward_hook(lambda module, inputs, output: values.append(output[..., 0]))
    torch.testing.assert_close(agent(*inputs)[0].mean(-1), values[0])
    assert q.std(-1).min() > 0


@pytest.mark.parametrize("layout", ["CHW", "HWC", "HW"])
@pytest.mark.parametrize("size", ["Small", ""])
def test_images_of_all_layouts_are_kept_as_bytes_and_read_in_units_of_255(layout, size):
    """They are convolved if both sides have 36 pixels or more; small ones become a vector."""
    args = Args(env_id=f"probe_envs:{size}Picture{layout}-v0", num_envs=2, hidden_size=5, buffer_size=9)
    args.burn_in, args.learn_length, args.n_step, args.num_steps = 0, 2, 1, 8
    agent, player, replay = parts = make_parts(args)
    play(parts, args)
    env = get_ledgers(player)[0]
    assert player.obs.dtype == replay.data["obs"].dtype == torch.uint8
    assert isinstance(agent.encoder[0], torch.nn.Flatten if size else torch.nn.Conv2d)
    windows = get_windows(replay)
    assert len(windows["obs"]) > 4  # episodes of three steps: windows from step 0 and 2
    for obs, end, action in zip(*(windows[x] for x in ("obs", "end", "last_action")), strict=True):
        first = 0 if action[0] == -1 else 2
        for t in range(end + 1):
            np.testing.assert_array_equal(obs[t], env.observe(first + t))
    pixels = torch.tensor(np.stack([env.pixels(t) for t in range(3)])) / 255.0
    pixels = pixels[:, :1] if layout == "HW" else pixels
    if size:
        pixels = pixels.permute(0, *(1 + x for x in env.order)).flatten(1)
    expected = agent.encoder(pixels)
    found = agent.encode(torch.tensor(np.stack([env.observe(t) for t in range(3)])).unsqueeze(0))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6)
    assert found.std() > 0


@pytest.mark.parametrize(("side", "num_features"), [(36, 64), (84, 64 * 7 * 7)])
def test_features_of_the_convolutions(side, num_features):
    """84 pixels a side give the 3136 features of Mnih et al. 2015."""
    envs = describe()
    envs.single_observation_space = gym.spaces.Box(0, 255, (4, side, side), np.uint8)
    layers = QNetwork(envs, Args(hidden_size=4)).encoder
    assert layers[-2].in_features == num_features and layers[0].in_channels == 4
    sizes = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in layers if hasattr(x, "stride")]
    assert sizes == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]


def test_discrete_observations_become_one_hot_and_tuples_flat():
    args = Args(env_id="probe_envs:Shifted-v0", num_envs=20, hidden_size=2)  # Discrete(3, start=3)
    _, player, _ = make_parts(args, Recorder())
    truth = np.array([env.obs for env in get_ledgers(player)])
    assert len(set(truth)) == 3 and player.obs.tolist() == np.eye(3)[truth - 3].tolist()
    args.env_id = "probe_envs:Sums-v0"  # MultiDiscrete([2, 3], start=[1, -1])
    _, player, _ = make_parts(args, Recorder())
    first, second = np.array([env.obs for env in get_ledgers(player)]).T
    assert player.obs.tolist() == np.concatenate((np.eye(2)[first - 1], np.eye(3)[second + 1]), 1).tolist()
    args.env_id = "probe_envs:Pair-v0"  # Tuple of a number and a vector
    _, player, _ = make_parts(args, lambda obs, *rest: (torch.zeros(20, 1, 2), rest[-1]))
    for t in (0, 1, 2, 3, 0):
        assert player.obs.tolist() == [[*np.eye(4)[t], -t, 0.5]] * 20
        player.step(player.act)


def test_minigrids_cells_are_ones_and_zeros_of_a_byte_each():
    """One object, color and state of each cell, and the direction; the text is left out."""
    pytest.importorskip("minigrid")
    args = Args(env_id="MiniGrid-MemoryS7-v0", num_envs=2, hidden_size=4, buffer_size=9)
    agent, player, replay = make_parts(args)
    seen = []
    agent.encoder.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    player.step(player.act)
    assert replay.data["obs"].dtype == torch.uint8 and replay.data["obs"].shape[2:] == (4 + 7 * 7 * 20,)
    (x,) = seen
    assert set(x.unique().tolist()) == {0.0, 1.0} and (x.sum(1) == 1 + 7 * 7 * 3).all()
    assert (x[:, :4].sum(1) == 1).all()


@pytest.mark.parametrize(
    ("env_id", "package"), [("MiniGrid-MemoryS7-v0", "minigrid"), ("ALE/Pong-v5", "ale_py")]
)
def test_a_package_that_is_missing_is_named_in_one_line(monkeypatch, capsys, env_id, package):
    for name in (package, f"{package}.wrappers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as stop:
        r2d2.make_envs(Args(env_id=env_id), 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line.startswith(f"r2d2_lstm.py: error: --env-id {env_id}: ")
    assert package in line


def test_atari_in_single_environments_keeps_its_colours():
    """Only Atari's own vector form makes small grey images."""
    pytest.importorskip("ale_py")
    args = Args(env_id="ALE/Pong-v5", vectorization="sync")
    envs = r2d2.make_envs(args, 1)
    assert envs.single_observation_space.shape == (210, 160, 3)
    network = r2d2.QNetwork(envs, args)
    envs.close()
    assert network.is_image and network.encode(torch.zeros(1, 2, 210, 160, 3)).shape == (1, 2, 64)


@pytest.mark.slow
def test_atari_runs_on_small_grey_images(tmp_path):
    pytest.importorskip("ale_py")
    envs = r2d2.make_envs(Args(env_id="ALE/Pong-v5"), 2)
    assert envs.single_observation_space.shape == (1, 84, 84)
    envs.close()
    flags = "--env-id ALE/Pong-v5 --num-envs 2 --num-steps 40 --total-timesteps 160 --eval-episodes 1"
    flags += " --learning-starts 0 --burn-in 4 --learn-length 8 --batch-size 16 --buffer-size 30"
    scalars = read_scalars(run(tmp_path, flags).path)
    assert -21 <= scalars["eval/episodic_return"][0][1] <= 21
    assert scalars["eval/episodic_length"][0][1] > 500 and scalars["losses/q_loss"]


# Learning


SHORT_EPISODES = "--burn-in 0 --learn-length 1 --n-step 1 --buffer-size 2000 --replay-ratio 2 --batch-size 32"
QUICK = "--num-envs 32 --num-steps 4 --learning-rate 3e-3 --hidden-size 32 --target-interval 20"
QUICK += " --learning-starts 500"


@pytest.mark.parametrize(
    ("env_id", "num_steps"),
    [
        ("Sums-v0", 8000),
        ("Shifted-v0", 6000),
        pytest.param("SameStepQuadrants-v0", 6000, marks=pytest.mark.slow),
        ("Quadrants-v0", 4500),
    ],
)
@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.slow)])
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, num_steps, seed):
    """Several numbers, numbers and actions that do not start at 0, and pictures."""
    flags = f"--env-id probe_envs:{env_id} --total-timesteps {num_steps} --eval-episodes 200 --seed {seed}"
    scores = read_scalars(run(tmp_path, f"{flags} {SHORT_EPISODES} {QUICK}").path)["eval/episodic_return"]
    assert scores[-1][1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "env_id",
    [
        "Endless-v0",
        pytest.param("SameStepEndless-v0", marks=pytest.mark.slow),
        pytest.param("EndlessTerminating-v0", marks=pytest.mark.slow),
    ],
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id):
    """Truncation must not cut the value: 1 / (1 - 0.9) = 10. Termination leaves the rewards to come."""
    num_steps = 48_000 if "Terminating" in env_id else 16_000  # there the LSTM has to learn to count
    flags = (
        f"--env-id probe_envs:{env_id} --gamma 0.9 --total-timesteps {num_steps} --burn-in 4 --learn-length 6"
    )
    flags += " --n-step 3 --buffer-size 1000 --replay-ratio 8 --batch-size 384 --eval-episodes 8"
    checkpoint = load(run(tmp_path, f"{flags} --memory-span 1 {QUICK}").path / "checkpoint.pt")
    agent = QNetwork(describe(1, 2), Args(hidden_size=32))
    agent.load_state_dict(checkpoint["agent"])
    actions, rewards = torch.tensor([[-1] + [0] * 9]), torch.tensor([[0.0] + [1.0] * 9])
    with torch.no_grad():
        q, _ = agent(torch.ones(1, 10, 1), actions, rewards, torch.zeros(1, 2, 32))
    values = r2d2.inverse_value_rescale(q[0].max(-1).values)
    rewards_left = np.arange(10, 0, -1) if "Terminating" in env_id else np.inf
    np.testing.assert_allclose(values, np.full(10, (1 - 0.9**rewards_left) / (1 - 0.9)), rtol=0.05, atol=0.3)


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [
        ("--seed 11", 0.98, 1.0),
        pytest.param("--seed 12", 0.98, 1.0, marks=pytest.mark.slow),
        ("--no-recurrent --total-timesteps 4000", -0.4, 0.4),
    ],
)
def test_the_lstm_remembers_what_only_the_stored_states_hold(tmp_path, flags, low, high):
    """No window holds both the cue, shown at step 0, and step 4, at which it is asked for."""
    base = f"--env-id probe_envs:Recall-v0 {QUICK} --total-timesteps 16000 --batch-size 96 --burn-in 2"
    base += " --learn-length 3 --n-step 2 --buffer-size 2000 --replay-ratio 4 --eval-episodes 100"
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


def test_longer_windows_do_not_change_the_number_of_updates(tmp_path):
    """A batch holds as many steps, so that a step is trained as often in as many updates."""
    flags = "--env-id probe_envs:NoLimit-v0 --num-envs 4 --num-steps 40 --total-timesteps 1600 --burn-in 0"
    flags += " --learning-starts 0 --batch-size 64 --hidden-size 4 --eval-episodes 0 --replay-ratio 2"
    found = []
    for learn_length in ("4", "20"):
        done = run(tmp_path / learn_length, flags, "--buffer-size", 999, "--learn-length", learn_length)
        found.append(load(done.path / "checkpoint.pt")["progress"][NUM_UPDATES])
    assert found[0] == 49 and found[1] in range(48, 53)  # 1,600 steps twice over 64, less a last window


def test_no_update_before_learning_starts(tmp_path):
    flags = f"--env-id probe_envs:NoLimit-v0 {SMALL} --total-timesteps 512 --learning-starts 320"
    flags += " --eval-episodes 0"
    scalars = read_scalars(run(tmp_path, flags).path)  # 64 steps an iteration; the newest are in no window
    updates = {step: count for step, count in scalars["charts/num_updates"]}
    assert len(updates) == 8 and all((count == 0) == (step <= 384) for step, count in updates.items())
    assert [step for step, _ in scalars["losses/q_loss"]] == [step for step in updates if step > 384]


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
    losses = {f"losses/{name}" for name in ("q_loss", "td_error", "grad_norm")}
    charts = "episodic_return episodic_length learning_rate num_updates SPS cpu_seconds".split()
    evals = {f"eval/episodic_{name}" for name in ("return", "return_std", "length")}
    assert scalars.keys() == losses | evals | {f"charts/{name}" for name in charts}
    count, squares = load(path / "checkpoint.pt")["agent"]["reward_sums"].tolist()
    assert (count, squares) == pytest.approx((30, 10 * (1 + 4 + 9)))


def test_returns_of_same_step_episodes_are_logged_too():
    args = Args(env_id="probe_envs:SameStepLedger-v0", num_envs=5, hidden_size=2, num_steps=60)
    _, player, replay = make_parts(args, Recorder())
    episodes, num_steps, _ = r2d2.collect_steps(player, player.act, replay, args)
    ended = [e for ledger in get_ledgers(player)[2:] for e in ledger.episodes if e and any(e[-1][4:])]
    expected = sorted((sum(x[2] for x in e), len(e)) for e in ended)
    assert num_steps == 300 and len(expected) > 20
    np.testing.assert_allclose(sorted(episodes), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("norm_reward", [True, False])
def test_the_reward_scale_is_the_root_mean_square_of_nonzero_rewards(norm_reward):
    """And 1 before there is one, or without --norm-reward."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=3, hidden_size=2, norm_reward=norm_reward)
    agent, player, _ = parts = make_parts(args)
    assert agent.reward_sums[0] == agent.reward_sums[1] > 0 and agent.reward_sums.dtype == torch.float64
    for _ in range(3):
        play(parts, args)
        rewards = [step[2] for ledger in get_ledgers(player) for e in ledger.episodes for step in e]
        count, squares = agent.reward_sums
        expected = np.mean(np.square(rewards)) if norm_reward else 1.0
        assert (squares / count).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["obs", "reward"])
@pytest.mark.parametrize("prefix", ["", "SameStep"])
def test_what_is_not_finite_ends_the_run_with_one_line(tmp_path, capsys, prefix, where):
    """The line names the environment and the step. The earlier checkpoint stays."""
    probe_envs.Fixed.made = 0
    env_id = f"probe_envs:{prefix}NotFinite{where}-v0"
    with pytest.raises(SystemExit) as stop:
        r2d2.main(f"--env-id {env_id} --num-envs 2 --buffer-size 9 --run-dir {tmp_path}".split())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    name = {"obs": "observation"}.get(where, where)
    words = f"r2d2_lstm.py: error: {env_id}: {name} of environment 1 is not finite in step 3"
    assert stop.value.code == 2 and line.endswith(words)
    checkpoint = load(find_run(tmp_path) / "checkpoint.pt")
    assert all(x.isfinite().all() for x in checkpoint["agent"].values())


def test_losses_that_are_not_finite_end_the_run_with_one_line(tmp_path, capsys):
    flags = f"--env-id probe_envs:NoLimit-v0 {SMALL} --total-timesteps 1024 --learning-rate 1e30"
    with pytest.raises(SystemExit) as stop:
        r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert stop.value.code == 2
    assert re.search(r"r2d2_lstm.py: error: probe_envs:NoLimit-v0: losses are not finite at step \d+$", line)


# Resume


def test_a_checkpoint_holds_all_that_a_resumed_run_starts_with(tmp_path):
    """A finished run that is resumed writes its checkpoint again before it trains."""
    path = run(tmp_path, f"--env-id probe_envs:Ledger-v0 {SMALL} --total-timesteps 900").path
    first = load(path / "checkpoint.pt")
    r2d2.main(["--resume", str(path / "checkpoint.pt")])
    second = load(path / "checkpoint.pt")
    assert first["num_added"] > 60 and first["progress"] == second["progress"]
    assert second["num_added"] == first["num_added"]
    for part in ("agent", "target", "replay"):
        assert first[part].keys() == second[part].keys()
        assert all(torch.equal(x, second[part][name]) for name, x in first[part].items()), part
    states = [x["optimizer"]["state"] for x in (first, second)]
    assert states[0].keys() == states[1].keys() != set()
    for i, state in states[0].items():
        assert all(torch.equal(x, states[1][i][name]) for name, x in state.items())
    assert any(not torch.equal(x, first["target"][name]) for name, x in first["agent"].items())


@pytest.mark.parametrize("has_replay", [True, False])
def test_a_resumed_run_trains_at_once_or_fills_its_replay_first(tmp_path, has_replay):
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
    num_new = second["num_added"] - (first["num_added"] if has_replay else 0)
    num_read = 16 * len(updates)  # in each environment: 11 in an episode, of which 5, 9 and 11 end a window
    assert num_new == 4 * (num_read // 11 * 3 + (num_read % 11 >= 5) + (num_read % 11 >= 9))
    assert any(not torch.equal(x, second["agent"][name]) for name, x in first["agent"].items())


def test_windows_stay_true_when_a_run_is_resumed(tmp_path):
    """Earlier windows are kept, and no window joins two episodes."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, hidden_size=2, num_steps=20, buffer_size=300)
    args.burn_in, args.learn_length, args.n_step = 2, 4, 2
    parts = make_parts(args, Recorder(), seed=1)
    play(parts, args, 3)
    agent, player, replay = make_parts(args, Recorder(), seed=9)
    replay.num_added = parts[2].num_added
    for name, x in replay.data.items():
        x.copy_(parts[2].data[name])
    play((agent, player, replay), args, 3)
    ledgers = [ledger for part in (parts[1], player) for ledger in get_ledgers(part)]
    found, trained = check_windows(replay, ledgers, args)
    assert {env for env, *_ in found} == {0, 1, 2, 3} and set(trained.values()) == {1}
    assert found[: parts[2].num_added] == check_windows(parts[2], ledgers, args)[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--hidden-size 9",
        "--env-id CartPole-v1",
        "--no-recurrent",
        "--no-last-action-reward",
        "--buffer-size 61",
        "--burn-in 9",
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(small_run, capsys, flags):
    path = small_run / "checkpoint.pt"
    content = path.read_bytes()
    for mode in ("--resume", "--evaluate")[: 1 if "b" in flags[2] else 2]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            r2d2.main([mode, str(path), *flags.split()])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and f"{path}: does not fit the environment or flags" in line
    assert path.read_bytes() == content


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The folder of a run of the default task."""
    return run(tmp_path_factory.mktemp("small"), f"{SMALL} --total-timesteps 164").path


def test_evaluate_plays_other_episodes_than_those_that_chose_the_best(small_run, monkeypatch, capsys):
    streams, evaluate = [], r2d2.evaluate
    monkeypatch.setattr(r2d2, "evaluate", lambda *args: streams.append(args[3]) or evaluate(*args))
    run(small_run.parents[1] / "again", f"{SMALL} --total-timesteps 164")
    for name in ("best.pt", "checkpoint.pt"):
        r2d2.main(["--evaluate", str(small_run / name), "--eval-episodes", "2"])
    assert streams == [2, 3, 3]
