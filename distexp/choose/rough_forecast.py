"""The order in which candidates are tried: a rough forecast of the step time from the traced step.

``prior_step_s`` is only for the order. The search scales the forecasts to the measured times, and learns their error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distexp.choose.candidate import Candidate, Status
from distexp.choose.machine_speeds import Machine, read_machine
from distexp.config import Config
from distexp.plan.estimate import Estimate
from distexp.resolve.parameter_count import parameter_count
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

LEAST_EXPOSED = 0.1
"""Share of the communication that is never hidden: that of the first and the last layers."""

CPU_OPTIMIZER_GB_PER_S = 15.0

ZERO3_LAUNCHES = 2.0
"""Factor of the launch time for ZeRO-3, whose hooks run in Python. docs/results/bloom560m-h200.md has measured runs."""


@dataclass(frozen=True)
class Work:
    """What a worker does in one step.

    Attributes:
        flops: Floating point operations.
        operations: Kernels to launch.
        written: Bytes of the tensors that it allocates.
        parameters: Number of parameters of the whole model.
    """

    flops: float
    operations: float
    written: float
    parameters: float


def set_forecasts(candidates: Sequence[Candidate], machine_of: Callable[[Config], Machine] = read_machine) -> None:
    """Set the forecast of each candidate whose family has an estimate."""
    families: dict[tuple[str, ...], list[Candidate]] = {}
    for each in candidates:
        families.setdefault(each.family, []).append(each)
    for members in families.values():
        known = [each for each in members if each.estimate is not None and each.estimate.flops is not None]
        for each in members if known else ():
            if each.status is Status.WAITING and each.config is not None:
                nearest = min(known, key=lambda other: abs(other.micro_batch - each.micro_batch))
                work = scaled_work(nearest, each.config)
                each.forecast_s = None if work is None else prior_step_s(each.config, work, machine_of(each.config))


def scaled_work(known: Candidate, config: Config) -> Work | None:
    """Return the work of another member of a candidate's family. The samples of a step are the same.

    Args:
        known: A candidate with an estimate.
        config: Configuration of the other member.
    """
    estimate = known.estimate
    if estimate is None or known.config is None or estimate.flops is None or estimate.operations is None:
        return None
    fixed = estimate.optimizer_operations or 0
    per_micro_batch = (estimate.operations - fixed) / known.config.train.gradient_accumulation_steps
    return Work(
        estimate.flops,
        fixed + per_micro_batch * config.train.gradient_accumulation_steps,
        (estimate.written_mib or 0.0) * MIB,
        parameters_of(known.config, estimate),
    )


def parameters_of(config: Config, estimate: Estimate) -> float:
    """Return the number of parameters of the whole model. If it is unknown, that of the worker's share of fp32 ones."""
    return parameter_count(config.model) or estimate.parts.get("parameters", 0.0) * MIB / 4


def prior_step_s(config: Config, work: Work, machine: Machine) -> float:
    """Return a rough forecast of the time of a step: computation or launches, optimizer, and exposed communication."""
    steps = config.train.gradient_accumulation_steps
    moved = (1 + READS_PER_WRITE) * work.written + PASSES * steps * work.parameters * _compute_bytes(config)
    computation = work.flops / (machine.tflops * TERA) + moved / (machine.memory * GB)
    is_zero3 = config.strategy.name == "deepspeed" and config.deepspeed.zero_stage == 3
    launches = work.operations * machine.launch_s * (ZERO3_LAUNCHES if is_zero3 else 1.0)
    body = max(computation, launches)
    return body + _optimizer_s(config, work, machine) + _exposed_s(config, work, machine, body)


def _compute_bytes(config: Config) -> int:
    return 4 if config.precision.name == "fp32" else 2


def _shards(config: Config) -> int:
    """Return on how many workers the optimizer states are divided."""
    workers = config.cluster.world_size
    if config.strategy.name == "deepspeed":
        return workers if config.deepspeed.zero_stage else 1
    if config.strategy.name != "fsdp" or config.fsdp.sharding == "no_shard":
        return 1
    replicas = (config.fsdp.replicas or config.cluster.nodes) if config.fsdp.sharding == "hybrid_shard" else 1
    return max(1, workers // replicas)


def _optimizer_s(config: Config, work: Work, machine: Machine) -> float:
    values = work.parameters / _shards(config)
    if not config.offload.enabled:
        return values * ADAMW_BYTES / (machine.memory * GB)
    moved = values * (4 + _compute_bytes(config)) / (machine.host_link * GB)
    return moved + values * ADAMW_BYTES / (CPU_OPTIMIZER_GB_PER_S * GB)


def _exposed_s(config: Config, work: Work, machine: Machine, body: float) -> float:
    """Return the communication that the computation does not hide."""
    workers = config.cluster.world_size
    if workers == 1:
        return 0.0
    link = machine.link if config.cluster.nodes == 1 else min(machine.link, machine.network)
    total = _sent_models(config) * work.parameters * (workers - 1) / workers / (link * GB)
    overlaps = config.strategy.name != "deepspeed" or config.deepspeed.overlap_comm
    return max(LEAST_EXPOSED * total, total - HIDDEN_SHARE * body) if overlaps else total


def _sent_models(config: Config) -> float:
    """Return the bytes per parameter that a worker sends in a step. An all-reduce sends each value twice."""
    steps, half = config.train.gradient_accumulation_steps, _compute_bytes(config)
    if config.strategy.name == "fsdp" and config.fsdp.sharding != "no_shard":
        gathers = 1 if config.fsdp.sharding == "shard_grad_op" else 2
        return steps * gathers * half + 4
    if config.strategy.name == "deepspeed" and config.deepspeed.zero_stage:
        stage = config.deepspeed.zero_stage
        reductions = 1 if stage == 1 else steps
        return half * (reductions + (2 * steps if stage == 3 else 1))
    return 2 * (2 if config.ddp.communication == "bf16" else 4)
