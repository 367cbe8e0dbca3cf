"""The vector environments: saved states that continue exactly, and errors of one line."""

import enum
import random
import sys
from collections import Counter, defaultdict, namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_envs import Fixed, Odd, Picture

from envs_shared.gym_tasks import scores as gym_scores
from envs_shared.gym_tasks.columns import EPISODE_LENGTH, NUM_EXTRA
from envs_shared.gym_tasks.normalization import BoxUnits, RewardScaler, RunningMeanStd
from envs_shared.gym_tasks.packages import MODULES
from envs_shared.gym_tasks.scores import play_episodes
from envs_shared.gym_tasks.vector import make_vec


def play(envs, num_steps, seed):
    """Rows [num_steps, B, columns] under random actions."""
    rng = np.random.default_rng(seed)
    space = envs.single_action_space
    rows = []
    for _ in range(num_steps):
        if isinstance(space, gym.spaces.Box):
            actions = rng.uniform(-2, 2, (envs.num_envs, *space.shape))
        else:
            actions = rng.integers(0, space.n, (envs.num_envs, 1))
        rows.append(envs.step(torch.tensor(actions)).clone())
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [
        ("CartPole-v1", "auto"),
        ("CartPole-v1", "sync"),
        ("CartPole-v1", "torch"),
        ("Pendulum-v1", "auto"),
        ("Acrobot-v1", "auto"),
        ("MountainCarContinuous-v0", "auto"),
        ("probe_envs:SameStepFixed-v0", "auto"),
        ("probe_envs:Holder-v0", "auto"),
        ("probe_envs:GlobalRandom-v0", "auto"),
        ("envs_shared.gym_tasks.memory:RepeatPreviousEasy-v0", "auto"),
        ("envs_shared.gym_tasks.memory:RepeatPreviousEasy-v0", "sync"),
        ("envs_shared.gym_tasks.memory:TMaze10-v0", "auto"),
        ("envs_shared.gym_tasks.memory:TMaze10-v0", "sync"),
        ("envs_shared.gym_tasks.memory:CartPoleNoVelocity-v0", "auto"),
        ("envs_shared.gym_tasks.memory:CartPoleNoVelocity-v0", "sync"),
    ],
)
def test_a_saved_state_continues_bit_for_bit(tmp_path, env_id, vectorization):
    envs, _ = make_vec(env_id, 3, 1, vectorization)
    play(envs, 60, seed=1)
    torch.save({"envs": envs.state_dict(), "rng": torch.get_rng_state()}, tmp_path / "state.pt")
    expected = play(envs, 300, seed=2)
    assert expected.std(0).sum() > 0
    other, _ = make_vec(env_id, 3, 99, vectorization)
    play(other, 7, seed=3)
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    other.load_state_dict(saved["envs"])
    torch.set_rng_state(saved["rng"])
    torch.testing.assert_close(play(other, 300, seed=2), expected, rtol=0, atol=0)


def test_state_that_is_not_plain_data_is_reported_not_guessed():
    assert make_vec("probe_envs:Opaque-v0", 2, 1)[0].state_dict() is None
    assert make_vec("CartPole-v1", 2, 1, "async")[0].state_dict() is None
    assert make_vec("probe_envs:Views-v0", 2, 1)[0].state_dict() is None


class Direction(enum.IntEnum):
    NORTH = 0


