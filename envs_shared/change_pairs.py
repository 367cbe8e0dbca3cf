"""Pairs of pictures for change detection: the task haze, batches of pairs, and scores of maps.

Pairs are uint8 [M, J C + 1, H, W]: C bands of each of J dates, then the label of each pixel. The label is 0
for unchanged, 1 for changed, and 255 where it does not count. There are two dates, except in haze-3 and
haze-4. change_folders.py reads pairs from files.
"""

import sys

import numpy as np
import torch
from torch.nn import functional as F

ENV_IDS = {"haze": 2, "haze-3": 3, "haze-4": 4}  # number of dates J of each form of the task haze
SPLITS = ("train", "val", "test")
NUM_BANDS = 3  # C: bands of a picture, bytes that `split_labels` scales to -2 to 2
UNCOUNTED = 255  # label of pixels that do not count
MAX_PIXELS = 2**17  # pixels of pairs that are evaluated at once, unless one pair has more
PATCH = 8  # side of a roof in pixels, whatever --patch-size is
COLOURS = np.array(
    [[90, 100, 60], [70, 40, 40], [230, 150, 130]], np.float32
)  # ground; roof, dark and bright


# ---- Sets of pairs ----


def count_dates(args):
    """Return the number of dates J: 2 for pictures from files, whatever --env-id is."""
    if args.data_dir or args.predict:
        return 2
    return ENV_IDS.get(args.env_id, 2)


