"""The synthetic pairs, their tensors and batches, and the scores of change maps: brute force and closed forms."""

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from envs_shared.change_tasks import data as change_data
from envs_shared.change_tasks import files as change_files
from envs_shared.change_tasks import pairs as change_pairs
from envs_shared.change_tasks import scores as change_scores

# Synthetic pairs


@pytest.mark.parametrize("env_id", change_pairs.ENV_IDS)
def test_pairs_depend_on_the_seed_and_their_number_alone(env_id):
    images, labels = change_pairs.make_pairs(env_id, 70, 64, 3, 5, 1)
    assert images.shape == (70, 2, 64, 64, 3) and labels.shape == (70, 64, 64)
    assert images.dtype == labels.dtype == np.uint8
    assert set(np.unique(labels)) == ({0, 1} if env_id == "prints" else {0, 1, 2})
    few = change_pairs.make_pairs(env_id, 66, 64, 3, 5, 1)
    assert np.array_equal(images[:66], few.images) and np.array_equal(labels[:66], few.labels)
    other = change_pairs.make_pairs(env_id, 66, 64, 3, 5, 2)
    assert not (images[:66] == other.images).all((1, 2, 3, 4)).any()
    assert np.array_equal(change_pairs.make_pairs(env_id, 66, 64, 2, 5, 1).labels, np.minimum(few.labels, 1))
    assert len(np.unique(images[:, 0].reshape(70, -1), axis=0)) == 70  # none is drawn twice


def test_large_pictures_have_as_much_change_as_small_ones():
    shares = [(change_pairs.make_pairs("buildings", 8, size, 2, 1).labels > 0).mean() for size in (64, 256)]
    assert shares[1] == pytest.approx(shares[0], abs=0.04) and shares[1] > 0.04


def test_unknown_pairs_are_an_error():
    with pytest.raises(ValueError, match="unknown pairs"):
        change_pairs.make_pairs("forests", 1, 64, 2, 1)


def test_labels_are_the_difference_of_the_roofs(monkeypatch):
    """With magenta roofs, and without light, noise and shift, change can be read from the pictures."""
    real = change_pairs.roof_colours

    def paint(rng, shape):
        colours = real(rng, shape)
        return colours * 0 + (0.0, 240.0, 0.0) if len(shape) == 1 else colours * 0 + (255.0, 0.0, 255.0)

    monkeypatch.setattr(
        change_pairs, "roof_colours", paint
    )  # of plots [n] green, of buildings [n, k] magenta
    monkeypatch.setattr(change_pairs, "add_light_and_clouds", lambda rng, image, clouds: image)
    monkeypatch.setattr(change_pairs, "shift_images", lambda images, shift: images[:, 2:-2, 2:-2])
    images, labels = change_pairs.make_pairs("buildings", 64, 64, 3, 1)
    red, green, blue = np.moveaxis(images.astype(int), -1, 0)
    before, after = np.moveaxis((red > 100) & (blue > 100) & (green < 30), 1, 0)
    expected = (after & ~before) + 2 * (before & ~after)
    assert (labels == expected).mean() > 0.998  # a car may be as magenta as a roof
    for kind in (1, 2):
        assert 0.02 < (labels == kind).mean() < 0.15


def test_shifts_are_those_of_linear_interpolation():
    image = np.random.default_rng(0).random((3, 12, 12, 3)).astype(np.float32)
    shift = np.array([[0.0, 0.0], [1.0, -1.0], [0.25, -0.5]])
    moved = change_pairs.shift_images(image, shift)
    assert moved.shape == (3, 8, 8, 3)
    np.testing.assert_array_equal(moved[0], image[0, 2:-2, 2:-2])
    np.testing.assert_array_equal(moved[1], image[1, 1:9, 3:11])  # down by one, left by one
    rows = 0.75 * image[2, 2:10] + 0.25 * image[2, 1:9]
    np.testing.assert_allclose(moved[2], 0.5 * rows[:, 2:10] + 0.5 * rows[:, 3:11], rtol=1e-6)


