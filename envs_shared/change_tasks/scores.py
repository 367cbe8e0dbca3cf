"""Scores of change maps by pixel, thresholds, rules that say where to look, and pictures of what was looked at."""

import math

import torch
from torch.nn import functional as F

SCORES = ("precision", "recall", "f1", "iou", "oa", "kappa")
METHODS = ("ppo", "coarse", "everywhere", "threshold")  # of the table at the end of a run
NUM_BINS = 1000  # of the probability of change, to choose thresholds by
IGNORE = 255  # class of pixels that do not count


# ---- Scores of maps ----


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
        (a / b).item() if b > 0 else 0.0
        for a, b in (*ratios, (agreement, 1.0), (agreement - chance, 1 - chance))
    ]
    return dict(zip(SCORES, values, strict=True))


def join_cells(x: torch.Tensor, height: int, patch_size: int, cell_size: int) -> torch.Tensor:
    """Channels [B, C, H / c, W / c] of cells [B, N, G, C], patch by patch and in each row by row."""
    side = patch_size // cell_size
    patches = x.unflatten(1, (height // patch_size, -1)).unflatten(
        3, (side, side)
    )  # [B, H / P, W / P, side, side, C]
    return patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def to_pixels(logits: torch.Tensor, args) -> torch.Tensor:
    """Probabilities of pixels [M, C, S, S] of logits of cells [M, N, G, C], linearly interpolated."""
    cells = join_cells(logits.softmax(-1), args.image_size, args.patch_size, args.cell_size)
    return F.interpolate(cells, scale_factor=float(args.cell_size), mode="bilinear", align_corners=False)


def choose_threshold(logits: torch.Tensor, pixels: torch.Tensor, args) -> float:
    """The threshold with the largest F1 of change, shrunk towards 0.5 where few pairs have a change.

    Of logits [M, N, G, C] and classes [M, S, S]. n pairs with a change weigh as much as n / 10 pairs with 0.5, so that
    a handful of pairs cannot move it far.
    """
    changed = torch.zeros(NUM_BINS, dtype=torch.int64)
    counted = torch.zeros(NUM_BINS, dtype=torch.int64)
    num_pairs = 0
    for z, classes in zip(logits.split(64), pixels.split(64), strict=True):
        probability = 1 - to_pixels(z, args)[:, 0]  # [m, S, S]
        bins = (probability * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        is_changed = (classes > 0) & (classes != IGNORE)
        changed += bins[is_changed].bincount(minlength=NUM_BINS)
        counted += bins[classes != IGNORE].bincount(minlength=NUM_BINS)
        num_pairs += int(is_changed.flatten(1).any(1).sum())
    if num_pairs == 0:
        return 0.5
    tp, said = (
        x.flip(0).cumsum(0).flip(0).double() for x in (changed, counted)
    )  # of all above a bin's lower edge
    best = (2 * tp / (said + changed.sum())).argmax().item() / NUM_BINS
    return 0.5 + (best - 0.5) * num_pairs / (num_pairs + 10)


def score_maps(logits: torch.Tensor, pixels: torch.Tensor, threshold: float, args) -> dict[str, float]:
    """SCORES by pixel of logits [M, N, G, C] against classes [M, S, S]; changed is what is above `threshold`."""
    num_classes = logits.shape[-1]
    total = torch.zeros(num_classes, num_classes, dtype=torch.float64)
    for z, classes in zip(logits.split(64), pixels.split(64), strict=True):
        probabilities = to_pixels(z, args)
        is_changed = 1 - probabilities[:, 0] > threshold
        predicted = torch.where(is_changed, probabilities[:, 1:].argmax(1) + 1, 0)
        total += count_confusions(torch.where(classes == IGNORE, -1, classes.long()), predicted, num_classes)
    return score_confusions(total)


# ---- Rules that say where to look, to compare a policy with ----


def change_score(logits: torch.Tensor) -> torch.Tensor:
    """How much of each query is likely to have changed, [B, N] of logits [B, N, G, C]."""
    return (1 - logits.softmax(-1)[..., 0]).mean(-1)


def count_sights(args) -> int:
    """How many looks of a query show something new: the pair at once, or date by date."""
    return 1 if args.look_at == "pair" else 2


def make_rule(method: str, level: float = 0.0, num_looks: int = 1):
    """Who looks, [B, N], as a function of queries [B, N, D], logits [B, N, G, C] and the step, by a rule and its level.

    coarse: nobody; everywhere: everybody; random: each with the chance `level`; threshold: where a larger share than
    `level` is likely to have changed. Who looks does so `num_looks` times, as often as that shows something new.
    """

    def rule(query: torch.Tensor, logits: torch.Tensor, step: int) -> torch.Tensor:
        chosen = torch.full_like(query[..., 0], step < num_looks and method != "coarse", dtype=torch.bool)
        if method == "random" and step == 0:
            chosen = torch.rand_like(query[..., 0]) < level
        if method == "threshold" and step == 0:
            chosen = change_score(logits) > level
        return chosen

    return rule


# ---- Evaluation ----


def validate(classify, args, val, rule=None) -> dict[str, float]:
    """F1 on val, its threshold, looks, and the score that policies are chosen by: F1 less what the looks cost.

    `classify(images, rule)` gives logits [M, N, G, C], looks [M, N] and milliseconds a pair. F1 gains by a prediction
    more in proportion to its worth, so that a look in every query costs cost / (2 share of change) of it.
    """
    logits, looks, _ = classify(val.images, rule)
    threshold = choose_threshold(logits, val.pixels, args)
    f1 = score_maps(logits, val.pixels, threshold, args)["f1"]
    is_counted = val.pixels != IGNORE
    share = ((val.pixels > 0) & is_counted).sum().item() / max(is_counted.sum().item(), 1)
    num_looks = looks.float().mean().item()
    score = f1 - args.cost * num_looks / (2 * max(share, 1e-3))
    return {"f1": f1, "looks": num_looks, "score": score, "threshold": threshold}


def evaluate(classify, args, val, test) -> tuple[dict[str, float], dict[str, tuple]]:
    """Scores of METHODS on test, with thresholds of val; and logits and looks by method. `classify` as in `validate`.

    The level of the threshold rule is that at which it looks as often as the policy does on val.
    """
    metrics = {}
    found = {}
    level = 0.0
    num_looks = count_sights(args)
    for method in METHODS:
        rule = None if method == "ppo" else make_rule(method, level, num_looks)
        validated = validate(classify, args, val, rule)
        logits, looks, ms = classify(test.images, rule)
        scores = score_maps(logits, test.pixels, validated["threshold"], args)
        scores |= {"looks": looks.float().mean().item(), "ms": ms, "threshold": validated["threshold"]}
        metrics |= {f"eval/{method}_{name}": value for name, value in scores.items()}
        found[method] = (logits, looks)
        if method == "ppo":
            coarse_logits, _, _ = classify(val.images, make_rule("coarse"))
            share = min(validated["looks"] / num_looks, 1.0)
            level = change_score(coarse_logits).quantile(1 - share).item()
    return metrics, found


# ---- Table and pictures ----


def format_table(metrics: dict[str, float]) -> str:
    """The scores eval/{method}_{score} as lines of columns."""
    columns = [*SCORES, "looks", "ms"]
    lines = [" ".join([f"{'':10}", *(f"{name:>9}" for name in columns)])]
    for method in METHODS:
        values = (metrics[f"eval/{method}_{name}"] for name in columns)
        lines.append(" ".join([f"{method:10}", *(f"{value:9.3f}" for value in values)]))
    return "\n".join(lines)


def draw_pairs(pairs, coarse: torch.Tensor, final: torch.Tensor, looks: torch.Tensor, args, number: int = 6):
    """The first pairs that change: label, maps of logits [M, N, G, C] and looks [M, N]; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    has_change = ((pairs.pixels > 0) & (pairs.pixels != IGNORE)).flatten(1).any(1)
    chosen = has_change.nonzero().flatten()[:number].tolist() or [0]
    margin = args.cell_size
    titles = "before", "after", "label", "coarse", "final", "looks"
    figure = Figure(figsize=(2 * len(titles), 2 * len(chosen)), layout="constrained")
    for i, row in zip(chosen, figure.subplots(len(chosen), len(titles), squeeze=False), strict=True):
        inner = pairs.images[i, margin:-margin, margin:-margin].numpy()
        row[0].imshow(inner[..., :3])
        row[1].imshow(inner[..., 3:])
        change = [1 - to_pixels(x[i : i + 1], args)[0, 0] for x in (coarse, final)]
        label = (pairs.pixels[i] > 0) & (pairs.pixels[i] != IGNORE)
        grid = looks[i].view(math.isqrt(len(looks[i])), -1)
        tops = (1, 1, 1, max(int(looks.max()), 1))
        for axes, picture, top in zip(row[2:], (label, *change, grid), tops, strict=True):
            axes.imshow(picture.numpy(), vmin=0, vmax=top, cmap="magma")
        for axes, title in zip(row, titles, strict=True):
            axes.set(xticks=[], yticks=[], title=title if i == chosen[0] else "")
    return figure
