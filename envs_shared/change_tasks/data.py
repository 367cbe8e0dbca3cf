"""Pairs of pictures as tensors: synthetic ones or those of a folder, batches of them, and pictures of any size."""

import math
import os
import sys
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from envs_shared.change_tasks import files as change_files
from envs_shared.change_tasks import pairs as change_pairs
from envs_shared.change_tasks import scores as change_scores


class Pairs(NamedTuple):
    """M pairs. The pictures are reflected beyond their borders, by a quarter of a patch."""

    images: torch.Tensor  # uint8 [M, 6, H + P / 2, W + P / 2], RGB before, RGB after
    pixels: torch.Tensor  # uint8 [M, H, W], class of each pixel; 255: does not count
    labels: torch.Tensor  # int64 [M, N], class of each patch; -1: does not count


def label_patches(pixels: torch.Tensor, patch_size: int, num_classes: int, change_share: float = 0.25) -> torch.Tensor:
    """Classes [M, N] of patches from those of pixels [M, H, W].

    A patch is changed where at least `change_share` of the pixels that count are; it has their most frequent class.
    """
    cells = pixels.unfold(1, patch_size, patch_size).unfold(2, patch_size, patch_size).flatten(3).flatten(1, 2)
    counts = torch.stack([(cells == c).sum(-1) for c in range(num_classes)], -1)  # [M, N, C]
    total, changed = counts.sum(-1), counts[..., 1:].sum(-1)
    classes = torch.where((changed >= change_share * total) & (changed > 0), counts[..., 1:].argmax(-1) + 1, 0)
    return classes.masked_fill(total == 0, -1)


def to_pairs(images: np.ndarray, pixels: np.ndarray, patch_size: int, num_classes: int) -> Pairs:
    """Pairs of images uint8 [M, 2, H, W, 3] and classes uint8 [M, H, W]."""
    margin = patch_size // 4
    widths = (0, 0), (0, 0), (0, 0), (margin, margin), (margin, margin)
    images = torch.from_numpy(np.pad(images.transpose(0, 1, 4, 2, 3), widths, mode="reflect")).flatten(1, 2)
    pixels = torch.from_numpy(pixels)
    return Pairs(images, pixels, label_patches(pixels, patch_size, num_classes))


def load_pairs(args, fail) -> dict[str, Pairs]:
    """Train, val and test of `args` (env_id, data_dir, ...); calls `fail` with a message where they cannot be had."""
    pairs = {}
    try:
        if args.data_dir is None:
            numbers = args.num_train_pairs, args.num_eval_pairs, args.num_eval_pairs
            sizes = args.image_size, args.num_classes, args.data_seed
            for i, (split, number) in enumerate(zip(change_files.SPLITS, numbers, strict=True)):
                drawn = change_pairs.make_pairs(args.env_id, number, *sizes, i)
                pairs[split] = to_pairs(*drawn, args.patch_size, args.num_classes)
        else:
            splits = change_files.read_data_dir(args.data_dir, args.num_classes, args.dir_names)
            lines = change_files.audit(splits)
            for split in change_files.SPLITS:  # one by one, as real sets fill the memory
                crops = change_files.cut(splits.pop(split), args.image_size)
                pairs[split] = to_pairs(*crops, args.patch_size, args.num_classes)
            if int(os.environ.get("RANK", 0)) == 0:
                print("\n".join(lines), file=sys.stderr)
    except (ValueError, MemoryError) as error:
        fail(f"--data-dir: {error}" if args.data_dir is not None else f"--env-id {args.env_id}: {error}")
    return pairs


