"""Packing: several examples in one row of tokens, isolated by segments.

Examples are placed by best-fit decreasing: the longest first, each into the fullest
pack that still has room. The result depends on the lengths alone, so the same update
is always packed in the same way.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lehr.data.shapes import Encoded, Pack, Segments


def pack(
    items: Sequence[tuple[int, Encoded]], pack_length: int, packing: bool = True
) -> list[Pack]:
    """Packs of at most `pack_length` tokens that hold every item once.

    items        (dataset index, example); an example's branches share its prompt
    pack_length  tokens; an example that is longer alone (a pair counts both of its
                 answers) gets a pack of its own, because nothing is cut here
    packing      False: one pack an example, in the order given

    Examples keep their order inside a pack, and packs are ordered by their first example.
    Raises ValueError for a length below 1 and for an example that no pack can express.
    """
    if pack_length < 1:
        raise ValueError(f"pack_length must be at least 1 token (found {pack_length})")
    if not packing:
        return [single(index, encoded) for index, encoded in items]
    bins = best_fit_decreasing([encoded.tokens for _, encoded in items], pack_length)
    return [_assemble([items[place] for place in places]) for places in bins]


def single(index: int, encoded: Encoded) -> Pack:
    """The pack that holds one example alone."""
    return _assemble([(index, encoded)])


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Places of `lengths` grouped into bins of at most `capacity`, in O(n log n) comparisons.

    >>> best_fit_decreasing([3, 5, 2, 4], 7)
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending: the first that fits is best
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        found = bisect_left(free, (lengths[place], -1))
        if found < len(free):
            room, chosen = free.pop(found)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(place)
        if room > lengths[place]:
            insort(free, (room - lengths[place], chosen))
    for places in bins:
        places.sort()
    return sorted(bins)


def fill(packs: Iterable[Pack], pack_length: int) -> float:
    """Share of the packs' room that holds tokens; a pack that is longer counts as full."""
    tokens = room = 0
    for one in packs:
        tokens += one.tokens
        room += max(one.tokens, pack_length)
    return tokens / room if room else 0.0


def merge(packs: Sequence[Pack]) -> Pack:
    """One longer pack with the examples of all `packs` (a micro-batch of n packs).

    Raises ValueError where there is nothing to merge.
    """
    if not packs:
        raise ValueError("a micro-batch needs at least one pack")
    if len(packs) == 1:
        return packs[0]
    tokens = _offsets([one.tokens for one in packs])
    segments = _offsets([int(one.segments.start.numel()) for one in packs])
    sequences = _offsets([one.sequences for one in packs])
    examples = _offsets([len(one.items) for one in packs])
    prefixes = [
        torch.where(one.segments.prefix >= 0, one.segments.prefix + offset, one.segments.prefix)
        for one, offset in zip(packs, segments, strict=True)
    ]
    return Pack(
        ids=torch.cat([one.ids for one in packs]),
        positions=torch.cat([one.positions for one in packs]),
        segments=Segments(
            start=_shifted([one.segments.start for one in packs], tokens),
            length=torch.cat([one.segments.length for one in packs]),
            prefix=torch.cat(prefixes),
        ),
        predict_from=_shifted([one.predict_from for one in packs], tokens),
        targets=torch.cat([one.targets for one in packs]),
        sequence=_shifted([one.sequence for one in packs], sequences),
        weights=torch.cat([one.weights for one in packs]),
        sequence_example=_shifted([one.sequence_example for one in packs], examples),
        items=tuple(item for one in packs for item in one.items),
        origins=tuple(origin for one in packs for origin in one.origins),
    )


def _offsets(lengths: Sequence[int]) -> list[int]:
    """Where each part begins when parts of these lengths stand one after the other."""
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts


def _shifted(parts: Sequence[Tensor], offsets: Sequence[int]) -> Tensor:
    return torch.cat([part + offset for part, offset in zip(parts, offsets, strict=True)])


