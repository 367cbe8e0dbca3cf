"""R2D2 against brute force, float64, the environments' own ledgers and its own specification."""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, read_result, read_scalars
from hypothesis import example, given, settings
from hypothesis import strategies as st

from algos import r2d2_lstm as r2d2
from algos.r2d2_lstm import Actor, Args, QNetwork, SequenceReplay, compute_targets, r2d2_loss

CPU = torch.device("cpu")
LEDGERS = ("Ledger-v0", "SameStepLedger-v0")


def make_parts(args, seed=0):
    """Environments, network, actor and replay as `train` makes them."""
    torch.manual_seed(seed)
    envs = r2d2.make_envs(args, args.num_envs, seed, vectorization=args.vectorization)
    return envs, QNetwork(envs, args), Actor(envs, args, CPU), SequenceReplay(envs, args, CPU)


def ledgers_of(envs):
    return [env.unwrapped for env in envs.envs.unwrapped.envs]


def play(parts, num_steps, rounds=1, epsilons=None):
    """Collect `rounds` times; returns the number of real steps."""
    envs, agent, actor, replay = parts
    epsilons = r2d2.epsilon_ladder(envs.num_envs, 0.4) if epsilons is None else epsilons
    act = partial(actor.act, agent, epsilons)
    return sum(r2d2.collect_steps(act, actor, envs, replay, num_steps)[1] for _ in range(rounds))


def store_last_rows(parts):
    """What the last step was answered with, which `collect_steps` would take in before the next one."""
    envs, _, actor, replay = parts
    extra = envs.rows[:, envs.obs_dim :]
    replay.add_step(
        actor, actor.observe(envs.rows), extra[:, r2d2.TERMINATED] > 0, extra[:, r2d2.TRUNCATED] > 0
    )


# The rescaling of values


def test_rescaling_is_the_textbooks_and_its_inverse_undoes_it():
    magnitudes = torch.logspace(-8, 6, 1000, dtype=torch.float64)
    x, eps = torch.cat((-magnitudes, magnitudes)), 1e-3
    torch.testing.assert_close(r2d2.value_rescale(x), x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x)
    root = (1 + 4 * eps * (x.abs() + 1 + eps)).sqrt()
    inverse = x.sign() * (((root - 1) / (2 * eps)) ** 2 - 1)
    torch.testing.assert_close(
        r2d2.inverse_value_rescale(x), inverse, rtol=1e-9, atol=1e-11
    )  # it loses digits
    round_trip = r2d2.inverse_value_rescale(r2d2.value_rescale(x.float()))
    torch.testing.assert_close(round_trip, x.float(), rtol=1e-6, atol=0.0)
    zero = torch.zeros(1)
    assert r2d2.value_rescale(zero).item() == r2d2.inverse_value_rescale(zero).item() == 0.0


# Windows


@pytest.mark.parametrize(
    ("last_window", "learn_length", "expected"),
    [
        ("mask", 3, [[1, 2, 3], [4, 5, 6]]),
        ("mask", 4, [[1, 2, 3, 4], [5, 6]]),
        ("overlap", 3, [[1, 2, 3], [4, 5, 6]]),
        ("overlap", 4, [[1, 2, 3, 4], [3, 4, 5, 6]]),
        ("overlap", 7, [[1, 2, 3, 4, 5, 6]]),
        ("null", 4, [[1, 2, 3, 4], [5, 6, 7, 7]]),
        ("null", 7, [[1, 2, 3, 4, 5, 6, 7]]),
    ],
)
@pytest.mark.parametrize("n_step", [1, 3])
def test_an_episode_of_six_steps_is_arranged_in_three_ways(last_window, learn_length, expected, n_step):
    """The observations of the steps that are learned. A null step has the last observation and is worth nothing."""
    envs = SimpleNamespace(num_envs=1, obs_dim=1, same_step=False, obs_dtype=torch.float32)
    args = make_args(2, learn_length, n_step, last_window=last_window, buffer_size=10, hidden_size=1)
    actor, replay = Actor(envs, args, CPU), SequenceReplay(envs, args, CPU)
    for t in range(1, 8):
        row = torch.tensor([[t, 10.0 * (t - 1), t == 7, 0.0, 0.0, 0.0]])  # as in columns.py
        replay.add_step(actor, actor.observe(row), row[:, 2] > 0, row[:, 3] > 0)
        actor.last_action.fill_(t)
        actor.state.fill_(t)  # after reading observation t
    windows = replay.read_windows(torch.arange(int(replay.num_added)))
    obs, rewards = windows["obs"][..., 0].T, windows["last_reward"].T  # [K, L]
    found = [
        x[2:][:learn_length][mask].tolist() for x, mask in zip(obs, windows["is_learned"].T, strict=True)
    ]
    assert found == expected
    for i, steps in enumerate(expected):
        is_warm = steps[0] > 2
        assert windows["is_warm"][i] == is_warm and windows["state"][i].unique().item() == max(
            steps[0] - 3, 0
        )
        real = [step for step in steps if step < 7]
        assert rewards[i, 3:][: len(real)].tolist() == [10.0 * step for step in real]
        assert windows["terminated"][i] == (steps[-1] >= 7 - n_step)
        assert windows["end"][i] == min(7 - steps[0] + 2, replay.length - 1)


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


def check_rows(replay, ledgers, args):
    """Hold every row against the ledgers; returns how often each real step (environment, episode, step) is learned."""
    num_rows = min(int(replay.num_added), args.buffer_size)
    windows = {k: v.numpy() for k, v in replay.read_windows(torch.arange(num_rows)).items()}
    places, learned = look_up(ledgers), {}
    for i in range(num_rows):
        env, number, step = places[windows["obs"][args.burn_in, i].tobytes()]
        episode, end = ledgers[env].episodes[number], windows["end"][i]
        is_finished = (
            episode[-1][4] or episode[-1][5] or number < len(ledgers[env].episodes) - 1
        )  # or cut by a reset
        assert env == replay.env[i] and args.burn_in < end < len(windows["obs"])
        assert windows["is_warm"][i] == (step >= args.burn_in)
        last = step + end - args.burn_in  # step of the observation at `end`
        assert last <= len(episode) and (
            end == len(windows["obs"]) - 1 or (is_finished and last == len(episode))
        )
        assert windows["terminated"][i] == (last == len(episode) and episode[-1][4])
        for slot in range(0 if windows["is_warm"][i] else args.burn_in, end + 1):
            t = step + slot - args.burn_in
            obs = episode[t][0] if t < len(episode) else episode[-1][3]
            np.testing.assert_array_equal(windows["obs"][slot, i], obs)
            action, reward = episode[t - 1][1:3] if t > 0 else (-1, 0.0)
            assert windows["last_action"][slot, i] == action
            assert windows["last_reward"][slot, i] == np.float32(reward)
            is_learned = args.burn_in <= slot < min(args.burn_in + args.learn_length, end)
            if slot - args.burn_in in range(args.learn_length):
                assert windows["is_learned"][slot - args.burn_in, i] == is_learned
            if is_learned:
                learned[env, number, t] = learned.get((env, number, t), 0) + 1
    return learned


@settings(max_examples=30, deadline=None)
@given(
    env_id=st.sampled_from(LEDGERS),
    p_end=st.sampled_from((0.02, 0.15, 0.5)),
    burn_in=st.integers(0, 6),
    learn_length=st.integers(1, 5),
    n_step=st.integers(1, 7),
    num_steps=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_every_step_of_an_episode_is_learned_once_and_windows_are_true(
    env_id, p_end, burn_in, learn_length, n_step, num_steps, seed
):
    lengths = {"burn_in": burn_in, "learn_length": learn_length, "n_step": n_step, "num_steps": num_steps}
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=2, buffer_size=1000, **lengths)
    parts = make_parts(args, seed)
    ledgers = ledgers_of(parts[0])
    for ledger in ledgers:
        ledger.p_end = p_end
    num_real = play(parts, num_steps, max(60 // num_steps, 1))
    store_last_rows(parts)
    learned = check_rows(parts[3], ledgers, args)
    expected = {}
    for env, ledger in enumerate(ledgers):
        for number, episode in enumerate(ledger.episodes):
            num_learned = len(episode)
            if episode and not (episode[-1][4] or episode[-1][5]):  # running: as many windows as are complete
                num_learned = max(num_learned - n_step + 1, 0) // learn_length * learn_length
            expected |= {(env, number, t): 1 for t in range(num_learned)}
    assert learned == expected
    assert num_real == sum(len(episode) for ledger in ledgers for episode in ledger.episodes)
    assert parts[3].num_added <= 1000


@settings(max_examples=30, deadline=None)
@given(
    env_id=st.sampled_from(LEDGERS),
    p_ends=st.lists(st.sampled_from((0.0, 0.1, 1.0)), min_size=1, max_size=4),
    burn_in=st.integers(0, 4),
    learn_length=st.integers(1, 5),
    n_step=st.integers(1, 6),
    num_steps=st.integers(1, 4),
    buffer_size=st.integers(1, 9),
)
@example("SameStepLedger-v0", [1.0] + [0.0] * 15, 0, 5, 1, 1, 320)  # the rings that need the most slots
@example("Ledger-v0", [1.0, 1.0], 0, 1, 1, 1, 40)
def test_windows_stay_true_when_ring_and_rows_wrap(
    env_id, p_ends, burn_in, learn_length, n_step, num_steps, buffer_size
):
    """Environments with episodes of one step beside endless ones: the slots of a row outlive it."""
    lengths = {"burn_in": burn_in, "learn_length": learn_length, "n_step": n_step, "num_steps": num_steps}
    args = Args(
        env_id=f"probe_envs:{env_id}", num_envs=len(p_ends), hidden_size=2, buffer_size=buffer_size, **lengths
    )
    parts = make_parts(args)
    ledgers = ledgers_of(parts[0])
    for ledger, p_end in zip(ledgers, p_ends, strict=True):
        ledger.p_end = p_end
    replay = parts[3]
    while replay.time < 2 * len(replay.obs) + 5:
        play(parts, num_steps, 10)
        check_rows(replay, ledgers, args)
    assert replay.num_added > 2 * buffer_size


def test_the_page_shows_the_windows_that_the_replay_holds():
    """The drawing of an episode of 12 steps: step by step, what a window takes it for."""
    envs = SimpleNamespace(num_envs=1, obs_dim=1, same_step=False, obs_dtype=torch.float32)
    args = make_args(4, 5, 2, buffer_size=10, hidden_size=1)
    actor, replay = Actor(envs, args, CPU), SequenceReplay(envs, args, CPU)
    for step in range(13):
        row = torch.tensor([[step, 1.0, step == 12, 0.0, 0.0, 0.0]])  # as in columns.py
        replay.add_step(actor, actor.observe(row), row[:, 2] > 0, row[:, 3] > 0)
    found = []
    for first, end, is_warm in zip(
        *(x[:3].tolist() for x in (replay.first, replay.end, replay.is_warm)), strict=True
    ):
        kinds = ("b" * 4 if is_warm else " " * 4) + "L" * 5 + "t" * 2
        kinds = kinds[:end] + "t" if end < len(kinds) else kinds
        found.append([(first + p, kind) for p, kind in enumerate(kinds) if kind != " "])
    page = (ROOT / "docs" / "r2d2_lstm.md").read_text()
    head, *lines = re.search(r"```\n(step .*?)```", page, re.S)[1].splitlines()
    columns = [(match.start(), int(match[0])) for match in re.finditer(r"\d+", head)]
    drawn = [
        [(step, line[at]) for at, step in columns if line[at : at + 1] in ("b", "L", "t")] for line in lines
    ]
    assert drawn == found
    starts = [line.split(" at step ")[0].split("  ")[-1].strip() for line in lines]
    assert starts == ["stored state" if is_warm else "zero state" for is_warm in replay.is_warm[:3].tolist()]


@pytest.mark.parametrize("env_id", LEDGERS)
@pytest.mark.parametrize(("burn_in", "learn_length"), [(0, 3), (2, 4), (7, 3)])
def test_stored_states_are_those_of_the_whole_episode(env_id, burn_in, learn_length):
    lengths = {"burn_in": burn_in, "learn_length": learn_length, "n_step": 2, "num_steps": 7}
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=5, buffer_size=500, **lengths)
    parts = make_parts(args)
    ledgers = ledgers_of(parts[0])
    for ledger in ledgers:
        ledger.p_end = 0.03
    play(parts, 7, 20)
    num_added = int(parts[3].num_added)
    windows, places = parts[3].read_windows(torch.arange(num_added)), look_up(ledgers)
    num_zero = 0
    for i in range(num_added):
        env, number, step = places[windows["obs"][burn_in, i].numpy().tobytes()]
        before = ledgers[env].episodes[number][: step - burn_in if windows["is_warm"][i] else step]
        state = torch.zeros(1, 2, 5)
        for t, (obs, *_) in enumerate(before):
            action, reward = before[t - 1][1:3] if t > 0 else (-1, 0.0)
            with torch.no_grad():
                inputs = torch.tensor(obs)[None, None], torch.tensor([[action]]), torch.tensor([[reward]])
                _, state = parts[1](*inputs, state)
        torch.testing.assert_close(windows["state"][i], state[0], rtol=1e-5, atol=1e-6)
        num_zero += not before
        assert before or not windows["state"][i].any()
    assert 10 < num_zero < num_added - 10


# Targets and the loss


def brute_force_target(q, target_q, rewards, end, terminated, t, gamma, n_step):
    """y_t of eq. 2 for one window, in float64: q and target_q [m + n, A], rewards [m + n - 1]."""
    eps, total, k = 1e-3, 0.0, min(t + n_step, end)
    for i in range(t, k):
        total += gamma ** (i - t) * rewards[i]
    if not (terminated and k == end):
        y = target_q[k][np.argmax(q[k])]
        root = math.sqrt(1 + 4 * eps * (abs(y) + 1 + eps))
        total += gamma ** (k - t) * math.copysign(((root - 1) / (2 * eps)) ** 2 - 1, y)
    return math.copysign(math.sqrt(abs(total) + 1) - 1, total) + eps * total


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.floats(0, 1), st.integers(0, 2**31))
def test_targets_equal_brute_force(learn_length, n_step, gamma, seed):
    rng, num_windows, length = np.random.default_rng(seed), 7, learn_length + n_step
    q, target_q = rng.normal(size=(2, length, num_windows, 3)) * 5
    rewards = rng.normal(size=(length - 1, num_windows)) * 10
    end, terminated = rng.integers(1, length, num_windows), rng.random(num_windows) < 0.5
    floats = (torch.tensor(x, dtype=torch.float32) for x in (q, target_q, rewards))
    found = compute_targets(*floats, torch.tensor(end), torch.tensor(terminated), gamma, n_step)
    assert found.shape == (learn_length, num_windows)
    for i in range(num_windows):
        assert not found[end[i] :, i].any()
        for t in range(min(learn_length, end[i])):
            one = (x[:, i] for x in (q, target_q, rewards))
            expected = brute_force_target(*one, end[i], terminated[i], t, gamma, n_step)
            assert found[t, i].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_padding_far_beyond_the_end_is_finite(gamma):
    """The discount over the steps from the padding back to the end would be gamma to the power of -79."""
    end, terminated = torch.ones(2, dtype=torch.int64), torch.tensor([True, False])
    targets = compute_targets(*torch.randn(2, 81, 2, 3), torch.randn(80, 2), end, terminated, gamma, 1)
    assert targets.isfinite().all()


