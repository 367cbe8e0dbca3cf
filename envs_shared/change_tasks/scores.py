"""Scores of change maps by patch and by pixel, their table, and pictures of what was looked at."""

import math
from functools import partial

import torch
from torch.nn import functional as F
from tqdm import tqdm

SCORES = ("precision", "recall", "f1", "iou", "oa", "kappa")


def count_confusions(labels: torch.Tensor, predicted: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Confusion matrix [C, C], true class by predicted class, of tensors of one shape; negative labels do not count."""
    is_counted = labels >= 0
    pairs = labels[is_counted].long() * num_classes + predicted[is_counted].long()
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes).double()


def score_confusions(confusions: torch.Tensor) -> dict[str, float]:
    """The SCORES of a confusion matrix [C, C]; precision to IoU are those of change, all classes but 0 together.

    0 where a score is undefined. kappa: Cohen 1960, "A Coefficient of Agreement for Nominal Scales".
    """
    total, tp = confusions.sum(), confusions[1:, 1:].sum()
    said, true = confusions[:, 1:].sum(), confusions[1:].sum()
    agreement, chance = confusions.trace() / total, (confusions.sum(0) @ confusions.sum(1)) / total**2
    ratios = (tp, said), (tp, true), (2 * tp, said + true), (tp, said + true - tp)
    values = [
        (a / b).item() if b > 0 else 0.0 for a, b in (*ratios, (agreement, 1.0), (agreement - chance, 1 - chance))
    ]
    return dict(zip(SCORES, values, strict=True))


def choose_threshold(probability: torch.Tensor, labels: torch.Tensor) -> float:
    """The threshold with the largest F1 of change; probabilities and labels of one shape, negative labels left out."""
    is_counted = labels >= 0
    p, order = probability[is_counted].double().sort(descending=True)
    is_changed = (labels[is_counted] > 0)[order].double()
    if not is_changed.any():
        return 0.5
    f1 = 2 * is_changed.cumsum(0) / (torch.arange(1, len(p) + 1, dtype=p.dtype) + is_changed.sum())
    can_cut = torch.cat((p[:-1] > p[1:], torch.tensor([True])))  # between two that differ
    best = int(torch.where(can_cut, f1, -1.0).argmax())
    return ((p[best] + (p[best + 1] if best + 1 < len(p) else -1.0)) / 2).item()


def decide_classes(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """Classes [...] of logits [..., C]: changed where the probability of that is above `threshold`."""
    is_changed = 1.0 - logits.softmax(-1)[..., 0] > threshold
    return torch.where(is_changed, logits[..., 1:].argmax(-1) + 1, 0)


def upsample_logits(logits: torch.Tensor, size: int) -> torch.Tensor:
    """Logits of patches [M, N, C] as logits of pixels [M, size, size, C], linearly interpolated."""
    side = math.isqrt(logits.shape[1])
    grid = logits.transpose(1, 2).unflatten(2, (side, side))
    return F.interpolate(grid, (size, size), mode="bilinear", align_corners=False).permute(0, 2, 3, 1)


def format_table(metrics: dict[str, float]) -> str:
    """The scores eval/{method}_{score} as lines of columns."""
    columns = [*SCORES, "looks", "settled_acc", "pixel_f1", "pixel_iou", "ms"]
    lines = [" ".join([f"{'':13}", *(f"{name.removesuffix('_acc'):>9}" for name in columns)])]
    for method in METHODS:
        values = (metrics[f"eval/{method}_{name}"] for name in columns)
        lines.append(" ".join([f"{method:13}", *(f"{value:9.3f}" for value in values)]))
    return "\n".join(lines)


def summarize(metrics: dict[str, float]) -> str:
    """The policy's F1 and looks, beside the F1 of looking everywhere and nowhere."""
    values = (metrics[f"eval/{name}"] for name in ("ppo_f1", "ppo_looks", "everywhere_f1", "coarse_f1"))
    return "F1 {:.3f} at {:.2f} looks a query, everywhere {:.3f}, nowhere {:.3f}".format(*values)


def draw_pairs(pairs, coarse: torch.Tensor, final: torch.Tensor, looks: torch.Tensor, number: int = 6):
    """The first pairs that change, with label, maps of logits [M, N, C] and looks [M, N]; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    chosen = ((pairs.labels > 0).sum(1) > 0).nonzero().flatten()[:number].tolist() or [0]
    size, side = pairs.pixels.shape[-1], math.isqrt(pairs.labels.shape[1])
    margin = (pairs.images.shape[-1] - size) // 2
    titles = "before", "after", "label", "coarse", "final", "looks"
    figure = Figure(figsize=(2 * len(titles), 2 * len(chosen)), layout="constrained")
    for i, row in zip(chosen, figure.subplots(len(chosen), len(titles), squeeze=False), strict=True):
        inner = pairs.images[i, :, margin : margin + size, margin : margin + size]
        for axes, picture in zip(row, inner.view(2, 3, size, size).permute(0, 2, 3, 1), strict=False):
            axes.imshow(picture.numpy())
        change = (1 - x[i].softmax(-1)[:, 0] for x in (coarse, final))
        maps = (pairs.pixels[i] > 0) & (pairs.pixels[i] < 255), *(x.view(side, side) for x in (*change, looks[i]))
        for axes, picture, top in zip(row[2:], maps, (1, 1, 1, max(int(looks.max()), 1)), strict=True):
            axes.imshow(picture.numpy(), vmin=0, vmax=top, cmap="magma")
        for axes, title in zip(row, titles, strict=True):
            axes.set(xticks=[], yticks=[], title=title if i == chosen[0] else "")
    return figure


# ---- Rules that stop by the probability of change, to compare a policy with ----

METHODS = ("ppo", "coarse", "everywhere", "cross_entropy", "random", "confidence", "band", "threshold")


def make_rule(method: str, level: float, centre: float):
    """Who stops, as a function of change probabilities [B, N] and the step, by a rule and its level in [0, 1].

    coarse: all; everywhere, cross_entropy: none; random: with this chance; confidence: once a class is surer than this;
    band: but for one look within `level` of `centre`; threshold: but for one look at what is likelier changed.
    """
    return {
        "coarse": lambda p, step: torch.ones_like(p, dtype=torch.bool),
        "random": lambda p, step: torch.rand_like(p) < level,
        "confidence": lambda p, step: torch.maximum(p, 1 - p) >= level,
        "band": lambda p, step: ((p - centre).abs() >= level) | (step > 0),
        "threshold": lambda p, step: (p <= level) | (step > 0),
    }.get(method, lambda p, step: torch.zeros_like(p, dtype=torch.bool))


def find_level(method: str, count, num_looks: float, tolerance: float = 0.002, num_halvings: int = 24) -> float:
    """The level at which `count(level)` is `num_looks` within `tolerance`, by bisection."""
    low, high, grows = 0.0, 1.0, method in ("confidence", "band")
    for _ in range(num_halvings):
        level = (low + high) / 2
        excess = count(level) - num_looks
        if abs(excess) <= tolerance:
            return level
        low, high = (low, level) if (excess > 0) == grows else (level, high)
    return (low + high) / 2


def score_maps(pairs, logits: torch.Tensor, looks: torch.Tensor, threshold: float) -> dict[str, float]:
    """SCORES by patch, pixel_f1 and pixel_iou, looks per query and settled_acc of logits [M, N, C], looks [M, N].

    settled_acc is the share of right patches among those never looked at, 0 where there are none.
    """
    num_classes = logits.shape[-1]
    classes = decide_classes(logits, threshold)
    scores = score_confusions(count_confusions(pairs.labels, classes, num_classes))
    total = torch.zeros(num_classes, num_classes, dtype=torch.float64)
    for part, pixels in zip(logits.split(64), pairs.pixels.split(64), strict=True):
        truth = torch.where(pixels == 255, -1, pixels.long())
        total += count_confusions(
            truth, decide_classes(upsample_logits(part, pixels.shape[-1]), threshold), num_classes
        )
    pixel_scores = score_confusions(total)
    settled = (looks == 0) & (pairs.labels >= 0)
    scores["settled_acc"] = (classes == pairs.labels)[settled].float().mean().nan_to_num().item()
    return scores | {
        "pixel_f1": pixel_scores["f1"],
        "pixel_iou": pixel_scores["iou"],
        "looks": looks.float().mean().item(),
    }


def compare_methods(classify, classify_control, val, test) -> tuple[dict[str, float], dict[str, tuple]]:
    """Scores of all METHODS on `test`, with thresholds and levels tuned on `val`; logits and looks by method.

    `classify(images, rule)` and `classify_control` give logits [M, N, C], looks [M, N] and milliseconds a pair. coarse
    and everywhere are of the network of the policy; the other rules of the one trained by cross entropy alone, those
    with a level at as many looks as the policy takes.
    """
    metrics, found, num_looks, centre = {}, {}, 0.0, 0.5
    for method in tqdm(METHODS, unit="method", leave=False, delay=2.0):
        judge, rule = classify if method in METHODS[:3] else classify_control, None
        if method != "ppo":
            make, level = partial(make_rule, method, centre=centre), 0.5
            if method in METHODS[4:]:
                level = find_level(method, partial(count_looks, judge, val.images, make), num_looks)
                metrics[f"eval/{method}_level"] = level
            rule = make(level)
        logits, looks, _ = judge(val.images, rule)
        threshold = choose_threshold(1.0 - logits.softmax(-1)[..., 0], val.labels)
        num_looks = looks.float().mean().item() if method == "ppo" else num_looks
        centre = threshold if method == "cross_entropy" else centre
        logits, looks, ms = judge(test.images, rule)
        scores = score_maps(test, logits, looks, threshold) | {"ms": ms, "threshold": threshold}
        metrics |= {f"eval/{method}_{name}": value for name, value in scores.items()}
        found[method] = logits, looks
    return metrics, found


def count_looks(judge, images: torch.Tensor, make, level: float) -> float:
    """Looks per query on `images` by the rule `make(level)`."""
    return judge(images, make(level))[1].float().mean().item()
