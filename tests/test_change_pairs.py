"""The synthetic pairs, their tensors and batches, and the scores of change maps: brute force and closed forms."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from envs_shared.change_tasks import data as change_data
from envs_shared.change_tasks import pairs as change_pairs
from envs_shared.change_tasks import scores as change_scores

# Synthetic pairs


@pytest.mark.parametrize("env_id", change_pairs.ENV_IDS)
def test_pairs_depend_on_the_seed_and_their_number_alone(env_id):
    images, labels = change_pairs.make_pairs(env_id, 70, 64, 3, 5, 1)
    assert images.shape == (70, 2, 64, 64, 3) and labels.shape == (70, 64, 64)
    assert images.dtype == labels.dtype == np.uint8 and set(np.unique(labels)) == {0, 1, 2}
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

    monkeypatch.setattr(change_pairs, "roof_colours", paint)  # of plots [n] green, of buildings [n, k] magenta
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


# Tensors and batches


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((4, 8)), st.integers(2, 4), st.sampled_from((2, 3, 5)), st.integers(0, 1000))
def test_patch_labels_equal_brute_force(patch_size, side, num_classes, seed):
    rng, size = np.random.default_rng(seed), patch_size * side
    pixels = rng.integers(0, num_classes, (3, size, size)) * (rng.random((3, size, size)) < rng.choice((0.1, 0.3, 0.6)))
    pixels[rng.random(pixels.shape) < rng.choice((0.0, 0.5))] = 255
    pixels[0, :patch_size, :patch_size] = 255
    found = change_data.label_patches(torch.from_numpy(pixels.astype(np.uint8)), patch_size, num_classes)
    for m in range(3):
        for n in range(side * side):
            y, x = n // side * patch_size, n % side * patch_size
            cell = pixels[m, y : y + patch_size, x : x + patch_size].ravel()
            counted = cell[cell != 255]
            changed = counted[counted > 0]
            expected = -1
            if len(counted):
                is_changed = len(changed) > 0 and len(changed) >= 0.25 * len(counted)
                expected = np.bincount(changed).argmax() if is_changed else 0
            assert found[m, n] == expected


def make_pairs(num_pairs=6, size=32, patch_size=8, num_classes=3, seed=0):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_pairs, 2, size, size, 3), np.uint8)
    pixels = (rng.integers(0, num_classes, (num_pairs, size, size)) * (rng.random((num_pairs, 1, 1)) < 0.7)).astype(
        np.uint8
    )
    return images, pixels, change_data.to_pairs(images, pixels, patch_size, num_classes)


def test_pairs_are_reflected_beyond_their_borders():
    images, _, pairs = make_pairs()
    assert pairs.images.shape == (6, 6, 36, 36) and pairs.images.dtype == torch.uint8
    inner = pairs.images[:, :, 2:-2, 2:-2].unflatten(1, (2, 3)).permute(0, 1, 3, 4, 2)
    np.testing.assert_array_equal(inner, images)
    np.testing.assert_array_equal(pairs.images[:, :, 0], pairs.images[:, :, 4])
    np.testing.assert_array_equal(pairs.images[:, :, :, -1], pairs.images[:, :, :, -5])


def test_batches_are_the_eight_images_of_the_square_with_their_labels():
    _, _, pairs = make_pairs(1)
    pairs = pairs._replace(labels=torch.arange(16)[None])
    seen = {}
    torch.manual_seed(0)
    for _ in range(200):
        batch = change_data.draw_batch(pairs, 2, torch.device("cpu"))
        assert torch.equal(batch["images"][0], batch["images"][1])
        seen[tuple(batch["labels"][0].tolist())] = batch["images"][0]
    assert len(seen) == 8
    for labels, image in seen.items():  # each patch of the picture is where its label says
        for n, source in enumerate(labels):
            patch = image[:, 2:-2, 2:-2][:, n // 4 * 8 :, n % 4 * 8 :][:, :8, :8]
            original = pairs.images[0, :, 2:-2, 2:-2][:, source // 4 * 8 :, source % 4 * 8 :][:, :8, :8]
            assert torch.equal(patch.flatten().sort().values, original.flatten().sort().values)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70))
def test_pictures_of_any_size_are_split_and_joined(height, width):
    import tempfile
    from pathlib import Path

    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / f"{name}.png") for name in "ab"]
        for path in paths:
            Image.fromarray(picture).save(path)
        tiles, corners, shape = change_data.split_picture(*paths, 32, 8)
        assert shape == (height, width) and tiles.shape[1:] == (6, 36, 36)
        for channel in range(6):
            joined = change_data.join_tiles(tiles[:, channel, 2:-2, 2:-2].numpy(), corners, shape)
            np.testing.assert_array_equal(joined, picture[..., channel % 3])
        Image.fromarray(picture[: max(height - 1, 1), : max(width - 1, 1)]).save(paths[1])
        if height > 1 or width > 1:
            with pytest.raises(ValueError, match="different sizes"):
                change_data.split_picture(*paths, 32, 8)


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
    tp, said, true = (sum(map(f, pairs)) for f in (lambda p: p[0] > 0 < p[1], lambda p: p[1] > 0, lambda p: p[0] > 0))
    n = len(pairs)
    agreement = sum(a == b for a, b in pairs) / n
    chance = sum(sum(a == c for a, _ in pairs) * sum(b == c for _, b in pairs) for c in range(num_classes)) / n**2
    expected = {
        "precision": tp / said if said else 0.0,
        "recall": tp / true if true else 0.0,
        "f1": 2 * tp / (said + true) if said + true else 0.0,
        "iou": tp / (said + true - tp) if said + true else 0.0,
        "oa": agreement,
        "kappa": (agreement - chance) / (1 - chance) if chance < 1 else 0.0,
    }
    assert found == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_the_threshold_has_the_largest_f1(num_patches, seed):
    rng = np.random.default_rng(seed)
    probability, labels = rng.integers(0, 12, num_patches) / 12, rng.integers(-1, 3, num_patches)

    def f1(threshold):
        said, true = (probability > threshold) & (labels >= 0), labels > 0
        return 2 * (said & true).sum() / max((said.sum() + true.sum()), 1)

    threshold = change_scores.choose_threshold(torch.tensor(probability), torch.tensor(labels))
    best = max(f1(x) for x in np.arange(-0.5, 12) / 12) if (labels > 0).any() else f1(0.5)
    assert f1(threshold) == pytest.approx(best)


def test_logits_are_decided_and_upsampled():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.2, 0.1], [0.0, -1.0, 3.0]])
    assert change_scores.decide_classes(logits, 0.5).tolist() == [0, 1, 2]
    assert change_scores.decide_classes(logits, 0.9).tolist() == [0, 0, 2]
    grid = torch.arange(4.0).view(1, 4, 1).expand(1, 4, 2)
    pixels = change_scores.upsample_logits(grid, 4)
    assert pixels.shape == (1, 4, 4, 2)
    np.testing.assert_allclose(pixels[0, 0, :, 0], [0, 0.25, 0.75, 1])
    np.testing.assert_allclose(pixels[0, :, 0, 1], [0, 0.5, 1.5, 2])


def test_rules_stop_whom_they_should():
    p = torch.tensor([[0.1, 0.45, 0.6, 0.95]])

    def stops(method, level, step=0):
        return change_scores.make_rule(method, level, 0.5)(p, step).tolist()[0]

    assert stops("coarse", 0.5) == [True] * 4 and stops("everywhere", 0.5) == stops("cross_entropy", 0.5) == [False] * 4
    assert stops("confidence", 0.8) == stops("confidence", 0.8, 1) == [True, False, False, True]
    assert stops("band", 0.07) == [True, False, True, True] and stops("band", 0.07, 1) == [True] * 4
    assert stops("threshold", 0.5) == [True, True, False, False] and stops("threshold", 0.5, 1) == [True] * 4
    assert stops("random", 0.0) == [False] * 4 and stops("random", 1.0) == [True] * 4


@pytest.mark.parametrize("method", ["confidence", "threshold"])
def test_levels_are_found_by_bisection(method):
    def count_looks(level):
        return 2 * (level if method == "confidence" else 1 - level) ** 2

    level = change_scores.find_level(method, count_looks, 0.5, 1e-5)
    assert count_looks(level) == pytest.approx(0.5, abs=1e-4)


def test_maps_are_scored_by_patch_and_by_pixel():
    labels, pixels = torch.tensor([[1, 0, 0, -1]]), torch.zeros(1, 8, 8, dtype=torch.uint8)
    pixels[0, :4, :4], pixels[0, 4:, 4:] = 1, 255
    pairs = change_data.Pairs(torch.zeros(1, 6, 10, 10), pixels, labels)
    logits = torch.tensor([[[-9.0, 9.0], [9.0, -9.0], [-9.0, 9.0], [9.0, -9.0]]])
    looks = torch.tensor([[1, 0, 0, 0]])
    scores = change_scores.score_maps(pairs, logits, looks, 0.5)
    assert scores["precision"] == 0.5 and scores["recall"] == 1.0 and scores["oa"] == pytest.approx(2 / 3)
    assert scores["looks"] == 0.25 and scores["settled_acc"] == 0.5
    assert scores["pixel_f1"] == pytest.approx(2 * 16 / (16 + 32)) and scores["pixel_iou"] == pytest.approx(0.5)


def test_pairs_are_drawn(tmp_path):
    _, _, pairs = make_pairs()
    logits, looks = torch.randn(2, 6, 16, 3), torch.randint(3, (6, 16))
    figure = change_scores.draw_pairs(pairs, *logits, looks, number=4)
    assert len(figure.axes) == 4 * 6 and math.isclose(figure.get_figheight(), 8)
    figure.savefig(tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