def make_windows(args, num_windows=8, obs_dim=3, num_actions=4, seed=0):
    """Random windows as `read_windows` gives them, of all kinds; the parts that hold nothing are filled too."""
    rng, length = np.random.default_rng(seed), args.burn_in + args.learn_length + args.n_step
    end = rng.integers(args.burn_in + 1, length, num_windows)
    end[:2], is_warm = length - 1, rng.random(num_windows) < 0.5
    windows = {
        "obs": rng.normal(size=(length, num_windows, obs_dim)),
        "last_action": rng.integers(0, num_actions, (length, num_windows)),
        "last_reward": rng.normal(size=(length, num_windows)) * 3,
        "state": rng.normal(size=(num_windows, 2, args.hidden_size)),
        "is_warm": is_warm,
        "terminated": np.arange(num_windows) % 2 == 1,
        "end": end,
    }
    for i in np.flatnonzero(~is_warm)[::2]:  # first windows of episodes
        windows["state"][i], windows["last_action"][args.burn_in, i] = 0.0, -1
        windows["last_reward"][args.burn_in, i] = 0.0
    if is_warm.any():  # one whose burn-in begins with an episode
        windows["last_action"][0, np.flatnonzero(is_warm)[0]] = -1
    windows["rewards"] = windows["last_reward"]
    windows["is_learned"] = np.arange(args.learn_length)[:, None] < end - args.burn_in
    windows = {name: torch.from_numpy(np.array(x)) for name, x in windows.items()}
    return {name: x.float() if x.is_floating_point() else x for name, x in windows.items()}


class Spaces:
    """What a QNetwork reads of environments: observations [3], 4 actions."""

    single_action_space = r2d2.gym.spaces.Discrete(4)
    obs_dim, obs_scale, image_shape, num_envs, same_step, obs_dtype = 3, 1.0, None, 1, False, torch.float32


def make_networks(args):
    """Agent and target network with different weights."""
    torch.manual_seed(7)
    agent, target = QNetwork(Spaces, args), QNetwork(Spaces, args)
    with torch.no_grad():
        for p in (*agent.parameters(), *target.parameters()):
            p.mul_(2.0)
    return agent, target.requires_grad_(False)


LENGTHS = [(0, 3, 2), (2, 4, 1), (3, 2, 5), (1, 1, 1)]  # burn_in, learn_length, n_step


def make_args(burn_in, learn_length, n_step, **kwargs):
    kwargs = {"hidden_size": 6, "gamma": 0.9, "norm_reward": False} | kwargs
    return Args(burn_in=burn_in, learn_length=learn_length, n_step=n_step, **kwargs)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("state_init", ["stored", "zero"])
def test_unroll_equals_di_engines_slices(lengths, state_init):
    """Burn-in, then the main part from the state after burn_in and the target part from burn_in + n_step."""
    args = make_args(*lengths, state_init=state_init)
    burn_in, _, n_step = lengths
    agent, _ = make_networks(args)
    windows = make_windows(args)
    start = windows["state"] if state_init == "stored" else torch.zeros_like(windows["state"])
    for is_warm in (True, False):
        windows["is_warm"][:] = is_warm
        steps = [windows[name] for name in ("obs", "last_action", "last_reward")]
        with torch.no_grad():
            found = r2d2.unroll(agent, windows, args)
            state = start
            for t in range(burn_in if is_warm else 0):
                _, state = agent(*(x[t : t + 1] for x in steps), state)
            main, _ = agent(*(x[burn_in:-n_step] for x in steps), state)
            for t in range(burn_in, burn_in + n_step):
                _, state = agent(*(x[t : t + 1] for x in steps), state)
            ahead, _ = agent(*(x[burn_in + n_step :] for x in steps), state)
        torch.testing.assert_close(found[:-n_step], main)
        torch.testing.assert_close(found[n_step:], ahead)


