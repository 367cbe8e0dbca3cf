"""Bi-temporal pairs for change detection: procedural scenes of buildings. Real sets are read by files.py."""

from functools import partial
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

ENV_IDS = {  # share of the pictures with clouds; smallest and largest share of one that they cover; building density
    "buildings": (0.3, 0.02, 0.15, 9.0),
    "buildings-cloudy": (0.7, 0.2, 0.7, 14.0),
    "prints": (),
}
PATCH = 8  # prints: side of a patch in pixels
MARGIN, WINDOW = (
    30,
    28,
)  # pixels around the scene that are drawn and cut off; side of what an object is drawn in


class Pairs(NamedTuple):
    """Pictures of two dates and what changed between them."""

    images: np.ndarray  # uint8 [M, 2, H, W, 3], RGB
    labels: np.ndarray  # uint8 [M, H, W]: class of each pixel, 0: unchanged, 255: not counted


# ---- Scenes ----


def make_pairs(env_id: str, num_pairs: int, size: int, num_classes: int, *seed: int) -> Pairs:
    """Draw `num_pairs` scenes of `size` x `size` pixels; pair i depends on the seed and i alone.

    Buildings stay, appear, vanish or move (class 1 where there is one at the second date only, 2 at the first only; 1
    for both with two classes). Shadows, season, light, cars, car parks, bare plots, clouds and the registration differ
    as well, and are no change. For prints see `draw_prints`. Raises ValueError for an unknown env_id.
    """
    if env_id not in ENV_IDS:
        raise ValueError(f"unknown pairs (known: {', '.join(ENV_IDS)})")
    images = np.empty((num_pairs, 2, size, size, 3), np.uint8)
    labels = np.empty((num_pairs, size, size), np.uint8)
    for start in tqdm(range(0, num_pairs, 64), desc="draw", unit="batch", leave=False, delay=2.0):
        rng = np.random.default_rng([*seed, start])
        part = slice(start, start + 64)
        drawn = draw_prints(rng, size) if env_id == "prints" else draw_scenes(rng, ENV_IDS[env_id], size)
        images[part], labels[part] = (x[: num_pairs - start] for x in drawn)
    return Pairs(images, np.minimum(labels, num_classes - 1))


