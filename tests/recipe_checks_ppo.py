"""What the recipes for PPO must bring about."""

import copy
import re
import warnings

import gymnasium as gym
import numpy as np
import torch
from brute_force import assert_close, brute_force_advantages
from device_runs import check_recorded, play
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from helpers import read_scalars
from probe_envs import OneStep, Quarters, Task
from recipe_checks_ppo_device import check_bare, check_device, check_same_step
from scripts import call_main, import_file, load, read_returns, run_edited, run_main
from torch.distributions import Categorical


class Masked(Task):
    """Three numbers and a mask that allows two of four actions: 1 for the smaller index of these."""

    observation_space, action_space, length = Box(-np.inf, np.inf, (7,)), Discrete(4), 5

    def observe(self):
        self.last_mask = getattr(self, "mask", None)
        self.mask = np.zeros(4, np.float32)
        self.mask[self.np_random.choice(4, 2, replace=False)] = 1
        return np.concatenate((self.np_random.normal(50, 9, 3), self.mask)).astype(np.float32)

    def score(self, action):
        assert self.last_mask[action], "a forbidden action"
        return float(action == self.last_mask.argmax())


def check_cnn(path, folder):
    """The brighter quarter of an image is named: 1 at best, 0.25 at random."""
    flags = "--env-id probe_envs:Quarters-v0 --learning-rate 1e-3 --num-steps 32 --total-timesteps 1500"
    done, _ = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.9


def check_atari(path, folder):
    """Four frames are one image of numbers of 0 to 1, and a return is a difference of points."""
    flags = "--env-id ALE/Pong-v5 --num-envs 2 --num-steps 8 --total-timesteps 16 --eval-episodes 1"
    done, module = run_edited(path, flags)
    (returns,) = read_returns(done)
    assert -21 <= returns <= 21 and returns == int(returns)
    images = torch.full((1, 4, 84, 84), 255.0)
    envs = module.make_envs(module.Args(env_id="ALE/Pong-v5"), 1)
    assert module.Agent(envs, False).normalize(images).max() == 1


def check_masks(path, folder):
    """No forbidden action is ever taken, and the best allowed one is learned, with --norm-obs."""
    gym.register("Masked-v0", Masked)
    done, _ = run_edited(path, "--env-id Masked-v0 --norm-obs --total-timesteps 12000 --eval-episodes 20")
    assert read_returns(done)[-1] >= 4.9  # of 5; at random 2.5


def check_frozen(path, folder):
    """The encoder is that of the file to the end, and the rest is trained."""
    torch.manual_seed(3)
    encoder = torch.nn.Linear(4, 64)
    torch.save(encoder.state_dict(), folder / "encoder.pt")
    done, _ = run_edited(path, "--num-envs 8 --num-steps 32 --total-timesteps 1024 --eval-episodes 0")
    agent = load(done.path / "checkpoint.pt")["agent"]
    assert torch.equal(agent["actor.1.weight"], encoder.weight)
    assert agent["actor.5.bias"].abs().max() > 0 and agent["critic.1.bias"].abs().max() > 0


def check_frames(path, folder):
    """The card of three steps ago is named in nearly every step: 1 at best, -0.5 at random."""
    flags = "--env-id popgym:popgym-RepeatPreviousEasy-v0 --gamma 0.5 --total-timesteps 40000"
    done, _ = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.9


def check_recurrent(path, folder):
    """A cue is remembered; before an update, log-probabilities and values equal those of acting.

    Recorded and eager runs are equal on a simulated GPU.
    """
    flags = "--env-id probe_envs:Recall-v0 --num-steps 16 --total-timesteps 12000 --eval-episodes 50"
    done, module = run_edited(path, flags)
    assert read_returns(done)[-1] == 1
    check_sequences(module)
    flags = "--env-id probe_envs:Ledger-v0 --norm-obs --num-envs 4 --num-steps 8 --num-minibatches 2"
    flags += " --update-epochs 2 --total-timesteps 100 --eval-episodes 2"
    watched = ("sample_actions", "update_minibatch")
    runs = [play(module, flags, folder / f"{x}", watched, CUDA_GRAPHS=x) for x in (True, False)]
    check_recorded(*runs)
    assert {*runs[0].waits["update_minibatch"]} == {0}


