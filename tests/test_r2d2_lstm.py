"""R2D2 against brute force, float64, the environments' own ledgers and its own specification."""

import math
import re
from copy import deepcopy
from functools import partial
from unittest import mock

import gymnasium as gym
import numpy as np
import probe_envs
import pytest
import torch
from helpers import fail_with, read_scalars
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripts import load, run_main
from torch.nn.utils import parameters_to_vector

from algos import r2d2_lstm as r2d2
from algos.r2d2_lstm import Args, Player, QNetwork, SequenceReplay, make_envs

CPU = torch.device("cpu")
run = partial(run_main, r2d2)
QUICK = "--num-envs 32 --num-steps 4 --learning-rate 3e-3 --hidden-size 32 --target-interval 20"
QUICK += " --learning-starts 500 --buffer-size 2000"
SMALL = "--num-envs 4 --learning-starts 100 --batch-size 128 --buffer-size 60 --hidden-size 8"
SMALL += " --target-interval 5 --eval-episodes 1 --replay-ratio 2"
slow = partial(pytest.param, marks=pytest.mark.slow)
seeds = pytest.mark.parametrize("seed", [9841, slow(9842)])
LEDGERS = ("Ledger", "ReusedLedger", "OtherLedger")


def make_args(env_id, *lengths, **more):
    """Settings for a probe environment; `lengths` are burn_in, learn_length and n_step."""
    lengths = dict(zip(("burn_in", "learn_length", "n_step"), lengths, strict=False))
    return Args(env_id=f"probe_envs:{env_id}-v0", **({"hidden_size": 6, "gamma": 0.9} | lengths | more))


def make_parts(args, agent=None, epsilons=None, seed=0):
    """Network, player and replay as `train` makes them."""
    envs = make_envs(args, args.num_envs)
    r2d2.seed_everything(seed)
    agent = agent or QNetwork(envs, args)
    epsilons = r2d2.epsilon_ladder(args) if epsilons is None else epsilons
    player, replay = Player(agent, envs, epsilons, seed), SequenceReplay(envs, args, CPU)
    replay.add(player, player.rewards)
    return agent, player, replay


def get_ledgers(envs):
    return [env.unwrapped for env in envs.unwrapped.envs]


class Recorder:
    """In place of a QNetwork: prefers random actions, and counts the steps in `state`."""

    args = make_args("Ledger")

    def __call__(self, obs, last_action, last_reward, state):
        return torch.rand(*obs.shape[:2], 4), state + 1.0


# Windows


def cut_windows(ledgers, args):
    """Cut the windows of all episodes: (environment, columns, numbers) by the first trained observation."""
    windows = {}
    for env, ledger in enumerate(ledgers):
        for episode in filter(None, ledger.episodes):
            obs, actions, rewards, next_obs, *_ = zip(*episode, strict=True)
            columns = {  # the last observation has a step of its own
                "obs": [*obs, next_obs[-1]],
                "last_action": [-1, *actions],
                "last_reward": [0.0, *rewards],
                "reward": [0.0, *rewards],
            }
            is_over, is_terminated = any(episode[-1][4:]), episode[-1][4]
            for start in range(0, len(episode), args.learn_length):
                stop = start + args.learn_length + args.n_step
                if is_over or stop <= len(obs) + 1:  # its last step has been observed
                    begin = 0 if start >= args.burn_in else args.burn_in
                    first = start - args.burn_in + begin
                    steps = {name: x[first:stop] for name, x in columns.items()}
                    numbers = {"begin": begin, "is_terminated": is_terminated and stop > len(episode)}
                    numbers["state"] = first  # a Recorder counts steps
                    windows[columns["obs"][start].tobytes()] = env, steps, numbers
    return windows


