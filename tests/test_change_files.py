"""envs_shared/change_folders.py: pictures, layouts of folders, labels, and input that is refused."""

import struct

import numpy as np
import pytest
from PIL import Image
from test_change_pairs import make_args

from envs_shared import change_folders, change_pairs
from envs_shared.change_folders import decode_label, decode_picture, read_picture
from envs_shared.change_pairs import SPLITS, UNCOUNTED

FLAT = "{kind}/{split}_{i}"
KINDS = ("A", "B", "label")
FOUR_BANDS = np.random.default_rng(0).integers(1, 250, (6, 5, 4), np.uint8)
IDS = np.array([[0, 1, 1], [1, 0, 0]], np.uint8)
IN_COLOURS = np.repeat(IDS[..., None] * np.uint8(255), 3, 2)
COLOURS = [0, 0, 0, 128, 0, 0, 0, 128, 0]


def read_folder(path, patch_size=4, image_size=8, splits=SPLITS, **changes):
    args = make_args(data_dir=str(path), patch_size=patch_size, image_size=image_size, **changes)
    return change_folders.read_splits(args, splits)


def read_pairs(*paths, **changes):
    """Read pairs to predict."""
    return change_folders.read_pairs(make_args(predict=[str(path) for path in paths], **changes))


def read_error(read, *inputs, **changes):
    """What a reader says, in one line, to input that it refuses."""
    with pytest.raises(ValueError) as error:
        read(*inputs, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def save(path, x, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (x if isinstance(x, Image.Image) else Image.fromarray(x)).save(path, **options)
    return path


def save_pair(root, layout, seed, dirs=KINDS, suffixes=(".png",) * 3, size=(8, 8), **names):
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


@pytest.fixture
def plain(tmp_path):
    """A folder with two pairs in each split, one of them of another size."""
    pairs = save_set(tmp_path, size=(9, 13))
    pairs["val"][1] = save_pair(tmp_path, "val/{kind}/x1", 99, size=(17, 5))
    return tmp_path, pairs


# Pictures


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
    assert "2 pages; save each as a file of its own" in read_error(read_picture, pages)
    photo = save(tmp_path / "x.jpg", red, format="MPO", save_all=True, append_images=[blue])
    assert read_picture(photo)[..., 0].min() > 200


def test_four_bands(tmp_path, monkeypatch):
    """With NUM_BANDS = 4 all four are read; a picture of three, and the task haze, are refused."""
    four = save(tmp_path / "four.png", FOUR_BANDS)
    monkeypatch.setattr(change_pairs, "NUM_BANDS", 4)
    pair = change_folders.read_pair([four, four])
    both = np.concatenate((FOUR_BANDS, FOUR_BANDS), 2).transpose(2, 0, 1)
    assert pair.shape == (9, 6, 5) and (pair[:8] == both).all()
    three = save(tmp_path / "three.png", FOUR_BANDS[..., :3])
    assert "it has 3 bands, and NUM_BANDS is 4" in read_error(read_picture, three)
    assert "haze: has 3 bands, and NUM_BANDS is 4" in read_error(change_pairs.draw_splits, make_args())


# Labels


def palette_label(ids, palette, **info):
    image = Image.fromarray(ids)
    image.putpalette(palette)
    image.info |= info
    return image


def with_alpha(alpha):
    return np.dstack((IN_COLOURS, np.broadcast_to(np.uint8(alpha), IDS.shape)))


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("plain.png", IDS * np.uint8(255)),
        ("bits.png", IDS.astype(bool)),
        ("1.bmp", IDS),
        ("bits.tif", IDS.astype(bool)),
        ("rgb.png", IN_COLOURS),
        ("opaque.png", with_alpha(255)),
        ("indices.png", palette_label(IDS, COLOURS)),
        ("white_first.png", palette_label(1 - IDS, [255, 255, 255, 0, 0, 0])),
        ("lossless.jpg", IDS),
    ],
)
def test_labels(tmp_path, name, label):
    path = save(tmp_path / name, label, format="PNG" if name == "lossless.jpg" else None)
    read = read_picture(path, decode_label)
    values = IDS * read.max()  # 0 and 1, or 0 and 255
    assert read.dtype == np.uint8 and read.max() in (1, 255) and read.tolist() == values.tolist()


def test_jpeg_labels_are_cut_at_128(tmp_path):
    noisy = np.kron(IN_COLOURS, np.ones((7, 7, 1), np.uint8))
    path = save(tmp_path / "y.JPEG", noisy, quality=60)
    assert len(np.unique(np.array(Image.open(path)))) > 2
    assert read_picture(path, decode_label).tolist() == noisy[..., 0].tolist()


FOURTH, TRANSPARENT = "a fourth band, would be lost", "a label with transparency, which would be lost"