def draw_batch(pairs: Pairs, batch_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Images and labels of random pairs, all turned and mirrored alike, into one of the eight images of the square."""
    index, (swap, *flips) = torch.randint(len(pairs.labels), (batch_size,)), torch.randint(2, (3,)).tolist()
    side = math.isqrt(pairs.labels.shape[1])
    batch = {"images": pairs.images[index], "labels": pairs.labels[index].unflatten(1, (side, side))}
    for name, x in batch.items():
        x = x.flip([axis for axis, is_flipped in zip((-1, -2), flips, strict=True) if is_flipped])
        batch[name] = (x.transpose(-1, -2) if swap else x).contiguous().to(device, non_blocking=True)
    return batch | {"labels": batch["labels"].flatten(1)}


def tile_mean(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Each query's mean of x [B, N, D] over its tile of `tile` x `tile` queries."""
    if tile == 1:
        return x
    side = math.isqrt(x.shape[1])
    means = F.avg_pool2d(x.transpose(1, 2).unflatten(2, (side, side)), tile)
    return means.repeat_interleave(tile, 2).repeat_interleave(tile, 3).flatten(2).transpose(1, 2)


def any_in_tile(x: torch.Tensor, tile: int) -> torch.Tensor:
    """Whether any query of the same tile is marked in x [B, N]."""
    return x if tile == 1 else tile_mean(x.float().unsqueeze(-1), tile).squeeze(-1) > 0


def spread_tiles(x: torch.Tensor, tile: int) -> torch.Tensor:
    """x [B, N] with the first query of each tile in the place of its others."""
    if tile == 1:
        return x
    first = x.unflatten(1, (math.isqrt(x.shape[1]), -1))[:, ::tile, ::tile]
    return first.repeat_interleave(tile, 1).repeat_interleave(tile, 2).flatten(1)


def split_picture(path_a: str, path_b: str, size: int, patch_size: int) -> tuple:
    """Tiles [M, 6, ...] as in `Pairs` of two picture files, their corners and (H, W); borders that lack are reflected.

    ValueError where a file is no picture or their sizes differ.
    """
    a, b = change_files.read_image(path_a), change_files.read_image(path_b)
    if a.shape != b.shape:
        raise ValueError(f"{path_a} and {path_b} have different sizes, {a.shape[:2]} and {b.shape[:2]}")
    height, width = a.shape[:2]
    lack = (0, -height % size), (0, -width % size)
    pair = np.stack([np.pad(x, (*lack, (0, 0)), mode="symmetric") for x in (a, b)])
    corners = [(y, x) for y in range(0, height, size) for x in range(0, width, size)]
    tiles = np.stack([pair[:, y : y + size, x : x + size] for y, x in corners])
    return to_pairs(tiles, np.zeros((len(tiles), size, size), np.uint8), patch_size, 2).images, corners, (height, width)


def join_tiles(tiles: np.ndarray, corners: list[tuple[int, int]], shape: tuple[int, int]) -> np.ndarray:
    """The picture [H, W] of tiles [M, size, size] at `corners`."""
    size = tiles.shape[1]
    canvas = np.zeros([-(-n // size) * size for n in shape], tiles.dtype)
    for (y, x), tile in zip(corners, tiles, strict=True):
        canvas[y : y + size, x : x + size] = tile
    return canvas[: shape[0], : shape[1]]


def write_change_map(args, classify, fail) -> str:
    """Write where change between the pictures args.predict is likely, above 0.5, to args.output; tells what was found.

    `classify(tiles)` gives logits [M, N, C] and looks [M, N]. Calls `fail` where a file cannot be read or written.
    """
    try:
        if not args.output.lower().endswith(".png") or os.path.lexists(args.output):  # before any work
            raise ValueError(f"{args.output}: {'exists' if os.path.lexists(args.output) else 'must end in .png'}")
        tiles, corners, shape = split_picture(*args.predict, args.image_size, args.patch_size)
        logits, looks, _ = classify(tiles)
        classes = change_scores.decide_classes(change_scores.upsample_logits(logits, args.image_size), 0.5)
        classes = join_tiles(classes.numpy(), corners, shape)
        change_files.write_map(args.output, classes)
    except ValueError as error:
        fail(f"--predict: {error}")
    share, mean_looks = 100 * (classes > 0).mean(), looks.float().mean()
    return f"{args.output}: {share:.1f} % changed, {mean_looks:.2f} looks per query"
