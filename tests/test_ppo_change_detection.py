"""The change detector: its parts against brute force and closed forms, probe pairs with a known optimum, bad input."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import read_result, read_scalars
from PIL import Image
from torch.nn import functional as F

from algos import ppo_change_detection as cd
from envs_shared.change_tasks import data as change_data
from envs_shared.change_tasks import pairs as change_pairs
from envs_shared.change_tasks import scores as change_scores

TINY = "--num-train-pairs 64 --num-eval-pairs 24 --image-size 32 --batch-size 8 --num-envs 8 --pretrain-iterations 1"
TINY += " --warm-iterations 1 --num-iterations 2"


def make_args(**changes):
    return cd.Args(**{"image_size": 32, "patch_size": 8, "num_envs": 4} | changes)


def make_batch(args, num_pairs=4, seed=0):
    pairs = change_pairs.make_pairs("buildings", num_pairs, args.image_size, args.num_classes, seed)
    images, _, labels = change_data.to_pairs(*pairs, args.patch_size, args.num_classes)
    return {"images": images, "labels": labels}


def make_agent(args, seed=0, lr=1e-3):
    torch.manual_seed(seed)
    network = cd.ChangeDetector(args)
    with torch.no_grad():
        network.log_std.fill_(-1.0)
    return cd.PPOAgent(network, torch.tensor(lr))


def collect(args, agent, batch):
    buffer = cd.RolloutBuffer(args.num_steps, torch.device("cpu"))
    rewards = cd.RewardCalculator(args)
    cd.collect_rollouts(agent, rewards, buffer, batch)
    return buffer


# ---- Networks --------------------------------------------------------------------------------------------------------


def test_mobilenet_is_torchvision_s():
    """Names, shapes and features of torchvision's own module; tests/data/README.md says how they were made."""
    reference = json.loads((Path(__file__).parent / "data" / "mobilenet_v2.json").read_text())
    network = cd.MobileNetV2().eval()
    state = network.state_dict()
    assert {name: list(x.shape) for name, x in state.items()} == reference["shapes"]
    for i, (name, x) in enumerate(state.items()):
        if x.is_floating_point():
            wave = torch.sin(torch.arange(x.numel(), dtype=torch.float64) * 0.7 + i).view(x.shape)
            is_scale = name.endswith(("running_var",)) or (x.ndim == 1 and name.endswith("weight"))
            x.copy_(1 + 0.3 * wave if is_scale else wave * (2 / max(x[0].numel(), 1)) ** 0.5)
    picture = torch.sin(torch.arange(3 * 64 * 64, dtype=torch.float64)).view(1, 3, 64, 64).float() / 2 + 0.5
    with torch.no_grad():
        features = network(picture)
    assert features.shape == (1, 32, 8, 8)
    torch.testing.assert_close(features.flatten()[::31], torch.tensor(reference["features"]), rtol=1e-3, atol=1e-4)


def test_the_backbone_sees_coarse_pictures_only():
    args = make_args()
    agent, batch = make_agent(args), make_batch(args)
    env = cd.TransformerRLEnv(agent.network)
    before = env.reset(batch)["query"]
    margin = args.patch_size // 4
    noise = torch.randint(0, 2, batch["images"].shape, dtype=torch.uint8)
    inner = noise[..., margin:-margin, margin:-margin]
    cells = inner.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4))  # [..., h, 4, w, 4]
    moved = cells.sort(-1).values.unflatten(-1, (4,)).reshape(inner.shape)  # another order, the same sums of rows
    a, b = batch["images"].clamp(max=254), batch["images"].clamp(max=254)
    a[..., margin:-margin, margin:-margin] += inner
    b[..., margin:-margin, margin:-margin] += moved
    assert not torch.equal(a, b)
    torch.testing.assert_close(env.reset({"images": a})["query"], env.reset({"images": b})["query"], rtol=0, atol=1e-5)
    assert not torch.allclose(before, env.reset({"images": 255 - batch["images"]})["query"], atol=1e-2)


