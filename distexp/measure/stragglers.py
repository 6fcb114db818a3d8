"""Step times of all ranks, and the ranks that are slower than the others."""

import math
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from distexp.measure.memory.sampler import TRAINING_PHASES, known_values
from distexp.runs.events import phase_intervals, read_phase_events
from distexp.runs.memory_trace import GPU, MemorySample, group_by_device, read_memory_trace
from distexp.system.typed_values import OTHER_MIB, mean_or_none

MIN_STEPS, MIN_STEPS_CPU = 8, 30  # watched steps to compare ranks; other programs disturb CPUs for many steps
SLOWER, SLOWER_CPU = 0.05, 0.1  # a straggler's own time is longer than that of the others by this fraction of it

# And by so many seconds a step. Rank 0 also writes the log, which takes less than 1 ms. On a GPU the difference is
# larger if the CPUs launch kernels too slowly: they take turns at being ahead, and the GPU of the rank that is ahead
# waits. Two H200s with steps of 8 ms had a difference of 2.4 ms.
MIN_EXCESS_S, MIN_EXCESS_CPU_S = 0.003, 0.001

SIGNIFICANT = 2.33  # and the difference is beyond the noise of the steps: standard normal quantile for one error in 100

# And its median is at least this fraction of its spread over the steps. With many steps, the test of significance finds
# small differences too. A disturbance has them, with a large spread.
MIN_EFFECT = 0.5
# And half of it is there in each section of the training: in 2 to 4 sections, of 20 steps if there are so many.
MAX_SECTIONS, SECTION_STEPS = 4, 20

