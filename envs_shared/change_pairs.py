"""Pairs of pictures for change detection: the task haze, and folders {train,val,test}/{A,B,label}/x.png.

Pairs are uint8 [M, 3 J + 1, H, W]: the colours of J dates, then the label of each pixel. The label is 0 for
unchanged, 1 for changed, and 255 where it does not count. There are two dates, except in haze-3 and haze-4.
"""

import importlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.nn import functional as F

ENV_IDS = {"haze": 2, "haze-3": 3, "haze-4": 4}  # number of dates J
SPLITS = ("train", "val", "test")
DIRECTORIES = ("A", "B", "label")  # folders of the first date, the second date and the labels
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")  # of pictures
LAYOUT = "{train,val,test}/{A,B,label} with equal names and labels of 0 and 255 as PNG"
UNCOUNTED = 255  # label of pixels that do not count
PATCH = 8  # side of a roof in pixels, whatever --patch-size is
COLOURS = np.array(
    [[90, 100, 60], [70, 40, 40], [230, 150, 130]], np.float32
)  # ground; roof, dark and bright


# ---- Synthetic pairs ----


def draw_haze(num_pairs: int, size: int, num_dates: int, *seed: int):
    """Draw pairs uint8 [M, 3 J + 1, S, S]; return also where roofs [M, h, w] and haze [J - 1, M, h, w] are.

    Four patches in ten are roofs, whose stripes run along or across. A roof's stripes at the first and the
    last date are the same, except on the quarter of the roofs that has changed. Haze hides the stripes of a
    roof at each date but the last, with a probability that leaves half of the roofs without haze, changed or
    not. Haze after the first date hides the last date too. So earlier dates alone say nothing about a change,
    but they say whether the next date is worth a look. The mean colour of a roof is always the same.
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


# ---- Batches ----


def draw_batch(pairs, num_pairs: int, args):
    """Draw random crops of random pairs, each turned by 0 to 3 right angles, and split them."""
    size = args.image_size
    height, width = pairs.shape[2:]
    ranges = (len(pairs), height - size + 1, width - size + 1, 4)
    places = torch.stack([torch.randint(n, (num_pairs,)) for n in ranges], 1)
    crops = []
    for i, y, x, turns in places.tolist():
        crop = pairs[i, :, y : y + size, x : x + size]
        crops.append(crop.rot90(turns, (1, 2)))
    return split_labels(torch.stack(crops), args)


def split_labels(pairs, args):
    """Split pairs [B, 3 J + 1, S, S] into pictures of values from -2 to 2 and labels [B, G, h, w] of cells.

    A cell is changed if at least half of its pixels that count are changed; its label is -1 if none counts.
    """
    pixels = pairs[:, -1:]
    changed = F.avg_pool2d((pixels == 1).float(), args.cell_size)  # shares of a cell's pixels
    counted = F.avg_pool2d((pixels != UNCOUNTED).float(), args.cell_size)
    labels = torch.where(counted > 0, (2 * changed >= counted).float(), -1.0)  # [B, 1, S / c, S / c]
    labels = F.pixel_unshuffle(labels, args.patch_size // args.cell_size)
    return pairs[:, :-1].float() / 64 - 2, labels


# ---- Scores ----


def compute_f1(probability, pairs, threshold: float | None = None) -> tuple[float, float]:
    """Compute F1 of all pixels that count, from probabilities of change [M, H, W]; return the threshold too.

    A pixel is called changed if its probability is at least the threshold. If that is None, the one of 0, 0.01,
    ..., 1 with the largest F1 is taken; without changed pixels all are equal, and it is 0.5.
    """
    is_counted = pairs[:, -1] != UNCOUNTED
    is_changed = pairs[:, -1] == 1

    def score(threshold):
        says_change = (probability >= threshold) & is_counted
        total = says_change.sum() + is_changed.sum() + 1e-9
        return (2 * (says_change & is_changed).sum() / total).item()

    if threshold is None and not is_changed.any():
        threshold = 0.5  # nothing to tune it with
    elif threshold is None:
        threshold = max(np.linspace(0, 1, 101).tolist(), key=score)
    return score(threshold), threshold


# ---- Folders ----


def read_picture(path, mode="RGB") -> np.ndarray:
    """Read a picture as uint8 [H, W, 3], or as it is if `mode` is None; raises ValueError with the reason.

    Cameras may store a picture turned or mirrored and note that in EXIF; it is read as viewers show it.
    """
    try:
        with Image.open(path) as image:
            # Modes I, I;16 and F have more than 8 bits; 16-bit colours show only in the decoder's arguments
            if image.mode[0] in "IF" or ";16" in str(image.tile):
                raise ValueError("more than 8 bits a colour; convert it to 8")
            image = ImageOps.exif_transpose(image)
            return np.array(image.convert(mode) if mode else image)
    except Exception as error:  # decoders raise errors of many types on broken files
        reason = error
    raise ValueError(f"{path}: cannot be read as a picture: {reason}")


def read_label(path) -> np.ndarray:
    """Read a label uint8 [H, W] of 0 and 1; raises ValueError if it cannot be used."""
    values = read_picture(path)[..., 0]
    found = set(np.unique(values).tolist())
    with Image.open(path) as image:
        is_plain = image.format == "PNG" and image.mode in "1L" and not image.has_transparency_data
    if is_plain and (found <= {0, 255} or found <= {0, 1}):
        return (values > 0).astype(np.uint8)
    return import_reader(path).read_label(path)


def read_pair(path_a, path_b, label: np.ndarray | None = None) -> np.ndarray:
    """Read a pair uint8 [7, H, W]; without a label, no pixel counts. Raises ValueError if sizes differ."""
    images = [read_picture(path) for path in (path_a, path_b)]
    if label is None:
        label = np.full(images[0].shape[:2], UNCOUNTED, np.uint8)
    sizes = [x.shape[:2] for x in (*images, label)]
    if len(set(sizes)) > 1:
        raise ValueError(f"{path_a}: height and width {sizes[0]} differ from those of its pair, {sizes[1:]}")
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


def stack_pairs(pairs: list[np.ndarray], multiple: int, least: int = 1) -> np.ndarray:
    """Stack pairs [7, H, W] to [M, 7, H', W'], whose sides are multiples of `multiple` and at least `least`.

    Pictures are mirrored beyond their borders, and pixels there do not count.
    """
    sides = [max(least, *(pair.shape[axis] for pair in pairs)) for axis in (1, 2)]
    stacked = []
    for pair in pairs:
        widths = [(0, side + -side % multiple - n) for side, n in zip(sides, pair.shape[1:], strict=True)]
        images = np.pad(pair[:6], ((0, 0), *widths), mode="symmetric")
        label = np.pad(pair[6:], ((0, 0), *widths), constant_values=UNCOUNTED)
        stacked.append(np.concatenate((images, label)))
    return np.stack(stacked)


def list_pictures(folder) -> dict[str, Path]:
    """List the pictures in a folder by name without suffix; raises ValueError if two have one name."""
    pictures = {}
    for file in sorted(Path(folder).glob("[!.]*")):
        if file.suffix.lower() in SUFFIXES:
            if file.stem in pictures:
                raise ValueError(f"{file}: same name as {pictures[file.stem].name}; remove one of them")
            pictures[file.stem] = file
    return pictures


def match_pictures(where, names, pictures) -> list[list[Path]]:
    """Return each name's files, one of each folder in `pictures` {name: file}; raises ValueError if one is missing."""
    for kind, files in zip(DIRECTORIES, pictures):
        missing = sorted(set(names) - files.keys())
        if missing:
            raise ValueError(f"{where} has no picture {missing[0]} in its folder {kind}")
    return [[files[name] for files in pictures] for name in sorted(names)]


