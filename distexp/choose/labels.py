"""Names of candidates and of objectives in texts."""

from __future__ import annotations

from collections.abc import Iterable

from distexp.choose.axis_keys import AXES
from distexp.choose.candidate import Candidate, Objective
from distexp.config import Config
from distexp.config.override_text import key_of
from distexp.console.run_summary import strategy_label
from distexp.runs.listing import format_count
from distexp.system.units import MIB_PER_GB

BETTER = {
    Objective.THROUGHPUT: "faster than",
    Objective.ENERGY: "less energy per sample than",
    Objective.COST: "cheaper than",
    Objective.MEMORY: "less memory than",
}
"""What a margin means, by objective."""

LABELED = (*AXES, "cluster.nodes", "cluster.workers_per_node")
"""Keys whose values the label of a configuration has. The other keys were added by ``choose.space``."""


def format_worker_time(seconds: float, candidates: Iterable[Candidate]) -> str:
    """Return a time summed over the workers: ``135 GPU-seconds``, or on CPUs ``135 worker-seconds``."""
    return f"{seconds:,.0f} {_device(candidates)}-seconds"


def format_worker_minutes(minutes: float, candidates: Iterable[Candidate]) -> str:
    """Return a time summed over the workers: ``1 GPU-minute``, or on CPUs ``20 worker-minutes``."""
    return f"{minutes:,g} {_device(candidates)}-minute{'' if minutes == 1 else 's'}"


def _device(candidates: Iterable[Candidate]) -> str:
    return "worker" if any(candidate.on_cpus for candidate in candidates) else "GPU"


def label(candidate: Candidate) -> str:
    """Return the label of a candidate: ``fsdp shard_grad_op, micro-batch 16 x 2, kernels=fast, 2 workers``."""
    config = candidate.config
    return " ".join(candidate.overrides) if config is None else ", ".join((config_label(config), *_added(candidate)))


def row_label(candidate: Candidate) -> str:
    """Return a candidate for a table: ``fsdp full_shard 16x2, fast, fsdp.backward_prefetch=2``."""
    config = candidate.config
    return " ".join(candidate.overrides) if config is None else ", ".join((short_label(config), *_added(candidate)))


def _added(candidate: Candidate) -> list[str]:
    return [text for text in candidate.overrides if key_of(text) not in LABELED]


def config_label(config: Config) -> str:
    """Return the label of a configuration, without what is the default."""
    train, world = config.train, config.cluster.world_size
    parts = [strategy_label(config), f"micro-batch {train.micro_batch_size} x {train.gradient_accumulation_steps}"]
    if config.kernels.name != "reference":
        parts.append(f"kernels={config.kernels.name}")
    if train.activation_checkpointing:
        parts.append("checkpointing")
    if world > 1:
        parts.append(format_count(world, "worker"))
    return ", ".join(parts)


def short_label(config: Config) -> str:
    """Return a configuration for a table: ``fsdp full_shard 16x2, fast, checkpointing``."""
    train = config.train
    parts = [f"{strategy_label(config)} {train.micro_batch_size}x{train.gradient_accumulation_steps}"]
    if config.kernels.name != "reference":
        parts.append(config.kernels.name)
    if train.activation_checkpointing:
        parts.append("checkpointing")
    return ", ".join(parts)


def format_gb(mib: float | None) -> str:
    """Return a memory size in GB; a dash if it is unknown."""
    return "-" if mib is None else f"{mib / MIB_PER_GB:,.1f} GB"


def format_share(share: float) -> str:
    """Return a share in percent, with a decimal if it is small."""
    percent = 100 * share
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"
