"""LKH (Helsgaun 2000) through elkai on the instances of a file: checks the file's tours, or makes them.

Each instance is solved alone, by --runs runs of LKH, of which the best tour counts; distances are rounded to
millionths of the largest one. With --output, the instances are written with LKH's tours, which turns a file
without tours into one that gaps can be measured against. LKH may be used for academic and non-commercial
purposes only.
"""

import re
import time
from pathlib import Path

from benchmark.peers import peer


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, "tsp20-uniform")
    data = peer.ROOT / "benchmark/data/tsp/tsp20_uniform_500.txt"
    parser.add_argument("--data", default=data, help="instances in ML4CO text, with or without tours")
    parser.add_argument("--output", help="new file for the instances with LKH's tours")
    parser.add_argument("--runs", type=peer.count, default=10, help="runs of LKH for each instance")
    return parser


def solve(points, num_runs):
    """Return the best tour [N] that LKH finds through points [N, 2] in `num_runs` runs."""
    import elkai
    import numpy as np

    if len(points) <= 3:
        return list(range(len(points)))
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    whole = (1e6 * distances / distances.max()).round().astype(int)
    return elkai.DistanceMatrix(whole.tolist()).solve_tsp(runs=num_runs)[:-1]


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    match = re.fullmatch(r"tsp(\d+)-\w+", args.env_id)
    if not match:
        peer.fail(f"--env-id {args.env_id}: must be tspN- and the kind of the instances, with N nodes")
    if args.output and Path(args.output).exists():
        peer.fail(f"--output {args.output}: must be a new file")
    points, references = peer.read_ml4co(args.data, int(match[1]))
    import elkai  # noqa: F401  # its import does not count as the solver's time
    import numpy as np
    from tqdm import tqdm

    run = peer.Run(args, Path(__file__).stem, peer.get_version("elkai"))
    start, cpu_start = time.perf_counter(), time.process_time()
    tours = np.array([solve(instance, args.runs) for instance in tqdm(points, unit="instance")])
    seconds = {"ms": time.perf_counter() - start, "cpu_ms": time.process_time() - cpu_start}
    scores = peer.score_tours(points, tours, references)
    if args.output:
        rows = zip(points.reshape(len(points), -1).tolist(), (tours + 1).tolist(), strict=True)
        lines = [f"{' '.join(map(str, xy))} output {' '.join(map(str, [*t, t[0]]))}\n" for xy, t in rows]
        Path(args.output).write_text("".join(lines))
    run.finish(len(points), scores | {name: 1e3 * x / len(points) for name, x in seconds.items()})


if __name__ == "__main__":
    main()
