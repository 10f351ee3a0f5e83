"""Nothing in the hot path stands on the CPU because it was made there.

The meta device computes shapes only, and refuses a tensor of another device as a card does: it
finds what was left behind, and says nothing about numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from families import model_of
from torch.utils._python_dispatch import TorchDispatchMode

from lehr.data.groups import group_of
from lehr.data.packing import merge, single
from lehr.data.shapes import Encoded, Origin, Pack
from lehr.models.language_model import LanguageModel
from lehr.objectives.language import Language
from lehr.objectives.policy import Policy, Samples
from lehr.objectives.preference import Dpo

ORIGIN = Origin("s", "f", 1)


class NoValues(TorchDispatchMode):
    """Every number that is asked for is 0: nothing is out of range, nothing is twice."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 0
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def what_reads_values(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers' look for a packed row reaches only masks, and segments have none.

    In fp32 autocast is off anyway, and the meta device has none.
    """
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda _: None)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    with NoValues():
        yield


def away(family: str, **changes: Any) -> LanguageModel:
    model = model_of(family, **changes)
    model.add_adapter(rank=2)
    return model.to("meta")


def row(tokens: int) -> Encoded:
    return Encoded(torch.arange(3, 3 + tokens), torch.arange(tokens) > 2, ORIGIN)


def packs() -> dict[str, tuple[Any, Pack]]:
    """An objective and a pack for each kind of stage."""
    pair = group_of([3, 4, 5], [[6, 7], [8]], ORIGIN)
    return {
        "language": (Language(z_loss=1e-4), merge([single(0, row(9)), single(1, row(6))])),
        "preference": (Dpo(reference={0: (-3.0, -4.0)}), single(0, pair)),
        "policy": (
            Policy({0: Samples([1.0, -1.0], reference=[torch.zeros(2), torch.zeros(1)])}, beta=0.1),
            single(0, pair),
        ),
    }


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
@pytest.mark.parametrize("kind", ["language", "preference", "policy"])
def test_forward_and_backward_stay_on_the_models_device(family: str, kind: str) -> None:
    """Windows (Mistral), soft caps (Gemma 2), a prompt with branches."""
    model = away(family)
    objective, pack = packs()[kind]
    objective.loss(model, pack).total.backward()
    grads = [parameter.grad for parameter in model.trained().values()]
    assert all(grad is not None and grad.device.type == "meta" for grad in grads)


def test_a_tensor_left_on_the_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: weights of the pairs that nobody moved."""
    objective, pack = packs()["language"]
    model = away("Llama")
    monkeypatch.setattr(pack.weights.__class__, "to", stays_where_it_is(pack.weights))
    with pytest.raises(RuntimeError, match="device"):
        objective.loss(model, pack)


def stays_where_it_is(kept: torch.Tensor) -> Any:
    moved = torch.Tensor.to

    def to(self: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        return self if self is kept else moved(self, *where, **how)

    return to
