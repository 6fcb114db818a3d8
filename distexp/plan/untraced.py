"""Trainings that cannot be traced: why, and the number of their parameters."""

from __future__ import annotations

from dataclasses import replace

from distexp.config import Config
from distexp.config.code_place import code_place
from distexp.system.torch_internals.modes import fake_mode_errors

WITHOUT_KERNEL = "UnsupportedOperatorException"
"""Name of torch's exception for an operator that has no kernel for fake tensors. Its text is the operator."""


def describe_failure(error: Exception) -> str:
    """Return why a model cannot be traced, with the line of the model that failed."""
    if type(error).__name__ == WITHOUT_KERNEL:
        reason = (
            f"its operator {error} computes only with values: give it a kernel for fake tensors with "
            "torch.library.register_fake"
        )
    elif isinstance(error, fake_mode_errors()):
        reason = (
            f"it computes shapes or decisions from values ({_first_line(error)}), for example by .item(), by `if` on a "
            "tensor, or by a mask as index"
        )
    else:
        reason = f"{type(error).__name__}: {_first_line(error)}"
    place = code_place(error)
    return f"the model cannot be traced{f' at {place}' if place else ''}: {reason}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def count_parameters(config: Config) -> int | None:
    """Return the number of parameters of a model, which is built without weights; None if that fails."""
    from distexp.plan.traced_context import traced_context
    from distexp.worker.build import build_model, load_data

    # To decode all images takes minutes, and does not change the model.
    config = replace(config, dataset=replace(config.dataset, cache="none", num_workers=0))
    context = traced_context(config)
    try:
        model = build_model(config, load_data(config, context), context).model
    except Exception:  # Why it was not traced is known already.
        return None
    return sum(parameter.numel() for parameter in model.parameters())
