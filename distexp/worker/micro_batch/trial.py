"""The time and the memory of one micro-batch size, measured on the model and on real samples."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import Tensor

from distexp.config import Config
from distexp.config.batch_sizes import samples_per_worker, with_micro_batch
from distexp.data.base import Batch, Samples, TaskData, to_device
from distexp.data.loader import StepData
from distexp.data.sampler import PaddedDataset
from distexp.data.text import sample_lengths
from distexp.distributed.context import Context
from distexp.distributed.memory_limit import usable_bytes
from distexp.distributed.process_group import gather_to_all, sum_over_ranks
from distexp.measure.clock import synchronize
from distexp.models.blueprint import Blueprint
from distexp.runs.micro_batch import FITS, TOO_LARGE, TriedSize
from distexp.strategies.base import DistributedModel, load_strategy
from distexp.strategies.model_tensors import read_model_tensors
from distexp.system.cgroups import usable_memory
from distexp.system.seeding import seed_everything
from distexp.system.units import MIB
from distexp.worker.micro_batch.sizes import USABLE_SHARE

WARMUP_STEPS, TIMED_STEPS = 2, 3
MAX_WARMUP_STEPS = 20
"""Steps until the optimizer has its states. The loss scaling of fp16 may skip the first updates."""


def micro_batches_per_step(config: Config, size: int) -> int:
    """Return the micro-batches of a measured step: two show the time of both kinds, if there are two."""
    return min(2, samples_per_worker(config) // size)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on this rank."""

    other: float  # a micro-batch before the last one
    last: float  # the last micro-batch and the update

    def of_whole_step(self, micro_batches: int) -> float:
        """Return the seconds of a step with a number of micro-batches."""
        return (micro_batches - 1) * self.other + self.last


class SizeTrials:
    """A model that tries several micro-batch sizes.

    Args:
        config: the configuration, with the first size.
        blueprint: the model, not distributed.
        data: the data set.
        context: this worker.
    """

    def __init__(self, config: Config, blueprint: Blueprint, data: TaskData, context: Context) -> None:
        self.config, self.data, self.context = config, data, context
        self.model: DistributedModel = load_strategy(config).setup(blueprint, config, context)
        seed_everything(config.train.seed + context.rank)  # as before a training
        self.longest = longest_first(data.train)
        optimizer = getattr(self.model, "optimizer", getattr(self.model.module, "optimizer", None))
        self.tensors = partial(read_model_tensors, self.model.module, optimizer)

    def measure(self, size: int) -> TriedSize:
        """Run some steps of a size; return the result over all ranks. A collective."""
        config, device = self.config, self.context.device
        micro_batches = samples_per_worker(config) // size
        step = self._load_step(size, micro_batches_per_step(config, size))
        self.model.module.train()
        reset_peak(device)
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

    def _load_step(self, size: int, micro_batches: int) -> StepData:
        """Return a step of the longest samples."""
        place, samples = self.context, PaddedDataset(self.data.train)
        batches: list[Batch] = []
        for number in range(micro_batches):
            first = (number * place.world_size + place.rank) * size
            chosen = [self.longest[index % len(self.longest)] for index in range(first, first + size)]
            batches.append(self.data.collate([samples[index] for index in chosen]))
        targets = torch.tensor(sum(batch.num_targets for batch in batches), device=place.device)
        on_device = [to_device(self.data.train, batch, place.device) for batch in batches]
        return StepData(on_device, sum_over_ranks(targets), num_samples=size * micro_batches * place.world_size)

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
        return min(available, usable_memory() / workers / MIB)


def other_inputs(step: StepData, micro_batches: int) -> Tensor:
    """Return a tensor as large as the inputs of the micro-batches that a measured step leaves out."""
    batch = step.micro_batches[0]
    size = sum(tensor.nbytes for tensor in (*batch.inputs.values(), batch.labels))
    return torch.empty((micro_batches - len(step.micro_batches)) * size, dtype=torch.uint8, device=batch.labels.device)


def longest_first(samples: Samples) -> list[int]:
    """Return the indices of the samples, the longest first. The order of images stays."""
    if len(samples) == 0 or "input_ids" not in samples[0]:
        return list(range(len(samples)))
    order: list[int] = (-sample_lengths(samples)).argsort(kind="stable").tolist()
    return order


def combine(size: int, config: Config, ranks: list[tuple[float, float, float, float]]) -> TriedSize:
    """Return the result of a size from those of all ranks: seconds, peak, base and usable memory."""
    seconds, peaks, bases, usable = zip(*ranks, strict=True)
    fits = all(peak <= limit * USABLE_SHARE for peak, limit in zip(peaks, usable, strict=True))
    speed = samples_per_worker(config) * config.cluster.world_size / max(seconds)
    return TriedSize(size, FITS if fits else TOO_LARGE, speed, max(peaks), max(bases), min(usable))


def reset_peak(device: torch.device) -> None:
    """Reset the peak memory, and free what earlier sizes have left in the cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


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
    return with_micro_batch(config, size, micro_batches_per_step(config, size))
