"""A block computed again in its own backward pass, with chosen products kept.

The graph of the first forward stays as it is; only what its nodes would save is exchanged
(torch's saved-tensor hooks). What a node saves is looked at once:

- inside a kept unit (a linear layer, the attention core): a view of the unit's input is not
  kept but taken, later, from the block computed again; the rest (weights, small parts) is kept;
- everywhere else in the block: not kept, taken from the block computed again by its position.

Computed again, the block runs from its kept inputs, under the random state and the autocast of
the first time; a kept unit hands out the output that it had. So the products are not repeated,
and the gradient has the bits that it has without: the same nodes see the same numbers. The run
ends as soon as nothing is missing. An output that nothing after it needs is not kept.

Modules that change their buffers in forward (batch statistics) have them put back.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lehr.models.surroundings import Surroundings, map_tensors

_CASTS = ("ToCopyBackward0", "TBackward0", "TransposeBackward0", "ViewBackward0")
Key = int | tuple[int, int]  # position between units, or (unit, which of its inputs)


class _Enough(Exception):
    """Nothing is missing any more."""


class _Here(threading.local):
    """Autograd computes a backward pass of an accelerator in a thread of its own."""

    replay: Replay | None = None
    meter: Meter | None = None


_here = _Here()


@dataclass
class Meter:
    """What forward passes under `measuring()` keep, and what computing again costs.

    own      storages that are no activations: weights, their cast copies under autocast, buffers
    storages bytes by storage; blocks: bytes that each block added, in the order of the calls
    units    (block, unit, bytes that keeping it takes, operations that it saves)
    replays  of the blocks that will be computed again; operations: repeated by them so far, by unit
    fixed_bytes  of random states, beside the storages: the same for any number of tokens
    """

    own: set[int] = field(default_factory=set)
    storages: dict[int, int] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    units: list[tuple[int, str, int, float]] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    operations: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed_bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that is kept, once, unless it is a weight or a cast copy of one."""
        if not self.is_weight(tensor):
            self.storages[address(tensor)] = _bytes(tensor)

    def is_weight(self, tensor: Tensor) -> bool:
        if address(tensor) not in self.own and _cast_of_a_leaf(tensor):
            self.own.add(address(tensor))
        return address(tensor) in self.own

    @property
    def kept_bytes(self) -> int:
        return sum(self.storages.values())


@contextmanager
def measuring(own: Sequence[Tensor] = ()) -> Iterator[Meter]:
    """Count the bytes that autograd keeps for the backward pass of what runs inside.

    A hook alone would see too little: what replays hold beside the graph counts as well.
    """
    meter = Meter({address(tensor) for tensor in own})

    def seen(tensor: Tensor) -> Tensor:
        meter.add(tensor)
        return tensor.detach()  # a node that keeps its own output with its graph is never freed

    before, _here.meter = _here.meter, meter
    try:
        with saved_tensors_hooks(seen, lambda tensor: tensor):
            yield meter
    finally:
        _here.meter = before


def unit(
    name: str, run: Callable[..., Tensor], *inputs: Tensor, operations: Callable[[], float]
) -> Tensor:
    """`run(*inputs)`, whose output a surrounding block may keep instead of computing it again.

    run must draw no random numbers. operations: floating-point operations of one run.
    """
    replay = _here.replay
    return run(*inputs) if replay is None else replay.unit(name, run, inputs, operations)


class Block:
    """A module whose forward is computed again in the backward pass.

    keeps  names of the units whose outputs are kept; None: the block is not computed again
    last   the unit after which the block needs nothing more: its output is never kept, so it
           always counts as kept; found in the first forward pass
    """

    def __init__(self, module: nn.Module, keeps: frozenset[str] | None) -> None:
        self.module, self.keeps = module, keeps
        self.forward: Callable[..., Any] = module.forward
        self.last: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or _here.replay is not None:
            return self.forward(*args, **kwargs)
        with _counted(_here.meter):
            if self.keeps is None:
                return self.forward(*args, **kwargs)
            _refuse_cache(self.module, kwargs)
            return Replay(self, args, kwargs).first()