@pytest.mark.parametrize("tile", [1, 2])
def test_only_the_windows_that_are_paid_for_are_read(tile):
    """Pictures that differ in all pixels but the windows of the queries that go on give the same corrections."""
    args = make_args(tile=tile)
    agent, batch = make_agent(args), make_batch(args)
    goes_on = torch.rand(4, 16) < 0.3
    env = cd.TransformerRLEnv(agent.network)
    obs = env.reset(batch)
    rows = []
    agent.network.refiner.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    action, raw_corr, _, _, _ = agent.get_action(obs, ~goes_on, deterministic=True)
    goes_on = ~action["stop"]  # with tiles it takes along others
    assert rows == [goes_on.sum().item()]
    assert (raw_corr[goes_on] != 0).any(-1).all() and (raw_corr[~goes_on] == 0).all()
    assert (action["correction"][~goes_on] == 0).all()
    is_read = torch.zeros(4, 36, 36, dtype=torch.bool)
    for b, n in goes_on.nonzero().tolist():
        y, x = n // 4 * 8, n % 4 * 8
        is_read[b, y : y + 12, x : x + 12] = True
    other = torch.where(is_read.unsqueeze(1), batch["images"], 255 - batch["images"])
    again = agent.get_action(obs | {"memory": other}, ~goes_on, deterministic=True)[0]
    assert torch.equal(again["correction"], action["correction"])
    other = torch.where(is_read.unsqueeze(1), 255 - batch["images"], batch["images"])
    again = agent.get_action(obs | {"memory": other}, ~goes_on, deterministic=True)[0]
    assert (again["correction"] != action["correction"]).any(-1)[goes_on].all()


def test_without_evidence_a_look_shows_nothing():
    args = make_args(evidence="none")
    agent, batch = make_agent(args), make_batch(args)
    obs = cd.TransformerRLEnv(agent.network).reset(batch)
    go = torch.zeros(4, 16, dtype=torch.bool)
    seen = [agent.get_action(obs | {"memory": x}, go, True)[0]["correction"] for x in (obs["memory"], ~obs["memory"])]
    assert torch.equal(*seen) and (seen[0] != 0).any()