def naive_q(weights, obs, last_action, last_reward, h, c):
    """Q values [A] and the LSTM's next state, from single steps and a dict of float64 weights."""

    def layer(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    one_hot = torch.zeros(4, dtype=torch.float64)
    if last_action >= 0:
        one_hot[last_action] = 1.0
    x = torch.cat((layer("encoder.0", obs).relu(), one_hot, last_reward.reshape(1)))
    gates = weights["core.weight_ih_l0"] @ x + weights["core.bias_ih_l0"]
    gates = gates + weights["core.weight_hh_l0"] @ h + weights["core.bias_hh_l0"]
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    advantage = layer("advantage.2", layer("advantage.0", h).relu())
    value = layer("value.2", layer("value.0", h).relu())
    return value + advantage - advantage.mean(), h, c


def naive_loss(weights, target_weights, windows, importance, args):
    """Eq. 2 to 4 as loops over windows and steps in float64: loss, priorities and metrics."""
    windows = {k: v.double() if v.is_floating_point() else v for k, v in windows.items()}
    total, priorities, sums, count = 0.0, [], np.zeros(4), 0
    for n in range(len(importance)):
        end = int(windows["end"][n]) - args.burn_in
        all_q = []
        for w in (weights, target_weights):
            h, c = (
                windows["state"][n] if args.state_init == "stored" else torch.zeros_like(windows["state"][n])
            )
            q = []
            for t in range(0 if windows["is_warm"][n] else args.burn_in, args.burn_in + end + 1):
                if t == args.burn_in:
                    h, c = h.detach(), c.detach()
                step = (windows[name][t, n] for name in ("obs", "last_action", "last_reward"))
                value, h, c = naive_q(w, *step, h, c)
                q += [value] if t >= args.burn_in else []
            all_q.append(q)
        q, target_q = ([x.detach().numpy() for x in part] for part in all_q)
        rewards, errors = windows["rewards"][args.burn_in + 1 :, n].tolist(), []
        for t in range(min(args.learn_length, end)):
            y = brute_force_target(
                q, target_q, rewards, end, windows["terminated"][n], t, args.gamma, args.n_step
            )
            taken = all_q[0][t][windows["last_action"][args.burn_in + t + 1, n]]
            error = y - taken
            total = total + importance[n].double() * error**2 / 2
            errors.append(abs(error.item()))
            sums += (importance[n].item() * error.item() ** 2 / 2, taken.item(), y, abs(error.item()))
        priorities.append(0.9 * max(errors) + 0.1 * sum(errors) / len(errors))
        count += len(errors)
    return total / count, priorities, sums / count


def run_loss(agent, target, windows, importance, args, count=None):
    """Loss, priorities, metrics, and the gradients by name."""
    agent.zero_grad()
    count = windows["is_learned"].sum() if count is None else count
    loss, priorities, metrics = r2d2_loss(agent, target, windows, importance, count, args)
    loss.backward()
    return loss.detach(), priorities, metrics, {name: p.grad.clone() for name, p in agent.named_parameters()}


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("state_init", ["stored", "zero"])
def test_loss_and_gradients_equal_float64_loops(lengths, state_init):
    args = make_args(*lengths, state_init=state_init)
    agent, target = make_networks(args)
    windows, importance = make_windows(args), torch.linspace(0.3, 1.0, 8)
    loss, priorities, metrics, grads = run_loss(agent, target, windows, importance, args)
    weights, target_weights = (
        {name: p.detach().double().requires_grad_() for name, p in net.named_parameters()}
        for net in (agent, target)
    )
    expected, expected_priorities, expected_metrics = naive_loss(
        weights, target_weights, windows, importance, args
    )
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
    slots = torch.arange(len(windows["obs"])).unsqueeze(1)
    is_padding = (slots > windows["end"]) | ((slots < args.burn_in) & ~windows["is_warm"])  # [L, N]
    padded = {name: x.clone() for name, x in windows.items()}
    padded["obs"][is_padding] = 50.0
    for name in ("last_reward", "rewards"):
        padded[name][is_padding] = -70.0
    padded["last_action"][is_padding] = 3
    padded["last_action"][is_padding & (slots < args.burn_in)] = -1
    after = run_loss(agent, target, padded, importance, args)
    torch.testing.assert_close(before, after, rtol=1e-6, atol=1e-8)
    for slot, n in (~is_padding).nonzero().tolist():
        changed = {name: x.clone() for name, x in windows.items()}
        changed["obs"][slot, n] += 1.0
        has_effect = not (windows["terminated"][n] and slot == windows["end"][n])  # no value is read there
        priorities = run_loss(agent, target, changed, importance, args)[1]
        assert torch.equal(priorities.argwhere().flatten(), torch.arange(8))
        differs = (priorities != before[1]).tolist()
        assert differs == [has_effect and i == n for i in range(8)], (slot, n)


# Priorities


def test_priority_of_a_worked_example():
    errors = torch.tensor([[1.0, -3.0], [-2.0, 9.0], [6.0, 9.0]])
    is_real = torch.tensor([[True, True], [True, False], [True, False]])
    found = r2d2.sequence_priority(errors, is_real)
    torch.testing.assert_close(found, torch.tensor([0.9 * 6 + 0.1 * 3, 3.0]))


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_samples_follow_the_priorities(monkeypatch, alpha):
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, hidden_size=2, buffer_size=7)
    replay = make_parts(args)[3]
    replay.priority[:] = torch.tensor([0.0, 3.0, 0.5, 0.0, 1.0, 1e-8, 0.0])
    drawn = torch.tensor([1, 2, 4, 5])
    p = torch.zeros(7, dtype=torch.float64)
    p[drawn] = replay.priority[drawn].double() ** alpha
    p /= p.sum()
    index, weights = replay.sample(1000, alpha, 0.6)
    counts = torch.bincount(index, minlength=7)
    assert ((counts - 1000 * p).abs() < 2).all() and counts[
        [0, 3, 6]
    ].sum() == 0  # stratified: no other chance
    expected = p[index] ** -0.6
    torch.testing.assert_close(weights.double(), expected / expected.max(), rtol=1e-5, atol=0.0)
    singles = torch.cat([replay.sample(1, alpha, 0.6)[0] for _ in range(4000)])
    np.testing.assert_allclose(torch.bincount(singles, minlength=7) / 4000, p, atol=0.03)
    monkeypatch.setattr(torch, "rand", torch.zeros)  # the lowest point
    assert replay.sample(1, alpha, 0.6)[0].item() == 1
    for broken in (math.nan, math.inf):  # a window still, whose loss says what is wrong
        replay.priority[1] = broken
        index, weights = replay.sample(3, alpha, 0.6)
        assert ((index >= 0) & (index < 7)).all() and not weights.isfinite().all()


def test_new_windows_get_the_largest_priority():
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=2, hidden_size=2, buffer_size=200)
    parts = make_parts(args)
    replay = parts[3]
    play(parts, 10, 3)
    n = int(replay.num_added)
    assert n > 5 and replay.priority.tolist() == [1.0] * n + [0.0] * (200 - n)
    replay.priority[:n] = torch.linspace(0.2, 0.7, n)
    play(parts, 10)
    assert replay.num_added > n
    torch.testing.assert_close(replay.priority[:n], torch.linspace(0.2, 0.7, n))
    assert (replay.priority[n : replay.num_added] == replay.priority[n - 1]).all()
    assert not replay.priority[replay.num_added :].any()


@pytest.mark.parametrize("norm_reward", [True, False])
def test_an_update_learns_from_what_it_samples_and_writes_priorities(norm_reward):
    args = make_args(
        2, 3, 2, env_id="probe_envs:Ledger-v0", num_envs=3, batch_size=26, norm_reward=norm_reward
    )
    parts = make_parts(args)
    play(parts, 10, 3)
    agent, replay = parts[1], parts[3]
    target = QNetwork(Spaces, args).requires_grad_(False)
    stats = r2d2.RunningMeanStd()
    rewards = torch.tensor([[0.0, 3.0], [-4.0, 0.0]])
    stats.update(rewards, rewards != 0)
    torch.manual_seed(5)
    replay.priority[: replay.num_added] = torch.rand(int(replay.num_added)) + 0.1
    before, rng_state = replay.priority.clone(), torch.get_rng_state()
    index, weights = replay.sample(8)  # of 3 steps each
    windows = replay.read_windows(index)
    windows["rewards"] = windows["last_reward"] / (math.sqrt(25 / 2) if norm_reward else 1.0)
    networks = (
        {k: p.detach().double().clone() for k, p in net.named_parameters()} for net in (agent, target)
    )
    loss, priorities, expected_metrics = naive_loss(*networks, windows, weights, args)
    torch.set_rng_state(rng_state)
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    weights_before = {name: p.detach().clone() for name, p in agent.named_parameters()}
    metrics = r2d2.update_network(agent, target, optimizer, replay, stats, r2d2_loss, args)
    before[index] = torch.tensor(priorities, dtype=torch.float32)
    torch.testing.assert_close(replay.priority, before, rtol=1e-4, atol=1e-5)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in agent.parameters()))
    np.testing.assert_allclose(metrics, [*expected_metrics, norm], rtol=1e-4, atol=1e-5)
    assert metrics[0].item() == pytest.approx(loss.item(), rel=1e-4)
    for name, p in agent.named_parameters():
        torch.testing.assert_close(p.detach(), weights_before[name] - 0.1 * p.grad, rtol=1e-5, atol=1e-6)


# Acting


