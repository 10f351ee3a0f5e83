"""Optimizers and their parameter groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lehr.errors import Problem
from lehr.training.muon import MuonAndAdamW
from lehr.training.schedules import is_number, raise_problems

KINDS = ("adamw", "adam", "adam_l2", "sgd", "muon")
WITH_MOMENTUM = {"sgd": 0.0, "muon": 0.95}  # kind -> momentum where none is given
_EMBEDDING = re.compile(r"(^|[._])(embed\w*|embedding\w*|wte|wpe)($|\.)")
_HEAD = re.compile(r"(^|\.)(lm_head|head|embed_out|unembed\w*|classifier|score)($|\.)")


@dataclass(frozen=True)
class GroupRule:
    """Trained tensors whose name matches `pattern` (shell style) form a group of their own.

    weight_decay         None = as everywhere
    learning_rate_scale  factor on the schedule's rate
    """

    pattern: str
    weight_decay: float | None = None
    learning_rate_scale: float = 1.0


@dataclass(frozen=True)
class OptimizerSettings:
    """Which optimizer, and its numbers.

    kind          adamw (decoupled decay, arXiv:1711.05101) | adam (no decay) | adam_l2 (decay
                  added to the gradient, to show the difference) | sgd (decay added to the
                  gradient, which is the same there) | muon (hidden matrices; adamw for the rest)
    betas, eps    of the adam kinds, and of the rest beside muon
    weight_decay  not on norms, biases and embeddings, unless a group says so
    momentum      of sgd (None = 0) and muon (None = 0.95)
    nesterov      look ahead; None = off for sgd, on for muon
    match_rms     muon: updates as large as adamw's, so that its learning rate can be kept
    groups        tensors with a decay or a rate of their own
    watch_every   updates between two measurements of the effective step; None = never
    """

    kind: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float | None = None
    nesterov: bool | None = None
    match_rms: bool = True
    groups: tuple[GroupRule, ...] = ()
    watch_every: int | None = None

    @property
    def moments(self) -> int:
        """Tensors of state beside each trained tensor, at most."""
        if self.kind == "sgd":
            return 1 if self.momentum else 0
        return 2


def beta2_of_half_life(half_life_tokens: float, tokens_per_update: float) -> float:
    """The second beta whose memory halves every `half_life_tokens`, whatever the batch size.

    beta2 = 2^(-tokens of an update / half-life): with it small batches train as stably as
    large ones (arXiv:2507.07101).

    >>> round(beta2_of_half_life(10_000, 739.0), 3)
    0.95
    """
    return float(0.5 ** (tokens_per_update / half_life_tokens))


def optimizer_problems(settings: OptimizerSettings) -> list[Problem]:
    """Everything that is wrong with these values."""
    problems = []
    kind = settings.kind
    if kind not in KINDS:
        problems.append(Problem("optimizer.kind", "one of " + ", ".join(KINDS), kind))
    betas: object = settings.betas
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if not pair or not all(is_number(beta) and 0 <= beta < 1 for beta in settings.betas):
        expected = "two numbers, each at least 0 and below 1"
        found = list(settings.betas) if isinstance(betas, tuple | list) else betas
        problems.append(Problem("optimizer.betas", expected, found))
    if not is_number(settings.eps) or settings.eps <= 0:
        problems.append(Problem("optimizer.eps", "a finite number above 0", settings.eps))
    decays_given = {"optimizer.weight_decay": settings.weight_decay}
    for index, rule in enumerate(settings.groups):
        where = f"optimizer.groups.{index}"
        if rule.weight_decay is not None:
            decays_given[f"{where}.weight_decay"] = rule.weight_decay
        scale = rule.learning_rate_scale
        if not is_number(scale) or scale < 0:
            expected = "a finite number, at least 0"
            problems.append(Problem(f"{where}.learning_rate_scale", expected, scale))
    for where, decay in decays_given.items():
        if not is_number(decay) or decay < 0:
            problems.append(Problem(where, "a finite number, at least 0", decay))
        elif kind == "adam" and decay > 0:
            expected = "0: adam has no decay; say adamw (decoupled) or adam_l2 (in the gradient)"
            problems.append(Problem(where, expected, decay))
    watch = settings.watch_every
    if watch is not None and (not isinstance(watch, int) or isinstance(watch, bool) or watch < 1):
        problems.append(Problem("optimizer.watch_every", "a whole number, at least 1", watch))
    return problems + _momentum_problems(settings)


def _momentum_problems(settings: OptimizerSettings) -> list[Problem]:
    kind, momentum = settings.kind, settings.momentum
    given = {"momentum": momentum is not None, "nesterov": settings.nesterov is not None}
    if kind in KINDS and kind not in WITH_MOMENTUM:
        return [
            Problem(
                f"optimizer.{name}", f"sgd or muon, not {kind}, with it", getattr(settings, name)
            )
            for name, is_given in given.items()
            if is_given
        ]
    if momentum is not None and (not is_number(momentum) or not 0 <= momentum < 1):
        return [Problem("optimizer.momentum", "a number, at least 0 and below 1", momentum)]
    if settings.nesterov and not (momentum if momentum is not None else WITH_MOMENTUM.get(kind, 1)):
        return [Problem("optimizer.nesterov", "a momentum above 0 with it, or false", True)]
    return []


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: not to norms, biases and embeddings.

    >>> decays("layers.0.mlp.up.weight", torch.zeros(2, 2))
    True
    >>> decays("model.embed_tokens.weight", torch.zeros(2, 2))
    False
    """
    return parameter.ndim >= 2 and not _EMBEDDING.search(name)


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Whether muon may train it: a matrix between layers; no embedding, no output head.

    >>> is_hidden_matrix("layers.0.mlp.up.weight", torch.zeros(2, 3))
    True
    >>> is_hidden_matrix("lm_head.weight", torch.zeros(2, 3))
    False
    """
    return parameter.ndim == 2 and not _EMBEDDING.search(name) and not _HEAD.search(name)


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
    """The optimizer over `trained`; its rate is set before each update by `set_rate`.

    rules  groups beside those of the settings
    Raises RecipeError for bad settings, and for muon where no hidden matrix is trained.
    """
    raise_problems(optimizer_problems(settings))
    groups = parameter_groups(trained, settings.weight_decay, (*settings.groups, *rules))
    momentum, nesterov = settings.momentum, settings.nesterov
    if settings.kind == "sgd":
        # Not fused: torch's fused kernel stops where a tensor has its first gradient late.
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum or 0.0, nesterov=bool(nesterov))
    adam: dict[str, Any] = {
        "lr": 0.0,
        "betas": tuple(map(float, settings.betas)),  # torch takes no whole numbers
        "eps": settings.eps,
        "fused": _can_fuse(trained),
    }
    if settings.kind in ("adam", "adam_l2"):
        return torch.optim.Adam(groups, **adam)
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, **adam)
    hidden = _part(groups, is_hidden_matrix)
    if not hidden:
        expected = "adamw: no hidden matrix is trained here, and muon is for these"
        raise_problems([Problem("optimizer.kind", expected, settings.kind)])
    return MuonAndAdamW(
        hidden,
        _part(groups, lambda name, parameter: not is_hidden_matrix(name, parameter)),
        momentum=WITH_MOMENTUM["muon"] if momentum is None else momentum,
        nesterov=nesterov is not False and momentum != 0,
        match_rms=settings.match_rms,
        adam=adam,
    )


def _part(
    groups: Sequence[Mapping[str, Any]], belongs: Callable[[str, Tensor], bool]
) -> list[dict[str, Any]]:
    """The groups with only those tensors that belong; empty ones left out."""
    parts = []
    for group in groups:
        pairs = zip(group["names"], group["params"], strict=True)
        chosen = [(name, parameter) for name, parameter in pairs if belongs(name, parameter)]
        if chosen:
            names, parameters = map(list, zip(*chosen, strict=True))
            parts.append({**group, "names": names, "params": parameters})
    return parts


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
