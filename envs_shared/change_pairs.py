"""Pairs of pictures for change detection: the task haze, and folders {train,val,test}/{A,B,label}/x.png.

Pairs are uint8 [M, J C + 1, H, W]: C bands of each of J dates, then the label of each pixel. The label is 0 for
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
NUM_BANDS = 3  # C: bands of a picture; for a number that MODES lacks, `read_picture` must be another
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # what Pillow calls pictures of so many bands
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")  # of pictures
LAYOUT = "{train,val,test}/{A,B,label} with equal names and labels of 0 and 255 as PNG"
UNCOUNTED = 255  # label of pixels that do not count
PATCH = 8  # side of a roof in pixels, whatever --patch-size is
COLOURS = np.array(
    [[90, 100, 60], [70, 40, 40], [230, 150, 130]], np.float32
)  # ground; roof, dark and bright


# ---- Synthetic pairs ----


def draw_haze(num_pairs, size, num_dates, *seed):
    """Draw pairs uint8 [M, J C + 1, S, S]; return also where roofs [M, h, w] and haze [J - 1, M, h, w] are.

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


def draw_batch(pairs, num_pairs, args):
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
    """Split pairs [B, J C + 1, S, S] into pictures of values from -2 to 2 and labels [B, G, h, w] of cells.

    A cell is changed if at least half of its pixels that count are changed; its label is 255 if none counts.
    """
    pixels = pairs[:, -1:]
    changed = F.avg_pool2d((pixels == 1).float(), args.cell_size)  # shares of a cell's pixels
    counted = F.avg_pool2d((pixels != UNCOUNTED).float(), args.cell_size)
    labels = torch.where(counted > 0, (2 * changed >= counted).float(), UNCOUNTED)  # [B, 1, S / c, S / c]
    labels = F.pixel_unshuffle(labels, args.patch_size // args.cell_size)
    return pairs[:, :-1].float() / 64 - 2, labels


# ---- Scores ----


def count_pixels(probability, labels, threshold):
    """Count the pixels (or cells) that are hits, are called changed, are changed, and count; returns a tensor of four.

    A pixel is called changed if its probability of change is at least the threshold. Arguments are of equal shape.
    """
    is_counted = labels != UNCOUNTED
    is_changed = labels == 1
    is_called = (probability >= threshold) & is_counted
    return torch.stack([x.sum() for x in (is_called & is_changed, is_called, is_changed, is_counted)])


def compute_scores(counts):
    """Compute scores of the class "changed", and overall accuracy, from `count_pixels`; 0 if there are no pixels."""
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
    counts = []  # of changed pixels and of all, those that reach 0, 1, ..., 101 thresholds or more
    for group in (labels == 1, labels != UNCOUNTED):
        counts.append(torch.bincount(num_reached[group], minlength=102).flip(0).cumsum(0).flip(0))
    hits, called = counts
    f1 = 2 * hits / (called + hits[0])
    return f1[1:].argmax().item() / 100


# ---- Pictures ----


def decode_picture(image):
    """Return the bands of a picture, uint8 [H, W, C]; raises ValueError if a band or transparency would be lost."""
    num_bands = len(image.getbands())
    if getattr(image, "tag_v2", {}).get(277, 0) > num_bands:  # of TIFF files; Pillow leaves out unknown bands
        raise ValueError(f"it has more bands than the {num_bands} that Pillow reads")
    if NUM_BANDS != 3 and num_bands != NUM_BANDS:
        raise ValueError(f"it has {num_bands} bands, and NUM_BANDS is {NUM_BANDS}")
    is_opaque = not image.has_transparency_data or np.array(image.convert("RGBA"))[..., 3].min() == 255
    if NUM_BANDS == 3 and not is_opaque:
        raise ValueError("transparency, or a fourth band, would be lost; cut it off, or see NUM_BANDS")
    return np.array(image.convert(MODES[NUM_BANDS])).reshape(image.height, image.width, NUM_BANDS)


def decode_label(image):
    """Return the values of a label, uint8 [H, W]; labels of rarer forms need envs_shared/change_folders.py."""
    if image.format == "PNG" and image.mode in "1L" and not image.has_transparency_data:
        return np.array(image.convert("L"))
    return import_reader().decode_label(image)


def read_picture(path, decode=decode_picture):
    """Read a picture, or a label with `decode_label`; raises ValueError with the reason.

    Cameras may store a picture turned or mirrored and note that in EXIF; it is read as viewers show it.
    """
    try:
        with Image.open(path) as image:
            # Modes I, I;16 and F have more than 8 bits; 16-bit colours show only in the decoder's arguments
            if image.mode[0] in "IF" or ";16" in str(image.tile):
                raise ValueError("more than 8 bits a colour; convert it to 8")
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # photographs with a preview
                raise ValueError(f"{image.n_frames} pages; save each as a file of its own")
            ImageOps.exif_transpose(image, in_place=True)
            return decode(image)
    except Exception as error:  # decoders raise errors of many types on broken files
        reason = error
    raise ValueError(f"{path}: cannot be read as a picture: {reason}")


def read_pair(files, label=None):
    """Read a pair uint8 [2 C + 1, H, W]; without a label, no pixel counts. Raises ValueError if sizes differ."""
    images = [read_picture(path) for path in files[:2]]
    if label is None:
        label = np.full(images[0].shape[:2], UNCOUNTED, np.uint8)
    sizes = [x.shape[:2] for x in (*images, label)]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{files[0]}: height and width {sizes[0]} differ from those of its pair, {sizes[1:]}"
        )
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


