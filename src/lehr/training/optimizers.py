"""Optimizers and their parameter groups."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr.errors import Problem, RecipeError
from lehr.training.schedules import is_number, raise_problems

KINDS = ("adamw", "sgd")
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|embedding\w*|wte|wpe)($|\.)")


@dataclass(frozen=True)
class OptimizerSettings:
    """adamw: decoupled weight decay, arXiv:1711.05101. sgd: no momentum, reads no betas or eps."""

    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class GroupRule:
    """Trained tensors whose name matches `pattern` (shell style) form a group of their own.

    weight_decay         None = as everywhere
    learning_rate_scale  factor on the schedule's rate
    """

    pattern: str
    weight_decay: float | None = None
    learning_rate_scale: float = 1.0


def optimizer_problems(settings: OptimizerSettings) -> list[Problem]:
    """Everything that is wrong with these values."""
    problems = []
    if settings.kind not in KINDS:
        expected = "one of " + ", ".join(KINDS)
        problems.append(Problem("optimizer.kind", expected, settings.kind))
    betas = settings.betas
    if len(betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in betas):
        expected = "two numbers, each at least 0 and below 1"
        problems.append(Problem("optimizer.betas", expected, list(betas)))
    if not is_number(settings.eps) or settings.eps <= 0:
        problems.append(Problem("optimizer.eps", "a finite number above 0", settings.eps))
    if not is_number(settings.weight_decay) or settings.weight_decay < 0:
        expected = "a finite number, at least 0"
        problems.append(Problem("optimizer.weight_decay", expected, settings.weight_decay))
    return problems


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to norms, biases and embeddings.

    >>> decays("layers.0.mlp.up.weight", torch.zeros(2, 2))
    True
    >>> decays("model.embed_tokens.weight", torch.zeros(2, 2))
    False
    """
    return parameter.ndim >= 2 and not _EMBEDDING.search(name)


def parameter_groups(
    trained: Mapping[str, Parameter],
    weight_decay: float,
    rules: Sequence[GroupRule] = (),
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer; each also has `names` and `learning_rate_scale`.

    Raises RecipeError for a rule that matches nothing and for a tensor that two rules match.
    """
    problems = []
    matched: dict[str, GroupRule] = {}
    for rule in rules:
        names = [name for name in trained if fnmatchcase(name, rule.pattern)]
        if not names:
            some = ", ".join(list(trained)[:3])
            expected = f"a pattern that matches a trained tensor, such as {some}"
            problems.append(Problem("optimizer.groups", expected, rule.pattern))
        for name in names:
            if name in matched:
                both = f"{matched[name].pattern}, {rule.pattern}"
                expected = f"{name} in one group only"
                problems.append(Problem("optimizer.groups", expected, both))
            matched[name] = rule
    raise_problems(problems)
    members: dict[tuple[float, float], list[str]] = {}
    for name, parameter in trained.items():
        rule = matched.get(name, GroupRule("*"))
        decay = rule.weight_decay
        if decay is None:
            decay = weight_decay if decays(name, parameter) else 0.0
        members.setdefault((decay, rule.learning_rate_scale), []).append(name)
    return [
        {
            "params": [trained[name] for name in names],
            "names": names,
            "weight_decay": decay,
            "learning_rate_scale": scale,
        }
        for (decay, scale), names in members.items()
    ]


def make_optimizer(
    trained: Mapping[str, Parameter],
    settings: OptimizerSettings,
    rules: Sequence[GroupRule] = (),
) -> Optimizer:
    """The optimizer over `trained`; its rate is set before each update by `set_rate`."""
    groups = parameter_groups(trained, settings.weight_decay, rules)
    if settings.kind == "sgd":
        return torch.optim.SGD(groups, lr=0.0)
    if settings.kind != "adamw":
        raise RecipeError(Problem("optimizer.kind", "one of " + ", ".join(KINDS), settings.kind))
    return torch.optim.AdamW(
        groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=_can_fuse(trained)
    )


def set_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Use `learning_rate` (times the group's own scale) in the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["learning_rate_scale"]


def _can_fuse(trained: Mapping[str, Parameter]) -> bool:
    """One kernel for the whole update: on these devices, for dense real tensors."""
    return all(
        parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point()
        for parameter in trained.values()
    )
