"""What ``torchao`` computes with 8 bits: states of AdamW, and products. Only runs that use them import this module."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.optim import AdamW8bit, subclass_8bit

from distexp.config import ConfigError
from distexp.system.torch_internals.tensors import without_fake_mode


class EightBitAdamW(AdamW8bit):  # type: ignore[misc]
    """AdamW of torchao, which quantizes its states in blocks of 256 values of each weight, or of each shard of it.

    The states of smaller tensors, and of those that no number of blocks fills, are in fp32. ``distexp.plan`` sets
    ``is_traced``: then only the states are allocated, because the compiled update allocates nothing else that is large.
    """

    is_traced = False

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        with without_fake_mode():  # These tables are made once in a process, from values.
            subclass_8bit.get_qmap_signed()
            subclass_8bit.get_qmap_unsigned()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the weights that have a gradient: by compiled kernels on a GPU, and uncompiled on a CPU.

        A CPU compiles for half a minute for each shape of a weight.
        """
        on_cpu = False
        for group in self.param_groups:
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32)  # A number would be compiled as a constant.
            on_cpu = on_cpu or any(weight.device.type == "cpu" for weight in group["params"])
        if self.is_traced:
            self._allocate_states()
            return
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            super().step(closure)

    def _allocate_states(self) -> None:
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            if weight.grad is not None and not self.state[weight]:
                self.state[weight] = self.new_state(weight)

    def new_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state of a weight before its first update."""
        moments = {"exp_avg": True, "exp_avg_sq": False}  # whether they have a sign
        made = {name: self._new_buffer(weight, signed) for name, signed in moments.items()}
        return {"step": torch.zeros((), dtype=torch.float32), **made}


EMULATE = False
"""Whether products in float8 are computed in another type, with the same rounding. Tests on CPUs set it."""

LEAST_CAPABILITY = (8, 9)


def use_float8(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> None:
    """Let the linear layers of the blocks multiply in float8, with one scale for each tensor.

    The weights, their gradients and the head stay as they are. A GPU multiplies matrices whose sizes are multiples of
    16; torchao pads the number of tokens. Raise ConfigError if the GPU has no float8, or no layer fits.
    """
    if not EMULATE and (found := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        raise ConfigError(
            f"precision=float8 needs a GPU of compute capability 8.9 or more, as L40S, H100 or H200, but "
            f"{torch.cuda.get_device_name()} has {found[0]}.{found[1]}: use precision=bf16"
        )
    count = 0

    def fits(module: nn.Module, _: str) -> bool:
        nonlocal count
        is_linear = type(module) is nn.Linear and module.in_features % 16 == 0 and module.out_features % 16 == 0
        count += is_linear
        return is_linear

    for _, block in blocks:
        convert_to_float8_training(
            block, module_filter_fn=fits, config=Float8LinearConfig(pad_inner_dim=True, emulate=EMULATE)
        )
    if not count:
        raise ConfigError(
            f"precision=float8 is for linear layers of repeated blocks whose sizes are multiples of 16, but "
            f"{type(model).__name__} has none: use precision=bf16"
        )
