"""Read pairs of pictures from files and write maps, for --data-dir and --predict.

    train/A/x.png  train/B/x.png  train/label/x.png            and the same in val and test
    train/time1/x.png  train/time2/x.jpg  train/mask/x.tif     other names, and suffixes that differ in a pair
    A/x.png  B/x.png  label/x.png  list/train.txt              a list for each split, one name a line
    A/train_x.png  B/train_x.png  label/train_x.png            names that begin with the split
    A/x.png  B/x.png  label/x.png                              split by --val-share, by a hash of each name

NAMES lists the names that the folders of the two dates and of the labels may have, in upper or lower case.
Errors are ValueErrors of one line, or OSErrors.
"""

import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from envs_shared import change_pairs
from envs_shared.change_pairs import SPLITS, UNCOUNTED, stack_pairs, unify_labels

NAMES = (
    ("a", "t1", "time1", "im1", "image1", "img1", "before", "pre", "date1"),
    ("b", "t2", "time2", "im2", "image2", "img2", "after", "post", "date2"),
    ("label", "labels", "gt", "mask", "masks", "change", "out", "cd"),
)
LAYOUTS = (
    "needed are train/A/x.png, or A/x.png and list/train.txt, or A/train_x.png, for val and test too, or "
    "--val-share, with B and label beside A (or others of NAMES in change_folders.py: time1, mask)"
)
SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")  # of pictures
TILE_SIDE = 512  # pictures of --predict that are larger are cut into tiles of this side and a margin
OVERVIEW_SIDE = 512  # largest side of a panel of the overview, in pixels
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # what Pillow calls pictures of so many bands


# ---- Pictures ----


def is_transparent(image):
    """Tell whether a pixel is transparent; a fourth band is read as transparency."""
    return image.has_transparency_data and np.array(image.convert("RGBA"))[..., 3].min() < 255


def decode_picture(image):
    """Return the bands of a picture, uint8 [H, W, C]; ValueError if a band or transparency would be lost."""
    num_bands = len(image.getbands())
    needed = change_pairs.NUM_BANDS
    if getattr(image, "tag_v2", {}).get(277, 0) > num_bands:  # of TIFF files; Pillow leaves out unknown bands
        raise ValueError(f"it has more bands than the {num_bands} that Pillow reads")
    if needed not in (3, num_bands):
        raise ValueError(f"it has {num_bands} bands, and NUM_BANDS is {needed}")
    if needed == 3 and is_transparent(image):
        raise ValueError("transparency, or a fourth band, would be lost; cut it off, or see NUM_BANDS")
    return np.array(image.convert(MODES[needed])).reshape(image.height, image.width, needed)


def decode_label(image):
    """Return the values of a label, uint8 [H, W]; raises ValueError for colour and transparency.

    In a JPEG, values below 128 are 0 and all others are 255. If all colours of a palette are grey, the greys
    are the values; for any other palette, the indices are.
    """
    if is_transparent(image):
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


def read_picture(path, decode=decode_picture):
    """Read a picture, or a label with `decode_label`; raises ValueError with the reason.

    Cameras may store a picture turned or mirrored and note that in EXIF; it is read as viewers show it.
    """
    try:
        with Image.open(path, formats="PNG JPEG TIFF BMP".split()) as image:
            # Modes I, I;16 and F have more than 8 bits. The decoder's arguments show 16-bit colours, colours
            # that are multiplied by alpha (RGBa), which Pillow would divide, and CMYK
            if image.mode[0] in "IF" or re.search(";16|RGBa|CMYK", str(image.tile)):
                raise ValueError("more than 8 bits a colour, or CMYK, or premultiplied alpha; convert it")
            if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":  # photographs with a preview
                raise ValueError(f"{image.n_frames} pages or masks; save each as a file of its own")
            ImageOps.exif_transpose(image, in_place=True)
            return decode(image)
    except Exception as error:  # decoders raise errors of many types on broken files
        reason = error
    raise ValueError(f"{path}: cannot be read as a picture: {reason}")