def check_sequences(module):
    """Rollouts and minibatches of whole sequences, with ends of episodes inside, give what acting gave."""
    args = module.Args(env_id="probe_envs:Ledger-v0", num_envs=6, num_steps=20)
    envs = module.make_envs(args, args.num_envs)
    torch.manual_seed(78)
    agent, storage = module.Agent(envs, False), module.RolloutStorage(envs, args.num_steps)
    for weights in agent.parameters():
        torch.nn.init.normal_(weights, std=0.5)
    storage.obs[-1], _ = envs.reset(seed=78)
    acted = []

    @torch.no_grad()
    def act(*inputs):
        outputs, _ = agent.unroll(*inputs)
        actions, states = module.sample_actions(agent, *inputs)
        log_probs = agent.get_distribution(outputs).log_prob(actions).sum(-1)
        acted.append((log_probs[0], agent.get_values(outputs)[0]))
        return actions, states

    for _ in range(2):
        acted.clear()
        module.collect_rollout(agent, act, envs, storage, args.gamma, "cpu")
        batch = module.compute_batch(agent, storage, args, "cpu")
        is_trained = storage.lengths[1:] > 0
        assert 10 < (~is_trained).sum() < 60
        for found, expected in zip((batch.log_probs, batch.values), zip(*acted)):
            torch.testing.assert_close(found, torch.stack(expected)[is_trained])

    def compute_kl(batch, **sequences):
        sequences = batch.sequences._replace(**sequences)
        return module.ppo_loss(agent, batch._replace(sequences=sequences), args)[1]["approx_kl"]

    # Before an update, policies are equal; not without the stored states, or if states outlive episodes
    assert compute_kl(batch).abs() < 1e-6
    assert compute_kl(batch, states=batch.sequences.states * 0) > 1e-3
    assert compute_kl(batch, lengths=batch.sequences.lengths + 1) > 1e-3
    seen = 0
    for chosen in torch.randperm(6).chunk(3):
        minibatch = module.select_sequences(batch, chosen)
        assert len(minibatch.t) == 40
        # The rows are all those of the chosen environments, some of them twice
        rows = torch.isin(batch.b, chosen)
        assert {*minibatch.returns.tolist()} == {*batch.returns[rows].tolist()}
        seen += rows.sum()
        assert compute_kl(minibatch).abs() < 1e-6
        outputs, _ = agent.unroll(*minibatch.sequences)
        torch.testing.assert_close(agent.get_values(outputs)[minibatch.t, minibatch.b], minibatch.values)
    assert seen == len(batch.t)


def check_memory_tasks(path, folder):
    """By the commands of the page, both tasks are learned: 1 at best, -0.5 at random."""
    module = import_file("edited_copy", path)
    for task in ("RepeatFirstEasy", "RepeatPreviousEasy"):
        done = run_main(module, folder / task, f"--env-id popgym:popgym-{task}-v0 --gamma 0.5 --seed 78004")
        assert read_returns(done)[-1] >= 0.9


def record_iterations(module, name):
    """Let the runs of a module note the state of the part `name` in each iteration; return the list."""
    states, log = [], module.Run.log

    def log_and_note(run, scalars):
        states.append(copy.deepcopy(run.parts[name].state_dict()))
        log(run, scalars)

    module.Run.log = log_and_note
    return states


