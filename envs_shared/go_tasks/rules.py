"""Go on many boards at once: area scoring, no suicide, positional superko, as tensors on the CPU or a GPU.

A board of n x n points is a row of S = (n + 2) (n + 1) + 1 cells with a column and two rows of walls, so that the
neighbours of cell p are p - 1, p + 1, p - n - 1 and p + n + 1. Moves are numbered row * n + column, the pass is n * n.
"""

from typing import NamedTuple

import numpy as np
import torch

NUM_PLANES = 9
LEGAL_PLANE = 4  # the one of legal moves
WALL = 2  # in `stones`, beside 1 for black, -1 for white and 0 for empty


class Boards(NamedTuple):
    """B positions and how they came about. Passing twice, or 2 n^2 moves, ends a game."""

    stones: torch.Tensor  # int8 [B, S]: 1 black, -1 white, 0 empty, 2 wall
    groups: torch.Tensor  # int64 [B, S]: a cell of the group of each stone; the last cell, a wall, elsewhere
    in_atari: torch.Tensor  # bool [B, S]: stones whose group has one liberty left
    to_play: torch.Tensor  # int8 [B]: 1 black, -1 white
    num_moves: torch.Tensor  # int64 [B], passes included
    num_passes: torch.Tensor  # int64 [B] in a row, up to 2
    last_move: torch.Tensor  # int64 [B], -1 where there is none
    history: (
        torch.Tensor
    )  # int64 [B, 2 n^2 + 1]: hash of the position after each move; 0 for an empty board and unused

    @property
    def is_over(self) -> torch.Tensor:
        """Which games are over, [B]."""
        return (self.num_passes >= 2) | (self.num_moves >= self.history.shape[1] - 1)

    def pick(self, index: torch.Tensor) -> "Boards":
        """The boards of an index [R] or a mask [B]."""
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0]  # once, not for each tensor
        return Boards(*(x[index] for x in self))

    def replace_rows(self, index: torch.Tensor, boards: "Boards") -> None:
        """Put `boards` in the place of those of an index [R] or a mask [B]."""
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        for x, new in zip(self, boards, strict=True):
            x[index] = new

    def to(self, device: torch.device) -> "Boards":
        """The boards on `device`."""
        return Boards(*(x.to(device) for x in self))

    def to_types(self, types: "Boards") -> "Boards":
        """The boards with the numbers of each tensor in its type among `types`."""
        return Boards(*(x.to(dtype) for x, dtype in zip(self, types, strict=True)))


# Types that hold boards up to 19x19 in few bytes
STORED_TYPES = Boards(
    stones=torch.int8,
    groups=torch.int16,
    in_atari=torch.bool,
    to_play=torch.int8,
    num_moves=torch.int16,
    num_passes=torch.int8,
    last_move=torch.int16,
    history=torch.int64,
)