def test_clouds_cover_what_was_asked_for():
    rng = np.random.default_rng(0)
    dark = np.zeros((64, 68, 68, 3), np.float32)
    covered = change_pairs.add_light_and_clouds(rng, dark, (1.0, 0.3, 0.3, 0.0))[..., 0] > 100
    assert covered.mean() == pytest.approx(0.3, abs=0.02) and covered.mean((1, 2)).std() < 0.03
    none = change_pairs.add_light_and_clouds(rng, dark, (0.0, 0.3, 0.3, 0.0))
    assert (none == 0).all()


def test_prints_hide_what_has_changed_and_the_first_date_alone_says_nothing_of_it():
    images, labels = change_pairs.make_pairs("prints", 200, 64, 2, 3)
    red = images[..., 0].astype(int)
    coarse = red.reshape(200, 2, 16, 4, 16, 4).mean((3, 5))
    assert set(np.unique(coarse)) == {0, 80} and (coarse[:, 0] == coarse[:, 1]).all()  # whatever has changed
    patches = red.reshape(200, 2, 8, 8, 8, 8).transpose(0, 2, 4, 1, 3, 5).reshape(200, 64, 2, 64)
    changed = labels.reshape(200, 8, 8, 8, 8).transpose(0, 1, 3, 2, 4).reshape(200, 64, 64)
    assert (changed == changed[..., :1]).all()
    is_red, is_blank = (patches[:, :, 1] > 0).any(-1), (patches[:, :, 0] == 80).all(-1)
    differs = (patches[:, :, 0] != patches[:, :, 1]).any(-1)
    assert ((changed[..., 0] == 1) == (is_red & ~is_blank & differs)).all()
    assert is_red.mean() == pytest.approx(0.4, abs=0.02) and is_blank[is_red].mean() == pytest.approx(
        0.5, abs=0.03
    )
    for pixel in (0, 160):  # either print of the first date
        chosen = is_red & ~is_blank & (patches[:, :, 0, 0] == pixel)
        assert changed[chosen].mean() == pytest.approx(0.5, abs=0.04)


# Tensors and batches


def make_args(**changes):
    return SimpleNamespace(
        **{"image_size": 32, "patch_size": 8, "cell_size": 2, "num_classes": 3, "jitter": 0.0} | changes
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from((2, 4)),
    st.integers(1, 3),
    st.integers(2, 3),
    st.sampled_from((2, 3, 5)),
    st.integers(0, 1000),
)
def test_labels_of_cells_equal_brute_force(cell_size, cells, side, num_classes, seed):
    rng, patch_size = np.random.default_rng(seed), cell_size * cells
    size = patch_size * side
    pixels = rng.integers(0, num_classes, (3, size, size)) * (
        rng.random((3, size, size)) < rng.choice((0.3, 0.6, 0.9))
    )
    pixels[rng.random(pixels.shape) < rng.choice((0.0, 0.5))] = 255
    pixels[0, :patch_size, :patch_size] = 255
    found = change_data.label_cells(
        torch.from_numpy(pixels.astype(np.uint8)), patch_size, cell_size, num_classes
    )
    assert found.shape == (3, side * side, cells * cells)
    for m, n, g in np.ndindex(*found.shape):
        y = n // side * patch_size + g // cells * cell_size
        x = n % side * patch_size + g % cells * cell_size
        cell = pixels[m, y : y + cell_size, x : x + cell_size].ravel()
        counted = cell[cell != 255]
        changed = counted[counted > 0]
        expected = -1
        if len(counted):
            expected = np.bincount(changed).argmax() if 2 * len(changed) >= len(counted) else 0
        assert found[m, n, g] == expected


def make_pairs(num_pairs=6, size=32, cell_size=2, num_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_pairs, 2, size, size, 3), np.uint8)
    pixels = (
        rng.integers(0, num_classes, (num_pairs, size, size)) * (rng.random((num_pairs, 1, 1)) < 0.7)
    ).astype(np.uint8)
    return images, pixels, change_data.to_pairs(images, pixels, cell_size)


def test_pairs_are_reflected_beyond_their_borders():
    images, _, pairs = make_pairs()
    assert pairs.images.shape == (6, 36, 36, 6) and pairs.images.dtype == torch.uint8
    inner = pairs.images[:, 2:-2, 2:-2].unflatten(-1, (2, 3)).permute(0, 3, 1, 2, 4)
    np.testing.assert_array_equal(inner, images)
    np.testing.assert_array_equal(pairs.images[:, 0], pairs.images[:, 4])
    np.testing.assert_array_equal(pairs.images[:, :, -1], pairs.images[:, :, -5])


