"""The noisy quadratic model (arXiv:1907.04164): what decay and averaging buy, in seconds.

500 independent parameters with curvatures 1/i, SGD with the noise of a batch of 4, every
method at its best of 13 rates, mean of 2 runs. It is where the numbers of the pages
`schedules` and `averaging` come from; print them with `pytest -s`.
"""

import functools

import torch

from lehr.streams import generator_for
from lehr.training.averaging import Average, AverageSettings
from lehr.training.schedules import Schedule

UPDATES, SIZE, RUNS = 3000, 500, 2
RATES = torch.logspace(-1.6, 0.2, 13, dtype=torch.float64)


@functools.cache
def best(kind, decay=0.2, shape="linear", final=0.0, ema=None):
    """Loss at the end at the best rate, mean over runs, of the average where one is kept."""
    schedule = Schedule(kind, warmup=0, decay=decay, shape=shape, final=final)
    curvature = 1.0 / torch.arange(1, SIZE + 1, dtype=torch.float64)
    noise = (curvature / 4).sqrt()
    weights = torch.ones(len(RATES), RUNS, SIZE, dtype=torch.float64)
    average = Average(AverageSettings(ema or 0.9), {"w": weights}, {})
    average.begin()
    stream = generator_for("noisy quadratic")
    for index in range(UPDATES):
        drawn = torch.randn(RUNS, SIZE, generator=stream, dtype=torch.float64)
        rates = schedule.rate(index, 1.0, UPDATES) * RATES[:, None, None]
        weights.sub_(rates * (curvature * weights + noise * drawn))
        if ema:
            average.follow(index + 1)
    final_weights = average.tensors()["parameter.w"] if ema else weights
    losses = 0.5 * (curvature * final_weights.square()).sum(-1).mean(1)
    return float(losses.min())


def test_decay_and_averaging_are_worth_the_same():
    values = {
        "constant": best("constant"),
        "cosine to 0": best("cosine"),
        "linear to 0": best("linear"),
        "wsd, linear, last 20 %": best("wsd"),
        "wsd, 1 - sqrt, last 20 %": best("wsd", shape="sqrt"),
        "wsd, linear, last 40 %": best("wsd", decay=0.4),
        "constant, average 0.99": best("constant", ema=0.99),
        "constant, average 0.999": best("constant", ema=0.999),
    }
    print()
    for name, value in values.items():
        print(f"{name:28}{value:.4f}")
    constant, cosine = values["constant"], values["cosine to 0"]
    assert cosine < 0.5 * constant and values["linear to 0"] < 0.5 * constant
    assert values["wsd, 1 - sqrt, last 20 %"] < values["wsd, linear, last 20 %"] < constant
    assert values["wsd, linear, last 40 %"] < values["wsd, linear, last 20 %"]
    assert values["constant, average 0.999"] < 1.15 * cosine
    assert values["constant, average 0.999"] < values["constant, average 0.99"] < constant