def draw_haze(num_pairs, size, num_dates, *seed):
    """Draw pairs uint8 [M, J C + 1, S, S]; return also where roofs [M, h, w] and haze [J - 1, M, h, w] are.

    Four patches in ten are roofs, whose stripes run along or across. A roof's stripes at the first and the
    last date are the same, except on the quarter of the roofs that has changed. Haze hides the stripes of a
    roof at each date but the last, with a probability that leaves half of the roofs without haze, changed or
    not. With more than two dates, haze after the first date hides the last date too. So earlier dates alone
    say nothing about a change, but they say whether the next date is worth a look. The mean colour of a roof
    is always the same, and squares of 4 x 4 pixels hide its stripes; a smaller --coarse-size shows them.
    """
    rng = np.random.default_rng(seed)
    num_patches = -(-size // PATCH)
    shape = num_pairs, num_patches, num_patches  # [M, h, w]
    is_roof = rng.random(shape) < 0.4
    is_changed = is_roof & (rng.random(shape) < 0.25)
    is_hazy = is_roof & (rng.random((num_dates - 1, *shape)) < 1 - 0.5 ** (1 / (num_dates - 1)))
    is_along = rng.random((num_dates, *shape)) < 0.5
    is_along[-1] = is_along[0] ^ is_changed

    def enlarge(x):
        return x.repeat(PATCH, -1).repeat(PATCH, -2)[..., :size, :size]

    bars = (np.arange(size) // 2 % 2).astype(np.float32)
    light = np.where(enlarge(is_along), bars, bars[:, None])  # [J, M, S, S]
    light[:-1][enlarge(is_hazy)] = 0.5
    light[-1][enlarge(is_hazy[1:].any(0))] = 0.5
    ground, dark, bright = COLOURS[..., None, None]
    roofs = dark + (bright - dark) * light[:, :, None]  # [J, M, 3, S, S]
    images = np.where(enlarge(is_roof)[:, None], roofs, ground)
    images += rng.integers(-12, 13, images.shape, np.int8)  # noise
    images = images.swapaxes(0, 1).reshape(num_pairs, -1, size, size)
    return np.concatenate((images, enlarge(is_changed)[:, None]), 1).astype(np.uint8), is_roof, is_hazy


def draw_splits(args, splits=SPLITS):
    """Draw the pairs of each split; raises ValueError if there is no such task."""
    if args.env_id not in ENV_IDS:
        raise ValueError(f"--env-id {args.env_id}: must be one of {', '.join(ENV_IDS)}")
    if NUM_BANDS != 3:
        raise ValueError(f"--env-id {args.env_id}: has 3 bands, and NUM_BANDS is {NUM_BANDS}")
    num_pairs = dict.fromkeys(SPLITS, args.eval_episodes or 500) | {"train": args.num_train_pairs}
    pairs = {}
    for split in splits:
        seed = args.seed, SPLITS.index(split)
        pairs[split], *_ = draw_haze(num_pairs[split], args.image_size, ENV_IDS[args.env_id], *seed)
    return pairs


def unify_labels(labels, ignore_index):
    """Map labels {file: uint8 [H, W]} to 0, 1 and, where pixels do not count, 255.

    All files must have either 0 and 1 or 0 and 255, besides `ignore_index` where pixels do not count; raises
    ValueError if not. If no pixel is changed, a line says so.
    """
    examples = {value: path for path, label in labels.items() for value in np.unique(label).tolist()}
    examples = {value: path for value, path in examples.items() if value not in (0, ignore_index)}
    if len(examples) > 1 or not examples.keys() <= {1, 255}:
        found = ", ".join(f"{value} in {path}" for value, path in sorted(examples.items())[:3])
        raise ValueError(
            f"labels have {found}; needed are 0 and 1 in all files, or 0 and 255 in all, "
            "and --ignore-index for a value that does not count"
        )
    if labels and not examples:
        print(f"no pixel of the labels is changed (--ignore-index is {ignore_index})", file=sys.stderr)
    return {path: np.uint8(np.where(x == ignore_index, UNCOUNTED, x > 0)) for path, x in labels.items()}


def stack_pairs(pairs, multiple, least):
    """Pad pairs [2 C + 1, H, W] to one size: sides are multiples of `multiple` and at least `least`.

    Pictures are mirrored beyond their borders, and pixels there do not count. Patches of this margin are
    patches like all others: the policy is not told which they are, and a look at one costs as much and earns
    nothing.
    """
    sides = [max(least, *(pair.shape[axis] for pair in pairs)) for axis in (1, 2)]
    stacked = []
    for pair in pairs:
        widths = [(0, side + -side % multiple - n) for side, n in zip(sides, pair.shape[1:], strict=True)]
        images = np.pad(pair[:-1], ((0, 0), *widths), mode="symmetric")
        label = np.pad(pair[-1:], ((0, 0), *widths), constant_values=UNCOUNTED)
        stacked.append(np.concatenate((images, label)))
    return np.stack(stacked)


def compute_share(pairs):
    """Compute the share of changed pixels among those that count."""
    labels = pairs[:, -1]
    return (labels == 1).sum() / (labels != UNCOUNTED).sum()


def describe(train_pairs, val, all_val, test, share):
    """Describe the pairs of a run in a few words; `share` is that of changed pixels in the train pairs."""
    num_val = f"{len(val)}"
    if len(val) < len(all_val):
        num_val += f" of {len(all_val)} (--eval-episodes)"
    text = f"{len(train_pairs)} train, {num_val} val and {len(test)} test pairs, "
    text += f"{share:.2%} of the train pixels changed"
    if len(val) and not (val[:, -1] == 1).any():
        text += ", no val pixel, so the threshold stays 0.5"
    return text


# ---- Batches ----


def draw_batch(pairs, num_pairs, args):
    """Draw random crops of random pairs, each turned by 0 to 3 right angles, and split them."""
    size = args.image_size
    height, width = pairs.shape[2:]
    ranges = (len(pairs), height - size + 1, width - size + 1, 4)
    places = torch.stack([torch.randint(n, (num_pairs,)) for n in ranges], 1)
    crops = []
    for i, y, x, turns in places.tolist():
        crop = pairs[i, :, y : y + size, x : x + size]
        # Pictures and label move together: add mirroring here
        crops.append(crop.rot90(turns, (1, 2)))
    images, labels = split_labels(torch.stack(crops), args)
    # From here on, pictures have lost their label: add changes of brightness, colour or noise here, such as
    # images[:, :NUM_BANDS] *= gain for the first date
    return images, labels


def split_labels(pairs, args):
    """Split pairs [B, J C + 1, S, S] into pictures of values from -2 to 2 and labels [B, G, h, w] of cells.

    A cell is changed if at least half of its pixels that count are changed; its label is 255 if none counts.
    """
    pixels = pairs[:, -1:]
    changed = F.avg_pool2d((pixels == 1).float(), args.cell_size)  # shares of a cell's pixels
    counted = F.avg_pool2d((pixels != UNCOUNTED).float(), args.cell_size)
    labels = torch.where(counted > 0, (2 * changed >= counted).float(), UNCOUNTED)  # [B, 1, S / c, S / c]
    labels = F.pixel_unshuffle(labels, args.patch_size // args.cell_size)
    return pairs[:, :-1].float() / 64 - 2, labels


def split_parts(pairs, args):
    """Split pairs into parts of at most MAX_PIXELS, or of one pair, to save memory; split the labels off."""
    for part in pairs.split(max(1, MAX_PIXELS // pairs[0, 0].numel())):
        yield split_labels(part, args)


def show_dates(step_indices, args):
    """Return the dates [B, 1, 1, J] that a look at steps [B] shows: all at the last step, fewer before it.

    It shows at least the first date. For T = 3 steps:
                        step 0   step 1   step 2
        2 dates         1        1        1 2
        3 dates         1        1 2      1 2 3
        4 dates         1 2      1 2 3    1 2 3 4
    """
    num_dates = count_dates(args)
    last_date = (step_indices + num_dates - args.num_steps).clamp(min=0)  # [B]
    return torch.arange(num_dates, device=step_indices.device) <= last_date.view(-1, 1, 1, 1)


def cut_windows(images, args):
    """Cut pictures [B, J C, S, S] into windows [B, h, w, J C, s, s]: a patch with a border of one cell."""
    border = args.cell_size
    size = args.patch_size + 2 * border
    padded = F.pad(images, (border,) * 4, mode="reflect")
    windows = padded.unfold(2, size, args.patch_size)  # rows
    windows = windows.unfold(3, size, args.patch_size)  # columns: [B, J C, h, w, s, s], a view
    return windows.permute(0, 2, 3, 1, 4, 5)


def join_cells(cells, args):
    """Make a map of pixels [B, S, S] from values of cells [B, G, h, w]: `split_labels` back, smoothed."""
    cells = F.pixel_shuffle(cells, args.patch_size // args.cell_size)  # [B, 1, S / c, S / c]
    return F.interpolate(cells, scale_factor=args.cell_size, mode="bilinear").squeeze(1)


# ---- Scores ----


def count_pixels(probability, labels, threshold):
    """Count pixels (or cells) that are hits, are called changed, are changed, and count: a tensor of four.

    A pixel is called changed if its probability is at least the threshold. Arguments are of equal shape.
    """
    is_counted = labels != UNCOUNTED
    is_changed = labels == 1
    is_called = (probability >= threshold) & is_counted
    return torch.stack([x.sum() for x in (is_called & is_changed, is_called, is_changed, is_counted)])


def compute_scores(counts):
    """Compute scores of the class "changed", and overall accuracy, from `count_pixels`; 0 without pixels."""
    hits, called, changed, counted = counts.tolist()
    return {
        "eval/f1": 2 * hits / max(called + changed, 1),
        "eval/precision": hits / max(called, 1),
        "eval/recall": hits / max(changed, 1),
        "eval/iou": hits / max(called + changed - hits, 1),
        "eval/accuracy": (counted - called - changed + 2 * hits) / max(counted, 1),
    }


def find_threshold(probability, labels):
    """Find the threshold of 0, 0.01, ..., 1 with the largest F1; if no pixel is changed, it is 0.5."""
    if not (labels == 1).any():
        return 0.5
    thresholds = torch.arange(101, dtype=probability.dtype, device=probability.device) / 100
    num_reached = torch.bucketize(probability, thresholds, right=True)  # thresholds that a pixel reaches
    # Of changed pixels, and of all that count: how many reach at least k thresholds, k = 0 to 101. These are
    # the pixels that threshold number k - 1 calls changed
    counts = []
    for group in (labels == 1, labels != UNCOUNTED):
        counts.append(torch.bincount(num_reached[group], minlength=102).flip(0).cumsum(0).flip(0))
    hits, called = counts
    f1 = 2 * hits / (called + hits[0])
    return f1[1:].argmax().item() / 100


def score_maps(probability, labels, threshold=None):
    """Score maps by pixel; without a probability threshold, use the one with the largest F1."""
    if threshold is None:
        threshold = find_threshold(probability, labels)
    scores = compute_scores(count_pixels(probability, labels, threshold))
    return scores | {"eval/threshold": threshold}


def score_all_changed(pairs):
    """Score the map that calls every pixel changed, without a look."""
    labels = pairs[:, -1]
    scores = compute_scores(count_pixels(torch.ones_like(labels), labels, 0.5))
    return scores | {"eval/looks": 0.0, "eval/f1_less_price": scores["eval/f1"]}


# ---- Maps to look at ----


def make_maps(probability, looks, threshold, args):
    """Make maps [M, H, W] from 0 to 1 of probabilities [M, H, W] and looks [M, h, w]: {name: map}."""
    shares = looks.unsqueeze(1) / args.num_steps
    return {
        "mask": (probability >= threshold).float(),
        "probability": probability,
        "looks": F.interpolate(shares, scale_factor=args.patch_size).squeeze(1),
    }