OVERSUBSCRIBED = 0.05  # fraction of its own time in which a rank is ready, but has no core
MAD_OF_NORMAL = 1.4826  # standard deviation of a normal distribution, in median absolute deviations


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank."""

    rank: int
    quantiles: Mapping[str, float]  # ``p50``, ``p90`` and ``max`` of its measured steps, in seconds
    own_s: Sequence[float] = ()  # own time of its watched steps: without waiting for other ranks, in seconds
    durations_s: Sequence[float] = ()  # durations of the watched steps, in seconds
    data_wait_s: Sequence[float] = ()  # time that it waited for its data in the same steps
    without_core_s: Sequence[float] = ()  # time in which other programs had its core, in the same steps; on CPUs only
    watched_p50_s: float | None = None  # median duration of its watched ordinary steps; None if there is none
    unwatched_p50_s: float | None = None  # median duration of its other ordinary steps; None if there is none
    on_cpu: bool = False  # whether it trains on a CPU
    includes_cpu_work: bool = False  # whether the own time is at least the work of the CPU, as with a profile
    host: str = field(default_factory=socket.gethostname)


def include_cpu_work(times: RankTimes, entry: Mapping[str, Any]) -> RankTimes:
    """Return the times of a rank with own times that are at least the work of its CPU.

    The GPU of a rank also waits if the CPU of another rank launches its kernels later. The own CPU may be as busy, so
    without its work the own time would be too short. The profiler makes a step longer. So the CPU's fraction of the
    profiled step counts, and not its time: ``cpu_busy_ms`` of ``step_ms``, both with the overhead of the profiler.
    Without a GPU ``cpu_busy_ms`` is None, and the times are unchanged.
    """
    busy_ms = entry["cpu_busy_ms"]
    if busy_ms is None:
        return times
    share = min(1.0, busy_ms / entry["step_ms"])
    own = [max(own, share * step) for own, step in zip(times.own_s, times.durations_s, strict=True)]
    return replace(times, own_s=own, includes_cpu_work=True)


def step_times(ranks: Sequence[RankTimes]) -> list[dict[str, Any]]:
    """Return ``metrics.step_times_by_rank`` of the record."""
    return [
        {
            "rank": rank.rank,
            **{f"{name}_s": value for name, value in rank.quantiles.items()},
            "watched_p50_s": rank.watched_p50_s,
            "unwatched_p50_s": rank.unwatched_p50_s,
            "own_ms": 1000 * statistics.median(rank.own_s) if rank.own_s else None,
        }
        for rank in ranks
    ]


def find_stragglers(ranks: Sequence[RankTimes]) -> list[dict[str, Any]] | None:
    """Return ``metrics.stragglers``, the slowest first, compared with the median of the others; None: too few steps."""
    steps = min((len(rank.own_s) for rank in ranks), default=0)
    if len(ranks) < 2 or steps < (MIN_STEPS_CPU if ranks[0].on_cpu else MIN_STEPS):
        return None
    found = [pair for rank in ranks if (pair := _straggler(rank, [one for one in ranks if one is not rank]))]
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0], reverse=True)]


def _straggler(rank: RankTimes, others: Sequence[RankTimes]) -> tuple[float, dict[str, Any]] | None:
    """Return by how many seconds a rank is slower than the others, and its entry; None if it is no straggler."""
    usual = [statistics.median(step) for step in zip(*(other.own_s for other in others), strict=True)]
    excess = [own - other for own, other in zip(rank.own_s, usual, strict=True)]
    typical, middle = statistics.median(usual), statistics.median(excess)
    floor_s, share = (MIN_EXCESS_CPU_S, SLOWER_CPU) if rank.on_cpu else (MIN_EXCESS_S, SLOWER)
    least = max(floor_s, share * typical)
    if middle < least or signed_rank_score(excess) < SIGNIFICANT or not _is_consistent(excess, least):
        return None
    own = statistics.median(rank.own_s)
    known = all(member.includes_cpu_work for member in (rank, *others))
    at_least = "" if known else "at least "
    return middle, {
        "rank": rank.rank,
        "gpu": None,
        "host": rank.host,
        "slower_by_pct": 100 * middle / typical if typical > 0 else None,
        "is_upper_bound": not known,
        "evidence": f"its own time is {at_least}{1000 * own:,.1f} ms a step, that of the others {at_least}"
        f"{1000 * typical:,.1f} ms"
        + ("" if known else " (without the work of the CPUs: measure it with train.profile_steps=3)")
        + _data_wait(rank, others, middle)
        + _load(rank, own),
    }


def _is_consistent(excess: Sequence[float], least: float) -> bool:
    """Return whether a rank is slow in the whole training, and not only disturbed in some steps."""
    middle, count = statistics.median(excess), len(excess)
    spread = MAD_OF_NORMAL * statistics.median(abs(value - middle) for value in excess)
    sections = max(2, min(MAX_SECTIONS, count // SECTION_STEPS))
    bounds = [count * section // sections for section in range(sections + 1)]
    medians = (statistics.median(excess[start:end]) for start, end in pairwise(bounds))
    return middle >= MIN_EFFECT * spread and all(median >= least / 2 for median in medians)


def signed_rank_score(differences: Sequence[float]) -> float:
    """Return the score of Wilcoxon's signed-rank test: standard normal if the differences are symmetric around 0."""
    count = len(differences)
    ordered = sorted(differences, key=abs)
    positive = sum(rank for rank, value in enumerate(ordered, start=1) if value > 0)
    return (positive - count * (count + 1) / 4) / math.sqrt(count * (count + 1) * (2 * count + 1) / 24)


def _load(rank: RankTimes, own_s: float) -> str:
    """Return that cores are oversubscribed, if the rank was without one."""
    lost = statistics.median(rank.without_core_s) if rank.without_core_s else 0.0
    wait = f"it also waits {1000 * lost:,.1f} ms a step for a core, so other programs may be the cause"
    return "" if lost < OVERSUBSCRIBED * own_s else f"; cores are oversubscribed: {wait}"


def _data_wait(rank: RankTimes, others: Sequence[RankTimes], excess_s: float) -> str:
    """Return that the rank waits for its data, if this is most of its excess."""
    own = statistics.median(rank.data_wait_s)
    usual = statistics.median(statistics.median(other.data_wait_s) for other in others)
    found = f"; it waits {1000 * own:,.1f} ms for its data, the others {1000 * usual:,.1f} ms"
    return "" if own - usual < excess_s / 2 else found


# Bits of nvml.h that mean a problem of the GPU, with what they mean.
SLOWDOWNS = {
    0x08: "the hardware reduces its clocks (power or temperature)",
    0x20: "the driver reduces its clocks because it is too hot",
    0x40: "the hardware reduces its clocks because it is too hot",
    0x80: "the power supply reduces its clocks",
}
POWER_CAP = 0x04  # the power limit reduces the clocks, which is usual for a GPU with much to do
MIN_SHARE = 0.1  # share of the samples of the training in which a slowdown counts
POWER_CAP_MORE = 0.2  # share of the samples by which the power limit acts more often than on the other GPUs
LOWER_CLOCK = 0.03  # fraction by which the clock is lower than that of the other GPUs


