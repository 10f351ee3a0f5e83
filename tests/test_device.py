"""What a run trains on: chosen by name, refused where it is not there, left as it was."""

from __future__ import annotations

import os

import pytest
import torch

from card import DEVICE, NAME, pretended_card
from lehr.device import (
    CPU,
    backend_of,
    card_memory,
    choose,
    moved,
    name_of,
    prepare,
    repeatable,
    without_order,
)
from lehr.errors import RecipeError


def cards(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.parametrize(
    ("count", "asked", "found"),
    [
        (0, "auto", CPU),
        (0, "cpu", CPU),
        (1, "cpu", CPU),
        (1, "auto", torch.device("cuda", 0)),
        (2, "cuda", torch.device("cuda", 0)),
        (2, "cuda:1", torch.device("cuda", 1)),
    ],
)
def test_what_is_asked_for_is_chosen(
    count: int, asked: str, found: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(monkeypatch, count)
    assert choose(asked) == found


@pytest.mark.parametrize(
    ("count", "asked", "said"),
    [
        (0, "cuda", "auto or cpu: torch finds no CUDA device here"),
        (0, "cuda:0", "auto or cpu"),
        (1, "cuda:1", r"one of the 1 card\(s\) that torch finds here: cuda:0"),
        (4, "cuda:7", "cuda:0 to cuda:3"),
    ],
)
def test_a_card_that_is_not_there_is_refused(
    count: int, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: training on the CPU for hours because the driver was not found."""
    cards(monkeypatch, count)
    with pytest.raises(RecipeError, match=said):
        choose(asked)


def test_under_torchrun_each_process_has_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose("auto") == choose("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RecipeError, match="2 card"):
        choose("auto")
    assert (backend_of(CPU), backend_of(choose("cuda:0"))) == ("gloo", "cpu:gloo,cuda:nccl")


def test_a_cpu_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    prepare(CPU)
    tensor = torch.arange(3)
    assert moved(tensor, CPU) is tensor and name_of(CPU) == ""
    with repeatable(CPU):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_a_card_is_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pretended_card(memory_gib=3) as card:
        prepare(choose())
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert name_of(DEVICE) == NAME and card_memory(DEVICE) == 3 * 2**30
        there = moved(torch.arange(3), DEVICE)
        assert there.device == DEVICE and card.copies == {"pinned": 1} and not card.waits
        with repeatable(DEVICE):
            assert torch.are_deterministic_algorithms_enabled()
        assert not torch.are_deterministic_algorithms_enabled()
        with repeatable(DEVICE, wanted=False):
            assert not torch.are_deterministic_algorithms_enabled()


def test_the_operation_without_an_order_is_named() -> None:
    error = RuntimeError("put_ does not have a deterministic implementation, but you set ...")
    assert without_order(error) == "put_"
    cublas = "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2"
    assert (
        without_order(RuntimeError(f"Deterministic behavior was enabled, but {cublas}")) == "CuBLAS"
    )
    assert without_order(RuntimeError("CUDA error: out of memory")) == ""