def read_georeference(path):
    """Return the origin (x, y), the size of a pixel (x, y) and the coordinate system of a GeoTIFF, or None.

    A picture that is turned against its coordinate system has no such origin; nothing is returned then.
    """
    with Image.open(path) as image:
        tags = getattr(image, "tag_v2", {})
        scale, tiepoint, matrix = (tags.get(number) for number in (33550, 33922, 34264))
        system = [tags.get(number) for number in (34735, 34736, 34737)]  # its keys, and their parameters
    if scale and tiepoint:
        column, row, _, x, y = tiepoint[:5]
        return (x - column * scale[0], y + row * scale[1]), (scale[0], -scale[1]), system
    if matrix and matrix[1] == matrix[4] == 0:
        return (matrix[3], matrix[7]), (matrix[0], matrix[5]), system
    return None


def compare_georeferences(files):
    """Return in words how the georeferences of a pair's two pictures differ; None if they agree or miss."""
    if not all(path.suffix.lower() in (".tif", ".tiff") for path in files):
        return None
    first, second = map(read_georeference, files)
    if not first or not second or first == second:
        return None
    (x, y), size, system = first
    if second[2] != system:
        return "their coordinate systems differ"
    if second[1] != size:
        return f"a pixel is {size} units in one and {second[1]} in the other"
    right, down = (second[0][0] - x) / size[0], (second[0][1] - y) / size[1]
    return f"the second picture begins {right:g} pixels to the right of the first and {down:g} below it"


def read_pair(files, label=None):
    """Read a pair uint8 [2 C + 1, H, W]; without a label, no pixel counts. ValueError if sizes differ.

    If both pictures have georeferences that differ, a line on stderr says how. The pair is read all the same,
    pixel by pixel.
    """
    difference = compare_georeferences(files[:2])
    if difference:
        print(f"{files[0]} and {files[1]} are not of one place: {difference}", file=sys.stderr)
    images = [read_picture(path) for path in files[:2]]
    if label is None:
        label = np.full(images[0].shape[:2], UNCOUNTED, np.uint8)
    sizes = [x.shape[:2] for x in (*images, label)]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"{files[0]}: height and width {sizes[0]} differ from those of its pair, {sizes[1:]}"
        )
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


def write_maps(path, maps):
    """Write maps {kind: [H, W]} from 0 (black) to 1 (white) as PNG files."""
    for kind, x in maps.items():
        Image.fromarray(np.uint8(255 * x)).save(f"{path}_{kind}.png")


def write_overview(path, pair, maps):
    """Write one picture for people: both dates, probability, looks, and the mask in red on the second date.

    Five panels stand side by side, of at most OVERVIEW_SIDE pixels each, so of large pictures they are
    smaller. `pair` is uint8 [2 C, H, W]; of more than three bands the first three are shown.
    """
    dates = [np.broadcast_to(x[:3], (3, *x.shape[1:])).transpose(1, 2, 0) for x in np.split(pair, 2)]
    greys = [np.repeat(np.uint8(255 * maps[kind])[..., None], 3, 2) for kind in ("probability", "looks")]
    overlay = dates[1].copy()
    is_called = maps["mask"] > 0
    overlay[is_called] = overlay[is_called] // 2 + np.uint8([127, 0, 0])  # half red
    panels = []
    for panel in (*dates, *greys, overlay):
        image = Image.fromarray(np.ascontiguousarray(panel))
        image.thumbnail((OVERVIEW_SIDE, OVERVIEW_SIDE))
        panels.append(np.pad(np.array(image), ((0, 0), (0, 8), (0, 0)), constant_values=128))  # a grey gap
    Image.fromarray(np.concatenate(panels, 1)).save(f"{path}_overview.png")


# ---- Predictions ----


