"""Go on many boards at once: area scoring, no suicide, positional superko, in tensors on a CPU or GPU.

A board of n x n points is stored as a vector of S = (n + 2) (n + 1) + 1 cells. For n = 3, with # for a wall:

     0  1  2  3      #  #  #  #
     4  5  6  7      #  .  .  .
     8  9 10 11      #  .  .  .
    12 13 14 15      #  .  .  .
    16 17 18 19      #  #  #  #
    20               #

The neighbours of cell p are p - 1, p + 1, p - n - 1 and p + n + 1, also at the sides of the board: at the
right of cell 7 is the wall 8. Moves are numbered row * n + column from the top left. The pass is n * n, so
there are A = n^2 + 1 moves.

What alphazero_go.py asks of a game, so that another file can take the place of this one:

- make_game(env_id, device="cpu", fixed_shapes=False) returns the rules; for another name, it raises a
  ValueError that says which names there are.
- Boards are a NamedTuple of tensors [B, ...] with `is_over`, `pick` and `put`. Two of its fields are to_play,
  int8, 1 for black and -1 for white, and num_moves, int64.
- Attributes of the rules:
      device, fixed_shapes       as given to make_game
      shape, num_points          (rows, columns) of the board, and their product
      num_planes                 planes of the network's input
      num_actions, max_legal     the number of moves A, and the largest number of legal ones
      max_moves                  moves of the longest game
      point_images, move_images  K symmetries, [K, num_points] and [K, A]: if x [num_points] are the points of
                                 a position, x[point_images[k]] are those of its image k, and so for moves.
                                 Image 0 is the position itself, which a game without symmetries has alone.
- new(B), legal_moves(boards), play(boards, moves), planes(boards, legal), which are bool, and score(boards),
  an integer from -num_points to num_points, positive if black is ahead. They take and return what they do
  here.
- random_moves(boards, legal) draws moves for random games, which are the first lessons and plain MCTS.
- score takes boards of games that are not over, too.
- With fixed_shapes, legal_moves, play, score, planes and is_over never wait for a GPU. They take any boards:
  also of games that are over, and boards of zeros alone. play takes any move.

Black begins. Who moves next is what to_play says: a side may move twice in a row. A game takes at least two
moves, and there is a legal move until it is over. At the default --komi 0.5, a score of 0 is a loss of black.
For games that are won, lost or drawn, use --komi 0 --score-weight 0, and let score be 1, -1 or 0: a draw is
then half a win. --gtp is for Go only. tests/check_game.py checks the rules of a game.
"""

import re
from typing import NamedTuple

import numpy as np
import torch

WALL = 2  # in `stones`


class Boards(NamedTuple):
    """B positions and how they came about. A game ends after two passes in a row or 2 n^2 moves."""

    stones: torch.Tensor  # int8 [B, S]: 1 black, -1 white, 0 empty, 2 wall
    groups: torch.Tensor  # int64 [B, S]: one number for all stones of a group; S - 1 where no stone is
    in_atari: torch.Tensor  # bool [B, S]: stones of groups with one liberty
    to_play: torch.Tensor  # int8 [B]: 1 black, -1 white
    num_moves: torch.Tensor  # int64 [B], passes included
    num_passes: torch.Tensor  # int64 [B]: consecutive passes at the end
    last_move: torch.Tensor  # int64 [B], -1 before the first one
    history: torch.Tensor  # int64 [B, 2 n^2 + 1]: hash of the position after each move; 0 if empty or unused

    @property
    def is_over(self):
        """Tell which games are over, bool [B]."""
        return (self.num_passes >= 2) | (self.num_moves >= self.history.shape[-1] - 1)

    def pick(self, index) -> "Boards":
        """Return the boards at an index."""
        return Boards(*(x[index] for x in self))

    def put(self, index, boards: "Boards"):
        """Replace the boards at an index, in place."""
        for x, new in zip(self, boards, strict=True):
            x[index] = new


