"""The change detector: its parts against brute force and closed forms, probes with a known optimum, files."""

import copy
import math
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers import fail_with, read_scalars
from PIL import Image
from scripts import load, run_main
from test_change_files import save, save_set
from torch.nn import functional as F

from algos import ppo_change_detection as cd
from benchmark.studies import change_detection as study
from envs_shared import change_folders, change_pairs

TINY = "--num-train-pairs 32 --image-size 16 --batch-size 4 --num-envs 8 --num-minibatches 2"
TINY += " --eval-episodes 8"
LONG = {"num_steps": 3, "cost": 0.4, "gamma": 0.9, "gae_lambda": 0.7}  # of rollouts
run = partial(run_main, cd)


def make_parts(**changes):
    """Make args, an agent in float64 whose heads differ from query to query, pictures and labels."""
    args = cd.Args(**{"num_steps": 2, "image_size": 32, "num_envs": 4, "log_std": -1.0} | changes)
    torch.manual_seed(0)
    agent = cd.Agent(args).double()
    torch.nn.init.normal_(agent.heads[-1].weight, 0.0, 0.3)
    agent.heads[0].weight.data[:, 64:] *= -0.15  # so that some patches stop after what they saw
    agent.changed_share.fill_(0.5)  # then a look costs --cost
    agent.heads[-1].bias.data.fill_(0.0)
    pairs, *_ = change_pairs.draw_haze(args.num_envs, args.image_size, 2, 0)
    images, labels = change_pairs.split_labels(torch.from_numpy(pairs), args)
    return args, agent, images.double(), labels.double()


@torch.no_grad()
def let_half_look(agent, pairs, args):
    """Move the policy so that half of the patches look at first."""
    rollout, _ = cd.play(agent, *change_pairs.split_labels(pairs, args), args)
    agent.heads[-1].bias[0] -= rollout["look_logits"][0].median()


def roll(args, agent, images, labels):
    """Collect a rollout; returns it, what is logged, and all of its rows in order as a minibatch."""
    torch.manual_seed(0)
    rollout, scalars = cd.collect_rollout(agent, images, labels, args)
    rows = {name: x.flatten(0, 1) for name, x in rollout.items()}
    pairs = torch.arange(args.num_envs).repeat(args.num_steps)
    return rollout, scalars, rows | {"images": images[pairs], "labels": labels[pairs]}


# Networks


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_look_reads_its_own_window_and_the_dates_of_its_step(num_steps):
    """The last look shows both dates, and earlier ones the first date alone."""
    _, agent, images, _ = make_parts(num_steps=num_steps)
    looks = torch.rand(4, 4, 4) < 0.3
    is_read = torch.zeros(4, 6, 36, 36, dtype=torch.bool)
    for b, y, x in looks.nonzero().tolist():
        is_read[b, :, 8 * y : 8 * y + 12, 8 * x : 8 * x + 12] = True
    is_read = is_read[:, :, 2:-2, 2:-2]
    is_first = torch.tensor([True] * 3 + [False] * 3).view(6, 1, 1)  # bands of the first date

    def look(step, is_negative):
        return agent.look(torch.where(is_negative, -images, images), torch.full((4,), step), looks)

    for step in range(num_steps):
        is_last = step == num_steps - 1
        sees = is_read & (is_first | is_last)
        found, other = look(step, torch.zeros_like(sees)), look(step, sees)
        for x, y in zip(found, look(step, ~sees), strict=True):
            assert x.shape == (4, 16, 4, 4) and not x.movedim(1, -1)[~looks].any()
            assert torch.equal(x, y)
        assert (other[0] != found[0]).any(1)[looks].all()
        assert torch.equal(look(step, is_read & ~is_first)[0], found[0]) != is_last


def test_the_embedding_sees_coarse_pictures_alone():
    """It does not see how the pixels of a coarse pixel are arranged."""
    args, agent, images, labels = make_parts()
    turned = images.unflatten(3, (8, 4)).unflatten(2, (8, 4)).flip((3, 5)).flatten(4).flatten(2, 3)
    assert not torch.equal(turned, images)
    first, second = (cd.play(agent, x, labels, args)[0]["embedding"][0] for x in (images, turned))
    torch.testing.assert_close(first, second)