@dataclass(frozen=True)
class GpuEvidence:
    """What is known about one GPU."""

    index: int  # its index in NVML
    problems: list[str]  # Problems of this GPU. They are reported even if no rank is known to be slow.
    differences: list[str]  # differences from the other GPUs of the run, which explain why a rank is slow


def read_gpu_evidence(traces: Sequence[Path], events: Path, workers_per_node: int) -> dict[int, GpuEvidence]:
    """Return the evidence for the GPU of each rank: the n-th GPU of a trace belongs to the n-th rank of the node."""
    training = phase_intervals(read_phase_events(events), TRAINING_PHASES)
    known: dict[int, list[MemorySample]] = {}
    for node, path in enumerate(traces):
        try:
            devices = group_by_device(read_memory_trace(path).samples)
        except (OSError, ValueError):
            continue
        gpus = [device for (kind, _), device in devices.items() if kind == GPU]
        for local_rank, device in enumerate(gpus):
            taken = [one for one in device if any(begin <= one.unix_time_s < end for begin, end in training)]
            if taken:
                known[node * workers_per_node + local_rank] = taken
    evidence = {}
    for rank, own in known.items():
        others = [other for number, other in known.items() if number != rank]
        evidence[rank] = GpuEvidence(own[0].index, list(_problems(own)), list(_differences(own, others)))
    return evidence


def _problems(samples: Sequence[MemorySample]) -> Iterator[str]:
    for bit, text in SLOWDOWNS.items():
        # NVML sets 0x08 together with the other two bits of the hardware, which are the reason.
        share = _share_of_reason(samples, bit, without=0x40 | 0x80 if bit == 0x08 else 0)
        if share is not None and share >= MIN_SHARE:
            yield f"{text}, in {share:.0%} of the samples"
    errors = known_values(samples, lambda sample: sample.ecc_errors)
    if errors and errors[-1] > errors[0]:
        yield f"it had {errors[-1] - errors[0]:.0f} uncorrected memory errors during the training"
    others = max(known_values(samples, lambda sample: sample.other_mib), default=0.0)
    if others >= OTHER_MIB:
        yield f"other processes held {others:,.0f} MiB of it"


def _differences(samples: Sequence[MemorySample], others: Sequence[Sequence[MemorySample]]) -> Iterator[str]:
    def compare(measure: Callable[[Sequence[MemorySample]], float | None]) -> tuple[float, float]:
        """Return a value of this GPU and the median of the others; not a number if one is unknown."""
        own, known = measure(samples), [value for other in others if (value := measure(other)) is not None]
        return (math.nan, math.nan) if own is None or not known else (own, statistics.median(known))

    clock, usual = compare(lambda taken: mean_or_none(known_values(taken, lambda sample: sample.sm_clock_mhz)))
    if clock < (1 - LOWER_CLOCK) * usual:
        yield f"its SM clock is {clock:,.0f} MHz, that of the others {usual:,.0f} MHz"
    share, usual = compare(lambda taken: _share_of_reason(taken, POWER_CAP))
    if share - usual >= POWER_CAP_MORE:
        yield f"its power limit reduces its clocks in {share:.0%} of the samples, in {usual:.0%} on the others"
    # The highest rate counts, because it is lower while the link saves power.
    rate, usual = compare(lambda taken: max(known_values(taken, lambda sample: sample.pcie_pct), default=None))
    if rate < usual:
        yield f"its PCIe link has {rate:.0f}% of its maximum rate, that of the others {usual:.0f}%"


def _share_of_reason(samples: Sequence[MemorySample], bit: int, *, without: int = 0) -> float | None:
    """Return the share of the samples that have a bit and none of the bits of ``without``."""
    reasons = [int(mask) for mask in known_values(samples, lambda sample: sample.clock_reasons)]
    return sum(bool(mask & bit) and not mask & without for mask in reasons) / len(reasons) if reasons else None