def predict_large(predict, pair, args):
    """Predict one pair [1, 2 C + 1, H, W] of any size; return its probability [1, H, W] and looks [1, h, w].

    `predict` returns those of a pair and their returns. A large pair is cut into tiles, of which only the
    middle is kept. A patch of ours depends on less than the 3 patches around it, so that the maps are those
    of the whole pair. A backbone sees farther: enlarge the margin for it.
    """
    patch = args.patch_size
    margin = 3 * patch
    step = TILE_SIDE // patch * patch
    height, width = pair.shape[2:]
    probability = pair.new_zeros((1, height, width), dtype=torch.float32)
    looks = pair.new_zeros((1, height // patch, width // patch), dtype=torch.float32)
    for top in range(0, height, step):
        for left in range(0, width, step):
            # The tile begins at pixel (y, x)
            y = max(top - margin, 0)
            x = max(left - margin, 0)
            tile = pair[:, :, y : top + step + margin, x : left + step + margin]
            tile_probability, tile_looks, _ = predict(tile)
            found = tile_probability[:, top - y :, left - x :][:, :step, :step]
            probability[:, top : top + step, left : left + step] = found
            found = tile_looks[:, (top - y) // patch :, (left - x) // patch :]
            found = found[:, : step // patch, : step // patch]
            rows = slice(top // patch, (top + step) // patch)
            looks[:, rows, left // patch : (left + step) // patch] = found
    return probability, looks


def write_predictions(args, predict, threshold, device, say=print):
    """Write maps and an overview of each pair of --predict, and `say` what was found, in lines.

    All pairs are read first, so that a file that does not fit ends the run before any map is written.
    """
    output = Path(args.output)
    if output.exists():
        raise ValueError(f"--output {output}: exists already; name a new folder")
    pairs = read_pairs(args)
    output.mkdir(parents=True)
    counts = 0
    for name, (pair, height, width) in pairs.items():
        images = pair[0, :-1, :height, :width]
        pair = torch.from_numpy(pair).to(device)
        probability, looks = predict_large(predict, pair, args)
        maps = change_pairs.make_maps(probability, looks, threshold, args)
        maps = {kind: x[0, :height, :width].cpu().numpy() for kind, x in maps.items()}
        write_maps(output / name, maps)
        write_overview(output / name, images, maps)
        counts = counts + change_pairs.count_pixels(probability, pair[:, -1], threshold)
        say(f"{name}: {looks.mean():.2f} looks a patch, {maps['mask'].mean():.2%} of the pixels changed")
    if counts.any():  # there are labels
        for name, value in change_pairs.compute_scores(counts).items():
            say(f"{name}: {value:.5g}")
    say(
        f"{output}: maps of {len(pairs)} pairs; pixels of probability {threshold:.3g} or more are in the mask"
    )
    say("PNG files keep no georeference")


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
    """Return each name's files, one of each dictionary in `pictures`; raises ValueError if one is missing."""
    for kind, files in zip(("A", "B", "label"), pictures):
        missing = sorted(set(names) - files.keys())
        if missing:
            raise ValueError(f"{where} has no picture {missing[0]} in its folder {kind}")
    return [[files[name] for files in pictures] for name in sorted(names)]


def list_folders(root):
    """List the pictures of the first date, of the second date and of the labels in folders of `root`."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such folder; {LAYOUTS}")
    folders = [x for x in sorted(root.iterdir()) if x.is_dir()]
    pictures = []
    for kind, names in zip(("pictures of the first date", "pictures of the second date", "labels"), NAMES):
        found = [x for x in folders if x.name.lower() in names]
        if not found:
            raise ValueError(f"{root}: no folder {names[0]}; {LAYOUTS}")
        if len(found) > 1:
            both = " and ".join(x.name for x in found)
            raise ValueError(f"{root}: the folders {both} could all be the {kind}; rename all but one")
        pictures.append(list_pictures(found[0]))
    return pictures


def read_list(path, known):
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


def check_lists(folder, names):
    """Raise ValueError if two of the lists {split: names} in a folder have a name in common."""
    places = {}
    for split, listed in names.items():
        for name in listed:
            if name in places:
                files = f"{folder / places[name]}.txt and {folder / split}.txt"
                raise ValueError(f"{name} is in {files}; a pair may be in one split only")
            places[name] = split


def split_names(names, share):
    """Split names by a hash of each: about `share` of them for val, as many for test, the others for train.

    The split of a name depends on nothing but the name and the share. So a pair keeps its split if others are
    added or removed.
    """
    splits = {split: [] for split in SPLITS}
    for name in names:
        digest = hashlib.sha256(name.encode()).digest()
        number = int.from_bytes(digest[:6], "big") / 2**48  # uniform in [0, 1)
        split = "val" if number < share else "test" if number >= 1 - share else "train"
        splits[split].append(name)
    return splits


def sort_names(root, names):
    """Split names by the split that they begin with."""
    found = {split: [] for split in SPLITS}
    for name in names:
        start = re.match("(train|val|test)(?![a-z])", name, re.IGNORECASE)
        if not start:
            raise ValueError(f"{root}: {name} does not begin with a split; {LAYOUTS}")
        found[start[1].lower()].append(name)
    return found


def find_files(root, splits, val_share):
    """Find the files of each split: {split: [[first date, second date, label], ...]}."""
    is_split = any((root / split).is_dir() for split in splits)
    lists = root / "list"
    if val_share and (is_split or lists.is_dir()):
        raise ValueError(f"{root}: is split already; leave out --val-share, or set it to 0")
    if is_split:
        pictures = {split: list_folders(root / split) for split in splits}
        names = {split: set().union(*pictures[split]) for split in splits}
    else:
        folders = list_folders(root)
        pictures = dict.fromkeys(splits, folders)
        known = sorted(set().union(*folders))
        if lists.is_dir():
            names = {split: read_list(lists / f"{split}.txt", known) for split in splits}
            check_lists(lists, names)
        elif val_share:
            names = split_names(known, val_share)
            empty = [split for split in splits if not names[split]]
            if empty:
                raise ValueError(
                    f"{root}: of {len(known)} pairs, --val-share {val_share} gives none to {empty[0]}, as it "
                    "draws each name for itself; try another share, or write list/train.txt, val.txt, ..."
                )
        else:
            names = sort_names(root, known)
    files = {}
    for split in splits:
        if not names[split]:
            raise ValueError(f"{root}: no {split} pictures; {LAYOUTS}")
        files[split] = match_pictures(f"{root}: {split}", names[split], pictures[split])
    return files


def read_splits(args, splits=SPLITS):
    """Read the splits of --data-dir as pairs uint8 [M, 2 C + 1, H, W], at least as large as --image-size."""
    return read_folder(
        args.data_dir, args.patch_size, args.image_size, splits, args.val_share, args.ignore_index
    )


def read_folder(path, multiple, least, splits=SPLITS, val_share=0.0, ignore_index=None):
    """Read the splits of a folder, with sides as `stack_pairs` makes them."""
    files = find_files(Path(path), splits, val_share)
    labels = {x[2]: read_picture(x[2], decode_label) for split in splits for x in files[split]}
    labels = unify_labels(labels, ignore_index)
    folder = {}
    for split in splits:
        pairs = [read_pair(x, labels[x[2]]) for x in files[split]]
        folder[split] = stack_pairs(pairs, multiple, least)
    return folder


def read_pairs(args):
    """Read the pictures or folders of --predict: {name: (stacked pair, height, width)}.

    A third one has labels. Suffixes may differ, and files that are no pictures are left out.
    """
    if Path(args.predict[0]).is_dir():
        pictures = [list_pictures(path) for path in args.predict]
        files = match_pictures(f"{', '.join(args.predict)}:", set().union(*pictures), pictures)
    else:
        files = [[Path(path) for path in args.predict]]
    if not files:
        raise ValueError(f"--predict {args.predict[0]}: no pictures")
    labels = {x[2]: read_picture(x[2], decode_label) for x in files if len(x) > 2}
    labels = unify_labels(labels, args.ignore_index)
    pairs = {}
    for paths in files:
        pair = read_pair(paths, labels.get(paths[-1]))
        pairs[paths[0].stem] = (stack_pairs([pair], args.patch_size, args.cell_size + 1), *pair.shape[1:])
    return pairs