@torch.no_grad()
def test_differences_are_to_the_first_date():
    """With three dates, a look reads each date and its difference to the first, as far as they are shown."""
    torch.manual_seed(0)
    detector = cd.Detector(cd.Args(env_id="haze-3", num_steps=3)).double()
    windows = torch.randn(5, 9, 12, 12).double()
    for num_shown in (1, 2, 3):
        is_shown = torch.arange(3).expand(5, 3) < num_shown
        corrections, ranges = detector.read(windows, is_shown)
        dates = [detector.read_date(x).relu() for x in windows.split(3, 1)]  # [5, 16, 5, 5]
        dates = [x if k < num_shown else torch.zeros_like(x) for k, x in enumerate(dates)]
        first, second, third = dates
        parts = (first, second, third, (second - first).abs(), (third - first).abs())
        torch.testing.assert_close(corrections, detector.refiner(torch.cat(parts, 1)).flatten(1))
        expected = [x.flatten(2).max(2)[0] - x.flatten(2).min(2)[0] for x in (first, second)]
        torch.testing.assert_close(ranges, torch.cat(expected, 1))
        assert ranges[:, 16:].any() == (num_shown > 1)


# Rollouts


def test_utility_is_equation_2():
    """Of a query with a hit, a false alarm, a miss and a cell that does not count; of one that is quiet."""
    p = torch.tensor([[0.9, 0.35, 0.2, 0.6], [1e-9, 0.29, 0.25, 0.1]]).double()
    logits = p.logit().T[None, :, :, None]
    labels = torch.tensor([[1, 0, 1, 255], [1, 0, 0, 0]]).double().T[None, :, :, None]
    found = cd.compute_utility(logits, labels, torch.tensor(0.6), 0.2)
    hit, alarm, miss = 0.2 * math.log(0.9) + 2 - 0.6, 0.2 * math.log(0.65) - 0.6, 0.2 * math.log(0.2)
    quiet = 0.2 * (-7 + math.log(0.71) + math.log(0.75) + math.log(0.9))  # all below F / 2 = 0.3
    assert found.flatten().tolist() == pytest.approx([(hit + alarm + miss) / 3, quiet / 4])
    assert not cd.compute_utility(logits, torch.full_like(labels, 255.0), torch.tensor(0.6), 0.2).any()


@torch.no_grad()
def test_a_rollout_follows_its_decisions():
    """Each row holds the state, the action and its log-probabilities, and the state that follows."""
    args, agent, images, labels = make_parts(**LONG)
    data, *_ = roll(args, agent, images, labels)
    close = torch.testing.assert_close
    looks, mask = data["looks"], data["is_active"]
    assert mask[0].all() and torch.equal(mask[1:], looks[:-1]) and not (looks & ~mask).any()
    for t in range(3):
        embedding, correction = data["embedding"][t], data["correction"][t]
        logits, values = agent.decide(embedding, data["seen"][t])
        means, features = agent.look(images, data["step_indices"][t], looks[t])
        assert (data["step_indices"][t] == t).all() and not correction.movedim(1, -1)[~looks[t]].any()
        assert (correction != means).any(1)[looks[t]].all()  # drawn, not the mean
        close(values, data["values"][t])
        if t < 2:
            close(data["embedding"][t + 1], embedding + agent.up(correction))
            close(data["seen"][t + 1], data["seen"][t] + features)
        close(data["log_probs"][t, :, 0], torch.where(looks[t], F.logsigmoid(logits), F.logsigmoid(-logits)))
        normal = torch.distributions.Normal(means, agent.log_std.exp())
        close(data["log_probs"][t, :, 1], normal.log_prob(correction).sum(1) * looks[t])


@torch.no_grad()
def test_rewards_are_equation_1_and_advantages_equation_3():
    """Advantages are sums over what follows, up to a stop; the running F1 follows the maps."""
    args, agent, images, labels = make_parts(**LONG)
    agent.changed_share.fill_(0.25)  # so that a look costs 2 x 0.25 x 0.4 = 0.2
    f1 = agent.running_f1.clone()
    data, scalars, _ = roll(args, agent, images, labels)
    looks, close = data["looks"], torch.testing.assert_close
    assert looks[1].any() and not looks[1].all()
    last = data["embedding"][-1] + agent.up(data["correction"][-1])
    logits = [agent.detector.classify(x) for x in (*data["embedding"], last)]
    worth = torch.stack([cd.compute_utility(x, labels, f1, args.beta) for x in logits])
    close(data["rewards"], (worth.diff(dim=0) - 0.2) * looks)
    next_values = *data["values"][1:], torch.zeros(4, 4, 4)
    steps = [*zip(data["rewards"], data["values"], next_values, looks, strict=True)]
    for t in range(3):
        expected, weight = 0.0, 1.0
        for reward, value, next_value, goes_on in steps[t:]:
            expected = expected + weight * (reward + 0.9 * next_value * goes_on - value)
            weight = weight * 0.9 * 0.7 * goes_on
        close(data["advantages"][t], expected)
    close(data["returns"], data["advantages"] + data["values"])

    is_called = logits[-1].sigmoid() > f1 / 2
    expected = 2 * (is_called & (labels > 0)).sum() / (is_called.sum() + (labels > 0).sum())
    close(agent.running_f1, 0.8 * f1 + 0.2 * expected, check_dtype=False)
    assert scalars["charts/looks"] == pytest.approx(looks.sum(0).double().mean().item())


