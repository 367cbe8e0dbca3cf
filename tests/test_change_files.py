"""envs_shared/change_folders.py: pictures, layouts of folders, labels, and input that is refused."""

import numpy as np
import pytest
from PIL import Image
from test_change_pairs import make_args

from envs_shared import change_folders
from envs_shared.change_folders import decode_label, decode_picture, read_picture
from envs_shared.change_pairs import SPLITS, UNCOUNTED

KINDS = ("A", "B", "label")
IDS = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
FOUR_BANDS = np.random.default_rng(0).integers(1, 250, (6, 5, 4), np.uint8)
IN_COLOURS = np.repeat(IDS[..., None] * np.uint8(255), 3, 2)


def read_folder(path, patch_size=4, image_size=8, **changes):
    args = make_args(data_dir=str(path), patch_size=patch_size, image_size=image_size, **changes)
    return change_folders.read_splits(args)


def read_pairs(*paths):
    """Read pairs to predict."""
    return change_folders.read_pairs(make_args(predict=[str(path) for path in paths]))


def read_error(read, *inputs):
    """What a reader says, in one line, to input that it refuses."""
    with pytest.raises(ValueError) as error:
        read(*inputs)
    assert "\n" not in str(error.value)
    return str(error.value)


def save(path, x, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (x if isinstance(x, Image.Image) else Image.fromarray(x)).save(path, **options)
    return path


def save_pair(root, layout, seed, size=(8, 8), dirs=KINDS, suffixes=(".png",) * 3, **names):
    """Write a pair of noise, changed where the second date is bright; returns it as it is read."""
    images = np.random.default_rng(seed).integers(0, 256, (2, *size, 3), np.uint8)
    label = np.uint8(images[1, ..., 0] > 200)
    for kind, suffix, x in zip(dirs, suffixes, (*images, label * np.uint8(255)), strict=True):
        save(root / f"{layout.format(kind=kind, **names)}{suffix}", x)
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


def save_set(root, layout="{split}/{kind}/x{i}", **options):
    """Write two pairs of each split; returns them by split."""
    return {
        split: [save_pair(root, layout, 10 * k + i, split=split, i=i, **options) for i in range(2)]
        for k, split in enumerate(SPLITS)
    }


# Pictures and labels


def test_pictures_that_a_camera_held_upside_down_lie_on_their_label(tmp_path):
    """Orientation 3 of EXIF: stored upside down, and drawn upright by viewers, as the label is."""
    tag = Image.Exif()
    tag[274] = 3
    dark, bright = np.zeros((2, 32, 48, 3), np.uint8)
    bright[:8, :16] = 255
    for kind, x in (("A", dark), ("B", bright)):
        save(tmp_path / kind / "x.jpg", Image.fromarray(x).transpose(Image.Transpose.ROTATE_180), exif=tag)
    pair = change_folders.read_pair([tmp_path / "A/x.jpg", tmp_path / "B/x.jpg"], bright[..., 0] // 255)
    assert ((pair[3] > 128) == (pair[6] == 1)).all() and pair[6].sum() == 128


def test_bands_and_pages_that_would_be_lost(tmp_path):
    """An opaque fourth band is left out, and so is the preview in a camera's JPEG."""
    opaque = FOUR_BANDS.copy()
    opaque[..., 3] = 255
    assert (read_picture(save(tmp_path / "opaque.png", opaque)) == opaque[..., :3]).all()
    # Red, green, blue and an unspecified band, as GDAL writes it: Pillow reads three of the four
    path = save(tmp_path / "infrared.tif", FOUR_BANDS)
    file = bytearray(path.read_bytes())
    file[file.index(b"\x52\x01\x03\x00\x01\x00\x00\x00\x02") + 8] = 0  # tag 338, ExtraSamples
    path.write_bytes(file)
    assert "it has more bands than the 3 that Pillow reads" in read_error(read_picture, path)
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    pages = save(tmp_path / "x.tif", red, save_all=True, append_images=[blue])
    assert "2 pages or masks; save each as a file of its own" in read_error(read_picture, pages)
    photo = save(tmp_path / "x.jpg", red, format="MPO", save_all=True, append_images=[blue])
    assert read_picture(photo)[..., 0].min() > 200


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("plain.png", IDS * np.uint8(255)),
        ("rgb.png", IN_COLOURS),
        ("noisy.jpg", np.kron(IN_COLOURS, np.ones((7, 7, 1), np.uint8))),
    ],
)
def test_labels(tmp_path, name, label):
    """Values are 0 and 1, or 0 and 255. Those of a JPEG, which has others too, are cut at 128."""
    read = read_picture(save(tmp_path / name, label), decode_label)
    expected = np.kron(IDS, np.ones((7, 7), np.uint8)) if name == "noisy.jpg" else IDS
    assert read.max() in (1, 255) and (read == expected * read.max()).all()


