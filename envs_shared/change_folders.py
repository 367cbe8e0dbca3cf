"""Find real pairs in layouts other than {train,val,test}/{A,B,label}/x.png, and read other labels.

    train/time1/x.png  train/time2/x.jpg  train/mask/x.tif     other names, and suffixes that differ in a pair
    A/x.png  B/x.png  label/x.png  list/train.txt              a list for each split, one name a line
    A/train_x.png  B/train_x.png  label/train_x.png            names that begin with the split

NAMES lists the names that the folders of the two dates and of the labels may have, in upper or lower case.
Errors are ValueErrors of one line that name the file or the folder.
"""

import re
from pathlib import Path

import numpy as np
from PIL import Image

from envs_shared.change_pairs import SPLITS, SUFFIXES, list_pictures, read_folder, read_picture  # noqa: F401

NAMES = (
    ("a", "t1", "time1", "im1", "image1", "img1", "before", "pre", "date1"),
    ("b", "t2", "time2", "im2", "image2", "img2", "after", "post", "date2"),
    ("label", "labels", "gt", "mask", "masks", "change", "out", "cd"),
)
LAYOUTS = "needed are train/A/x.png, or A/x.png and list/train.txt, or A/train_x.png, for val and test "
LAYOUTS += "too, with B and label beside A (or others of NAMES in envs_shared/change_folders.py: time1, mask)"


def read_label(path) -> np.ndarray:
    """Read a label uint8 [H, W] of 0 and 1; raises ValueError for colour, transparency and other values.

    0 is unchanged, 255 or 1 is changed. In a JPEG, values below 128 are unchanged and all others changed.
    If all colours of a palette are grey, the greys are the values; for any other palette, the indices are.
    """
    colours = palette = read_picture(path)
    values = colours[..., 0]
    with Image.open(path) as image:
        image.load()
    if image.has_transparency_data and (np.array(image.convert("RGBA"))[..., 3] < 255).any():
        raise ValueError(f"{path}: a label with transparency, which would be lost; save it with one channel")
    if image.mode == "P":
        palette = np.array(image.getpalette("RGB")).reshape(-1, 3)
    if (palette != palette[..., :1]).any():
        if image.mode != "P":
            raise ValueError(f"{path}: a label in colour; save it with one channel of 0 and 255")
        values = read_picture(path, None)
    if image.format in ("JPEG", "MPO"):
        if 0 < values.max() < 8:  # 0 and 1, which would all be below 128
            raise ValueError(f"{path}: JPEG does not keep 0 and 1; save labels as PNG")
        values = values >= 128
    found = set(np.unique(values).tolist())
    if not (found <= {0, 255} or found <= {0, 1}):
        unknown = max(found - {0, 255})
        raise ValueError(f"{path}: value {unknown:g} in a label, which has either 0 and 255 or 0 and 1")
    return (values > 0).astype(np.uint8)


def find_folders(root: Path) -> list[dict[str, Path]]:
    """List the pictures of the first date, the second and the labels in folders below `root`."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; {LAYOUTS}")
    folders = {x.name.lower(): x for x in sorted(root.iterdir()) if x.is_dir()}
    found = [next((folders[name] for name in names if name in folders), None) for names in NAMES]
    if None in found:
        raise ValueError(f"{root}: no folder {NAMES[found.index(None)][0]}; {LAYOUTS}")
    return [list_pictures(folder) for folder in found]


def read_list(path: Path, known: set[str]) -> list[str]:
    """Read the names in a list: each line as a whole or, if no picture has that name, its first word."""
    names = []
    for i, line in enumerate(path.read_text("utf-8-sig", errors="replace").splitlines(), 1):
        words = [line.strip(), *line.split()[:1]]
        files = [Path(word.replace("\\", "/")) for word in words if word]
        stems = [x.stem if x.suffix.lower() in SUFFIXES else x.name for x in files]
        if stems:
            name = next((stem for stem in stems if stem in known), None)
            if name is None or name in names:
                reason = "is not among the pictures" if name is None else "is listed twice"
                raise ValueError(f"{path}:{i}: {name or stems[0]} {reason}")
            names.append(name)
    return names


def find_pictures(root: Path):
    """Return the pictures of each split, listed as in `find_folders`, and the names of its pairs."""
    if any((root / split).is_dir() for split in SPLITS):
        pictures = {split: find_folders(root / split) for split in SPLITS}
        names = {split: set().union(*pictures[split]) for split in SPLITS}
        return pictures, names
    folders = find_folders(root)
    known = set().union(*folders)
    if (root / "list").is_dir():
        names = {split: read_list(root / "list" / f"{split}.txt", known) for split in SPLITS}
    else:
        names = {split: [] for split in SPLITS}
        for name in sorted(known):
            start = re.match("(train|val|test)(?![a-z])", name, re.IGNORECASE)
            if not start:
                raise ValueError(f"{root}: {name} does not begin with a split; {LAYOUTS}")
            names[start[1].lower()].append(name)
    return dict.fromkeys(SPLITS, folders), names
