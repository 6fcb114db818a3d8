"""The order in which candidates are tried: a rough forecast of the step time from the traced step.

``rough_step_s`` is only for the order. The search scales the forecasts to the measured times, and learns their error.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from distexp.choose.candidate import Candidate, families_of
from distexp.config import Config, ConfigError
from distexp.forecast.communication import GroupLayout, Target, group_layout
from distexp.hardware.facts import facts, gpu_facts, peak_tflops
from distexp.plan.verdict import planned_gpu
from distexp.resolve.resources import parameter_count
from distexp.strategies.base import load_strategy
from distexp.strategies.parallel.checks import bubble_share, schedule_of
from distexp.system.cache_dir import cache_dir, file_name
from distexp.system.files import read_json
from distexp.system.units import MIB

GB, TERA = 1e9, 1e12


def communication_s(config: Config, parameters: float, speeds: MachineSpeeds, trained_share: float = 1.0) -> float:
    """Return the seconds in collectives of a step, without latencies. None of them is hidden."""
    cluster, steps, cut = config.cluster, config.train.gradient_accumulation_steps, weight_parts(config)
    target = Target(cluster.nodes, max(1, (cluster.workers_per_node or 1) // cut), steps, samples_per_step=0.0)
    parameters /= cut
    communication = replace(load_strategy(config).communication(config), trained_share=trained_share)
    shard, replicas = (group_layout(communication, axis, target) for axis in ("shard", "replicate"))
    in_shards = parameters * communication.bytes_per_parameter(steps)
    between_replicas = parameters * trained_share / shard.ranks * 2 * communication.gradient_bytes
    return _ring_s(in_shards, shard, speeds) + _ring_s(between_replicas, replicas, speeds)


def _ring_s(size: float, group: GroupLayout, speeds: MachineSpeeds) -> float:
    """Return the seconds in which a ring sends a size. Between nodes it uses the cards of all its workers on a node."""
    link = speeds.link_gb_per_s
    if group.nodes > 1:
        link = min(link, speeds.network_gb_per_s * group.ranks_per_node)
    return size * (group.ranks - 1) / group.ranks / (link * GB)


REACHED_SHARE = 0.6  # share of the datasheet's peak that a large matrix product reaches
UNKNOWN_GPU_TFLOPS = 100.0

LAUNCH_S = 30e-6
"""Time until the CPU has launched a kernel of the traced step, with ``single``. On machines with an H200 and compiled
blocks, micro-batches of 4 samples took 20 to 36 us for each (docs/results/choose_h200.json)."""


@dataclass(frozen=True)
class MachineSpeeds:
    """Speeds of one worker."""

    tflops: float  # TFLOP/s of a large matrix product
    memory_gb_per_s: float  # bandwidth of its memory
    link_gb_per_s: float  # bandwidth between the workers of a node
    network_gb_per_s: float  # bandwidth between nodes of each worker, if all of them use it
    launch_s: float = LAUNCH_S  # time until the CPU has launched an operation


def read_machine_speeds(config: Config) -> MachineSpeeds:
    """Return the speeds of the machine of a run."""
    precision, links = config.precision.outside_products, facts().links
    network = links["network"].step_gb_per_s
    if config.cluster.device == "cpu":
        cores = config.cluster.cpus_per_worker or 1
        stored = stored_tflops(f"cpu of {platform.node()} {cores} threads", precision)
        tflops, link = stored or facts().cpu_tflops_per_core * cores, links["loopback"].step_gb_per_s
        return MachineSpeeds(tflops, facts().cpu_memory_gb_per_s, link, network)
    name = planned_gpu(config) or ""
    gpu, peak = gpu_facts(name), peak_tflops(name, precision)
    tflops = stored_tflops(name, precision) or (REACHED_SHARE * peak if peak else UNKNOWN_GPU_TFLOPS)
    return MachineSpeeds(tflops, gpu.memory_gb_per_s, facts().link_kind(gpu.link["name"]).step_gb_per_s, network)


def stored_tflops(device: str, precision: str) -> float | None:
    """Return the highest matrix ceiling that a preflight stored for a device, with any version of torch."""
    if not device:
        return None
    name = file_name(f"{device} {precision}")
    found = []
    with suppress(ConfigError):  # Without a home directory there is no cache.
        for path in (cache_dir() / "matrix-ceiling").glob(f"{name}-*.json"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                found.append(float(read_json(path)["tflops"]))
    return max(found, default=None)


ADAMW_BYTES = 28  # bytes per parameter that a step of AdamW reads and writes: weight, gradient and two moments in fp32
PASSES = 3  # how often a micro-batch reads all weights: in the forward pass, and for both products of the backward pass
READS_PER_WRITE = 1.5  # how often a tensor is read after it was written, on average
HIDDEN_SHARE = 0.7  # share of the computation during which communication can run, if the strategy overlaps them
MIN_EXPOSED_SHARE = 0.1  # share of the communication that is never hidden: that of the first and the last layers


@dataclass(frozen=True)
class Work:
    """What a worker does in one step."""

    flops: float  # floating point operations
    operations: float  # kernels to launch in the passes. Those of the optimizer are few on a GPU, and short on a CPU.
    written_bytes: float  # size of the tensors that it allocates
    parameters: float  # number of parameters of the whole model
    trained_share: float = 1.0  # share of them that is trained
    exchanged_bytes: float = 0.0  # between workers that share a model, in the passes


def set_forecasts(
    candidates: Sequence[Candidate], speeds_of: Callable[[Config], MachineSpeeds] = read_machine_speeds
) -> None:
    """Set the forecast of each candidate whose family has an estimate."""
    for members in families_of(candidates).values():
        estimated = [member for member in members if member.estimate is not None and member.estimate.flops is not None]
        for waiting in (member for member in members if estimated and member.is_waiting):
            config, size = waiting.config, waiting.micro_batch
            nearest = min(estimated, key=lambda other: abs(other.micro_batch - size))
            if config is not None and (work := _scaled_work(nearest, config)) is not None:
                waiting.forecast_s = rough_step_s(config, work, speeds_of(config))


def _scaled_work(known: Candidate, config: Config) -> Work | None:
    """Return the work of another member of a candidate's family. The samples of a step are the same."""
    estimate = known.estimate
    if estimate is None or known.config is None or estimate.flops is None or estimate.operations is None:
        return None
    of_passes = estimate.operations - (estimate.optimizer_operations or 0)
    per_micro_batch = of_passes / known.config.train.gradient_accumulation_steps
    operations = per_micro_batch * config.train.gradient_accumulation_steps
    # If the size of the whole model is unknown, that of the worker's share of fp32 parameters counts.
    parameters = parameter_count(known.config.model) or estimate.parts.get("parameters", 0.0) * MIB / 4
    written = (estimate.written_mib or 0.0) * MIB
    exchanged = estimate.exchanged_mib * MIB
    return Work(estimate.flops, operations, written, parameters, estimate.trained_share, exchanged)