def test_minibatches_have_each_row_once_in_each_epoch():
    args, agent, images, labels = make_parts(num_minibatches=3, update_epochs=2)
    rollout, _, rows = roll(args, agent, images, labels)
    rollout["number"] = torch.arange(8).view(2, 4)
    batches, orders = list(cd.get_minibatches(rollout, images, labels, args)), []
    for epoch in (batches[:3], batches[3:]):
        found = {name: torch.cat([x[name] for x in epoch]) for name in epoch[0]}
        orders.append(found["number"])
        assert sorted(orders[-1].tolist()) == list(range(8))
        assert all(torch.equal(found[name], x[orders[-1]]) for name, x in rows.items())
    assert not torch.equal(*orders)


# Losses


def test_ppo_loss_is_equation_5():
    """By a loop over patches. What stopped patches hold changes nothing, even if a ratio were infinite."""
    args, agent, images, labels = make_parts(clip_coef=0.1, vf_coef=0.7, ent_coef=0.3, joint_coef=2.0)
    labels[0, :3] = 255
    _, _, batch = roll(args, agent, images, labels)
    is_over = ~batch["is_active"]
    batch["log_probs"].movedim(1, -1)[is_over] = -1e4
    batch["advantages"][is_over] = batch["returns"][is_over] = 5.0
    with torch.no_grad():
        for parameter in (*agent.heads.parameters(), *agent.detector.refiner.parameters()):
            parameter += 0.02 * torch.randn_like(parameter)
    loss, metrics = cd.ppo_loss(agent, batch, args)
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, agent.heads.parameters()))
    with torch.no_grad():
        logits, values = agent.decide(batch["embedding"], batch["seen"])
        looks, mask = batch["looks"], batch["is_active"]
        means, _ = agent.look(batch["images"], batch["step_indices"], looks)
        class_logits = agent.detector.classify(batch["embedding"] + agent.up(means))
    normal = torch.distributions.Normal(means, agent.log_std.exp())
    drawn, advantages = normal.log_prob(batch["correction"]).sum(1), batch["advantages"]
    advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std(correction=0) + 1e-8)
    totals, num_clipped = dict.fromkeys(("policy_loss", "value_loss", "entropy"), 0.0), [0, 0]
    for n, y, x in mask.nonzero().tolist():
        advantage, p = advantages[n, y, x].item(), torch.sigmoid(logits[n, y, x]).item()
        log_probs = [math.log(p), drawn[n, y, x].item()] if looks[n, y, x] else [math.log(1 - p)]
        for k, log_prob in enumerate(log_probs):
            ratio = math.exp(log_prob - batch["log_probs"][n, k, y, x].item())
            totals["policy_loss"] -= min(ratio * advantage, min(max(ratio, 0.9), 1.1) * advantage)
            num_clipped[k] += abs(ratio - 1) > 0.1
        totals["value_loss"] += 0.5 * (values[n, y, x] - batch["returns"][n, y, x]).item() ** 2
        totals["entropy"] += -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert is_over.any() and 0 < num_clipped[0] < mask.sum() and 0 < num_clipped[1] < looks.sum()
    expected = {name: x / mask.sum().item() for name, x in totals.items()}
    expected["clipfrac"] = num_clipped[0] / mask.sum().item()
    is_counted = mask.unsqueeze(1) & (batch["labels"] != 255)
    cross_entropy = F.binary_cross_entropy_with_logits(class_logits[is_counted], batch["labels"][is_counted])
    expected["cross_entropy"] = cross_entropy.item()
    found = {name: x.item() for name, x in metrics.items()}
    assert found.pop("approx_kl") > 0 and found == pytest.approx(expected)
    weights = {"policy_loss": 1, "value_loss": 0.7, "entropy": -0.3, "cross_entropy": 2}
    assert loss.item() == pytest.approx(sum(w * expected[name] for name, w in weights.items()), rel=1e-9)


