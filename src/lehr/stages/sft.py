"""Supervised fine-tuning: imitate the answers, and only the answers.

Minimise −Σ_t log p(y_t | prompt, y_<t) over supervised tokens, divided by their
number in the whole update (not by micro-batch, not by row). Which tokens are
supervised was decided when the row was encoded; nothing is masked here.
"""

from __future__ import annotations

from lehr.objectives.language import Language
from lehr.stages.context import StageContext, train
from lehr.training.progress import TrainingResult


def sft(context: StageContext) -> TrainingResult:
    """Train on the supervised tokens of conversations (and of replayed text)."""
    return train(context, Language(z_loss=context.stage.z_loss))