@settings(max_examples=60, deadline=None)
@given(
    env_id=st.sampled_from(LEDGERS),
    p_ends=st.lists(st.sampled_from((0.0, 0.02, 0.1, 0.4, 1.0)), min_size=1, max_size=3),
    lengths=st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(1, 6)),
    num_steps=st.integers(1, 30),
    buffer_size=st.one_of(st.just(300), st.integers(1, 9)),
    seed=st.integers(0, 1000),
)
@example("OtherLedger", [0.1, 0.4], (3, 5, 2), 20, 300, 0)
@example("ReusedLedger", [0.1, 1.0], (6, 4, 6), 7, 5, 1)
def test_every_step_of_an_episode_is_trained_in_one_window_and_windows_are_true(
    env_id, p_ends, lengths, num_steps, buffer_size, seed
):
    """A replay that is too small for all windows holds the newest ones.

    Episodes of the half that explores less are logged; all rewards count in their mean square.
    """
    args = make_args(env_id, *lengths, num_envs=len(p_ends), num_steps=num_steps, buffer_size=buffer_size)
    _, player, replay = make_parts(args, Recorder(), seed=seed)
    ledgers = get_ledgers(player.envs)
    for ledger, p_end in zip(ledgers, p_ends, strict=True):
        ledger.p_end = p_end
    collected = [r2d2.collect_steps(player, replay, args) for _ in range(max(60 // num_steps, 1))]
    rewards = np.array([x[2] for ledger in ledgers for e in ledger.episodes for x in e])
    assert sum(x[1] for x in collected) == len(rewards)
    np.testing.assert_allclose(replay.reward_sums, (len(rewards), (rewards**2).sum()), rtol=1e-5)
    ended = [e for ledger in ledgers[len(ledgers) // 2 :] for e in ledger.episodes if e and any(e[-1][4:])]
    expected = sorted((sum(x[2] for x in e), len(e)) for e in ended)
    logged = sorted(x for episodes, *_ in collected for x in episodes)
    np.testing.assert_allclose(logged, expected, rtol=1e-6, atol=1e-9)

    windows, found = cut_windows(ledgers, args), []
    assert replay.num_added == len(windows) < 300
    for i in range(min(len(windows), buffer_size)):
        window = {name: x[i].numpy() for name, x in replay.data.items()}
        found.append(window["obs"][args.burn_in].tobytes())
        _, steps, numbers = windows[found[-1]]
        for name, x in steps.items():
            np.testing.assert_array_equal(window[name][window["begin"] : window["end"] + 1], np.float32(x))
        for name, x in numbers.items():
            np.testing.assert_array_equal(window[name], x)
    for env in range(len(ledgers)):
        is_kept = [key in found for key, window in windows.items() if window[0] == env]
        assert is_kept == sorted(is_kept)  # the newest
    assert len({*found}) == len(found)


# Targets and the loss


def test_rescaling_is_the_textbooks_and_its_inverse_undoes_it():
    magnitudes = torch.logspace(-8, 6, 1000, dtype=torch.float64)
    x, eps = torch.cat((-magnitudes, torch.zeros(1), magnitudes)), 1e-3
    torch.testing.assert_close(r2d2.value_rescale(x, eps), x.sign() * ((x.abs() + 1).sqrt() - 1) + eps * x)
    round_trip = r2d2.inverse_value_rescale(r2d2.value_rescale(x.float(), eps), eps)
    torch.testing.assert_close(round_trip, x.float(), rtol=1e-6, atol=0.0)  # float32 loses nothing


def brute_force_target(q, target_q, rewards, end, is_terminated, t, args):
    """y_t of eq. 2 for one window: q and target_q [m + n, A], rewards [m + n - 1]."""
    k, eps = min(t + args.n_step, end), args.rescale_epsilon
    total = sum(args.gamma ** (i - t) * rewards[i] for i in range(t, k))
    if not (is_terminated and k == end):
        total += args.gamma ** (k - t) * r2d2.inverse_value_rescale(target_q[k][q[k].argmax()], eps)
    return r2d2.value_rescale(total, eps)


@pytest.fixture
def float64(monkeypatch):
    """Let networks, replay and loss compute in double precision."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def walk(network, windows, i, args):
    """Q [m + n, A] of window i after its burn-in, which is without gradient, one step at a time."""
    state, q = windows["state"][i : i + 1] * (args.state_init == "stored"), []
    for t in range(windows["begin"][i], windows["obs"].shape[1]):
        if t == args.burn_in:
            state, q = state.detach(), []
        step = (windows[name][i : i + 1, t : t + 1] for name in ("obs", "last_action", "last_reward"))
        q_of_step, state = network(*step, state)
        q.append(q_of_step[0, 0])
    return torch.stack(q)


def naive_loss(agent, target, windows, importance, rms, args):
    """Eq. 2 to 4 as loops over windows and steps: the loss, the mean error, and priorities."""
    losses, errors, first = [], [], args.burn_in
    for i, weight in enumerate(importance):
        end, rewards = windows["end"][i].item() - first, windows["reward"][i, first + 1 :] / rms
        q, target_q = walk(agent, windows, i, args), walk(target, windows, i, args)
        window = q.detach(), target_q.detach(), rewards, end, windows["is_terminated"][i]
        y = [brute_force_target(*window, t, args) for t in range(min(args.learn_length, end))]
        actions = windows["last_action"][i, first + 1 : first + 1 + len(y)]
        errors.append((torch.tensor(y) - q[torch.arange(len(y)), actions]).abs())
        losses.append(weight * errors[-1].square() / 2)
    priorities = [args.eta * x.max() + (1 - args.eta) * x.mean() for x in errors]
    return torch.cat(losses).mean(), torch.cat(errors).mean(), torch.stack(priorities).detach()


@pytest.mark.parametrize("lengths", [(0, 3, 2), (2, 4, 1), (3, 2, 5), (1, 1, 1)])
@pytest.mark.parametrize(
    "more",
    [{}, {"state_init": "zero"}, {"norm_reward": False, "eta": 0.4}, {"gamma": 0.0}, {"max_grad_norm": 1e-3}],
)
def test_an_update_equals_loops_and_writes_priorities(float64, lengths, more):
    """What fills up a window has no effect."""
    more |= {"num_envs": 3, "num_steps": 48, "batch_size": 20 * lengths[1], "buffer_size": 90}
    args = make_args("Ledger", *lengths, **more)
    agent, player, replay = make_parts(args)
    for p in agent.parameters():
        p.data *= 2.0
        p.grad = torch.ones_like(p)  # of the last update
    for ledger in get_ledgers(player.envs):
        ledger.p_end = 0.05
    r2d2.collect_steps(player, replay, args)
    target, before = QNetwork(player.envs, args), deepcopy(agent)
    replay.reward_sums.copy_(torch.tensor([4.0, 36.0]))
    priority, num_windows, rms = replay.data["priority"], min(replay.num_added, 90), 1 + 2 * args.norm_reward
    priority[:num_windows] = torch.rand(num_windows) + 0.1
    expected_priority, rng_state = priority.clone(), torch.get_rng_state()
    index, importance = replay.sample()
    windows = {name: x[index] for name, x in replay.data.items()}
    assert len(index) == 20 and importance.min() < 0.8 and 0 < windows["is_terminated"].sum() < 20
    loss, error, expected_priority[index] = naive_loss(before, target, windows, importance, rms, args)
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in before.parameters()])
    assert before.core.weight_hh_l0.grad.abs().max() > 1e-3
    torch.set_rng_state(rng_state)
    optimizer = torch.optim.SGD(agent.parameters(), 1.0)
    metrics = r2d2.update_network(agent, target, optimizer, replay, args)
    torch.testing.assert_close(priority, expected_priority)
    expected = {"q_loss": loss.detach(), "td_error": error.detach(), "grad_norm": norm}
    torch.testing.assert_close(metrics, expected)
    for (name, p), q in zip(agent.named_parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(p, q - q.grad * min(1.0, args.max_grad_norm / norm), msg=name)
    with mock.patch.object(r2d2, "sequence_priority", lambda errors, *_: torch.zeros(len(errors))):
        r2d2.update_network(agent, target, optimizer, replay, args)
    assert priority[:num_windows].min() == 1e-8  # so that they can still be drawn


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9, 1.0])
def test_samples_follow_the_priorities(alpha):
    """Places without a window are never drawn."""
    *_, replay = make_parts(make_args("Ledger", buffer_size=7, alpha=alpha, beta=0.6))
    assert (Args.alpha, Args.beta, Args.eta) == (0.9, 0.6, 0.9)  # those of the paper
    priority = replay.data["priority"]
    priority[:] = torch.tensor([0.25, 3.0, 0.5, 0.0, 1.0, 1e-8, 0.0])
    p = torch.where(priority > 0, priority.double() ** alpha, 0)
    p /= p.sum()
    torch.manual_seed(0)
    replay.batch_windows = 1000
    index, weights = replay.sample()
    counts = torch.bincount(index, minlength=7)
    assert ((counts - 1000 * p).abs() < 2).all() and not counts[[3, 6]].any()  # which is stratified
    expected = p[index] ** -0.6
    torch.testing.assert_close(weights.double(), expected / expected.max(), rtol=1e-5, atol=0.0)


def test_new_windows_get_the_largest_priority():
    args = make_args("Ledger", num_envs=2, num_steps=48, buffer_size=200)
    _, player, replay = make_parts(args, Recorder())
    priority = replay.data["priority"]
    r2d2.collect_steps(player, replay, args)
    n = int(replay.num_added)
    assert n > 5 and priority.tolist() == [1.0] * n + [0.0] * (200 - n)
    priority[:n] = torch.linspace(0.2, 0.7, n)
    expected = priority.clone()
    r2d2.collect_steps(player, replay, args)
    expected[n : replay.num_added] = 0.7
    assert replay.num_added > n and torch.equal(priority, expected)


# Acting


def test_observations_stay_what_they_were_if_the_environment_reuses_its_array():
    _, player, _ = make_parts(make_args("ReusedLedger", num_envs=3), Recorder())
    kept, copied = [player.obs], [player.obs.copy()]
    for _ in range(3):
        player.step()
        kept.append(player.obs)
        copied.append(player.obs.copy())
    np.testing.assert_array_equal(kept, copied)
    assert len(np.unique(copied)) == 4 * 3 * 3


def test_rewards_of_a_small_type_count_as_floats():
    """The square of int8 100 would be 16."""
    args = make_args("Ledger", num_envs=3, num_steps=5)

    class Small(gym.vector.VectorWrapper):
        def step(self, actions):
            obs, rewards, *rest = self.env.step(actions)
            return obs, np.full(len(rewards), 100, np.int8), *rest

    agent = Recorder()
    player = Player(agent, Small(make_envs(args, 3)), torch.zeros(3), 1)
    replay = SequenceReplay(player.envs, args, CPU)
    replay.add(player, player.rewards)
    _, num_steps, _ = r2d2.collect_steps(player, replay, args)
    assert replay.reward_sums.tolist() == [num_steps, 10_000 * num_steps]


def test_rewards_are_not_scaled_before_the_first_one_that_is_not_zero():
    args = make_args("Ledger", 0, 2, 1, num_envs=2, num_steps=40, batch_size=8, norm_reward=True)
    agent, player, replay = make_parts(args)
    r2d2.collect_steps(player, replay, args)
    losses = []
    for sums in ([0.0, 0.0], [7.0, 7.0]):
        replay.reward_sums.copy_(torch.tensor(sums))
        replay.data["priority"][: replay.num_added] = 1.0
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(agent.parameters(), 0.0)
        losses.append(r2d2.update_network(agent, deepcopy(agent), optimizer, replay, args)["q_loss"])
    assert losses[0] == losses[1] > 0


@pytest.mark.parametrize("is_first_episode", [True, False])
def test_a_last_observation_that_is_not_finite_ends_the_run(capsys, is_first_episode):
    """It is observed when the episode is over, and stored as the step that the last action leads to."""

    class NotFiniteAtTheEnd(probe_envs.Fixed):
        episode = 0

        def step(self, action):
            obs, *rest = super().step(action)
            if self.steps == 5:
                self.episode += 1
                obs[0] = np.nan if self.episode == 2 - is_first_episode else obs[0]
            return obs, *rest

    envs = gym.vector.SyncVectorEnv([NotFiniteAtTheEnd] * 2)
    envs.metadata["autoreset_mode"] = gym.vector.AutoresetMode.NEXT_STEP
    player = Player(Recorder(), envs, torch.zeros(2), 1)
    with mock.patch.object(Player, "act", lambda self, *x: (torch.zeros(2).long(), x[-1])):
        for _ in range(4 if is_first_episode else 10):
            player.step()
        line = fail_with(capsys, player.step)
    assert "observation of environment 0 in step 5 of an episode: not a number below 1e18" in line


def test_random_actions_are_as_frequent_as_epsilon_says():
    epsilons, q = torch.tensor([0.0, 0.2, 0.6, 1.0]), torch.eye(4)[1].expand(4, 1, 4)
    agent = mock.Mock(side_effect=lambda *x: (q, x[-1]), args=make_args("Ledger"))
    _, player, _ = make_parts(make_args("Ledger", num_envs=4), agent, epsilons)
    actions = torch.stack([player.act(*player.get_inputs())[0] for _ in range(2000)])  # [2000, 4]
    frequencies = torch.nn.functional.one_hot(actions, 4).float().mean(0)
    expected = epsilons[:, None] / 4 + (1 - epsilons[:, None]) * torch.eye(4)[1]
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0.05)
    assert (actions[:, 0] == 1).all()


def test_each_environment_has_its_epsilon_of_equation_5(monkeypatch):
    """Of the ladder, the second of two processes has every second. A single environment has the first."""
    monkeypatch.setattr(r2d2, "set_up_device", lambda args: CPU)
    args, ladder = make_args("Fixed", num_envs=4, epsilon=0.5), [0.5 ** (1 + 7 * i / 3) for i in range(4)]
    for rank, world_size, expected in ((0, 1, ladder), (1, 2, ladder[1::2])):
        player = mock.Mock(side_effect=InterruptedError)
        changes = {"Player": player, "RANK": rank, "WORLD_SIZE": world_size}
        with mock.patch.multiple(r2d2, **changes), pytest.raises(InterruptedError):
            r2d2.train(args, mock.MagicMock(checkpoint=None, iteration=0))
        assert player.call_args.args[2].tolist() == pytest.approx(expected)
    assert r2d2.epsilon_ladder(Args(num_envs=1, epsilon=0.3)).tolist() == [pytest.approx(0.3)]


@pytest.mark.parametrize("env_id", LEDGERS)
def test_scores_are_of_each_environments_first_episode(monkeypatch, env_id):
    made = []
    monkeypatch.setattr(r2d2, "make_envs", lambda *a: made.append(make_envs(*a)) or made[-1])
    scores = r2d2.evaluate(Recorder(), make_args(env_id, eval_episodes=20), CPU, 4)
    ledgers = get_ledgers(made[0])
    assert max(len(ledger.episodes) for ledger in ledgers) > 2
    episodes = [ledger.episodes[0] for ledger in ledgers]
    returns, lengths = [sum(x[2] for x in e) for e in episodes], [len(e) for e in episodes]
    expected = {"return": np.mean(returns), "return_std": np.std(returns), "length": np.mean(lengths)}
    assert scores == pytest.approx({f"eval/episodic_{k}": x for k, x in expected.items()}, rel=1e-5)


def test_evaluations_draw_no_action_and_cut_an_episode_without_end(capsys):
    """Every second seed never ends, the others end after four steps. One line says how many were cut."""
    args, q = make_args("HalfEndless", eval_episodes=2), torch.zeros(2, 1, 2)
    agent = mock.Mock(side_effect=lambda *x: (q, x[-1]), args=args)
    scores = r2d2.evaluate(agent, args, CPU, 2)
    actions = torch.cat([call.args[1] for call in agent.call_args_list])
    assert actions.unique().tolist() == [-1, 0]
    assert scores["eval/episodic_length"] == scores["eval/episodic_return"] == (10_000 + 4) / 2
    assert re.fullmatch(r"1 evaluated episodes were cut at 10,?000 steps\n", capsys.readouterr().err)


# Networks and observations


def test_the_heads_are_dueling_and_forget_gates_open_for_one_step_to_the_memory_span():
    """The mean of Q over the actions is the value."""
    (agent, *_), value = make_parts(make_args("Ledger", hidden_size=3, memory_span=100.0)), []
    agent.value.register_forward_hook(lambda module, inputs, output: value.append(output[..., 0]))
    q, _ = agent(torch.randn(2, 3, 3), torch.zeros(2, 3).long(), torch.zeros(2, 3), torch.zeros(2, 2, 3))
    torch.testing.assert_close(q.mean(-1), value[0])
    forget = (agent.core.bias_ih_l0 + agent.core.bias_hh_l0)[3:6].sigmoid()
    torch.testing.assert_close(forget, torch.tensor([1 / 2, 10 / 11, 100 / 101]))
    with mock.patch.object(torch.nn, "LSTM", partial(torch.nn.LSTM, num_layers=2)):
        agent, *_ = make_parts(make_args("Ledger", hidden_size=3, memory_span=100.0))
    forget = (agent.core.bias_ih_l1 + agent.core.bias_hh_l1)[3:6].sigmoid()  # of a second layer, too
    torch.testing.assert_close(forget, torch.tensor([1 / 2, 10 / 11, 100 / 101]))


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("last_action_reward", [False, True])
def test_without_last_action_and_reward_a_feed_forward_network_has_no_memory(recurrent, last_action_reward):
    """--no-recurrent --no-last-action-reward: Q of the observation alone; with either, of more."""
    args = make_args("Ledger", recurrent=recurrent, last_action_reward=last_action_reward)
    agent, *_ = make_parts(args)
    rest = torch.tensor([[0], [3]]), torch.tensor([[0.0], [5.0]])
    for state, is_seen in ((torch.zeros(2, 2, 6), False), (torch.rand(2, 2, 6), recurrent)):
        q, _ = agent(torch.ones(2, 1, 3), *rest, state)  # the same observation twice
        assert torch.allclose(q[0], q[1]) == (not last_action_reward and not is_seen)


@pytest.mark.parametrize("layout", ["CHW", "HWC", "HW"])
@pytest.mark.parametrize("size", ["Small", "", "Tall"])
def test_images_are_kept_as_bytes_and_read_in_units_of_255(layout, size):
    """If both sides have 36 pixels or more, as in Mnih et al. 2015; small ones become a vector."""
    agent, player, replay = make_parts(make_args(f"{size}Picture{layout}", num_envs=2, buffer_size=9))
    player.step()
    obs = player.get_inputs()[0][0]  # of one environment, after its first step
    assert obs.dtype == replay.data["obs"].dtype == torch.uint8
    sizes = [(x.out_channels, x.kernel_size[0], x.stride[0]) for x in agent.encoder if hasattr(x, "stride")]
    assert sizes == ([] if size == "Small" else [(32, 8, 4), (64, 4, 2), (64, 3, 1)])
    env = get_ledgers(player.envs)[0]
    pixels = env.observe().flatten() if size == "Small" else env.pixels()
    found = agent.encode(obs)
    expected = agent.encoder(torch.tensor(pixels[None]) / 255.0)  # [1, channels, H, W], or [1, numbers]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert found.std() > 0


# Whole runs


@pytest.mark.parametrize(
    ("env_id", "num_steps"), [("Shifted", 6000), ("OtherShifted", 6000), slow("Quadrants", 4500)]
)
@seeds
def test_probe_tasks_reach_their_optimum(tmp_path, env_id, num_steps, seed):
    """Numbers and actions that do not start at 0, and pictures."""
    flags = f"--env-id probe_envs:{env_id}-v0 --total-timesteps {num_steps} --eval-episodes 200 --seed {seed}"
    flags += f" --burn-in 0 --learn-length 1 --replay-ratio 2 --batch-size 32 {QUICK}"
    scores = read_scalars(run(tmp_path, flags).path)["eval/episodic_return"]
    assert scores[-1][1] == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("env_id", "num_steps"),
    [("Endless", 16_000), slow("EndlessTerminating", 80_000)],
)
@seeds
def test_value_of_an_endless_task_with_a_time_limit(tmp_path, env_id, num_steps, seed):
    """Truncation must not cut the value: 1 / (1 - 0.9) = 10. If it terminates, the LSTM learns to count."""
    flags = f"{QUICK} --env-id probe_envs:{env_id}-v0 --gamma 0.9 --total-timesteps {num_steps} --burn-in 4"
    flags += f" --learn-length 6 --n-step 3 --buffer-size 1000 --batch-size 384 --memory-span 1 --seed {seed}"
    checkpoint = load(run(tmp_path, flags).path / "checkpoint.pt")
    agent, *_ = make_parts(make_args("Endless", hidden_size=32))
    agent.load_state_dict(checkpoint["agent"])
    actions, rewards = torch.tensor([[-1] + [0] * 9]), torch.tensor([[0.0] + [1.0] * 9])
    with torch.no_grad():
        q, _ = agent(torch.ones(1, 10, 1), actions, rewards, torch.zeros(1, 2, 32))
    values = r2d2.inverse_value_rescale(q[0].max(-1).values, 1e-3)
    rewards_left = np.arange(10, 0, -1) if "Terminating" in env_id else np.inf
    np.testing.assert_allclose(values, np.full(10, (1 - 0.9**rewards_left) / (1 - 0.9)), rtol=0.05, atol=0.3)


@pytest.mark.parametrize(
    ("flags", "low", "high"), [("", 0.98, 1.0), (" --no-recurrent --total-timesteps 4000", -0.4, 0.4)]
)
@seeds
def test_the_lstm_remembers_what_only_the_stored_states_hold(tmp_path, flags, low, high, seed):
    """No window holds both the cue, shown at step 0, and step 4, at which it is asked for."""
    base = f"--env-id probe_envs:Recall-v0 {QUICK} --total-timesteps 16000 --batch-size 96 --burn-in 2"
    base += f" --learn-length 3 --n-step 2 --replay-ratio 4 --eval-episodes 100 --seed {seed}"
    scores = read_scalars(run(tmp_path, base + flags).path)["eval/episodic_return"]
    assert low <= scores[-1][1] <= high


def test_updates_keep_to_the_replay_ratio_and_the_log_to_the_less_exploring_half(tmp_path, monkeypatch):
    """The target is copied, and the rate falls. Episodes have 5 steps of reward 0, 1, 2, or 3."""
    probe_envs.Fixed.made, update, is_equal = 0, r2d2.update_network, []

    def watch(agent, target, *rest):
        is_equal.append(torch.equal(*(parameters_to_vector(x.parameters()) for x in (agent, target))))
        return update(agent, target, *rest)

    monkeypatch.setattr(r2d2, "update_network", watch)
    flags = f"{SMALL} --env-id probe_envs:Fixed-v0 --num-steps 7 --total-timesteps 1500 --learning-starts 0"
    flags += " --burn-in 2 --learn-length 3 --n-step 2 --batch-size 17 --replay-ratio 0.7"
    path = run(tmp_path, flags, "--target-interval 7 --learning-rate 4e-3").path
    checkpoint, scalars = load(path / "checkpoint.pt"), read_scalars(path)
    num_updates = len(is_equal)
    assert num_updates == checkpoint["progress"]["num_updates"] > 60
    due = num_updates + checkpoint["progress"]["updates_due"]
    assert 0.7 * checkpoint["replay"]["num_added"] / 5 == pytest.approx(due)
    assert is_equal == [i % 7 == 0 for i in range(num_updates)]
    assert {x for _, x in scalars["charts/episodic_return"]} == {12.5}
    assert {x for _, x in scalars["charts/episodic_length"]} == {5.0}
    steps, rates = zip(*scalars["charts/learning_rate"], strict=True)
    assert rates == pytest.approx([4e-3 * (1 - step / 1500) for step in (0, *steps[:-1])])


@pytest.mark.parametrize("learning_starts", [0, 60, 150])
def test_updates_begin_when_the_stored_windows_have_more_steps_than_learning_starts(learning_starts):
    """A window counts its trained steps. Episodes have 5 steps, so 2 windows."""
    args = make_args("Fixed", 2, 3, 1, num_envs=3, num_steps=2, learning_starts=learning_starts)
    _, player, replay = make_parts(args, Recorder())
    assert replay.num_added == 0
    counts = []
    for _ in range(80):
        before = replay.num_added
        *_, num_windows = r2d2.collect_steps(player, replay, args)
        counts.append(num_windows)
        assert num_windows == (replay.num_added - before if replay.num_added * 3 > learning_starts else 0)
    assert sum(counts) > 100


def test_two_processes_together_update_as_often_as_one(tmp_path, monkeypatch):
    """Each has half of the environments and of a batch. The other one does the same, so sums are twice x."""
    flags = f"--env-id probe_envs:Fixed-v0 {SMALL} --total-timesteps 1500 --learning-starts 200 --num-steps 6"
    flags += " --eval-episodes 0 --learn-length 4 --batch-size 64"
    alone = run(tmp_path / "alone", flags).path
    monkeypatch.setattr(r2d2, "set_up_device", lambda args: CPU)
    with mock.patch.multiple(
        r2d2, WORLD_SIZE=2, total=lambda x: x.mul_(2) if x.is_floating_point() else x * 2
    ):
        together = run(tmp_path / "two", flags).path
    first, second = (load(path / "checkpoint.pt")["progress"] for path in (alone, together))
    assert first["num_updates"] > 30
    for name in ("iteration", "step", "num_updates"):
        assert first[name] == second[name], name


def test_the_first_window_of_each_environment_begins_with_its_first_observation(tmp_path):
    flags = f"--env-id probe_envs:Fixed-v0 {SMALL} --total-timesteps 100 --burn-in 2 --learn-length 3"
    replay = load(run(tmp_path, flags).path / "checkpoint.pt")["replay"]
    is_first = replay["begin"][: replay["num_added"]] == 2
    assert 10 < is_first.sum() < replay["num_added"] < 60
    assert (replay["last_action"][: replay["num_added"]][is_first][:, 2] == -1).all()
    assert (replay["obs"][: replay["num_added"]][is_first][:, 2] != 0).all()


def test_the_replay_is_in_checkpoint_pt_alone_and_can_be_left_out(tmp_path):
    """A run whose checkpoints lack it resumes with an empty one."""
    flags = f"--env-id probe_envs:Ledger-v0 {SMALL} --total-timesteps 600"
    path = run(tmp_path, flags).path
    assert "replay" in load(path / "checkpoint.pt") and "replay" not in load(path / "best.pt")
    added = load(path / "checkpoint.pt")["replay"]["num_added"]
    r2d2.main(["--resume", f"{path}/checkpoint.pt", "--total-timesteps", "700", "--no-checkpoint-replay"])
    assert "replay" not in load(path / "checkpoint.pt")
    r2d2.main(["--resume", f"{path}/checkpoint.pt", "--total-timesteps", "800", "--checkpoint-replay"])
    assert 0 < load(path / "checkpoint.pt")["replay"]["num_added"] < added


def test_the_learning_rate_of_a_resumed_run_goes_on_falling(tmp_path):
    """It is that of an uninterrupted run at each step."""
    flags = f"--env-id probe_envs:Fixed-v0 {SMALL} --num-steps 7 --learning-rate 4e-3 --eval-episodes 0"
    path = run(tmp_path, f"{flags} --total-timesteps 600").path
    done = load(path / "checkpoint.pt")["progress"]["step"]
    r2d2.main(["--resume", f"{path}/checkpoint.pt", "--total-timesteps", "1500"])
    steps, rates = zip(*read_scalars(path)["charts/learning_rate"], strict=True)
    pairs = [(before, rate) for before, rate in zip(steps, rates[1:]) if before >= done]
    assert len(pairs) > 10
    assert [rate for _, rate in pairs] == pytest.approx([4e-3 * (1 - x / 1500) for x, _ in pairs])


def test_a_checkpoint_holds_all_that_a_resumed_run_starts_with(tmp_path):
    """A run that is resumed, and neither acts nor learns, writes the same again.

    But a replay of other windows or of another task begins empty, with its scale of rewards.
    """
    done = run(tmp_path, f"--env-id probe_envs:Ledger-v0 {SMALL} --total-timesteps 900")
    path = done.path / "checkpoint.pt"
    before = load(path)
    assert before["replay"]["num_added"] > 60 and before["optimizer"]["state"]
    assert before["replay"]["reward_sums"][0] > 600  # rewards that are not zero
    assert any(not torch.equal(x, before["target"][name]) for name, x in before["agent"].items())
    other_task = "--env-id probe_envs:ReusedLedger-v0"
    for flag in ("", "--burn-in 9", "--buffer-size 61", other_task):
        torch.save(before, path)
        with mock.patch.object(r2d2, "collect_steps", lambda *args: ([], 64, 0)):
            r2d2.main(f"--resume {path} --total-timesteps 1200 --eval-episodes 0 {flag}".split())
        after = load(path)
        num_iterations = math.ceil((1200 - before["progress"]["step"]) / 64)
        assert after["progress"]["step"] == before["progress"]["step"] + 64 * num_iterations
        assert after["progress"]["num_updates"] == before["progress"]["num_updates"]
        if flag:
            assert after["replay"]["num_added"] == 0 and after["replay"]["reward_sums"].tolist() == [0, 0]
        else:
            assert after["replay"].pop("settings") == before["replay"]["settings"]
            data = {name: x for name, x in before["replay"].items() if name != "settings"}
            torch.testing.assert_close(after["replay"], data, rtol=0, atol=0)
        for part in ("agent", "target"):
            torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
        torch.testing.assert_close(after["optimizer"]["state"], before["optimizer"]["state"], rtol=0, atol=0)


def test_dropout_and_batch_norm_learn_and_rest_while_acting(tmp_path, monkeypatch):
    """Only the trained network is in train mode, and only in an update."""
    modes, forward = set(), QNetwork.forward

    def watch(agent, *inputs):
        modes.add((agent.training, torch.is_grad_enabled()))
        return forward(agent, *inputs)

    monkeypatch.setattr(QNetwork, "forward", watch)
    run(tmp_path, f"--env-id probe_envs:Shifted-v0 {SMALL} --total-timesteps 600 --burn-in 0")
    assert modes == {(True, True), (False, False)}