def test_exploration_follows_the_ladder():
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    np.testing.assert_allclose(r2d2.epsilon_ladder(4, 0.4), expected, rtol=1e-5)
    assert r2d2.epsilon_ladder(1, 0.3).tolist() == pytest.approx([0.3])
    args = Args(env_id="probe_envs:SameStepLedger-v0", num_envs=4, hidden_size=1)
    envs, _, actor, replay = make_parts(args)
    q = torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]).expand(1, 4, 4)
    epsilons = torch.tensor([0.0, 0.2, 0.6, 1.0])
    play(
        (envs, lambda obs, last_action, last_reward, state: (q, state), actor, replay),
        2000,
        epsilons=epsilons,
    )
    for ledger, epsilon in zip(ledgers_of(envs), epsilons.tolist(), strict=True):
        actions = (
            np.bincount([step[1] for episode in ledger.episodes for step in episode], minlength=4) / 2000
        )
        np.testing.assert_allclose(actions, epsilon / 4 + (1 - epsilon) * np.eye(4)[1], atol=0.05)
        assert epsilon > 0 or actions[1] == 1.0


class Recorder:
    """In place of a QNetwork: prefers random actions, counts the steps in `state`, notes what it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, obs, last_action, last_reward, state):
        self.seen += [
            *zip(obs[0].clone(), last_action[0].tolist(), last_reward[0].tolist(), state.clone(), strict=True)
        ]
        return torch.rand(*obs.shape[:2], 4), state + 1.0


@pytest.mark.parametrize("env_id", LEDGERS)
@pytest.mark.parametrize("caller", ["collect_steps", "evaluate"])
def test_actors_are_shown_action_reward_and_state_of_their_own_episode(monkeypatch, env_id, caller):
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=2)
    recorder, made, make_envs = Recorder(), [], r2d2.make_envs
    monkeypatch.setattr(r2d2, "make_envs", lambda *a, **k: made.append(make_envs(*a, **k)) or made[-1])
    if caller == "evaluate":
        metrics = r2d2.evaluate(recorder, args, CPU, 20, 4)
    else:
        envs, _, actor, replay = make_parts(args)
        play((envs, recorder, actor, replay), 50, 2, torch.tensor([0.0, 0.5, 1.0]))
    ledgers = ledgers_of(made[0])
    places, num_first = look_up(ledgers), 0
    for obs, action, reward, state in recorder.seen:
        env, number, step = places[obs.numpy().tobytes()]
        expected = ledgers[env].episodes[number][step - 1][1:3] if step > 0 else (-1, 0.0)
        assert (action, reward) == (expected[0], np.float32(expected[1])) and (state == step).all()
        num_first += step == 0
    assert num_first > 20
    if caller == "evaluate":
        episodes = [e for led, quota in zip(ledgers, (7, 7, 6), strict=True) for e in led.episodes[:quota]]
        returns = [sum(step[2] for step in episode) for episode in episodes]
        assert metrics["eval/episodic_return"] == pytest.approx(np.mean(returns), abs=1e-5)
        assert metrics["eval/episodic_return_std"] == pytest.approx(np.std(returns), abs=1e-5)
        assert metrics["eval/episodic_length"] == pytest.approx(
            np.mean([len(episode) for episode in episodes])
        )


def remember_suits(obs, last_action, last_reward, state):
    """Keeps the last three suits in `state`, and answers with the oldest."""
    suits = state[:, 0]  # [B, 3]
    q = torch.nn.functional.one_hot(suits[:, 0].long(), 4).float()
    state = torch.stack(
        (torch.cat((suits[:, 1:], obs[0].argmax(-1, keepdim=True).float()), 1), state[:, 1]), 1
    )
    return q.unsqueeze(0), state


def remember_cue(obs, last_action, last_reward, state):
    """Notes the cue where no action came before, and turns by it at the junction."""
    cue = torch.where(last_action[0] == -1, obs[0, :, 0], state[:, 0, 0])
    actions = torch.where(obs[0, :, 1] > 0, torch.where(cue > 0, 1, 2), 0)
    return torch.nn.functional.one_hot(actions, 3).float().unsqueeze(0), cue[:, None, None].expand_as(state)


@pytest.mark.parametrize(
    ("env_id", "player"), [("RepeatPreviousEasy-v0", remember_suits), ("TMaze10-v0", remember_cue)]
)
def test_a_player_with_perfect_memory_gets_the_optimum(env_id, player):
    args = Args(env_id=env_id, num_envs=4, hidden_size=3)
    assert r2d2.evaluate(player, args, CPU, 14, 4)["eval/episodic_return"] == pytest.approx(1.0, abs=1e-6)
    forgetful = r2d2.evaluate(lambda *x: player(*x[:3], torch.zeros_like(x[3])), args, CPU, 14, 4)
    assert forgetful["eval/episodic_return"] < 0.7


# Networks and observations


def test_forget_gates_open_for_one_step_to_the_memory_span():
    core = QNetwork(Spaces, Args(hidden_size=3, memory_span=100.0)).core
    forget = (core.bias_ih_l0 + core.bias_hh_l0)[3:6].sigmoid()
    torch.testing.assert_close(forget, torch.tensor([1 / 2, 10 / 11, 100 / 101]))
    assert not QNetwork(Spaces, Args(hidden_size=3)).core.bias_hh_l0.any()


def test_without_last_action_and_reward_a_feed_forward_network_has_no_memory():
    """--no-recurrent --no-last-action-reward: Q of the observation alone; with either, of more."""
    rest = torch.tensor([[0, 3]]), torch.tensor([[0.0, 5.0]]), torch.rand(2, 2, 6)
    for recurrent in (False, True):
        for last_action_reward in (False, True):
            agent = QNetwork(
                Spaces, Args(hidden_size=6, recurrent=recurrent, last_action_reward=last_action_reward)
            )
            q, _ = agent(torch.ones(1, 2, 3), *rest)  # the same observation twice
            assert torch.allclose(q[0, 0], q[0, 1]) == (not recurrent and not last_action_reward)
            q, _ = agent(torch.ones(1, 2, 3), *rest[:2], torch.zeros(2, 2, 6))
            assert torch.allclose(q[0, 0], q[0, 1]) == (not last_action_reward)


@pytest.mark.parametrize(("side", "num_features"), [(16, 64), (35, 64 * 6 * 6), (36, 64), (84, 64 * 7 * 7)])
def test_images_of_all_sizes_are_convolved(side, num_features):
    """84 pixels a side give the 3136 features of Mnih et al. 2015; bytes are scaled to [0, 1]."""
    space = type(
        "Images", (Spaces,), {"image_shape": (3, side, side), "obs_dim": 3 * side * side, "obs_scale": 255.0}
    )
    agent = QNetwork(space, Args(hidden_size=4))
    assert agent.encoder[-2].in_features == num_features
    obs = torch.randint(0, 256, (2, 1, space.obs_dim), dtype=torch.uint8)
    rest = torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1), torch.zeros(1, 2, 4)
    q, _ = agent(obs, *rest)
    agent.obs_scale = 1.0
    torch.testing.assert_close(q, agent(obs / 255.0, *rest)[0])


def test_images_are_kept_as_bytes():
    import probe_envs

    args = Args(env_id="probe_envs:PictureHWC-v0", num_envs=2, hidden_size=2, num_steps=7)
    parts = make_parts(args)
    play(parts, 8)
    assert parts[3].obs.dtype == parts[3].end_obs.dtype == torch.uint8
    expected = [probe_envs.Picture.pixels(t % 4).ravel() for t in range(8)]  # slots of episodes of 3 steps
    np.testing.assert_array_equal(parts[3].obs[:8, 0], expected)


SHORT_EPISODES = (
    "--burn-in 0 --learn-length 1 --n-step 1 --buffer-size 2000 --replay-ratio 2 --learning-starts 500"
)
SHORT_EPISODES += " --batch-size 32"
QUICK = "--num-envs 32 --num-steps 4 --learning-rate 3e-3 --hidden-size 32 --target-interval 20"


@pytest.mark.parametrize(
    ("env_id", "num_steps"),
    [
        ("Sums-v0", 8000),
        pytest.param("SameStepSums-v0", 8000, marks=pytest.mark.slow),
        ("Quadrants-v0", 4500),
    ],
)
@pytest.mark.parametrize("seed", [11, pytest.param(12, marks=pytest.mark.slow)])
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, num_steps, seed):
    """MultiDiscrete observations, and pictures."""
    flags = f"--env-id probe_envs:{env_id} --total-timesteps {num_steps} --eval-episodes 200 --seed {seed}"
    r2d2.main([*f"{flags} {SHORT_EPISODES} {QUICK}".split(), "--run-dir", str(tmp_path)])
    assert read_result(tmp_path)[1]["metrics"]["eval/episodic_return"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    "env_id",
    [
        "Endless-v0",
        pytest.param("SameStepEndless-v0", marks=pytest.mark.slow),
        pytest.param("EndlessTerminating-v0", marks=pytest.mark.slow),
    ],
)
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id):
    """Truncation must not cut the value: 1 / (1 - 0.9) = 10 at every step. Termination leaves the rewards to come."""
    flags = (
        f"--env-id probe_envs:{env_id} --gamma 0.9 --total-timesteps 16000 --learning-starts 500 --burn-in 4"
    )
    flags += (
        " --learn-length 6 --n-step 3 --buffer-size 1000 --replay-ratio 8 --batch-size 384 --eval-episodes 8"
    )
    flags += " --memory-span 1"
    r2d2.main([*f"{flags} {QUICK}".split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    space = type("Constant", (Spaces,), {"obs_dim": 1, "single_action_space": r2d2.gym.spaces.Discrete(2)})
    agent = QNetwork(space, Args(hidden_size=32))
    agent.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True)["agent"])
    actions, rewards = torch.tensor([-1] + [0] * 9).unsqueeze(1), torch.tensor([0.0] + [1.0] * 9).unsqueeze(1)
    with torch.no_grad():
        q, _ = agent(torch.ones(10, 1, 1), actions, rewards, torch.zeros(1, 2, 32))
    values = r2d2.inverse_value_rescale(q[:, 0].max(-1).values)
    rewards_left = np.arange(10, 0, -1) if "Terminating" in env_id else np.inf
    np.testing.assert_allclose(values, np.full(10, (1 - 0.9**rewards_left) / (1 - 0.9)), rtol=0.05, atol=0.3)
    assert result["metrics"]["eval/episodic_return"] == 10.0


# Training and bad input


def test_updates_keep_to_the_replay_ratio_and_copy_the_target(tmp_path, monkeypatch):
    update, is_equal = r2d2.update_network, []

    def watch(agent, target, *rest):
        pairs = zip(agent.parameters(), target.parameters(), strict=True)
        is_equal.append(all(torch.equal(a, b) for a, b in pairs))
        return update(agent, target, *rest)

    monkeypatch.setattr(r2d2, "update_network", watch)
    flags = (
        "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 7 --total-timesteps 1500 --learning-starts 0"
    )
    flags += " --burn-in 2 --learn-length 3 --n-step 2 --batch-size 15 --buffer-size 60 --replay-ratio 0.7"
    flags += " --target-interval 7 --hidden-size 8 --eval-episodes 1"
    r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, _ = read_result(tmp_path)
    checkpoint, scalars = torch.load(path / "checkpoint.pt", weights_only=True), read_scalars(path)
    num_windows, num_updates = int(checkpoint["replay"]["num_added"]), len(is_equal)
    assert num_windows > 500 and num_updates == checkpoint["num_updates"] > 60
    assert (
        0.7 * num_windows - 5 * num_updates == pytest.approx(5 * checkpoint["num_due"])
        and checkpoint["num_due"] < 1
    )
    assert scalars["charts/num_updates"][-1][1] == num_updates
    assert is_equal == [i % 7 == 0 for i in range(num_updates)]


def test_longer_windows_do_not_cut_updates(tmp_path, monkeypatch):
    """A batch holds as many steps, so that a step is learned as often in as many updates."""
    flags = "--env-id probe_envs:NoLimit-v0 --num-envs 4 --num-steps 40 --total-timesteps 1600 --learning-starts 0"
    flags += (
        " --batch-size 64 --hidden-size 4 --burn-in 0 --eval-episodes 1 --replay-ratio 2 --buffer-size 999"
    )
    found = []
    scores = {f"eval/{name}": 0.0 for name in ("episodic_return", "episodic_return_std", "episodic_length")}
    monkeypatch.setattr(r2d2, "evaluate", lambda *_: scores)
    for learn_length in (4, 20):
        r2d2.main(
            [
                *flags.split(),
                "--learn-length",
                str(learn_length),
                "--run-dir",
                str(tmp_path / str(learn_length)),
            ]
        )
        checkpoint = torch.load(
            read_result(tmp_path / str(learn_length))[0] / "checkpoint.pt", weights_only=True
        )
        found.append(checkpoint["num_updates"])
    assert found[0] == 49 and found[1] in range(
        48, 53
    )  # 1,600 steps twice over 64; less than a window is left


def test_logged_returns_are_those_of_the_greedier_half(tmp_path):
    import probe_envs

    probe_envs.Fixed.made = -2  # two are made to see what `make_env` adds
    flags = "--env-id probe_envs:Fixed-v0 --num-envs 4 --num-steps 6 --total-timesteps 40 --eval-episodes 1"
    flags += " --learning-starts 20 --buffer-size 9 --batch-size 2 --learn-length 3 --learning-rate 4e-3"
    r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    scalars = read_scalars(path)
    # rewards 0, 1, 2, 3 a step in four environments; 5 steps an episode, then one reset that counts nowhere
    assert scalars["charts/episodic_return"] == [(20, 12.5), (40, 12.5)]
    assert scalars["charts/episodic_length"] == [(20, 5.0), (40, 5.0)]
    assert [v for _, v in scalars["charts/learning_rate"]] == pytest.approx([4e-3, 2e-3])
    assert {f"losses/{name}" for name in r2d2.METRICS} <= scalars.keys() and result["env_steps"] == 40
    assert not any("1000_steps" in tag for tag in scalars)
    stats = r2d2.RunningMeanStd()
    stats.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True)["reward_stats"])
    assert stats.count == 30 and stats.get_rms().item() == pytest.approx(math.sqrt((1 + 4 + 9) / 3))


def test_environments_without_end_are_scored_by_windows_of_steps_and_cut_in_evaluation(
    tmp_path, monkeypatch, capsys
):
    import envs_shared.gym_tasks.scores as scores

    monkeypatch.setattr(scores, "MAX_STEPS", 30)
    monkeypatch.setattr(scores, "WINDOW", 96)
    flags = (
        "--env-id probe_envs:NoLimit-v0 --num-envs 2 --num-steps 40 --total-timesteps 480 --eval-episodes 2"
    )
    flags += " --learning-starts 400 --buffer-size 40 --hidden-size 4 --max-grad-norm inf"
    r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    assert read_scalars(path)["charts/return_1000_steps"] == [(240, 96.0), (480, 96.0)]
    assert result["metrics"]["eval/episodic_return"] == result["metrics"]["eval/episodic_length"] == 30
    assert "2 episodes were cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "low", "high"),
    [
        ("--seed 11", 0.98, 1.0),
        pytest.param("--seed 12", 0.98, 1.0, marks=pytest.mark.slow),
        ("--no-recurrent --total-timesteps 5000", -0.4, 0.4),
    ],
)
def test_the_lstm_remembers_what_only_the_stored_states_hold(tmp_path, flags, low, high):
    """The cue, at step 0, is in no window that holds the step it is asked for at, 4."""
    base = (
        f"--env-id probe_envs:Recall-v0 {QUICK} --total-timesteps 16000 --learning-starts 500 --batch-size 96"
    )
    base += " --burn-in 2 --learn-length 3 --n-step 2 --buffer-size 2000 --replay-ratio 4"
    r2d2.main([*base.split(), *flags.split(), "--run-dir", str(tmp_path)])
    assert low <= read_result(tmp_path)[1]["metrics"]["eval/episodic_return"] <= high


def test_losses_that_are_not_finite_stop_the_run(tmp_path):
    flags = "--env-id probe_envs:Broken-v0 --num-envs 2 --total-timesteps 1024 --learning-starts 100 --buffer-size 99"
    with pytest.raises(SystemExit, match="no longer finite"):
        r2d2.main([*flags.split(), "--run-dir", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id NoSuch-v0", "--env-id"),
        ("--env-id a_missing_module:Task-v0", "pip install a_missing_module"),
        ("--env-id probe_envs:Unsupporteddict-v0", "Dict observations"),
        ("--env-id probe_envs:Unsupportedsmallimage-v0", "and images of bytes from 16 x 16 pixels"),
        ("--env-id Pendulum-v1", "Box actions, but R2D2 needs Discrete"),
        ("--env-id probe_envs:Digits-v0", "MultiDiscrete actions, but R2D2 needs Discrete"),
        ("--num-envs 0", "--num-envs"),
        ("--num-steps -5", "--num-steps"),
        ("--total-timesteps 0", "--total-timesteps"),
        ("--learning-rate nan", "--learning-rate"),
        ("--gamma 1.5", "--gamma"),
        ("--epsilon -0.1", "--epsilon"),
        ("--burn-in -1", "--burn-in"),
        ("--learn-length 0", "--learn-length"),
        ("--n-step 0", "--n-step"),
        ("--memory-span 0.5", "--memory-span"),
        ("--hidden-size 0", "--hidden-size"),
        ("--buffer-size 0", "--buffer-size"),
        ("--batch-size 0", "--batch-size"),
        ("--replay-ratio 0", "--replay-ratio"),
        ("--target-interval 0", "--target-interval"),
        ("--learning-starts -1", "--learning-starts"),
        ("--learning-starts 100000", "--total-timesteps 100000 end before"),
        ("--num-envs 1000000000 --buffer-size 1000000000", "memory does not hold 1000000000 environments"),
        ("--buffer-size 10000000000000", "replay cannot be made (lower --buffer-size"),
        ("--max-grad-norm 0", "--max-grad-norm"),
        ("--buffer-size 31", "--buffer-size 31: has to hold a window of each of 32 environments"),
        ("--env-id probe_envs:BabyAI-Probe-v0", "text is not read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        r2d2.main(flags.split())
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert list(tmp_path.iterdir()) == []


# Several processes


class FixedWindows:
    """In place of a SequenceReplay: a sample that is always the same windows."""

    def __init__(self, windows, importance):
        self.windows, self.importance, self.priority = windows, importance, torch.zeros(len(importance))
        self.num_sampled = len(importance)

    def sample(self, num_windows):
        assert num_windows == len(self.importance)
        return torch.arange(num_windows), self.importance

    def read_windows(self, index):
        return self.windows


def update_once(agent, target, windows, importance, args):
    """Weights, priorities and metrics after one `update_network`."""
    replay = FixedWindows(windows, importance)
    optimizer = torch.optim.SGD(agent.parameters(), 1.0)
    metrics = r2d2.update_network(agent, target, optimizer, replay, None, r2d2_loss, args)
    return (
        torch.cat([p.detach().flatten() for p in agent.parameters()]).numpy(),
        replay.priority.numpy(),
        metrics,
    )


# Resume


SMALL = (
    "--num-envs 4 --learning-starts 100 --batch-size 128 --buffer-size 60 --hidden-size 8 --target-interval 5"
)
SMALL += " --eval-episodes 1 --replay-ratio 2"


@pytest.mark.parametrize(
    "flags",
    [
        "--env-id probe_envs:SameStepLedger-v0",
        "--env-id RepeatPreviousEasy-v0 --burn-in 20",
    ],
)
def test_resume_is_bit_equal_after_three_kills(tmp_path, monkeypatch, flags):
    """By default: a run in one go, and one that is cut off three times and goes on in its folder."""
    base = [*SMALL.split(), *flags.split(), "--total-timesteps", "800", "--checkpoint-interval", "2"]
    r2d2.main([*base, "--run-dir", str(tmp_path / "whole")])
    save, kills = r2d2.save_checkpoint, [4, 6, 10]

    def save_and_die(path, args, progress, parts):
        save(path, args, progress, parts)
        if path.name == "checkpoint.pt" and progress["iteration"] in kills:
            kills.remove(progress["iteration"])
            raise RuntimeError("cut off")

    monkeypatch.setattr(r2d2, "save_checkpoint", save_and_die)
    base += ["--run-dir", str(tmp_path / "cut")]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cut off"):
            r2d2.main(base)
        (cut,) = (tmp_path / "cut").glob("*/checkpoint.pt")
        base = ["--resume", str(cut)]
    r2d2.main(base)
    paths = [read_result(tmp_path / name)[0] for name in ("whole", "cut")]
    whole, resumed = (torch.load(path / "checkpoint.pt", weights_only=True) for path in paths)
    assert whole["num_updates"] > 10
    for name in ("iteration", "global_step", "num_updates", "num_due"):
        assert whole[name] == resumed[name], name
    for part in ("agent", "target", "actor", "replay", "reward_stats"):
        assert all(torch.equal(x, resumed[part][name]) for name, x in whole[part].items()), part
    losses = [read_scalars(path)["losses/q_loss"] for path in paths]
    assert losses[0] == losses[1]


def resume(tmp_path, capsys, env_id, *flags):
    """A run of 600 steps resumed to 1500; returns both checkpoints, the updates by step and what the second printed."""
    base = ["--env-id", env_id, *SMALL.split(), "--total-timesteps", "600", "--run-dir", str(tmp_path)]
    r2d2.main(base)
    path = read_result(tmp_path)[0] / "checkpoint.pt"
    first = torch.load(path, weights_only=True)
    for name in flags:
        del first[name]
    torch.save(first, path)
    capsys.readouterr()
    r2d2.main(["--resume", str(path), "--total-timesteps", "1500"])
    num_updates = read_scalars(path.parent)["charts/num_updates"]
    num_updates = {step: n for step, n in num_updates if step > first["global_step"]}
    return first, torch.load(path, weights_only=True), num_updates, capsys.readouterr().out


def test_resume_without_the_replay_says_so_and_fills_it_first(tmp_path, capsys):
    first, second, num_updates, output = resume(tmp_path, capsys, "RepeatPreviousEasy-v0", "replay")
    step = first["global_step"] + 100
    assert f"the replay starts empty: learning goes on at step {step} of 1500" in output
    assert "start anew" not in output and second["global_step"] >= 1500
    assert second["replay"]["num_added"] < 1000 / 16 + 40 and second["replay"]["time"] < 1000 / 4
    for step, n in num_updates.items():
        assert (n == first["num_updates"]) == (step < first["global_step"] + 100)
    assert any(not torch.equal(x, second["agent"][name]) for name, x in first["agent"].items())


def test_environments_that_cannot_be_saved_restart_and_keep_the_replay(tmp_path, capsys):
    first, second, num_updates, output = resume(tmp_path, capsys, "probe_envs:Opaque-v0")
    assert "episodes start anew" in output and "empty" not in output
    assert first["envs"] is None
    assert second["replay"]["num_added"] > first["replay"]["num_added"]
    assert min(num_updates.values()) > first["num_updates"]  # from the first iteration on


def test_the_replay_is_saved_by_default_up_to_500_MB_and_by_flag(tmp_path, monkeypatch):
    """An environment with large observations; nothing is written but what is saved."""
    saved = []

    def end_with(path, args, progress, parts):
        saved.append("replay" in parts)
        raise SystemExit

    monkeypatch.setattr(r2d2, "save_checkpoint", end_with)
    base = f"--env-id probe_envs:PictureHWC-v0 --num-envs 4 --hidden-size 8 --run-dir {tmp_path}"  # 960 bytes a slot
    for flags in ("--buffer-size 20000", "--buffer-size 40000", "--buffer-size 40000 --checkpoint-replay"):
        with pytest.raises(SystemExit):
            r2d2.main(f"{base} {flags}".split())
    assert saved == [True, False, True]


def restart(parts, args, seed):
    """As a resume does where the environments' state is not known."""
    envs, agent, _, replay = parts
    store_last_rows(parts)
    envs.reset(seed)
    replay.cut_episodes()
    return envs, agent, Actor(envs, args, CPU), replay