@pytest.mark.parametrize(
    ("decode", "name", "picture", "message"),
    [
        (decode_picture, "four.png", FOUR_BANDS, FOURTH),
        (decode_picture, "four.tif", FOUR_BANDS, FOURTH),
        (decode_picture, "clear.png", Image.new("LA", (2, 2)), FOURTH),
        (decode_picture, "deep.png", np.zeros((4, 4), np.uint16), "more than 8 bits"),
        (decode_label, "deep.tif", np.float32([[0, 1]]), "more than 8 bits"),
        (decode_picture, "print.jpg", Image.new("CMYK", (2, 2)), "CMYK"),
        (decode_label, "ones.jpg", np.ones((16, 16), np.uint8), "JPEG does not keep 0 and 1"),
        (decode_label, "red.png", np.uint8([[[0, 0, 0], [255, 0, 0]]]), "a label in colour"),
        (decode_label, "x.png", with_alpha([[255, 255, 254], [255, 255, 255]]), TRANSPARENT),
        (decode_label, "grey.png", np.dstack((IDS * 0, IDS * np.uint8(255))), TRANSPARENT),
        (decode_label, "index.png", palette_label(IDS, COLOURS, transparency=1), TRANSPARENT),
        (decode_label, "x.png", palette_label(IDS, COLOURS, transparency=bytes([255, 9, 255])), TRANSPARENT),
    ],
)
def test_pictures_and_labels_that_are_refused(tmp_path, decode, name, picture, message):
    path = save(tmp_path / name, picture)
    error = read_error(read_picture, path, decode)
    assert error.startswith(f"{path}: cannot be read as a picture: ") and message in error


def test_colours_that_are_multiplied_by_alpha_are_refused(tmp_path, monkeypatch):
    """Pillow would divide them by the fourth band, which may be near infrared. Tag 338 of a file says so."""
    monkeypatch.setattr(change_pairs, "NUM_BANDS", 4)
    path = save(tmp_path / "x.tif", FOUR_BANDS)
    assert (read_picture(path) == FOUR_BANDS).all()
    tag = struct.pack("<HHI", 338, 3, 1)
    path.write_bytes(path.read_bytes().replace(tag + b"\2", tag + b"\1"))
    assert "premultiplied alpha" in read_error(read_picture, path)


# Folders


def test_a_folder_is_read_and_padded(plain):
    """Pictures are mirrored beyond their borders, and pixels there do not count."""
    path, pairs = plain
    splits = read_folder(path, 8, 20)
    assert splits.keys() == pairs.keys()
    for split, found in splits.items():
        assert found.shape == (2, 7, 24, 24)
        for x, pair in zip(found, pairs[split], strict=True):
            widths = [(0, 24 - n) for n in pair.shape[1:]]
            assert (x[:6] == np.pad(pair[:6], ((0, 0), *widths), mode="symmetric")).all()
            assert (x[6] == np.pad(pair[6], widths, constant_values=UNCOUNTED)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_folder_with_a_gap_or_an_odd_size(plain, kind):
    path, _ = plain
    (path / "val" / kind / "x1.png").rename(path / "gone")
    assert read_error(read_folder, path) == f"{path}: val has no picture x1 in its folder {kind}"
    save(path / "val" / kind / "x1.png", np.zeros((3, 3), np.uint8))
    error = read_error(read_folder, path)
    assert "x1.png: height and width (" in error and "(17, 5)" in error and "(3, 3)" in error


def test_a_folder_has_one_convention_of_labels(plain):
    """Over all splits: each file alone would be read without an error."""
    path, pairs = plain
    label = save(path / "val" / "label" / "x0.png", pairs["val"][0][6])
    error = read_error(read_folder, path)
    assert f"1 in {label}, 255 in " in error and "; needed are 0 and 1 in all" in error


def write_lists(root, lists):
    """Write the lists of some splits; those of the others name all of their pictures."""
    (root / "list").mkdir(exist_ok=True)
    for split in SPLITS:
        text = lists.get(split, f"{split}_0\n{split}_1.png\n")
        (root / "list" / f"{split}.txt").write_bytes(text.encode())


def check(path, expected):
    splits = read_folder(path)
    assert list(splits) == list(SPLITS)
    for split, pairs in splits.items():
        assert pairs.dtype == np.uint8 and (pairs == np.stack(expected[split])).all()


@pytest.mark.parametrize("dirs", [("A", "B", "label"), ("time1", "time2", "mask"), ("T1", "T2", "GT")])
def test_split_folders_with_other_names_and_suffixes(tmp_path, dirs):
    """Other files are left out."""
    expected = save_set(tmp_path, dirs=dirs, suffixes=(".PNG", ".tif", ".bmp"))
    (tmp_path / "train" / dirs[0] / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "train" / dirs[1] / "._x0.png").write_bytes(b"x")
    check(tmp_path, expected)


def test_lists(tmp_path):
    """A line is a name as a whole, or in its first word; with suffixes, folders, an encoding's mark, or
    spaces."""
    expected = save_set(tmp_path, "{kind}/p.{split}_{i}")
    save_pair(tmp_path, "{kind}/unlisted", 999)
    expected["test"].insert(0, save_pair(tmp_path, "{kind}/img (1)", 998))
    save_pair(tmp_path, "{kind}/img", 999)  # the first word of a line, which comes first as a whole
    lists = {
        "train": "\ufeffp.train_1.png\n\n  p.train_0\t\n",
        "val": "A/p.val_0.PNG B/p.val_0.png label/p.val_0.png\r\nA\\p.val_1.tif 1\r\n",
        "test": "p.test_1\nimg (1).png\np.test_0",
    }
    write_lists(tmp_path, lists)
    check(tmp_path, expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("val_0\n\nval_9.png\n", "val.txt:3: val_9 is not among the pictures"),
        ("val_0\nA/val_0.png\n", "val.txt:2: val_0 is listed twice"),
        (" \n\n", "no val pictures"),
    ],
)
def test_bad_lists(tmp_path, text, message):
    save_set(tmp_path, FLAT)
    write_lists(tmp_path, {"val": text})
    assert message in read_error(read_folder, tmp_path)


