"""The programs of other processes in the tests of the contract and of several processes.

`start_process` of helpers.py calls one of them by its name.
"""

import contextlib
import importlib
import itertools
import os
import runpy
import shlex
import shutil
import signal
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import numpy as np
import torch

# Which optimizers import, in two seconds; their processes are forked from one that has it
import torch._dynamo
import torch.distributed as dist
from helpers import ROOT


def run_copy(path, *flags):
    """Run the script at `path` in its folder, where no module of this repository is found."""
    path = Path(path)
    os.chdir(path.parent)
    os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [str(path.parent), *(x for x in sys.path if x not in ("", str(ROOT), str(ROOT / "tests")))]
    for name in [x for x in sys.modules if x.startswith(("algos", "envs_shared"))]:
        del sys.modules[name]
    sys.modules["matplotlib"] = None  # scripts start sooner without it
    sys.argv = [path.name, *flags]
    runpy.run_path(str(path), run_name="__main__")


def kill_at(path, number, *flags):
    """Run the script at `path`; kill -9 this process when half of checkpoint.pt `number` is on the disk."""
    replace, numbers = os.replace, itertools.count(1)

    def replace_or_die(source, target):
        if Path(target).name == "checkpoint.pt" and next(numbers) == int(number):
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = replace_or_die
    run_copy(path, *flags)


def run_rank(rank, path, *flags):
    """Run the script at `path` as torchrun starts process `rank` of two."""
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    store = {"init_method": f"file://{Path(path).parent / 'store'}", "rank": int(rank), "world_size": 2}
    dist.init_process_group = partial(dist.init_process_group, **store)
    run_copy(path, *flags)


def copy_statistics(network):
    return [x.clone() for x in network.buffers() if x.is_floating_point()]


# What processes share: the function of a script that has it, and what is noted of its result and inputs, by
# a name. `rows` of a gradient step, `data` it is made of, and `steps` of an iteration that the log counts
NOTES = {
    "ppo": [
        ("compute_batch", {"steps": lambda batch, *_: len(batch.obs)}),
        ("update_minibatch", {"rows": lambda _, *inputs: len(inputs[-1].obs)}),
    ],
    "r2d2_lstm": [
        ("update_network", {"rows": lambda _, *inputs: inputs[3].batch_windows}),
        ("collect_steps", {"epsilons": lambda _, player, *rest: player.epsilons}),
    ],
    "reinforce_tsp_attention": [
        ("update_weights", {name: lambda _, *inputs: inputs[-1] for name in ("data", "rows")}),
        ("is_better", {"tested": lambda _, agent, *rest: copy_statistics(agent)}),
    ],
    "alphazero_go": [
        (
            "collect_positions",
            {"steps": lambda found, *_: found[1], "data": lambda found, *_: found[0].planes},
        ),
        ("refill_pool", {"pool": lambda pool, *_: len(pool.z)}),
        ("update_network", {"rows": lambda _, *inputs: len(inputs[2].z)}),
    ],
    "ppo_change_detection": [("draw_batch", {name: lambda found, *_: found[0] for name in ("data", "rows")})],
}


@contextlib.contextmanager
def take_notes(script, module, num_envs):
    """Yield a dictionary of lists, to which a run adds its NOTES; `num_envs` are those of this process."""
    notes = defaultdict(list)

    def watch(function, takers):
        def call(*inputs, **options):
            result = function(*inputs, **options)
            for name, take in takers.items():
                value = take(result, *inputs)
                notes[name].append(len(value) if name == "rows" and not isinstance(value, int) else value)
            return result

        return call

    def make_envs(args, size, *rest):
        envs = make(args, size, *rest)
        if size == num_envs:  # not those of an evaluation
            envs.reset = watch(envs.reset, {"data": lambda found, *_: torch.as_tensor(found[0])})
        return envs

    def average(run):
        notes["before"].append(copy_statistics(run.parts["agent"]))
        average_statistics(run)
        notes["after"].append(copy_statistics(run.parts["agent"]))

    average_statistics, make = module.Run.average_statistics, getattr(module, "make_envs", None)
    with contextlib.ExitStack() as stack:
        for name, takers in NOTES[script]:
            owner = module.change_pairs if name == "draw_batch" else module
            stack.enter_context(patch.object(owner, name, watch(getattr(owner, name), takers)))
        if make:
            stack.enter_context(patch.object(module, "make_envs", make_envs))
        stack.enter_context(patch.object(module.Run, "average_statistics", average))
        yield notes


