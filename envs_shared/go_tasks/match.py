"""Matches between players of Go: games side by side, random moves, ratings."""

import math
import statistics

import torch
from tqdm import tqdm

from envs_shared.go_tasks.rules import Boards, Go


def choose_random_moves(
    go: Go, boards: Boards, legal, generator=None, fill_eyes: bool = True
) -> torch.Tensor:
    """Moves [B] at random among the legal ones, bool [B, n^2 + 1].

    Without `fill_eyes` a side passes only when all that it could do is to fill its own eyes.
    """
    weights = legal.float()
    if not fill_eyes:
        weights[:, :-1] *= ~go.find_eyes(boards)
        weights[:, -1] = 1e-6
    return torch.multinomial(weights, 1, generator=generator)[:, 0]


def play_random_moves(
    go: Go, num_boards: int, num_moves: int, generator=None
) -> tuple[Boards, list[torch.Tensor]]:
    """Boards after random moves that fill no eyes, and these moves, each [B]."""
    boards, moves = go.new(num_boards), []
    for _ in range(num_moves):
        moves.append(choose_random_moves(go, boards, go.legal_moves(boards), generator, fill_eyes=False))
        boards = go.play(boards, moves[-1])
    return boards, moves


def draw_openings(go: Go, num_openings: int, num_moves: int, generator) -> tuple[Boards, list[torch.Tensor]]:
    """Boards after `num_moves` random moves, and these moves, each [B].

    No two are images of each other as long as there are others; then no two are of the same moves.
    """
    boards, moves = play_random_moves(go, 4 * num_openings, num_moves, generator)
    symmetries = go.symmetries.tolist()
    by_image, by_moves = {}, {}  # the first row of each kind
    for row in range(4 * num_openings):
        game = [int(x[row]) for x in moves]
        by_image.setdefault(min(tuple(s[move] for move in game) for s in symmetries), row)
        by_moves.setdefault(tuple(game), row)
    rows = list(dict.fromkeys([*by_image.values(), *by_moves.values()]))[:num_openings]
    index = torch.tensor([rows[i % len(rows)] for i in range(num_openings)], device=go.device)
    return boards.pick(index), [x[index] for x in moves]


class RolloutEvaluator:
    """For values the results of random games that fill no eyes, and random logits, which order moves not tried yet.

    With UCB1 this is plain Monte-Carlo tree search.
    """

    def __init__(self, go: Go, komi: float, seed: int):
        self.go = go
        self.komi = komi
        self.generator = torch.Generator(go.device).manual_seed(seed)

    def __call__(self, boards: Boards, legal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, A] and values [B], for the side to move, of positions with legal moves [B, A]."""
        to_play = boards.to_play
        rows = torch.arange(len(legal), device=legal.device)
        logits = torch.rand(legal.shape, generator=self.generator, device=legal.device)
        won = torch.zeros(len(legal), device=legal.device)
        while len(rows):
            boards = self.go.play(
                boards, choose_random_moves(self.go, boards, legal, self.generator, fill_eyes=False)
            )
            over = boards.is_over
            if over.any():
                won[rows[over]] = ((self.go.score(boards.pick(over)) - self.komi).sign() + 1) / 2
                boards, rows = boards.pick(~over), rows[~over]
            legal = self.go.legal_moves(boards) if len(rows) else legal
        return logits, torch.where(to_play == 1, won, 1 - won)


# What `score_match` finds
MATCH_SCORES = (
    "win_rate win_rate_low win_rate_high win_rate_black win_rate_white margin distinct_games".split()
)


def score_match(games: list[list[int]], margins: list[float], is_first_black: list[bool]) -> dict[str, float]:
    """MATCH_SCORES of the first player, from the moves of games, black's margins in points, and who was black.

    Games of the same moves and colours count once. The win rate (a draw is half a win) over these has Wilson's 95 %
    interval; a colour that was not played has none of its own.
    """
    distinct = {}
    for moves, margin, is_black in zip(games, margins, is_first_black, strict=True):
        distinct[tuple(moves), is_black] = margin if is_black else -margin
    points = {key: ((own > 0) + (own >= 0)) / 2 for key, own in distinct.items()}
    scores = {"win_rate": statistics.mean(points.values())}
    scores["win_rate_low"], scores["win_rate_high"] = compute_interval(scores["win_rate"], len(distinct))
    for colour, is_black in (("black", True), ("white", False)):
        of_colour = [x for key, x in points.items() if key[1] == is_black]
        if of_colour:
            scores[f"win_rate_{colour}"] = statistics.mean(of_colour)
    return scores | {"margin": statistics.mean(distinct.values()), "distinct_games": len(distinct)}


@torch.no_grad()
def play_match(go: Go, players: tuple, num_games: int, komi: float, seed: int) -> dict:
    """Games between two players, each a function from boards [B] to moves [B].

    Every opening of two random moves is played twice, with colours exchanged; openings differ, also as images of each
    other, as long as there are others. The players move in turns, each in all games where it is to move. Returns what
    `score_match` finds, and by game its moves, black's margin and whether the first player was black.
    """
    generator = torch.Generator(go.device).manual_seed(seed)
    num_pairs = (num_games + 1) // 2
    boards, moves = draw_openings(go, num_pairs, 2 if go.size > 2 else 0, generator)
    pair = torch.arange(num_games, device=go.device) % num_pairs
    boards = boards.pick(pair)
    games = [[int(x[i]) for x in moves] for i in pair.tolist()]
    is_first_black = torch.arange(num_games, device=go.device) < num_pairs
    with tqdm(total=num_games, desc="match", unit="game", leave=False, delay=2.0) as bar:
        while not boards.is_over.all():
            for player, is_black in zip(players, (is_first_black, ~is_first_black), strict=True):
                rows = (~boards.is_over & ((boards.to_play == 1) == is_black)).nonzero()[:, 0]
                if len(rows) == 0:
                    continue
                chosen = player(boards.pick(rows))
                boards.replace_rows(rows, go.play(boards.pick(rows), chosen))
                for row, move in zip(rows.tolist(), chosen.tolist(), strict=True):
                    games[row].append(move)
            bar.update(int(boards.is_over.sum()) - bar.n)
    margins = (go.score(boards) - komi).tolist()
    scores = score_match(games, margins, is_first_black.tolist())
    return scores | {"games": games, "margins": margins, "is_first_black": is_first_black.tolist()}


def compute_elo(win_rate: float, num_games: int) -> float:
    """Elo points that a win rate stands for; half a game is added to both sides, so that they are finite."""
    wins = win_rate * num_games
    return 400 * math.log10((wins + 0.5) / (num_games - wins + 0.5))


def compute_interval(win_rate: float, num_games: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a win rate."""
    z2 = 1.96**2 / num_games
    center, half = (
        win_rate + z2 / 2,
        1.96 * math.sqrt(win_rate * (1 - win_rate) / num_games + z2 / 4 / num_games),
    )
    return (center - half) / (1 + z2), (center + half) / (1 + z2)
