"""Check the rules of a game for algos/alphazero_go.py, by the list in the docstring of envs_shared/go.py.

    python tests/check_game.py envs_shared/go.py Go-5x5

It plays random games, in both kinds of shapes and in all images, and raises an AssertionError that says what
is wrong. It cannot know who has won: test that by games whose end you know.
"""

import argparse
import runpy

import torch


def require(is_right, words: str):
    """Raise an AssertionError unless the condition, a tensor or not, holds everywhere."""
    if not torch.as_tensor(is_right).all():
        raise AssertionError(words)


def require_tensor(x, name: str, shape, dtype):
    require(x.dtype == dtype and tuple(x.shape) == tuple(shape), f"{name} is {x.dtype} {tuple(x.shape)}")


def are_equal(boards, others) -> bool:
    return all(torch.equal(x, y) for x, y in zip(boards, others))


def check_constants(go):
    """Check what does not change: sizes and symmetries."""
    for name in ("num_points", "num_planes", "num_actions", "max_legal", "max_moves"):
        require(type(getattr(go, name)) is int and getattr(go, name) > 0, f"{name} is {getattr(go, name)}")
    require(go.shape[0] * go.shape[1] == go.num_points, f"num_points is not that of shape {go.shape}")
    require(len(go.point_images) == len(go.move_images), "there are more images of points or of moves")
    for name, size in (("point_images", go.num_points), ("move_images", go.num_actions)):
        images = getattr(go, name)
        require_tensor(images, name, (len(images), size), torch.int64)
        require(images.sort(1).values == torch.arange(size), f"{name} are not permutations")
        require(images[0] == torch.arange(size), f"{name}[0] is not the position itself")


def check_boards(go, boards, legal):
    """Check types, ranges and legal moves of boards [B]."""
    num_boards, is_over = len(boards.to_play), boards.is_over
    require_tensor(is_over, "is_over", (num_boards,), torch.bool)
    require_tensor(boards.num_moves, "num_moves", (num_boards,), torch.int64)
    require(boards.to_play.abs() == 1, "to_play is not 1 or -1")
    require_tensor(legal, "legal_moves", (num_boards, go.num_actions), torch.bool)
    require(legal.any(1) != is_over, "there must be a legal move until the game is over, and none then")
    require(legal.sum(1) <= go.max_legal, "there are more legal moves than max_legal")
    require(~is_over | (boards.num_moves >= 2), "a game takes less than two moves")
    require(is_over | (boards.num_moves < go.max_moves), "a game takes more than max_moves")
    require_tensor(go.planes(boards, legal), "planes", (num_boards, go.num_planes, *go.shape), torch.bool)
    score = go.score(boards)
    require(not score.is_floating_point() and score.abs().max() <= go.num_points, "score is out of range")


def check_images(go, boards, images):
    """Compare images of boards [B], played from the beginning, with what symmetries make of the boards."""
    planes = go.planes(boards, legal := go.legal_moves(boards)).flatten(2)
    for k, image in enumerate(images):
        image_legal = go.legal_moves(image)
        require(image_legal == legal[:, go.move_images[k]], f"image {k} has other legal moves")
        image_planes = go.planes(image, image_legal).flatten(2)
        require(image_planes == planes[..., go.point_images[k]], f"image {k} has other planes")
        for name in ("to_play", "num_moves", "is_over"):
            require(getattr(image, name) == getattr(boards, name), f"image {k} has another {name}")
        require(go.score(image) == go.score(boards), f"image {k} has another score")


def check_after_the_end(go, boards):
    """With fixed shapes, nothing raises: after the end, with any moves, and on boards of zeros alone."""
    for again in (boards, type(boards)(*map(torch.zeros_like, boards))):
        for _ in range(3):
            again = go.play(again, torch.randint(go.num_actions, boards.to_play.shape))
            go.planes(again, go.legal_moves(again)), go.score(again), again.is_over
            for x, y in zip(again, boards):
                require(x.shape == y.shape and x.dtype == y.dtype, "play has another type")


def check_game(make_game, env_id: str, num_games: int = 32):
    """Play random games to their ends, and check all of the above in each position."""
    try:
        make_game("no such game")
        raise AssertionError("make_game accepts any name")
    except ValueError as error:
        require(bool(str(error)), "make_game does not say which names there are")
    go, fixed = make_game(env_id), make_game(env_id, "cpu", True)
    check_constants(go)
    boards, others = go.new(num_games), fixed.new(num_games)
    images = [go.new(num_games) for _ in go.move_images]
    require(boards.to_play == 1, "black does not begin")
    require(boards.num_moves == 0, "num_moves does not begin at 0")
    require_tensor(go.score(go.new(0)), "score of no boards", (0,), go.score(boards).dtype)
    for _ in range(go.max_moves + 1):
        legal = go.legal_moves(boards)
        check_boards(go, boards, legal)
        check_images(go, boards, images)
        require(are_equal(boards, others), "fixed shapes give other boards")
        for name, given in (("legal_moves", []), ("planes", [legal]), ("score", [])):
            results = [getattr(x, name)(boards, *given) for x in (go, fixed)]
            require(torch.equal(*results), f"fixed shapes give another {name}")
        rows = (~boards.is_over).nonzero().squeeze(1)
        if not len(rows):
            break
        # Only games that are not over go on, half of them by the game's own random moves
        moving, legal = boards.pick(rows), legal[rows]
        moves = torch.multinomial(legal.float(), 1).squeeze(1)
        moves = torch.where(rows % 2 == 0, moves, go.random_moves(moving, legal))
        require(legal.gather(1, moves.unsqueeze(1)), "random_moves draws an illegal move")
        before = type(moving)(*(x.clone() for x in moving))
        after = go.play(moving, moves)
        require(are_equal(moving, before), "play changes the boards that it is given")
        require(after.num_moves == moving.num_moves + 1, "num_moves does not count")
        first = torch.tensor([0])
        alone = go.legal_moves(moving.pick(first))
        require(torch.equal(alone, legal[:1]), "legal_moves of a board depend on the others beside it")
        alone = go.play(moving.pick(first), moves[first])
        require(are_equal(alone, after.pick(first)), "a board depends on the others beside it")
        boards.put(rows, after)
        others.put(rows, fixed.play(others.pick(rows), moves))
        for image, table in zip(images, go.move_images):
            image.put(rows, go.play(image.pick(rows), table.argsort()[moves]))
        check_after_the_end(fixed, others)


def make_parser():
    """Make the parser of the command line's flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="the file with make_game")
    parser.add_argument("env_id", help="a name that it takes")
    return parser


if __name__ == "__main__":
    args = make_parser().parse_args()
    torch.manual_seed(0)
    check_game(runpy.run_path(args.path)["make_game"], args.env_id)
    print(f"{args.env_id}: nothing found")
