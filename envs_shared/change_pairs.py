"""Pairs of pictures for change detection: the task haze, and folders {train,val,test}/{A,B,label}/x.png.

Pairs are uint8 [M, 3 V + 1, H, W]: the colours of V dates, then the label of each pixel. The label is 0 for
unchanged, 1 for changed, and 255 where it does not count. There are two dates, except in haze-3 and haze-4.
"""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

ENV_IDS = {"haze": 2, "haze-3": 3, "haze-4": 4}  # number of dates V
SPLITS = ("train", "val", "test")
DIRECTORIES = ("A", "B", "label")  # folders of the first date, the second date and the labels
UNCOUNTED = 255
PATCH = 8  # side of a roof in pixels
COLOURS = np.array(
    [[90, 100, 60], [70, 40, 40], [230, 150, 130]], np.float32
)  # ground; roof, dark and bright


# ---- Synthetic pairs ----


def draw_haze(num_pairs: int, size: int, num_dates: int, *seed: int):
    """Draw pairs uint8 [M, 3 V + 1, S, S]; return also where roofs [M, h, w] and haze [V - 1, M, h, w] are.

    Four patches in ten are roofs, whose stripes run along or across. A roof's stripes at the first and the last
    date are the same, except on the quarter of the roofs that has changed. Haze hides the stripes of a roof at each
    date but the last, with a probability that leaves half of the roofs without haze, changed or not. Haze
    after the first date hides the last date too. So earlier dates alone say nothing about a change, but they
    say whether the next date is worth a look. The mean colour of a roof is always the same.
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
    light = np.where(enlarge(is_along), bars, bars[:, None])  # [V, M, S, S]
    light[:-1][enlarge(is_hazy)] = 0.5
    light[-1][enlarge(is_hazy[1:].any(0))] = 0.5
    ground, dark, bright = COLOURS[..., None, None]
    roofs = dark + (bright - dark) * light[:, :, None]  # [V, M, 3, S, S]
    images = np.where(enlarge(is_roof)[:, None], roofs, ground)
    images += rng.integers(-12, 13, images.shape, np.int8)  # noise
    images = images.swapaxes(0, 1).reshape(num_pairs, -1, size, size)
    return np.concatenate((images, enlarge(is_changed)[:, None]), 1).astype(np.uint8), is_roof, is_hazy


# ---- Batches ----


def draw_batch(pairs, num_pairs: int, args):
    """Draw random crops of random pairs, each turned by 0 to 3 right angles, and split them."""
    size = args.image_size
    ranges = len(pairs), *(n - size + 1 for n in pairs.shape[2:]), 4
    places = torch.stack([torch.randint(n, (num_pairs,)) for n in ranges], 1).tolist()
    crops = [pairs[i, :, y : y + size, x : x + size].rot90(turns, (1, 2)) for i, y, x, turns in places]
    return split_labels(torch.stack(crops), args)


def split_labels(pairs, args):
    """Split pairs [B, 3 V + 1, S, S] into pictures with values from -2 to 2, and labels [B, G, h, w] of cells.

    A cell is changed if at least half of its pixels that count are changed; its label is -1 if none counts.
    """
    masks = pairs[:, -1:] == 1, pairs[:, -1:] != UNCOUNTED
    is_changed, is_counted = (F.avg_pool2d(x.float(), args.cell_size) for x in masks)
    labels = torch.where(is_counted > 0, (2 * is_changed >= is_counted).float(), -1.0)  # [B, 1, S / c, S / c]
    return pairs[:, :-1].float() / 64 - 2, F.pixel_unshuffle(labels, args.patch_size // args.cell_size)


# ---- Folders ----


def read_picture(path, mode: str | None = "RGB") -> np.ndarray:
    """Read a picture as uint8 [H, W, 3], or as it is if `mode` is None; raises ValueError with the reason."""
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF" or ";16" in str(image.tile):
                raise ValueError("more than 8 bits a colour; convert it to 8")
            return np.array(image.convert(mode) if mode else image)
    except Exception as error:  # decoders raise errors of many types on broken files
        reason = error
    raise ValueError(f"{path}: cannot be read as a picture: {reason}")


def read_label(path) -> np.ndarray:
    """Read a label [H, W] of one channel with 0 and 255, or 0 and 1; raises LookupError for all others."""
    values = read_picture(path, None)
    found = set(np.unique(values).tolist())
    with Image.open(path) as image:
        is_plain = image.format == "PNG" and image.mode in "1L" and not image.has_transparency_data
    if not is_plain or not (found <= {0, 255} or found <= {0, 1}):
        raise LookupError(f"{path}: not a PNG of one channel with the values 0 and 255, or 0 and 1")
    return (values > 0).astype(np.uint8)


def read_pair(path_a, path_b, label: np.ndarray | None = None) -> np.ndarray:
    """Read a pair uint8 [7, H, W]; without a label, no pixel counts. Raises ValueError if sizes differ."""
    images = [read_picture(path) for path in (path_a, path_b)]
    sizes = [x.shape[:2] for x in (*images, images[0] if label is None else label)]
    if len(set(sizes)) > 1:
        raise ValueError(f"{path_a}: height and width {sizes[0]} differ from those of its pair, {sizes[1:]}")
    label = np.full(sizes[0], UNCOUNTED, np.uint8) if label is None else label
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


def read_pairs(path_a, path_b, multiple: int) -> dict:
    """Read two pictures, or two folders with equal file names: {name: (stacked pair, its height, its width)}."""
    names = sorted(x.name for x in Path(path_a).glob("[!.]*")) or [""]
    pairs = {Path(path_a, name).stem: read_pair(Path(path_a, name), Path(path_b, name)) for name in names}
    return {name: (stack_pairs([pair], multiple), *pair.shape[1:]) for name, pair in pairs.items()}


def stack_pairs(pairs: list[np.ndarray], multiple: int, least: int = 1) -> np.ndarray:
    """Stack pairs [7, H, W] to [M, 7, H', W'], whose sides are multiples of `multiple` and at least `least`.

    Pictures are mirrored beyond their borders, and pixels there do not count.
    """
    sides = [max(least, *(x.shape[axis] for x in pairs)) for axis in (1, 2)]
    stacked = []
    for pair in pairs:
        widths = [(0, side + -side % multiple - n) for side, n in zip(sides, pair.shape[1:], strict=True)]
        label = np.pad(pair[6:], ((0, 0), *widths), constant_values=UNCOUNTED)
        stacked.append(np.concatenate((np.pad(pair[:6], ((0, 0), *widths), mode="symmetric"), label)))
    return np.stack(stacked)


def read_folder(path, multiple: int, least: int) -> dict[str, np.ndarray]:
    """Read a folder {train,val,test}/{A,B,label}/x.png as {split: pairs uint8 [M, 7, H, W]}.

    Raises LookupError if the layout or a label is not like that, ValueError if a file cannot be used.
    """
    splits = {}
    for split in SPLITS:
        folders = [Path(path, split, name) for name in DIRECTORIES]
        names = [{x.name for x in folder.glob("[!.]*")} for folder in folders]
        odd = set.union(*names) - set.intersection(*names)
        if odd or not names[0]:
            raise LookupError(f"{path}: {split}/A, B and label need equal names; alone: {sorted(odd)[:3]}")
        files = [[folder / name for folder in folders] for name in sorted(names[0])]
        splits[split] = [read_pair(a, b, read_label(label)) for a, b, label in files]
    return {split: stack_pairs(pairs, multiple, least) for split, pairs in splits.items()}


def load_pairs(args) -> dict[str, np.ndarray]:
    """Read --data-dir or draw synthetic pairs; returns {split: pairs}. Raises what `read_folder` does."""
    if args.data_dir:
        return read_folder(args.data_dir, args.patch_size, args.image_size)
    if args.env_id not in ENV_IDS:
        raise ValueError(f"--env-id {args.env_id}: must be one of {', '.join(ENV_IDS)}")
    numbers = args.num_train_pairs, *2 * [max(args.eval_episodes, 1)]
    sizes = args.image_size, ENV_IDS[args.env_id], args.seed
    return {split: draw_haze(numbers[i], *sizes, i)[0] for i, split in enumerate(SPLITS)}
