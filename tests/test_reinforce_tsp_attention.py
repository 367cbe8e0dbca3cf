"""The TSP script's own tests: numbers against the paper's formulas step by step, exact optima and scipy."""

import itertools
import math
import os
import resource
from pathlib import Path
from typing import get_args
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, read_result, read_scalars
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tsp import solve_exactly
from torch.utils._python_dispatch import TorchDispatchMode

from algos import reinforce_tsp_attention as am
from envs_shared.tsp_tasks import files as tsp_files
from envs_shared.tsp_tasks import instances as tsp

SHORT = "--num-epochs 2 --steps-per-epoch 3 --batch-size 4 --eval-episodes 3".split()
DECODINGS = get_args(am.Decoding)
CPU = torch.device("cpu")


def make_agent(seed=0, dtype=torch.float32):
    """A network with weights and statistics that are nothing special."""
    torch.manual_seed(seed)
    agent = am.AttentionModel()
    for p in agent.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return agent.to(dtype)


def draw(num_instances, num_nodes, seed=0, dtype=torch.float32):
    return torch.rand(num_instances, num_nodes, 2, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_tours(num_instances, num_tours, num_nodes, seed=0):
    return torch.rand(
        num_instances, num_tours, num_nodes, generator=torch.Generator().manual_seed(seed)
    ).argsort(-1)


# The network, written again as the paper has it: embeddings [B, N, D], one decoding step at a time


def reference_encode(agent, points):
    h = torch.nn.functional.linear(am.scale_to_unit_square(points), agent.embed.weight, agent.embed.bias)

    def normalize(norm, h):
        mean, var = h.mean((0, 1)), h.var((0, 1), correction=0)
        if not agent.training:
            mean, var = norm.running_mean, norm.running_var
        return (h - mean) / (var + 1e-5).sqrt() * norm.weight + norm.bias

    for layer in agent.layers:
        q, k, v = (h @ project.weight.T for project in (layer.project_q, layer.project_k, layer.project_v))
        heads = []
        for part in range(8):
            qh, kh, vh = (x[..., 16 * part : 16 * part + 16] for x in (q, k, v))
            heads.append((qh @ kh.transpose(1, 2) / 4.0).softmax(-1) @ vh)
        h = normalize(layer.norm1, h + torch.cat(heads, -1) @ layer.project_out.weight.T)  # eq. 2
        h = normalize(layer.norm2, h + layer.ff(h))  # eq. 3
    return h


def reference_step(agent, h, nodes, visited):
    """log p of the next node, eq. 4 to 8, for tours whose first t nodes are `nodes` [B, t]."""
    b = torch.arange(len(h))
    last, first = (h[b, nodes[:, -1]], h[b, nodes[:, 0]]) if nodes.shape[1] else (agent.v_last, agent.v_first)
    context = torch.cat([x.expand(len(h), -1) for x in (h.mean(1), last, first)], -1)  # [B, 3 D], eq. 4
    w_q = torch.cat((agent.project_graph.weight, agent.project_last.weight, agent.project_first.weight), 1)
    q = context @ w_q.T  # eq. 5
    key, value, logit_key = (
        h @ p.weight.T for p in (agent.project_k, agent.project_v, agent.project_logit_k)
    )
    heads = []
    for part in range(8):
        s = slice(16 * part, 16 * part + 16)
        u = (key[..., s] @ q[:, s, None]).squeeze(-1) / 4.0  # eq. 6
        heads.append((u.masked_fill(visited, -math.inf).softmax(-1)[:, None] @ value[..., s]).squeeze(1))
    glimpse = torch.cat(heads, -1) @ agent.project_out.weight.T
    u = 10.0 * torch.tanh((logit_key @ glimpse[..., None]).squeeze(-1) / math.sqrt(128))  # eq. 7
    return u.masked_fill(visited, -math.inf).log_softmax(-1)  # eq. 8


def reference_log_likelihood(agent, points, tours, from_start):
    """log p of tours [B, P, N] by walking along them; without the first step unless `from_start`."""
    h, columns = reference_encode(agent, points), []
    for p in range(tours.shape[1]):
        total, visited = 0.0, torch.zeros(points.shape[:2], dtype=torch.bool)
        for t in range(points.shape[1]):
            node = tours[:, p, t]
            if t > 0 or from_start:
                total = total + reference_step(agent, h, tours[:, p, :t], visited)[torch.arange(len(h)), node]
            visited = visited.scatter(1, node[:, None], True)
        columns.append(total)
    return torch.stack(columns, 1)


def test_number_of_parameters():
    assert sum(p.numel() for p in am.AttentionModel().parameters()) == 708_608


@pytest.mark.parametrize("training", [True, False])
def test_log_likelihood_in_one_pass_is_that_of_single_steps(training):
    agent = make_agent().train(training)
    points, tours = draw(5, 9), draw_tours(5, 4, 9)
    log_likelihood, start_log_probs = am.score_tours(agent(points), tours)
    expected = reference_log_likelihood(agent, points, tours, from_start=False)
    torch.testing.assert_close(log_likelihood, expected, atol=1e-4, rtol=0)
    expected = reference_log_likelihood(agent, points, tours, from_start=True)
    whole = log_likelihood + start_log_probs.gather(1, tours[:, :, 0])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("baseline", ["pomo", "rollout"])
def test_gradients_of_the_two_pass_loss_are_those_of_single_steps(baseline):
    """In float64, with sampled tours, for the weights of every layer."""
    points, num_tours = draw(4, 7, dtype=torch.float64), 7 if baseline == "pomo" else 1
    starts = torch.arange(7).expand(4, 7) if baseline == "pomo" else None
    agent = make_agent(dtype=torch.float64)
    tours, lengths = am.construct_tours(points, agent(points), num_tours, starts, sample=True)
    grads = []
    for is_reference in (False, True):
        agent.zero_grad()
        if is_reference:
            log_likelihood = reference_log_likelihood(agent, points, tours, from_start=False)
            nothing, unvisited = torch.zeros(4, 0, dtype=torch.int64), torch.zeros(4, 7, dtype=torch.bool)
            start_log_probs = reference_step(agent, reference_encode(agent, points), nothing, unvisited)
        else:
            log_likelihood, start_log_probs = am.score_tours(agent(points), tours)
        if baseline == "pomo":
            loss = am.pomo_loss(lengths, log_likelihood, start_log_probs)
        else:
            loss = am.reinforce_loss(lengths, 3.0, log_likelihood + start_log_probs.gather(1, tours[:, :, 0]))
        loss.backward()
        grads.append({name: p.grad.clone() for name, p in agent.named_parameters()})
    for name, grad in grads[0].items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-6, atol=1e-9, msg=name)