def draw_scenes(rng: np.random.Generator, clouds: tuple, size: int, num_scenes: int = 64) -> tuple:
    """Images uint8 [64, 2, S, S, 3] and labels uint8 [64, S, S]."""
    side, dates = size + 2 * MARGIN, []
    buildings = place(rng, num_scenes, side, clouds[3], 3.0, 8.0)
    fate = rng.choice(
        5, buildings["x"].shape, p=(0.37, 0.12, 0.12, 0.08, 0.31)
    )  # stays, comes, goes, moves, is absent
    is_there = [np.isin(fate, (0, 2, 3)), np.isin(fate, (0, 1, 3))]
    parks = place(rng, num_scenes, side, 2.0, 3.0, 7.0)
    plots = place(rng, num_scenes, side, 3.0, 3.0, 7.0)
    roofs = roof_colours(rng, buildings["x"].shape)
    parcels = smooth_noise(rng, num_scenes, side, 16)
    ground = rng.uniform((60, 70, 45), (100, 105, 75), (num_scenes, 2, 3))
    road = rng.uniform(-1, 1, (num_scenes, 3))
    footprints = []
    for date in range(2):
        owner = np.zeros((num_scenes, side, side), np.uint16)
        season = (
            ground * rng.uniform(0.85, 1.2, (num_scenes, 1, 3)) * rng.uniform(0.93, 1.07, (num_scenes, 2, 3))
        )
        palette = [season[:, 0], season[:, 1], rng.uniform(85, 110, (num_scenes, 1)) + np.zeros(3)]
        rough = [4.0, 4.0, 3.0]
        owner[parcels > 0.3] = 1
        grid = (np.arange(side) - side / 2) / side
        distance = road[:, :1, None] * grid + road[:, 1:2, None] * grid[:, None] + 0.3 * road[:, 2:, None]
        owner[np.abs(distance) < 0.035 * np.hypot(road[:, 0], road[:, 1])[:, None, None]] = 2
        # Bare plots: as large and as bright as a roof, but rough
        for k in range(plots["x"].shape[1]):
            stamp(owner, plots, k, rng.random(num_scenes) < 0.5, partial(fill, len(palette)))
            palette.append(roof_colours(rng, (num_scenes,)) * 0.9)
            rough.append(40.0)
        # Car parks: rows of cars
        for k in range(parks["x"].shape[1]):
            n = len(palette)
            stamp(owner, parks, k, rng.random(num_scenes) < 0.5, partial(fill_with_cars, n))
            palette += [np.full((num_scenes, 3), 95.0), rng.uniform(120, 250, (num_scenes, 3))]
            palette += [rng.uniform(120, 250, (num_scenes, 3)), rng.uniform(20, 250, (num_scenes, 3))]
            rough += [3.0, 10.0, 10.0, 10.0]
        cars = place(rng, num_scenes, side, 4.0, 1.0, 1.2)
        cars["hv"] = cars["hu"] * 2
        for k in range(cars["x"].shape[1]):
            stamp(owner, cars, k, np.full(num_scenes, True), partial(fill, len(palette)))
            palette.append(rng.uniform(20, 250, (num_scenes, 3)))
            rough.append(3.0)
        # Shadows, then the roofs, in two shades
        first_roof = len(palette)
        sun = rng.uniform(0, 2 * np.pi, num_scenes)
        length = rng.uniform(0.5, 3.5, num_scenes)
        shadow = np.zeros_like(owner)
        moved = {name: x.copy() for name, x in buildings.items()}
        if date == 1:
            for axis in "xy":
                jump = rng.uniform(4, 9, fate.shape) * rng.choice((-1, 1), fate.shape)
                moved[axis] += np.where(fate == 3, jump, 0.0)
        for k in range(fate.shape[1]):
            for part in (0.5, 1.0):
                cast = {name: x.copy() for name, x in moved.items()}
                cast["x"] = cast["x"] + part * (length * np.cos(sun))[:, None]
                cast["y"] = cast["y"] + part * (length * np.sin(sun))[:, None]
                stamp(shadow, cast, k, is_there[date][:, k], partial(fill, 1))
        for k in range(fate.shape[1]):
            n = len(palette)
            stamp(owner, moved, k, is_there[date][:, k], partial(fill_with_roof, n))
            ridge = rng.uniform(0.8, 1.0, (num_scenes, 1))
            palette += [roofs[:, k], roofs[:, k] * ridge, roofs[:, k] * 0.6]
            rough += [3.0, 3.0, 3.0]
        inner = slice(MARGIN - 2, 2 - MARGIN)  # two pixels more than the scene, to be shifted by
        owner, shadow = owner[:, inner, inner], shadow[:, inner, inner]
        footprints.append((owner >= first_roof)[:, 2:-2, 2:-2])
        shade = 1.0 - np.float32(0.5) * (shadow * (owner < first_roof))
        colours, scene = np.stack(palette, 1).astype(np.float32), np.arange(num_scenes)[:, None, None]
        noise = rng.standard_normal(owner.shape, np.float32) * np.asarray(rough, np.float32)[owner]
        noise += 5 * smooth_noise(rng, num_scenes, owner.shape[1], 8)
        image = (colours[scene, owner] + noise[..., None]) * shade[..., None]
        dates.append(add_light_and_clouds(rng, image, clouds))
    images = np.empty((num_scenes, 2, size, size, 3), np.uint8)
    dates[0], dates[1] = (
        dates[0][:, 2:-2, 2:-2],
        shift_images(dates[1], rng.uniform(-1.0, 1.0, (num_scenes, 2))),
    )
    for date, image in enumerate(dates):
        image += rng.standard_normal(image.shape, np.float32) * 3
        images[:, date] = image.clip(0, 255)
    before, after = footprints
    return images, (after & ~before) + 2 * (before & ~after).astype(np.uint8)