def check_average(path, folder):
    """Evaluations score the average of all iterations' weights, also with --evaluate and after a resume."""
    module = import_file("edited_copy", path)
    states = record_iterations(module, "agent")
    flags = "--num-envs 8 --num-steps 32 --eval-episodes 20 --eval-interval 2 --norm-obs --seed 78"
    done = run_main(module, folder / "runs", flags, "--total-timesteps 1000")
    checkpoint = done.path / "checkpoint.pt"
    call_main(module, f"--resume {checkpoint} --total-timesteps 2000")
    assert len(states) == 8
    names = [name for name in states[0] if name.startswith(("actor", "critic"))]
    expected = {name: states[0][name] for name in names}
    for state in states[1:]:
        expected = {name: 0.9 * x + 0.1 * state[name] for name, x in expected.items()}
    expected |= {name: x for name, x in states[-1].items() if name not in names}  # the newest statistics
    average = {name.removeprefix("module."): x for name, x in load(checkpoint)["average"].items()}
    assert average.pop("n_averaged") == 8
    torch.testing.assert_close(average, expected)
    # Scores, of the training's episodes and of those of --evaluate, are those of the average
    args = module.Args(**load(checkpoint)["args"])
    agent = module.Agent(module.make_envs(args, 1), True)
    scores = {}
    for stream in (module.EVALUATION, module.FINAL_EVALUATION):
        for weights in (average, states[-1]):
            agent.load_state_dict(weights)
            found = module.evaluate(agent, args, torch.device("cpu"), stream, folder)
            scores.setdefault(stream, []).append(found["eval/episodic_return"])
    assert all(smoothed != raw for smoothed, raw in scores.values())
    assert np.isclose(read_returns(done)[-1], scores[module.EVALUATION][0])
    out, _ = call_main(module, f"--evaluate {checkpoint}")
    printed = re.search(r"eval/episodic_return: (.*)", out)[1]
    assert np.isclose(float(printed), scores[module.FINAL_EVALUATION][0], rtol=1e-4)


def check_scheduler(path, folder):
    """The rate of iteration k is what the function says, also after a resume, and Adam uses it."""
    module = import_file("edited_copy", path)
    states = record_iterations(module, "optimizer")
    flags = "--num-envs 8 --num-steps 32 --eval-episodes 0 --learning-rate 0.003"
    done = run_main(module, folder / "runs", flags, "--total-timesteps 2000")
    call_main(module, f"--resume {done.path / 'checkpoint.pt'} --total-timesteps 4000")
    rates = [rate for _, rate in read_scalars(done.path)["charts/learning_rate"]]
    assert 12 < len(rates) == len(states)
    expected = [0.003 * min(1, (k + 1) / 10) * 0.97**k for k in range(len(rates) + 1)]
    np.testing.assert_allclose(rates, expected[:-1], rtol=1e-5)
    # Each was noted after the scheduler's step
    used = [float(state["param_groups"][0]["lr"]) for state in states]
    np.testing.assert_allclose(used, expected[1:], rtol=1e-5)


def make_agent(module, env_id, norm_obs=False):
    """An agent whose weights are so large that its actions depend on the observation."""
    envs = module.make_envs(module.Args(env_id=env_id), 1)
    torch.manual_seed(5)
    agent = module.Agent(envs, norm_obs)
    for weights in agent.parameters():
        torch.nn.init.normal_(weights)
    return agent.eval()


class Components(OneStep):
    """Several choices: the share of them that is as the observation says; optimum 1."""

    def __init__(self, observations, actions):
        self.observation_space, self.action_space = observations, actions

    def draw(self):
        sizes, space = getattr(self.action_space, "nvec", 2), self.observation_space
        return self.np_random.integers(sizes, size=space.shape).astype(space.dtype)

    def score(self, action):
        assert action in self.action_space
        return float(np.mean(action - getattr(self.action_space, "start", 0) == self.obs))


def check_components(path, folder):
    """Both spaces are learned; probabilities and entropy are those of each component's softmax."""
    module = import_file("edited_copy", path)
    knobs = {"observations": MultiDiscrete([2, 4]), "actions": MultiDiscrete([2, 4], start=[1, -3])}
    switches = dict.fromkeys(("observations", "actions"), MultiBinary((2, 2)))
    for name, spaces, sizes in (("Knobs-v0", knobs, [2, 4]), ("Switches-v0", switches, [2] * 4)):
        gym.register(name, Components, kwargs=spaces)
        flags = f"--env-id {name} --num-envs 8 --num-steps 32 --total-timesteps 8000 --eval-episodes 50"
        assert read_returns(run_main(module, folder / name, flags))[-1] >= 0.99  # at random 0.375 and 0.5
        # By hand, for one observation
        agent = make_agent(module, name)
        agent.actor[5].weight.data /= 5  # so that no probability is 0
        obs = torch.full((1, agent.actor[1].in_features), 0.3)
        rows = agent.actor(obs).reshape(len(sizes), -1)
        components = [Categorical(logits=row[:n]) for row, n in zip(rows, sizes, strict=True)]
        pi = agent.get_distribution(obs)
        actions = torch.tensor(sizes) - 1
        expected = sum(p.log_prob(action) for p, action in zip(components, actions, strict=True))
        assert torch.allclose(pi.log_prob(actions[None].float()).sum(), expected, atol=1e-5)
        assert torch.allclose(pi.entropy().sum(), sum(p.entropy() for p in components), atol=1e-5)


