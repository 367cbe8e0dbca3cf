"""Pictures of one place at two times with labels of what has changed: a reader of data sets, an audit, and crops.

A data set is a folder with pairs for train, val and test in one of three layouts, looked for in this order:

    train/A/x.png  train/B/x.png  train/label/x.png      a folder for each split
    A/x.png  B/x.png  label/x.png  list/train.txt        a list for each split, one name a line
    A/train_x.png  B/train_x.png  label/train_x.png      names that begin with the split

A, B and label of a pair share their name, not necessarily the suffix. Errors in files are ValueErrors of one line that
name the file or the folder.
"""

import hashlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

SPLITS = ("train", "val", "test")
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
IGNORE = 255  # label of pixels that do not count


class Split(NamedTuple):
    """Pairs by name: `images` uint8 [2, H, W, 3] (A, B), `labels` uint8 [H, W] (0 is unchanged), `names`."""

    images: list[np.ndarray]
    labels: list[np.ndarray]
    names: list[str]


def open_picture(path: str | Path) -> Image.Image:
    """A decoded picture; ValueError where it is none, cut off, of 16 bits a colour, or above Pillow's limit of size."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                is_deep = re.search(r"(RGB\w?|LA);16", str(image.tile))  # Pillow would keep the upper 8 bits
                image.load()
    except Exception as error:  # decoders raise errors of many types on broken files
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: cannot be read as a picture: {reason}") from None
    if is_deep:
        raise ValueError(f"{path}: 16 bits a colour, convert it to 8")
    return image


def to_rgb(image: Image.Image) -> np.ndarray:
    """Colours uint8 [H, W, 3] of a picture, without transparency."""
    image = (
        image.convert("RGBA") if image.mode == "P" else image
    )  # in one step, Pillow warns of transparent palettes
    return np.array(image.convert("RGB"))


def read_image(path: str | Path) -> np.ndarray:
    """A picture as uint8 [H, W, 3]; ValueError where it cannot be read or has more than 8 bits a colour."""
    image = open_picture(path)
    if image.mode[0] in "IF":
        raise ValueError(f"{path}: more than 8 bits a pixel (mode {image.mode}), convert it to 8")
    return to_rgb(image)


def read_label(path: str | Path, num_classes: int = 2) -> np.ndarray:
    """Class ids uint8 [H, W] of a label; ValueError where it is coloured or holds other values.

    Two classes are 0 and 255 or 0 and 1, and in a JPEG all below 128 and the others; more classes are 0, 1, ...
    A palette of greys stands for its greys, any other for its indices.
    """
    image = open_picture(path)
    values = np.array(image)
    if image.mode == "P":
        palette = np.array(image.getpalette()).reshape(-1, 3)
        values = to_rgb(image)[..., 0] if (palette == palette[:, :1]).all() else values
    elif values.ndim == 3:
        colours = to_rgb(image)
        values = colours[..., 0]
        if (colours != values[..., None]).any():
            raise ValueError(f"{path}: a label in colour, save it with one channel of class ids")
    if image.format in ("JPEG", "MPO"):
        if num_classes > 2 or 0 < values.max() < 8:  # the latter: 0 and 1, which would all be below 128
            raise ValueError(f"{path}: JPEG does not keep class ids, save labels as PNG")
        values = values >= 128
    found = set(np.unique(values).tolist())
    if num_classes == 2 and found <= {0, 255}:
        return (values == 255).astype(np.uint8)
    unknown = sorted(found - set(range(num_classes)))
    if unknown:
        needed = "either 0 and 255 or 0 and 1" if num_classes == 2 else f"0 to {num_classes - 1}"
        raise ValueError(
            f"{path}: value {unknown[0]:g} in a label of {num_classes} classes, which are {needed}"
        )
    return values.astype(np.uint8)


def write_picture(path: str | Path, grey: np.ndarray) -> None:
    """Write greys [H, W] from 0 to 255 as a PNG, all of it or nothing; ValueError where it cannot be written."""
    content, temporary = io.BytesIO(), Path(f"{path}.{os.getpid()}.tmp")
    Image.fromarray(grey.astype(np.uint8)).save(content, "PNG")
    try:
        temporary.write_bytes(content.getvalue())
        os.replace(temporary, path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    finally:
        if temporary.exists():
            temporary.unlink()


def list_pictures(folder: Path, layouts: str) -> dict[str, Path]:
    """Pictures in a folder by name without suffix; ValueError where there is no such folder, or two of one name."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; {layouts}")
    pictures = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() in SUFFIXES and not file.name.startswith("."):
            if file.stem in pictures:
                raise ValueError(f"{file}: same name as {pictures[file.stem].name}, remove one of them")
            pictures[file.stem] = file
    return pictures