def read_pairs(path_a, path_b, multiple: int) -> dict:
    """Read two pictures, or two folders with equal names: {name: (stacked pair, its height, its width)}.

    Suffixes may differ, and files that are no pictures are left out.
    """
    if Path(path_a).is_dir():
        pictures = [list_pictures(path_a), list_pictures(path_b)]
        files = match_pictures(f"{path_a}, {path_b}:", set().union(*pictures), pictures)
    else:
        files = [(Path(path_a), path_b)]
    pairs = {}
    for a, b in files:
        pair = read_pair(a, b)
        pairs[a.stem] = (stack_pairs([pair], multiple), *pair.shape[1:])
    return pairs


def import_reader(path):
    """Import the reader of rarer layouts and labels; raises ValueError if the file is not there."""
    try:
        return importlib.import_module("envs_shared.change_folders")
    except ImportError:
        raise ValueError(f"{path}: not {LAYOUT}; others need envs_shared/change_folders.py") from None


def read_folder(path, multiple: int, least: int) -> dict[str, np.ndarray]:
    """Read a folder of pairs as {split: pairs uint8 [M, 7, H, W]}; raises ValueError or OSError."""
    folders = {split: [Path(path, split, name) for name in DIRECTORIES] for split in SPLITS}
    if all(folder.is_dir() for split in SPLITS for folder in folders[split]):
        pictures = {split: [list_pictures(folder) for folder in folders[split]] for split in SPLITS}
        names = {split: set().union(*pictures[split]) for split in SPLITS}
    else:
        pictures, names = import_reader(path).find_pictures(Path(path))
    splits = {}
    for split in SPLITS:
        if not names[split]:
            raise ValueError(f"{path}: no {split} pictures; needed are {LAYOUT}")
        files = match_pictures(f"{path}: {split}", names[split], pictures[split])
        pairs = [read_pair(a, b, read_label(label)) for a, b, label in files]
        splits[split] = stack_pairs(pairs, multiple, least)
    return splits


def load_pairs(args) -> dict[str, np.ndarray]:
    """Read --data-dir or draw synthetic pairs; returns {split: pairs}. Raises ValueError or OSError."""
    if args.data_dir:
        return read_folder(args.data_dir, args.patch_size, args.image_size)
    if args.env_id not in ENV_IDS:
        raise ValueError(f"--env-id {args.env_id}: must be one of {', '.join(ENV_IDS)}")
    num_pairs = dict.fromkeys(SPLITS, args.eval_episodes or 500) | {"train": args.num_train_pairs}
    splits = {}
    for i, split in enumerate(SPLITS):
        splits[split], *_ = draw_haze(num_pairs[split], args.image_size, ENV_IDS[args.env_id], args.seed, i)
    return splits