def _assemble(items: Sequence[tuple[int, Encoded]]) -> Pack:
    """The pack of these examples, in this order."""
    parts: list[Encoded] = []  # one a segment
    prefix: list[int] = []  # segment that it continues, or -1
    segment_sequence: list[int] = []  # sequence of its pairs, or -1: a prompt has none of its own
    sequence_example: list[int] = []
    for example, (_, encoded) in enumerate(items):
        _check(encoded)
        if not encoded.branches:
            parts.append(encoded)
            prefix.append(-1)
            segment_sequence.append(len(sequence_example))
            sequence_example.append(example)
            continue
        prompt = len(parts)
        parts.append(encoded)
        prefix.append(-1)
        segment_sequence.append(-1)
        for branch in encoded.branches:
            parts.append(branch)
            prefix.append(prompt)
            segment_sequence.append(len(sequence_example))
            sequence_example.append(example)

    lengths = [int(part.ids.numel()) for part in parts]
    starts = _offsets(lengths)
    before = [lengths[parent] if parent >= 0 else 0 for parent in prefix]
    # The position that predicts a segment's first token: the last one of its prompt.
    # Without a prompt there is none, and `_check_pairs` makes sure that nothing asks for it.
    entry = [starts[parent] + lengths[parent] - 1 if parent >= 0 else -1 for parent in prefix]
    start, length = torch.tensor(starts), torch.tensor(lengths)
    segment = torch.repeat_interleave(torch.arange(len(parts)), length)
    place = torch.arange(int(length.sum()))
    ids = torch.cat([part.ids for part in parts]).long()
    target_places = torch.cat([part.supervised for part in parts]).nonzero().squeeze(1)
    target_segment = segment[target_places]
    is_first = target_places == start[target_segment]
    predict_from = torch.where(is_first, torch.tensor(entry)[target_segment], target_places - 1)
    sequence = torch.tensor(segment_sequence)[target_segment]
    _check_pairs(predict_from, sequence, items)
    return Pack(
        ids=ids,
        positions=place - start[segment] + torch.tensor(before)[segment],
        segments=Segments(start=start, length=length, prefix=torch.tensor(prefix)),
        predict_from=predict_from,
        targets=ids[target_places],
        sequence=sequence,
        weights=torch.ones(int(target_places.numel()), dtype=torch.float32),
        sequence_example=torch.tensor(sequence_example),
        items=tuple(index for index, _ in items),
        origins=tuple(encoded.origin for _, encoded in items),
    )


def _check(encoded: Encoded) -> None:
    """Refuses examples whose shapes no pack can express; each case is a fault of the encoder."""
    for part in (encoded, *encoded.branches):
        if part.ids.numel() == 0:
            raise ValueError(f"{encoded.origin}: an example or a branch without tokens")
        if part.ids.shape != part.supervised.shape or part.ids.dim() != 1:
            raise ValueError(
                f"{encoded.origin}: ids {tuple(part.ids.shape)} and supervised "
                f"{tuple(part.supervised.shape)} must be the same line of tokens"
            )
        if part.supervised.dtype != torch.bool:
            raise ValueError(f"{encoded.origin}: supervised must be bool, a flag a token")
    if any(branch.branches for branch in encoded.branches):
        raise ValueError(f"{encoded.origin}: a branch has branches of its own")


def _check_pairs(
    predict_from: Tensor, sequence: Tensor, items: Sequence[tuple[int, Encoded]]
) -> None:
    """Every pair has a position that predicts it and a sequence that it counts for."""
    if bool((predict_from >= 0).all()) and bool((sequence >= 0).all()):
        return
    for _, encoded in items:  # the slow search for a name is paid only where something is wrong
        if encoded.branches and bool(encoded.supervised.any()):
            raise ValueError(f"{encoded.origin}: a prompt with branches has supervised tokens")
        if not encoded.branches and bool(encoded.supervised[0]):
            raise ValueError(
                f"{encoded.origin}: token 0 is supervised, but nothing stands before it"
            )
