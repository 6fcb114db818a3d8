"""FLOPs of one pass of a model, counted on the meta device.

See also ``distexp.measure.flops``, which derives the FLOPs of a training from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from distexp.models.objective import get_logits


def count_forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward pass.

    A multiply-add counts as two.

    Args:
        model: a copy on the meta device, which takes no memory and no time. Do not use it afterwards,
            because its attention implementation is changed.
        inputs: its keyword arguments, on any device; only the shapes matter.
    """
    with torch.no_grad():
        return _count_flops(lambda: _run_on_meta(model, inputs))


def count_training_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Count the floating point operations of one forward and one backward pass, with what they recompute.

    Args:
        model: as for ``count_forward_flops``.
        inputs: as for ``count_forward_flops``.
    """

    def run() -> None:
        get_logits(_run_on_meta(model, inputs)).sum().backward()  # type: ignore[no-untyped-call]

    return _count_flops(run)


def _count_flops(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def _run_on_meta(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    set_attention = getattr(model, "set_attn_implementation", None)
    if set_attention is not None:
        # The other implementations read the values of the mask, which a meta tensor lacks. The FLOPs are the same.
        set_attention("eager")
    return model(**{name: tensor.to("meta") for name, tensor in inputs.items()})
