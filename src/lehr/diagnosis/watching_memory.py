"""What the measurements of a run keep beside it: copies of the trained tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Watching:
    """Copies of all trained tensors, or of their gradients, that live at once.

    gradients  between two micro-batches of an update: the noise scale (`noise_scale_every`)
    weights    around the optimizer's step: the gradient flow (`gradient_flow_every`) and the
               effective step (`optimizer.watch_every`), one each
    """

    gradients: int = 0
    weights: int = 0

    def bytes_over(self, trained_bytes: int, let_go: int) -> int:
        """Bytes beyond the peak of an update that measures nothing.

        trained_bytes  of one copy
        let_go         activations and logits: gone when the weights are copied

        >>> Watching(gradients=1, weights=1).bytes_over(100, let_go=70)
        130
        """
        return self.gradients * trained_bytes + max(0, self.weights * trained_bytes - let_go)


NOTHING = Watching()


def watching_of(
    noise_scale_every: int | None, gradient_flow_every: int | None, watch_every: int | None
) -> Watching:
    """From the settings of a stage; None = never."""
    weights = (gradient_flow_every is not None) + (watch_every is not None)
    return Watching(int(noise_scale_every is not None), weights)