def read_list(path: Path, known: set[str]) -> set[str]:
    """Names in a list, of which the first word of each line counts; ValueError where one is not `known` or is twice."""
    try:
        lines = path.read_text("utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; lists of train, val and test are needed") from None
    names = set()
    for i, words in enumerate(map(str.split, lines), 1):
        if words:
            file = Path(words[0].replace("\\", "/"))
            name = file.stem if file.suffix.lower() in SUFFIXES else file.name
            if name not in known or name in names:
                raise ValueError(
                    f"{path}:{i}: {name} is {'listed twice' if name in names else 'not among the files'}"
                )
            names.add(name)
    return names


def find_pairs(path: Path, dir_names: tuple[str, str, str]) -> dict[str, dict[str, list[Path]]]:
    """Files [A, B, label] by split and sorted name; ValueError where the layout is none of the three, or has gaps."""
    if len(dir_names) != 3 or len({Path(x) for x in dir_names} - {Path()}) != 3:
        raise ValueError(f"--dir-names are three different folders, of A, B and label, not {dir_names!r}")
    a, b, label = dir_names
    layouts = f"needed are train/{a}/x.png, or {a}/x.png and list/train.txt, or {a}/train_x.png, for val and test too, "
    layouts += f"and {b} and {label} beside {a} (other names: --dir-names)"
    if not path.is_dir():
        raise ValueError(f"{path}: no such folder")
    has_split_folders = any((path / split).is_dir() for split in SPLITS)
    if not has_split_folders and not any((path / x).is_dir() for x in dir_names):
        raise ValueError(f"{path}: no layout that is known; {layouts}")
    roots = {split: path / split if has_split_folders else path for split in SPLITS}
    pictures = {split: [list_pictures(root / x, layouts) for x in dir_names] for split, root in roots.items()}
    names = {split: set().union(*pictures[split]) for split in SPLITS}
    if not has_split_folders and (path / "list").is_dir():
        names = {split: read_list(path / "list" / f"{split}.txt", names[split]) for split in SPLITS}
    elif not has_split_folders:
        splits = {x: re.match("(?:train|val|test)(?![a-z])", x, re.IGNORECASE) for x in names["train"]}
        others = [x for x in splits if not splits[x]]
        if others:
            raise ValueError(f"{path}: {min(others)} begins with no split; {layouts}")
        names = {split: {x for x in splits if splits[x][0].lower() == split} for split in SPLITS}
    for split, root in roots.items():
        if not names[split]:
            raise ValueError(f"{root}: no {split} pictures ({' '.join(SUFFIXES)}); {layouts}")
        for dir_name, files in zip(dir_names, pictures[split], strict=True):
            if names[split] - files.keys():
                raise ValueError(
                    f"{root / dir_name}: no picture {min(names[split] - files.keys())} for its pair"
                )
    return {s: {name: [files[name] for files in pictures[s]] for name in sorted(names[s])} for s in SPLITS}


def get_digest(image: np.ndarray) -> bytes:
    """Digest of a picture [H, W, 3]; empty where it has a single colour, as such pictures need not show one place."""
    is_blank = (image == image[0, 0]).all()
    return b"" if is_blank else hashlib.blake2b(f"{image.shape}".encode() + image.tobytes()).digest()


