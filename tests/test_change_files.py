"""envs_shared/change_folders.py: other layouts of folders, other forms of labels, and input that is refused."""

import re

import numpy as np
import pytest
from PIL import Image
from test_change_pairs import read_folder, read_label, save, save_pair, save_set

from envs_shared.change_pairs import SPLITS

FLAT = "{kind}/{split}_{i}"


def write_lists(root, lists):
    """Write the lists of some splits; those of the others name all of their pictures."""
    (root / "list").mkdir(exist_ok=True)
    for split in SPLITS:
        text = lists.get(split, f"{split}_0\n{split}_1.png\n")
        (root / "list" / f"{split}.txt").write_bytes(text.encode())


def check(path, expected):
    splits = read_folder(path, 4)
    assert list(splits) == list(SPLITS)
    for split, pairs in splits.items():
        assert pairs.dtype == np.uint8 and (pairs == np.stack(expected[split])).all()


def read_error(path, **changes):
    """What the reader says to a folder that it refuses, of one line."""
    with pytest.raises(ValueError) as error:
        read_folder(path, 4, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


# Layouts


@pytest.mark.parametrize("dirs", [("A", "B", "label"), ("time1", "time2", "mask"), ("T1", "T2", "GT")])
def test_split_folders_with_other_names_and_suffixes(tmp_path, dirs):
    expected = save_set(tmp_path, dirs=dirs, suffixes=(".PNG", ".tif", ".bmp"))
    (tmp_path / "train" / dirs[0] / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "train" / dirs[1] / "._x0.png").write_bytes(b"x")
    check(tmp_path, expected)


def test_lists(tmp_path):
    """A line is a name as a whole, or in its first word; with suffixes, folders, an encoding's mark, or spaces."""
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


def test_names_that_begin_with_the_split(tmp_path):
    expected = save_set(tmp_path, FLAT)
    expected["val"].insert(0, save_pair(tmp_path, "{kind}/Val-7", 999))
    check(tmp_path, expected)
    save_pair(tmp_path, "{kind}/value_1", 999)
    assert ": value_1 does not begin with a split; needed are" in read_error(tmp_path)
    for file in [*tmp_path.glob("*/value_1.png"), *tmp_path.glob("*/test*")]:
        file.unlink()
    assert ": no test pictures; needed are" in read_error(tmp_path)


# Labels

IDS = np.array([[0, 1, 1], [1, 0, 0]])
COLOURS = [0, 0, 0, 128, 0, 0, 0, 128, 0]


def palette_label(ids, palette, **info):
    image = Image.fromarray(ids.astype(np.uint8))
    image.putpalette(palette)
    image.info |= info
    return image


def with_alpha(alpha):
    colours = np.repeat(IDS[..., None] * 255, 3, 2)
    return np.concatenate([colours, np.broadcast_to(alpha, (2, 3))[..., None]], 2).astype(np.uint8)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("1.bmp", IDS.astype(np.uint8)),
        ("bits.tif", IDS.astype(bool)),
        ("rgb.png", np.repeat(IDS[..., None] * 255, 3, 2).astype(np.uint8)),
        ("opaque.png", with_alpha(255)),
        ("indices.png", palette_label(IDS, COLOURS)),
        ("white_first.png", palette_label(1 - IDS, [255, 255, 255, 0, 0, 0])),
        ("lossless.jpg", IDS.astype(np.uint8)),
    ],
)
def test_labels(tmp_path, name, label):
    path = save(tmp_path / name, label, format="PNG" if name == "lossless.jpg" else None)
    read = read_label(path)
    values = IDS * read.max()  # 0 and 1, or 0 and 255
    assert read.dtype == np.uint8 and read.max() in (1, 255) and read.tolist() == values.tolist()


def test_jpeg_labels_are_cut_at_128(tmp_path):
    noisy = np.kron(IDS, np.ones((7, 7))).astype(np.uint8) * 255
    path = save(tmp_path / "y.JPEG", np.repeat(noisy[..., None], 3, 2), quality=60)
    assert len(np.unique(np.array(Image.open(path)))) > 2
    assert read_label(path).tolist() == np.where(noisy > 0, 255, 0).tolist()
    path = save(tmp_path / "ones.jpg", np.ones((16, 16), np.uint8), quality=95)
    with pytest.raises(ValueError, match=r"ones\.jpg: .* JPEG does not keep 0 and 1"):
        read_label(path)


TRANSPARENT = "a label with transparency, which would be lost"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (np.uint8([[[0, 0, 0], [255, 0, 0]]]), "a label in colour"),
        (np.uint16([[0, 65535]]), "more than 8 bits"),
        (with_alpha([[255, 255, 254], [255, 255, 255]]), TRANSPARENT),
        (np.stack([IDS * 0, IDS * 255], 2).astype(np.uint8), TRANSPARENT),  # grey and alpha
        (palette_label(IDS, COLOURS, transparency=1), TRANSPARENT),
        (palette_label(IDS, COLOURS, transparency=bytes([255, 9, 255])), TRANSPARENT),
    ],
)
def test_labels_that_are_refused(tmp_path, label, message):
    path = save(tmp_path / "x.png", label)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        read_label(path)


# Folders without a split


def test_a_folder_is_split_by_a_share(tmp_path):
    """At random and always alike: each pair is in one split, and a fifth are in val and in test."""
    pairs = [save_pair(tmp_path, "{kind}/x{i:02}", 10 + i, i=i) for i in range(10)]
    found = read_folder(tmp_path, 4, val_share=0.2)
    assert {split: len(x) for split, x in found.items()} == {"train": 6, "val": 2, "test": 2}
    for split, x in read_folder(tmp_path, 4, val_share=0.2, seed=9).items():
        assert (x == found[split]).all()
    order = [
        next(i for i, pair in enumerate(pairs) if (x == pair).all())
        for x in np.concatenate([*found.values()])
    ]
    assert sorted(order) == list(range(10)) != order
    assert ": x00 does not begin with a split; needed are" in read_error(tmp_path)
    write_lists(tmp_path, {split: f"x0{i}\n" for i, split in enumerate(SPLITS)})
    assert "is split already; leave out --val-share" in read_error(tmp_path, val_share=0.2)
    assert [len(x) for x in read_folder(tmp_path, 4).values()] == [1, 1, 1]


# Folders that are refused


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
    assert message in read_error(tmp_path)
