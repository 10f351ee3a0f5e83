"""What a stage computes again: measured for its own model, settled once, written to plan.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from lehr.device import CPU
from lehr.errors import Problem, RecipeError
from lehr.models.attention_cpu import SHORT
from lehr.models.probe import probe_pack
from lehr.models.recompute import Keeps, Kind
from lehr.models.recompute_costs import BudgetTooSmall, Cost, Costs
from lehr.models.surroundings import random_state, set_random_state

# A measurement takes about five forward passes: of as many tokens as this allows.
MEASURED_OPERATIONS = 1e10
FEWEST_TOKENS, MOST_TOKENS = 16, 1024
KINDS: tuple[Kind, ...] = ("none", "selective", "full")  # the dearest in memory first


@dataclass
class Settled:
    """What recomputation of a stage was settled to.

    choice      none, full, selective or {"budget": share}
    keeps       the same as the model takes it
    costs       of every choice that was measured, by its name; {}: nothing could be measured
    operations  the operation list: what is kept, what lies between, what is not covered
    """

    choice: Any = "none"
    keeps: Kind | Keeps = "none"
    why: str = "as the recipe says"
    costs: Mapping[str, Cost] = field(default_factory=dict)
    operations: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return name_of(self.choice)

    @property
    def cost(self) -> Cost | None:
        return self.costs.get(self.name)

    def activation_bytes(self, tokens: int) -> int | None:
        """Measured, of a micro-batch; None where nothing could be measured."""
        return None if self.cost is None else self.cost.bytes_of(tokens)

    def working_bytes(self, tokens: int) -> int:
        """The part of activation_bytes that one block needs while it is computed again."""
        cost = self.cost
        return 0 if cost is None else int(cost.working_bytes * tokens / cost.tokens)

    def added_operations(self, tokens: int, segment_tokens: int) -> float:
        """Floating-point operations that an update of `tokens` tokens repeats."""
        return 0.0 if self.cost is None else tokens * self.cost.operations_per_token(segment_tokens)

    def as_json(self) -> dict[str, Any]:
        """For plan.json."""
        return {
            "recompute": self.choice,
            "recompute_why": self.why,
            "recompute_keeps": self.keeps if isinstance(self.keeps, str) else grouped(self.keeps),
            "recompute_costs": {name: asdict(cost) for name, cost in self.costs.items()},
            "recompute_operations": dict(self.operations),
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Settled | None:
        """What an earlier plan.json settled; None where it is older than this."""
        if "recompute_costs" not in entry:
            return None
        keeps = entry["recompute_keeps"]
        return cls(
            entry["recompute"],
            keeps if isinstance(keeps, str) else ungrouped(keeps),
            entry["recompute_why"],
            {name: Cost(**cost) for name, cost in entry["recompute_costs"].items()},
            entry["recompute_operations"],
        )

    def report(self, tokens: int, segment_tokens: int, operations: float) -> list[dict[str, Any]]:
        """A line for every measured choice, for a micro-batch of `tokens` tokens.

        operations  of the same tokens without recomputation
        """
        if "none" not in self.costs:
            return []
        plain = self.costs["none"].kept_bytes
        return [
            {
                "choice": name,
                "kept_bytes": int(cost.kept_bytes * tokens / cost.tokens) + cost.fixed_bytes,
                "peak_bytes": cost.bytes_of(tokens),
                "share_kept": round(cost.kept_bytes / plain, 4),
                "added_operations": tokens * cost.operations_per_token(segment_tokens),
                "share_added": round(
                    tokens * cost.operations_per_token(segment_tokens) / operations, 4
                ),
                "measured_tokens": cost.tokens,
            }
            for name, cost in self.costs.items()
        ]


def name_of(choice: Any) -> str:
    """`budget 0.5`, or the word.

    >>> name_of({"budget": 0.5}), name_of("full")
    ('budget 0.5', 'full')
    """
    return f"budget {choice['budget']:g}" if isinstance(choice, Mapping) else str(choice)


def grouped(keeps: Keeps) -> list[dict[str, Any]]:
    """Blocks that keep the same, together.

    >>> grouped([["up"], None, ["up"]])
    [{'blocks': [0, 2], 'keeps': ['up']}, {'blocks': [1], 'keeps': None}]
    """
    groups: dict[tuple[str, ...] | None, list[int]] = {}
    for number, names in enumerate(keeps):
        groups.setdefault(None if names is None else tuple(sorted(names)), []).append(number)
    return [
        {"blocks": blocks, "keeps": None if names is None else list(names)}
        for names, blocks in groups.items()
    ]


def ungrouped(groups: Sequence[Mapping[str, Any]]) -> list[list[str] | None]:
    """The opposite of `grouped`."""
    found = {number: group["keeps"] for group in groups for number in group["blocks"]}
    return [found[number] for number in range(len(found))]


def settle_recompute(
    model: Any,
    stage: Any,
    *,
    trains_all: bool,
    packs: Sequence[Any],
    room: int,
    tokens: int,
    where: str,
) -> Settled:
    """Measure the choices on the model as the stage will train it, and settle the stage's.

    packs   of the stage; as many of their examples as are needed are computed
    room    bytes that the activations of a micro-batch of `tokens` tokens may take (`auto`)
    Raises RecipeError for a model that cannot be computed again, and for a budget below what
    remains with every block computed again.
    """
    adapter = None if trains_all else stage.adapter
    longest = max(int(one.segments.length.max()) for one in packs)
    with as_it_will_train(model, adapter):
        try:
            costs = Costs(model, _some(model, packs), longest)
        except ValueError as error:
            if stage.recompute not in ("none", "auto"):
                raise RecipeError(Problem(where, str(error), stage.recompute, says=True)) from error
            return Settled(why=str(error))
        try:
            return _settle(costs, stage, room, tokens, where)
        finally:
            costs.stop()


def _settle(costs: Costs, stage: Any, room: int, tokens: int, where: str) -> Settled:
    measured: dict[str, Cost] = {kind: costs.of(kind) for kind in KINDS}
    listed: dict[str, Sequence[str]] = dict(costs.recomputation.operations())
    listed["uncovered"] = costs.recomputation.uncovered()
    recompute = stage.recompute
    if isinstance(recompute, str) and recompute != "auto":
        keeps = "none" if recompute == "none" else costs.recomputation.keeps_of(recompute)
        return Settled(recompute, keeps, costs=measured, operations=listed)
    if recompute != "auto":
        share = float(recompute.budget)
        try:
            within, cost = costs.keeps_within(share)
        except BudgetTooSmall as error:
            expected = (
                f"at least {error.smallest:.2f}: that share remains with every block of this model "
                "computed again"
            )
            raise RecipeError(Problem(f"{where}.budget", expected, share)) from error
        chosen = {"budget": share}
        return Settled(chosen, within, costs=measured | {name_of(chosen): cost}, operations=listed)
    return _cheapest(costs, measured, listed, room, tokens)


def _cheapest(
    costs: Costs,
    measured: Mapping[str, Cost],
    listed: Mapping[str, Sequence[str]],
    room: int,
    tokens: int,
) -> Settled:
    """The first that fits: none, selective, the largest budget, full."""
    allowed = f"{room / 2**30:.2f} GiB are left for the activations of a micro-batch"
    for kind in KINDS[:-1]:
        if measured[kind].bytes_of(tokens) <= room:
            keeps = "none" if kind == "none" else costs.recomputation.keeps_of(kind)
            return Settled(kind, keeps, f"the cheapest that fits: {allowed}", measured, listed)
    none, full = measured["none"], measured["full"]
    working = full.bytes_of(tokens) - int(full.kept_bytes * tokens / full.tokens)
    share = int(100 * (room - working) / (none.kept_bytes * tokens / none.tokens)) / 100
    if share * none.kept_bytes > full.kept_bytes:
        within, cost = costs.keeps_within(share)
        if cost.bytes_of(tokens) <= room:
            chosen = {"budget": share}
            known = {**measured, name_of(chosen): cost}
            return Settled(chosen, within, f"the cheapest that fits: {allowed}", known, listed)
    return Settled(
        "full", costs.recomputation.keeps_of("full"), f"the smallest: {allowed}", measured, listed
    )


@contextmanager
def as_it_will_train(model: Any, adapter: Any) -> Iterator[None]:
    """The loaded base with what a stage trains (adapter None: all weights), for a while.

    Afterwards every weight is what it was, to the bit.
    """
    notices, modes = list(model.notices), [(m, m.training) for m in model.modules()]
    kept = [(p, p.data, p.requires_grad) for p in model.network.parameters()]
    all_before, own = model.trains_all, model.adapter is not None
    devices = list(dict.fromkeys([CPU, model.device]))
    random = random_state([one for one in devices if one.type != "meta"])
    try:
        if adapter is None:
            for parameter, data, _ in kept:
                parameter.data = data.float()
                parameter.requires_grad_(True)
            model.trains_all = True
        elif not own:
            model.add_adapter(
                rank=adapter.rank,
                alpha=adapter.alpha,
                targets=adapter.targets,
                dropout=adapter.dropout,
                rows=(),
            )
        model.train()
        yield
    finally:
        if adapter is None:
            model.trains_all = all_before
        elif not own:
            model.drop_adapter()
        for parameter, data, needs_grad in kept:
            parameter.data = data
            parameter.requires_grad_(needs_grad)
        for module, training in modes:
            module.training = training
        model.notices[:] = notices
        set_random_state([one for one in devices if one.type != "meta"], random)


def _some(model: Any, packs: Sequence[Any]) -> Any:
    """Some of the packs' examples, as long as they are, of all lengths alike.

    What attention keeps of a token depends on its segment, up to one beyond SHORT: there
    longer ones are cut. Branches go with their prompt. A model that does not pack gets one.
    """
    weights = sum(parameter.numel() for parameter in model.network.parameters())
    count = min(max(int(MEASURED_OPERATIONS / (2 * weights)), FEWEST_TOKENS), MOST_TOKENS)
    trees = sorted((tree for one in packs for tree in _trees(one)), key=_tokens)
    count = max(count, min(_tokens(trees[-1]), SHORT + 1))
    chosen = evenly([_tokens(tree) for tree in trees], count)
    if not getattr(model, "packs_exactly", True):
        chosen = [len(trees) - 1]
    parts: list[tuple[Tensor, int]] = []
    for place in chosen:
        first = len(parts)
        parts += [(ids, -1 if prefix < 0 else first + prefix) for ids, prefix in trees[place]]
    return probe_pack(parts)


Tree = list[tuple[Tensor, int]]  # (ids, place of the part that it continues, or -1)


def evenly(lengths: Sequence[int], count: int) -> list[int]:
    """Places spread over ascending `lengths`, so many that they hold about `count` tokens.

    >>> evenly([1, 2, 3, 4, 5], 6), evenly([4, 9], 1)
    ([1, 3], [1])
    """
    several = max(1, min(len(lengths), round(count * len(lengths) / sum(lengths))))
    return [(2 * number + 1) * len(lengths) // (2 * several) for number in range(several)]


def _tokens(tree: Tree) -> int:
    return sum(len(ids) for ids, _ in tree)


def _trees(one: Any) -> list[Tree]:
    """A pack's segments, branches with the prompt that they continue."""
    starts, lengths = one.segments.start.tolist(), one.segments.length.tolist()
    trees: list[Tree] = []
    places: dict[int, tuple[int, int]] = {}  # segment -> (its tree, its place in it)
    for index, prefix in enumerate(one.segments.prefix.tolist()):
        ids = one.ids[starts[index] : starts[index] + min(lengths[index], SHORT + 1)]
        if prefix < 0:
            trees.append([])
        tree, before = (len(trees) - 1, -1) if prefix < 0 else places[prefix]
        places[index] = tree, len(trees[tree])
        trees[tree].append((ids, before))
    return trees
