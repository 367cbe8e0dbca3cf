"""envs_shared/change_pairs.py: what the task haze is made of, crops and labels of cells, and the plain layout."""

import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from envs_shared import change_folders, change_pairs
from envs_shared.change_pairs import DIRECTORIES, SPLITS, UNCOUNTED, draw_haze, split_labels


def make_args(**changes):
    values = {"env_id": "haze", "data_dir": None, "num_train_pairs": 8, "eval_episodes": 4, "image_size": 16}
    values |= {"patch_size": 8, "cell_size": 2, "seed": 3, "val_share": 0.0, "ignore_index": None}
    return SimpleNamespace(**values | changes)


def read_folder(path, patch_size=8, image_size=8, splits=SPLITS, **changes):
    args = make_args(data_dir=str(path), patch_size=patch_size, image_size=image_size, **changes)
    return change_pairs.load_pairs(args, splits)


def read_pairs(*paths, **changes):
    """Read pairs to predict."""
    return change_pairs.read_pairs(make_args(predict=[str(path) for path in paths], **changes))


# Synthetic pairs


def read_stripes(pairs, num_dates):
    """Of each date and patch: +1 if its rows are striped, -1 if its columns are, 0 if neither."""
    red = pairs[:, : 3 * num_dates : 3].astype(float)  # [M, V, S, S]
    patches = red.reshape(*red.shape[:2], red.shape[2] // 8, 8, red.shape[3] // 8, 8).swapaxes(3, 4)
    along, across = patches.mean(-1).std(-1), patches.mean(-2).std(-1)  # [M, V, h, w]
    return np.where(along > 30, 1, np.where(across > 30, -1, 0))


@pytest.mark.parametrize("num_dates", [2, 3, 4])
def test_haze_is_what_it_says(num_dates):
    """A change is a last date that differs from the first; haze hides a date, and after the first date the last too."""
    pairs, is_roof, is_hazy = draw_haze(600, 32, num_dates, 1, 0)
    assert pairs.shape == (600, 3 * num_dates + 1, 32, 32) and pairs.dtype == np.uint8
    labels = pairs[:, -1].reshape(600, 4, 8, 4, 8)
    is_changed = labels[:, :, 0, :, 0] == 1
    assert (labels == is_changed[:, :, None, :, None]).all()  # a patch has one class
    stripes, hidden = read_stripes(pairs, num_dates), [*is_hazy, is_hazy[1:].any(0)]
    for date in range(num_dates):
        assert ((stripes[:, date] != 0) == (is_roof & ~hidden[date])).all()
    is_seen = is_roof & ~is_hazy.any(0)
    assert ((stripes[:, -1] != stripes[:, 0]) == is_changed)[is_seen].all()
    # The shares, and that haze is independent of the change
    assert not is_changed[~is_roof].any() and not is_hazy[:, ~is_roof].any()
    assert is_roof.mean() == pytest.approx(0.4, abs=0.02)
    assert is_seen[is_roof].mean() == pytest.approx(0.5, abs=0.03)
    assert np.ptp(is_hazy[:, is_roof].mean(1)) < 0.03  # as often at each date
    for rows in (is_seen, is_roof & ~is_seen):
        assert is_changed[rows].mean() == pytest.approx(0.25, abs=0.04)
    # Neither stripes of one date nor means of 4 x 4 pixels tell a change
    for date in (0, -1):
        assert abs((stripes[:, date][is_changed & is_seen] == 1).mean() - 0.5) < 0.06
    coarse = pairs[:, :-1].reshape(600, -1, 8, 4, 8, 4).mean((3, 5))[:, :, ::2, ::2].swapaxes(0, 1)
    for means, split in ((coarse, is_changed), (coarse[:3], is_hazy[0])):
        first, second = (means[:, is_roof & x].mean(1) for x in (split, ~split))
        assert np.abs(first - second).max() < 1.0


def test_pairs_depend_on_the_seed_and_the_split_alone():
    first, second, other = (change_pairs.load_pairs(make_args(seed=seed)) for seed in (3, 3, 4))
    assert {split: len(x) for split, x in first.items()} == {"train": 8, "val": 4, "test": 4}
    assert all((first[split] == second[split]).all() for split in first)
    assert (first["val"] != first["test"]).any() and (other["val"] != first["val"]).any()
    odd = change_pairs.load_pairs(make_args(env_id="haze-3", image_size=20))  # no multiple of a roof
    assert odd["val"].shape == (4, 10, 20, 20)


# Batches


def test_cells_are_labelled_by_the_majority_of_what_counts():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (3, 7, 16, 24), np.uint8)
    pixels = pairs[:, -1] = rng.choice([0, 1, UNCOUNTED], (3, 16, 24), p=(0.4, 0.3, 0.3))
    pixels[0, :2, :2] = UNCOUNTED
    pixels[0, 2:4, :2] = (0, 1), (UNCOUNTED, UNCOUNTED)  # half of two
    pairs[:, -1] = pixels
    images, labels = split_labels(torch.from_numpy(pairs), make_args())
    assert labels.shape == (3, 16, 2, 3)
    torch.testing.assert_close(images, torch.from_numpy(pairs[:, :6]).float() / 64 - 2)
    for b, y, x in np.ndindex(3, 8, 12):
        cell = pixels[b, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        counted = cell[cell != UNCOUNTED]
        expected = 255 if len(counted) == 0 else int(2 * (counted == 1).sum() >= len(counted))
        assert labels[b, y % 4 * 4 + x % 4, y // 4, x // 4] == expected
    assert labels[0, 0, 0, 0] == 255 and labels[0, 4, 0, 0] == 1


def test_crops_are_parts_of_their_pairs_and_their_labels_move_along():
    """Each crop is found again in its picture after turning it back; all places and turns come up."""
    values = torch.arange(10 * 12).view(10, 12)
    pairs = torch.cat((values.expand(1, 6, -1, -1), values.expand(1, 1, -1, -1) % 7 < 3), 1).byte()
    torch.manual_seed(0)
    args, places = make_args(image_size=8), set()
    for image, label in zip(*change_pairs.draw_batch(pairs, 400, args), strict=True):
        crop = ((image + 2) * 64).round().byte()  # [6, 8, 8]
        turned = [crop[0].rot90(-k, (0, 1)) for k in range(4)]
        (turns,) = (k for k, x in enumerate(turned) if x[0, 0] + 1 == x[0, 1])
        y, x = divmod(int(turned[turns][0, 0]), 12)
        assert torch.equal(turned[turns], values[y : y + 8, x : x + 8])
        _, expected = split_labels(torch.cat((crop, crop[:1] % 7 < 3))[None], args)
        assert torch.equal(label, expected[0])
        places.add((y, x, turns))
    assert places == {(y, x, k) for y in range(3) for x in range(5) for k in range(4)}


# The plain layout


def save(path, x, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    (x if isinstance(x, Image.Image) else Image.fromarray(x)).save(path, **options)
    return path


def save_pair(root, layout, seed, dirs=DIRECTORIES, suffixes=(".png",) * 3, size=(8, 8), **names):
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


def test_a_folder_is_read_and_padded(plain):
    path, pairs = plain
    (path / "train" / "A" / ".DS_Store").write_bytes(b"x")
    splits = read_folder(path, 8, 20)
    assert splits.keys() == pairs.keys()
    for split, found in splits.items():
        assert found.shape == (2, 7, 24, 24)
        for x, pair in zip(found, pairs[split], strict=True):
            height, width = pair.shape[1:]
            assert (x[:, :height, :width] == pair).all()
            is_padding = np.ones(x.shape[1:], bool)
            is_padding[:height, :width] = False
            assert ((x[6] == UNCOUNTED) == is_padding).all()
            assert (x[:6, height, :width] == pair[:6, height - 1]).all()  # mirrored
            assert (x[:6, height + 1, :width] == pair[:6, height - 2]).all()


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_gap_in_a_plain_folder(plain, kind):
    path, _ = plain
    (path / "val" / kind / "x1.png").rename(path / "gone")
    with pytest.raises(ValueError) as error:
        read_folder(path)
    assert str(error.value) == f"{path}: val has no picture x1 in its folder {kind}"


def test_other_layouts_need_the_other_file(plain, monkeypatch):
    path, pairs = plain
    (path / "val" / "A").rename(path / "val" / "time1")
    assert (read_folder(path)["val"][0, :, :9, :13] == pairs["val"][0]).all()
    monkeypatch.setitem(sys.modules, "envs_shared.change_folders", None)
    monkeypatch.delattr("envs_shared.change_folders", raising=False)
    with pytest.raises(ValueError, match=r": not {train,val,test}/.* need envs_shared/change_folders\.py"):
        read_folder(path)


def test_pictures_that_a_camera_held_upside_down_lie_on_their_label(tmp_path):
    """Orientation 3 of EXIF: stored upside down, and drawn upright by viewers, as the label is."""
    tag = Image.Exif()
    tag[274] = 3
    dark, bright = np.zeros((2, 32, 48, 3), np.uint8)
    bright[:8, :16] = 255
    for kind, x in (("A", dark), ("B", bright)):
        save(tmp_path / kind / "x.jpg", Image.fromarray(x).transpose(Image.Transpose.ROTATE_180), exif=tag)
    pair = change_pairs.read_pair([tmp_path / "A/x.jpg", tmp_path / "B/x.jpg"], bright[..., 0] // 255)
    assert ((pair[3] > 128) == (pair[6] == 1)).all() and pair[6].sum() == 128


def read_label(path):
    """The values of a label."""
    return change_pairs.read_picture(path, change_pairs.decode_label)


def test_labels_of_other_forms_are_left_to_the_other_reader(tmp_path, monkeypatch):
    """What is no PNG of one channel, such as a palette, or has a channel that would be dropped."""
    labels = [Image.fromarray(np.uint8([[0, 255]])) for _ in range(2)]
    labels[0].putpalette([255, 255, 255, 0, 0, 0])
    labels[1].info["transparency"] = 0
    monkeypatch.setattr(change_folders, "decode_label", lambda image: f"the other reader's {image.mode}")
    for label in (*labels, Image.new("RGB", (2, 2)), Image.new("LA", (2, 2))):
        path = save(tmp_path / "x.png", label)
        assert read_label(path) == f"the other reader's {label.mode}"
    monkeypatch.setitem(sys.modules, "envs_shared.change_folders", None)
    monkeypatch.delattr("envs_shared.change_folders")
    with pytest.raises(ValueError, match=r"x\.png: .* not .* as PNG; others need envs_shared/change_fold"):
        read_label(path)


@pytest.mark.parametrize("values", [[[0, 255]], [[0, 1]], [[0, 0]], [[1, 1]], [[255, 255]]])
def test_plain_labels(tmp_path, values):
    """Bytes, or bits, which are made by cutting greys at 128."""
    is_changed = np.array(values) > 0
    for label in (np.uint8(values), Image.fromarray(np.uint8(is_changed) * 255).convert("1")):
        path = save(tmp_path / "x.png", label)
        (found,) = change_pairs.read_labels([path], None).values()
        assert found.dtype == np.uint8 and found.tolist() == is_changed.tolist()


def test_labels_follow_one_convention(tmp_path):
    """0 and 1, or 0 and 255, in all files alike; --ignore-index names a value that does not count."""
    ones, white, mixed = [[0, 1]], [[0, 255]], [[0, 1, 255]]
    files = [save(tmp_path / f"{i}.png", np.uint8(x)) for i, x in enumerate((ones, white, mixed, [[0, 0]]))]

    def read(*numbers, ignore_index=None):
        return [
            x.tolist() for x in change_pairs.read_labels([files[i] for i in numbers], ignore_index).values()
        ]

    assert read(0, 3) == [[[0, 1]], [[0, 0]]] and read(1, 3) == [[[0, 1]], [[0, 0]]]
    assert read(0, 2, ignore_index=255) == [[[0, 1]], [[0, 1, UNCOUNTED]]]
    assert read(1, 3, ignore_index=7) == [[[0, 1]], [[0, 0]]]
    for numbers in ([0, 1], [2], [1, 2]):
        with pytest.raises(ValueError, match=r"labels have 1 in .*\.png, 255 in .*\.png; .* --ignore-index"):
            read(*numbers)
    save(files[3], np.uint8([[0, 128, 255]]))
    assert read(1, 3, ignore_index=128) == [[[0, 1]], [[0, UNCOUNTED, 1]]]
    with pytest.raises(ValueError, match=r"128 in .*3\.png"):
        read(1, 3)


def test_a_folder_has_one_convention_of_labels(plain):
    """Over all splits: each file alone would be read without an error."""
    path, pairs = plain
    label = pairs["val"][0][6]
    save(path / "val" / "label" / "x0.png", label)
    with pytest.raises(ValueError, match=r"1 in .*val/label/x0\.png, 255 in .*; needed are 0 and 1 in all"):
        read_folder(path)
    assert label.any()


def test_bands_that_would_be_lost(tmp_path, monkeypatch):
    """Transparency and a fourth band are refused, an opaque one is not; with NUM_BANDS = 4 all four are read."""
    colours = np.random.default_rng(0).integers(1, 250, (6, 5, 4), np.uint8)
    opaque = colours.copy()
    opaque[..., 3] = 255
    four, plain = save(tmp_path / "four.png", colours), save(tmp_path / "plain.png", colours[..., :3])
    assert (change_pairs.read_picture(save(tmp_path / "opaque.png", opaque)) == colours[..., :3]).all()
    tiff, clear = save(tmp_path / "four.tif", colours), save(tmp_path / "clear.png", Image.new("LA", (2, 2)))
    for path in (four, tiff, clear):
        with pytest.raises(ValueError, match=f"{path.name}: .* a fourth band, would be lost"):
            change_pairs.read_picture(path)
    # Red, green, blue and an unspecified band, as GDAL writes it: Pillow reads three of the four
    file = bytearray((tmp_path / "four.tif").read_bytes())
    file[file.index(b"\x52\x01\x03\x00\x01\x00\x00\x00\x02") + 8] = 0  # tag 338, ExtraSamples
    (tmp_path / "infrared.tif").write_bytes(file)
    with pytest.raises(ValueError, match=r"infrared\.tif: .* more bands than the 3 that Pillow reads"):
        change_pairs.read_picture(tmp_path / "infrared.tif")
    monkeypatch.setattr(change_pairs, "NUM_BANDS", 4)
    assert (change_pairs.read_picture(four) == colours).all()
    pair = change_pairs.read_pair([four, four])
    both = np.concatenate((colours, colours), 2).transpose(2, 0, 1)
    assert pair.shape == (9, 6, 5) and (pair[:8] == both).all()
    with pytest.raises(ValueError, match=r"plain\.png: .* it has 3 bands, and NUM_BANDS is 4"):
        change_pairs.read_picture(plain)
    with pytest.raises(ValueError, match="haze: has 3 bands, and NUM_BANDS is 4"):
        change_pairs.load_pairs(make_args())


def test_files_of_several_pages(tmp_path):
    """A TIFF is refused. A camera's JPEG with a preview is not."""
    pages = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for name, options in (("x.tif", {}), ("x.jpg", {"format": "MPO"})):
        pages[0].save(tmp_path / name, save_all=True, append_images=pages[1:], **options)
    with pytest.raises(ValueError, match=r"x\.tif: .* 2 pages; save each as a file of its own"):
        change_pairs.read_picture(tmp_path / "x.tif")
    assert change_pairs.read_picture(tmp_path / "x.jpg")[..., 0].min() > 200


def test_only_the_splits_that_are_needed(plain):
    path, pairs = plain
    for split in ("train", "val"):
        shutil.rmtree(path / split)
    (found,) = read_folder(path, splits=["test"]).values()
    assert (found[:, :, :9, :13] == np.stack(pairs["test"])).all()


def test_pictures_that_cannot_be_used(plain):
    path, _ = plain
    save(path / "deep.png", np.zeros((4, 4), np.uint16))
    (path / "text.png").write_text("x")
    for name, words in (("deep.png", "more than 8 bits"), ("text.png", "cannot"), ("no.png", "No such file")):
        with pytest.raises(ValueError, match=f"{name}: .*{words}"):
            change_pairs.read_picture(path / name)
    save(path / "train" / "B" / "x1.png", np.zeros((3, 3, 3), np.uint8))
    with pytest.raises(ValueError, match=r"x1.png: height and width \(9, 13\) differ from .*\(3, 3\)"):
        read_folder(path)


def test_pairs_to_predict(plain):
    path, pairs = plain
    found = read_pairs(path / "val" / "A", path / "val" / "B")
    shapes = [(name, x.shape, *size) for name, (x, *size) in found.items()]
    assert shapes == [("x0", (1, 7, 16, 16), 9, 13), ("x1", (1, 7, 24, 8), 17, 5)]
    for (x, height, width), pair in zip(found.values(), pairs["val"], strict=True):
        assert (x[0, :6, :height, :width] == pair[:6]).all() and (x[0, 6] == UNCOUNTED).all()
    ((name, (x, *_)),) = read_pairs(path / "val/A/x0.png", path / "val/B/x0.png").items()
    assert name == "x0" and (x == found["x0"][0]).all()
    with pytest.raises(ValueError, match=r"nothing: cannot be read"):
        read_pairs(path / "val/A/x0.png", path / "nothing")


def test_folders_to_predict(plain):
    """Suffixes may differ, other files are left out, and neither of two pictures of one name is lost."""
    path, pairs = plain
    (path / "val" / "A" / "notes.txt").write_text("x")
    (path / "val" / "B" / "x0.png").unlink()
    save(path / "val" / "B" / "x0.bmp", pairs["val"][0][3:6].transpose(1, 2, 0))
    found = read_pairs(path / "val" / "A", path / "val" / "B")
    assert list(found) == ["x0", "x1"]
    assert (found["x0"][0][0, :6, :9, :13] == pairs["val"][0][:6]).all()
    save(path / "val" / "A" / "x1.jpg", np.zeros((17, 5, 3), np.uint8))
    with pytest.raises(ValueError, match=r"x1\.png: same name as x1\.jpg; remove one of them"):
        read_pairs(path / "val" / "A", path / "val" / "B")
    (path / "val" / "A" / "x1.jpg").unlink()
    (path / "val" / "B" / "x1.png").unlink()
    with pytest.raises(ValueError, match="val/B: has no picture x1 in its folder B"):
        read_pairs(path / "val" / "A", path / "val" / "B")


def test_labels_and_small_pictures_to_predict(plain):
    """A third folder has labels. A picture is larger than a border of one cell, which is mirrored."""
    path, pairs = plain
    found = read_pairs(*(path / "val" / kind for kind in DIRECTORIES))
    for (x, height, width), pair in zip(found.values(), pairs["val"], strict=True):
        assert (x[0, :, :height, :width] == pair).all()
    small = save(path / "small.png", np.zeros((3, 8, 3), np.uint8))
    ((x, *size),) = read_pairs(small, small, cell_size=8).values()
    assert x.shape == (1, 7, 16, 16) and size == [3, 8]
    with pytest.raises(ValueError, match=r"--predict .*envs_shared: no pictures"):
        read_pairs(*["envs_shared"] * 2)
