"""Evidence of slow GPUs, from the memory traces: clocks, memory errors, PCIe link, other processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.runs.memory_trace import GPU, MemorySample, group_by_device, read_memory_trace
from distexp.runs.phases import phase_intervals, read_phase_events

TRAINING = frozenset({"warmup", "train"})

SLOWDOWNS = {
    0x08: "the hardware reduces its clocks (power or temperature)",
    0x20: "the driver reduces its clocks because it is too hot",
    0x40: "the hardware reduces its clocks because it is too hot",
    0x80: "the power supply reduces its clocks",
}
"""Bits of nvml.h that mean a problem of the GPU, with what they mean."""

HARDWARE = 0x08
HARDWARE_CAUSES = 0x40 | 0x80
"""NVML sets ``HARDWARE`` together with these bits, which are the reason."""

POWER_CAP = 0x04
"""The power limit reduces the clocks, which is usual for a GPU with much to do."""

MIN_SHARE = 0.1
"""Share of the samples of the training in which a slowdown counts."""

POWER_CAP_MORE = 0.2
"""Share of the samples by which the power limit acts more often than on the other GPUs."""

LOWER_CLOCK = 0.03
"""Fraction by which the clock is lower than that of the other GPUs."""

OTHER_MIB = 256.0
"""Memory of other processes that counts. A display or a monitor takes less."""


@dataclass(frozen=True)
class GpuEvidence:
    """What is known about one GPU.

    Attributes:
        index: Its index in NVML.
        problems: Problems of this GPU. They are reported even if no rank is known to be slow.
        differences: Differences from the other GPUs of the run, which explain why a rank is slow.
    """

    index: int
    problems: list[str]
    differences: list[str]


def read_gpu_evidence(traces: Sequence[Path], events: Path, workers_per_node: int) -> dict[int, GpuEvidence]:
    """Return the evidence for the GPU of each rank. Nodes without a readable trace have none.

    Args:
        traces: The memory trace of each node.
        events: File with the phases of the run.
        workers_per_node: The n-th GPU of a trace belongs to the n-th rank of the node.
    """
    training = phase_intervals(read_phase_events(events), TRAINING)
    samples: dict[int, list[MemorySample]] = {}
    for node, path in enumerate(traces):
        for local_rank, device in enumerate(_gpus(path)):
            samples[node * workers_per_node + local_rank] = [
                sample for sample in device if any(begin <= sample.unix_time_s < end for begin, end in training)
            ]
    known = {rank: taken for rank, taken in samples.items() if taken}
    return {
        rank: GpuEvidence(
            taken[0].index,
            list(_problems(taken)),
            list(_differences(taken, [other for number, other in known.items() if number != rank])),
        )
        for rank, taken in known.items()
    }


def _gpus(path: Path) -> list[list[MemorySample]]:
    """Return the samples of each GPU of a trace, in the order of the local ranks."""
    try:
        samples = read_memory_trace(path).samples
    except (OSError, ValueError):
        return []
    return [device for (kind, _), device in group_by_device(samples).items() if kind == GPU]


def _problems(samples: Sequence[MemorySample]) -> Iterator[str]:
    for bit, text in SLOWDOWNS.items():
        share = _share_of_reason(samples, bit, without=HARDWARE_CAUSES if bit == HARDWARE else 0)
        if share is not None and share >= MIN_SHARE:
            yield f"{text}, in {share:.0%} of the samples"
    errors = _known(samples, lambda sample: sample.ecc_errors)
    if errors and errors[-1] > errors[0]:
        yield f"it had {errors[-1] - errors[0]:.0f} uncorrected memory errors during the training"
    others = max(_known(samples, lambda sample: sample.other_mib), default=0.0)
    if others >= OTHER_MIB:
        yield f"other processes held {others:,.0f} MiB of it"


def _differences(samples: Sequence[MemorySample], others: Sequence[Sequence[MemorySample]]) -> Iterator[str]:
    clock = _mean_clock(samples)
    clocks = [value for other in others if (value := _mean_clock(other)) is not None]
    if clock is not None and clocks and clock < (1 - LOWER_CLOCK) * statistics.median(clocks):
        yield f"its SM clock is {clock:,.0f} MHz, that of the others {statistics.median(clocks):,.0f} MHz"
    share = _share_of_reason(samples, POWER_CAP)
    shares = [value for other in others if (value := _share_of_reason(other, POWER_CAP)) is not None]
    if share is not None and shares and share - statistics.median(shares) >= POWER_CAP_MORE:
        yield (
            f"its power limit reduces its clocks in {share:.0%} of the samples, in {statistics.median(shares):.0%} on "
            "the others"
        )
    rate = _best_rate(samples)
    rates = [value for other in others if (value := _best_rate(other)) is not None]
    if rate is not None and rates and rate < statistics.median(rates):
        yield f"its PCIe link has {rate:.0f}% of its maximum rate, that of the others {statistics.median(rates):.0f}%"


def _mean_clock(samples: Sequence[MemorySample]) -> float | None:
    clocks = _known(samples, lambda sample: sample.sm_clock_mhz)
    return statistics.fmean(clocks) if clocks else None


def _best_rate(samples: Sequence[MemorySample]) -> float | None:
    """Return the highest rate of the PCIe link in percent. It is lower while the link saves power."""
    return max(_known(samples, lambda sample: sample.pcie_pct), default=None)


def _share_of_reason(samples: Sequence[MemorySample], bit: int, *, without: int = 0) -> float | None:
    """Return the share of the samples that have a bit and none of the bits of ``without``."""
    reasons = [int(mask) for mask in _known(samples, lambda sample: sample.clock_reasons)]
    return sum(bool(mask & bit) and not mask & without for mask in reasons) / len(reasons) if reasons else None


def _known(samples: Sequence[MemorySample], value: Callable[[MemorySample], float | None]) -> list[float]:
    return [known for sample in samples if (known := value(sample)) is not None]
