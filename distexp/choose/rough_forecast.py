"""The order in which candidates are tried: a rough forecast of the step time from the traced step.

``rough_step_s`` is only for the order. The search scales the forecasts to the measured times, and learns their error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distexp.choose.candidate import Candidate, Status
from distexp.choose.communication import communication_s
from distexp.choose.machine_speeds import MachineSpeeds, read_machine_speeds
from distexp.config import Config
from distexp.hardware.facts import facts
from distexp.plan.estimate import Estimate
from distexp.resolve.parameter_count import parameter_count
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB

GB, TERA = 1e9, 1e12

ADAMW_BYTES = 28
"""Bytes per parameter that a step of AdamW reads and writes: weight, gradient and two moments in fp32."""

PASSES = 3
"""How often a micro-batch reads all weights: in the forward pass, and for both products of the backward pass."""

READS_PER_WRITE = 1.5
"""How often a tensor is read after it was written, on average."""

HIDDEN_SHARE = 0.7
"""Share of the computation during which communication can run, if the strategy overlaps them."""

MIN_EXPOSED_SHARE = 0.1
"""Share of the communication that is never hidden: that of the first and the last layers."""


@dataclass(frozen=True)
class Work:
    """What a worker does in one step.

    Attributes:
        flops: Floating point operations.
        operations: Number of kernels to launch in the forward and backward passes. Those of the optimizer are few on a
            GPU, and short on a CPU.
        written_bytes: Size of the tensors that it allocates.
        parameters: Number of parameters of the whole model.
    """

    flops: float
    operations: float
    written_bytes: float
    parameters: float


def set_forecasts(
    candidates: Sequence[Candidate], speeds_of: Callable[[Config], MachineSpeeds] = read_machine_speeds
) -> None:
    """Set the forecast of each candidate whose family has an estimate."""
    families: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, []).append(candidate)
    for members in families.values():
        estimated = [member for member in members if member.estimate is not None and member.estimate.flops is not None]
        if estimated:
            for waiting in (member for member in members if member.status is Status.WAITING):
                waiting.forecast_s = _forecast_s(waiting, estimated, speeds_of)


def _forecast_s(
    candidate: Candidate, estimated: Sequence[Candidate], speeds_of: Callable[[Config], MachineSpeeds]
) -> float | None:
    """Return the forecast of a candidate, from the estimated member of its family with the nearest micro-batch."""
    config = candidate.config
    if config is None:
        return None
    nearest = min(estimated, key=lambda other: abs(other.micro_batch - candidate.micro_batch))
    work = _scaled_work(nearest, config)
    return None if work is None else rough_step_s(config, work, speeds_of(config))


def _scaled_work(known: Candidate, config: Config) -> Work | None:
    """Return the work of another member of a candidate's family. The samples of a step are the same.

    Args:
        known: A candidate with an estimate.
        config: Configuration of the other member.
    """
    estimate = known.estimate
    if estimate is None or known.config is None or estimate.flops is None or estimate.operations is None:
        return None
    of_passes = estimate.operations - (estimate.optimizer_operations or 0)
    per_micro_batch = of_passes / known.config.train.gradient_accumulation_steps
    return Work(
        estimate.flops,
        per_micro_batch * config.train.gradient_accumulation_steps,
        (estimate.written_mib or 0.0) * MIB,
        _parameter_count_of(known.config, estimate),
    )


def _parameter_count_of(config: Config, estimate: Estimate) -> float:
    """Return the number of parameters of the whole model. If it is unknown, that of the worker's share of fp32 ones."""
    return parameter_count(config.model) or estimate.parts.get("parameters", 0.0) * MIB / 4


def rough_step_s(config: Config, work: Work, speeds: MachineSpeeds) -> float:
    """Return a rough forecast of the time of a step: computation or launches, optimizer, and exposed communication."""
    steps = config.train.gradient_accumulation_steps
    moved = (1 + READS_PER_WRITE) * work.written_bytes + PASSES * steps * work.parameters * _compute_bytes(config)
    computation = work.flops / (speeds.tflops * TERA) + moved / (speeds.memory_gb_per_s * GB)
    body = max(computation, work.operations * speeds.launch_s * load_strategy(config).launch_factor(config))
    return body + _optimizer_s(config, work, speeds) + _exposed_s(config, work, speeds, body)


def _compute_bytes(config: Config) -> int:
    return 4 if config.precision.name == "fp32" else 2


def _optimizer_s(config: Config, work: Work, speeds: MachineSpeeds) -> float:
    cluster, communication = config.cluster, load_strategy(config).communication(config)
    values = work.parameters / communication.optimizer_shards(cluster.world_size, cluster.nodes)
    if not config.offload.enabled:
        return values * ADAMW_BYTES / (speeds.memory_gb_per_s * GB)
    moved = values * (4 + _compute_bytes(config)) / (facts().gpu_to_cpu_gb_per_s * GB)
    return moved + values * ADAMW_BYTES / (facts().cpu_adam_gb_per_s * GB)


def _exposed_s(config: Config, work: Work, speeds: MachineSpeeds, body: float) -> float:
    """Return the communication that the computation does not hide."""
    total = communication_s(config, work.parameters, speeds)
    overlaps = load_strategy(config).overlaps_communication(config)
    return max(MIN_EXPOSED_SHARE * total, total - HIDDEN_SHARE * body) if overlaps else total