def run_noted(script, module, flags):
    """Run a script's `main` in this process of two; return its network and what it leaves."""
    made, seeds = [], []
    to, seed_everything = torch.nn.Module.to, module.seed_everything

    def record(network, *args, **kwargs):
        made.append(network)
        return to(network, *args, **kwargs)

    def record_seed(*stream):
        seeds.append(seed_everything(*stream))
        return seeds[-1]

    with (
        patch.object(torch.nn.Module, "to", record),
        patch.object(module, "seed_everything", record_seed),
        patch.object(dist, "init_process_group"),
        take_notes(script, module, 4) as notes,
    ):
        module.main([*flags, "--no-cuda"])
    found = {"agent": made[0].state_dict(), "rng": torch.get_rng_state(), "notes": dict(notes)}
    found["seeds"] = seeds
    dist.barrier()
    return made[0], found


def share(rank, script, out, flags, resume_flags):
    """As one of two, run the script, resume it in OUT/resumed, keep what it holds, and make its update."""
    rank, out, kept = int(rank), Path(out), {}
    module = importlib.import_module(f"algos.{script}")
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=2)
    with patch.multiple(module, RANK=rank, WORLD_SIZE=2):
        flags = [*shlex.split(flags), "--run-dir", str(out / "whole")]
        _, kept["whole"] = run_noted(script, module, flags)
        (path,) = (out / "whole").iterdir()
        resumed = out / "resumed" / path.name
        if rank == 0:
            shutil.copytree(path, resumed)
        dist.barrier()
        flags = ["--resume", str(resumed / "checkpoint.pt"), *shlex.split(resume_flags)]
        _, kept["resumed"] = run_noted(script, module, flags)
    kept["update"] = [update(script, 0, 1), update(script, rank, 2)]
    torch.save(kept, out / f"kept_{rank}.pt")
    dist.destroy_process_group()


def share_copy(rank, path, flags):
    """As one of two, run an edited copy of ppo.py; keep what its network holds and says of random states."""
    from scripts import import_file

    rank, folder, module = int(rank), Path(path).parent, import_file("edited_copy", Path(path))
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    with patch.multiple(module, RANK=rank, WORLD_SIZE=2):
        agent, kept = run_noted("ppo", module, shlex.split(flags))
    states = torch.randn(500, 4, generator=torch.manual_seed(0))
    kept["logits"] = agent.actor(states).log_softmax(-1).detach()
    torch.save(kept, folder / f"kept_{rank}.pt")
    dist.destroy_process_group()


def update(script, rank, size):
    """Let the script make and apply its update of all rows, as process `rank` of `size` from the same state.

    `update_NAME` gets the script's module and the rows of this process, and gives the networks after the
    update and numbers that must not depend on how many processes there are.
    """
    module = importlib.import_module(f"algos.{script}")
    torch.manual_seed(0)
    with patch.multiple(module, RANK=rank, WORLD_SIZE=size):
        agents, numbers = globals()[f"update_{script}"](module, slice(rank, None, size))
    parameters = [p for agent in agents for p in agent.parameters()]
    gradients = [p * 0 if p.grad is None else p.grad for p in parameters]  # not every update trains all
    weights = [x.detach() for agent in agents for x in agent.state_dict().values()]
    return {"gradients": [x.detach() for x in gradients], "weights": weights, "numbers": numbers}