@contextmanager
def _counted(meter: Meter | None) -> Iterator[None]:
    before = meter.kept_bytes if meter else 0
    yield
    if meter:
        meter.blocks.append(meter.kept_bytes - before)


def _refuse_cache(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in ("cache", "past_key_values", "layer_past"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} would write its {name} twice, as it is computed again "
                "in the backward pass: generate under torch.no_grad(), or recompute('none')"
            )


class Replay:
    """One forward pass of a block: what is kept of it, and how the rest comes back."""

    def __init__(self, block: Block, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert block.keeps is not None
        self._block = block
        self._kept_names = block.keeps | ({block.last} if block.last else frozenset())
        self._inputs = map_tensors((args, kwargs), lambda tensor: _Kept(tensor))
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._outputs: dict[int, _Kept] = {}
        self._beside: list[Tensor] = []  # what the units keep besides, for the meter
        self._uses: Counter[Key] = Counter()
        self._exits: list[tuple[int, str, int]] = []  # (unit, name, events so far)
        self._events = self._position = self._unit = 0
        self._inside: tuple[int, tuple[Tensor, ...]] | None = None
        self._again = False
        self._missing: set[Key] = set()
        self._values: dict[Key, Tensor] = {}
        self._left: Counter[Key] = Counter()
        self._surroundings = Surroundings.now((args, kwargs))

    # The first forward pass

    def first(self) -> Any:
        assert self._call is not None
        args, kwargs = self._call
        self._call = None
        with _replaying(self):
            out = self._compute(args, kwargs, self._note, self._unpack)
        self._surroundings.forget_what_was_not_drawn()
        self._close()
        return out

    def _compute(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
    ) -> Any:
        with saved_tensors_hooks(pack, unpack):
            return self._block.forward(*args, **kwargs)

    def unit(
        self,
        name: str,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        operations: Callable[[], float],
    ) -> Tensor:
        kept = name in self._kept_names
        index = self._unit
        self._unit += 1
        if self._again:
            return self._unit_again(index, name, run, inputs, operations, kept)
        if not kept:
            out = run(*inputs)
            self._exits.append((index, name, self._events))
            return out
        self._inside, _here.replay = (index, inputs), None
        try:
            out = run(*inputs)
        finally:
            self._inside, _here.replay = None, self
        self._outputs[index] = _Kept(out)
        self._exits.append((index, name, self._events))
        if _here.meter is not None:
            self._measure_unit(name, out, operations)
        return out

    def _measure_unit(self, name: str, out: Tensor, operations: Callable[[], float]) -> None:
        meter = _here.meter
        assert meter is not None
        kept = [tensor for tensor in (*self._beside, out) if not meter.is_weight(tensor)]
        size = sum({address(tensor): _bytes(tensor) for tensor in kept}.values())
        meter.units.append((len(meter.blocks), name, size, operations()))
        for tensor in self._beside:
            meter.add(tensor)
        self._beside.clear()

    def _note(self, tensor: Tensor) -> Any:
        key: Key
        if self._inside is None:
            key = self._position
            self._position += 1
        else:
            index, inputs = self._inside
            which = _same_storage(tensor, inputs)
            if which is None:
                if _here.meter is not None:
                    self._beside.append(tensor)
                return _Kept(tensor)
            key = (index, which)
        self._events += 1
        self._uses[key] += 1
        return _Later(self, key, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _close(self) -> None:
        """Drop what will not be needed; learn which unit ends the block."""
        for index, _, events in self._exits:
            if events == self._events:
                self._outputs.pop(index, None)
        if self._exits and self._exits[-1][2] == self._events:
            self._block.last = self._exits[-1][1]
        if not self._uses:
            self._inputs = ((), {})
            self._surroundings.random = None
        meter = _here.meter
        if meter is None:
            return
        for tensor in self._holds():
            meter.add(tensor)
        meter.fixed_bytes += sum(_bytes(state) for state in self._surroundings.random or [])
        if self._uses:
            meter.replays.append(self)

    def _holds(self) -> list[Tensor]:
        held: list[Tensor] = [kept.tensor for kept in self._outputs.values()]
        map_tensors(self._inputs, lambda kept: held.append(kept.tensor), _Kept)
        return held

    # The backward pass

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _Kept):
            return packed.unchanged()
        value: Tensor = packed.replay.value(packed)
        return value

    def value(self, later: _Later) -> Tensor:
        """What was not kept; the block is computed again where that has not happened yet."""
        key = later.key
        if key not in self._values:
            self.again()
        value = self._values[key]
        self._left[key] -= 1
        if not self._left[key]:
            del self._values[key]
        if isinstance(key, int):
            return value
        return value.as_strided(later.size, later.stride, later.offset)

    def again(self) -> dict[Key, Tensor]:
        """Compute the block again up to the last tensor that is missing.

        Raises RuntimeError where the block takes another path than the first time, or where
        something that was kept has been changed in place.
        """
        self._values, self._left = {}, self._uses.copy()
        self._missing = set(self._uses)
        self._position = self._unit = 0
        self._again = True
        args, kwargs = map_tensors(self._inputs, lambda kept: kept.fresh(), _Kept)
        buffers = [(buffer, buffer.clone()) for buffer in self._block.module.buffers()]
        try:
            with torch.enable_grad(), self._surroundings.again(), _replaying(self):
                self._compute(args, kwargs, self._collect, _nothing)
        except _Enough:
            pass
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        if self._missing:
            raise RuntimeError(
                f"{type(self._block.module).__name__} took another path when it was computed "
                f"again: {len(self._missing)} saved tensors did not come back; "
                "use recompute: none"
            )
        return self._values

    def _unit_again(
        self,
        index: int,
        name: str,
        run: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        operations: Callable[[], float],
        kept: bool,
    ) -> Tensor:
        if not kept:
            if _here.meter is not None:
                _here.meter.operations[name] += operations()
            return run(*inputs)
        for which, tensor in enumerate(inputs):
            if (index, which) in self._missing:
                self._found((index, which), tensor)
        return self._outputs[index].fresh()

    def _collect(self, tensor: Tensor) -> None:
        position = self._position
        self._position += 1
        if position in self._missing:
            self._found(position, tensor)

    def _found(self, key: Key, tensor: Tensor) -> None:
        if _here.meter is not None:
            _here.meter.is_weight(tensor)
        self._values[key] = tensor.detach()
        self._missing.discard(key)
        if not self._missing:
            raise _Enough


class _Kept:
    """A tensor beside the graph; its version, so that a change in place is not overlooked."""

    __slots__ = ("needs_grad", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.needs_grad = tensor.requires_grad

    def unchanged(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward pass needs has "
                "been changed in place since; use recompute: none"
            )
        return self.tensor

    def fresh(self) -> Tensor:
        """A leaf of a new graph."""
        return self.unchanged().detach().requires_grad_(self.needs_grad)


@dataclass(frozen=True, slots=True)
class _Later:
    replay: Replay
    key: Key
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _nothing(_: Any) -> Tensor:
    raise AssertionError("the graph of a block computed again has no backward pass of its own")


def address(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    if tensor.device.type == "meta":  # nothing lies anywhere: the storage itself is the identity
        return int(storage._cdata)
    return storage.data_ptr()


def _cast_of_a_leaf(tensor: Tensor) -> bool:
    """Only cast, transposed or viewed since it was a leaf that trains."""
    node = tensor.grad_fn
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    return node is not None and "AccumulateGrad" in node.name() and tensor.grad_fn is not node


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _same_storage(tensor: Tensor, inputs: tuple[Tensor, ...]) -> int | None:
    for index, given in enumerate(inputs):
        if tensor.dtype == given.dtype and address(tensor) == address(given):
            return index
    return None


@contextmanager
def _replaying(replay: Replay) -> Iterator[None]:
    before, _here.replay = _here.replay, replay
    try:
        yield
    finally:
        _here.replay = before
