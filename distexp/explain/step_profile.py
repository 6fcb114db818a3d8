"""The profiled step of a run: the parts of each rank, and the settings that matter for advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distexp.runs.entry_values import number_of
from distexp.runs.record import RunRecord
from distexp.runs.step_parts import HIDDEN, PARTS
from distexp.statistics.noise import speed_noise, step_noise
from distexp.strategies.base import recorded_strategy
from distexp.strategies.memory_traits import MemoryTraits

COMPUTE = ("matmul", "other_kernels")
"""Parts in which kernels run."""

OVERHEADS = ("exposed_communication", "waiting", "launch_idle", "data_wait", "optimizer", "host")
"""All other parts. The largest one is the bottleneck, if it is large enough."""

DIFFERENT = 0.05
"""Relative difference from which a profiled step differs from the median step."""


@dataclass(frozen=True)
class RankStep:
    """The median profiled step of a rank; times are in milliseconds."""

    rank: int
    step_ms: float
    profiled_ms: float  # with the overhead of the profiler
    parts: Mapping[str, float | None]  # by name of PARTS, and HIDDEN; None: not measured
    launches: float | None
    cpu_busy_ms: float | None = None  # in the profiled step; None: no GPU
    without_core_ms: float | None = None  # inside the parts; None: a GPU, or unknown

    def time_ms(self, name: str) -> float:
        """Return the time of a part; 0 if it was not measured."""
        return self.parts[name] or 0.0

    @property
    def cpu_busy_share(self) -> float | None:
        """Return the fraction of the profiled step in which the CPU does not wait for the GPU; None if unknown."""
        return None if self.cpu_busy_ms is None else self.cpu_busy_ms / self.profiled_ms


@dataclass(frozen=True)
class StepProfile:
    """The median profiled step of all ranks of a run.

    Attributes:
        strategy: Strategy of the run. A custom one that was not loaded has the defaults.
    """

    record: RunRecord
    ranks: tuple[RankStep, ...]
    strategy: MemoryTraits = field(default_factory=MemoryTraits)

    @classmethod
    def of(cls, record: RunRecord, strategy: MemoryTraits | None = None) -> StepProfile | None:
        """Return the profile of a run; None if it was not profiled.

        Args:
            record: The record.
            strategy: Strategy of the run; None: that of the record, if distexp ships it.
        """
        ranks = [_read_rank(entry) for entry in record.metrics.step_breakdown or () if isinstance(entry, dict)]
        known = tuple(rank for rank in ranks if rank is not None)
        return cls(record, known, strategy or recorded_strategy(record.config) or MemoryTraits()) if known else None

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
    def different_median_ms(self) -> float | None:
        """Return the median of the steps that were not profiled, if the parts add up to another duration."""
        median = self.median_ms
        if median is None or abs(self.step_ms - median) <= DIFFERENT * median:
            return None
        return median

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
        section, _, name = key.partition(".")
        value = self.record.config.get(section)
        value = value.get(name) if isinstance(value, dict) else None
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
    def global_batch(self) -> int:
        """Return the samples of a full step over all workers, or its rows if samples are packed."""
        micro, steps = (self.number(f"train.{name}", 1) for name in ("micro_batch_size", "gradient_accumulation_steps"))
        return self.number("train.global_batch_size", micro * steps * self.world_size)

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


def _read_rank(entry: Mapping[str, Any]) -> RankStep | None:
    rank, step = number_of(entry, "rank"), number_of(entry, "step_ms")
    if rank is None or not step:
        return None
    parts = {name: number_of(entry, f"{name}_ms") for name in (*PARTS, HIDDEN)}
    profiled = number_of(entry, "profiled_step_ms") or step
    return RankStep(
        int(rank),
        step,
        profiled,
        parts,
        number_of(entry, "launches"),
        cpu_busy_ms=number_of(entry, "cpu_busy_ms"),
        without_core_ms=number_of(entry, "without_core_ms"),
    )