def rough_step_s(config: Config, work: Work, speeds: MachineSpeeds) -> float:
    """Return a rough forecast of the time of a step: computation or launches, optimizer, and exposed communication."""
    steps = config.train.gradient_accumulation_steps
    weights = work.parameters / weight_parts(config) * _compute_bytes(config)
    moved = (1 + READS_PER_WRITE) * work.written_bytes + PASSES * steps * weights
    computation = work.flops / (speeds.tflops * TERA) + moved / (speeds.memory_gb_per_s * GB)
    body = max(computation, work.operations * speeds.launch_s * load_strategy(config).launch_factor(config))
    body += work.exchanged_bytes / (speeds.link_gb_per_s * GB)  # The next operation needs it, so it is not hidden.
    if (stages := config.parallel.pipeline) > 1:
        body /= 1 - bubble_share(stages, schedule_of(config), steps)
    exposed = total = communication_s(config, work.parameters, speeds, work.trained_share)
    if load_strategy(config).overlaps_communication(config):
        exposed = max(MIN_EXPOSED_SHARE * total, total - HIDDEN_SHARE * body)
    return body + _optimizer_s(config, work, speeds) + exposed


def weight_parts(config: Config) -> int:
    """Return among how many workers the weights are cut, besides a sharding. Experts are most of a mixture."""
    return config.parallel.tensor * config.parallel.pipeline * config.parallel.expert


def _compute_bytes(config: Config) -> int:
    return 4 if config.precision.name == "fp32" else 2


def _optimizer_s(config: Config, work: Work, speeds: MachineSpeeds) -> float:
    cluster, communication = config.cluster, load_strategy(config).communication(config)
    cut = weight_parts(config)
    shards = cut * communication.optimizer_shards(max(1, cluster.world_size // cut), cluster.nodes)
    values = work.parameters * work.trained_share / shards
    if not config.offload.enabled:
        return values * ADAMW_BYTES / (speeds.memory_gb_per_s * GB)
    moved = values * (4 + _compute_bytes(config)) / (facts().gpu_to_cpu_gb_per_s * GB)
    return moved + values * ADAMW_BYTES / (facts().cpu_adam_gb_per_s * GB)
