"""envs_shared/change_pairs.py: what the task haze is made of, labels, crops and labels of cells."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import ROOT
from scripts import import_file

from envs_shared import change_pairs
from envs_shared.change_pairs import UNCOUNTED, draw_haze, split_labels, unify_labels


def make_args(**changes):
    values = {"env_id": "haze", "data_dir": None, "num_train_pairs": 8, "eval_episodes": 4, "image_size": 16}
    values |= {"patch_size": 8, "cell_size": 2, "seed": 3, "val_share": 0.0, "ignore_index": None}
    return SimpleNamespace(**values | changes)


def read_stripes(pairs, num_dates):
    """Of each date and patch: +1 if its rows are striped, -1 if its columns are, 0 if neither."""
    red = pairs[:, : 3 * num_dates : 3].astype(float)  # [M, V, S, S]
    patches = red.reshape(*red.shape[:2], red.shape[2] // 8, 8, red.shape[3] // 8, 8)
    along, across = patches.mean(5).std(3), patches.mean(3).std(4)  # [M, V, h, w]
    return np.where(along > 30, 1, np.where(across > 30, -1, 0))


@pytest.mark.parametrize("num_dates", [2, 3, 4])
def test_haze_is_what_it_says(num_dates):
    """A change is a last date unlike the first; haze hides a date, and after the first one the last too.

    Neither the stripes of one date nor means of 4 x 4 pixels tell a change.
    """
    pairs, is_roof, is_hazy = draw_haze(600, 32, num_dates, 1, 0)
    assert pairs.shape == (600, 3 * num_dates + 1, 32, 32) and pairs.dtype == np.uint8
    is_changed = pairs[:, -1, ::8, ::8] == 1
    assert (pairs[:, -1] == np.kron(is_changed, np.ones((8, 8)))).all()  # a patch has one class
    stripes, hidden = read_stripes(pairs, num_dates), [*is_hazy, is_hazy[1:].any(0)]
    for date in range(num_dates):
        assert ((stripes[:, date] != 0) == (is_roof & ~hidden[date])).all()
    is_seen = is_roof & ~is_hazy.any(0)
    assert ((stripes[:, -1] != stripes[:, 0]) == is_changed)[is_seen].all()

    assert not is_changed[~is_roof].any() and not is_hazy[:, ~is_roof].any()
    assert is_roof.mean() == pytest.approx(0.4, abs=0.02)
    assert is_seen[is_roof].mean() == pytest.approx(0.5, abs=0.03)
    assert np.ptp(is_hazy[:, is_roof].mean(1)) < 0.03  # as often at each date
    for rows in (is_seen, is_roof & ~is_seen):
        assert is_changed[rows].mean() == pytest.approx(0.25, abs=0.04)
    for date in (0, -1):
        assert abs((stripes[:, date][is_changed & is_seen] == 1).mean() - 0.5) < 0.06
    coarse = pairs[:, :-1].reshape(600, -1, 8, 4, 8, 4).mean((3, 5))[:, :, ::2, ::2].swapaxes(0, 1)
    for means, split in ((coarse, is_changed), (coarse[:3], is_hazy[0])):
        first, second = (means[:, is_roof & x].mean(1) for x in (split, ~split))
        assert np.abs(first - second).max() < 1.0


def test_pairs_depend_on_the_seed_and_the_split_alone():
    first, second, other = (change_pairs.draw_splits(make_args(seed=seed)) for seed in (3, 3, 4))
    assert {split: len(x) for split, x in first.items()} == {"train": 8, "val": 4, "test": 4}
    assert all((first[split] == second[split]).all() for split in first)
    assert (first["val"] != first["test"]).any() and (other["val"] != first["val"]).any()


def test_cells_are_labelled_by_the_majority_of_what_counts():
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (3, 7, 16, 24), np.uint8)
    pixels = pairs[:, -1] = rng.choice([0, 1, UNCOUNTED], (3, 16, 24), p=(0.3, 0.3, 0.4))
    images, labels = split_labels(torch.from_numpy(pairs), make_args())
    assert labels.shape == (3, 16, 2, 3)
    torch.testing.assert_close(images, torch.from_numpy(pairs[:, :6]).float() / 64 - 2)
    for b, y, x in np.ndindex(3, 8, 12):
        cell = pixels[b, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
        counted = cell[cell != UNCOUNTED]
        expected = 255 if len(counted) == 0 else int(2 * (counted == 1).sum() >= len(counted))
        assert labels[b, y % 4 * 4 + x % 4, y // 4, x // 4] == expected
    assert (labels == 255).any()


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


def test_a_users_change_of_colour_in_draw_batch_leaves_the_labels_alone(tmp_path):
    """At the marked place. A gain below 1, put before pictures and labels part, would turn label 1 into 0."""
    text = (ROOT / "envs_shared" / "change_pairs.py").read_text()
    place = "    # images[:, :NUM_BANDS] *= gain for the first date\n"
    assert text.count(place) == 1
    edited = tmp_path / "edited_pairs.py"
    edited.write_text(text.replace(place, f"{place}    images[:, :NUM_BANDS] *= 0.5\n"))
    module = import_file("edited_pairs", edited)
    pairs = torch.from_numpy(draw_haze(20, 32, 2, 1)[0])
    found = []
    for draw_batch in (change_pairs.draw_batch, module.draw_batch):
        torch.manual_seed(0)
        found.append(draw_batch(pairs, 50, make_args()))
    (images, labels), (changed_images, same_labels) = found
    assert torch.equal(labels, same_labels) and labels.mean() > 0.05
    assert torch.equal(changed_images, torch.cat((images[:, :3] * 0.5, images[:, 3:]), 1))


def test_labels_follow_one_convention():
    """0 and 1, or 0 and 255, in all files alike; --ignore-index names a value that does not count."""
    labels = {name: np.uint8([[0, value, 7]]) for name, value in (("ones", 1), ("white", 255))}
    for name, label in labels.items():
        (found,) = unify_labels({name: label}, 7).values()
        assert found.tolist() == [[0, 1, UNCOUNTED]]
    for index, words in ((7, "1 in ones, 255 in white"), (1, "7 in white, 255 in white")):
        with pytest.raises(ValueError, match=f"labels have {words}; .* --ignore-index"):
            unify_labels(labels, index)
