"""Tests of the prediction of a step's memory, on models whose bytes can be computed by hand."""

from __future__ import annotations

from distexp.plan.step_trace import PARTS, PHASES, StepTrace
from distexp.plan.tracing import CUBLAS_WORKSPACES, trace_step
from tests.helpers.runs import resolve_cell


def sizes(trace: StepTrace, *, phase: str, device: str = "gpu") -> dict[str, int]:
    """Return the bytes of each part that are in memory after a phase, without the workspaces of cuBLAS."""
    total: dict[str, int] = {}
    for event in trace.events:
        if PHASES.index(event.phase) <= PHASES.index(phase) and event.device == device and event.block != -1:
            total[event.part] = total.get(event.part, 0) + event.bytes
    return {part: size for part, size in total.items() if size}


def tiny(*overrides: str) -> StepTrace:
    return trace_step(
        resolve_cell(
            *("model=gpt_tiny", "model.vocab_size=64", "dataset=synthetic", "dataset.max_length=16"),
            *("train.micro_batch_size=2", "train.gradient_accumulation_steps=1", *overrides),
        )
    )


def test_states_of_a_single_worker_have_the_sizes_of_the_arithmetic() -> None:
    trace = tiny("strategy=single")
    parameters = sizes(trace, phase="setup")["parameters"]
    after = sizes(trace, phase="backward")
    steps = 4 * (after["optimizer_states"] - 2 * parameters) // 16
    assert after["gradients"] == parameters
    assert 0 < steps <= parameters // 4  # a step counter of 4 bytes for each tensor
    assert sizes(trace, phase="setup")["batch"] == 3 * 2 * 16 * 8  # ids, mask and labels
    assert all(event.part in PARTS and event.phase in PHASES for event in trace.events)
    assert trace.events[0].bytes == CUBLAS_WORKSPACES


def test_every_free_matches_its_allocation() -> None:
    alive: dict[int, int] = {}
    for event in tiny("strategy=single", "train.gradient_accumulation_steps=2").events:
        if event.bytes > 0:
            assert event.block not in alive
            alive[event.block] = event.bytes
        else:
            assert alive.pop(event.block) == -event.bytes