class Go:
    """The rules on boards of one size."""

    def __init__(self, size: int, device: torch.device | str = "cpu"):
        if not 1 <= size <= 19:
            raise ValueError(f"boards have 1 to 19 lines, not {size}")
        self.size, self.width, self.num_points = size, size + 1, size * size
        self.num_cells, self.max_moves = (size + 2) * (size + 1) + 1, 2 * size * size
        self.device = torch.device(device)
        rows, columns = np.divmod(np.arange(self.num_points), size)
        self.cells = torch.from_numpy((rows + 1) * self.width + columns + 1).to(
            self.device
        )  # [n^2] cell of a move
        # Keys for sums modulo 2^64: a position's hash is the sum over its stones
        keys = np.random.default_rng(0).integers(-(2**63), 2**63, (2, self.num_cells), np.int64)
        self.keys = torch.from_numpy(keys).to(self.device)  # black, white
        cell = torch.arange(self.num_cells, device=self.device)
        # A liberty in one number: 1, its cell and the square of that, whose sums over a group tell if all are the same
        self.liberty = 1 + (cell << 13) + (cell * cell << 34)
        self.inner = slice(self.width, self.num_cells - self.width)  # cells that have four neighbours
        self.offsets = (-1, 1, -self.width, self.width)
        points = np.arange(size * size).reshape(size, size)
        images = [np.rot90(x, k).flatten() for x in (points, points.T) for k in range(4)]
        # [8, n^2 + 1]: x[..., symmetries[k]] is image k of x [..., n^2 + 1] under the dihedral group D4; 0 is x itself
        self.symmetries = torch.tensor(np.array([[*x, size * size] for x in images]), device=self.device)

    def new(self, num_boards: int) -> Boards:
        """Empty boards, black to play."""
        stones = torch.full((num_boards, self.num_cells), WALL, dtype=torch.int8, device=self.device)
        stones[:, self.cells] = 0
        groups = torch.full((num_boards, self.num_cells), self.num_cells - 1, device=self.device)
        zeros = torch.zeros(num_boards, dtype=torch.int64, device=self.device)
        history = torch.zeros(num_boards, self.max_moves + 1, dtype=torch.int64, device=self.device)
        to_play = torch.ones_like(zeros, dtype=torch.int8)
        in_atari = torch.zeros_like(stones, dtype=torch.bool)
        return Boards(stones, groups, in_atari, to_play, zeros, zeros.clone(), zeros - 1, history)

    def set_up(self, points: torch.Tensor, to_play: torch.Tensor) -> Boards:
        """Boards of stones int8 [B, n^2] (1 black, -1 white), with no past but the position itself."""
        boards = self.new(len(points))
        boards.stones[:, self.cells] = points.to(self.device)
        is_stone = boards.stones.abs() == 1
        groups = torch.where(is_stone, torch.arange(self.num_cells, device=self.device), -1)
        while True:  # the largest cell of a group spreads over it
            before = groups
            spread = [
                torch.where(stone == boards.stones[:, self.inner], group, -1)
                for stone, group in zip(self.neighbours(boards.stones), self.neighbours(groups), strict=True)
            ]
            groups = groups.clone()
            groups[:, self.inner] = torch.stack([groups[:, self.inner], *spread]).amax(0)
            groups = torch.where(is_stone, groups, -1)
            if torch.equal(groups, before):
                break
        groups = torch.where(is_stone, groups, self.num_cells - 1)
        boards.history[:, 0] = torch.where(is_stone, self.stone_keys(boards.stones), 0).sum(1)
        in_atari = self.find_atari(boards.stones, groups)
        return boards._replace(groups=groups, in_atari=in_atari, to_play=to_play.to(self.device, torch.int8))

    def stone_keys(self, stones: torch.Tensor) -> torch.Tensor:
        """Key of each stone [B, S]; that of white where there is none."""
        return torch.where(stones == 1, self.keys[0], self.keys[1])

    def neighbours(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [B, S] at the left, right, upper and lower neighbour of each inner cell: four views."""
        return [x[:, self.inner.start + k : self.inner.stop + k] for k in self.offsets]

    def find_atari(self, stones: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Stones whose group has one liberty left, bool [B, S]."""
        liberties = torch.where(stones == 0, self.liberty, 0)
        own = torch.zeros_like(groups)
        left, right, upper, lower = self.neighbours(liberties)
        own[:, self.inner] = left + right + upper + lower
        own.masked_fill_(stones.abs() != 1, 0)
        total = torch.zeros_like(groups).scatter_add_(1, groups, own)
        count, sums, squares = total & 8191, (total >> 13) & (2**21 - 1), total >> 34
        return ((count * squares == sums * sums) & (count > 0)).gather(1, groups)

    def has_dead_stones(self, boards: Boards) -> bool:
        """Whether there are stones without a liberty, which no game leaves on a board."""
        near_empty = torch.zeros_like(boards.in_atari)
        left, right, upper, lower = self.neighbours(boards.stones == 0)
        near_empty[:, self.inner] = left | right | upper | lower
        num_near = torch.zeros_like(boards.groups).scatter_add_(1, boards.groups, near_empty.long())
        return bool(((boards.stones.abs() == 1) & (num_near.gather(1, boards.groups) == 0)).any())

    def legal_moves(self, boards: Boards) -> torch.Tensor:
        """Which moves are legal, bool [B, n^2 + 1]; none where the game is over."""
        keys = self.stone_keys(boards.stones).masked_fill_(boards.stones.abs() != 1, 0)
        group_keys = torch.zeros_like(keys).scatter_add_(1, boards.groups, keys).gather(1, boards.groups)
        is_black = (boards.to_play == 1).unsqueeze(1)
        stones = boards.stones * boards.to_play.unsqueeze(1)  # 1 own, -1 other; walls are 2 or -2
        can_live = torch.zeros_like(stones[:, self.inner], dtype=torch.bool)
        gained = torch.zeros_like(group_keys[:, self.inner])
        seen = []
        views = (self.neighbours(x) for x in (stones, boards.in_atari, boards.groups, group_keys))
        for stone, atari, group, keys in zip(*views, strict=True):
            captured = (stone == -1) & atari
            can_live |= (stone == 0) | captured | ((stone == 1) & ~atari)
            is_new = captured
            for other in seen:
                is_new = is_new & (group != other)
            seen.append(group)
            gained += torch.where(is_new, keys, 0)
        own = torch.where(is_black, self.keys[0], self.keys[1])[:, self.inner]
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1))
        after = position + own - gained  # [B, inner] hash of the position after each move
        can_live &= boards.stones[:, self.inner] == 0
        at = self.cells - self.inner.start
        legal, after = can_live[:, at], after[:, at]
        legal &= ~self.was_before(boards, after)
        legal = torch.cat((legal, torch.ones_like(legal[:, :1])), 1)
        return legal & ~boards.is_over.unsqueeze(1)

    def was_before(self, boards: Boards, hashes: torch.Tensor) -> torch.Tensor:
        """Whether positions of hashes [B, n^2], none of the empty board, have been on the board."""
        past = boards.history[:, : int(boards.num_moves.max()) + 1]
        # Most hashes differ in their low bits from all of the past; the few that do not are compared in full
        table = torch.zeros(len(past), 4096, dtype=torch.bool, device=self.device)
        table.scatter_(1, past & 4095, True)
        found = table.gather(1, hashes & 4095)
        b, p = found.nonzero(as_tuple=True)
        found[b, p] = (hashes[b, p].unsqueeze(1) == past[b]).any(1)
        return found

    def play(self, boards: Boards, moves: torch.Tensor) -> Boards:
        """The boards after legal moves [B]."""
        is_pass = (moves == self.num_points).unsqueeze(1)  # [B, 1]
        cell = self.cells[moves.clamp(max=self.num_points - 1)].unsqueeze(1)  # [B, 1]
        around = torch.cat([cell + k for k in self.offsets], 1)  # [B, 4]
        near, ids = boards.stones.gather(1, around), boards.groups.gather(1, around)
        own = boards.to_play.unsqueeze(1)
        captured = torch.where((near == -own) & boards.in_atari.gather(1, around) & ~is_pass, ids, -1)
        merged = torch.where((near == own) & ~is_pass, ids, -1)
        removed = torch.zeros_like(boards.in_atari)
        joined = torch.zeros_like(removed)
        for k in range(4):
            removed |= boards.groups == captured[:, k : k + 1]
            joined |= boards.groups == merged[:, k : k + 1]
        stones = boards.stones.masked_fill(removed, 0)
        groups = torch.where(joined, cell, boards.groups.masked_fill(removed, self.num_cells - 1))
        stones.scatter_(1, cell, torch.where(is_pass, stones.gather(1, cell), own))
        groups.scatter_(1, cell, torch.where(is_pass, groups.gather(1, cell), cell))
        gone = torch.where(removed, self.stone_keys(boards.stones), 0).sum(1, keepdim=True)
        key = torch.where(own == 1, self.keys[0][cell], self.keys[1][cell]).masked_fill(is_pass, 0)
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1)) + key - gone
        num_moves = boards.num_moves + 1
        history = boards.history.scatter(1, num_moves.unsqueeze(1), position)
        num_passes = torch.where(is_pass[:, 0], boards.num_passes + 1, 0)
        in_atari = self.find_atari(stones, groups)
        return Boards(
            stones, groups, in_atari, -boards.to_play, num_moves, num_passes, moves.clone(), history
        )

    def find_eyes(self, boards: Boards) -> torch.Tensor:
        """Empty points with stones of the side to move, or the border, on all four sides, bool [B, n^2]."""
        stones = boards.stones * boards.to_play.unsqueeze(1)
        is_own = (stones == 1) | (stones.abs() == WALL)
        left, right, upper, lower = self.neighbours(is_own)
        eyes = (stones[:, self.inner] == 0) & left & right & upper & lower
        return eyes[:, self.cells - self.inner.start]

    def planes(self, boards: Boards, legal: torch.Tensor) -> torch.Tensor:
        """Input of a network, bool [B, NUM_PLANES, n, n], as the side to move sees it; from legal moves [B, n^2 + 1].

        Own stones, the other's stones, both in atari, legal moves, the last move, whether that was a pass, whether
        black is to move, and ones (which show where the border is).
        """
        stones = boards.stones[:, self.cells] * boards.to_play.unsqueeze(1)
        own, other, in_atari = stones == 1, stones == -1, boards.in_atari[:, self.cells]
        last = torch.arange(self.num_points, device=self.device) == boards.last_move.unsqueeze(1)
        flags = torch.stack((boards.num_passes > 0, boards.to_play == 1, boards.num_passes >= 0), 1)
        spatial = torch.stack((own, other, own & in_atari, other & in_atari, legal[:, :-1], last), 1)
        planes = torch.cat((spatial, flags.unsqueeze(2).expand(-1, -1, self.num_points)), 1)
        return planes.unflatten(2, (self.size, self.size))

    def score(self, boards: Boards) -> torch.Tensor:
        """Area of black less area of white, int64 [B], without komi."""
        return self.owner(boards).sum(1)

    def owner(self, boards: Boards) -> torch.Tensor:
        """Whose area each point is in, int8 [B, n^2]: 1 black's, -1 white's, 0 that of neither or both."""
        empty = (boards.stones == 0)[:, self.inner]
        areas = []
        for colour in (1, -1):
            reached = boards.stones == colour
            count = -1
            while count != (count := int(reached.sum())):
                a, b, c, d = self.neighbours(reached)
                spread = empty & (a | b | c | d)
                reached = reached.clone()
                reached[:, self.inner] |= spread
            areas.append(reached)
        return (areas[0].to(torch.int8) - areas[1].to(torch.int8))[:, self.cells]