def test_batches_are_crops_in_the_eight_images_of_the_square_with_their_labels():
    """Of pictures whose colours are their rows and columns, so that each pixel says where it is from."""
    torch.manual_seed(0)
    shapes = [(40, 48), (33, 32)]
    places = [np.stack(np.broadcast_arrays(*np.ogrid[:h, :w], 0), -1).astype(np.uint8) for h, w in shapes]
    labels = [(x[..., 0] // 2 + x[..., 1] // 2).astype(np.uint8) % 3 for x in places]
    split = change_files.Split([np.stack((x, x)) for x in places], labels, ["a", "b"])
    pairs = change_data.stack_pictures(split, 2)
    assert pairs.sizes.tolist() == [[40, 48], [33, 32]]
    args, corners, turns = make_args(), set(), set()
    for _ in range(60):
        images, cells = change_data.draw_batch(pairs, args, torch.device("cpu"), 4)
        assert images.shape == (4, 6, 36, 36) and cells.shape == (4, 16, 16)
        found = ((images + 0.5) * 255).round().int()[:, :2, 2:-2, 2:-2]  # [4, 2, 32, 32], rows and columns
        for (rows, columns), label in zip(found, cells, strict=True):
            assert sorted(set(rows.flatten().tolist())) == list(range(rows.min(), rows.min() + 32))
            corners.add((int(rows.min()), int(columns.min())))
            turns.add(
                (
                    bool(rows[0, 0] == rows[0, 1]),
                    bool(rows[0, 0] == rows.min()),
                    bool(columns[0, 0] == columns.min()),
                )
            )
            truth = ((rows // 2 + columns // 2) % 3).byte()
            assert torch.equal(label, change_data.label_cells(truth[None], 8, 2, 3)[0])
    assert (
        len(turns) == 8
        and len(corners) > 40
        and {0, 8} <= {y for y, _ in corners}
        and {0, 16} <= {x for _, x in corners}
    )


def test_contrast_and_brightness_are_of_a_date():
    torch.manual_seed(0)
    _, _, pairs = make_pairs(1)
    pairs = pairs._replace(images=torch.full_like(pairs.images, 255))
    images, _ = change_data.draw_batch(pairs, make_args(jitter=0.2), torch.device("cpu"), 200)
    dates = images.unflatten(1, (2, 3))[..., 0, 0]
    assert (dates == dates[:, :, :1]).all() and (dates[:, 0] != dates[:, 1]).all()
    assert 0.5 * 0.8 - 0.2 <= dates.min() < 0.3 and 0.7 < dates.max() <= 0.5 * 1.2 + 0.2


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70))
def test_pictures_of_any_size_are_split_and_joined(height, width):
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.png" for name in "ab"]
        for path in paths:
            Image.fromarray(picture).save(path)
        windows, corners, shape = change_data.split_picture(*paths, 32, 2)
        assert shape == (height, width) and windows.shape[1:] == (36, 36, 6)
        inner = windows[:, 2:-2, 2:-2].numpy().astype(float)
        for channel in range(6):
            joined = change_data.join_windows(inner[..., channel], corners, shape)
            np.testing.assert_allclose(joined, picture[..., channel % 3], atol=1e-9)
        Image.fromarray(picture[: max(height - 1, 1), : max(width - 1, 1)]).save(paths[1])
        if height > 1 or width > 1:
            with pytest.raises(ValueError, match="different sizes"):
                change_data.split_picture(*paths, 32, 2)


def test_windows_overlap_without_seams():
    """What a window says at its border counts for next to nothing there."""
    corners = [(0, 0), (0, 16), (0, 24)]
    windows = np.arange(3.0)[:, None, None] * np.ones((3, 32, 32))
    row = change_data.join_windows(windows, corners, (32, 56))[0]
    assert (np.diff(row) >= -1e-12).all() and np.diff(row).max() < 0.15 and row[0] == 0 and row[-1] == 2


# Scores


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(1, 60), st.integers(0, 1000))
def test_scores_equal_brute_force(num_classes, num_patches, seed):
    rng = np.random.default_rng(seed)
    labels, predicted = rng.integers(-1, num_classes, num_patches), rng.integers(0, num_classes, num_patches)
    labels[0] = 0
    counts = change_scores.count_confusions(torch.tensor(labels), torch.tensor(predicted), num_classes)
    found = change_scores.score_confusions(counts)
    pairs = [(a, b) for a, b in zip(labels.tolist(), predicted.tolist(), strict=True) if a >= 0]
    tp, said, true = (
        sum(map(f, pairs)) for f in (lambda p: p[0] > 0 < p[1], lambda p: p[1] > 0, lambda p: p[0] > 0)
    )
    n = len(pairs)
    agreement = sum(a == b for a, b in pairs) / n
    chance = (
        sum(sum(a == c for a, _ in pairs) * sum(b == c for _, b in pairs) for c in range(num_classes)) / n**2
    )
    expected = {
        "precision": tp / said if said else 0.0,
        "recall": tp / true if true else 0.0,
        "f1": 2 * tp / (said + true) if said + true else 0.0,
        "iou": tp / (said + true - tp) if said + true else 0.0,
        "oa": agreement,
        "kappa": (agreement - chance) / (1 - chance) if chance < 1 else 0.0,
    }
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("num_changed", [200, 1])
def test_the_threshold_has_the_largest_f1_and_stays_near_a_half_for_few_pairs(num_changed):
    """On cells of a pixel's own size, by brute force over thresholds."""
    args = make_args(cell_size=1, patch_size=4, image_size=8, num_classes=2)
    rng = torch.Generator().manual_seed(num_changed)
    pixels = (torch.rand(300, 8, 8, generator=rng) < 0.2).byte()
    pixels[num_changed:] = 0
    pixels[:, 0] = 255
    p = (torch.rand(300, 8, 8, generator=rng) * 0.2 + 0.1 * (pixels == 1)).clamp(1e-4, 1 - 1e-4)
    logits = torch.stack(((1 - p).log(), p.log()), -1)  # [300, 8, 8, 2]
    cells = logits.unfold(1, 4, 4).unfold(2, 4, 4).permute(0, 1, 2, 4, 5, 3).flatten(3, 4).flatten(1, 2)

    def f1(threshold):
        said, true = (p > threshold) & (pixels != 255), pixels == 1
        return 2 * (said & true).sum() / (said.sum() + true.sum()).clamp(min=1)

    found = change_scores.choose_threshold(cells, pixels, args)
    chosen = 0.5 + (found - 0.5) * (num_changed + 10) / num_changed  # before it was shrunk
    best = max(f1(k / 500) for k in range(500))
    assert f1(chosen) == pytest.approx(best.item(), abs=0.01)
    assert (found < 0.25) == (num_changed == 200) and found < 0.5
    assert change_scores.choose_threshold(cells, torch.zeros_like(pixels), args) == 0.5


def test_cells_are_joined_where_they_were():
    labels = torch.randint(3, (2, 32, 32), dtype=torch.uint8)
    args = make_args(cell_size=2)
    cells = change_data.label_cells(labels.repeat_interleave(2, 1).repeat_interleave(2, 2), 8, 2, 3)
    joined = change_scores.join_cells(cells.unsqueeze(-1), 64, 8, 2)
    assert torch.equal(joined[:, 0], labels.long())
    logits = torch.full((1, 16, 16, 2), -1.0)
    logits[..., 1] = 1.0
    assert change_scores.to_pixels(logits, args).shape == (1, 2, 32, 32)


def get_ceiling(pixels, cell_size):
    """F1 by pixel of a classifier that knows the class of each cell."""
    args = make_args(image_size=192, patch_size=4 * cell_size, cell_size=cell_size, num_classes=2)
    cells = change_data.label_cells(pixels, 4 * cell_size, cell_size, 2)
    logits = 20.0 * F.one_hot(cells, 2).float()
    return change_scores.score_maps(logits, pixels, 0.5, args)["f1"]


def test_a_classifier_of_cells_can_be_right_to_095():
    """On roofs of 18 to 48 pixels, as houses have at half a metre a pixel."""
    _, pixels = change_pairs.make_pairs("buildings", 60, 64, 2, 7)
    pixels = torch.from_numpy(pixels).repeat_interleave(3, 1).repeat_interleave(3, 2)
    ceilings = {size: get_ceiling(pixels, size) for size in (1, 2, 4, 16)}
    assert ceilings[1] == 1.0 and ceilings[2] > 0.95 and ceilings[4] > 0.92 > 0.8 > ceilings[16]


def test_rules_choose_whom_they_should():
    p = torch.tensor([0.1, 0.45, 0.6, 0.95])
    logits = torch.stack(((1 - p).log(), p.log()), -1).expand(1, 3, 4, 2).transpose(1, 2)  # [1, 4, 3, 2]
    query = torch.zeros(1, 4, 8)

    def chosen(method, level=0.0, step=0, num_looks=1):
        return change_scores.make_rule(method, level, num_looks)(query, logits, step).tolist()[0]

    assert chosen("coarse") == [False] * 4 and chosen("everywhere") == [True] * 4
    assert (
        chosen("everywhere", step=1) == [False] * 4
        and chosen("everywhere", step=1, num_looks=2) == [True] * 4
    )
    assert chosen("threshold", 0.5) == [False, False, True, True]
    assert chosen("threshold", 0.5, 1) == [False] * 4  # a second look at the same shows nothing new
    assert chosen("random", 0.0) == [False] * 4 and chosen("random", 1.0) == [True] * 4


def test_maps_are_scored_by_pixel():
    """A changed square of 4 pixels, and a false alarm of as many of which half does not count."""
    args = make_args(image_size=16, patch_size=8, cell_size=4, num_classes=2)
    pixels = torch.zeros(1, 16, 16, dtype=torch.uint8)
    pixels[0, :8, :8] = 1
    pixels[0, 8:, 8:12] = 255
    logits = torch.tensor([9.0, -9.0]).expand(1, 4, 4, 2).clone()
    logits[0, [0, 3]] = -logits[0, [0, 3]]
    said = 1 - change_scores.to_pixels(logits, args)[0, 0] > 0.5
    scores = change_scores.score_maps(logits, pixels, 0.5, args)
    tp = (said & (pixels[0] == 1)).sum().item()
    assert scores["f1"] == pytest.approx(2 * tp / ((said & (pixels[0] != 255)).sum().item() + 64))
    assert scores["recall"] == pytest.approx(tp / 64) and scores["precision"] < 0.75
    other = make_args(image_size=16, patch_size=4, cell_size=1, num_classes=2)
    exact = 9.0 * F.one_hot(change_data.label_cells(pixels % 255, 4, 1, 2), 2).float()
    assert change_scores.score_maps(exact, pixels, 0.5, other)["f1"] == 1.0


def test_thresholds_are_those_of_val():
    """Of a classifier whose probabilities on val are half of those on test."""
    args = make_args(image_size=8, patch_size=4, cell_size=1, num_classes=2, look_at="pair", cost=0.1)
    rng = torch.Generator().manual_seed(0)
    truth = (torch.rand(2, 300, 8, 8, generator=rng) < 0.2).byte()
    images = torch.zeros(2, 300, 10, 10, 6, dtype=torch.uint8)
    images[1] = 1
    val, test = (change_data.Pairs(x, y, torch.full((300, 2), 8)) for x, y in zip(images, truth, strict=True))

    def classify(images, rule):
        is_test = bool(images[0, 0, 0, 0] == 1)
        cells = change_data.label_cells(truth[int(is_test)], 4, 1, 2)
        p = (0.3 + 0.5 * cells) * (1.0 if is_test else 0.5)
        return torch.stack(((1 - p).log(), p.log()), -1), torch.zeros(300, 4), 1.0

    metrics, _ = change_scores.evaluate(classify, args, val, test)
    for method in change_scores.METHODS:
        assert metrics[f"eval/{method}_threshold"] == pytest.approx(0.16, abs=0.03)
        assert (
            metrics[f"eval/{method}_recall"] == 1.0 and metrics[f"eval/{method}_f1"] < 0.5
        )  # of test: all is changed


def test_pairs_are_drawn(tmp_path):
    _, _, pairs = make_pairs()
    logits, looks = torch.randn(2, 6, 16, 16, 3), torch.randint(3, (6, 16))
    figure = change_scores.draw_pairs(pairs, *logits, looks, make_args(), number=4)
    assert len(figure.axes) == 4 * 6 and math.isclose(figure.get_figheight(), 8)
    figure.savefig(tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
