"""envs_shared/change_folders.py: pictures, layouts of folders, labels, and input that is refused."""

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin
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
    """Each pair is in one split, whatever the seed; a small folder that leaves a split empty is refused."""
    pairs = [save_pair(tmp_path, f"{{kind}}/x{i:02}", 10 + i) for i in range(10)]
    found, again = (read_folder(tmp_path, val_share=0.3, seed=seed) for seed in (3, 9))
    drawn, same = ([x.tobytes() for split in y.values() for x in split] for y in (found, again))
    assert drawn == same and sorted(drawn) == sorted(pair.tobytes() for pair in pairs)
    error = read_error(change_folders.read_folder, tmp_path, 4, 8, SPLITS, 1e-9)
    assert "of 10 pairs, --val-share 1e-09 gives none to val" in error and "list/train.txt" in error


def test_the_split_of_a_name_depends_on_the_name_alone():
    """Shares hold on average. A larger share moves no name from val to test or back."""
    names = [f"tile_{i}" for i in range(10_000)]
    splits = change_folders.split_names(names, 0.2)
    sizes = {split: len(x) for split, x in splits.items()}
    assert sizes == pytest.approx({"train": 6_000, "val": 2_000, "test": 2_000}, abs=150)
    assert sorted(name for split in splits.values() for name in split) == sorted(names)
    for present in ([*names, "another"], names[5:], names[::-1]):
        again = change_folders.split_names(present, 0.2)
        for split in SPLITS:
            assert {*again[split]} - {"another"} == {*splits[split]} & {*present}
    wider = change_folders.split_names(names, 0.3)
    assert {*splits["val"]} < {*wider["val"]} and {*splits["test"]} < {*wider["test"]}


def test_a_name_in_two_lists_is_refused(tmp_path):
    save_set(tmp_path, "{kind}/{split}{i}")
    (tmp_path / "list").mkdir()
    for split, names in (("train", "train0 train1"), ("val", "val0 val1"), ("test", "test1 val1")):
        (tmp_path / f"list/{split}.txt").write_text(names.replace(" ", "\n"))
    lists = tmp_path / "list"
    error = read_error(read_folder, tmp_path)
    assert error == f"val1 is in {lists}/val.txt and {lists}/test.txt; a pair may be in one split only"
    (lists / "test.txt").write_text("test1")
    assert {split: len(x) for split, x in read_folder(tmp_path).items()} == {"train": 2, "val": 2, "test": 1}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("change", "change and label could all be the labels"),
        ("LABEL", "LABEL and label could all be the labels"),
        ("pre", "A and pre could all be the pictures of the first date"),
        ("im2", "B and im2 could all be the pictures of the second date"),
    ],
)
def test_two_folders_that_could_be_the_same_are_refused(tmp_path, more, words):
    """Neither is chosen in silence, in any of the splits."""
    save_set(tmp_path)
    (tmp_path / "val" / more).mkdir()
    assert read_error(read_folder, tmp_path) == (f"{tmp_path}/val: the folders {words}; rename all but one")


def make_geotiff(x, y, size=2.0, system=(1, 1, 0, 1, 3072, 0, 1, 32633), is_matrix=False):
    """Make tags of a GeoTIFF: its origin, the size of a pixel and the keys of its coordinate system."""
    tags = TiffImagePlugin.ImageFileDirectory_v2()
    if is_matrix:
        tags[34264] = (size, 0.0, 0.0, x, 0.0, -size, 0.0, y, *[0.0] * 7, 1.0)
        tags.tagtype[34264] = 12
    else:
        # The tie point is that of column 3 and row 1
        tags[33550], tags[33922] = (size, size, 0.0), (3.0, 1.0, 0.0, x + 3 * size, y - size, 0.0)
        tags.tagtype |= {33550: 12, 33922: 12}
    tags[34735] = system
    tags.tagtype[34735] = 3
    return tags


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": 500.0, "y": 900.0}, None),
        ({"x": 500.0, "y": 900.0, "is_matrix": True}, None),
        ({"x": 506.0, "y": 899.0}, "begins 3 pixels to the right of the first and 0.5 below it"),
        (
            {"x": 506.0, "y": 899.0, "is_matrix": True},
            "begins 3 pixels to the right of the first and 0.5 below",
        ),
        ({"x": 500.0, "y": 900.0, "size": 1.0}, "a pixel is (2.0, -2.0) units in one and (1.0, -1.0) in the"),
        ({"x": 500.0, "y": 900.0, "system": (1, 1, 0, 1, 3072, 0, 1, 32634)}, "coordinate systems differ"),
        (None, None),
    ],
)
def test_pictures_whose_georeferences_differ_are_named(tmp_path, capsys, second, words):
    """By a line with the shift; a pair in which one picture has none gets no line."""
    picture = np.zeros((8, 8, 3), np.uint8)
    files = []
    for kind, place in (("A", {"x": 500.0, "y": 900.0}), ("B", second)):
        options = {"tiffinfo": make_geotiff(**place)} if place else {}
        files.append(save(tmp_path / kind / "x.tif", picture, **options))
    assert change_folders.read_pair(files).shape == (7, 8, 8)
    error = capsys.readouterr().err
    assert error.count("\n") == (words is not None)
    if words:
        assert error.startswith(f"{files[0]} and {files[1]} are not of one place: ") and words in error


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