def read_labels(files, ignore_index):
    """Read labels uint8 [H, W] of 0, 1 and, where pixels do not count, 255.

    All files have either 0 and 1 or 0 and 255, beside `ignore_index` where pixels do not count; raises
    ValueError if not.
    """
    labels = {path: read_picture(path, decode_label) for path in files}
    examples = {value: path for path, label in labels.items() for value in np.unique(label).tolist()}
    examples = {value: path for value, path in examples.items() if value not in (0, ignore_index)}
    if len(examples) > 1 or not examples.keys() <= {1, 255}:
        found = ", ".join(f"{value} in {path}" for value, path in sorted(examples.items())[:3])
        raise ValueError(
            f"labels have {found}; needed are 0 and 1 in all files, or 0 and 255 in all, "
            "and --ignore-index for a value that does not count"
        )
    return {path: np.uint8(np.where(x == ignore_index, UNCOUNTED, x > 0)) for path, x in labels.items()}


def stack_pairs(pairs, multiple, least):
    """Stack pairs [2 C + 1, H, W], with sides that are multiples of `multiple` and at least `least`.

    Pictures are mirrored beyond their borders, and pixels there do not count.
    """
    sides = [max(least, *(pair.shape[axis] for pair in pairs)) for axis in (1, 2)]
    stacked = []
    for pair in pairs:
        widths = [(0, side + -side % multiple - n) for side, n in zip(sides, pair.shape[1:], strict=True)]
        images = np.pad(pair[:-1], ((0, 0), *widths), mode="symmetric")
        label = np.pad(pair[-1:], ((0, 0), *widths), constant_values=UNCOUNTED)
        stacked.append(np.concatenate((images, label)))
    return np.stack(stacked)


# ---- Folders ----


def list_pictures(folder):
    """List the pictures in a folder by name without suffix; raises ValueError if two have one name."""
    pictures = {}
    for file in sorted(Path(folder).glob("[!.]*")):
        if file.suffix.lower() in SUFFIXES:
            if file.stem in pictures:
                raise ValueError(f"{file}: same name as {pictures[file.stem].name}; remove one of them")
            pictures[file.stem] = file
    return pictures


def match_pictures(where, names, pictures):
    """Return each name's files, one of each folder in `pictures` {name: file}; raises ValueError if one is missing."""
    for kind, files in zip(DIRECTORIES, pictures):
        missing = sorted(set(names) - files.keys())
        if missing:
            raise ValueError(f"{where} has no picture {missing[0]} in its folder {kind}")
    return [[files[name] for files in pictures] for name in sorted(names)]


def import_reader(where=""):
    """Import the reader of rarer layouts and labels; raises ValueError if the file is not there."""
    try:
        return importlib.import_module("envs_shared.change_folders")
    except ImportError:
        raise ValueError(f"{where}not {LAYOUT}; others need envs_shared/change_folders.py") from None


def read_folder(path, multiple, least, splits=SPLITS, val_share=0.0, ignore_index=None):
    """Read the splits of a folder as pairs uint8 [M, 2 C + 1, H, W]; raises ValueError or OSError.

    Sides become multiples of `multiple`, and at least `least`.
    """
    root = Path(path)
    folders = {split: [root / split / name for name in DIRECTORIES] for split in splits}
    if not val_share and all(folder.is_dir() for split in splits for folder in folders[split]):
        pictures = {split: [list_pictures(folder) for folder in folders[split]] for split in splits}
        names = {split: set().union(*pictures[split]) for split in splits}
    else:
        reader = import_reader(f"{root}: ")
        pictures, names = reader.find_pictures(root, splits, list_pictures, SUFFIXES, val_share)
    files = {}
    for split in splits:
        if not names[split]:
            raise ValueError(f"{root}: no {split} pictures; needed are {LAYOUT}")
        files[split] = match_pictures(f"{root}: {split}", names[split], pictures[split])
    labels = read_labels([x[2] for split in splits for x in files[split]], ignore_index)
    pairs = {split: [read_pair(x, labels[x[2]]) for x in files[split]] for split in splits}
    return {split: stack_pairs(pairs[split], multiple, least) for split in splits}


def read_pairs(args):
    """Read two pictures, or two folders with equal names, of --predict: {name: (stacked pair, height, width)}.

    A third one has labels. Suffixes may differ, and files that are no pictures are left out.
    """
    if Path(args.predict[0]).is_dir():
        pictures = [list_pictures(path) for path in args.predict]
        files = match_pictures(f"{', '.join(args.predict)}:", set().union(*pictures), pictures)
    else:
        files = [[Path(path) for path in args.predict]]
    labels = read_labels([x[2] for x in files if len(x) > 2], args.ignore_index)
    if not files:
        raise ValueError(f"--predict {args.predict[0]}: no pictures")
    pairs = {}
    for paths in files:
        pair = read_pair(paths, labels.get(paths[-1]))
        pairs[paths[0].stem] = (stack_pairs([pair], args.patch_size, args.cell_size + 1), *pair.shape[1:])
    return pairs


def load_pairs(args, splits=SPLITS):
    """Read --data-dir or draw synthetic pairs; returns {split: pairs}. Raises ValueError or OSError."""
    if args.data_dir:
        sizes = args.patch_size, args.image_size
        return read_folder(args.data_dir, *sizes, splits, args.val_share, args.ignore_index)
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
