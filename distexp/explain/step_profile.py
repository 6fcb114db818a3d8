"""The profiled step of a run: the parts of each rank, and the settings that matter for advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

from distexp.config import DatasetConfig
from distexp.resolve.resources import MAX_CPU_BYTES, estimate_image_bytes
from distexp.runs.metrics import PARTS
from distexp.runs.record import RunRecord, parse_config
from distexp.runs.step_files import RankStep, read_ranks
from distexp.statistics.noise import speed_noise, step_noise
from distexp.strategies.base import recorded_strategy
from distexp.strategies.traits import Traits, setting
from distexp.system.typed_values import cpu_peak_mib, number_of
from distexp.system.units import MIB

COMPUTE = ("matmul", "other_kernels")  # parts in which kernels run
OVERHEADS = ("exposed_communication", "waiting", "launch_idle", "data_wait", "optimizer", "host", "bubble")
"""All other parts. The largest one is the bottleneck, if it is large enough."""


@dataclass(frozen=True)
class StepProfile:
    """The median profiled step of all ranks of a run."""

    record: RunRecord
    ranks: tuple[RankStep, ...]
    strategy: Traits = field(default_factory=Traits)  # A custom one that was not loaded has the defaults.

    @classmethod
    def of(cls, record: RunRecord, strategy: Traits | None = None) -> StepProfile | None:
        """Return the profile of a run; None if it was not profiled. By default the strategy is that of the record."""
        ranks = read_ranks(record)
        return cls(record, ranks, strategy or recorded_strategy(record.config) or Traits()) if ranks else None

    @property
    def step_ms(self) -> float:
        """Return the duration of a step, as a mean over the ranks."""
        return sum(rank.step_ms for rank in self.ranks) / len(self.ranks)

    def mean_ms(self, name: str) -> float:
        """Return a part as a mean over the ranks."""
        return sum(rank.time_ms(name) for rank in self.ranks) / len(self.ranks)

    @property
    def profiled_ms(self) -> float:
        """Return the duration of the profiled step, with the overhead of the profiler, as a mean over the ranks."""
        return sum(rank.profiled_ms for rank in self.ranks) / len(self.ranks)

    @property
    def overhead_ms(self) -> float:
        """Return by how much the profiler made a step longer. The parts are without it."""
        return self.profiled_ms - self.step_ms

    @property
    def includes_overhead(self) -> bool:
        """Return whether the parts include the overhead of the profiler."""
        entries = self.record.metrics.step_breakdown or ()
        return any(isinstance(entry, dict) and entry.get("includes_overhead") is True for entry in entries)

    @property
    def median_ms(self) -> float | None:
        """Return the median of the steps that were not profiled; None if it is unknown."""
        median_s = number_of(self.record.metrics.step_time_s or {}, "p50")
        return 1000 * median_s if median_s else None

    @property
    def speed_noise(self) -> float | None:
        """Return the relative noise of the speed of the run; None if it is unknown."""
        return speed_noise(step_noise(self.record.metrics.speed_error), self.setting("cluster.device"))

    @property
    def without_core_share(self) -> float | None:
        """Return the fraction of a step in which the ranks were ready, and had no core; None if unknown."""
        times = [rank.without_core_ms for rank in self.ranks if rank.without_core_ms is not None]
        return sum(times) / sum(rank.step_ms for rank in self.ranks) if len(times) == len(self.ranks) else None

    def shares(self) -> dict[str, float]:
        """Return the parts as fractions of a step."""
        times = {name: self.mean_ms(name) for name in PARTS}
        total = sum(times.values()) or 1.0
        return {name: time / total for name, time in times.items()}

    def collective_shares(self) -> dict[str, float]:
        """Return the share of each kind of collective, as ``all_gather``; empty if unknown."""
        entries = (self.record.metrics.communication or {}).get("by_collective")
        shares = {kind: number_of(entries, kind) for kind in entries} if isinstance(entries, dict) else {}
        return {kind: share for kind, share in shares.items() if share is not None}

    @property
    def on_gpu(self) -> bool:
        """Return whether the run used GPUs."""
        return bool(self.setting("cluster.device") == "cuda")

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a key of the configuration, or the default if it is missing or null."""
        value = setting(self.record.config, key)
        return default if value is None else value

    def number(self, key: str, default: int) -> int:
        """Return an integer of the configuration; the default if it is none, or is below both 1 and the default."""
        value = self.setting(key, default)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and value >= min(default, 1) else default

    @property
    def world_size(self) -> int:
        """Return the number of workers."""
        return self.record.built.world_size if self.record.built else len(self.ranks)

    @property
    def data_parallel(self) -> int:
        """Return how many workers, or groups of workers with the same rows, have their own rows."""
        copies = math.prod(self.number(f"parallel.{degree}", 1) for degree in ("tensor", "context", "pipeline"))
        return max(1, self.world_size // copies)

    @property
    def global_batch(self) -> int:
        """Return the samples of a full step over all workers, or its rows if samples are packed."""
        micro, steps = (self.number(f"train.{name}", 1) for name in ("micro_batch_size", "gradient_accumulation_steps"))
        return self.number("train.global_batch_size", micro * steps * self.data_parallel)

    @property
    def samples_per_step(self) -> float:
        """Return the samples of a step over all workers. A packed row has several samples."""
        metrics = self.record.metrics
        if metrics.train_samples_per_second and metrics.train_steps_per_second:
            return metrics.train_samples_per_second / metrics.train_steps_per_second
        return float(self.global_batch)

    @property
    def slowest(self) -> RankStep:
        """Return the rank that the others wait for."""
        return min(self.ranks, key=lambda rank: (rank.time_ms("waiting"), rank.rank))


SLOWER = 0.3  # fraction of the waiting by which a rank must take longer than the others to be its cause
# Fraction of its excess that a rank must be without a core longer than the others, so that this is its cause.
MISSING_CORE = 0.5
LOCAL_PARTS = ("matmul", "other_kernels", "launch_idle", "data_wait", "optimizer", "host")
"""Parts in which a rank does not depend on the others."""


class SlowPart(NamedTuple):
    """The part in which the slowest rank exceeds the others most, and by how much it exceeds their mean."""

    part: str
    excess_ms: float


def slow_part(profile: StepProfile) -> SlowPart:
    """Return the part in which the slowest rank exceeds the others most. With a single rank nothing exceeds."""
    slowest, others = profile.slowest, _others(profile)
    if not others:
        return SlowPart(LOCAL_PARTS[0], 0.0)
    excess = {name: slowest.time_ms(name) - fmean(rank.time_ms(name) for rank in others) for name in LOCAL_PARTS}
    return SlowPart(*max(excess.items(), key=itemgetter(1)))


def is_one_rank_slow(profile: StepProfile) -> bool:
    """Return whether one part of the slowest rank is the cause of the waiting."""
    return slow_part(profile).excess_ms >= SLOWER * max(rank.time_ms("waiting") for rank in profile.ranks)


def had_no_core(profile: StepProfile) -> bool:
    """Return whether the slowest rank is slower because other programs had its core, so not in every step."""
    longer_ms = without_core_excess_ms(profile)
    return longer_ms is not None and longer_ms > 0 and longer_ms >= MISSING_CORE * slow_part(profile).excess_ms


def without_core_excess_ms(profile: StepProfile) -> float | None:
    """Return how much longer the slowest rank is without a core than the others; None if unknown."""
    return _excess(profile, lambda rank: rank.without_core_ms)


def _excess(profile: StepProfile, read: Callable[[RankStep], float | None]) -> float | None:
    """Return by how much a value of the slowest rank exceeds the mean of the others; None if one is unknown."""
    own, others = read(profile.slowest), [read(rank) for rank in _others(profile)]
    known = [value for value in others if value is not None]
    return own - fmean(known) if own is not None and known and len(known) == len(others) else None


def are_others_ahead(profile: StepProfile) -> bool:
    """Return whether the CPUs of the other ranks are as slow, and only ahead of that of the slowest rank.

    A GPU whose CPU is ahead waits in collectives, and is not idle between kernels. Its CPU also works for nearly the
    whole step. If the slowest rank had a slower CPU, the CPUs of the others would wait for their GPUs.

    The time of the CPU is that of a profiled step, and the waiting is without the overhead of the profiler. So this
    compares shares of the step.
    """
    if slow_part(profile).part != "launch_idle" or not is_one_rank_slow(profile):
        return False
    busier = _busier_by(profile)
    waiting = max(rank.time_ms("waiting") / rank.step_ms for rank in profile.ranks)
    return busier is not None and busier < SLOWER * waiting


def describe_excess(profile: StepProfile) -> str:
    """Return by how many milliseconds the slowest rank exceeds the others in its slow part.

    The GPUs of the others are less idle, also because they wait in collectives. So if the part is launch idle, the
    rank is slower by at most what its CPU works longer than theirs.
    """
    part, excess_ms = slow_part(profile)
    if part != "launch_idle":
        return f"{excess_ms:,.1f} ms"
    busier = _busier_by(profile)
    if busier is None:
        return f"up to {excess_ms:,.1f} ms"
    return f"{min(excess_ms, busier * profile.slowest.step_ms):,.1f} ms"


def _busier_by(profile: StepProfile) -> float | None:
    """Return by which fraction of a step the CPU of the slowest rank works longer than the others; None: unknown."""
    return _excess(profile, lambda rank: rank.cpu_busy_share)


def _others(profile: StepProfile) -> list[RankStep]:
    slowest = profile.slowest
    return [rank for rank in profile.ranks if rank is not slowest]


def images_fit(profile: StepProfile) -> bool:
    """Return whether the decoded images are few enough for CPU memory, as for kernels=fast."""
    names = ("root", "train_size", "eval_size", "image_size")
    needed = estimate_image_bytes(DatasetConfig(**{name: profile.setting(f"dataset.{name}") for name in names}))
    return needed is not None and needed <= MAX_CPU_BYTES


def free_cores(profile: StepProfile) -> int:
    """Return the CPU cores of a worker that do not train."""
    environment = profile.record.environment
    cores = (environment.cpu_count or 0) if environment else 0
    if environment and environment.cpu_limit is not None:
        cores = min(cores, int(environment.cpu_limit))
    training = 1 if profile.on_gpu else profile.number("cluster.cpus_per_worker", 1)
    run = profile.record.run
    hosts = run.hosts or (run.attempts[-1].get("hosts") if run.attempts else None)  # During a run only the attempt has.
    # Simulated nodes share a machine.
    machines = len(set(hosts)) if hosts else max(1, profile.number("cluster.nodes", 1))
    return max(0, cores // math.ceil(profile.world_size / machines) - training)


USABLE = 0.9  # fraction of the memory of a GPU that is used at most
SMALL_GROWTH = 0.1
"""Fraction of the measured CPU memory by which a change may increase it. The free memory of the machine is unknown."""


def _usable_mib(profile: StepProfile) -> float | None:
    """Return the memory of a GPU that torch may use; None if it is unknown."""
    # CUDA, NCCL and other programs: what was measured, or the usual memory if this is more. For this reason
    # cluster.gpu_memory_limit_gb subtracts at least the usual one.
    outside = _values(profile.record.memory.get("parts"), "context_mib")
    with suppress(TypeError, ValueError):  # of a damaged record
        outside.append(profile.strategy.total_overhead_mib(parse_config(profile.record.config)))
    total = profile.record.environment.gpu_total_mib if profile.record.environment else None
    if total is None or not outside:
        return None
    limit = profile.setting("cluster.gpu_memory_limit_gb")
    return USABLE * ((min(total, 1024 * limit) if isinstance(limit, int | float) else total) - max(outside))


def fits(profile: StepProfile, *, bytes_more: float = 0.0, batch_factor: int = 1) -> bool:
    """Return whether a run would certainly fit. Return false if its memory is unknown.

    Weights and optimizer states do not depend on the micro-batch. All other memory is counted as if it grew with it.
    On a CPU, only a change fits that hardly needs more memory.
    """
    parts = profile.record.memory.get("parts")
    if not profile.on_gpu:  # The activations of the processes grow with the batch.
        host_peak, activations = cpu_peak_mib(profile.record.memory), _largest(parts, "activations_mib")
        if host_peak is None or activations is None:
            return False
        more_mib = (batch_factor - 1) * activations + bytes_more / MIB
        return profile.world_size * more_mib <= SMALL_GROWTH * host_peak
    usable, peak = _usable_mib(profile), _largest(profile.record.memory.get("torch"), "peak_reserved_mib")
    if usable is None or peak is None:
        return False
    # The smallest values, so that the memory that grows is not underestimated.
    states = (min(_values(parts, name), default=0.0) for name in ("parameters_mib", "optimizer_states_mib"))
    constant = min(sum(states), peak)
    return constant + batch_factor * (peak - constant) + bytes_more / MIB <= usable


def _values(entries: Any, name: str) -> list[float]:
    listed = entries if isinstance(entries, list) else []
    found = (number_of(entry, name) for entry in listed if isinstance(entry, Mapping))
    return [value for value in found if value is not None]


def _largest(entries: Any, name: str) -> float | None:
    return max(_values(entries, name), default=None)
