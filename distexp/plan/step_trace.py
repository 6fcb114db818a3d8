"""The allocations and frees of one optimizer step of one worker, as predicted without running it."""

from __future__ import annotations

from dataclasses import dataclass

PARTS = (
    "parameters",
    "gradients",
    "optimizer_states",
    "activations",
    "logits",
    "communication",
    "temporaries",
    "batch",
)
"""What a block of memory is for.

- activations: tensors that are kept from the forward pass for the backward pass, also 16-bit copies of weights;
- logits: tensors with the vocabulary as last axis, in both passes;
- communication: parameters that FSDP gathered, and the buffers of collectives;
- temporaries: everything else, for example the gradients of activations, and the workspaces of cuBLAS.
"""

PHASES = ("setup", "forward", "backward", "optimizer", "evaluation")
"""Parts of a step, and the evaluation. ``setup`` is what is in memory before the step."""


EMPTY_CACHE = -3
"""Block of an event of no bytes: the allocator returns its free segments, as ``torch.cuda.empty_cache`` does."""


class PlanError(Exception):
    """A configuration whose memory cannot be predicted; the message has the reason and a hint."""


@dataclass(frozen=True)
class Event:
    """One allocation, or its free.

    Attributes:
        bytes: requested size; negative for a free. Allocators round it up.
        block: number of the allocation; its free has the same. Or EMPTY_CACHE.
        part: one of PARTS.
        phase: one of PHASES, in which the event happens.
        device: ``gpu`` or ``host``.
        stream: name of the CUDA stream of the allocation; empty for that of the computation. The allocator of torch
            reuses memory only in the stream that allocated it.
    """

    bytes: int
    block: int
    part: str
    phase: str
    device: str
    stream: str = ""


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step of one worker computes.

    Attributes:
        flops: floating point operations of matrix products, convolutions and attention.
        operations: kernels that are launched.
        optimizer_operations: those of them that do not depend on the number of micro-batches.
        written: bytes of all tensors that are allocated.
    """

    flops: float
    operations: int
    optimizer_operations: int
    written: float


@dataclass(frozen=True)
class StepTrace:
    """The events of one optimizer step of one worker, in order.

    Attributes:
        events: what is in memory before the step, as phase ``setup``, then the step.
        seconds: time of the prediction.
        notes: what was assumed.
        history: all before the step: the construction of the model as phase ``setup``, and the first step.
        evaluation: a batch of the evaluation after the step.
        work: what the step computes; None if it was not counted.
        parameters: number of parameters of the whole model; a shared weight counts once.
    """

    events: tuple[Event, ...]
    seconds: float
    notes: tuple[str, ...]
    history: tuple[Event, ...] = ()
    evaluation: tuple[Event, ...] = ()
    work: StepWork | None = None
    parameters: int = 0