@pytest.mark.parametrize(
    "value",
    [
        Direction.NORTH,
        {np.int64(1): 2},
        {(1, Direction.NORTH): 2},
        defaultdict(int),
        Counter("a"),
        namedtuple("Point", "x y")(0, 0),
        np.zeros(3, ">f4"),
        np.array([None]),
        {1, 2},
        random.Random(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_looks_plain_is_not_saved(value):
    envs, _ = make_vec("probe-v0", 2, 1, make_env=lambda env_id, **kwargs: Odd(value))
    assert envs.state_dict() is None


def test_saving_is_a_copy():
    envs, _ = make_vec("CartPole-v1", 2, 1)
    state = envs.state_dict()["envs"]["env"]["state"].clone()
    kept = envs.state_dict()
    rows = kept["rows"].clone()
    play(envs, 5, 1)
    torch.testing.assert_close(kept["envs"]["env"]["state"], state, rtol=0, atol=0)
    torch.testing.assert_close(kept["rows"], rows, rtol=0, atol=0)


@pytest.mark.parametrize("vectorization", ["auto", "sync", "torch"])
def test_the_last_rows_are_at_hand_and_part_of_the_state(vectorization):
    envs, obs = make_vec("CartPole-v1", 3, 1, vectorization)
    torch.testing.assert_close(envs.rows[:, :4], obs, rtol=0, atol=0)
    assert envs.rows[:, 4:].abs().sum() == 0
    rows = play(envs, 30, 1)[-1]
    other, _ = make_vec("CartPole-v1", 3, 2, vectorization)
    other.load_state_dict(envs.state_dict())
    torch.testing.assert_close(other.rows, rows, rtol=0, atol=0)


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


@pytest.mark.parametrize(
    ("make_env", "is_vector_form"),
    [
        (gym.make, True),
        (lambda *a, **k: gym.make(*a, **k), True),
        (lambda *a, **k: gym.wrappers.TimeLimit(gym.make(*a, **k), 7), False),
        (lambda *a, **k: Doubled(gym.make(*a, **k)), False),
        (lambda *a, **k: gym.make(*a, sutton_barto_reward=True, **k), False),
        (
            lambda *a, **k: gym.wrappers.TransformObservation(gym.make(*a, **k), lambda obs: 2 * obs, None),
            False,
        ),
    ],
)
def test_what_make_env_adds_is_seen(make_env, is_vector_form):
    envs, _ = make_vec("CartPole-v1", 2, 1, make_env=make_env)
    assert (type(envs.envs.unwrapped).__name__ == "CartPoleVectorEnv") == is_vector_form


def test_an_id_that_make_env_alone_knows():
    envs, _ = make_vec("nobody-v0", 2, 1, make_env=lambda env_id, **kwargs: Fixed(3))
    assert [type(env).__name__ for env in envs.envs.unwrapped.envs] == ["Fixed"] * 2
    with pytest.raises(ValueError, match=r"to be filmed, it has to take render_mode \(.*render_mode"):
        make_vec("nobody-v0", 1, 1, make_env=lambda env_id, **kwargs: Fixed(**kwargs), video_folder="films")


def test_episodes_are_played_evenly_and_counted_once():
    """Rewards 0, 1, 2 a step in three environments, 5 steps an episode: two of each, one more of the first."""
    Fixed.made = 0
    envs, _ = make_vec("probe_envs:Fixed-v0", 3, 1)
    scores = play_episodes(envs, lambda obs: torch.zeros(3, 1), 7)
    returns = [0, 0, 0, 5, 5, 10, 10]
    assert scores["eval/episodic_return"] == pytest.approx(np.mean(returns))
    assert scores["eval/episodic_return_std"] == pytest.approx(np.std(returns))
    assert scores["eval/episodic_length"] == 5


def test_a_long_episode_is_cut_while_others_go_on(monkeypatch, capsys):
    """Of 100 episodes, 50 of 4 steps, and one that has no end beside them."""
    monkeypatch.setattr(gym_scores, "MAX_STEPS", 60)
    envs, _ = make_vec("probe_envs:HalfEndless-v0", 2, 2)
    scores = play_episodes(envs, lambda obs: torch.zeros(2, 1), 100)
    assert (
        scores["eval/episodic_return"] == scores["eval/episodic_length"] == pytest.approx((50 * 4 + 60) / 51)
    )
    assert "1 episodes were cut off" in capsys.readouterr().out


def test_an_evaluation_has_random_numbers_of_its_own(monkeypatch):
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw() for _ in range(2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    found = [draw()]
    inside = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPU's are training's"))
    for seed in (7, 7, 8):
        with gym_scores.own_random_numbers(seed):
            inside.append(draw())
    assert [*found, draw()] == expected
    assert inside[0] == inside[1] != inside[2] and len({*expected[1], *inside[0], *inside[2]}) == 9


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("CartPole-v9", "CartPole"),
        ("NoSuchTask-v0", "NoSuchTask"),
        ("a_missing_module:Task-v0", "pip install a_missing_module"),
        ("Ant-v3", "gymnasium-robotics"),
        ("probe_envs:NeedsMissing-v0", "pip install a_package_that_is_missing"),
        ("probe_envs:Unsupporteddict-v0", "Dict observations"),
        ("probe_envs:Grid-v0", "Dict observations"),
        ("probe_envs:MiniGrid-NoGrid-v0", "not MiniGrid's view"),
        ("probe_envs:Unsupportedimage-v0", "image observations"),
        ("probe_envs:Unsupportedmultibinary-v0", "MultiBinary actions"),
        ("probe_envs:DisabledAutoreset-v0", "DISABLED"),
    ],
)
def test_what_cannot_be_made_is_one_clear_error(env_id, message):
    with pytest.raises(ValueError, match=message):
        make_vec(env_id, 2, 1)


@pytest.fixture
def no_packages(monkeypatch):
    """As if none of the known packages had been imported."""
    for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
        monkeypatch.delitem(sys.modules, name)
    known = dict(gym.registry)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)
    gym.registry.clear()
    gym.registry.update(known)


@pytest.mark.parametrize(
    ("env_id", "package"),
    [
        ("ALE/Pong-v5", "ale-py"),
        ("ale_py:ALE/Pong-v5", "ale-py"),
        ("MiniGrid-MemoryS13-v0", "minigrid"),
        ("BabyAI-GoTo-v0", "minigrid"),
        ("popgym-RepeatPreviousEasy-v0", "popgym"),
    ],
)
def test_a_known_package_that_is_missing_is_named(monkeypatch, no_packages, env_id, package):
    module = package.replace("-", "_")
    for name in [name for name in gym.registry if name.startswith(env_id.split("-")[0].split(":")[-1])]:
        gym.registry.pop(name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError) as caught:
        make_vec(env_id, 2, 1)
    assert str(caught.value) == f"no module named {module}; install it with `pip install {package}`"


def test_the_hint_is_in_view_where_the_start_is_forced():
    """Of MiniGrid's Memory: a key or a ball on the left of the agent, in every episode; in few others."""
    pytest.importorskip("minigrid", reason="not among the requirements, as its pygame-ce displaces pygame")
    beside = np.s_[
        20 * (7 * 2 + 6) : 20 * (7 * 2 + 6) + 11
    ]  # the objects of the cell; the agent is at (3, 6) of 7 x 7
    for env_id, share in (("minigrid_envs:MiniGrid-MemoryForcedS9-v0", 1.0), ("MiniGrid-MemoryS9-v0", 1 / 6)):
        envs, rows = make_vec(env_id, 200, 1)
        objects = np.asarray(rows)[:, : envs.obs_dim][:, beside].argmax(1)
        is_key, is_ball = objects == 5, objects == 6
        assert (is_key | is_ball).mean() == pytest.approx(share, abs=0.1)
        assert is_key.sum() == pytest.approx(is_ball.sum(), rel=0.8)


def test_ids_of_known_packages_import_them_and_are_made_to_be_read(monkeypatch, no_packages, tmp_path):
    """Atari: one frame, rewards unclipped. MiniGrid: one-hot. Both without `module:` before the id."""
    (tmp_path / "ale_py.py").write_text(
        "import gymnasium as gym\n"
        "import probe_envs\n"
        "def make(num_envs, **kwargs):\n"
        "    assert kwargs == {'frameskip': 4, 'stack_num': 1, 'reward_clipping': False}, kwargs\n"
        "    return gym.make_vec('PictureHW-v0', num_envs=num_envs)\n"
        "gym.register('ALE/Fake-v5', vector_entry_point=make, kwargs={'frameskip': 4})\n"
    )
    (tmp_path / "minigrid.py").write_text(
        "import gymnasium as gym\n"
        "import probe_envs\n"
        "gym.register('MiniGrid-Fake-v0', probe_envs.Grid)\n"
        "gym.register('BabyAI-Fake-v0', probe_envs.Grid, kwargs={'mission': 'BabyAIMissionSpace'})\n"
        "gym.register('MiniGrid-Fetch-v0', probe_envs.Grid, kwargs={'mission': 'ordered_placeholders'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_vec("ALE/Fake-v5", 2, 1, images=True)[0].image_shape == (1, 16, 20)
    assert make_vec("MiniGrid-Fake-v0", 2, 1)[0].obs_dim == 6 * 20 + 4
    for env_id in ("BabyAI-Fake-v0", "MiniGrid-Fetch-v0"):
        with pytest.raises(ValueError, match="text is not read"):
            make_vec(env_id, 2, 1)
    for flags in ({"vectorization": "sync"}, {"video_folder": tmp_path}):
        with pytest.raises(ValueError, match="--vectorization auto alone"):
            make_vec("ALE/Fake-v5", 2, 1, images=True, **flags)


@pytest.mark.parametrize("vectorization", ["auto", "async"])
def test_a_grid_becomes_one_hot(vectorization):
    """Of each cell object, colour and state, then the direction: found by counting through them."""
    envs, rows = make_vec("probe_envs:MiniGrid-Probe-v0", 2, 1, vectorization)
    for step in (0, 1, 2, 3, 0):
        image = np.random.default_rng(step).integers((11, 6, 3), size=(3, 2, 3))
        expected = []
        for cell in image.reshape(6, 3):
            for value, size in zip(cell, (11, 6, 3), strict=True):
                expected += [float(i == value) for i in range(size)]
        expected += [float(i == (step + 1) % 4) for i in range(4)]
        np.testing.assert_array_equal(rows[:, : envs.obs_dim], [expected] * 2)
        rows = envs.step(torch.zeros(2, 1))
    envs.close()


def check_rows(env_id, expected, **kwargs):
    """Observations after 0, 1, 2, 3 steps, ends and resets are `expected(step)` [D], under both kinds of autoreset."""
    for prefix, steps in (("", (0, 1, 2, 3, 0, 1)), ("SameStep", (0, 1, 2, 0, 1, 2))):
        envs, rows = make_vec(f"probe_envs:{prefix}{env_id}", 2, 1, **kwargs)
        d = envs.obs_dim
        assert rows.dtype == torch.float32 and rows.shape == (2, d)
        for i, step in enumerate(steps):
            np.testing.assert_array_equal(rows[:, :d], [expected(step)] * 2)
            if prefix and i > 0:
                final = expected(3) if i == 3 else np.zeros(d)
                np.testing.assert_array_equal(rows[:, d + NUM_EXTRA :], [final] * 2)
            rows = envs.step(torch.zeros(2, 1))
    return envs


@pytest.mark.parametrize("env_id", ["Counters-v0", "CountersSquare-v0"])
def test_multi_discrete_observations_are_one_hot_side_by_side(env_id):
    envs = check_rows(env_id, lambda step: np.concatenate([np.eye(n)[step % n] for n in (2, 5, 3, 4)]))
    assert envs.image_shape is None


@pytest.mark.parametrize(("layout", "channels"), [("CHW", 3), ("HWC", 3), ("HW", 1)])
def test_images_are_channels_first_in_every_layout(layout, channels):
    envs = check_rows(
        f"Picture{layout}-v0", lambda step: Picture.pixels(step)[:channels].ravel(), images=True
    )
    assert envs.image_shape == (channels, 16, 20)
    with pytest.raises(ValueError, match=r"image observations .* are not supported, only flat"):
        make_vec(f"probe_envs:Picture{layout}-v0", 2, 1)


@pytest.mark.parametrize("spaces", ["floatimage", "smallimage", "manychannels", "volume"])
def test_what_is_no_image_of_bytes_is_refused(spaces):
    with pytest.raises(ValueError, match="image observations"):
        make_vec(f"probe_envs:Unsupported{spaces}-v0", 2, 1, images=True)


def test_images_change_nothing_for_other_observations():
    for env_id in ("CartPole-v1", "probe_envs:Counters-v0", "probe_envs:Shifted-v0"):
        (envs, obs), (_, expected) = (make_vec(env_id, 3, 1, images=images) for images in (True, False))
        assert envs.image_shape is None
        torch.testing.assert_close(obs, expected, rtol=0, atol=0)


def test_vectorizations_agree():
    """The same seeds and actions give the same rows one after another and in subprocesses."""
    rows = [play(make_vec("Pendulum-v1", 3, 5, mode)[0], 210, 1) for mode in ("auto", "sync", "async")]
    torch.testing.assert_close(rows[0], rows[1], rtol=0, atol=0)
    torch.testing.assert_close(rows[0], rows[2], rtol=0, atol=0)
    assert (rows[0][:, :, 3 + EPISODE_LENGTH] == 200).sum() == 3


def test_the_torch_port_refuses_other_tasks():
    with pytest.raises(ValueError, match="CartPole-v1 alone"):
        make_vec("Pendulum-v1", 2, 1, "torch")


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


def test_box_actions_are_in_units_of_the_box():
    units = BoxUnits(gym.spaces.Box(np.float32([2, -np.inf, 0]), np.float32([50, np.inf, np.inf])))
    actions = torch.tensor([[-1.0, -7.0, 3.0], [0.0, 0.5, -3.0], [1.5, 9.0, 0.0]])
    expected = torch.tensor([[2.0, -7.0, 3.0], [26.0, 0.5, 0.0], [50.0, 9.0, 0.0]])
    torch.testing.assert_close(units(actions), expected)