def test_names_that_begin_with_the_split(tmp_path):
    expected = save_set(tmp_path, FLAT)
    expected["val"].insert(0, save_pair(tmp_path, "{kind}/Val-7", 999))
    check(tmp_path, expected)
    save_pair(tmp_path, "{kind}/value_1", 999)
    assert ": value_1 does not begin with a split; needed are" in read_error(read_folder, tmp_path)
    for file in [*tmp_path.glob("*/value_1.png"), *tmp_path.glob("*/test*")]:
        file.unlink()
    assert ": no test pictures; needed are" in read_error(read_folder, tmp_path)


def test_a_folder_is_split_by_a_share(tmp_path):
    """At random and always alike: each pair is in one split, and a fifth are in val and in test."""
    pairs = [save_pair(tmp_path, f"{{kind}}/x{i:02}", 10 + i) for i in range(10)]
    found = read_folder(tmp_path, val_share=0.2)
    assert {split: len(x) for split, x in found.items()} == {"train": 6, "val": 2, "test": 2}
    for split, x in read_folder(tmp_path, val_share=0.2, seed=9).items():
        assert (x == found[split]).all()
    drawn = [x.tobytes() for split in found.values() for x in split]
    order = [drawn.index(pair.tobytes()) for pair in pairs]
    assert sorted(order) == list(range(10)) and {*order[:2]} != {6, 7}  # val is not of the first two
    assert ": x00 does not begin with a split; needed are" in read_error(read_folder, tmp_path)
    write_lists(tmp_path, {split: f"x0{i}\n" for i, split in enumerate(SPLITS)})
    assert "is split already; leave out --val-share" in read_error(read_folder, tmp_path, val_share=0.2)
    assert [len(x) for x in read_folder(tmp_path).values()] == [1, 1, 1]


# To predict


def test_pairs_to_predict(plain):
    """Of two folders, of three with labels, and of two pictures."""
    path, pairs = plain
    folders = [path / "val" / kind for kind in KINDS]
    found, labelled = read_pairs(*folders[:2]), read_pairs(*folders)
    shapes = [(name, x.shape, *size) for name, (x, *size) in found.items()]
    assert shapes == [("x0", (1, 7, 16, 16), 9, 13), ("x1", (1, 7, 24, 8), 17, 5)]
    for (x, height, width), (y, *_), pair in zip(
        found.values(), labelled.values(), pairs["val"], strict=True
    ):
        assert (y[0, :, :height, :width] == pair).all()
        assert (x[0, :6] == y[0, :6]).all() and (x[0, 6] == UNCOUNTED).all()
    ((name, (x, *_)),) = read_pairs(path / "val/A/x0.png", path / "val/B/x0.png").items()
    assert name == "x0" and (x == found["x0"][0]).all()
    # A picture must be larger than a border of one cell, which is mirrored
    small = save(path / "small.png", np.zeros((3, 8, 3), np.uint8))
    ((x, *size),) = read_pairs(small, small, cell_size=8).values()
    assert x.shape == (1, 7, 16, 16) and size == [3, 8]


def test_folders_to_predict(plain):
    """Suffixes may differ, other files are left out, and neither of two pictures of one name is lost."""
    path, pairs = plain
    folders = path / "val" / "A", path / "val" / "B"
    (folders[0] / "notes.txt").write_text("x")
    (folders[1] / "x0.png").unlink()
    save(folders[1] / "x0.bmp", pairs["val"][0][3:6].transpose(1, 2, 0))
    found = read_pairs(*folders)
    assert list(found) == ["x0", "x1"]
    assert (found["x0"][0][0, :6, :9, :13] == pairs["val"][0][:6]).all()
    twin = save(folders[0] / "x1.jpg", np.zeros((17, 5, 3), np.uint8))
    assert "x1.png: same name as x1.jpg; remove one of them" in read_error(read_pairs, *folders)
    twin.unlink()
    (folders[1] / "x1.png").unlink()
    assert "val/B: has no picture x1 in its folder B" in read_error(read_pairs, *folders)