@pytest.mark.parametrize("env_id", LEDGERS)
def test_windows_stay_true_when_all_environments_are_reset(env_id):
    args = Args(env_id=f"probe_envs:{env_id}", num_envs=3, hidden_size=2, burn_in=3, learn_length=4, n_step=2)
    parts = make_parts(args)
    for seed in range(20):
        play(parts, 5, 2)
        parts = restart(parts, args, 1000 * seed + 1000)
    play(parts, 5, 20)
    store_last_rows(parts)
    ledgers = ledgers_of(parts[0])
    learned = check_rows(parts[3], ledgers, args)
    assert len(learned) > 500 and max(learned.values()) == 1
    for env, ledger in enumerate(ledgers):  # what a reset cuts off is learned as well, as truncated
        for number, episode in enumerate(ledger.episodes[:-1]):
            assert all((env, number, t) in learned for t in range(len(episode)))


def test_resets_do_not_wear_out_the_ring():
    """Windows still read their own slots however often the environments are reset between two collections."""
    args = Args(env_id="probe_envs:Ledger-v0", num_envs=1, hidden_size=2, burn_in=0, learn_length=4, n_step=1)
    args.num_steps, args.buffer_size = 2, 4
    parts = make_parts(args)
    for seed in range(60):
        play(parts, 2, 1)
        parts = restart(parts, args, 1000 + seed)
    check_rows(parts[3], ledgers_of(parts[0]), args)


