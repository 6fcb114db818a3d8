"""One micro-batch size, measured on the model and on real samples, and which size the search tries next."""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from distexp.config import Config, model_checks
from distexp.data.base import Batch, Samples, TaskData, to_device
from distexp.data.loader import PaddedDataset, StepData
from distexp.data.text import sample_lengths
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, sum_over_ranks, usable_bytes
from distexp.measure.clock import synchronize
from distexp.models.blueprint import Blueprint
from distexp.runs.step_files import FITS, TOO_LARGE, TriedSize
from distexp.statistics.noise import MemoryLine
from distexp.strategies.base import DistributedModel, load_strategy
from distexp.strategies.optimizer import read_model_tensors
from distexp.system import cgroups, seeding
from distexp.system.units import MIB

WARMUP_STEPS, TIMED_STEPS = 2, 3
MAX_WARMUP_STEPS = 20  # Steps until the optimizer has its states. The loss scaling of fp16 may skip the first updates.


def micro_batches_per_step(config: Config, size: int) -> int:
    """Return the micro-batches of a measured step: two show the time of both kinds, if there are two."""
    return min(2, model_checks.samples_per_worker(config) // size)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on this rank."""

    other: float  # a micro-batch before the last one
    last: float  # the last micro-batch and the update

    def of_whole_step(self, micro_batches: int) -> float:
        """Return the seconds of a step with a number of micro-batches."""
        return (micro_batches - 1) * self.other + self.last


class SizeTrials:
    """A model that tries several micro-batch sizes."""

    def __init__(self, config: Config, blueprint: Blueprint, data: TaskData, context: Context) -> None:
        self.config, self.data, self.context = config, data, context
        self.model: DistributedModel = load_strategy(config).setup(blueprint, config, context)
        seeding.seed_everything(config.train.seed + context.data_rank)  # as before a training
        self.longest = longest_first(data.train)
        optimizer = getattr(self.model, "optimizer", getattr(self.model.module, "optimizer", None))
        self.tensors = partial(read_model_tensors, self.model.module, optimizer)

    def measure(self, size: int) -> TriedSize:
        """Run some steps of a size; return the result over all ranks. A collective."""
        config, device = self.config, self.context.device
        micro_batches = model_checks.samples_per_worker(config) // size
        step = self._load_step(size, micro_batches_per_step(config, size))
        self.model.module.train()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # frees what earlier sizes have left
            torch.cuda.reset_peak_memory_stats(device)
        others = other_inputs(step, micro_batches)  # a training has them all in memory
        for number in range(MAX_WARMUP_STEPS):
            self._run_step(step)
            if number + 1 >= WARMUP_STEPS and (config.precision.name != "fp16" or self.tensors().optimizer_states):
                break
        times, base = [], 0.0
        for _ in range(TIMED_STEPS):
            duration, allocated = self._run_step(step)
            times.append(duration.of_whole_step(micro_batches))
            base = max(base, allocated)
        del others
        return combine(size, config, gather_to_all((min(times), peak_mib(device), base, self._usable_mib())))

    def first_step(self) -> float:
        """Run one step of the configuration; return its seconds."""
        train, started = self.config.train, time.perf_counter()
        step = self._load_step(train.micro_batch, train.gradient_accumulation_steps)
        self.model.module.train()
        self._run_step(step)
        return time.perf_counter() - started

    def _load_step(self, size: int, micro_batches: int) -> StepData:
        """Return a step of the longest samples."""
        place, samples = self.context, PaddedDataset(self.data.train)
        batches: list[Batch] = []
        for number in range(micro_batches):
            first = (number * place.data_parallel + place.data_rank) * size
            chosen = (self.longest[index % len(self.longest)] for index in range(first, first + size))
            batches.append(self.data.collate([samples[index] for index in chosen]))
        targets = torch.tensor(sum(batch.num_targets for batch in batches), device=place.device)
        targets = sum_over_ranks(targets) // place.copies
        on_device = [to_device(self.data.train, batch, place.device) for batch in batches]
        return StepData(on_device, targets, num_samples=size * micro_batches * place.data_parallel)

    def _run_step(self, step: StepData) -> tuple[StepTime, float]:
        """Run a step; return its time, and the memory before its last micro-batch in MiB."""
        device, start = self.context.device, time.perf_counter()
        *others, last = step.micro_batches
        for batch in others:
            self.model.forward_backward(batch, normalizer=step.normalizer, last_micro=False)
        synchronize(device)
        middle, allocated = time.perf_counter(), memory_mib(device)
        self.model.forward_backward(last, normalizer=step.normalizer, last_micro=True)
        self.model.step(self.config.train.learning_rate)
        synchronize(device)
        return StepTime((middle - start) / max(1, len(others)), time.perf_counter() - middle), allocated

    def _usable_mib(self) -> float:
        """Return the memory that this process has or can get, without that of CUDA itself."""
        device = self.context.device
        if device.type == "cuda":
            return usable_bytes(device) / MIB
        workers = self.context.workers_per_node
        available = memory_mib(device) + psutil.virtual_memory().available / workers / MIB
        return min(available, cgroups.usable_memory() / workers / MIB)


def other_inputs(step: StepData, micro_batches: int) -> Tensor:
    """Return a tensor as large as the inputs of the micro-batches that a measured step leaves out."""
    batch = step.micro_batches[0]
    size = sum(tensor.nbytes for tensor in (*batch.inputs.values(), batch.labels))
    return torch.empty((micro_batches - len(step.micro_batches)) * size, dtype=torch.uint8, device=batch.labels.device)


def longest_first(samples: Samples) -> list[int]:
    """Return the indices of the samples, the longest first. The order of images stays."""
    has_lengths = len(samples) > 0 and "input_ids" in samples[0]
    return (-sample_lengths(samples)).argsort(kind="stable").tolist() if has_lengths else list(range(len(samples)))


def combine(size: int, config: Config, ranks: list[tuple[float, float, float, float]]) -> TriedSize:
    """Return the result of a size from those of all ranks: seconds, peak, base and usable memory."""
    seconds, peaks, bases, usable = zip(*ranks, strict=True)
    fits = all(peak <= limit * USABLE_SHARE for peak, limit in zip(peaks, usable, strict=True))
    speed = model_checks.samples_per_worker(config) * config.data_parallel / max(seconds)
    return TriedSize(size, FITS if fits else TOO_LARGE, speed, max(peaks), max(bases), min(usable))


def peak_mib(device: torch.device) -> float:
    """Return the peak memory of this process in MiB: allocated on the GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory_mib(device: torch.device) -> float:
    """Return the current memory of this process in MiB."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    return psutil.Process().memory_info().rss / MIB


def config_of_round(config: Config, size: int) -> Config:
    """Return the configuration with which the model of some trials is built."""
    return model_checks.with_micro_batch(config, size, micro_batches_per_step(config, size))


# Which size the search tries next, and which one it chooses. The same results give the same answer on all ranks.
# The sizes are the divisors of the samples of a step on each worker. In eager mode they are tried in ascending order,
# by doubling, until the next size does not fit or the speed no longer rises. A compiled model costs a compilation for
# each size, so the search jumps from one small size to the largest that should fit, and then goes down while that is
# faster.

MIN_GAIN = 0.01  # relative gain in speed below which a size counts as no faster
PATIENCE = 2  # sizes in a row without a gain that end the eager search; one may be a slow moment of the machine
FIRST_COMPILED = 4  # Largest first size of a compiled model. Its memory predicts that of the others.
USABLE_SHARE = 0.95  # Fraction of the memory that a size may need. The rest is for fragmentation.
UNTRIED_SHARE = 0.7  # The same, for a size that is chosen without a trial.


def ladder(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of a search by doubling: each is the largest up to twice the one before, or else the next."""
    rungs = list(sizes[:1])
    while rungs and rungs[-1] < sizes[-1]:
        larger = [size for size in sizes if size > rungs[-1]]
        rungs.append(max((size for size in larger if size <= 2 * rungs[-1]), default=larger[0]))
    return rungs


@dataclass(frozen=True)
class SizeSearch:
    """The results of a search so far."""

    sizes: Sequence[int]  # all sizes that are allowed, in ascending order
    tried: Sequence[TriedSize]  # the candidates so far, in the order of the search
    compiled: bool  # whether each size costs a compilation
    whole_saves_mib: float = 0.0  # what a step of one micro-batch, the largest, needs less than one of several

    def next_size(self) -> int | None:
        """Return the size to try next; None if the search is complete."""
        return self._next_compiled() if self.compiled else self._next_eager()

    def choose(self) -> int | None:
        """Return the fastest size that fits; of sizes that are equally fast the smallest. None if none fits.

        If there was time for one size of a compiled model only, it is the largest that will fit by a wide margin. A
        larger micro-batch is rarely slower, but the small first size nearly always is.
        """
        if self.compiled and len(self._fitting()) == 1 and self.next_size() is not None:
            return max(size for size in self.sizes if self._needs_no_trial(size))
        best = max(map(_speed, self._fitting()), default=0.0)
        fast = [candidate for candidate in self._fitting() if _speed(candidate) >= best * (1 - MIN_GAIN)]
        return min((candidate.micro_batch_size for candidate in fast), default=None)

    def too_large(self) -> int | None:
        """Return the smallest size that was not tried because it needs more memory than there is; None if none."""
        untried = [size for size in self.sizes if self._is_new(size) and size < self._bound()]
        return next((size for size in untried if not self._should_fit(size)), None)

    def _next_eager(self) -> int | None:
        if not self.tried:
            return self.sizes[0]
        fitting = self._fitting()
        before, last = fitting[:-PATIENCE], fitting[-PATIENCE:]
        enough = max(map(_speed, before), default=0.0) * (1 + MIN_GAIN)
        has_plateau = bool(before) and all(_speed(candidate) < enough for candidate in last)
        if not fitting or has_plateau:
            return None
        largest = max(candidate.micro_batch_size for candidate in fitting)
        rungs = [size for size in ladder(self.sizes) if size > largest]
        if rungs and rungs[0] < self._bound() and self._should_fit(rungs[0]):
            return rungs[0]
        between = [size for size in self.sizes if largest < size < (rungs[0] if rungs else 0)]
        return max(filter(self._may_try, between), default=None)

    def _next_compiled(self) -> int | None:
        fitting, bound = self._fitting(), self._bound()
        if not fitting:
            return max((size for size in self.sizes if size <= FIRST_COMPILED and size < bound), default=None)
        largest = max(candidate.micro_batch_size for candidate in fitting)
        if above := [size for size in self.sizes if size > largest and self._may_try(size)]:
            return max(above)
        after_first = sorted(fitting[1:], key=lambda candidate: candidate.micro_batch_size)
        if not after_first or _speed(after_first[0]) < max(map(_speed, after_first)):
            return None
        below = [size for size in ladder(self.sizes) if size < after_first[0].micro_batch_size]
        return max(filter(self._may_try, below), default=None)

    def _fitting(self) -> list[TriedSize]:
        return [candidate for candidate in self.tried if candidate.outcome == FITS]

    def _bound(self) -> float:
        """Return the smallest size that did not fit, or infinity."""
        return min((one.micro_batch_size for one in self.tried if one.outcome != FITS), default=float("inf"))

    def _is_new(self, size: int) -> bool:
        return all(candidate.micro_batch_size != size for candidate in self.tried)

    def _may_try(self, size: int) -> bool:
        return self._is_new(size) and size < self._bound() and self._should_fit(size)

    def _should_fit(self, size: int) -> bool:
        """Return whether a size should fit, if memory grows linearly. Growth is never slower than that.

        The largest size should, if it does without what it saves. Its trial measures whether it saves that at its peak.
        """
        needed = self._predicted_mib(size)
        usable = min((candidate.usable_mib or 0 for candidate in self._fitting()), default=0)
        saved = self.whole_saves_mib if size == self.sizes[-1] else 0.0
        return needed is None or not usable or needed - saved <= usable * USABLE_SHARE

    def _needs_no_trial(self, size: int) -> bool:
        """Return whether a size fits by a wide margin, or was tried."""
        fitting = self._fitting()[0]
        if size == fitting.micro_batch_size:
            return True
        needed, usable = self._predicted_mib(size), fitting.usable_mib
        larger = fitting.micro_batch_size < size < self._bound()
        return larger and needed is not None and usable is not None and needed <= usable * UNTRIED_SHARE

    def _predicted_mib(self, size: int) -> float | None:
        measured = ((one.micro_batch_size, one.peak_mib, one.base_mib or 0.0) for one in self._fitting())
        known = sorted((size, peak, base) for size, peak, base in measured if peak is not None)
        if not known:
            return None
        last, peak, base = known[-1]
        before = known[-2][:2] if len(known) > 1 else (0, base)
        return MemoryLine.through((last, peak), before).at(size)


def _speed(candidate: TriedSize) -> float:
    return candidate.samples_per_second or 0.0