def shake(agent):
    """Move every parameter, so that no gradient is that of a beginning (ratios of 1, heads near 0)."""
    with torch.no_grad():
        for p in agent.parameters():
            p += 0.05 * torch.randn_like(p)


def descend(agent):
    """An optimizer whose step is the gradient, clipped after the sum, itself."""
    return torch.optim.SGD(agent.parameters(), 1.0)


def update_ppo(ppo, rows):
    """Of a rollout; advantages are normalized over the rows of all processes, which have equally many.

    The rows that statistics get differ in number.
    """
    args, device = ppo.Args(num_envs=4, norm_obs=True, ent_coef=0.1), torch.device("cpu")
    envs, agents, metrics = ppo.make_envs(args, 4), [], []
    for args.max_grad_norm in (0.1, 1e9):  # which clips everything and nothing
        agent, storage = ppo.Agent(envs, args.norm_obs), ppo.RolloutStorage(envs, args.num_steps)
        storage.obs[-1], _ = envs.reset(seed=1)
        ppo.collect_rollout(agent, partial(ppo.sample_actions, agent), envs, storage, args.gamma, device)
        with patch.multiple(ppo, total=lambda x: x):  # the same in every process
            batch = ppo.compute_batch(agent, storage, args, device)
        num_rows = len(batch.obs)
        assert 200 < num_rows < 256
        shake(agent)
        agent.unused = torch.nn.Parameter(torch.zeros(2))
        minibatch = ppo.Batch(*(x[: num_rows // 2 * 2][rows] for x in batch))
        metrics += ppo.update_minibatch(agent, descend(agent), args, minibatch).values()
        agents.append(agent)
    stats = ppo.RunningMeanStd(4)
    for shift in (5.0, 0.0):
        stats.update(batch.obs[:201][rows] + shift)
    return agents, [*metrics, stats.mean, stats.var]


def update_r2d2_lstm(r2d2, rows):
    """Of windows of several lengths, so that processes train on unequally many steps; and of rewards."""
    args = r2d2.Args(env_id="CartPole-v1", num_envs=4, hidden_size=8, num_steps=100, buffer_size=60)
    args.burn_in, args.learn_length, args.n_step, args.learning_starts = 2, 8, 2, 0
    envs, agents, numbers = r2d2.make_envs(args, 4), [], []
    for args.max_grad_norm in (0.01, 1e9):  # which clips everything and nothing
        agent, target = (r2d2.QNetwork(envs, args) for _ in range(2))
        replay = r2d2.SequenceReplay(envs, args, torch.device("cpu"))
        player = r2d2.Player(agent, envs, torch.full((4,), 0.5), 1)
        replay.add(player, player.rewards)
        with patch.multiple(r2d2, total=lambda x: x):  # the same in every process
            r2d2.collect_steps(player, replay, args)
        index = torch.randperm(int(replay.num_added))[:8]
        weights = torch.linspace(0.3, 1.0, 8)
        ends = replay.data["end"][index].clamp(max=10)
        assert ends[::2].sum() != ends[1::2].sum()
        replay.sample = lambda index=index, weights=weights: (index[rows], weights[rows])
        shake(agent)
        numbers += r2d2.update_network(agent, target, descend(agent), replay, args).values()
        agents.append(agent)
    rewards = torch.randn(args.num_steps, 4, dtype=torch.float64)
    rewards[:, 0] = 0.0  # the processes differ in rewards that are not zero
    rewards = rewards[:, rows].numpy()
    rows = iter(rewards)

    def step():
        player.rewards = next(rows)
        player.is_over, player.lengths = player.rewards > 9, np.int64(player.rewards < 1)

    player = SimpleNamespace(envs=SimpleNamespace(num_envs=rewards.shape[1]), step=step)
    replay = Mock(num_added=0, reward_sums=torch.zeros(2, dtype=torch.float64))
    _, num_steps, _ = r2d2.collect_steps(player, replay, args)
    return agents, [*numbers, replay.reward_sums, torch.tensor(num_steps)]


def update_reinforce_tsp_attention(am, rows):
    """With each baseline. Batch norms are frozen, as in training each process normalizes its own rows."""
    agents, numbers = [], []
    torch.set_float32_matmul_precision("highest")  # then a product does not depend on the number of rows
    for has_best_policy in (False, True):
        agent, points = am.AttentionModel().eval(), torch.rand(6, 5, 2)
        best_policy = am.AttentionModel().eval() if has_best_policy else None
        args = am.Args(max_grad_norm=0.1, batch_size=6, baseline="rollout" if has_best_policy else "pomo")
        with patch.object(torch, "rand_like", lambda x: torch.rand(6, *x.shape[1:])[rows]):
            numbers += am.update_weights(agent, best_policy, [descend(agent)], args, points[rows]).values()
        agents.append(agent)
    points, (agent, best) = torch.rand(600, 5, 2)[rows], agents
    is_better = [am.is_better(*pair, points, 0.5) for pair in ((agent, best), (best, agent))]
    numbers.append(torch.stack(is_better))
    assert numbers[-1].sum() == 1
    return agents, [x.float() for x in numbers]


def update_ppo_change_detection(cd, rows):
    """Of PPO and the detector, with cells that do not count and unequally many active patches; and of F."""
    args = cd.Args(num_steps=2, image_size=16, num_minibatches=1, max_grad_norm=0.1, num_envs=8)
    pairs = torch.from_numpy(cd.change_pairs.draw_haze(8, 16, 2, 1)[0])
    images, labels = cd.change_pairs.split_labels(pairs, args)
    labels[:3] = 255
    agent, numbers, agents = cd.Agent(args), [], []
    with patch.multiple(cd, WORLD_SIZE=1):  # the same in every process
        rollout, _ = cd.collect_rollout(agent, images, labels, args)
    whole = {name: x.flatten(0, 1) for name, x in rollout.items()}
    whole |= {"images": images.repeat(2, 1, 1, 1), "labels": labels.repeat(2, 1, 1, 1)}
    shake(agent)
    loss, metrics = cd.ppo_loss(agent, {name: x[rows] for name, x in whole.items()}, args)
    cd.take_step(agent, descend(agent), loss, args)
    numbers.append(cd.total(torch.stack([*metrics.values()])))
    agents.append(agent)
    agent = cd.Agent(args)
    with (
        patch.object(torch, "rand_like", lambda x: torch.full_like(x, 0.5)),
        patch.object(torch, "rand", lambda *size, **_: torch.full(size, 0.7)),
    ):
        loss = cd.detector_loss(agent, images[rows], labels[rows], args)
        cd.take_step(agent, descend(agent), loss, args)
        numbers.append(cd.total(loss.detach()))
        agents.append(agent)
        with patch.object(torch, "randn_like", torch.zeros_like):
            cd.collect_rollout(agent, images[rows], labels[rows], args)
    return agents, [*numbers, agent.running_f1]


def update_alphazero_go(az, rows):
    """With frozen batch norms, as in training each process normalizes its own rows."""
    args, numbers, agents = az.Args(env_id="Go-3x3", blocks=1, channels=8), [], []
    go, stage = az.make_game(args.env_id), az.get_stage(0, 10, args)
    games, bar = az.SelfPlay(go, 8), az.tqdm(disable=True)
    positions, _ = az.collect_positions(games, go, None, 5, stage, args, bar)
    pool = az.make_records(positions, az.Agent(go, args), go, stage, 0)
    for value_coef in (args.value_coef, 1.0):
        agent = az.Agent(go, args).eval()
        shake(agent)
        records = az.pick(az.pick(pool, slice(40)), rows)
        stage = stage._replace(value_coef=value_coef)
        metrics = az.update_network(agent, descend(agent), records, 40.0, stage)
        numbers.append(torch.stack([*metrics.values()]))
        agents.append(agent)
    return agents, numbers
