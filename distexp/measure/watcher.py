"""Watchers: measurements that accompany a training. ``distexp.training.watchers`` has the list of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, NamedTuple

from torch import nn

from distexp.strategies.optimizer import ReadTensors
from distexp.strategies.parallel.expert import largest_load
from distexp.system.torch_internals.compilation import compile_counters, on_compilation

PROFILE, TRAIN, WARMUP = "profile", "train", "warmup"  # phases; only ``train`` counts for the speed
Method = Callable[..., Any]


class Step(NamedTuple):
    """A training step that has ended."""

    number: int  # from 1, with the steps of earlier attempts
    measured: bool  # whether it counts for the speed
    next_measured: bool  # whether the next step counts too, and follows directly


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps of this attempt that count for the speed, on this rank."""

    durations_s: Sequence[float]  # duration of each step
    data_waits_s: Sequence[float]  # time that this rank waited for the data of each step
    sizes_differ: bool  # whether the batches of some rank have different sizes


class Watcher:
    """Base class of a watcher. The methods are called on every rank in this order, and do nothing by default.

    A method that a class does not define costs nothing, so a watcher of a whole training costs nothing per step. The
    CPU is ahead of the GPU: a method that waits for the GPU slows down every step.
    """

    # Where the summary is in the record: ``metrics`` or ``memory``, whose fields it must have, or ``metrics.watchers``.
    section: ClassVar[str] = "metrics.watchers"
    overhead_s: float = 0.0  # time so far that does not belong to the duration of the training

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Prepare for a distributed model, which has just been built. ``read`` returns its tensors on this rank."""

    def start(self, done: int) -> None:
        """Start to measure: the first step follows, after so many steps of earlier attempts."""

    def start_steps(self, phase: str) -> None:
        """Prepare for steps of a phase that follow anything else, such as an evaluation or a checkpoint."""

    def start_forward(self) -> None:
        """Prepare for the forward pass of a micro-batch."""

    def before_update(self) -> None:
        """Measure between the last backward pass of a step and the update of the weights."""

    def end_step(self, step: Step) -> None:
        """Measure at the end of a step, before the clock reads its duration."""

    def after_step(self, step: Step) -> None:
        """Measure after a step. This time belongs to the next step."""

    def stop(self) -> None:
        """End the measurement. Called after the last step or after an error, perhaps several times."""

    def summary(self, steps: MeasuredSteps) -> Mapping[str, Any]:
        """Return the values for the record, as JSON. All ranks call it, and the values of rank 0 are kept."""
        return {}


class CompileWatch(Watcher):
    """Time and counts of the compilations between ``start`` and ``stop``.

    The first steps contain these times. They are the time from the start to the end of each compilation, also of a
    backward graph, which is compiled in the first backward pass, and of the recording of a CUDA graph.
    """

    section = "metrics"

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.seconds = 0.0
        self.recompilations = 0
        self._started: float | None = None
        self._before: dict[str, int] = {}
        self._remove: Callable[[], None] | None = None

    def start(self, done: int) -> None:
        """Start to watch."""
        if self.enabled:
            self._before = compile_counters()
            self._remove = on_compilation(self._begin, self._end)

    def stop(self) -> None:
        """Stop to watch."""
        if self._remove is not None:
            self._remove()
            self._remove = None

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``metrics.compile``, if anything is compiled."""
        if not self.enabled:
            return {}
        counts = {name: value - self._before.get(name, 0) for name, value in compile_counters().items()}
        return {"compile": {"seconds": self.seconds, "recompilations": self.recompilations, **counts}}

    def _begin(self, is_recompilation: bool) -> None:
        self.recompilations += is_recompilation
        self._started = time.perf_counter()

    def _end(self) -> None:
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
        self._started = None


class ExpertLoadWatch(Watcher):
    """Share of the tokens of the expert that got the most, with ``parallel.expert``."""

    section = "metrics"

    def __init__(self) -> None:
        self.module: nn.Module | None = None

    def follow(self, module: nn.Module, read: ReadTensors) -> None:
        """Keep the model, whose layers count the tokens."""
        self.module = module

    def summary(self, steps: MeasuredSteps) -> dict[str, Any]:
        """Return ``metrics.expert_load``, if workers share experts; a collective."""
        load = None if self.module is None else largest_load(self.module)
        return {} if load is None else {"expert_load": load}


class MethodReplacements:
    """Replaced methods. The classes may be written in C++."""

    def __init__(self) -> None:
        self.active = False  # whether methods are replaced
        self._restoring = ExitStack()

    def replace(self, owner: type[Any], name: str, make: Callable[[Method], Method]) -> None:
        """Replace a method by what ``make`` returns for it."""
        # What the class itself has. The attribute of a class in C++ is another object, which gets no self.
        original, own = getattr(owner, name), vars(owner).get(name)
        setattr(owner, name, wraps(original)(make(original)))
        if own is None:
            self._restoring.callback(delattr, owner, name)  # The owner inherits it.
        else:
            self._restoring.callback(setattr, owner, name, own)
        self.active = True

    def restore(self) -> None:
        """Restore all methods."""
        if self.active:
            self.active = False
            self._restoring.close()
