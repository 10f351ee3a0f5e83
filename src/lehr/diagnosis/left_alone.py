"""Trying something on a model in use: it is left bit for bit as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lehr.training import gradients
from lehr.training.state import copied, put_back, running_buffers, trained_parameters


@contextmanager
def left_alone(model: nn.Module, precision: str = "fp32") -> Iterator[None]:
    """Train mode inside; weights, statistics, modes and random state as before outside."""
    trained, buffers = trained_parameters(model, precision), running_buffers(model)
    kept, kept_buffers = copied(trained), copied(buffers)
    modes = [(module, module.training) for module in model.modules()]
    random_state = torch.get_rng_state()
    model.train()
    try:
        yield
    finally:
        gradients.clear(trained)
        put_back(trained, kept, "weights")
        put_back(buffers, kept_buffers, "buffers")
        torch.set_rng_state(random_state)
        for module, training in modes:
            module.training = training
