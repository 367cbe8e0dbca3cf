"""Find real pairs in layouts other than {train,val,test}/{A,B,label}/x.png, and read other labels.

    train/time1/x.png  train/time2/x.jpg  train/mask/x.tif     other names, and suffixes that differ in a pair
    A/x.png  B/x.png  label/x.png  list/train.txt              a list for each split, one name a line
    A/train_x.png  B/train_x.png  label/train_x.png            names that begin with the split
    A/x.png  B/x.png  label/x.png                              split at random, with --val-share

NAMES lists the names that the folders of the two dates and of the labels may have, in upper or lower case.
Errors are ValueErrors of one line. change_pairs.py calls this file, which needs no other.
"""

import re
from pathlib import Path

import numpy as np

NAMES = (
    ("a", "t1", "time1", "im1", "image1", "img1", "before", "pre", "date1"),
    ("b", "t2", "time2", "im2", "image2", "img2", "after", "post", "date2"),
    ("label", "labels", "gt", "mask", "masks", "change", "out", "cd"),
)
LAYOUTS = "needed are train/A/x.png, or A/x.png and list/train.txt, or A/train_x.png, for val and test "
LAYOUTS += (
    "too, or --val-share, with B and label beside A (or others of NAMES in change_folders.py: time1, mask)"
)


def decode_label(image) -> np.ndarray:
    """Return the values of a label, uint8 [H, W]; raises ValueError for colour and transparency.

    In a JPEG, values below 128 are 0 and all others are 255. If all colours of a palette are grey, the greys are
    the values; for any other palette, the indices are.
    """
    if image.has_transparency_data and np.array(image.convert("RGBA"))[..., 3].min() < 255:
        raise ValueError("a label with transparency, which would be lost; save it with one channel")
    colours = palette = np.array(image.convert("RGB"))
    values = colours[..., 0]
    if image.mode == "P":
        palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
    if (palette != palette[..., :1]).any():
        if image.mode != "P":
            raise ValueError("a label in colour; save it with one channel of 0 and 255")
        values = np.array(image)
    if image.format in ("JPEG", "MPO"):
        if 0 < values.max() < 8:  # 0 and 1, which would all be below 128
            raise ValueError("JPEG does not keep 0 and 1; save labels as PNG")
        values = np.where(values < 128, 0, 255)
    return values.astype(np.uint8)


def find_folders(root: Path, list_pictures) -> list[dict[str, Path]]:
    """List the pictures of the first date, the second and the labels in folders below `root`."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; {LAYOUTS}")
    folders = {x.name.lower(): x for x in sorted(root.iterdir()) if x.is_dir()}
    found = [next((folders[name] for name in names if name in folders), None) for names in NAMES]
    if None in found:
        raise ValueError(f"{root}: no folder {NAMES[found.index(None)][0]}; {LAYOUTS}")
    return [list_pictures(folder) for folder in found]


def read_list(path: Path, known: set[str], suffixes) -> list[str]:
    """Read the names in a list: each line as a whole or, if no picture has that name, its first word."""
    names = []
    for i, line in enumerate(path.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        words = [line.strip(), *line.split()[:1]]
        files = [Path(word.replace("\\", "/")) for word in words if word]
        stems = [x.stem if x.suffix.lower() in suffixes else x.name for x in files]
        if stems:
            name = next((stem for stem in stems if stem in known), None)
            if name is None or name in names:
                reason = "is not among the pictures" if name is None else "is listed twice"
                raise ValueError(f"{path}:{i}: {name or stems[0]} {reason}")
            names.append(name)
    return names


def split_names(names: list[str], share: float) -> dict[str, list[str]]:
    """Split names at random: `share` for val, as much for test, and the others for train; always the same."""
    names = np.random.default_rng(0).permutation(names).tolist()
    size = max(1, round(share * len(names)))
    return {"val": names[:size], "test": names[size : 2 * size], "train": names[2 * size :]}


def find_pictures(root: Path, splits, list_pictures, suffixes, val_share: float):
    """Return the pictures of each split, listed as in `find_folders`, and the names of its pairs."""
    is_split = any((root / split).is_dir() for split in splits) or (root / "list").is_dir()
    if val_share and is_split:
        raise ValueError(f"{root}: is split already; leave out --val-share")
    if any((root / split).is_dir() for split in splits):
        pictures = {split: find_folders(root / split, list_pictures) for split in splits}
        return pictures, {split: set().union(*pictures[split]) for split in splits}
    folders = find_folders(root, list_pictures)
    known = set().union(*folders)
    if (root / "list").is_dir():
        names = {split: read_list(root / "list" / f"{split}.txt", known, suffixes) for split in splits}
    elif val_share:
        names = split_names(sorted(known), val_share)
    else:
        names = {"train": [], "val": [], "test": []}
        for name in sorted(known):
            start = re.match("(train|val|test)(?![a-z])", name, re.IGNORECASE)
            if not start:
                raise ValueError(f"{root}: {name} does not begin with a split; {LAYOUTS}")
            names[start[1].lower()].append(name)
    return dict.fromkeys(splits, folders), names