def test_neighbours_are_those_of_the_grid():
    """A correction depends on the queries of its own 3 x 3 neighbourhood and on no others."""
    args = make_args(image_size=40)
    agent = make_agent(args)
    obs = cd.TransformerRLEnv(agent.network).reset(make_batch(args, 1))
    query = obs["query"].detach().requires_grad_()
    for n in (0, 7, 12, 24):
        go = torch.zeros(1, 25, dtype=torch.bool)
        go[0, n] = True
        (grad,) = torch.autograd.grad(agent.network.correct(obs | {"query": query}, go).sum(), query)
        near = {y * 5 + x for y in range(5) for x in range(5) if max(abs(y - n // 5), abs(x - n % 5)) <= 1}
        assert set(grad[0].abs().sum(-1).nonzero().flatten().tolist()) == near


# ---- Environment -----------------------------------------------------------------------------------------------------


def test_labels_are_in_no_observation():
    args = make_args()
    agent, batch = make_agent(args), make_batch(args)
    found = []
    for labels in (batch["labels"], batch["labels"].flip(0), 1 - batch["labels"]):
        torch.manual_seed(1)
        found.append(collect(args, agent, batch | {"labels": labels}).data)
    for name in found[0]:
        same = all(torch.equal(found[0][name], other[name]) for other in found[1:])
        assert same == (name not in ("labels", "reward", "advantage", "return")), name


def test_environment_follows_the_stops():
    args = make_args(num_steps=3)
    agent, batch = make_agent(args), make_batch(args)
    env = cd.TransformerRLEnv(agent.network)
    obs = env.reset(batch)
    assert env.batch_size == 4 and obs["query"].shape == (4, 16, 64) and obs["active"].all()
    coarse, stopped, never = env.final_logits, torch.zeros(4, 16, dtype=torch.bool), None
    for step in range(3):
        query, stop = obs["query"], torch.rand(4, 16) < 0.4
        action = agent.get_action(obs, stop, deterministic=True)[0]
        obs, done, info = env.step(action)
        assert torch.equal(info["pre_action_mask"], ~stopped) and (info["step"] == step).all()
        stopped |= stop
        never = stopped.clone() if never is None else never  # looked at: stopped at once
        assert torch.equal(obs["active"], ~stopped)
        assert torch.equal(done, stopped if step < 2 else torch.ones_like(stopped))
        assert torch.equal(obs["query"] == query, stopped.unsqueeze(-1).expand_as(query))
        assert torch.equal(info["cls_input_q"], obs["query"])
    assert torch.equal((coarse == env.final_logits).all(-1), never)


# ---- Storage ---------------------------------------------------------------------------------------------------------


def test_gae_is_the_sum_over_what_follows():
    rng = torch.Generator().manual_seed(0)
    steps, batch = 5, 40
    rewards, values = (torch.randn(steps, batch, generator=rng, dtype=torch.float64) for _ in range(2))
    dones = (torch.rand(steps + 1, batch, generator=rng) < 0.25).cumsum(0) > 0  # once over, an episode stays over
    dones[0] = False
    last_value = torch.randn(batch, generator=rng, dtype=torch.float64)
    found = cd.compute_gae(rewards, values, dones[:-1], last_value, dones[-1], 0.9, 0.7)
    following = torch.cat((values[1:], last_value[None]))
    for b in range(batch):
        for t in range(steps):
            expected, weight = 0.0, 1.0
            for k in range(t, steps):
                is_on = not dones[k + 1, b]
                expected += weight * (rewards[k, b] + 0.9 * following[k, b] * is_on - values[k, b])
                weight *= 0.9 * 0.7 * is_on
            assert found[t, b] == pytest.approx(float(expected), abs=1e-12)


def test_buffer_gives_each_step_of_each_pair_once_per_epoch():
    args = make_args(num_steps=3)
    agent, batch = make_agent(args), make_batch(args)
    buffer = collect(args, agent, batch)
    pointers = {name: x.data_ptr() for name, x in buffer.data.items() if name not in ("advantage", "return")}
    parts = list(buffer.get_generator(3, torch.device("cpu")))
    assert [len(part["labels"]) for part in parts] == [4, 4, 4]
    keys = torch.cat([part["step_indices"] * 1000 + part["log_prob"].sum(1) for part in parts])
    expected = buffer.data["step_indices"] * 1000 + buffer.data["log_prob"].sum(2)
    torch.testing.assert_close(keys.sort().values, expected.flatten().sort().values)
    for part in parts:
        assert part["obs"].keys() == {"query", "memory", "active", "step"}
        assert part["cls_query"].shape == (4, 16, 64) and part["advantage"].shape == (4, 16)
        assert torch.equal(part["obs"]["step"], part["step_indices"])
    orders = [
        [part["log_prob"].sum().item() for part in buffer.get_generator(3, torch.device("cpu"))] for _ in range(4)
    ]
    assert len({tuple(order) for order in orders}) > 1
    cd.collect_rollouts(agent, cd.RewardCalculator(args), buffer, batch)
    assert pointers.items() <= {name: x.data_ptr() for name, x in buffer.data.items()}.items()  # filled again in place


def test_buffer_tells_wrong_shapes():
    buffer = cd.RolloutBuffer(2, torch.device("cpu"))
    buffer.add({"query": torch.zeros(3, 4)}, reward=torch.zeros(3))
    with pytest.raises(ValueError, match=r"reward is \[2\], the buffer holds \[3\]"):
        buffer.add({"query": torch.zeros(3, 4)}, reward=torch.zeros(2))
    buffer.add({"query": torch.zeros(3, 4)}, reward=torch.zeros(3))
    with pytest.raises(ValueError, match="full after 2 steps"):
        buffer.add({"query": torch.zeros(3, 4)}, reward=torch.zeros(3))


# ---- Rewards ---------------------------------------------------------------------------------------------------------


def make_logits(p):
    p = torch.as_tensor(p, dtype=torch.float64)
    return torch.stack(((1 - p).log(), p.log()), -1)


def test_reward_is_equation_1():
    """One changed and one unchanged query that go on, one that stops, one that was done, one without a label."""
    args = make_args(cost=0.03, beta=0.2)
    rewards = cd.RewardCalculator(args)
    rewards.running_f1, rewards.logits = torch.tensor(0.6), make_logits([[0.4, 0.7, 0.3, 0.3, 0.3]])
    labels = torch.tensor([[1, 0, 1, 1, -1]])
    active, stop = torch.tensor([[True, True, True, False, True]]), torch.tensor([[False, False, True, False, False]])
    logits = make_logits([[0.9, 0.2, 0.8, 0.8, 0.9]])
    done = torch.tensor([[False, True, True, True, False]])
    reward, info = rewards.compute_reward(logits, labels, stop, active, done)
    expected = [0.2 * math.log(0.9 / 0.4) + (2 - 0.6) - 0.03, 0.2 * math.log(0.8 / 0.3) + 0.6 - 0.03, 0, 0, -0.03]
    torch.testing.assert_close(reward, torch.tensor([expected], dtype=torch.float64), atol=1e-6, rtol=0)
    assert info["settled_acc"] == 1.0  # of the three that are done
    image = cd.RewardCalculator(make_args(cost=0.03, beta=0.2, credit="image"))
    image.running_f1, image.logits = torch.tensor(0.6), make_logits([[0.4, 0.7, 0.3, 0.3, 0.3]])
    shared = image.compute_reward(logits, labels, stop, active, done)[0]
    torch.testing.assert_close(shared, active.double() * sum(expected) / 5, atol=1e-6, rtol=0)


def test_one_prediction_changes_f1_by_its_reward():
    """A prediction more moves F1 = 2 TP / (predicted + true) by the reward / (predicted + true), to first order."""
    rewards = cd.RewardCalculator(make_args(cost=0.0, beta=0.0))
    yes = torch.ones(1, 1, dtype=torch.bool)
    for tp, predicted, true in ((300, 500, 450), (50, 900, 200), (700, 720, 900)):
        f1 = 2 * tp / (predicted + true)
        rewards.running_f1 = torch.tensor(f1)
        for y in (0, 1):
            rewards.logits = make_logits([[0.1]])
            reward, _ = rewards.compute_reward(make_logits([[0.9]]), torch.tensor([[y]]), ~yes, yes, ~yes)
            gain = 2 * (tp + y) / (predicted + 1 + true) - f1
            assert gain == pytest.approx(reward.item() / (predicted + true), rel=0.005)


def test_with_three_classes_reward_and_scores_decide_alike():
    p = torch.tensor([[[0.45, 0.3, 0.25], [0.55, 0.45, 0.0]]])  # the first is likelier changed than not
    rewards, labels = cd.RewardCalculator(make_args(num_classes=3)), torch.tensor([[1, 1]])
    for _ in range(400):
        rewards.finish(p.log(), labels)
    confusions = change_scores.count_confusions(labels, change_scores.decide_classes(p.log(), 0.5), 3)
    assert rewards.running_f1.item() == pytest.approx(change_scores.score_confusions(confusions)["f1"], abs=1e-6)


def test_running_f1_goes_to_the_f1_of_the_predictions():
    rewards, labels = cd.RewardCalculator(make_args()), torch.tensor([[1, 1, 1, 0, 0, -1]])
    for _ in range(400):
        rewards.finish(make_logits([[0.9, 0.8, 0.1, 0.7, 0.2, 0.9]]), labels)
    assert rewards.running_f1.item() == pytest.approx(2 * 2 / (3 + 3), abs=1e-6)


def test_in_tiles_gain_and_price_are_shared():
    args = make_args(tile=2, cost=0.1, beta=0.0)
    rewards = cd.RewardCalculator(args)
    rewards.running_f1, rewards.logits = torch.tensor(0.5), make_logits(torch.full((1, 16), 0.1))
    p = torch.full((1, 16), 0.1)
    p[0, 5] = 0.9  # in the first tile, found by a look
    go = torch.zeros(1, 16, dtype=torch.bool)
    go[0, [0, 1, 4, 5]] = True
    labels = torch.zeros(1, 16, dtype=torch.long)
    labels[0, 5] = 1
    reward, _ = rewards.compute_reward(make_logits(p), labels, ~go, torch.ones_like(go), ~go)
    torch.testing.assert_close(reward[go], torch.full((4,), 1.5 / 4 - 0.1, dtype=torch.float64))
    assert (reward[~go] == 0).all()


# ---- PPO -------------------------------------------------------------------------------------------------------------


def test_update_is_equation_5():
    """Losses of a minibatch against loops over queries in plain Python."""
    args = make_args(num_minibatches=1, joint_coef=0.0)
    agent, batch = make_agent(args), make_batch(args)
    buffer = collect(args, agent, batch)
    torch.manual_seed(3)
    for parameter in (*agent.network.policy_head.parameters(), *agent.network.refiner.parameters()):
        parameter.data += 0.02 * torch.randn_like(parameter)
    (minibatch,) = buffer.get_generator(1, torch.device("cpu"))
    obs, goes_on, active = minibatch["obs"], minibatch["goes_on"], minibatch["obs"]["active"]
    with torch.no_grad():
        logit, value = agent.network.decide(obs)
        mean = torch.zeros_like(minibatch["raw_corr"])
        mean[goes_on] = agent.network.correct(obs, goes_on)
        log_std = agent.network.log_std
        weights = minibatch["advantage"][active].double()
        center, scale = weights.mean(), weights.std(correction=0)
    policy_loss, value_loss, entropy, kl, clipped, count = 0.0, 0.0, 0.0, 0.0, 0, 0
    for b, n in active.nonzero().tolist():
        p = 1 / (1 + math.exp(-logit[b, n]))
        log_prob = math.log(p if minibatch["stop"][b, n] else 1 - p)
        if goes_on[b, n]:
            for x, m, s in zip(
                minibatch["raw_corr"][b, n].tolist(), mean[b, n].tolist(), log_std.tolist(), strict=True
            ):
                log_prob += -((x - m) ** 2) / (2 * math.exp(2 * s)) - s - math.log(2 * math.pi) / 2
        log_ratio = log_prob - minibatch["log_prob"][b, n].item()
        ratio, advantage = math.exp(log_ratio), (minibatch["advantage"][b, n].item() - center) / scale
        policy_loss -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        value_loss += (value[b, n] - minibatch["return"][b, n]) ** 2 / 2
        entropy -= p * math.log(p) + (1 - p) * math.log(1 - p)
        kl += ratio - 1 - log_ratio
        clipped += abs(ratio - 1) > 0.2
        count += 1
    expected = [float(x) / count for x in (policy_loss, value_loss, entropy, kl, clipped)]
    found = dict(zip(cd.METRICS, agent.update(minibatch).tolist(), strict=True))
    names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")
    assert [found[name] for name in names] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert 0.02 < found["clip_fraction"] < 0.9 and (~active).sum() > 0  # all branches were taken


def test_what_is_stored_of_a_stopped_query_is_not_in_the_ratio():
    args = make_args(num_minibatches=1)
    agent, batch = make_agent(args), make_batch(args)
    buffer = collect(args, agent, batch)
    (minibatch,) = buffer.get_generator(1, torch.device("cpu"))
    idle = ~minibatch["goes_on"]
    assert idle.any()
    minibatch["raw_corr"][idle] = 100.0
    metrics = dict(zip(cd.METRICS, agent.update(minibatch).tolist(), strict=True))
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_fraction"] == 0.0  # ratio 1
    assert metrics["policy_loss"] == pytest.approx(0.0, abs=1e-5)  # mean of normalized advantages


def test_the_log_prob_is_that_of_the_action():
    args = make_args()
    agent, batch = make_agent(args), make_batch(args)
    obs = cd.TransformerRLEnv(agent.network).reset(batch)
    with torch.no_grad():
        action, raw_corr, stop, log_prob, _ = agent.get_action(obs)
        logit, _ = agent.network.decide(obs)
        mean = agent.network.correct(obs, ~stop)
    assert torch.equal(stop, action["stop"]) and stop.any() and not stop.all()
    torch.testing.assert_close(log_prob[stop], F.logsigmoid(logit[stop]))
    normal = torch.distributions.Normal(mean, agent.network.log_std.exp()).log_prob(raw_corr[~stop]).sum(-1)
    torch.testing.assert_close(log_prob[~stop], F.logsigmoid(-logit[~stop]) + normal)
    torch.testing.assert_close(action["correction"][~stop], agent.network.up(raw_corr[~stop]))


def test_joint_loss_trains_corrections_and_head_but_not_the_backbone():
    args = make_args(num_minibatches=1, vf_coef=0.0, ent_coef=0.0)
    agent, batch = make_agent(args, lr=1e-2), make_batch(args, 32)
    backbone = {name: x.clone() for name, x in agent.network.backbone.state_dict().items()}
    buffer = collect(args, agent, batch)
    buffer.data["advantage"].zero_()  # nothing but the joint loss
    before = [x.clone() for x in agent.network.refiner.parameters()]
    losses = []
    for _ in range(40):
        (minibatch,) = buffer.get_generator(1, torch.device("cpu"))
        losses.append(agent.update(minibatch)[cd.METRICS.index("joint_loss")].item())
    assert losses[-1] < 0.7 * losses[0]
    assert all((a != b).any() for a, b in zip(before, agent.network.refiner.parameters(), strict=True))
    assert all(torch.equal(x, backbone[name]) for name, x in agent.network.backbone.state_dict().items())


def test_losses_without_a_label_are_zero():
    logits = torch.randn(3, 5, 2, requires_grad=True)
    loss = cd.cross_entropy(logits, torch.full((3, 5), -1))
    loss.backward()
    assert loss == 0 and (logits.grad == 0).all()
    labels = torch.tensor([[0, 1, -1], [1, -1, -1]])
    x = torch.randn(2, 3, 2)
    expected = sum(-x[i, j].log_softmax(-1)[labels[i, j]] for i, j in ((0, 0), (0, 1), (1, 0))) / 3
    torch.testing.assert_close(cd.cross_entropy(x, labels), expected)


def test_bfloat16_is_close_to_float32():
    outcomes = []
    for bf16 in (False, True):
        args = make_args(bf16=bf16, num_minibatches=1)
        agent, batch = make_agent(args), make_batch(args, 16)
        torch.manual_seed(2)
        agent.supervise(batch, True, supervised := torch.zeros(2))
        logits, _, _ = cd.classify(agent.network, batch["images"], lambda p, step: torch.zeros_like(p).bool())
        with torch.autocast("cpu", torch.bfloat16, bf16):
            buffer = collect(args, agent, batch)
        (minibatch,) = buffer.get_generator(1, torch.device("cpu"))
        metrics = agent.update(minibatch)
        assert all(x.dtype != torch.bfloat16 for x in buffer.data.values()) and metrics.isfinite().all()
        outcomes.append((supervised[0], logits.softmax(-1)))
    torch.testing.assert_close(outcomes[0][0], outcomes[1][0], rtol=0.02, atol=0.0)
    torch.testing.assert_close(outcomes[0][1], outcomes[1][1], rtol=0.0, atol=0.05)
    assert not torch.equal(outcomes[0][1], outcomes[1][1])


# ---- Probe pairs -----------------------------------------------------------------------------------------------------


def make_probe(env_id, num_pairs, size, num_classes, *seed, shuffle=False):
    """Patches of 8 pixels in red, whose change is in the fine print alone, and black ones, which never change.

    The print is a checkerboard of squares of 2 pixels whose average over 4 pixels is always the same; a red patch is
    changed where the second date has its inverse. The best policy looks at each red patch, once, and at nothing else.
    """
    rng = np.random.default_rng(seed)
    side = size // 8
    is_red, is_changed = rng.random((num_pairs, side, side)) < 0.4, rng.random((num_pairs, side, side)) < 0.5
    is_changed &= is_red
    board = (np.add.outer(np.arange(size) // 2, np.arange(size) // 2) % 2 * 160).astype(np.uint8)
    grow = lambda x: x.repeat(8, 1).repeat(8, 2)  # noqa: E731
    images = np.zeros((num_pairs, 2, size, size, 3), np.uint8)
    images[:, 0, ..., 0] = grow(is_red) * board
    images[:, 1, ..., 0] = grow(is_red) * np.where(grow(is_changed), 160 - board, board)
    if shuffle:
        is_changed = rng.permutation(is_changed.reshape(-1)).reshape(is_changed.shape)
    return change_pairs.Pairs(images, grow(is_changed).astype(np.uint8))


PROBE = "--num-train-pairs 256 --num-eval-pairs 64 --image-size 32 --pretrain-iterations 8 --warm-iterations 15"
PROBE += " --num-iterations 25 --num-envs 64 --supervised-lr 0.01 --learning-rate 0.003"


def run_probe(tmp_path, *flags):
    cd.main([*PROBE.split(), *map(str, flags), "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    return {name.removeprefix("eval/"): value for name, value in result["metrics"].items()}, path


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_looks_where_that_pays_and_nowhere_else(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(change_pairs, "make_pairs", make_probe)
    found, path = run_probe(tmp_path, "--seed", seed)
    share = (make_probe("", 64, 32, 2, 1, 2).images[:, 0, ..., 0].reshape(64, 4, 8, 4, 8).max((2, 4)) > 0).mean()
    assert 0.3 < share < 0.5
    assert found["ppo_f1"] >= 0.99 and found["everywhere_f1"] >= 0.99 and found["coarse_f1"] < 0.75
    assert found["ppo_looks"] == pytest.approx(share, abs=0.02)  # every red patch once, of 2 looks at all
    scalars = read_scalars(path)
    assert np.mean([y for _, y in scalars["charts/episodic_return"][-5:]]) > 0
    assert scalars["charts/settled_acc"][-1][1] > 0.97


@pytest.mark.slow
def test_permuted_labels_teach_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(change_pairs, "make_pairs", lambda *args: make_probe(*args, shuffle=True))
    found, _ = run_probe(tmp_path, "--seed", 1)
    assert found["ppo_f1"] <= found["coarse_f1"] + 0.03 and found["ppo_kappa"] < 0.1 and found["ppo_looks"] < 0.1


@pytest.mark.parametrize(("cost", "low", "high"), [(1, 0.0, 0.0), pytest.param(0, 1.9, 2.0, marks=pytest.mark.slow)])
def test_price_of_a_look(cost, low, high, tmp_path, monkeypatch):
    monkeypatch.setattr(change_pairs, "make_pairs", make_probe)
    found, _path = run_probe(tmp_path, "--seed", 3, "--cost", cost, "--ent-coef", 0.03 if cost == 0 else 0.003)
    assert low <= found["ppo_looks"] <= high
    if cost == 1:  # no looks: exactly the coarse classification, with its threshold
        scores = (*change_scores.SCORES, "pixel_f1", "pixel_iou", "threshold")
        assert all(found[f"ppo_{name}"] == found[f"coarse_{name}"] for name in scores)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_evaluations_on_the_way_change_nothing(tmp_path):
    weights = []
    for interval in (0, 1):
        cd.main([*TINY.split(), "--eval-interval", str(interval), "--run-dir", str(tmp_path / str(interval))])
        weights.append(torch.load(read_result(tmp_path / str(interval))[0] / "checkpoint.pt", weights_only=True))
    for name in ("agent", "control_agent"):
        assert all(torch.equal(x, weights[1][name][key]) for key, x in weights[0][name].items())


def test_a_checkpoint_from_before_ppo_is_its_own_control(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cd, "collect_rollouts", lambda *_: sys.exit("killed"))
    with pytest.raises(SystemExit, match="killed"):
        cd.main([*TINY.split(), "--checkpoint-interval", "1", "--run-dir", str(tmp_path)])
    capsys.readouterr()
    cd.main(["--evaluate", str(next(tmp_path.glob("*/checkpoint.pt")))])
    found = dict(line.split() for line in capsys.readouterr().out.splitlines())
    for name in (*change_scores.SCORES, "threshold"):
        assert found[f"eval/everywhere_{name}"] == found[f"eval/cross_entropy_{name}"]


def test_table_pictures_and_methods(tmp_path, capsys):
    cd.main([*TINY.split(), "--num-classes", "3", "--tile", "2", "--credit", "image", "--run-dir", str(tmp_path)])
    path, result = read_result(tmp_path)
    metrics, lines = result["metrics"], capsys.readouterr().out.splitlines()
    scores = (*change_scores.SCORES, "looks", "settled_acc", "pixel_f1", "pixel_iou", "ms", "threshold")
    levels = {f"eval/{method}_level" for method in ("random", "confidence", "band", "threshold")}
    assert metrics.keys() == levels | {f"eval/{m}_{s}" for m in change_scores.METHODS for s in scores}
    assert [line.split()[0] for line in lines[-9:-1]] == list(change_scores.METHODS)
    assert metrics["eval/everywhere_looks"] == 2.0 and metrics["eval/coarse_looks"] == 0.0
    assert (path / "changes.png").read_bytes().startswith(b"\x89PNG")
    checkpoint = torch.load(path / "checkpoint.pt", weights_only=True)
    assert checkpoint["agent"]["class_head.3.weight"].shape[0] == 3
    network = cd.ChangeDetector(cd.Args(**checkpoint["args"]))
    network.load_state_dict(checkpoint["agent"])
    images = make_batch(make_args(), 8)["images"]
    looks = cd.classify(network, images, lambda p, step: torch.rand_like(p) < 0.8)[1].view(8, 2, 2, 2, 2)
    assert (looks == looks[:, :, :1, :, :1]).all() and looks.unique().tolist() == [0, 1, 2]  # alike within a tile


@pytest.mark.parametrize("method", ["random", "confidence", "band", "threshold"])
def test_rules_look_as_often_as_they_are_told(method):
    args = make_args()
    agent, batch = make_agent(args), make_batch(args, 128)

    def count(level):
        rule = change_scores.make_rule(method, level, 0.5)
        return change_scores.count_looks(lambda *x: cd.classify(agent.network, *x), batch["images"], lambda _: rule, 0)

    torch.manual_seed(0)
    level = change_scores.find_level(method, count, 0.35)
    assert count(level) == pytest.approx(0.35, abs=0.05)


def write_set(folder, num_pairs=4, size=70):
    """A data set with split folders, of pictures that are no multiple of the crops."""
    for split, number in (("train", 2 * num_pairs), ("val", num_pairs), ("test", num_pairs)):
        seed = ("train", "val", "test").index(split)
        images, labels = change_pairs.make_pairs("buildings", number, 72, 2, 9, seed)
        for name in ("A", "B", "label"):
            (folder / split / name).mkdir(parents=True)
        for i in range(number):
            for name, picture in zip(("A", "B", "label"), (*images[i], labels[i] * 255), strict=True):
                Image.fromarray(picture[:size, :size]).save(folder / split / name / f"{i}.png")


def test_a_real_set_trains_and_a_checkpoint_predicts(tmp_path, capsys):
    write_set(tmp_path / "set")
    cd.main([*TINY.split(), "--data-dir", str(tmp_path / "set"), "--run-dir", str(tmp_path / "runs")])
    path, _ = read_result(tmp_path / "runs")
    output = capsys.readouterr()
    assert "train: 8 pairs" in output.err and "% changed" in output.err  # the audit
    pair = [str(tmp_path / "set" / "test" / name / "0.png") for name in "AB"]
    flags = ["--evaluate", str(path / "checkpoint.pt"), "--predict", *pair, "--output", str(tmp_path / "map.png")]
    cd.main(flags)
    assert "map.png: " in capsys.readouterr().out
    written = np.array(Image.open(tmp_path / "map.png"))
    assert written.shape == (70, 70) and set(np.unique(written)) <= {0, 255}
    other = [*flags[:-1], str(tmp_path / "other.png")]
    missing, jpeg = [*other[:3], pair[0], "missing.png", *other[5:]], [*other[:-1], str(tmp_path / "map.jpg")]
    for change, message in ((flags, "map.png: exists"), (missing, "missing.png"), (jpeg, "map.jpg: must end in .png")):
        with pytest.raises(SystemExit) as error:
            cd.main(change)
        assert error.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "other.png").exists()


def test_prediction_of_a_whole_picture_is_that_of_its_tiles(tmp_path):
    args = make_args()
    agent = make_agent(args)
    images, _ = change_pairs.make_pairs("buildings", 1, 72, 2, 4)
    for name, picture in zip("AB", images[0], strict=True):
        Image.fromarray(picture[:64, :32]).save(tmp_path / f"{name}.png")
    args.predict, args.output = (str(tmp_path / "A.png"), str(tmp_path / "B.png")), str(tmp_path / "map.png")
    change_data.write_change_map(args, lambda tiles: cd.classify(agent.network, tiles), cd.fail)
    found = np.array(Image.open(args.output)) > 0
    for y in (0, 32):
        tile = change_data.to_pairs(images[:, :, y : y + 32, :32], np.zeros((1, 32, 32), np.uint8), 8, 2).images
        logits = change_scores.upsample_logits(cd.classify(agent.network, tile)[0], 32)
        assert np.array_equal(found[y : y + 32], (logits.argmax(-1) > 0)[0].numpy())


def test_backbone_weights(tmp_path, capsys):
    torch.manual_seed(0)
    weights = cd.MobileNetV2().state_dict()
    torch.save(weights, tmp_path / "mobilenet.pt")
    flags = [*TINY.split(), "--backbone-weights", str(tmp_path / "mobilenet.pt"), "--run-dir", str(tmp_path / "runs")]
    cd.main([*flags, "--pretrain-iterations", "0"])
    assert "314 of 314 tensors matched" in capsys.readouterr().out
    path, _ = read_result(tmp_path / "runs")
    trained = torch.load(path / "checkpoint.pt", weights_only=True)["agent"]
    assert all(torch.equal(x, trained[f"backbone.mobilenet.{name}"]) for name, x in weights.items())  # no pretraining
    (tmp_path / "mobilenet.pt").unlink()
    cd.main(["--evaluate", str(path / "checkpoint.pt")])  # the checkpoint has them
    weights.pop("classifier.1.bias")
    torch.save(weights, tmp_path / "lacking.pt")
    for name in ("lacking.pt", "missing.pt"):
        with pytest.raises(SystemExit) as error:
            cd.main([*TINY.split(), "--backbone-weights", str(tmp_path / name), "--run-dir", str(tmp_path / "none")])
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.value.code == 2 and name in message and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id forests", "unknown pairs"),
        ("--data-dir missing", "missing: no such folder"),
        ("--image-size 60", "--image-size must be"),
        ("--patch-size 6 --image-size 60", "--image-size must be"),
        ("--image-size 8", "--image-size must be"),
        ("--tile 3", "--tile 3 does not divide the 8 patches"),
        ("--num-minibatches 300", "--num-minibatches must be"),
        ("--num-classes 4", "--num-classes must be in [2, 3]"),
        ("--predict a.png b.png", "--predict needs --evaluate"),
        ("--buffer-device cuda --no-cuda", "--buffer-device cuda"),
        ("--cost -1", "--cost must be"),
        ("--gamma 1.5", "--gamma must be"),
        ("--learning-rate 0", "--learning-rate must be"),
    ],
)
def test_bad_flags_are_one_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        cd.main(flags.split())
    lines = capsys.readouterr().err.strip().splitlines()
    assert error.value.code == 2 and len(lines) == 1 and message in lines[0] and not list(tmp_path.iterdir())


def test_what_a_checkpoint_was_trained_with_stays(tmp_path, capsys):
    cd.main([*TINY.split(), "--run-dir", str(tmp_path)])
    path, _ = read_result(tmp_path)
    for flag in ("--patch-size 4", "--num-classes 3", "--evidence none", "--tile 2", "--num-steps 3"):
        for action in ("--resume", "--evaluate"):
            with pytest.raises(SystemExit) as error:
                cd.main([action, str(path / "checkpoint.pt"), *flag.split()])
            assert error.value.code == 2 and "was trained with" in capsys.readouterr().err


@pytest.mark.slow
def test_the_default_run_looks_seldom_and_keeps_f1(tmp_path):
    """On seeds that nothing was chosen with."""
    cd.main(["--data-seed", "21", "--seed", "21", "--run-dir", str(tmp_path)])
    found = {name.removeprefix("eval/"): value for name, value in read_result(tmp_path)[1]["metrics"].items()}
    assert found["ppo_looks"] < 0.5 and found["coarse_f1"] < 0.65
    assert found["ppo_f1"] >= 0.97 * max(found["everywhere_f1"], found["cross_entropy_f1"]) > 0.75
    assert found["ppo_f1"] > found["confidence_f1"] and found["ppo_ms"] <= 0.6 * found["everywhere_ms"]


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    losses = []
    for name, flags in (("eager", []), ("compiled", ["--compile"])):
        cd.main([*TINY.split(), *flags, "--run-dir", str(tmp_path / name)])
        scalars = read_scalars(read_result(tmp_path / name)[0])
        losses.append([[y for _, y in scalars[f"losses/{x}"]] for x in ("cross_entropy", "value_loss", "control")])
    for eager, compiled in zip(*losses, strict=True):
        assert compiled == pytest.approx(eager, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_equal_eager(tmp_path):
    losses = []
    for flag in ("--cuda-graphs", "--no-cuda-graphs"):
        cd.main([*TINY.split(), flag, "--run-dir", str(tmp_path / flag)])
        scalars = read_scalars(read_result(tmp_path / flag)[0])
        losses.append([y for _, y in scalars["losses/cross_entropy"]])
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
