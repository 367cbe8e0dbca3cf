"""Measure the search of mctx on Go of pgx, both in JAX on a CPU, with a network of the size of ours.

The result is simulations per CPU-second in --games parallel games, from positions after random moves, by PUCT
(mctx.muzero_policy) and a residual network with random weights: pgx gives it 17 planes, where ours gets nine.
The first search, which compiles for many CPU-seconds, is left out and logged beside the result. The
counterpart is in benchmark/studies/go_search.py.
"""

import statistics
import time
from pathlib import Path

from benchmark.peers import peer


def make_parser():
    """Make the parser of the command line's flags."""
    parser = peer.make_parser(__doc__, "Go-5x5")
    parser.add_argument("--simulations", type=peer.count, default=64, help="simulations per move")
    parser.add_argument("--games", type=peer.count, default=256, help="that are searched side by side")
    parser.add_argument("--blocks", type=peer.count, default=3, help="residual blocks of the network")
    parser.add_argument("--channels", type=peer.count, default=32, help="channels of the network")
    parser.add_argument("--repeats", type=peer.count, default=5)
    return parser


def make_network(args, size: int, num_planes: int):
    """Return random weights, and a function from them and observations [B, n, n, planes] to logits and
    values.

    A batch normalization of a trained network is a factor and a sum for each channel, which are here too.
    """
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.PRNGKey(args.seed), 100))

    def conv(num_inputs, num_outputs, kernel):
        shape = kernel, kernel, num_inputs, num_outputs
        kernel = jax.random.normal(next(keys), shape) * (2 / (kernel**2 * num_inputs)) ** 0.5
        return kernel, jnp.ones(num_outputs), jnp.zeros(num_outputs)

    def linear(num_inputs, num_outputs):
        return jax.random.normal(next(keys), (num_inputs, num_outputs)) / num_inputs**0.5, jnp.zeros(
            num_outputs
        )

    width = args.channels
    weights = {
        "stem": conv(num_planes, width, 3),
        "blocks": [(conv(width, width, 3), conv(width, width, 3)) for _ in range(args.blocks)],
        "head": conv(width, 8, 1),
        "policy": linear(4 * size**2, size**2 + 1),
        "value": [linear(4 * size**2, 64), linear(64, 1)],
    }

    def apply_conv(x, layer):
        kernel, factor, bias = layer
        dimensions = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions) * factor
            + bias
        )

    def apply(weights, observations):
        x = jax.nn.relu(apply_conv(observations.astype(jnp.float32), weights["stem"]))
        for first, second in weights["blocks"]:
            x = jax.nn.relu(x + apply_conv(jax.nn.relu(apply_conv(x, first)), second))
        x = jax.nn.relu(apply_conv(x, weights["head"]))
        policy, value = x[..., :4].reshape(len(x), -1), x[..., 4:].reshape(len(x), -1)
        matrix, bias = weights["policy"]
        (matrix1, bias1), (matrix2, bias2) = weights["value"]
        value = jax.nn.relu(value @ matrix1 + bias1) @ matrix2 + bias2
        return policy @ matrix + bias, jnp.tanh(value[:, 0])

    return weights, apply


def main() -> None:
    """Run from the command line."""
    args = make_parser().parse_args()
    size = int(args.env_id.split("x")[1])
    import jax
    import jax.numpy as jnp
    import mctx
    from pgx.go import Go
    from tqdm import tqdm

    program = f"{peer.get_version('pgx')}, {peer.get_version('mctx')}, {peer.get_version('jax')}"
    run = peer.Run(args, Path(__file__).stem, program)
    env = Go(size=size, komi=0.5)
    step = jax.jit(jax.vmap(env.step))
    key = jax.random.PRNGKey(args.seed)
    states = jax.jit(jax.vmap(env.init))(jax.random.split(key, args.games))
    for _ in range(size**2 // 4):
        key, subkey = jax.random.split(key)
        states = step(
            states, jax.random.categorical(subkey, jnp.where(states.legal_action_mask, 0.0, -jnp.inf))
        )
    weights, apply = make_network(args, size, states.observation.shape[-1])

    def evaluate(weights, states):
        logits, values = apply(weights, states.observation)
        return jnp.where(states.legal_action_mask, logits, -1e9), values

    def simulate(weights, key, actions, states):
        """Play the moves that lead to new nodes, and evaluate these."""
        player = states.current_player
        states = jax.vmap(env.step)(states, actions)
        logits, values = evaluate(weights, states)
        output = mctx.RecurrentFnOutput(
            reward=jnp.take_along_axis(states.rewards, player[:, None], 1)[:, 0],
            discount=jnp.where(states.terminated, 0.0, -1.0),
            prior_logits=logits,
            value=jnp.where(states.terminated, 0.0, values),
        )
        return output, states

    @jax.jit
    def search(weights, key, states):
        logits, values = evaluate(weights, states)
        root = mctx.RootFnOutput(prior_logits=logits, value=values, embedding=states)
        invalid = ~states.legal_action_mask
        found = mctx.muzero_policy(weights, key, root, simulate, args.simulations, invalid_actions=invalid)
        return found.action_weights

    seconds = []
    for _ in tqdm(range(args.repeats + 1), unit="search"):
        start = time.process_time()
        search(weights, key, states).block_until_ready()
        seconds.append(time.process_time() - start)
    first, *others = seconds
    total = args.games * args.simulations
    rate = total / statistics.median(others)
    run.finish(total * args.repeats, {"simulations_per_cpu_second": rate, "first_cpu_seconds": first})


if __name__ == "__main__":
    main()