def check_leaks(digests: dict[str, dict[Path, bytes]]) -> None:
    """ValueError where a picture is in two splits; it tells of the two with the largest share in common."""
    leaks = []
    for split, other in (("test", "train"), ("test", "val"), ("val", "train")):
        known = {digest: file for file, digest in digests[other].items() if digest}
        twins = [f"{file} and {known[digest]}" for file, digest in digests[split].items() if digest in known]
        text = f"{len(twins)} of {len(digests[split])} {split} pictures are also in {other}, for example "
        leaks.append((len(twins) / len(digests[split]), text + "".join(twins[:1])))
    share, text = max(leaks, key=lambda leak: leak[0])
    if share:
        raise ValueError(text)


def read_data_dir(
    path: str | Path, num_classes: int = 2, dir_names: tuple[str, str, str] = ("A", "B", "label")
) -> dict[str, Split]:
    """Train, val and test pairs of a data set in one of the three layouts, with the folders `dir_names` of A, B, label.

    ValueError where the set is not complete, a file cannot be used, or a picture is in more than one split.
    """
    if not 2 <= num_classes <= IGNORE:
        raise ValueError(f"num_classes is {num_classes}, it must be from 2 to {IGNORE}")
    try:
        pairs = find_pairs(Path(path), dir_names)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    splits, digests = {split: Split([], [], []) for split in SPLITS}, {split: {} for split in SPLITS}
    with tqdm(total=sum(map(len, pairs.values())), desc="read", unit="pair", leave=False, delay=2.0) as bar:
        for split, (images, labels, names) in splits.items():
            for name, files in pairs[split].items():
                pair, label = [read_image(file) for file in files[:2]], read_label(files[2], num_classes)
                for file, x in zip(files, (*pair, label), strict=True):
                    if x.shape[:2] != label.shape:
                        raise ValueError(
                            f"{file}: height and width {x.shape[:2]}, but {files[2]} has {label.shape}"
                        )
                digests[split] |= {file: get_digest(x) for file, x in zip(files[:2], pair, strict=True)}
                images.append(np.stack(pair))
                labels.append(label)
                names.append(name)
                bar.update()
    check_leaks(digests)
    return splits


def audit(splits: dict[str, Split]) -> list[str]:
    """A line for each split: pairs, smallest and largest size, label values, changed pixels, pairs without change."""
    lines = []
    for split, (_, labels, names) in splits.items():
        sizes = [
            "{}x{}".format(*x) for x in sorted({x.shape for x in labels}, key=lambda x: (x[0] * x[1], x))
        ]
        span = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        values = sorted(set().union(*(np.unique(x).tolist() for x in labels)))
        changed = [np.count_nonzero(x) for x in labels]
        lines.append(
            f"{split}: {len(names)} pairs, height x width {span}, classes {' '.join(map(str, values))}, "
            f"{100 * sum(changed) / sum(x.size for x in labels):.2f} % changed, {changed.count(0)} pairs without change"
        )
    return lines


def check_sizes(split: Split, size: int, where: str) -> None:
    """ValueError where a picture is smaller than a crop of `size` pixels, which tells `where` it is."""
    for label, name in zip(split.labels, split.names, strict=True):
        if not 1 <= size <= min(label.shape):
            raise ValueError(
                f"{where} picture {name}: smaller than a crop of {size} pixels (--image-size), its height and width "
                f"are {label.shape}"
            )


def cut(split: Split, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Crops uint8 [M, 2, size, size, 3] and labels uint8 [M, size, size], row by row and in the order of the pairs.

    The last crops of a side end with the picture. What an earlier crop has already shown is IGNORE in their labels,
    so that each pixel counts once.
    """
    corners = []
    for i, label in enumerate(split.labels):
        starts = [sorted({*range(0, n - size + 1, size), n - size}) for n in label.shape]
        corners += [(i, y, x) for y in starts[0] for x in starts[1]]
    images = np.empty((len(corners), 2, size, size, 3), np.uint8)
    labels = np.empty((len(corners), size, size), np.uint8)
    for k, (i, y, x) in enumerate(corners):
        images[k] = split.images[i][:, y : y + size, x : x + size]
        labels[k] = split.labels[i][y : y + size, x : x + size]
        labels[k, : -y % size] = IGNORE
        labels[k, :, : -x % size] = IGNORE
    return images, labels
