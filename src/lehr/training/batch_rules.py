"""The learning rate of another batch size: two rules, and why one is taken.

linear  rate x B / B0: k updates of one batch are about one update of k times the batch as
        long as the weights hardly move between (Goyal et al. 2017, arXiv 1706.02677; sgd)
sqrt    rate x (B / B0)^(1/2): an optimizer that divides by the gradient's own size sees
        noise fall by this factor (Malladi et al. 2022, arXiv 2205.10287; adam kinds, muon)

Both hold below the noise scale only: above it a larger batch wants no larger rate.
"""

from __future__ import annotations

RULES = ("linear", "sqrt")


def scaled_rate(
    rate: float, found_at: int, batch_size: int, optimizer: str, rule: str = "auto"
) -> tuple[float, str]:
    """(the rate for `batch_size`, one line that says why).

    >>> scaled_rate(0.1, 32, 128, "sgd")[0], scaled_rate(0.001, 32, 128, "adamw")[0]
    (0.4, 0.002)
    >>> scaled_rate(0.001, 32, 8, "adamw")[1]
    'learning rate 0.001 found at batch size 32 becomes 0.0005 at 8: sqrt, as adamw divides by \
the size of the gradient, whose noise falls with the root of the batch'
    """
    chosen = rule if rule != "auto" else "linear" if optimizer == "sgd" else "sqrt"
    if chosen not in RULES:
        raise ValueError(f"auto, linear or sqrt, not {rule!r}")
    ratio = batch_size / found_at
    result = rate * (ratio if chosen == "linear" else ratio**0.5)
    if rule != "auto":
        why = "as the recipe says"
    elif chosen == "linear":
        why = f"as {optimizer} adds up gradients: one large step replaces several small ones"
    else:
        why = (
            f"as {optimizer} divides by the size of the gradient, whose noise falls with the "
            "root of the batch"
        )
    said = f"learning rate {rate:g} found at batch size {found_at} becomes {result:g}"
    return result, f"{said} at {batch_size}: {chosen}, {why}"
