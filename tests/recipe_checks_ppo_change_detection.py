"""What the recipes for change detection must bring about."""

import importlib
import runpy

import numpy as np
import pytest
import torch
from helpers import read_scalars
from PIL import Image
from scripts import load, run_edited

QUICK = "--image-size 16 --batch-size 8 --num-envs 16 --num-minibatches 2"
TORCHVISION = """
from torch import nn

class ResNet18_Weights:
    IMAGENET1K_V1 = 0.3

class resnet18(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 32, 4, 2), nn.BatchNorm2d(32), nn.ReLU()
        self.maxpool, self.layer1, self.layer2, self.fc = (nn.Identity() for _ in range(4))
        self.bn1.running_mean.fill_(weights or 0.0)
"""  # a small network in its place


def check_backbone(path, folder):
    """It is that of the file to the end, its statistics too; it gets pictures as ImageNet's weights do."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "models.py").write_text(TORCHVISION)
    runpy.run_path(str(folder / "my_backbone.py"), run_name="__main__")
    backbone = importlib.import_module("my_backbone").Backbone()
    backbone.load_state_dict(torch.load(folder / "backbone.pt", weights_only=True))
    assert (backbone.eval().layers[1].running_mean == 0.3).all()
    pixels = torch.randint(0, 256, (2, 3, 8, 8))
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    expected = backbone.layers((pixels / 255 - mean) / std)
    torch.testing.assert_close(backbone(pixels.float() / 64 - 2), expected)
    flags = f"{QUICK} --coarse-size 1 --num-train-pairs 64 --detector-iterations 3 --ppo-iterations 2"
    done, _ = run_edited(path, f"{flags} --eval-episodes 20")
    agent = load(done.path / "checkpoint.pt")["agent"]
    for name, x in backbone.state_dict().items():
        assert torch.equal(agent[f"detector.backbone.{name}"], x), name


def check_bands(path, folder):
    """A change that only the fourth band shows is found; all colours are noise."""
    rng = np.random.default_rng(0)
    for split, i in ((split, i) for split in ("train", "val", "test") for i in range(12)):
        label = np.kron(rng.random((4, 4)) < 0.3, np.ones((8, 8))).astype(np.uint8)
        images = rng.integers(0, 256, (2, 32, 32, 4), np.uint8)
        images[..., 3] = 60
        images[1, ..., 3] += 120 * label
        for kind, x in (("A", images[0]), ("B", images[1]), ("label", 255 * label)):
            (folder / "set" / split / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(folder / "set" / split / kind / f"{i}.png")
    with pytest.MonkeyPatch.context() as patch:
        from envs_shared import change_pairs

        patch.setattr(change_pairs, "NUM_BANDS", 3)  # put back what the copy sets
        flags = f"{QUICK} --data-dir {folder / 'set'} --detector-iterations 5 --ppo-iterations 1"
        done, module = run_edited(path, flags)
        assert change_pairs.NUM_BANDS == 4
    agent = load(done.path / "checkpoint.pt")["agent"]
    assert agent["detector.embed.0.weight"].shape[1] == 8
    assert agent["detector.read_date.weight"].shape[1] == 4
    assert read_scalars(done.path)["eval/f1"][-1][1] > 0.8


def check_iou(path, folder):
    """The worth is the gain in IoU by brute force, the price that of `--cost` in IoU, and IoU decides."""
    flags = f"{QUICK} --num-train-pairs 64 --detector-iterations 2 --ppo-iterations 2"
    flags += " --eval-episodes 20 --cost 0.2"
    done, module = run_edited(path, flags)
    scalars = {tag: x[-1][1] for tag, x in read_scalars(done.path).items()}
    assert scalars["eval/iou_less_price"] == pytest.approx(
        scalars["eval/iou"] - 0.2 * scalars["eval/looks"], abs=1e-6
    )
    assert "a look costs (1 - F1 / 2) x 0.0" in done.out and "all looks cost 0.40 of IoU" in done.out
    # Of many pixels, some are predicted and as many are changed; one more is predicted
    num_pixels, num_hits, num_changed = 10**6, 60_000, 100_000
    f1, iou = num_hits / num_changed, num_hits / (2 * num_changed - num_hits)
    for label in (0.0, 1.0):
        logits, labels = torch.full((1, 1, 1, 1), 5.0), torch.full((1, 1, 1, 1), label)
        worth = module.compute_utility(logits, labels, torch.tensor(f1), 0.0).item()
        more = (num_hits + label) / (2 * num_changed + 1 - num_hits - label)
        union = 2 * num_changed - num_hits
        assert worth / union == pytest.approx(more - iou, rel=1e-3)
    # If the mean worth rises by the price, IoU rises by --cost
    args = module.Args(**load(done.path / "checkpoint.pt")["args"])
    agent = module.Agent(args)
    agent.changed_share.fill_(num_changed / num_pixels)
    agent.running_f1.fill_(f1)
    agent.up.weight.data.zero_()  # a look changes nothing
    pairs = module.load_pairs(args, torch.device("cpu"), ["val"])[0]
    images, labels = module.change_pairs.split_labels(pairs, args)
    with torch.no_grad():
        rollout, _ = module.play(
            agent, images, labels, args, rule=lambda row: torch.ones_like(row["is_active"])
        )
    price = -rollout["rewards"].mean().item()
    assert price * num_pixels / union == pytest.approx(args.cost, rel=1e-4)


CHECKS = {
    "A frozen, pretrained backbone": check_backbone,
    "Four bands": check_bands,
    "Another reward: IoU": check_iou,
}
