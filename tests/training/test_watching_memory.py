"""What measurements keep in memory: the forecast's copies against tensors that are alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_runs import Cycle, make_engine, rows
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lehr.diagnosis.planner import forecast
from lehr.diagnosis.watching_memory import Watching, watching_of
from lehr.training import steps
from lehr.training.optimizers import OptimizerSettings

WIDTH, LAYERS = 32, 30
TRAINED_BYTES = 4 * (LAYERS * WIDTH * WIDTH + 2 * 11 * WIDTH)


def test_bytes_by_hand() -> None:
    assert watching_of(None, None, None) == Watching(0, 0)
    assert watching_of(5, 1, 10) == Watching(1, 2)
    assert Watching(1, 0).bytes_over(100, 1000) == 100, "it lives while activations do"
    assert Watching(0, 2).bytes_over(100, 150) == 50, "the step comes when they are gone"
    assert Watching(1, 1).bytes_over(100, 1000) == 100


def test_the_forecast_counts_them_and_evaluations_decode_in_their_place() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes: dict[str, Any] = {"config": config, "parameters": 10**6, "trained_parameters": 10**6}
    sizes |= {"precision": "fp32", "pack_tokens": 8, "micro_batch": 1, "vocabulary": 50}
    plain = forecast(**sizes, activation_bytes=1000)
    noise = forecast(**sizes, activation_bytes=1000, watching=Watching(1, 0))
    assert plain["watching"] == 0 and noise["watching"] == 4 * 10**6
    assert noise["peak"] - plain["peak"] == 4 * 10**6 + noise["decoding"] - plain["decoding"]
    pure = forecast(**sizes | {"precision": "pure_bf16"}, watching=Watching(1, 0))
    assert pure["watching"] == 2 * 10**6, "its gradients are bf16"


class Chain(nn.Module):
    """Many layers of one size, so that a measurement's own working memory is small beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(ids)))


class Peak(TorchDispatchMode):
    """The most bytes of storages that were alive at once after any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {at: one for at, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def peak_of(folder: Any, length: int, **keys: Any) -> int:
    """Peak of live bytes over two updates of two micro-batches of `length` tokens."""
    torch.manual_seed(0)
    batches = Cycle(rows(2, length, length), 2)
    values = {"model": Chain(), "batches": batches, "micro_batch": 1, "evaluate": None}
    engine = make_engine(folder, 2, **(values | keys))
    with Peak() as meter:
        engine.run()
    return meter.peak


NOISE = {"noise_scale_every": 1}
FLOW = {"gradient_flow_every": 1}
STEPS = {"optimizer": OptimizerSettings(watch_every=1)}
CASES = {
    "noise": (NOISE, 4),
    "flow": (FLOW, 4),
    "noise and flow": (NOISE | FLOW, 4),
    "flow and steps": (FLOW | STEPS, 4),
    "flow under activations": (FLOW, 64),
    "noise over activations": (NOISE, 64),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_alive_grows_by_the_forecast(tmp_path: Any, case: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(steps, "SAMPLE", 100)  # of real groups it is as small a part
    keys, length = CASES[case]
    plain = peak_of(tmp_path / "plain", length)
    watched = peak_of(tmp_path / "watched", length, **keys)
    own = keys.get("optimizer", OptimizerSettings()).watch_every
    watching = watching_of(keys.get("noise_scale_every"), keys.get("gradient_flow_every"), own)
    # A layer keeps its input; the logits and their gradient are small here.
    activations = 4 * length * WIDTH * (LAYERS + 1)
    expected = watching.bytes_over(TRAINED_BYTES, activations)
    print(f"{case}: forecast {expected}, measured {watched - plain} bytes")
    # While one tensor is measured: its change in fp32, and two of its size in float64.
    working = 5 * 4 * WIDTH * WIDTH
    assert watched - plain == pytest.approx(expected, abs=working)
