"""envs_shared/change_pairs.py: what the task haze is made of, crops and labels of cells, and the plain layout."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from envs_shared import change_pairs
from envs_shared.change_pairs import UNCOUNTED, draw_batch, draw_haze, read_folder, split_labels


def make_args(**changes):
    values = {"env_id": "haze", "data_dir": None, "num_train_pairs": 8, "eval_episodes": 4, "image_size": 16}
    return SimpleNamespace(**values | {"patch_size": 8, "cell_size": 2, "seed": 3} | changes)


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
    pairs, is_roof, is_hazy = draw_haze(300, 32, num_dates, 1, 0)
    assert pairs.shape == (300, 3 * num_dates + 1, 32, 32) and pairs.dtype == np.uint8
    labels = pairs[:, -1].reshape(300, 4, 8, 4, 8)
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


def test_earlier_dates_and_coarse_pictures_do_not_tell_a_change():
    """Stripes of a date are as frequent on changed roofs, and means of 4 x 4 pixels are alike on all roofs."""
    pairs, is_roof, is_hazy = draw_haze(600, 32, 2, 1, 0)
    first, last = np.moveaxis(read_stripes(pairs, 2), 1, 0)
    is_changed = pairs[:, -1, ::8, ::8] == 1
    for stripes, where in ((first, is_changed & ~is_hazy[0]), (last, is_changed)):
        assert abs((stripes[where] == 1).mean() - 0.5) < 0.06
    coarse = pairs[:, :6, :, :].reshape(600, 6, 8, 4, 8, 4).mean((3, 5))[:, :, ::2, ::2].swapaxes(0, 1)
    for dates, split in ((slice(6), is_changed), (slice(3), is_hazy[0])):
        means = [coarse[dates, is_roof & x].mean(1) for x in (split, ~split)]
        assert np.abs(means[0] - means[1]).max() < 1.0


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
        expected = -1 if len(counted) == 0 else int(2 * (counted == 1).sum() >= len(counted))
        assert labels[b, y % 4 * 4 + x % 4, y // 4, x // 4] == expected
    assert labels[0, 0, 0, 0] == -1 and labels[0, 4, 0, 0] == 1


def test_crops_are_parts_of_their_pairs_and_their_labels_move_along():
    """Each crop is found again in its picture after turning it back; all places and turns come up."""
    values = torch.arange(10 * 12).view(10, 12)
    pairs = torch.cat((values.expand(1, 6, -1, -1), values.expand(1, 1, -1, -1) % 7 < 3), 1).byte()
    torch.manual_seed(0)
    args, places = make_args(image_size=8), set()
    for image, label in zip(*draw_batch(pairs, 400, args), strict=True):
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


def save_pair(folder, name, seed, size=(9, 13), value=255):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2, *size, 3), np.uint8)
    label = (images[0, ..., 0] > 128).astype(np.uint8)
    for kind, x in zip(("A", "B", "label"), (*images, label * np.uint8(value)), strict=True):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(x).save(folder / kind / f"{name}.png")
    return np.concatenate((*images, label[..., None]), 2).transpose(2, 0, 1)


@pytest.fixture
def plain(tmp_path):
    """A folder with two pairs in each split, of other sizes in val, and 0 and 1 for labels in test."""
    pairs = {}
    for k, split in enumerate(change_pairs.SPLITS):
        sizes = [(9, 13), (17, 5)] if split == "val" else [(9, 13)] * 2
        value = 1 if split == "test" else 255
        folder = tmp_path / "set" / split
        pairs[split] = [save_pair(folder, f"x {i}", 10 * k + i, size, value) for i, size in enumerate(sizes)]
    return tmp_path / "set", pairs


def test_a_folder_is_read_and_padded(plain):
    path, pairs = plain
    (path / "train" / "A" / ".DS_Store").write_bytes(b"x")
    splits = read_folder(path, 8, 16)
    shapes = {"train": (2, 7, 16, 16), "val": (2, 7, 24, 16), "test": (2, 7, 16, 16)}
    assert {split: x.shape for split, x in splits.items()} == shapes
    for split, found in splits.items():
        for x, pair in zip(found, pairs[split], strict=True):
            height, width = pair.shape[1:]
            assert (x[:, :height, :width] == pair).all()
            is_padding = np.ones(x.shape[1:], bool)
            is_padding[:height, :width] = False
            assert (x[6] == UNCOUNTED).tolist() == is_padding.tolist()
            assert (x[:6, height, :width] == pair[:6, height - 1]).all()  # mirrored


@pytest.mark.parametrize("gap", ["val/A/x 1.png", "val/B/x 1.png", "val/label/x 1.png", "test"])
def test_other_layouts_are_left_to_the_other_reader(plain, gap):
    path, _ = plain
    (path / gap).rename(path / "gone")
    words = r"val/A, B and label need equal names; alone: .*x 1.png" if gap != "test" else "test/A, B"
    with pytest.raises(LookupError, match=words):
        read_folder(path, 8, 8)


PALETTE = Image.fromarray(np.uint8([[0, 1]] * 2))
PALETTE.putpalette([255, 255, 255, 0, 0, 0])
TRANSPARENT = Image.fromarray(np.uint8([[0, 255]] * 2))
TRANSPARENT.info["transparency"] = 0


@pytest.mark.parametrize(
    "label",
    [
        Image.fromarray(np.uint8([[0, 128], [255, 0]])),
        Image.fromarray(np.uint8([[0, 1], [255, 0]])),
        Image.fromarray(np.zeros((2, 2, 3), np.uint8)),
        Image.new("LA", (2, 2)),
        PALETTE,
        TRANSPARENT,
    ],
    ids=["grey", "0-1-255", "colour", "alpha", "palette", "transparent"],
)
def test_labels_of_other_forms_are_left_to_the_other_reader(tmp_path, label):
    """Also what looks like 0 and 1, but is a palette, or has a channel that would be dropped."""
    label.save(tmp_path / "x.png")
    with pytest.raises(LookupError, match=r"x\.png: not a PNG of one channel"):
        change_pairs.read_label(tmp_path / "x.png")


@pytest.mark.parametrize("mode", ["L", "1"])
@pytest.mark.parametrize("values", [[[0, 255]], [[0, 1]], [[0, 0]], [[1, 1]], [[255, 255]]])
def test_plain_labels(tmp_path, values, mode):
    if mode == "1":  # bits, which are made by cutting greys at 128
        Image.fromarray(np.uint8(np.array(values) > 0) * 255).convert("1").save(tmp_path / "x.png")
    else:
        Image.fromarray(np.uint8(values)).save(tmp_path / "x.png")
    assert change_pairs.read_label(tmp_path / "x.png").tolist() == (np.array(values) > 0).tolist()


def test_pictures_that_cannot_be_used(plain, tmp_path):
    path, _ = plain
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / "text.png").write_text("x")
    for name, words in (("deep.png", "more than 8 bits"), ("text.png", "cannot"), ("no.png", "No such file")):
        with pytest.raises(ValueError, match=f"{name}: .*{words}"):
            change_pairs.read_picture(tmp_path / name)
    Image.fromarray(np.zeros((3, 3, 3), np.uint8)).save(path / "train" / "B" / "x 1.png")
    with pytest.raises(ValueError, match=r"x 1.png: height and width \(9, 13\) differ from .*\(3, 3\)"):
        read_folder(path, 8, 8)


def test_pairs_to_predict(plain):
    path, pairs = plain
    found = change_pairs.read_pairs(path / "val" / "A", path / "val" / "B", 8)
    shapes = [(name, x.shape, *size) for name, (x, *size) in found.items()]
    assert shapes == [("x 0", (1, 7, 16, 16), 9, 13), ("x 1", (1, 7, 24, 8), 17, 5)]
    for (x, height, width), pair in zip(found.values(), pairs["val"], strict=True):
        assert (x[0, :6, :height, :width] == pair[:6]).all() and (x[0, 6] == UNCOUNTED).all()
    ((name, (x, *_)),) = change_pairs.read_pairs(path / "val/A/x 0.png", path / "val/B/x 0.png", 8).items()
    assert name == "x 0" and (x == found["x 0"][0]).all()
    with pytest.raises(ValueError, match=r"x 0\.png: cannot be read"):
        change_pairs.read_pairs(path / "val" / "A", path / "nothing", 8)
