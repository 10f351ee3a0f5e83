"""Pretraining: from scratch, or continued when the stage has a parent.

Minimise the mean over all tokens of −log p(x_t | x_<t). Continued pretraining keeps
old abilities by replay: a share of the tokens of every update comes from general
text (Ibrahim et al. 2024, arXiv 2403.08763), a mixture that the recipe states.
"""

from __future__ import annotations

from lehr.objectives.language import Language
from lehr.stages.context import StageContext, train
from lehr.training.progress import TrainingResult


def pretrain(context: StageContext) -> TrainingResult:
    """Train on whole documents: every token but the first is a target."""
    return train(context, Language(z_loss=context.stage.z_loss))
