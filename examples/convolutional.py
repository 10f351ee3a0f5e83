"""Train a small convolutional network with batch norms: lehr's engine takes any module.

    python examples/convolutional.py [FOLDER]

Pictures of 12 x 12 with one noisy bar, to be named by its direction (4 classes). What the
engine asks of a batch is small: `tokens`, `targets` and `origins`, here of `Pictures`.
It accumulates 4 micro-batches an update, averages the weights, evaluates on held-out
pictures, and goes on from its checkpoints when it is started again in the same folder.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lehr.objectives.base import Loss
from lehr.streams import generator_for
from lehr.training.averaging import AverageSettings
from lehr.training.batch_norm import BatchNormSettings
from lehr.training.engine import Engine
from lehr.training.schedules import Schedule
from lehr.training.settings import EngineSettings

SIDE, CLASSES, BATCH = 12, 4, 16


@dataclass(frozen=True)
class Pictures:
    """images [n, 1, SIDE, SIDE], targets int64 [n], and where each came from."""

    images: Tensor
    targets: Tensor
    origins: tuple[str, ...]

    @property
    def tokens(self) -> int:  # what is counted as read
        return self.targets.numel()


def pictures(count: int, *names: object) -> Pictures:
    """`count` bars through a random place, at 0, 45, 90 or 135 degrees, in noise."""
    stream = generator_for("bars", *names)
    targets = torch.randint(CLASSES, (count,), generator=stream)
    centre = SIDE / 4 + SIDE / 2 * torch.rand(count, 2, 1, 1, generator=stream)
    across, down = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="xy")
    angle = (targets * math.pi / CLASSES)[:, None, None]
    x, y = across[None] - centre[:, 0], down[None] - centre[:, 1]
    bars = ((x * angle.sin() - y * angle.cos()).abs() < 1).float()
    images = 2.0 + 3.0 * bars + 1.5 * torch.randn(count, SIDE, SIDE, generator=stream)
    return Pictures(images[:, None], targets, tuple(f"picture:{n + 1}" for n in range(count)))


class Batches:
    """Fresh pictures for ever: 4 micro-batches an update; the position is the whole state."""

    def __init__(self) -> None:
        self.position = 0

    @property
    def epoch(self) -> float:
        return 0.0

    def next(self) -> list[Pictures]:
        self.position += 1
        return [pictures(BATCH, self.position, part) for part in range(4)]

    def state(self) -> int:
        return self.position

    def load(self, state: int) -> None:
        self.position = state


class Classify:
    """Cross-entropy as a sum; an update is divided by the number of its pictures."""

    def weight(self, batch: Pictures) -> float:
        return float(batch.tokens)

    def loss(self, model: nn.Module, batch: Pictures) -> Loss:
        logits = model(batch.images)
        right = (logits.argmax(-1) == batch.targets).float().sum()
        total = nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
        return Loss(total, {"accuracy": (right, float(batch.tokens))})


def network() -> nn.Module:
    """Two convolutions with batch norms, then a linear layer."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(1, 8), *block(8, 16), nn.Flatten(), nn.Linear(16 * 9, CLASSES)]
    model = nn.Sequential(*layers)
    stream = generator_for("network")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                spread = parameter[0].numel() ** -0.5
                parameter.copy_(spread * torch.randn(parameter.shape, generator=stream))
    return model


def train(folder: Path, updates: int = 60, ema: AverageSettings | None = None) -> nn.Module:
    """Train in `folder`; metrics.jsonl there holds the numbers."""
    model, held_out, objective = network(), pictures(400, "held out"), Classify()

    def evaluate(update: int) -> dict[str, float]:
        loss = objective.loss(model, held_out)
        right, count = loss.metrics["accuracy"]
        return {"loss": float(loss.total) / count, "accuracy": float(right) / count}

    settings = EngineSettings(
        updates=updates,
        learning_rate=1e-2,
        schedule=Schedule("constant", warmup=0.1),
        ema=ema,
        batch_norm=BatchNormSettings(),
        evaluate_every=max(1, updates // 3),
    )
    engine = Engine(
        model, objective, Batches(), settings, folder, ("convolutional",), evaluate=evaluate
    )
    engine.run()
    return model


def last_line(folder: Path) -> dict[str, float]:
    """The newest line of metrics.jsonl."""
    return dict(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))


def main() -> None:
    given = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    averages = {
        "last weights": None,
        "averaged, their statistics measured": AverageSettings(0.9),
        "averaged, statistics of the last weights": AverageSettings(0.9, buffers="copy"),
    }
    for number, (name, ema) in enumerate(averages.items()):
        train(given / str(number), ema=ema)
        line = last_line(given / str(number))
        print(
            f"{name:42} held-out loss {line['evaluation.loss']:.4f}, "
            f"accuracy {line['evaluation.accuracy']:.3f}, "
            f"train mode - eval mode {line['batch_norm.gap']:+.4f}"
        )


if __name__ == "__main__":
    main()
