"""Sections of a stage that keep its training stable: clipping that follows the run, the guard."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lehr.recipe.fields import (
    BelowOne,
    Count,
    Number,
    Rows,
    Section,
    Several,
    Text,
    Truth,
    Window,
    as_nothing,
)


class AdaptiveClip(Section):
    """Limits on the gradient that follow the run, after `clip`."""

    kind: Literal["tensor", "z_score"] = Field(
        description="each tensor by its own average, or the whole by its mean and spread"
    )
    limit: Annotated[Number | None, Field(ge=1), BeforeValidator(as_nothing)] = Field(
        default=None, description="of tensor: factor on the average, 1.05; of z_score: spreads, 2.5"
    )
    decay: Annotated[BelowOne | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="of the averages; 0.98 of tensor, 0.97 of z_score"
    )
    warmup: Annotated[Several | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates that are only watched; 100 of tensor, 25 of z_score"
    )


class Restart(Section):
    """The optimizer begins anew within a stage: moments emptied, the rate climbing again."""

    every: Annotated[Count | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="updates between two restarts"
    )
    after_rewind: Truth = Field(default=False, description="where the guard went back")
    moments: Truth = Field(default=True, description="empty the optimizer's moments")
    warmup: Rows = Field(default=0, description="updates in which the rate climbs again")
    initial: Number = Field(
        default=0.0, ge=0, le=1, description="share of the rate that it climbs from"
    )


class Guarding(Section):
    """What is done about an unusual update: one far outside of what its run has shown so far."""

    policy: Literal["rewind", "skip", "stop", "off"] = Field(
        default="rewind", description="skip it and go back where that does not help; skip; stop"
    )
    limit: Number = Field(default=8.0, ge=1, description="spreads above the median that are usual")
    window: Window = Field(
        default=128, description="accepted updates that a new one is compared with"
    )
    rewinds: Rows = Field(default=3, description="how often a stage may go back; then it stops")
    attention_queries: Rows = Field(
        default=0, description="of each segment, whose attention logits are watched; 0: none"
    )
    quarantine: Annotated[Text | None, BeforeValidator(as_nothing)] = Field(
        default=None, description="a record of batches to leave out: quarantine.jsonl of a run"
    )
