"""The guard's look at attention: the largest sampled logit of an update, over all ranks."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from lehr.errors import Problem, RecipeError
from lehr.training.metrics import gather


@runtime_checkable
class WatchesAttention(Protocol):
    """A model that can sample its attention logits, as lehr's LanguageModel does."""

    def watch_attention(self, queries: int) -> None: ...
    def largest_attention_logit(self) -> float | None: ...


class LogitWatch:
    """Samples `queries` queries of a segment while it is entered; 0 = nothing happens.

    Raises RecipeError for a model that cannot be watched.
    """

    def __init__(self, model: Any, queries: int) -> None:
        if queries and not isinstance(model, WatchesAttention):
            expected = "0: this model does not show its attention logits"
            raise RecipeError(Problem("guard.attention_queries", expected, queries))
        self._model, self._queries = model, queries

    def __enter__(self) -> None:
        if self._queries:
            self._model.watch_attention(self._queries)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._queries:
            self._model.watch_attention(0)

    def metrics(self) -> dict[str, float]:
        """`attention_logit` of the passes since it was asked last; the same on every rank."""
        if not self._queries:
            return {}
        found = [one for one in gather(self._model.largest_attention_logit()) if one is not None]
        return {"attention_logit": max(found)} if found else {}