class Car(Quarters):
    """A picture and a vector: the brighter quarter, and two further if the second number is positive.

    The optimum is 1; the picture alone gives 0.5, the vector 0.25. Keys are neither sorted nor those alone.
    """

    observation_space = Dict(
        [
            ("vector", Box(-np.inf, np.inf, (3,))),
            ("image", Quarters.observation_space),
            ("extra", Discrete(3)),
        ]
    )

    def draw(self):
        image = super().draw()
        self.vector = self.np_random.normal(0, 500, 3).astype(np.float32)
        return {"extra": self.np_random.integers(3), "image": image, "vector": self.vector}

    def score(self, action):
        return float(action == (self.brighter + 2 * (self.vector[1] > 0)) % 4)


def check_parts(path, folder):
    """Both parts are used, whatever the order of keys."""
    gym.register("Car-v0", Car)
    flags = "--env-id Car-v0 --learning-rate 1e-3 --num-steps 32 --total-timesteps 8000 --eval-episodes 50"
    done, _ = run_edited(path, flags)
    assert read_returns(done)[-1] >= 0.9


def check_trunk(path, folder):
    """There is one trunk, and the policy learns."""
    flags = "--env-id probe_envs:Shifted-v0 --total-timesteps 12000 --eval-episodes 30"
    done, module = run_edited(path, flags)
    assert read_returns(done)[-1] == 1
    agent = make_agent(module, "CartPole-v1")
    assert sum(x.numel() for x in agent.parameters()) == 5 * 64 + 65 * 64 + 3 * 65


class Luck(OneStep):
    """1 for the bit that the actor sees, and luck of standard deviation 20 that the critic sees."""

    observation_space = Dict({"luck": Box(-np.inf, np.inf, (1,)), "actor": Box(-1, 1, (2,))})

    def draw(self):
        self.bit = int(self.np_random.integers(2))
        self.luck = self.np_random.normal(0, 20, 1).astype(np.float32)
        return {"luck": self.luck, "actor": np.float32([2 * self.bit - 1, 0])}

    def score(self, action):
        return float(action == self.bit) + self.luck[0]


def check_asymmetric(path, folder):
    """The critic explains the luck, and the actor learns the bit without seeing the luck."""
    gym.register("Luck-v0", Luck)
    done, module = run_edited(path, "--env-id Luck-v0 --norm-obs --total-timesteps 40000 --eval-episodes 0")
    assert read_scalars(done.path)["losses/explained_variance"][-1][1] > 0.9
    agent = module.Agent(module.make_envs(module.Args(env_id="Luck-v0"), 1), True)
    agent.load_state_dict(load(done.path / "checkpoint.pt")["agent"])
    seen = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    for luck in (-40.0, 0.0, 40.0):
        obs = agent.normalize(torch.cat((seen, torch.full((2, 1), luck)), 1))
        assert agent.get_distribution(obs).mode.tolist() == [[0], [1]]


class Corridor(Task):
    """16 cells from the start to a reward of 1. One of three actions leads on, the others lead back.

    There is time for one wrong step at most: at random, 1 episode in 2.7 million gets there.
    """

    observation_space, action_space = Discrete(16), Discrete(3)
    forward = (1, 0, 2, 1, 1, 2, 0, 1, 0, 2, 1, 0, 2, 1, 0)

    def reset(self, seed=None, options=None):
        self.cell = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.cell = max(self.cell + (1 if action == self.forward[self.cell] else -1), 0)
        is_end = self.cell == 15
        return self.cell, float(is_end), is_end, False, {}

    def observe(self):
        return self.cell