@pytest.mark.parametrize(
    "flags",
    [
        "--hidden-size 9",
        "--env-id TMaze10-v0",
        "--no-recurrent",
        "--no-last-action-reward",
        "--buffer-size 61",
    ],
)
def test_a_checkpoint_is_not_resumed_with_other_shapes(tmp_path, capsys, flags):
    r2d2.main([*SMALL.split(), "--total-timesteps", "164", "--run-dir", str(tmp_path)])
    path = str(read_result(tmp_path)[0] / "checkpoint.pt")
    for mode in ("--resume", "--evaluate")[: 1 + ("buffer" not in flags)]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as error:
            r2d2.main([mode, path, *flags.split()])
        assert error.value.code == 2 and "trained with" in capsys.readouterr().err


# Compiled, captured and reduced-precision paths


@pytest.mark.slow
def test_compiled_loss_equals_eager():
    args = make_args(2, 4, 2)
    agent, target = make_networks(args)
    windows, importance = make_windows(args), torch.linspace(0.3, 1.0, 8)
    results = []
    for loss_fn in (r2d2_loss, torch.compile(r2d2_loss)):
        agent.zero_grad()
        loss, priorities, metrics = loss_fn(
            agent, target, windows, importance, windows["is_learned"].sum(), args
        )
        loss.backward()
        results.append([loss.detach(), priorities, metrics, *(p.grad.clone() for p in agent.parameters())])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-4, atol=1e-5)