@pytest.mark.parametrize(
    ("decode", "name", "picture", "message"),
    [
        (decode_picture, "four.tif", np.ones((6, 5, 4), np.uint8), "a fourth band, would be lost"),
        (decode_picture, "deep.png", np.zeros((4, 4), np.uint16), "more than 8 bits"),
        (decode_label, "ones.jpg", np.ones((16, 16), np.uint8), "JPEG does not keep 0 and 1"),
        (decode_label, "red.png", np.uint8([[[0, 0, 0], [255, 0, 0]]]), "a label in colour"),
    ],
)
def test_pictures_and_labels_that_are_refused(tmp_path, decode, name, picture, message):
    path = save(tmp_path / name, picture)
    error = read_error(read_picture, path, decode)
    assert error.startswith(f"{path}: cannot be read as a picture: ") and message in error


# Folders


@pytest.mark.parametrize(
    ("layout", "dirs"), [("{split}/{kind}/x{i}", KINDS), ("{kind}/{split}_{i}", ("time1", "T2", "mask"))]
)
def test_a_folder_is_read_and_padded(tmp_path, layout, dirs):
    """Pictures are mirrored beyond their borders, and pixels there do not count."""
    options = {"dirs": dirs, "suffixes": (".PNG", ".tif", ".bmp")}
    pairs = save_set(tmp_path, layout, size=(9, 13), **options)
    pairs["val"][1] = save_pair(tmp_path, layout, 99, size=(17, 5), split="val", i=1, **options)
    (tmp_path / layout.format(kind=dirs[0], split="test", i=2)).write_bytes(b"no picture, which is left out")
    splits = read_folder(tmp_path, 8, 20)
    assert splits.keys() == pairs.keys()
    for split, found in splits.items():
        assert found.shape == (2, 7, 24, 24)
        for x, pair in zip(found, pairs[split], strict=True):
            widths = [(0, 24 - n) for n in pair.shape[1:]]
            assert (x[:6] == np.pad(pair[:6], ((0, 0), *widths), mode="symmetric")).all()
            assert (x[6] == np.pad(pair[6], widths, constant_values=UNCOUNTED)).all()


def test_a_folder_with_a_gap_or_an_odd_size_or_two_conventions_of_labels(tmp_path):
    """The conventions are of all splits: each label alone would be read without an error."""
    pairs = save_set(tmp_path)
    label = save(tmp_path / "val/label/x1.png", pairs["val"][1][6])
    assert f"1 in {label}, 255 in " in read_error(read_folder, tmp_path)
    save(label, np.zeros((3, 3), np.uint8))
    assert "x1.png: height and width (8, 8) differ" in read_error(read_folder, tmp_path)
    label.unlink()
    error = read_error(read_folder, tmp_path)
    assert error == f"{tmp_path}: val has no picture x1 in its folder label"


def test_lists(tmp_path):
    """A line is a name as a whole, or in its first word; with suffixes, folders or spaces."""
    expected = save_set(tmp_path, "{kind}/{split}.{i}")
    expected["test"].insert(0, save_pair(tmp_path, "{kind}/img (1)", 998))
    save_pair(tmp_path, "{kind}/img", 999)  # the first word of a line, which comes first as a whole
    (tmp_path / "list").mkdir()
    (tmp_path / "list/train.txt").write_text("train.1.png\n\n  train.0\t\n")
    (tmp_path / "list/val.txt").write_text("A/val.0.PNG B/val.0.png label/val.0.png\nA\\val.1.tif 1\n")
    (tmp_path / "list/test.txt").write_text("test.1\nimg (1).png\ntest.0")
    for split, pairs in read_folder(tmp_path).items():
        assert (pairs == np.stack(expected[split])).all()


def test_a_folder_is_split_by_a_share(tmp_path):
    """At random and always alike: each pair is in one split, and a fifth are in val and in test."""
    pairs = [save_pair(tmp_path, f"{{kind}}/x{i:02}", 10 + i) for i in range(10)]
    found, again = (read_folder(tmp_path, val_share=0.2, seed=seed) for seed in (3, 9))
    assert {split: len(x) for split, x in found.items()} == {"train": 6, "val": 2, "test": 2}
    drawn, same = ([x.tobytes() for split in y.values() for x in split] for y in (found, again))
    order = [drawn.index(pair.tobytes()) for pair in pairs]
    assert drawn == same and sorted(order) == list(range(10))
    assert {*order[:2]} != {6, 7}  # val is not of the first two


def test_pairs_to_predict(tmp_path):
    """Of two folders, and of three with labels. Neither of two pictures of one name is lost."""
    pairs = [save_pair(tmp_path, f"{{kind}}/x{i}", i, size) for i, size in enumerate([(9, 13), (17, 5)])]
    folders = [tmp_path / kind for kind in KINDS]
    found, labelled = read_pairs(*folders[:2]), read_pairs(*folders)
    shapes = [(name, x.shape, *size) for name, (x, *size) in found.items()]
    assert shapes == [("x0", (1, 7, 16, 16), 9, 13), ("x1", (1, 7, 24, 8), 17, 5)]
    for name, pair in zip(found, pairs, strict=True):
        (x, height, width), (y, *_) = found[name], labelled[name]
        assert (y[0, :, :height, :width] == pair).all()
        assert (x[0, :6] == y[0, :6]).all() and (x[0, 6] == UNCOUNTED).all()
    save(folders[0] / "x1.jpg", np.zeros((17, 5, 3), np.uint8))
    assert "x1.png: same name as x1.jpg; remove one of them" in read_error(read_pairs, *folders[:2])
