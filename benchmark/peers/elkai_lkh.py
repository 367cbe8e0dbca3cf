"""LKH (Helsgaun 2000) through elkai on the stored instances, whose optimal tours are by Concorde.

Each instance is solved by itself, with elkai's ten runs; whole-number distances are millionths of the largest.
LKH may be used for academic and non-commercial purposes only.
"""

import time
from pathlib import Path

import peer


def make_parser():
    """Flags."""
    return peer.make_parser(__doc__, "tsp20-uniform")


def main() -> None:
    """Command line."""
    args = make_parser().parse_args()
    import elkai  # noqa: F401  # used by envs_shared.tsp_tasks; its import is no part of the solver's time
    import torch
    from tqdm import tqdm

    from envs_shared.tsp_tasks import instances as tsp

    torch.set_num_threads(1)
    stored = {path.stem: path for path in sorted(tsp.REFERENCE_FOLDER.glob("*.txt"))}
    if args.env_id not in stored:
        peer.fail(f"--env-id {args.env_id}: optimal tours are stored for {', '.join(stored)}")
    instances = tsp.read_instances(stored[args.env_id])
    run = peer.Run(args, Path(__file__).stem, peer.get_version("elkai"))
    start = time.perf_counter()
    tours = [tsp.solve_with_elkai(instance) for instance in tqdm(instances, unit="instance")]
    milliseconds = 1e3 * (time.perf_counter() - start) / len(instances)
    found = [tsp.Instance(i.name, i.points, tour) for i, tour in zip(instances, tours, strict=True)]
    metrics = tsp.summarize({"lkh": (tours, tsp.get_reference_lengths(found), milliseconds)}, instances)
    metrics = {name.removeprefix("eval/lkh_"): value for name, value in metrics.items()}
    run.finish(len(instances), metrics)


if __name__ == "__main__":
    main()
