"""Memory of one rank by part: its tensors in the first step, and on a GPU the peaks of a later step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from distexp.distributed.process_group import gather_to_all, sum_over_ranks
from distexp.measure.memory.model_tensors import ReadTensors
from distexp.measure.memory.saved_tensors import SavedTensorCounter, storage_sizes
from distexp.measure.memory.step_recording import StepRecording
from distexp.measure.watcher import PROFILE, MeasuredSteps, Step, Watcher
from distexp.system.units import MIB


class PartsWatch(Watcher):
    """Sizes of the parts, read from the tensors in the first step, which is not timed.

    Parameters and gradients are those between the backward pass and the update.

    Args:
        rank: This rank.
        counts_activations: Whether to count what the first step saves for the backward pass.
        make_recording: Makes the recording of the step before the profiled ones; None: the device has none.
    """

    section = "memory"

    def __init__(
        self, rank: int, *, counts_activations: bool, make_recording: Callable[[], StepRecording] | None = None
    ) -> None:
        self.rank, self.counts_activations, self.make_recording = rank, counts_activations, make_recording
        self.read: ReadTensors | None = None
        self.parameters: int | None = None  # bytes
        self.gradients: int | None = None
        self.optimizer_states: int | None = None
        self.recording: StepRecording | None = None
        self.peaks: list[dict[str, Any]] = []  # of the recorded step
        self._module: nn.Module | None = None
        self._counter: SavedTensorCounter | None = None
        self._counting = ExitStack()

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Keep the model."""
        self._module, self.read = module, read

    def start_steps(self, phase: str) -> None:
        """Record the first step of the phase ``profile``, which is not timed."""
        if phase == PROFILE and self.make_recording is not None and self.read is not None:
            self.recording, self.make_recording = self.make_recording(), None
            self.recording.start(self.read)

    def start_forward(self) -> None:
        """Mark the start of a micro-batch. In the first step, start to count activations."""
        if self.recording is not None:
            self.recording.start_forward()
        if self._counter is None and self.counts_activations and self._module is not None:
            self._counter = SavedTensorCounter()
            self._counting.enter_context(self._counter.count(self._module))

    def before_update(self) -> None:
        """Measure parameters and gradients, once."""
        if self.recording is not None:
            self.recording.start_update()
        if self.read is None or self.parameters is not None:
            return
        self._counting.close()
        tensors = self.read()
        parameters = storage_sizes(iter(tensors.parameters))
        self.parameters = sum(parameters.values())
        self.gradients = _size_outside(parameters, tensors.gradients)

    def after_step(self, step: Step) -> None:
        """Measure the optimizer states after the first update, and read the recording if there is one.

        With fp16 the loss scaling may skip the first updates, so the next ones are measured until one is timed.
        """
        if self.read is not None and not (self.optimizer_states or (step.measured and self.optimizer_states == 0)):
            tensors = self.read()
            self.optimizer_states = _size_outside(storage_sizes(iter(tensors.parameters)), tensors.optimizer_states)
        if self.recording is not None:
            recording, self.recording = self.recording, None
            self.peaks = recording.finish()
            # Ranks that read their recording longer would make the others wait in the first profiled step.
            sum_over_ranks(torch.zeros(1, device=recording.device)).item()

    def stop(self) -> None:
        """End what has not ended, because the training stopped in that step."""
        self._counting.close()
        if self.recording is not None:
            self.recording.cancel()
            self.recording = None

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``memory.parts`` of all ranks. A collective."""
        return {"parts": [entry for entries in gather_to_all(self.entries()) for entry in entries]}

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries of this rank in MiB: the tensors, then the peaks of the recorded step."""
        if self.parameters is None:
            return []
        tensors = {
            "rank": self.rank,
            "phase": "train",
            "parameters_mib": _mib(self.parameters),
            "gradients_mib": _mib(self.gradients),
            "optimizer_states_mib": _mib(self.optimizer_states),
            "activations_mib": _mib(None if self._counter is None else self._counter.peak_bytes),
        }
        return [tensors, *({"rank": self.rank, **peak} for peak in self.peaks)]


def _size_outside(parameters: Mapping[int, int], tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors that share no storage with parameters."""
    return sum(size for key, size in storage_sizes(iter(tensors)).items() if key not in parameters)


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