def test_probabilities_of_all_tours_sum_to_one():
    for num_nodes in (3, 6):
        tours = torch.tensor(list(itertools.permutations(range(num_nodes))))[None]
        log_likelihood, start = am.score_tours(make_agent()(draw(1, num_nodes)), tours)
        assert (log_likelihood + start.gather(1, tours[:, :, 0])).exp().sum().item() == pytest.approx(
            1.0, abs=1e-5
        )


def test_samples_follow_the_policy():
    """Frequencies of 20,000 sampled tours of 4 nodes against their probabilities."""
    agent, points, size = make_agent(), draw(1, 4), 20_000
    with torch.no_grad():
        nodes = agent.eval()(points)
        tours, _ = am.construct_tours(points, nodes, size, sample=True)
        every = torch.tensor(list(itertools.permutations(range(4))))
        log_likelihood, start = am.score_tours(nodes, every[None])
    p = (log_likelihood + start.gather(1, every[None, :, 0])).exp()[0]
    frequency = (tours[0][:, None] == every[None]).all(-1).float().mean(0)
    assert frequency.sum() == 1
    assert ((frequency - p).abs() < 5 * (p * (1 - p) / size).sqrt() + 1e-4).all()


def test_a_sampled_node_is_never_a_visited_one():
    """Even where the random number is the smallest or the largest there is."""
    logits = torch.tensor([-math.inf, 2.0, -math.inf, 1.0, -math.inf]).expand(2, 3, 5)
    for fraction, expected in ((0.0, 1), (1.0, 3)):

        def draw_extreme(x, low, high, fraction=fraction):
            return x.fill_(low + fraction * (high - low))

        with mock.patch.object(torch.Tensor, "uniform_", draw_extreme):
            assert am.sample_nodes(logits).eq(expected).all()


@given(num_nodes=st.integers(1, 12), seed=st.integers(0, 1000), decoding=st.sampled_from(DECODINGS))
@settings(max_examples=20, deadline=None)
def test_tours_are_permutations_under_every_decoding(num_nodes, seed, decoding):
    points = draw(3, num_nodes, seed, torch.float64)
    tours = torch.cat(list(am.propose_tours(make_agent(seed=seed), decoding, points)), 1)
    num_tours = {"greedy": 1, "multistart": num_nodes, "multistart_x8": 8 * num_nodes}[decoding]
    assert tours.shape == (3, num_tours, num_nodes)
    assert torch.equal(tours.sort(-1).values, torch.arange(num_nodes).expand_as(tours))
    if decoding.startswith("multistart"):
        starts = tours[..., 0].view(3, -1, num_nodes)
        assert torch.equal(starts, torch.arange(num_nodes).expand_as(starts))


def test_greedy_takes_the_most_likely_node_at_each_step():
    agent, points = make_agent().eval(), draw(6, 8)
    with torch.no_grad():
        tours = next(am.propose_tours(agent, "greedy", points))[:, 0]
        h = reference_encode(agent, points)
        for t in range(8):
            visited = torch.zeros(6, 8, dtype=torch.bool).scatter(1, tours[:, :t], True)
            assert torch.equal(reference_step(agent, h, tours[:, :t], visited).argmax(-1), tours[:, t])


