"""Pairs of pictures as tensors: synthetic ones or those of a folder, random crops of them, and pictures of any size."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from envs_shared.change_tasks import files as change_files
from envs_shared.change_tasks import pairs as change_pairs
from envs_shared.change_tasks import scores as change_scores

ENV_IDS = tuple(change_pairs.ENV_IDS)  # of synthetic pairs
FEW_PAIRS = 20  # pairs of val with change, below which a threshold is hardly known


class Pairs(NamedTuple):
    """M pairs of pictures, reflected beyond their borders by the side c of a cell; smaller ones are padded."""

    images: torch.Tensor  # uint8 [M, H + 2 c, W + 2 c, 6], RGB before, RGB after
    pixels: torch.Tensor  # uint8 [M, H, W], class of each pixel; 255: does not count
    sizes: torch.Tensor  # int64 [M, 2], height and width without padding


def label_cells(pixels: torch.Tensor, patch_size: int, cell_size: int, num_classes: int) -> torch.Tensor:
    """Classes int64 [B, N, G] of the G cells of each patch from those of pixels [B, H, W]; -1 where no pixel counts.

    A cell is changed where at least half of the pixels that count are; it has the most frequent of their classes.
    """
    cells = (
        pixels.unfold(1, cell_size, cell_size).unfold(2, cell_size, cell_size).flatten(3)
    )  # [B, H / c, W / c, c c]
    counts = torch.stack([(cells == c).sum(-1) for c in range(num_classes)], -1)  # [B, H / c, W / c, C]
    total = counts.sum(-1)
    changed = counts[..., 1:].sum(-1)
    classes = torch.where(2 * changed >= total.clamp(min=1), counts[..., 1:].argmax(-1) + 1, 0)
    classes = classes.masked_fill(total == 0, -1)
    side = patch_size // cell_size
    patches = classes.unfold(1, side, side).unfold(2, side, side)  # [B, H / P, W / P, side, side]
    return patches.flatten(3).flatten(1, 2)


def to_float(images: torch.Tensor) -> torch.Tensor:
    """Pictures [..., 6, h, w] in [-0.5, 0.5] of bytes [..., h, w, 6]."""
    return images.movedim(-1, -3).float() / 255 - 0.5


def to_pairs(images: np.ndarray, pixels: np.ndarray, cell_size: int) -> Pairs:
    """Pairs of images uint8 [M, 2, H, W, 3] and classes uint8 [M, H, W]."""
    images = np.concatenate((images[:, 0], images[:, 1]), -1)
    widths = ((0, 0), (cell_size, cell_size), (cell_size, cell_size), (0, 0))
    images = torch.from_numpy(np.pad(images, widths, mode="reflect"))
    pixels = torch.from_numpy(pixels)
    return Pairs(images, pixels, torch.tensor(pixels.shape[1:]).expand(len(pixels), 2))


def stack_pictures(split: change_files.Split, cell_size: int) -> Pairs:
    """The whole pictures of a split, in the corner of as large ones as the largest needs."""
    sizes = torch.tensor([label.shape for label in split.labels])
    height, width = sizes.amax(0).tolist()
    images = torch.zeros(len(sizes), height + 2 * cell_size, width + 2 * cell_size, 6, dtype=torch.uint8)
    pixels = torch.full((len(sizes), height, width), change_files.IGNORE, dtype=torch.uint8)
    for i, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
        picture = to_pairs(image[None], label[None], cell_size)
        images[i, : picture.images.shape[1], : picture.images.shape[2]] = picture.images[0]
        pixels[i, : label.shape[0], : label.shape[1]] = picture.pixels[0]
    return Pairs(images, pixels, sizes)


def load_pairs(args, fail) -> dict[str, Pairs]:
    """Train, val and test of `args` (env_id, data_dir, ...); calls `fail` with a message where they cannot be had."""
    pairs = {}
    try:
        if args.data_dir is None:
            numbers = args.num_train_pairs, 5 * args.eval_episodes, 5 * args.eval_episodes
            sizes = args.image_size, args.num_classes, args.data_seed
            for i, (split, number) in enumerate(zip(change_files.SPLITS, numbers, strict=True)):
                drawn = change_pairs.make_pairs(args.env_id, number, *sizes, i)
                pairs[split] = to_pairs(*drawn, args.cell_size)
            return pairs
        splits = change_files.read_data_dir(args.data_dir, args.num_classes, args.dir_names)
        lines = change_files.audit(splits)
        for split, pictures in splits.items():
            change_files.check_sizes(pictures, args.image_size, f"{args.data_dir}: {split}")
        pairs["train"] = stack_pictures(
            splits.pop("train"), args.cell_size
        )  # one by one, as they fill the memory
        for split in ("val", "test"):
            pairs[split] = to_pairs(*change_files.cut(splits.pop(split), args.image_size), args.cell_size)
        num_changed = int(((pairs["val"].pixels % change_files.IGNORE) > 0).any(2).any(1).sum())
        if num_changed < FEW_PAIRS:
            lines.append(f"warning: {num_changed} crops of val have a change; the threshold stays near 0.5")
        if int(os.environ.get("RANK", 0)) == 0:
            print("\n".join(lines), file=sys.stderr)
    except (ValueError, MemoryError) as error:
        fail(f"--data-dir: {error}" if args.data_dir is not None else f"--env-id {args.env_id}: {error}")
    return pairs


def draw_batch(
    pairs: Pairs, args, device: torch.device, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random crops of random pairs: pictures [B, 6, S + 2 c, S + 2 c] in about [-0.5, 0.5], and their cells [B, N, G].

    Each crop is turned and mirrored into one of the eight images of the square, and each date has a contrast and a
    brightness of its own, by up to `args.jitter`.
    """
    size, margin = args.image_size, args.cell_size
    pair = torch.randint(len(pairs.sizes), (batch_size,))
    room = pairs.sizes[pair] - size  # [B, 2]
    corner = (torch.rand(batch_size, 2) * (room + 1)).long().unsqueeze(-1)  # [B, 2, 1]
    is_flipped = torch.rand(batch_size, 2, 1) < 0.5
    is_swapped = torch.rand(batch_size, 1, 1) < 0.5

    def crop(x: torch.Tensor, length: int) -> torch.Tensor:
        steps = torch.arange(length).expand(batch_size, 2, length)
        places = corner + torch.where(
            is_flipped, length - 1 - steps, steps
        )  # [B, 2, length], rows and columns
        rows, columns = places.unbind(1)
        rows = torch.where(is_swapped, rows.unsqueeze(1), rows.unsqueeze(2))  # [B, length, length]
        columns = torch.where(is_swapped, columns.unsqueeze(2), columns.unsqueeze(1))
        index = (pair.view(-1, 1, 1) * x.shape[1] + rows) * x.shape[2] + columns
        found = x.flatten(0, 2).index_select(0, index.flatten())  # several times faster than by three indices
        return found.view(*index.shape, *x.shape[3:]).to(device, non_blocking=True)

    images = to_float(crop(pairs.images, size + 2 * margin)).contiguous()
    strength = args.jitter * (torch.rand(2, batch_size, 2) * 2 - 1).to(device)
    contrast, brightness = strength.repeat_interleave(3, 2).unsqueeze(-1).unsqueeze(-1)  # [B, 6, 1, 1]
    labels = label_cells(crop(pairs.pixels, size), args.patch_size, args.cell_size, args.num_classes)
    return images * (1 + contrast) + brightness, labels