def test_bfloat16_gives_nearly_the_same_update():
    updates = []
    for bf16 in (False, True):
        args = make_args(2, 4, 2, batch_size=32, bf16=bf16)
        agent, target = make_networks(args)
        before = torch.cat([p.detach().flatten() for p in agent.parameters()]).numpy()
        weights, priorities, metrics = update_once(agent, target, make_windows(args), torch.ones(8), args)
        assert weights.dtype == np.float32
        updates.append((weights - before, priorities, metrics))
    for exact, rounded in zip(*updates, strict=True):
        distance = np.linalg.norm(exact - rounded) / np.linalg.norm(exact)
        assert 1e-6 < distance < 0.05


def test_bfloat16_ends_before_the_targets(monkeypatch):
    """n-step returns of 100 rewards of 1.003, of which bfloat16 would keep 1, next to 1.0078: exact to float32."""
    args = make_args(0, 1, 5, bf16=True)
    agent, target = make_networks(args)
    windows = make_windows(args) | {"rewards": torch.full((6, 8), 1.003)}
    windows["end"][:] = 5
    windows["terminated"][:] = True
    found = []
    monkeypatch.setattr(r2d2, "compute_targets", lambda *x: found.append(compute_targets(*x)) or found[-1])
    count = windows["is_learned"].sum()
    r2d2_loss(agent, target, windows, torch.ones(8), count, args)
    expected = r2d2.value_rescale(torch.tensor(1.003 * sum(0.9**i for i in range(5))))
    torch.testing.assert_close(found[0][0], expected.expand(8), rtol=1e-6, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "flags", ["", "--env-id probe_envs:SameStepLedger-v0", "--env-id probe_envs:Quadrants-v0"]
)
def test_cuda_graphs_equal_eager(tmp_path, flags):
    states = []
    for graphs in ("--cuda-graphs", "--no-cuda-graphs"):
        base = [*SMALL.split(), "--total-timesteps", "700", graphs, *flags.split()]
        r2d2.main([*base, "--run-dir", str(tmp_path / graphs)])
        path, _ = read_result(tmp_path / graphs)
        states.append(torch.load(path / "checkpoint.pt", weights_only=True, map_location="cpu")["agent"])
    for name, eager in states[1].items():
        torch.testing.assert_close(states[0][name], eager, rtol=1e-3, atol=1e-4)