def test_symmetries_keep_lengths_and_are_eight():
    points, tours = draw(2, 7, dtype=torch.float64), draw_tours(2, 3, 7)
    images = am.apply_symmetries(points)
    for image in images:
        torch.testing.assert_close(tsp.tour_length(image, tours), tsp.tour_length(points, tours))
    scaled = am.scale_to_unit_square(images.flatten(0, 1))
    assert scaled.min() == 0 and scaled.max() == 1
    assert len({tuple(x.flatten().tolist()) for x in images[:, 0]}) == 8


def test_more_decoding_is_never_worse():
    agent, instances = make_agent(), tsp.make_test_instances("tsp20-uniform", 20)
    _, found = am.evaluate(agent, CPU, instances, DECODINGS)
    assert (found["multistart_x8"][1] <= found["multistart"][1] + 1e-12).all()
    assert (found["multistart_x8"][1] < found["multistart"][1] - 1e-9).any()


@given(scale=st.floats(1e-6, 1e6), x=st.floats(-1e4, 1e4), y=st.floats(-1e4, 1e4))
@settings(max_examples=30, deadline=None)
def test_units_and_position_of_the_points_do_not_matter(scale, x, y):
    points = draw(2, 9, dtype=torch.float64)
    moved = (points + torch.tensor([x, y])) * scale
    unit = am.scale_to_unit_square(moved)
    torch.testing.assert_close(unit, am.scale_to_unit_square(points), atol=1e-7, rtol=0)
    extent = points.amax(1) - points.amin(1)
    torch.testing.assert_close(
        unit.amax(1), extent / extent.amax(1, keepdim=True), atol=1e-7, rtol=0
    )  # aspect kept


def test_points_that_coincide_are_no_problem():
    points = torch.full((1, 5, 2), 3.0, dtype=torch.float64)
    assert torch.equal(am.scale_to_unit_square(points), torch.zeros_like(points))
    _, found = am.evaluate(make_agent(), CPU, [tsp.Instance("x", points[0].numpy())], DECODINGS)
    assert all(lengths[0] == 0 and sorted(tours[0]) == list(range(5)) for tours, lengths, _ in found.values())


# Losses


def test_pomo_advantages_sum_to_zero_and_the_start_is_exact():
    lengths = torch.rand(3, 6, dtype=torch.float64)
    log_likelihood = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    am.pomo_loss(lengths, log_likelihood, logits.log_softmax(-1)).backward()
    assert log_likelihood.grad.sum(1).abs().max() < 1e-15
    torch.testing.assert_close(log_likelihood.grad, (lengths - lengths.mean(1, keepdim=True)) / 18)
    p = logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, p * (lengths - (p * lengths).sum(1, keepdim=True)) / 3)


@pytest.mark.parametrize("shift", [-2.0, -0.165, -0.1, 0.0, 0.05])
def test_t_test_agrees_with_scipy(shift, size=10_000):
    from scipy.stats import ttest_rel

    rng = np.random.default_rng([size, int(100 * shift) % 7])
    a, b = rng.normal(size=size) + shift * 10 / math.sqrt(size), rng.normal(size=size)
    expected = ttest_rel(a, b, alternative="less").pvalue
    assert am.t_test(torch.from_numpy(a - b)) == pytest.approx(expected, abs=2e-5)


def test_t_test_of_equal_tours_is_not_significant():
    assert am.t_test(torch.zeros(10)) == 1.0


# Training


class Counter(TorchDispatchMode):
    """Counts dispatched operations: those that launch work, and views, which do not."""

    def __init__(self):
        super().__init__()
        self.names, self.views = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        if returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write:
            self.views += 1
        else:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("baseline", ["rollout", "pomo", "exponential"])
def test_a_training_step_is_few_operations_and_never_waits(baseline):
    """Sampled and greedy tours, loss, backward, clipping and Adam on TSP20 (rl4co 0.7: 2,869, and 2,298 views)."""
    counts = {}
    for optimizer in ("adam", "muon"):
        agent, args = am.AttentionModel(), am.Args(baseline=baseline, optimizer=optimizer)
        optimizers = am.make_optimizers(agent, args, torch.tensor(1e-4), torch.tensor(1e-4), False).values()
        loss_fn = am.partial(am.compute_loss, agent, am.score_tours, am.Baseline(agent))
        update = am.partial(am.update_weights, agent, optimizers, loss_fn, args, draw(4, 20))
        update()  # makes the state of the optimizers
        with Counter() as counter:
            update()
        counts[optimizer] = len(counter.names), counter.views
    print(baseline, counts)
    assert (
        counts["adam"][0] <= 1420
        and sum(counts["adam"]) <= 2900
        and counts["muon"][0] <= counts["adam"][0] + 700
    )
    waiting = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "unique", "equal")
    assert not [name for name in counter.names if name.split(".")[1] in waiting]


def test_scoring_in_one_pass_takes_fewer_operations_and_less_memory():
    """Against walking along the tours: a third of the operations, and half of the memory of the decoder."""
    agent, points, tours = make_agent(), draw(16, 20), draw_tours(16, 1, 20)

    def count(fn):
        saved = {}

        def keep(x):
            saved[x.untyped_storage().data_ptr()] = x  # holds it, so that no other takes its place
            return x

        with Counter() as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            fn()
        return len(counter.names), sum(x.untyped_storage().nbytes() for x in saved.values())

    operations, memory = count(lambda: am.score_tours(agent(points), tours))
    operations_by_steps, memory_by_steps = count(lambda: reference_log_likelihood(agent, points, tours, True))
    _, memory_of_nodes = count(lambda: agent(points))
    _, memory_of_encoder = count(lambda: reference_encode(agent, points))
    print(operations, operations_by_steps, memory - memory_of_nodes, memory_by_steps - memory_of_encoder)
    assert operations < operations_by_steps / 3
    assert (
        memory - memory_of_nodes < (memory_by_steps - memory_of_encoder) / 2
        and memory < 0.8 * memory_by_steps
    )


def short_run(tmp_path, *flags):
    am.main([*SHORT, "--run-dir", str(tmp_path), *map(str, flags)])
    path, result = read_result(tmp_path)
    return path, result, torch.load(path / "checkpoint.pt", weights_only=True)


def get_policy(checkpoint):
    """Weights of the policy that the rollout baseline has."""
    return {k[7:]: v for k, v in checkpoint["baseline"].items() if k.startswith("policy.")}


def test_the_baseline_is_replaced_when_the_policy_is_better(tmp_path):
    flags = (
        "--baseline rollout --env-id tsp6-uniform --num-epochs 4 --steps-per-epoch 15 --batch-size 16".split()
    )
    flags += ["--baseline-instances", "200", "--checkpoint-interval", "1"]
    path, _, checkpoint = short_run(tmp_path, *flags)
    updates = [value for _, value in read_scalars(path)["charts/baseline_updates"]]
    assert (
        1 <= updates[-1] <= 4 and updates == sorted(updates) and checkpoint["baseline_updates"] == updates[-1]
    )
    assert (
        any(v.ne(checkpoint["agent"][k]).any() for k, v in get_policy(checkpoint).items()) or updates[-1] == 4
    )


def test_rollout_baseline_is_the_greedy_tour_of_the_frozen_policy():
    agent, frozen, points = make_agent(), am.Baseline(make_agent(seed=1)), draw(5, 8)
    args = am.Args(baseline="rollout")
    frozen.running_mean.fill_(9.0)
    for is_warmup, expected in ((1.0, 9.0), (0.0, None)):
        mean_before = frozen.running_mean.clone()
        frozen.is_warmup.fill_(is_warmup)
        loss, length, baseline, _ = am.compute_loss(agent, am.score_tours, frozen, points, args)
        with torch.no_grad():
            greedy = am.construct_tours(points, frozen.policy(points))[1].mean().item()
        assert baseline.item() == pytest.approx(greedy if expected is None else expected, rel=1e-5)
        torch.testing.assert_close(frozen.running_mean, 0.8 * mean_before + 0.2 * length)
        assert loss.requires_grad and not any(p.requires_grad for p in frozen.parameters())


@pytest.mark.parametrize("baseline", ["rollout", "exponential"])
def test_single_tours_are_learned_with_the_choice_of_their_first_node(baseline):
    """All factors of eq. 1 count where the policy has chosen the first node, too."""
    agent, frozen, points, seen = make_agent(), am.Baseline(make_agent(seed=1)), draw(5, 8), []
    frozen.is_warmup.fill_(0.0)
    frozen.running_mean.fill_(3.0)

    def score(nodes, tours):
        seen.append(tours)
        return torch.full(tours.shape[:2], -2.0), -torch.arange(1.0, 1 + tours.shape[-1]).expand(
            len(tours), -1
        )

    loss, _, _, log_likelihood = am.compute_loss(agent, score, frozen, points, am.Args(baseline=baseline))
    first = seen[0][:, :, 0].float()
    assert len(first.unique()) > 1
    torch.testing.assert_close(log_likelihood, (-3.0 - first).mean())
    way = points.gather(1, seen[0][:, 0, :, None].expand(-1, -1, 2))
    lengths = (way - way.roll(1, 1)).norm(dim=-1).sum(1, keepdim=True)
    b = am.construct_tours(points, frozen.policy(points))[1].detach() if baseline == "rollout" else 3.0
    torch.testing.assert_close(loss, ((lengths - b) * (-3.0 - first)).mean())


def test_the_policy_is_taken_over_only_where_it_is_significantly_better():
    policy, better = make_agent(), make_agent(seed=1)
    baseline = am.Baseline(policy)
    baseline.hold(draw(4, 5))
    for p, is_taken in ((0.051, False), (0.049, True)):
        with mock.patch.object(am, "t_test", lambda differences, p=p: p):
            assert baseline.take_if_better(better) == is_taken
        expected = better if is_taken else policy
        assert all(torch.equal(x, baseline.policy.state_dict()[k]) for k, x in expected.state_dict().items())


@pytest.mark.parametrize(("baseline", "optimizer"), [("rollout", "muon"), ("exponential", "adam")])
def test_resume_is_exact_with_every_baseline_and_optimizer(tmp_path, baseline, optimizer):
    flags = f"--baseline {baseline} --optimizer {optimizer} --baseline-instances 50 --no-anneal-lr"
    flags += " --env-id tsp8-uniform"
    whole = short_run(tmp_path / "whole", *flags.split(), "--num-epochs", 4)[2]
    path, *_ = short_run(tmp_path / "half", *flags.split())
    am.main(["--resume", str(path / "checkpoint.pt"), "--num-epochs", "4"])
    resumed = torch.load(path / "checkpoint.pt", weights_only=True)
    for part in ("agent", "baseline"):
        assert all(torch.equal(v, resumed[part][k]) for k, v in whole[part].items())
    assert ("muon" in whole) == (optimizer == "muon")


def test_a_checkpoint_that_was_moved_alone_gets_a_best_policy(tmp_path):
    """Even where none after it is as good as the one that stayed behind."""
    path, _, checkpoint = short_run(tmp_path / "first", "--env-id", "tsp6-uniform")
    (tmp_path / "alone").mkdir()
    torch.save(checkpoint | {"best_length": 0.0}, tmp_path / "alone" / "checkpoint.pt")
    am.main(["--resume", str(tmp_path / "alone" / "checkpoint.pt"), "--num-epochs", "3"])
    best = torch.load(tmp_path / "alone" / "best.pt", weights_only=True)
    assert best["best_length"] > 0 and path.exists()


def test_a_finished_run_goes_on_with_another_baseline_or_other_instances(tmp_path):
    """The baseline begins with the policy as it is then, and a warm-up; other instances have a best of their own."""
    path, _, before = short_run(tmp_path, "--env-id", "tsp6-uniform", "--no-anneal-lr")
    checkpoint, warmups, policies = path / "checkpoint.pt", [], []
    compute_loss = am.compute_loss

    def spy(encode, score, baseline, points, args):
        warmups.append(baseline.is_warmup.item())
        policies.append({k: v.clone() for k, v in baseline.policy.state_dict().items()})
        return compute_loss(encode, score, baseline, points, args)

    with mock.patch.object(am, "compute_loss", spy), mock.patch.object(am, "t_test", lambda differences: 1.0):
        am.main(
            [
                "--resume",
                str(checkpoint),
                "--baseline",
                "rollout",
                "--num-epochs",
                "4",
                "--baseline-instances",
                "9",
            ]
        )
    assert warmups == [1.0] * 3 + [0.0] * 3
    assert all(torch.equal(v, policies[0][k]) for k, v in before["agent"].items())
    assert any(not torch.equal(v, policies[0][k]) for k, v in get_policy(before).items())
    after = torch.load(checkpoint, weights_only=True)
    assert after["baseline_start"] == 2 and 1 < after["baseline"]["running_mean"] < 5

    files = {file: file.read_bytes() for file in path.iterdir()}
    am.main(["--resume", str(checkpoint), *"--env-id tsp9-uniform --batch-size 2 --num-epochs 5".split()])
    (other,) = set(tmp_path.iterdir()) - {path}
    last = torch.load(other / "checkpoint.pt", weights_only=True)
    best = torch.load(other / "best.pt", weights_only=True)
    assert last["global_step"] == 4 * 12 + 6 and last["baseline_start"] == 4
    assert best["args"]["env_id"] == "tsp9-uniform" and best["best_length"] > after["best_length"]
    assert files == {file: file.read_bytes() for file in path.iterdir()}  # a folder of its own


def test_evaluation_needs_no_training_file(tmp_path, capsys):
    path = tmp_path / "train.txt"
    path.write_text(tsp.format_ml4co(tsp.make_test_instances("tsp20-uniform", 5)))
    run_path, *_ = short_run(
        tmp_path / "runs", "--train-path", path, "--baseline-instances", 7, "--baseline", "rollout"
    )
    path.unlink()
    am.main(["--evaluate", str(run_path / "checkpoint.pt"), "--seed", str(2**64), "--decoding", "greedy"])
    assert "eval/greedy_gap" in capsys.readouterr().out