def draw_prints(rng: np.random.Generator, size: int, num_scenes: int = 64) -> tuple:
    """Images uint8 [64, 2, S, S, 3] and labels uint8 [64, S, S] of patches where one look has to be for the next.

    Of the patches 40 % are red. A red one has either of two fine prints at each date, which averages over 4 pixels do
    not tell apart, and has changed where they differ. In half of the red ones the first date is blank instead, and then
    they have not changed. The first date alone says nothing of a change, so that a look at it gains nothing by itself;
    it tells whether one at the second date is worth anything.
    """
    shape = (num_scenes, size // PATCH, size // PATCH)
    is_red = rng.random(shape) < 0.4
    is_blank = rng.random(shape) < 0.5
    prints = rng.random((2, *shape)) < 0.5
    is_changed = is_red & ~is_blank & (prints[0] != prints[1])
    is_red, is_blank, is_changed, *prints = (
        x.repeat(PATCH, 1).repeat(PATCH, 2) for x in (is_red, is_blank, is_changed, *prints)
    )
    board = np.add.outer(np.arange(size) // 2, np.arange(size) // 2) % 2 == 1  # squares of 2 pixels
    images = np.zeros((num_scenes, 2, size, size, 3), np.uint8)
    for date in range(2):
        images[:, date, ..., 0] = 160 * (is_red & (board ^ prints[date]))
    images[:, 0, ..., 0][is_red & is_blank] = 80
    return images, is_changed.astype(np.uint8)


def place(rng, num_scenes: int, side: int, density: float, low: float, high: float) -> dict[str, np.ndarray]:
    """Centres, half sides (pixels) and directions of rectangles [num_scenes, number], `density` on 64 x 64 pixels."""
    reach = WINDOW / 2 + 13
    shape = num_scenes, round(density * ((side - 2 * reach) / 64) ** 2)
    place = {axis: rng.uniform(reach, side - reach, shape) for axis in "xy"}
    return (
        place
        | {"hu": rng.uniform(low, high, shape), "hv": rng.uniform(low, high, shape)}
        | {"angle": rng.choice((0.0, 0.4, 0.8), (num_scenes, 1)) + rng.normal(0, 0.05, shape)}
    )


def stamp(canvas: np.ndarray, shapes: dict, k: int, is_there: np.ndarray, value) -> None:
    """Write `value(u, v, hu, hv)` into the pixels of rectangle k of the scenes where `is_there`."""
    scene = np.flatnonzero(is_there)
    x, y, hu, hv, angle = (shapes[name][scene, k, None, None] for name in ("x", "y", "hu", "hv", "angle"))
    left, top = (np.floor(c - WINDOW / 2).astype(np.int64) for c in (x, y))
    columns, rows = left + np.arange(WINDOW), top + np.arange(WINDOW)[:, None]
    dx, dy, cos, sin = columns - x, rows - y, np.cos(angle), np.sin(angle)
    u, v = cos * dx + sin * dy, cos * dy - sin * dx
    inside = (np.abs(u) < hu) & (np.abs(v) < hv)
    at = scene[:, None, None], rows, columns
    canvas[at] = np.where(inside, value(u, v, hu, hv), canvas[at])


def fill(n: int, *_) -> int:
    """Palette entry n."""
    return n


def fill_with_cars(n: int, u: np.ndarray, v: np.ndarray, *_) -> np.ndarray:
    """Palette entries n (asphalt) to n + 3 of rows of cars at u, v (pixels)."""
    is_car = (u % 3.0 < 1.9) & (v % 5.0 < 3.8)
    return n + is_car * (1 + (np.floor(u / 3.0) * 7 + np.floor(v / 5.0) * 5).astype(np.int64) % 3)


def fill_with_roof(n: int, u: np.ndarray, v: np.ndarray, hu: np.ndarray, hv: np.ndarray) -> np.ndarray:
    """Palette entries n and n + 1 (the two sides of a roof) and n + 2 (its border) at u, v of half sides hu, hv."""
    return n + np.where((hu - abs(u) < 1.2) | (hv - abs(v) < 1.2), 2, u > 0)


def roof_colours(rng, shape: tuple) -> np.ndarray:
    """RGB of roofs [*shape, 3]: grey, red or white."""
    base = np.asarray([[150, 150, 155], [185, 110, 90], [215, 215, 205]])[rng.integers(3, size=shape)]
    return base + rng.normal(0, 14, (*shape, 3))


def smooth_noise(rng, num_scenes: int, side: int, cell: int) -> np.ndarray:
    """Noise [num_scenes, side, side] of mean 0 and deviation about 1 that varies over `cell` pixels."""
    knots = rng.standard_normal((num_scenes, side // cell + 2, side // cell + 2)).astype(np.float32)
    where, inside = np.divmod(np.arange(side) / cell, 1)
    where, inside = where.astype(np.int64), (inside * inside * (3 - 2 * inside)).astype(np.float32)
    rows = knots[:, where] * (1 - inside)[:, None] + knots[:, where + 1] * inside[:, None]
    return 1.4 * (rows[:, :, where] * (1 - inside) + rows[:, :, where + 1] * inside)


def add_light_and_clouds(rng, image: np.ndarray, clouds: tuple) -> np.ndarray:
    """Gain, a ramp of illumination, and white clouds with soft borders over images [n, side, side, 3]."""
    num_scenes, side = image.shape[:2]
    share, low, high, _ = clouds
    grid = np.linspace(-0.5, 0.5, side, dtype=np.float32)
    ramp = rng.uniform(-0.15, 0.15, (num_scenes, 2, 1, 1)).astype(np.float32)
    light = rng.uniform(0.92, 1.08, (num_scenes, 1, 1)).astype(np.float32) * (
        1 + ramp[:, 0] * grid + ramp[:, 1] * grid[:, None]
    )
    image = image * light[..., None]
    field = smooth_noise(rng, num_scenes, side, 24) + 0.3 * smooth_noise(rng, num_scenes, side, 6)
    cover = np.where(rng.random(num_scenes) < share, rng.uniform(low, high, num_scenes), 0.0)
    level = np.sort(field.reshape(num_scenes, -1)[:, ::7], 1)
    index = np.minimum((1 - cover) * level.shape[1], level.shape[1] - 1).astype(np.int64)
    level = np.where(cover > 0, level[np.arange(num_scenes), index], np.inf).astype(np.float32)
    opacity = ((field - level[:, None, None]) * 4 + 0.5).clip(0, 1)[..., None]
    white = 225 + 12 * smooth_noise(rng, num_scenes, side, 12)[..., None]
    return image + opacity * (white - image)


def shift_images(images: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Images [n, side, side, 3] moved by `shift` [n, 2] pixels (rows, columns; below 2), without the 2 outer pixels."""
    for axis in (1, 2):
        length = images.shape[axis] - 4
        moved = np.empty((*images.shape[:axis], length, *images.shape[axis + 1 :]), images.dtype)
        for i, offset in enumerate(2.0 - shift[:, axis - 1]):
            whole, part = int(offset), np.float32(offset % 1)
            rows = images[i] if axis == 1 else images[i].swapaxes(0, 1)
            blend = (1 - part) * rows[whole : whole + length] + part * rows[whole + 1 : whole + 1 + length]
            moved[i] = blend if axis == 1 else blend.swapaxes(0, 1)
        images = moved
    return images
