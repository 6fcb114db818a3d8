"""Watchers of the tests: one that lists its calls, and one that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from distexp.distributed.process_group import gather_to_all
from distexp.measure.watcher import MeasuredSteps, Step, Watcher
from distexp.strategies.optimizer import ReadTensors


class Calls(Watcher):
    """The calls of a watcher, without equal ones in a row."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.elements = 0

    def _add(self, call: str) -> None:
        if self.calls[-1:] != [call]:
            self.calls.append(call)

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Count the elements of the parameters."""
        self._add("follow")
        self.elements = sum(tensor.numel() for tensor in read().parameters)

    def start(self, done: int) -> None:
        """Add the call."""
        self._add(f"start {done}")

    def start_steps(self, phase: str) -> None:
        """Add the call."""
        self._add(f"start_steps {phase}")

    def start_forward(self) -> None:
        """Add the call."""
        self._add("start_forward")

    def before_update(self) -> None:
        """Add the call."""
        self._add("before_update")

    def end_step(self, step: Step) -> None:
        """Add the call, with what is known about the step."""
        self._add(f"end_step {step.number} {step.measured} {step.next_measured}")

    def after_step(self, step: Step) -> None:
        """Add the call."""
        self._add(f"after_step {step.number}")

    def stop(self) -> None:
        """Add the call."""
        self._add("stop")

    def summary(self, steps: MeasuredSteps) -> Mapping[str, Any]:
        """Return the calls of all ranks."""
        return {"calls": gather_to_all(self.calls), "elements": self.elements, "steps": len(steps.durations_s)}


class Fails(Watcher):
    """A watcher whose summary is no JSON."""

    def summary(self, steps: MeasuredSteps) -> Mapping[str, Any]:
        """Return an object."""
        return {"object": object()}


def not_a_watcher() -> object:
    """Return an object that is no watcher."""
    return object()