def test_learning_rates_fall_along_half_a_cosine(tmp_path):
    for flag, factors in (
        ("--no-anneal-lr", [1, 1, 1, 1]),
        ("--anneal-lr", [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
    ):
        flags = (
            flag,
            "--num-epochs",
            4,
            "--steps-per-epoch",
            1,
            "--env-id",
            "tsp5-uniform",
            "--learning-rate",
            0.1,
        )
        path, _, checkpoint = short_run(tmp_path / flag, *flags)
        rates = [value for _, value in read_scalars(path)["charts/learning_rate"]]
        assert rates == pytest.approx([0.1 * factor for factor in factors])
        (group,) = checkpoint["muon"]["param_groups"]
        assert group["lr"].item() == pytest.approx(am.Args().muon_learning_rate * factors[-1])


def test_training_on_a_file(tmp_path, monkeypatch):
    instances = tsp.make_test_instances("tsp20-uniform", 5)
    path = tmp_path / "train.txt"
    path.write_text(tsp.format_ml4co(instances))
    seen, update_weights = [], am.update_weights

    def spy(agent, optimizers, loss_fn, args, points):
        seen.append(points.clone())
        return update_weights(agent, optimizers, loss_fn, args, points)

    monkeypatch.setattr(am, "update_weights", spy)
    short_run(tmp_path / "runs", "--train-path", path, "--baseline", "rollout", "--baseline-instances", 5)
    stored = torch.from_numpy(tsp.read_points(path, "tsp20-uniform")).float()
    rows = torch.cat(seen)[:, None].eq(stored[None]).all(-1).all(-1)  # [24, 5]
    assert rows.sum(1).eq(1).all() and rows[:5].sum(0).eq(1).all() and rows[:12].sum(0).min() >= 2


@pytest.mark.slow
def test_compiled_equals_eager(tmp_path):
    """By Adam: Muon's steps are as long for a small gradient as for a large one, and so make much of rounding."""
    weights = [
        short_run(tmp_path / flag, flag, "--env-id", "tsp8-uniform", "--optimizer", "adam")[2]["agent"]
        for flag in ("--compile", "--no-compile")
    ]
    for name, value in weights[0].items():
        if not name.endswith(
            "ff.2.bias"
        ):  # a norm follows: its gradient is rounding alone, of which Adam makes steps
            torch.testing.assert_close(value, weights[1][name], atol=2e-4, rtol=1e-3, msg=name)


# Muon


def test_muon_is_that_of_torch():
    """Some steps of matrices of every shape, with a rate that falls; to the rounding of bfloat16."""
    torch.manual_seed(0)
    shapes = (8, 8), (8, 8), (32, 8), (8, 32)
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    rate = torch.tensor(0.0)
    muon = am.Muon(ours, rate)
    reference = torch.optim.Muon(theirs, 0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for lr in (0.1, 0.05, 0.02):
        rate.fill_(lr)
        reference.param_groups[0]["lr"] = lr
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        muon.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=4e-3)
        assert (p - 1).abs().max() > 0.05


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_orthogonalized_matrices_have_singular_values_near_one(monkeypatch, has_bfloat16):
    monkeypatch.setattr(am, "CPU_HAS_BFLOAT16", has_bfloat16)
    for shape in ((3, 16, 16), (2, 32, 16), (2, 16, 32)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        y = am.orthogonalize(x)
        assert y.dtype == x.dtype and y.shape == x.shape
        u, _, vh = torch.linalg.svd(x, full_matrices=False)
        values = u.mT @ y @ vh.mT  # in the directions of x
        assert values.diagonal(dim1=1, dim2=2).min() > 0.3 and values.diagonal(dim1=1, dim2=2).max() < 1.3
        assert (values - values.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() < 0.05


def test_muon_has_the_matrices_and_adam_all_others():
    agent = am.AttentionModel()
    optimizers = am.make_optimizers(agent, am.Args(), torch.tensor(1.0), torch.tensor(1.0), False)
    names = {id(p): name for name, p in agent.named_parameters()}
    held = {kind: {names[id(p)] for p in x.param_groups[0]["params"]} for kind, x in optimizers.items()}
    assert held["optimizer"] | held["muon"] == set(names.values()) and not held["optimizer"] & held["muon"]
    assert len(held["muon"]) == 3 * 6 + 7 and {"embed.weight", "v_last", "v_first"} < held["optimizer"]
    adam = am.make_optimizers(agent, am.Args(optimizer="adam"), torch.tensor(1.0), torch.tensor(1.0), False)
    assert list(adam) == ["optimizer"] and len(adam["optimizer"].param_groups[0]["params"]) == len(names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("flags", ["--baseline pomo", "--baseline rollout --optimizer adam"])
def test_cuda_graphs_equal_eager(tmp_path, flags):
    flags = *flags.split(), "--baseline-instances", 100
    weights = [
        short_run(tmp_path / flag, flag, *flags)[2]["agent"] for flag in ("--cuda-graphs", "--no-cuda-graphs")
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(value.cpu(), weights[1][name].cpu(), rtol=1e-2, atol=1e-3, msg=name)


# Evaluation


def test_gaps_agree_with_lengths_in_float64(tmp_path, capsys):
    """On files by other programs: what --solve writes and --evaluate prints, recomputed with numpy."""
    path, *_ = short_run(tmp_path / "runs")
    data, berlin = (
        tsp.REFERENCE_FOLDER / "tsp20-gaussian.txt",
        ROOT / "tests" / "data" / "tsplib" / "berlin52.tsp",
    )
    capsys.readouterr()
    flags = ["--evaluate", str(path / "checkpoint.pt"), "--solve", str(tmp_path / "tours")]
    am.main([*flags, "--data", str(data), str(berlin), "--decoding", "greedy", "multistart"])
    printed = {k: float(v) for k, v in (line.split() for line in capsys.readouterr().out.splitlines())}
    assert {k.split("/")[-1].rsplit("_", 1)[0] for k in printed if "std" not in k} == {"greedy", "multistart"}
    assert {x.name for x in (tmp_path / "tours").iterdir()} == {"tsp20-gaussian.txt", "berlin52.tour"}
    ratios = []
    lines = data.read_text().splitlines()
    solved = (tmp_path / "tours" / "tsp20-gaussian.txt").read_text().splitlines()
    for line, ours in zip(lines, solved, strict=True):
        lengths = []
        for text in (ours, line):
            numbers, tour = text.split(" output ")
            points = np.array(numbers.split(), float).reshape(-1, 2)
            order = np.array(tour.split(), int) - 1
            assert order[0] == order[-1] and sorted(order[:-1]) == list(range(20))
            lengths.append(np.linalg.norm(np.diff(points[order], axis=0), axis=1).sum())
        assert ours.split(" output ")[0].split() == [
            repr(float(x)) for x in line.split(" output ")[0].split()
        ]
        ratios.append(100 * (lengths[0] / lengths[1] - 1))
    best = min(printed[f"eval/tsp20-gaussian/{decoding}_gap"] for decoding in ("greedy", "multistart"))
    assert -1e-9 <= np.mean(ratios) <= best + 1e-4  # four digits are printed
    instances = tsp.read_instances(data)
    found = am.evaluate(make_agent(), CPU, instances, ["greedy"])[1]["greedy"]
    for tour, length, instance in zip(*found[:2], instances, strict=True):
        stops = instance.points[[*tour, tour[0]]]
        assert np.linalg.norm(np.diff(stops, axis=0), axis=1).sum() == pytest.approx(length, rel=1e-12)
    (instance,) = tsp.read_instances(berlin)
    tour = torch.from_numpy(tsp_files.read_tsplib_tour(tmp_path / "tours" / "berlin52.tour", 52))
    length = tsp.tour_length(torch.from_numpy(instance.points)[None], tour[None], "EUC_2D").item()
    assert length == min(printed[f"eval/berlin52/{d}_length"] for d in ("greedy", "multistart"))
    gap = printed["eval/berlin52/greedy_length"] / 7542 - 1
    assert printed["eval/berlin52/greedy_gap"] == pytest.approx(100 * gap, abs=1e-3)


def test_tours_of_one_and_two_cities(tmp_path, capsys):
    path, *_ = short_run(tmp_path / "runs", "--env-id", "tsp5-uniform")
    (tmp_path / "few.txt").write_text("3 4\n0 0 3 4\n")
    flags = ["--evaluate", str(path / "best.pt"), "--data", str(tmp_path / "few.txt")]
    am.main([*flags, "--solve", str(tmp_path / "tours")])
    assert (tmp_path / "tours" / "few.txt").read_text().splitlines()[0] == "3.0 4.0 output 1 1"
    assert (tmp_path / "tours" / "few.txt").read_text().splitlines()[1].split(" output ")[1] in (
        "1 2 1",
        "2 1 2",
    )
    assert "eval/greedy_length 5.0000" in capsys.readouterr().out  # the mean of 0 and 10


def test_a_death_while_solving_leaves_nothing_that_a_retry_would_meet(tmp_path):
    """Before each file of the output and before the folder gets its name."""
    instances = [
        tsp.Instance("a", draw(1, 5)[0].double().numpy(), file="a", metric=m) for m in ("EUC_2D", "EUCLIDEAN")
    ]
    instances[1].file = "b"
    tours = [np.arange(5)] * 2
    for name in ("write_text", "rename"):
        with mock.patch.object(Path, name, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            tsp.write_tours(str(tmp_path / "tours"), instances, tours)
        assert not (tmp_path / "tours").exists()
        tsp.check_new_folder(str(tmp_path / "tours"))
    (tmp_path / "tours.tmp").mkdir()  # somebody's own
    tsp.write_tours(str(tmp_path / "tours") + "/", instances, tours)
    assert {x.name for x in tmp_path.iterdir()} == {"tours", "tours.tmp"}
    assert {x.name for x in (tmp_path / "tours").iterdir()} == {"a.tour", "b.txt"}


def test_a_thousand_nodes_take_two_gigabytes_however_many_instances():
    """In a process of its own whose memory is limited beyond what it has at the start."""
    agent, instances = make_agent(), [tsp.Instance("x", x) for x in draw(6, 1000).double().numpy()]
    if pid := os.fork():
        assert os.waitpid(pid, 0)[1] == 0
        return
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
        _, lengths, _ = am.evaluate(agent, CPU, instances, ["greedy"])[1]["greedy"]
        os._exit(0 if (lengths > 1).all() else 1)
    finally:
        os._exit(1)


@pytest.mark.parametrize(
    ("name", "num_instances", "gaps"),
    [("tsp20", 25, (1.5, 0.3, 0.08)), ("tsp50", 25, (3.5, 1.4, 0.6)), ("tsp100", 5, (9.0, 4.5, 3.0))],
)
def test_the_networks_that_come_with_the_repository(capsys, name, num_instances, gaps):
    """Gaps on the stored instances: greedy, multi-start, and multi-start of the symmetric images."""
    path = ROOT / "benchmark" / "checkpoints" / f"{name}.pt"
    am.main(["--evaluate", str(path), "--eval-episodes", str(num_instances)])
    printed = {k: float(v) for k, v in (line.split() for line in capsys.readouterr().out.splitlines())}
    found = [printed[f"eval/{decoding}_gap"] for decoding in ("greedy", "multistart", "multistart_x8")]
    assert all(-1e-6 <= gap < limit for gap, limit in zip(found, gaps, strict=True)), found
    with pytest.raises(SystemExit):
        am.main(["--resume", str(path)])
    assert "no optimizer state" in capsys.readouterr().err


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capsys):
    path, *_ = short_run(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.txt").write_text("0 0 1 0 1 1\n")
    (tmp_path / "bad.txt").write_text("0 0 1 0 1 1 output 1 2 2 1\n")
    capsys.readouterr()
    checkpoint = f"--evaluate {path / 'checkpoint.pt'}"
    for flags, message in (
        ("--env-id tsp20", "--env-id tsp20"),
        ("--data missing.txt", "missing.txt: No such file"),
        ("--data good.txt bad.txt", "bad.txt:1: the tour"),
        ("--train-path bad.txt", "bad.txt:1: the tour"),
        ("--train-path good.txt", "good.txt:1 has 3 nodes, tsp20-uniform has 20"),
        ("--batch-size 0", "--batch-size"),
        ("--muon-learning-rate -1", "--muon-learning-rate"),
        ("--decoding", "--decoding"),
        ("--solve new.txt", "--solve needs"),
        (f"{checkpoint} --solve new.txt", "--solve needs"),
        (f"{checkpoint} --data good.txt --solve good.txt", "good.txt: File exists"),
        (f"{checkpoint} --data good.txt --solve no/new.txt", "no/new.txt: No such file or directory"),
        (f"{checkpoint} --data good.txt --solve {'x' * 300}", "File name too long"),
        ("--data good.txt ./good.txt", "two of the files have the same name"),
        (f"--exp-name {'x' * 300}", "File name too long"),
        (f"{checkpoint} --num-layers 2", "--num-layers: "),
        (f"--resume {path / 'checkpoint.pt'} --seed 5", "--seed: "),
        (f"--resume {path / 'checkpoint.pt'} --optimizer adam", "--optimizer: "),
        (f"--resume {path / 'checkpoint.pt'} --eval-episodes 5", "--eval-episodes: "),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as error:
            am.main(flags.split())
        lines = capsys.readouterr().err.strip().splitlines()
        assert error.value.code == 2 and len(lines) == 1 and message in lines[0], (flags, lines)
        assert sorted(tmp_path.rglob("*")) == before


# Learning


@pytest.mark.parametrize(
    ("num_nodes", "seed", "num_epochs", "batch_size"),
    [(7, 1, 2, 16), *(pytest.param(8, i, 3, 32, marks=pytest.mark.slow) for i in (2, 3))],
)
def test_short_training_comes_close_to_the_optimum(tmp_path, num_nodes, seed, num_epochs, batch_size):
    """Under 1 % above exact dynamic programming by multi-start, after seconds."""
    flags = f"--env-id tsp{num_nodes}-uniform --seed {seed} --steps-per-epoch 60"
    flags += f" --num-epochs {num_epochs} --batch-size {batch_size}"
    path, *_ = short_run(tmp_path, *flags.split())
    instances = tsp.make_test_instances(f"tsp{num_nodes}-uniform", 60)
    agent = am.AttentionModel()
    agent.load_state_dict(torch.load(path / "checkpoint.pt", weights_only=True)["agent"])
    _, found = am.evaluate(agent, CPU, instances, DECODINGS)
    optimum = np.array([solve_exactly(i.points) for i in instances])
    gaps = {decoding: 100 * (lengths / optimum - 1).mean() for decoding, (_, lengths, _) in found.items()}
    print(gaps)
    assert gaps["greedy"] < 5.0 and gaps["multistart"] < 1.0 and -1e-9 < gaps["multistart_x8"] < 0.3


@pytest.mark.slow
@pytest.mark.release
def test_default_run(run_script, tmp_path):
    """The gaps that docs/reinforce_tsp_attention.md promises, on instances that come with optimal tours."""
    run = run_script("reinforce_tsp_attention", "--seed", 1, "--run-dir", tmp_path, timeout=2400)
    assert run.returncode == 0, run.stderr
    metrics = read_result(tmp_path)[1]["metrics"]
    assert metrics["eval/greedy_gap"] < 1.8 and metrics["eval/multistart_gap"] < 0.45
    assert metrics["eval/multistart_x8_gap"] < 0.1