def test_the_joint_loss_trains_what_reads_and_classifies_and_not_what_embeds():
    args, agent, images, labels = make_parts(joint_coef=1.0, vf_coef=0.0, ent_coef=0.0)
    _, _, batch = roll(args, agent, images, labels)
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    cd.ppo_loss(agent, batch, args)[0].backward()
    trained = [name for name, x in agent.named_parameters() if x.grad is not None and x.grad.any()]
    found = {name.removeprefix("detector.").split(".")[0] for name in trained}
    assert found == {"classify", "refiner", "read_date", "up"}


@torch.no_grad()
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_detector_learns_from_no_look_and_each_look(share, monkeypatch):
    """Compare with the mean of cross entropies by hand, for shares of looks of 0 and 1."""
    args, agent, images, labels = make_parts()
    labels[0, :3] = 255
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.full(size, share))
    loss = cd.detector_loss(agent, images, labels, args)
    rule = study.look_everywhere if share else study.look_nowhere
    rollout, cell_logits = cd.play(agent, images, labels, args, rule=rule)
    maps, is_counted = (*rollout["cell_logits"], cell_logits), labels != 255
    losses = [F.binary_cross_entropy_with_logits(x[is_counted], labels[is_counted]) for x in maps]
    assert loss.item() == pytest.approx(sum(losses).item() / 3)
    assert (losses[0] == losses[2]).item() == (share == 0)


@torch.no_grad()
def test_each_pair_of_the_detector_has_a_rate_of_looks_of_its_own(monkeypatch):
    """Shares of patches that look at first spread as it does; with one rate they would be nearly equal."""
    args, agent, images, labels = make_parts(num_envs=64)
    looks, look = [], cd.Agent.look
    monkeypatch.setattr(cd.Agent, "look", lambda *x: looks.append(x[-1]) or look(*x))
    torch.manual_seed(3)
    cd.detector_loss(agent, images, labels, args)
    first, second = (x.double().mean((1, 2)) for x in looks)
    # The variance of a uniform rate, and of 16 draws with it
    assert first.var().item() == pytest.approx(1 / 12 + 1 / 6 / 16, rel=0.25)
    assert not (looks[1] & ~looks[0]).any()
    assert second.mean().item() == pytest.approx(1 / 3, abs=0.08)  # the mean of its square


# Evaluation


def test_scores_of_pixels_and_the_threshold(monkeypatch):
    """Count pixel by pixel; what does not count is left out, and no threshold of the grid is better."""
    rng, args = np.random.default_rng(0), cd.Args()
    pairs = torch.from_numpy(rng.choice([0, 1, 255], (3, 7, 8, 8), p=(0.6, 0.3, 0.1)).astype(np.uint8))
    labels = pairs[:, -1]
    p = torch.from_numpy(rng.random((3, 8, 8))) * 0.7 + 0.3 * (labels == 1)
    p = (100 * p).round() / 100  # a probability that is a threshold reaches it
    looks, returns = torch.full((3, 2, 2), 1.5), torch.arange(12.0).view(3, 2, 2)
    monkeypatch.setattr(cd, "predict", lambda *args: (p, looks, returns))

    def score(threshold):
        kinds = (2 * (p >= threshold) + (labels == 1))[labels != 255]
        rest, misses, alarms, hits = kinds.bincount(minlength=4).tolist()
        f1 = 2 * hits / (2 * hits + alarms + misses)
        scores = {"f1": f1, "precision": hits / (hits + alarms), "recall": hits / (hits + misses)}
        scores |= {"iou": hits / (hits + alarms + misses), "accuracy": (hits + rest) / len(kinds)}
        scores |= {"threshold": threshold, "looks": 1.5, "episodic_return": 5.5}
        scores["f1_less_price"] = f1 - 1.5 * args.cost
        return {f"eval/{name}": x for name, x in scores.items()}

    found = cd.evaluate(None, args, pairs)
    assert found == pytest.approx(score(found["eval/threshold"]))
    assert found["eval/f1"] == pytest.approx(max(score(k / 100)["eval/f1"] for k in range(100)))
    assert cd.evaluate(None, args, pairs, 0.1) == pytest.approx(score(0.1))


def test_without_a_changed_pixel_the_threshold_stays_a_half():
    """Each threshold has the F1 0 there, and the smallest would call all pixels changed."""
    assert change_pairs.find_threshold(torch.rand(2, 8, 8), torch.zeros(2, 8, 8)) == 0.5


@torch.no_grad()
def test_maps_take_means_and_the_likelier_decision():
    """They are the same for each part of a set, and for whole pictures of any size."""
    args, agent, *_ = make_parts(image_size=64)
    agent, pairs = agent.float(), torch.from_numpy(change_pairs.draw_haze(40, 64, 2, 5)[0])
    let_half_look(agent, pairs, args)
    p, looks, returns = cd.predict(agent, args, pairs)
    assert p.shape == (40, 64, 64) and looks.shape == returns.shape == (40, 8, 8)
    assert 0.4 < looks.mean() < 0.9 and set(looks.unique().tolist()) == {0, 1, 2}
    images, labels = change_pairs.split_labels(pairs[33:34], args)
    rollout, cell_logits = cd.play(agent, images, labels, args)
    for step, looked in enumerate(rollout["looks"]):
        assert torch.equal(looked, rollout["is_active"][step] & (rollout["look_logits"][step] > 0))
        means, _ = agent.look(images, torch.tensor([step]), looked)
        torch.testing.assert_close(rollout["correction"][step], means)
    pixels = F.interpolate(F.pixel_shuffle(cell_logits.sigmoid(), 4), scale_factor=2, mode="bilinear")
    torch.testing.assert_close(returns[33:34], rollout["rewards"].sum(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(p[33:34], pixels[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("is_useless", "num_val"), [(True, 9), (False, 10)])
def test_a_useless_mask_and_few_val_pairs_are_told(monkeypatch, capsys, is_useless, num_val):
    """A mask that is no better than "all changed", and a threshold that rests on fewer than ten pairs."""
    args, agent, *_ = make_parts(image_size=16)
    pairs = torch.from_numpy(change_pairs.draw_haze(20, 16, 2, 1)[0])
    all_changed = change_pairs.score_all_changed(pairs)["eval/f1"]
    f1 = all_changed if is_useless else all_changed + 0.001
    scores = {"eval/f1": f1, "eval/looks": 0.5, "eval/f1_less_price": 0.0, "eval/threshold": 0.5}
    monkeypatch.setattr(cd, "evaluate", lambda *_: scores)
    monkeypatch.setattr(cd, "load_checkpoint", lambda path: {"agent": agent.state_dict()})
    assert cd.compare_rules(agent, args, pairs[:num_val], pairs, "best.pt") == "all changed"
    lines = capsys.readouterr().out.splitlines()[6:]
    if is_useless:
        first, second = lines
        assert first == "The mask of best.pt is no better than calling every pixel changed. Do not use it"
        assert second == "With 9 val pairs, the choice of best.pt and all thresholds are a guess"
    else:
        assert not lines


def test_rules_are_tuned_on_val_and_scored_on_test(monkeypatch, capsys):
    """Each with its own probability threshold, by the candidate with the largest net score on val.

    best.pt looks by its heads, and the last policy looks everywhere.
    """
    args, agent, *_ = make_parts(image_size=16, cost=-0.02)  # a look earns; by F1 alone, nowhere is best
    val, test = (torch.from_numpy(change_pairs.draw_haze(60, 16, 2, seed)[0]) for seed in (1, 2))
    let_half_look(agent.float(), test, args)
    last = copy.deepcopy(agent)
    last.heads[-1].bias.data[0] = 100.0
    monkeypatch.setattr(cd, "load_checkpoint", lambda path: {"agent": agent.state_dict(), "path": path})
    on_val, found, evaluate = [], [], cd.evaluate

    def record(network, args, pairs, threshold, rule):
        scores = evaluate(network, args, pairs, threshold, rule)
        if pairs is val:
            assert threshold is None
            on_val.append((scores, rule))
        else:
            best, best_rule = max(on_val, key=lambda x: x[0]["eval/f1_less_price"])
            assert best_rule is rule and threshold == best["eval/threshold"]
            found.append(scores)
            on_val.clear()
        return scores

    monkeypatch.setattr(cd, "evaluate", record)
    winner = cd.compare_rules(last, args, val, test, "best.pt")
    names = ["last policy", "best.pt", "everywhere", "nowhere", "look above", "all changed"]
    share = change_pairs.compute_share(test).item()
    assert share < 0.3
    found.append({"eval/f1": 2 * share / (1 + share), "eval/looks": 0.0})  # all pixels are called changed
    earned = [x["eval/f1"] + 0.02 * x["eval/looks"] for x in found]
    assert winner == names[np.argmax(earned)]
    lines = capsys.readouterr().out.splitlines()
    for line, name, scores, x in zip(lines, names, found, earned, strict=False):
        numbers = f"F1 {scores['eval/f1']:.3f} on test at {scores['eval/looks']:.2f} looks a patch"
        assert line.split(": ")[0].strip() == name and f"{numbers}, less their price {x:.3f}" in line
    level, threshold = re.search(r"\(--look-above (\S+) --threshold (\S+)\)", lines[4]).groups()
    by_flags = evaluate(agent, args, test, float(threshold), partial(cd.look_above, float(level)))
    assert by_flags == found[4] and "--look-above" not in lines[0]
    assert found[0] == found[2]
    assert 2 == found[2]["eval/looks"] > found[1]["eval/looks"] > found[3]["eval/looks"] == 0


# Whole runs


@pytest.mark.parametrize(("cost", "least", "most"), [(7.5, 0.0, 0.1), (-7.5, 1.9, 2.0)])
def test_the_policy_follows_the_price(tmp_path, cost, least, most):
    """It leaves out what costs more than it can gain, and takes what is paid for."""
    flags = f"{TINY} --detector-iterations 1 --ppo-iterations 12 --num-envs 32 --eval-interval 100"
    scalars = read_scalars(run(tmp_path, flags, "--cost", cost).path)
    looks = [x for _, x in scalars["charts/looks"]]
    assert least - 0.05 <= looks[-1] <= most + 0.05 and 0.5 < looks[0] < 1.9
    assert least <= scalars["eval/looks"][-1][1] <= most


def test_only_the_detector_is_in_training_mode_and_the_heads_learn_faster(tmp_path, monkeypatch):
    """The ratios of PPO would compare a network with dropout with one without."""
    modes, detector_loss, ppo_loss = [], cd.detector_loss, cd.ppo_loss
    for name, loss in (("detector", detector_loss), ("ppo", ppo_loss)):

        def record(agent, *inputs, name=name, loss=loss):
            modes.append((name, agent.training))
            return loss(agent, *inputs)

        monkeypatch.setattr(cd, f"{name}_loss", record)
    path = run(tmp_path, TINY, "--detector-iterations 1 --ppo-iterations 1 --head-lr-scale 5").path
    assert set(modes) == {("detector", True), ("ppo", False)}
    others, heads = load(path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert heads["lr"] == pytest.approx(others["lr"] * 5) and len(heads["params"]) == 4


def test_the_test_pairs_get_the_threshold_of_the_checkpoint(tmp_path, capsys):
    """A threshold that was tuned on the test pairs would have a larger F1."""
    path = run(tmp_path, TINY, "--detector-iterations 4 --ppo-iterations 1").path / "best.pt"
    checkpoint = load(path)
    agent, args = study.load_agent(path)
    (test,) = cd.load_pairs(args, torch.device("cpu"), ["test"])
    best = cd.evaluate(agent, args, test)
    for threshold in (0.999, best["eval/threshold"] / 2):
        checkpoint["progress"]["threshold"] = threshold
        torch.save(checkpoint, path)
        capsys.readouterr()
        cd.main(["--evaluate", str(path)])
        first, *lines = capsys.readouterr().out.splitlines()
        assert "8 test pairs" in first and f"threshold {threshold}" in first
        found = {name: float(x) for name, x in (line.split(": ") for line in lines)}
        assert found == pytest.approx(cd.evaluate(agent, args, test, threshold), rel=1e-4)
        assert found["eval/threshold"] == pytest.approx(threshold, rel=1e-4)
        assert threshold < 0.9 or found["eval/f1"] < best["eval/f1"]


def test_a_run_from_pretrained_weights_begins_with_all_of_them(tmp_path, monkeypatch):
    """The policy and the running F1 too, but no progress and no optimizer. A rate of 0 keeps them."""
    path = run(tmp_path / "first", TINY, "--detector-iterations 2 --ppo-iterations 3").path / "checkpoint.pt"
    starts, collect_rollout = [], cd.collect_rollout

    def record(agent, *inputs):
        starts.append({name: x.clone() for name, x in agent.state_dict().items()})
        return collect_rollout(agent, *inputs)

    monkeypatch.setattr(cd, "collect_rollout", record)
    flags = "--detector-iterations 0 --ppo-iterations 2 --learning-rate 0 --seed 9 --pretrained"
    second = load(run(tmp_path / "second", TINY, flags, path).path / "checkpoint.pt")
    first = load(path)
    for name, x in first["agent"].items():
        assert name == "changed_share" or torch.equal(starts[0][name], x), name
        assert name in ("changed_share", "running_f1") or torch.equal(second["agent"][name], x), name
    assert second["progress"]["iteration"] == 2
    assert second["optimizer"]["state"][0]["step"] == 2 * 2  # minibatches


def test_a_run_says_how_many_of_the_val_pairs_it_uses(tmp_path):
    folder = tmp_path / "set"
    save_set(folder, size=(16, 16))
    flags = f"{TINY} --detector-iterations 1 --ppo-iterations 1 --data-dir {folder}"
    for number, words in ((1, "1 of 2 (--eval-episodes) val"), (2, "2 val"), (3, "2 val")):
        out = run(tmp_path / f"{number}", flags, "--eval-episodes", number).out
        assert f": 2 train, {words} and 2 test pairs, " in out


def test_labels_of_predicted_pairs_may_have_pixels_that_do_not_count(tmp_path, capsys):
    """Of three folders, with --ignore-index; the scores are of the other pixels."""
    path = run(tmp_path / "runs", TINY, "--detector-iterations 2 --ppo-iterations 1 --num-steps 1").path
    rng, labels = np.random.default_rng(0), []
    for i in range(2):
        pair, *_ = change_pairs.draw_haze(1, 16, 2, i)
        labels.append(rng.choice([0, 128, 255], (16, 16)).astype(np.uint8))
        for kind, x in (("A", pair[0, :3].transpose(1, 2, 0)), ("B", pair[0, 3:6].transpose(1, 2, 0))):
            save(tmp_path / kind / f"{i}.png", x)
        save(tmp_path / "label" / f"{i}.png", labels[-1])
    checkpoint = load(path / "best.pt")
    checkpoint["progress"]["threshold"] = 0.1  # at which some pixels are called changed
    torch.save(checkpoint, path / "best.pt")
    flags = ["--evaluate", path / "best.pt", "--ignore-index", 128, "--output", tmp_path / "maps"]
    cd.main([*map(str, flags), "--predict", *(str(tmp_path / kind) for kind in ("A", "B", "label"))])
    masks = [np.array(Image.open(tmp_path / "maps" / f"{i}_mask.png")) for i in range(2)]
    labels, masks = (np.stack(x) for x in (labels, masks))
    is_called, is_changed = masks[labels != 128] > 0, labels[labels != 128] > 0
    out = capsys.readouterr().out
    for name, x in (
        ("recall", is_called[is_changed].mean()),
        ("accuracy", (is_called == is_changed).mean()),
        ("f1", 2 * (is_called & is_changed).sum() / (is_called.sum() + is_changed.sum())),
    ):
        assert float(out.split(f"eval/{name}: ")[1].split()[0]) == pytest.approx(x, rel=1e-4)


def test_the_map_of_looks_has_a_grey_for_each_number_of_looks():
    """Of no look, one and two, with --num-steps 2, in patches of 8 x 8 pixels."""
    looks = torch.tensor([[[0.0, 1.0], [2.0, 0.0]]])
    args = cd.Args(num_steps=2)
    maps = change_pairs.make_maps(torch.rand(1, 16, 16), looks, 0.5, args)
    assert (maps["looks"][0].numpy() == np.kron(looks[0], np.ones((8, 8))) / 2).all()


@torch.no_grad()
@pytest.mark.parametrize(("height", "width"), [(112, 72), (40, 136), (24, 24)])
def test_large_pictures_are_cut_and_joined_without_a_seam(monkeypatch, height, width):
    """The maps are those of the whole pair, whatever remains at its borders."""
    args, agent, *_ = make_parts(image_size=136)
    pair = torch.from_numpy(change_pairs.draw_haze(1, 136, 2, 5)[0])[:, :, :height, :width]
    pair[:, :6] = torch.randint(0, 256, pair[:, :6].shape, dtype=torch.uint8)  # no two patches are alike
    agent = agent.float()
    let_half_look(agent, pair, args)
    sizes = []

    def predict(tile):
        sizes.append(tile.shape[2:])
        return cd.predict(agent, args, tile)

    p, looks, _ = cd.predict(agent, args, pair)
    for side in (16, 32):
        monkeypatch.setattr(change_folders, "TILE_SIDE", side + 5)
        sizes.clear()
        found = change_folders.predict_large(predict, pair, args)
        torch.testing.assert_close(found[0], p, rtol=1e-4, atol=1e-5)
        assert torch.equal(found[1], looks) and looks.any() and not looks.all()
        assert len(sizes) == -(-height // side) * -(-width // side)
        assert max(map(max, sizes)) <= side + 48


def test_an_overview_shows_dates_maps_and_the_mask(tmp_path):
    """In five panels; large ones are made smaller."""
    rng = np.random.default_rng(0)
    pair = rng.integers(0, 256, (6, 20, 30), np.uint8)
    maps = {kind: rng.random((20, 30)).astype(np.float32) for kind in ("probability", "looks")}
    maps["mask"] = (rng.random((20, 30)) < 0.3).astype(np.float32)
    change_folders.write_overview(tmp_path / "x", pair, maps)
    picture = np.array(Image.open(tmp_path / "x_overview.png"))
    assert picture.shape == (20, 5 * 38, 3) and (picture.reshape(20, 5, 38, 3)[:, :, 30:] == 128).all()
    first, second, probability, looks, overlay = (picture[:, 38 * k : 38 * k + 30] for k in range(5))
    assert (first == pair[:3].transpose(1, 2, 0)).all() and (second == pair[3:].transpose(1, 2, 0)).all()
    for panel, kind in ((probability, "probability"), (looks, "looks")):
        assert (panel == np.uint8(255 * maps[kind])[..., None]).all()
    is_called = maps["mask"] > 0
    assert (overlay[~is_called] == second[~is_called]).all()
    assert (overlay[is_called] == second[is_called] // 2 + np.uint8([127, 0, 0])).all()
    large = np.zeros((2, 700, 1400), np.uint8)  # of one band
    change_folders.write_overview(tmp_path / "y", large, {kind: large[0] for kind in maps})
    assert Image.open(tmp_path / "y_overview.png").size == (5 * 520, 256)


def test_training_on_a_folder_and_predicting(tmp_path, capsys):
    """Pairs of a folder have two dates, whatever the task is called. The padding counts in no share.

    Maps have the size of their pictures, and are those of the network.
    """
    folder = tmp_path / "set"
    save_set(folder, size=(24, 20))
    flags = "--image-size 16 --batch-size 4 --num-envs 4 --num-minibatches 2 --detector-iterations 1"
    done = run(tmp_path / "runs", flags, "--ppo-iterations 1 --env-id haze-3 --data-dir", folder)
    share = np.mean([np.array(Image.open(x)) > 0 for x in folder.glob("train/label/*")])
    best, maps = done.path / "best.pt", tmp_path / "maps"
    words = ["--evaluate", best, "--output", maps, "--predict", folder / "test/A", folder / "test/B"]
    cd.main([*map(str, words)])
    assert len(list(maps.iterdir())) == 8
    agent, args = study.load_agent(best)
    assert agent.changed_share.item() == pytest.approx(share)
    args.predict = [str(folder / "test" / kind / "x1.png") for kind in "AB"]
    pair, *size = change_folders.read_pairs(args)["x1"]
    assert pair.shape == (1, 7, 24, 24) and size == [24, 20]
    p, looks, _ = cd.predict(agent, args, torch.from_numpy(pair))
    p = p[0, :, :20].numpy()
    looked = np.kron(looks[0], np.ones((8, 8)))[:, :20]
    is_called = p >= load(best)["progress"]["threshold"]
    for kind, expected in (("probability", p), ("mask", is_called), ("looks", looked)):
        found = np.array(Image.open(maps / f"x1_{kind}.png"))
        assert (found == np.uint8(255 * expected)).all() and expected.any()
    assert "maps: exists already" in fail_with(capsys, cd.main, [*map(str, words)])


@pytest.mark.slow
@pytest.mark.release
def test_the_default_run_finds_where_looks_pay(tmp_path):
    """On a seed that settings were chosen with: F1 as with all looks, with a third of them; a threshold has
    less."""
    agent, args = study.load_agent(run(tmp_path, "--seed 201").path / "best.pt")
    found = study.measure_methods(agent, args, ["ppo", "oracle", "threshold"])
    assert found["ppo_f1"] > max(found["oracle_f1"] - 0.03, found["threshold_f1"] + 0.03)
    assert found["ppo_looks"] < 0.75