# ---- Pictures of any size ----


def name_pairs(path_a: str, path_b: str) -> list[tuple[str, Path, Path]]:
    """Name and files of each pair: of two pictures, or of two folders, by name; ValueError where that is not so."""
    a, b = Path(path_a), Path(path_b)
    if not a.is_dir() and not b.is_dir():
        return [(a.stem, a, b)]
    pictures = [
        change_files.list_pictures(folder, "two pictures or two folders are needed") for folder in (a, b)
    ]
    if not pictures[0]:
        raise ValueError(f"{a}: no pictures")
    lacking = sorted(pictures[0].keys() ^ pictures[1].keys())
    if lacking:
        raise ValueError(f"{b if lacking[0] in pictures[0] else a}: no picture {lacking[0]} for its pair")
    return [(name, pictures[0][name], pictures[1][name]) for name in sorted(pictures[0])]


def split_picture(path_a: Path, path_b: Path, size: int, cell_size: int) -> tuple:
    """Windows as in `Pairs`, which overlap by half, of two picture files, their corners and (H, W).

    Pictures smaller than a window are mirrored. ValueError where a file is no picture or their sizes differ.
    """
    pair = [change_files.read_image(path) for path in (path_a, path_b)]
    if pair[0].shape != pair[1].shape:
        raise ValueError(
            f"{path_a} and {path_b} have different sizes, {pair[0].shape[:2]} and {pair[1].shape[:2]}"
        )
    height, width = pair[0].shape[:2]
    lack = ((0, 0), (0, max(size - height, 0)), (0, max(size - width, 0)), (0, 0))
    pair = np.pad(np.stack(pair), lack, mode="symmetric")
    starts = [sorted({*range(0, n - size, size // 2), n - size}) for n in pair.shape[1:3]]
    corners = [(y, x) for y in starts[0] for x in starts[1]]
    windows = np.stack([pair[:, y : y + size, x : x + size] for y, x in corners])
    images = to_pairs(windows, np.zeros((len(windows), size, size), np.uint8), cell_size).images
    return images, corners, (height, width)


def join_windows(windows: np.ndarray, corners: list[tuple[int, int]], shape: tuple[int, int]) -> np.ndarray:
    """The mean [H, W] of windows [M, size, size] at `corners`, each with weights that fall to its border."""
    size = windows.shape[1]
    ramp = 1 - np.abs(np.arange(size) + 0.5 - size / 2) / (size / 2)
    weight = np.outer(ramp, ramp)
    extent = np.max(corners, 0) + size
    total = np.zeros(extent)
    weights = np.zeros(extent)
    for (y, x), window in zip(corners, windows, strict=True):
        total[y : y + size, x : x + size] += weight * window
        weights[y : y + size, x : x + size] += weight
    return (total / weights)[: shape[0], : shape[1]]


def write_predictions(args, classify, threshold: float, fail) -> None:
    """Write a mask, 255 where change is likelier than `threshold`, and a map of probability for each pair of `args`.

    `classify(images)` gives logits [M, N, G, C] and looks [M, N]. Calls `fail` where a file cannot be read or written;
    no file is written before all pairs were read and their names are free.
    """
    folder = Path(args.output)
    try:
        pairs = name_pairs(*args.predict)
        targets = [folder / f"{name}_{kind}.png" for name, _, _ in pairs for kind in ("mask", "probability")]
        for target in targets:
            if target.exists():
                fail(f"--output: {target} exists, and is not overwritten")
        for _, path_a, path_b in pairs:  # what is wrong with one is told before any is written
            split_picture(path_a, path_b, args.image_size, args.cell_size)
        for name, path_a, path_b in pairs:
            images, corners, shape = split_picture(path_a, path_b, args.image_size, args.cell_size)
            logits, looks, _ = classify(images)
            parts = [change_scores.to_pixels(x, args)[:, 0] for x in logits.split(64)]
            probability = join_windows(1 - torch.cat(parts).numpy(), corners, shape)
            folder.mkdir(parents=True, exist_ok=True)
            change_files.write_picture(folder / f"{name}_mask.png", 255 * (probability > threshold))
            change_files.write_picture(folder / f"{name}_probability.png", np.rint(255 * probability))
            share = 100 * (probability > threshold).mean()
            print(f"{name}: {share:.1f} % changed, {looks.float().mean():.2f} looks per query")
    except OSError as error:
        fail(f"--predict, --output: {error.filename}: {error.strerror}")
    except ValueError as error:
        fail(f"--predict, --output: {error}")