class Go:
    """The rules on boards of one size. With fixed_shapes, no shape depends on data, as CUDA graphs
    require."""

    def __init__(self, size: int, device="cpu", fixed_shapes: bool = False):
        self.device = torch.device(device)
        self.fixed_shapes = fixed_shapes
        self.size = size
        self.shape = size, size
        self.num_points = size**2
        self.num_actions = size**2 + 1
        self.max_legal = self.num_actions
        self.max_moves = 2 * size**2
        self.num_planes = 9
        self.num_cells = (size + 2) * (size + 1) + 1
        rows, columns = np.divmod(np.arange(size**2), size)
        # [n^2], the cells of the points
        self.cells = torch.from_numpy((rows + 1) * (size + 1) + columns + 1).to(device)
        self.inner = slice(size + 1, self.num_cells - size - 1)  # cells with four neighbours
        self.inner_points = self.cells - size - 1  # [n^2], indices of the points in them
        self.offsets = (-1, 1, -size - 1, size + 1)  # from a cell to its neighbours
        # A position's hash is the sum of the keys of its stones, modulo 2^64
        keys = np.random.default_rng(0).integers(-(2**63), 2**63, (2, self.num_cells), np.int64)
        self.black_keys, self.white_keys = torch.from_numpy(keys).to(device)  # [S]
        # A liberty at cell c is one number with three fields, so that one sum over all liberties that the
        # stones of a group see is three sums:
        #
        #     bits   61 to 34     33 to 13    12 to 0
        #            sum of c^2   sum of c    count
        #
        # The group is in atari, all its liberties being one cell, if and only if count * sum of c^2 = (sum of
        # c)^2. On 19x19, 360 stones see at most 1,440 liberties, and c is at most 420: the fields need 28, 20
        # and 11 bits
        cell = torch.arange(self.num_cells, device=device)
        self.liberties = 1 + (cell << 13) + (cell**2 << 34)  # [S]
        # [n^2, n^2]: 1 from each point to itself and to its neighbours
        distance = np.abs(rows - rows[:, None]) + np.abs(columns - columns[:, None])
        self.spread = torch.from_numpy(distance < 2).float().to(device)
        # The symmetries of the square, under which a pass stays a pass
        points = np.arange(size**2).reshape(size, size)
        images = [np.rot90(x, k).flatten() for x in (points, points.T) for k in range(4)]
        self.point_images = torch.tensor(np.array(images), device=device)  # [8, n^2]
        self.move_images = torch.nn.functional.pad(self.point_images, (0, 1), value=size**2)  # [8, A]

    def new(self, num_boards: int) -> Boards:
        """Return empty boards [B], black to play."""
        with self.device:
            stones = torch.full((num_boards, self.num_cells), WALL, dtype=torch.int8)
            stones[:, self.cells] = 0
            groups = torch.full(stones.shape, self.num_cells - 1)
            num_moves, num_passes = torch.zeros(2, num_boards).long()
            history = torch.zeros(num_boards, self.max_moves + 1).long()
            to_play = torch.ones(num_boards, dtype=torch.int8)
            return Boards(stones, groups, stones == 1, to_play, num_moves, num_passes, num_moves - 1, history)

    def neighbours(self, x):
        """Return x [B, S] at the left, right, upper and lower neighbour of each inner cell: four views.

        For n = 3, the inner cells are 4 to 15:

            inner    4  5  6  7  8 ...
            left     3  4  5  6  7 ...
            right    5  6  7  8  9 ...
            upper    0  1  2  3  4 ...
            lower    8  9 10 11 12 ...
        """
        return [x[:, self.inner.start + k : self.inner.stop + k] for k in self.offsets]

    def find_atari(self, stones, groups):
        """Find the stones whose group has one liberty, bool [B, S]."""
        # What each stone sees, summed over its group
        left, right, upper, lower = self.neighbours(self.liberties * (stones == 0))
        seen = torch.zeros_like(groups)
        seen[:, self.inner] = left + right + upper + lower
        total = torch.zeros_like(groups).scatter_add_(1, groups, seen.masked_fill_(stones.abs() != 1, 0))
        # Unpack the three sums
        count = total & (2**13 - 1)
        cells = (total >> 13) & (2**21 - 1)
        squares = total >> 34
        return ((count * squares == cells * cells) & (count > 0)).gather(1, groups)

    def legal_moves(self, boards: Boards):
        """Find the legal moves, bool [B, A]; there are none if the game is over."""
        # The sum of the keys of each group, which leave the hash if it is captured
        keys = torch.where(boards.stones == 1, self.black_keys, self.white_keys)
        keys = keys.masked_fill_(boards.stones.abs() != 1, 0)
        group_keys = torch.zeros_like(keys).scatter_add_(1, boards.groups, keys).gather(1, boards.groups)
        # A stone lives beside an empty point, a group that it captures, or an own one with another liberty
        stones = boards.stones * boards.to_play.unsqueeze(1)  # 1 own, -1 the other's
        can_live = torch.zeros_like(stones[:, self.inner], dtype=torch.bool)
        captured_keys = torch.zeros_like(keys[:, self.inner])
        near_stones = self.neighbours(stones)
        near_atari = self.neighbours(boards.in_atari)
        near_groups = self.neighbours(boards.groups)
        near_keys = self.neighbours(group_keys)
        for k in range(4):
            is_captured = (near_stones[k] == -1) & near_atari[k]
            can_live |= (near_stones[k] == 0) | is_captured | ((near_stones[k] == 1) & ~near_atari[k])
            for other in near_groups[:k]:  # a group that is a neighbour twice counts once
                is_captured &= near_groups[k] != other
            captured_keys += near_keys[k] * is_captured
        # Superko: a move whose position was there before is illegal
        is_black = (boards.to_play == 1).unsqueeze(1)
        own_keys = torch.where(is_black, self.black_keys, self.white_keys)[:, self.inner]
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1))
        after = (position + own_keys - captured_keys)[:, self.inner_points]  # hashes after each move
        legal = (can_live & (boards.stones[:, self.inner] == 0))[:, self.inner_points]
        legal &= ~self.was_before(boards, after)
        return torch.cat((legal, torch.ones_like(legal[:, :1])), 1) & ~boards.is_over.unsqueeze(1)

    def was_before(self, boards: Boards, hashes):
        """Tell which of the hashes [B, n^2] belong to earlier positions of the same board."""
        if self.fixed_shapes:
            # Compare with the whole history. Its unused entries are 0, the hash of the empty board, which no
            # move makes
            return (hashes.unsqueeze(2) == boards.history.unsqueeze(1)).any(2)
        past = boards.history[:, : int(boards.num_moves.max()) + 1]
        # Few hashes share their low bits with a past one; only those are compared in full
        table = torch.zeros(len(past), 4096, dtype=torch.bool, device=self.device)
        found = table.scatter_(1, past & 4095, True).gather(1, hashes & 4095)
        board, point = found.nonzero(as_tuple=True)
        found[board, point] = (hashes[board, point].unsqueeze(1) == past[board]).any(1)
        return found

    def play(self, boards: Boards, moves) -> Boards:
        """Return the boards after legal moves [B]."""
        is_pass = (moves == self.num_points).unsqueeze(1)  # [B, 1]
        cell = self.cells[moves.clamp(max=self.num_points - 1)].unsqueeze(1)
        around = torch.cat([cell + k for k in self.offsets], 1)  # [B, 4]
        near = boards.stones.gather(1, around)
        groups = boards.groups.gather(1, around)
        own = boards.to_play.unsqueeze(1)
        # Which groups it captures and joins: their numbers, -1 for none
        captured = (near == -own) & boards.in_atari.gather(1, around) & ~is_pass
        captured = groups.masked_fill(~captured, -1)
        joined = groups.masked_fill((near != own) | is_pass, -1)
        is_captured, is_joined = torch.zeros(2, *boards.stones.shape, dtype=torch.bool, device=self.device)
        for k in range(4):
            is_captured |= boards.groups == captured[:, k : k + 1]
            is_joined |= boards.groups == joined[:, k : k + 1]
        # Take captured stones off, put the new one down, and give the groups that it joins its number
        stones = boards.stones.masked_fill(is_captured, 0)
        groups = boards.groups.masked_fill(is_captured, self.num_cells - 1)
        groups = torch.where(is_joined, cell, groups)
        stones.scatter_(1, cell, torch.where(is_pass, stones.gather(1, cell), own))
        groups.scatter_(1, cell, torch.where(is_pass, groups.gather(1, cell), cell))
        # The hash of the new position
        is_black = own == 1
        key = torch.where(is_black, self.black_keys[cell], self.white_keys[cell]).masked_fill(is_pass, 0)
        captured_keys = torch.where(is_black, self.white_keys, self.black_keys) * is_captured
        position = boards.history.gather(1, boards.num_moves.unsqueeze(1))
        position += key - captured_keys.sum(1, keepdim=True)
        # A move after the end, which only fixed shapes make, counts for nothing and stays within the history
        num_moves = (boards.num_moves + 1).clamp(max=boards.history.shape[1] - 1)
        history = boards.history.scatter(1, num_moves.unsqueeze(1), position)
        num_passes = (boards.num_passes + 1) * is_pass[:, 0]
        in_atari = self.find_atari(stones, groups)
        counts = num_moves, num_passes
        return Boards(stones, groups, in_atari, -boards.to_play, *counts, moves.clone(), history)

    def random_moves(self, boards: Boards, legal):
        """Draw moves [B] for random games, by a mask of legal moves [B, A].

        No move fills an own eye (a point whose neighbours are all own stones or walls), and a pass is drawn
        only if no other move is left, or about once in a million times.
        """
        stones = boards.stones * boards.to_play.unsqueeze(1)  # 1 own, -1 the other's
        left, right, upper, lower = self.neighbours((stones == 1) | (stones.abs() == WALL))
        weights = legal.float()
        weights[:, :-1] *= ~(left & right & upper & lower)[:, self.inner_points]
        weights[:, -1] = 1e-6
        return torch.multinomial(weights, 1).squeeze(1)

    def score(self, boards: Boards):
        """Return the area of black minus that of white, int64 [B], without komi."""
        stones = boards.stones[:, self.cells].unsqueeze(0)  # [1, B, n^2]
        reached = torch.cat((stones == 1, stones == -1)).float()  # of black and of white
        room = torch.maximum(reached, (stones == 0).float())
        # As many steps as the longest way through empty points may need
        for _ in range(2 * self.num_points // 3 + 1):
            before = reached
            reached = torch.minimum(reached @ self.spread, room)
            if not self.fixed_shapes and torch.equal(reached, before):
                break
        black, white = reached.sum(2).long()
        return black - white

    def planes(self, boards: Boards, legal):
        """Return a network's input, bool [B, 9, n, n], as the side to move sees it.

        Own stones, the other's stones, own and then the other's stones in atari, legal moves, last move,
        whether that was a pass, whether black is to move, and ones, which show where the board ends.
        """
        stones = boards.stones[:, self.cells] * boards.to_play.unsqueeze(1)
        own = stones == 1
        other = stones == -1
        in_atari = boards.in_atari[:, self.cells]
        last = torch.arange(self.num_points, device=self.device) == boards.last_move.unsqueeze(1)
        flags = torch.stack((boards.num_passes > 0, boards.to_play == 1, boards.num_passes >= 0), 1)
        points = torch.stack((own, other, own & in_atari, other & in_atari, legal[:, :-1], last), 1)
        planes = torch.cat((points, flags.unsqueeze(2).expand(-1, -1, self.num_points)), 1)
        return planes.unflatten(2, self.shape)


def make_game(env_id: str, device="cpu", fixed_shapes: bool = False) -> Go:
    """Make the rules for a board such as Go-5x5; raises ValueError if the name is another one."""
    match = re.fullmatch(r"Go-([2-9]|1\d)x\1", env_id)
    if not match:
        raise ValueError("must be Go-2x2 to Go-19x19")
    return Go(int(match[1]), device, fixed_shapes)