def check_rnd(path, folder):
    """The corridor's end is found, and the advantages are those of both rewards."""
    gym.register("Corridor-v0", Corridor, max_episode_steps=17)
    flags = "--env-id Corridor-v0 --norm-obs --learning-rate 1e-3 --num-steps 32 --seed 41"
    done, module = run_edited(path, f"{flags} --total-timesteps 50000 --eval-interval 10")
    assert read_returns(done)[-1] == 1
    # The intrinsic return goes on over ends of episodes, the other one does not
    args = module.Args(env_id="Corridor-v0", norm_reward=False, num_steps=4)
    agent, storage = make_agent(module, "Corridor-v0"), module.RolloutStorage(module.make_envs(args, 1), 4)
    storage.obs[range(5), 0, range(5)] = 1
    storage.terminated[2] = True  # by step 1; step 2 resets
    storage.lengths[:, 0] = [1, 2, 3, 0, 1]
    batch = module.compute_batch(agent, storage, args, "cpu")
    obs, total, never = torch.as_tensor(storage.obs[:, 0]), 0.0, np.zeros(4)
    values = agent.get_values(obs).numpy(force=True)
    bonus = agent.int_stats.scale(agent.get_novelty(obs[1:])).numpy(force=True)
    assert (bonus > 0).all()
    bonus[2] = 0
    heads = (1.0, 0.98, never, storage.terminated[1:, 0]), (0.5, 0.99, bonus, never)
    is_trained = [0, 1, 3]
    for (share, gamma, rewards, ends), v, returns in zip(heads, values.T, batch.returns.T, strict=True):
        advantages = brute_force_advantages(rewards, v[:4], v[1:], ends, never, gamma, 0.95)
        assert_close(returns, (advantages + v[:4])[is_trained])
        total += share * advantages
    assert_close(batch.advantages, total[is_trained])


def check_export(path, folder):
    """TorchScript gives the agent's own actions, Discrete and scaled to a Box."""
    program = (folder / "recipe.py").read_text()
    program = re.sub(r"^torch\.onnx\.export.*", "", program, flags=re.M)  # which needs two more packages
    for env_id in ("probe_envs:FarAim-v0", "probe_envs:Shifted-v0"):
        agent = make_agent(import_file("ppo", path), env_id, norm_obs=True)
        agent.normalize.update(torch.randn(50, *agent.normalize.mean.shape) * 3 + 2)
        checkpoint = {"args": {"env_id": env_id, "norm_obs": True}, "agent": agent.state_dict()}
        torch.save(checkpoint, folder / "best.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(program, {"__name__": "export"})
        obs = torch.randn(7, *agent.normalize.mean.shape) * 3 + 2  # the program traced two rows
        expected = agent.to_env(agent.get_distribution(agent.normalize(obs)).mode)
        found = torch.jit.load(folder / "policy.torchscript")(obs).numpy(force=True)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def check_acting(path, folder):
    """The lines give the most likely action."""
    agent, names = make_agent(import_file("ppo", path), "CartPole-v1"), {}
    torch.save({"agent": agent.state_dict()}, folder / "best.pt")
    exec((folder / "recipe.py").read_text(), names)
    expected = agent.actor(torch.tensor([[0.0, 0.1, 0.02, -0.1]])).argmax(-1)
    assert names["actions"].tolist() == expected.tolist()


CHECKS = {
    "A CNN for image grids": check_cnn,
    "Atari with the usual preprocessing": check_atari,
    "Action masks": check_masks,
    "A frozen, pretrained encoder": check_frozen,
    "Stacked frames": check_frames,
    "A recurrent network": check_recurrent,
    "A moving average of the weights": check_average,
    "A learning-rate scheduler of torch": check_scheduler,
    "Acting without an environment": check_acting,
    "A picture and a vector": check_parts,
    "MultiDiscrete and MultiBinary actions": check_components,
    "A shared trunk": check_trunk,
    "A critic that sees more than the actor": check_asymmetric,
    "Random network distillation": check_rnd,
    "Export to ONNX and TorchScript": check_export,
    "The bare algorithm": check_bare,
    "An environment on the device": check_device,
    "An environment on the device that resets in the same step": check_same_step,
}
SLOW_CHECKS = {"A recurrent network": check_memory_tasks}
