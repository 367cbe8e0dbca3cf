"""Change-detection data sets: layouts, label values, broken input, leaks between the splits, crops and maps."""

import os
import re
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from envs_shared.change_tasks import files as change_files
from envs_shared.change_tasks.files import IGNORE, SPLITS, Split, read_data_dir

DIRS = ("A", "B", "label")


def noise(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def save(path, x, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (x if isinstance(x, Image.Image) else Image.fromarray(x)).save(path, **options)
    return path


def save_pair(root, name, seed, size=(6, 8), dirs=DIRS, suffixes=(".png", ".png", ".png")):
    """Write a pair of noise whose label is 255 where its B is bright; return images and class ids as they are read."""
    images = noise(seed, 2, *size, 3)
    is_changed = images[1, ..., 0] > 200
    for folder, suffix, x in zip(dirs, suffixes, (*images, is_changed * np.uint8(255)), strict=True):
        save(root / folder / f"{name}{suffix}", x)
    return images, is_changed


def make_set(root, counts=(3, 2, 2), **options):
    """A data set with a folder for each split, of pairs named x0, x1, ...; {split: what `save_pair` returned}."""
    return {
        split: [save_pair(root / split, f"x{i}", 100 * k + i, **options) for i in range(count)]
        for k, (split, count) in enumerate(zip(SPLITS, counts, strict=True))
    }


def make_flat_set(root, prefix=""):
    """Pairs train_0, train_1, val_0, ... in one set of folders, their names after `prefix`."""
    return {
        split: [save_pair(root, f"{prefix}{split}_{i}", 100 * k + i) for i in range(2)]
        for k, split in enumerate(SPLITS)
    }


def check(splits, expected, names):
    assert list(splits) == list(SPLITS)
    for name, split in splits.items():
        assert split.names == names[name]
        for image, label, (pair, is_changed) in zip(split.images, split.labels, expected[name], strict=True):
            assert image.dtype == label.dtype == np.uint8 and image.shape == (2, *label.shape, 3)
            assert (image == pair).all() and label.tolist() == is_changed.astype(int).tolist()


def read_error(path, *args, **kwargs):
    """What `read_data_dir` says to a data set that it refuses, of one line."""
    with pytest.raises(ValueError) as error:
        read_data_dir(path, *args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# Layouts


def test_split_folders_with_mixed_suffixes_and_other_files(tmp_path):
    expected = make_set(tmp_path, (12, 1, 2), suffixes=(".PNG", ".tif", ".bmp"))
    (tmp_path / "train" / "A" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "train" / "B" / "._x0.png").write_bytes(b"x")
    (tmp_path / "list").mkdir()  # the folders of the splits come first
    order = [0, 1, 10, 11, *range(2, 10)]
    expected["train"] = [expected["train"][i] for i in order]
    names = {"train": [f"x{i}" for i in order], "val": ["x0"], "test": ["x0", "x1"]}
    check(read_data_dir(tmp_path), expected, names)
    check(read_data_dir(str(tmp_path)), expected, names)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    make_set(tmp_path)

    def refuse(folder):  # root may read everywhere
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert read_error(tmp_path) == f"{tmp_path / 'train' / 'A'}: Permission denied"


def test_other_folder_names(tmp_path):
    expected = make_set(tmp_path, (1, 1, 1), dirs=("time1", "time2", "gt/binary"))
    splits = read_data_dir(tmp_path, dir_names=("time1", "time2", "gt/binary"))
    check(splits, expected, {split: ["x0"] for split in SPLITS})


def test_lists(tmp_path):
    expected = make_flat_set(tmp_path, "p.")
    save_pair(tmp_path, "unlisted", 999)
    (tmp_path / "list").mkdir()
    lines = {
        "train": "\ufeffp.train_1.png\n\n  p.train_0\t\n",
        "val": "A/p.val_0.PNG B/p.val_0.png label/p.val_0.png\r\nA\\p.val_1.tif 1\r\n",
        "test": "p.test_1\np.test_0",
    }
    for split, text in lines.items():
        (tmp_path / "list" / f"{split}.txt").write_bytes(text.encode())
    check(read_data_dir(tmp_path), expected, {s: [f"p.{s}_0", f"p.{s}_1"] for s in SPLITS})


def test_names_that_begin_with_the_split(tmp_path):
    expected = make_flat_set(tmp_path)
    expected["val"].insert(0, save_pair(tmp_path, "Val-7", 999))
    names = {split: [f"{split}_0", f"{split}_1"] for split in SPLITS}
    check(read_data_dir(tmp_path), expected, names | {"val": ["Val-7", *names["val"]]})


# Pictures and labels


def test_grey_transparent_and_palette_images_become_rgb(tmp_path):
    grey, rgba = noise(0, 5, 4), noise(1, 5, 4, 4)
    three = np.repeat(grey[..., None], 3, 2)
    assert (change_files.read_image(save(tmp_path / "l.png", grey)) == three).all()
    assert (change_files.read_image(save(tmp_path / "rgba.png", rgba)) == rgba[..., :3]).all()
    assert (change_files.read_image(save(tmp_path / "la.png", np.stack([grey, grey // 2], 2))) == three).all()
    palette = Image.fromarray(grey % 4)
    palette.putpalette([10, 20, 30, 200, 0, 0, 0, 200, 0, 1, 2, 3])
    colours = np.array([[10, 20, 30], [200, 0, 0], [0, 200, 0], [1, 2, 3]])[grey % 4]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"transparency": bytes([0, 128, 255, 255])}):
            read = change_files.read_image(save(tmp_path / "p.png", palette, **options))
            assert read.dtype == np.uint8 and (read == colours).all()


def write_deep_png(path):
    """A PNG of 1 x 1 pixel with 16 bits a colour."""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(7))),
        (b"IEND", b""),
    )
    parts = [
        struct.pack(">I", len(x)) + tag + x + struct.pack(">I", zlib.crc32(tag + x)) for tag, x in chunks
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
    return path


def test_pictures_of_more_than_8_bits_are_refused(tmp_path):
    save(tmp_path / "grey.png", noise(0, 4, 4).astype(np.uint16))
    save(tmp_path / "float.tif", noise(0, 4, 4).astype(np.float32))
    write_deep_png(tmp_path / "rgb.png")
    for name in ("grey.png", "float.tif", "rgb.png"):
        with pytest.raises(ValueError, match=rf"{name}: .*convert it to 8"):
            change_files.read_image(tmp_path / name)


IDS = np.array([[0, 1, 1], [1, 0, 0]])
COLOURS = [0, 0, 0, 128, 0, 0, 0, 128, 0]


def palette_label(ids, palette):
    image = Image.fromarray(ids.astype(np.uint8))
    image.putpalette(palette)
    return image


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("255.png", (IDS * 255).astype(np.uint8)),
        ("1.bmp", IDS.astype(np.uint8)),
        ("bits.png", IDS.astype(bool)),
        ("bits.tif", IDS.astype(bool)),
        ("deep.png", (IDS * 255).astype(np.uint16)),
        ("float.tif", IDS.astype(np.float32)),
        ("rgb.png", np.repeat(IDS[..., None] * 255, 3, 2).astype(np.uint8)),
        (
            "rgba.png",
            np.concatenate([np.repeat(IDS[..., None], 3, 2), noise(0, 2, 3, 1)], 2).astype(np.uint8),
        ),
        ("indices.png", palette_label(IDS, COLOURS)),
        ("greys.png", palette_label(IDS, [0, 0, 0, 255, 255, 255])),
        ("white_first.png", palette_label(1 - IDS, [255, 255, 255, 0, 0, 0])),
        ("lossless.jpg", IDS.astype(np.uint8)),
    ],
)
def test_binary_labels(tmp_path, name, label):
    path = save(tmp_path / name, label, format="PNG" if name == "lossless.jpg" else None)
    read = change_files.read_label(path)
    assert read.dtype == np.uint8 and read.tolist() == IDS.tolist()


@pytest.mark.parametrize(("value", "expected"), [(0, 0), (1, 1), (255, 1)])
def test_binary_labels_of_one_value(tmp_path, value, expected):
    path = save(tmp_path / "x.png", np.full((3, 2), value, np.uint8))
    assert change_files.read_label(path).tolist() == [[expected] * 2] * 3


def test_jpeg_labels_are_cut_at_128(tmp_path):
    halves = (
        np.repeat([[0, 127], [128, 255]], 8, 1).repeat(8, 0).astype(np.uint8)
    )  # blocks of JPEG, kept but for 127
    path = save(tmp_path / "x.jpg", halves, quality=100)
    stored = np.array(Image.open(path))
    assert {stored[0, 8], stored[8, 0]} == {127, 128}
    assert change_files.read_label(path).tolist() == (halves >= 128).astype(int).tolist()
    noisy = np.kron(IDS, np.ones((7, 7))).astype(np.uint8) * 255
    path = save(tmp_path / "y.JPEG", np.repeat(noisy[..., None], 3, 2), quality=60)
    assert len(np.unique(np.array(Image.open(path)))) > 2
    assert change_files.read_label(path).tolist() == (noisy > 0).astype(int).tolist()


@pytest.mark.parametrize(
    ("label", "num_classes", "message"),
    [
        ([[0, 254, 255]], 2, "value 254 in a label of 2 classes, which are either 0 and 255 or 0 and 1"),
        ([[0, 1, 255]], 2, "value 255 in a label of 2 classes"),
        ([[0, 1, 2]], 2, "value 2 in"),
        ([[0, 3, 4]], 4, "value 4 in a label of 4 classes, which are 0 to 3"),
        ([[0, 255]], 7, "value 255 in a label of 7"),
        ([[0.0, 0.5]], 2, "value 0.5 in"),
        ([[0.0, np.nan]], 2, "value nan in"),
        ([[0, 65535]], 2, "value 65535 in"),
    ],
)
def test_other_label_values_are_named(tmp_path, label, num_classes, message):
    label = np.array(label)
    deep = np.float32 if label.dtype == float else np.uint16 if label.max() > 255 else np.uint8
    path = save(tmp_path / "x.tif", label.astype(deep))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        change_files.read_label(path, num_classes)


def test_labels_of_several_classes(tmp_path):
    ids = noise(0, 4, 5) % 5
    for name, label in (("a.png", ids), ("b.png", palette_label(ids, [*COLOURS, 0, 0, 128, 9, 8, 7]))):
        read = change_files.read_label(save(tmp_path / name, label), 5)
        assert read.dtype == np.uint8 and (read == ids).all()
    assert (change_files.read_label(tmp_path / "a.png", 255) == ids).all()


def test_labels_that_hold_no_class_ids(tmp_path):
    save(tmp_path / "colour.png", noise(0, 4, 4, 3))
    save(tmp_path / "ones.jpg", np.ones((16, 16), np.uint8), quality=95)
    save(tmp_path / "classes.jpg", np.full((16, 16), 128, np.uint8))
    for name, num_classes, message in (
        ("colour.png", 2, "a label in colour"),
        ("ones.jpg", 2, "JPEG does not keep class ids"),
        ("classes.jpg", 200, "JPEG does not keep class ids"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            change_files.read_label(tmp_path / name, num_classes)


def test_unreadable_pictures(tmp_path, monkeypatch):
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "folder.png").mkdir()
    for suffix in ("png", "jpg", "bmp", "tif"):
        path = save(tmp_path / f"cut.{suffix}", noise(0, 40, 40, 3))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    names = [
        "text.png",
        "empty.png",
        "folder.png",
        "missing.png",
        *(f"cut.{x}" for x in ("png", "jpg", "bmp", "tif")),
    ]
    for read in (change_files.read_image, change_files.read_label):
        for name in names:
            with pytest.raises(ValueError, match=rf"^{tmp_path / name}: cannot be read as a picture: .+$"):
                read(tmp_path / name)
    path = save(tmp_path / "big.png", noise(0, 11, 10, 3))
    for limit in (100, 50):  # Pillow warns above the limit, and raises above twice that
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(ValueError, match=r"big\.png: cannot be read as a picture: .*110 pixels"):
            change_files.read_image(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 110)
    assert change_files.read_image(path).shape == (11, 10, 3)


# Data sets that are refused


def test_missing_folders(tmp_path):
    assert read_error(tmp_path / "nothing") == f"{tmp_path / 'nothing'}: no such folder"
    (tmp_path / "file").write_text("x")
    assert read_error(tmp_path / "file") == f"{tmp_path / 'file'}: no such folder"
    message = read_error(tmp_path)
    assert message.startswith(f"{tmp_path}: no layout that is known; needed are ")
    for part in (
        "train/A/x.png",
        "A/x.png and list/train.txt",
        "A/train_x.png",
        "B and label",
        "--dir-names",
    ):
        assert part in message
    make_set(tmp_path)
    for split in SPLITS:
        (tmp_path / split).rename(tmp_path / "away")
        assert read_error(tmp_path).startswith(f"{tmp_path / split / 'A'}: no such folder; needed are")
        (tmp_path / "away").rename(tmp_path / split)
    (tmp_path / "val" / "label").rename(tmp_path / "val" / "mask")
    assert read_error(tmp_path).startswith(f"{tmp_path / 'val' / 'label'}: no such folder; needed are")
    (tmp_path / "val" / "mask").rename(tmp_path / "val" / "label")
    assert read_error(tmp_path, dir_names=("t1", "B", "label")).startswith(
        f"{tmp_path / 'train' / 't1'}: no such"
    )


@pytest.mark.parametrize(
    "dir_names", [("A", "B"), ("A", "B", "A"), ("A", "B", "A", "label"), ("A", "B", ""), ("A", "A/", "label")]
)
def test_bad_folder_names(tmp_path, dir_names):
    make_set(tmp_path)
    assert read_error(tmp_path, dir_names=dir_names).startswith("--dir-names are three different folders")


@pytest.mark.parametrize("num_classes", [1, 256])
def test_bad_number_of_classes(tmp_path, num_classes):
    make_set(tmp_path)
    assert read_error(tmp_path, num_classes) == f"num_classes is {num_classes}, it must be from 2 to 255"


@pytest.mark.parametrize("dir_name", DIRS)
def test_a_pair_with_a_gap(tmp_path, dir_name):
    make_set(tmp_path)
    make_flat_set(tmp_path / "flat")
    (tmp_path / "test" / dir_name / "x1.png").unlink()
    assert read_error(tmp_path) == f"{tmp_path / 'test' / dir_name}: no picture x1 for its pair"
    (tmp_path / "flat" / dir_name / "val_1.png").unlink()
    assert read_error(tmp_path / "flat") == f"{tmp_path / 'flat' / dir_name}: no picture val_1 for its pair"


@pytest.mark.parametrize("dir_name", DIRS)
def test_two_pictures_of_one_name(tmp_path, dir_name):
    make_set(tmp_path)
    file = save(tmp_path / "val" / dir_name / "x0.tif", noise(0, 6, 8))
    assert read_error(tmp_path) == f"{file}: same name as x0.png, remove one of them"


@pytest.mark.parametrize("dir_name", DIRS)
def test_sizes_that_differ(tmp_path, dir_name):
    make_set(tmp_path)
    shape = (6, 7) if dir_name == "label" else (6, 7, 3)
    file = save(tmp_path / "val" / dir_name / "x0.png", noise(0, *shape) // 255)
    message = read_error(tmp_path)
    assert str(file) in message and "(6, 7)" in message and "(6, 8)" in message


def test_empty_splits(tmp_path):
    make_set(tmp_path / "a")
    for dir_name in DIRS:
        for file in (tmp_path / "a" / "val" / dir_name).iterdir():
            file.rename(file.with_suffix(".txt"))
    assert read_error(tmp_path / "a").startswith(f"{tmp_path / 'a' / 'val'}: no val pictures (.png ")
    make_flat_set(tmp_path / "b")
    for dir_name in DIRS:
        for file in (tmp_path / "b" / dir_name).glob("test*"):
            file.unlink()
    assert read_error(tmp_path / "b").startswith(f"{tmp_path / 'b'}: no test pictures")


@pytest.mark.parametrize("name", ["value_1", "testing_1", "x_train", "1"])
def test_names_of_no_split(tmp_path, name):
    make_flat_set(tmp_path)
    save_pair(tmp_path, name, 999)
    assert read_error(tmp_path).startswith(f"{tmp_path}: {name} begins with no split; needed are")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("val_0\n\nval_9.png\n", "val.txt:3: val_9 is not among the files"),
        ("val_0\nA/val_0.png\n", "val.txt:2: val_0 is listed twice"),
        (" \n\n", "no val pictures"),
        (None, "val.txt: No such file or directory; lists of train, val and test are needed"),
    ],
)
def test_bad_lists(tmp_path, text, message):
    make_flat_set(tmp_path)
    for split in SPLITS:
        save(tmp_path / "list" / f"{split}.png", noise(0, 2, 2))
        (tmp_path / "list" / f"{split}.txt").write_text(f"{split}_0\n{split}_1.png\n")
    read_data_dir(tmp_path)
    (tmp_path / "list" / "val.txt").unlink()
    if text is not None:
        (tmp_path / "list" / "val.txt").write_text(text)
    assert message in read_error(tmp_path)


def test_errors_in_files_name_them(tmp_path):
    make_set(tmp_path)
    file = save(tmp_path / "test" / "label" / "x1.png", np.full((6, 8), 3, np.uint8))
    assert read_error(tmp_path).startswith(f"{file}: value 3 in a label of 2 classes")
    assert read_error(tmp_path, 3).startswith(
        f"{tmp_path / 'train' / 'label' / 'x0.png'}: value 255 in a label of 3"
    )
    save(file, np.zeros((6, 8), np.uint8))
    file = tmp_path / "train" / "B" / "x1.png"
    file.write_bytes(b"x")
    assert read_error(tmp_path).startswith(f"{file}: cannot be read as a picture")


# Leaks


@pytest.mark.parametrize(("copy", "original"), [("A", "A"), ("B", "B"), ("A", "B"), ("B", "A")])
@pytest.mark.parametrize(("split", "other"), [("test", "train"), ("val", "train"), ("test", "val")])
def test_a_picture_in_two_splits_is_refused(tmp_path, split, other, copy, original):
    images = make_set(tmp_path)[other][1][0]
    read_data_dir(tmp_path)
    (tmp_path / split / copy / "x0.png").unlink()
    twin = save(
        tmp_path / split / copy / "x0.tif", images[DIRS.index(original)]
    )  # the same pixels, other bytes
    twins = f"{twin} and {tmp_path / other / original / 'x1.png'}"
    assert read_error(tmp_path) == f"1 of 4 {split} pictures are also in {other}, for example {twins}"


def test_the_splits_that_share_most_are_named(tmp_path):
    train = make_set(tmp_path, (6, 2, 5))["train"]
    for i in range(2):
        save(tmp_path / "test" / "A" / f"x{i}.png", train[i][0][0])
        save(tmp_path / "test" / "B" / f"x{i}.png", train[i][0][1])  # 4 of 10
        save(tmp_path / "val" / "A" / f"x{i}.png", train[i + 2][0][0])
    assert read_error(tmp_path).startswith("2 of 4 val pictures are also in train, ")
    save(tmp_path / "test" / "A" / "x2.png", train[2][0][0])  # 5 of 10, and one is in val too
    assert read_error(tmp_path).startswith("5 of 10 test pictures are also in train, ")


def test_blank_pictures_and_repetitions_within_a_split_are_no_leaks(tmp_path):
    expected = make_set(tmp_path)
    for split in SPLITS:
        save(tmp_path / split / "B" / "x0.png", np.full((6, 8, 3), (7, 8, 9), np.uint8))
    save(tmp_path / "train" / "A" / "x0.png", expected["train"][1][0][0])
    assert [len(split.names) for split in read_data_dir(tmp_path).values()] == [3, 2, 2]
    nearly = np.full((6, 8, 3), 7, np.uint8)
    nearly[5, 7, 2] = 8
    for split in ("train", "test"):
        save(tmp_path / split / "B" / "x1.png", nearly)
    assert "also in train" in read_error(tmp_path)


def test_pictures_of_the_same_bytes_but_other_shape_are_no_leak(tmp_path):
    make_set(tmp_path)
    for split, size in (("val", (6, 8)), ("test", (8, 6))):
        for dir_name in DIRS[:2]:
            save(tmp_path / split / dir_name / "x0.png", noise(1000 + DIRS.index(dir_name), *size, 3))
        save(tmp_path / split / "label" / "x0.png", np.zeros(size, np.uint8))
    assert read_data_dir(tmp_path)["test"].images[0].shape == (2, 8, 6, 3)


# Audit, crops and maps


def test_audit():
    labels = [np.zeros((4, 6), np.uint8), np.eye(5, dtype=np.uint8), np.zeros((10, 2), np.uint8)]
    images = [np.zeros((2, *x.shape, 3), np.uint8) for x in labels]
    labels[2][0, 0] = 3
    splits = {"train": Split(images, labels, ["a", "b", "c"]), "val": Split(images[:1], labels[:1], ["a"])}
    assert change_files.audit(splits) == [
        "train: 3 pairs, height x width 10x2 to 5x5, classes 0 1 3, 8.70 % changed, 1 pairs without change",
        "val: 1 pairs, height x width 4x6, classes 0, 0.00 % changed, 1 pairs without change",
    ]


@given(
    st.integers(1, 7).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.integers(size, 20), st.integers(size, 20)), min_size=1, max_size=3),
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_each_pixel_counts_once_in_crops(drawn):
    size, shapes = drawn
    labels, images, first = [], [], 0
    for i, (h, w) in enumerate(shapes):
        # picture, row and column of each pixel, in A; in B its label
        place = np.stack(np.broadcast_arrays(np.uint8(i), *np.ogrid[:h, :w]), -1).astype(np.uint8)
        labels.append(noise(i, h, w) % 255)
        images.append(np.stack([place, np.repeat(labels[-1][..., None], 3, 2)]))
    x, y = change_files.cut(Split(images, labels, [str(s) for s in shapes]), size)
    assert (
        x.dtype == y.dtype == np.uint8
        and x.shape == (len(y), 2, size, size, 3)
        and y.shape[1:] == (size, size)
    )
    counts = y != IGNORE
    places = [tuple(p) for p in x[:, 0][counts]]
    assert len(places) == len(set(places)) == sum(h * w for h, w in shapes)
    assert (x[:, 1, ..., 0][counts] == y[counts]).all()  # each with its own label
    for i, (h, w) in enumerate(shapes):
        columns, rows = -(-w // size), -(-h // size)
        crops = x[first : first + rows * columns, 0]
        corners = [
            (i, min(r * size, h - size), min(c * size, w - size)) for r in range(rows) for c in range(columns)
        ]
        assert crops[:, 0, 0].tolist() == [list(corner) for corner in corners]
        assert (
            crops[:, -1, -1] - crops[:, 0, 0] == [0, size - 1, size - 1]
        ).all()  # of the picture's own pixels
        first += rows * columns
    assert first == len(x)


def test_pictures_smaller_than_a_crop():
    labels = [np.zeros((8, 8), np.uint8), np.zeros((8, 7), np.uint8)]
    split = Split([np.zeros((2, *x.shape, 3), np.uint8) for x in labels], labels, ["wide", "narrow"])
    change_files.check_sizes(split, 7, "set: val")
    assert change_files.cut(split, 7)[1].shape == (6, 7, 7)
    for size, name in ((8, "narrow"), (9, "wide"), (0, "wide"), (-1, "wide")):
        with pytest.raises(
            ValueError, match=f"^set: val picture {name}: smaller than a crop of {size} pixels"
        ):
            change_files.check_sizes(split, size, "set: val")


def test_pictures_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    grey = noise(0, 5, 7)
    change_files.write_picture(tmp_path / "x.png", grey)
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG" and image.mode == "L" and (np.array(image) == grey).all()
    with pytest.raises(ValueError, match=f"^{tmp_path / 'folder/x.png'}: No such file or directory$"):
        change_files.write_picture(tmp_path / "folder/x.png", grey)

    def fail(source, target):
        assert os.path.getsize(source) > 0 and not os.path.exists(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ValueError, match="No space left on device"):
        change_files.write_picture(tmp_path / "y.png", grey)
    assert os.listdir(tmp_path) == ["x.png"]
