"""Memory of one rank by part: its tensors in the first step, and on a GPU the peaks of a later step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from distexp.measure.memory.model_tensors import ModelTensors
from distexp.measure.memory.saved_tensors import SavedTensorCounter, storage_sizes
from distexp.measure.memory.step_recording import StepRecording
from distexp.system.units import MIB


class PartsWatch:
    """Sizes of the parts, read from the tensors in the first step, which is not timed.

    Parameters and gradients are those between the backward pass and the update.

    Attributes:
        read: Returns the tensors of the model. The trainer sets it.
    """

    def __init__(self, rank: int, *, counts_activations: bool) -> None:
        self.rank, self.counts_activations = rank, counts_activations
        self.read: Callable[[], ModelTensors] | None = None
        self.parameters: int | None = None  # bytes
        self.gradients: int | None = None
        self.optimizer_states: int | None = None
        self.activations: int | None = None
        self.recording: StepRecording | None = None
        self.peaks: list[dict[str, Any]] = []  # of the recorded step

    def read_tensors(self) -> ModelTensors | None:
        """Return the tensors of the model; None if it is not built yet."""
        return self.read() if self.read is not None else None

    def record_step(self, recording: StepRecording) -> None:
        """Record the next step."""
        if self.read is not None:
            self.recording = recording
            recording.start(self.read)

    def start_forward(self) -> None:
        """Mark the start of a micro-batch."""
        if self.recording is not None:
            self.recording.start_forward()

    def count_activations(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return the context for the micro-batches of a step."""
        is_due = self.read is not None and self.parameters is None
        return self._count(module) if is_due and self.counts_activations else nullcontext()

    @contextmanager
    def _count(self, module: nn.Module) -> Iterator[None]:
        counter = SavedTensorCounter()
        with counter.count(module):
            yield
        self.activations = max(self.activations or 0, counter.peak_bytes)

    def before_update(self) -> None:
        """Measure parameters and gradients, once."""
        if self.recording is not None:
            self.recording.start_update()
        if self.read is None or self.parameters is not None:
            return
        tensors = self.read()
        parameters = storage_sizes(iter(tensors.parameters))
        gradients = storage_sizes(iter(tensors.gradients))
        self.parameters = sum(parameters.values())
        self.gradients = sum(size for key, size in gradients.items() if key not in parameters)

    def after_update(self, *, timed: bool) -> bool:
        """Measure the optimizer states after the first update.

        With fp16 the loss scaling may skip the first updates, so the next ones are measured until one is timed.

        Returns:
            Whether this step was recorded. To read the recording took time.
        """
        self._measure_states(timed=timed)
        if self.recording is None:
            return False
        self.peaks = self.recording.finish()
        self.recording = None
        return True

    def _measure_states(self, *, timed: bool) -> None:
        if self.read is None or self.optimizer_states or (timed and self.optimizer_states is not None):
            return
        tensors = self.read()
        parameters = storage_sizes(iter(tensors.parameters))
        states = storage_sizes(iter(tensors.optimizer_states))
        self.optimizer_states = sum(size for key, size in states.items() if key not in parameters)

    def cancel(self) -> None:
        """End the recording of a step that was not finished."""
        if self.recording is not None:
            self.recording.cancel()
            self.recording = None

    def summary(self) -> list[dict[str, Any]]:
        """Return the entries of ``memory.parts`` in MiB: the tensors, then the peaks of the recorded step."""
        if self.parameters is None:
            return []
        tensors = {
            "rank": self.rank,
            "phase": "train",
            "parameters_mib": _mib(self.parameters),
            "gradients_mib": _mib(self.gradients),
            "optimizer_states_mib": _mib(self.optimizer_states),
            "activations_mib": _mib(self.activations),
        }
        return [tensors, *({"rank": self.rank, **peak} for peak in self.peaks)]


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB
