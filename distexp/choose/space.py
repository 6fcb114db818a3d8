"""The candidates of a search: all combinations of strategy, micro-batch, checkpointing and kernels."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from distexp.choose.axes import Axes
from distexp.choose.axis_keys import (
    CHECKPOINTING,
    DEFAULT_VALUES,
    KERNELS,
    MICRO_BATCH,
    OFFLOAD,
    SHARDING,
    STAGE,
    STRATEGY,
)
from distexp.choose.candidate import Candidate
from distexp.cli.overrides import quote_choice
from distexp.config import Config, ConfigError
from distexp.config.paths import config_groups
from distexp.config.schema import KernelsConfig
from distexp.console.progress import show_progress
from distexp.launch.composition import Cell, MakeCell, compose_all
from distexp.plan.cells import replace_overrides

WITH_OFFLOAD = ("full_shard", "hybrid_shard", "2", "3")
"""Shardings and stages that are tried with offloading."""

PROBE = "strategy=ddp"
"""Strategy for which the size of the cluster is read. Others, such as ``single``, would use one worker."""


@dataclass(frozen=True)
class Size:
    """A part of the cluster."""

    nodes: int
    workers_per_node: int

    @property
    def workers(self) -> int:
        """Return the number of workers on all nodes."""
        return self.nodes * self.workers_per_node


def make_space(make: MakeCell, command: Sequence[str], gpus: Sequence[int], axes: Axes) -> list[Candidate]:
    """Return all candidates for one training. Those that are invalid are pruned, with the reason.

    Args:
        make: Composes a cell.
        command: Overrides of the command's cell. They set the global batch.
        gpus: Numbers of workers, over all nodes; empty for that of the command.
        axes: What to vary.

    Raises:
        ConfigError: the command has no global batch size, or a number of GPUs is impossible.
    """
    base = base_config(make, command)
    if base.train.global_batch_size is None:
        raise ConfigError(
            "distexp choose compares configurations of the same training, so it needs the samples of an optimizer step:"
            f" set train.global_batch_size, for example to {16 * base.cluster.world_size}"
        )
    typed = {text.lstrip("+").partition("=")[0] for text in command}
    combinations = list(_combinations(base, cluster_sizes(base, gpus), axes, typed))
    if not combinations:
        raise ConfigError("no configuration is left to try: strategy=single needs choose.gpus=1, or vary more keys")
    overrides = [list(candidate_overrides(command, candidate.overrides)) for candidate in combinations]
    with show_progress("composing", len(overrides)) as advance:
        for candidate, cell in zip(combinations, compose_all(make, overrides), strict=True):
            _set_config(candidate, cell)
            advance()
    _prune_duplicates(combinations)
    return combinations


def candidate_overrides(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a candidate's run: those of the command, with those of the candidate in their place."""
    return replace_overrides(command, [quote_choice(text, config_groups()) for text in overrides])


def base_config(make: MakeCell, command: Sequence[str]) -> Config:
    """Return the configuration of the command with all of its workers. Its batch sizes may not fit.

    Raises:
        ConfigError: the command is invalid for another reason than its strategy or sizes.
    """
    chosen = any(text.startswith((f"{SHARDING}=", f"{STAGE}=", f"{STRATEGY}=single")) for text in command)
    cell = make(command if chosen else replace_overrides(command, [PROBE]))
    config = cell.config or cell.decided
    if config is None or config.cluster.workers_per_node is None:
        raise ConfigError(cell.errors)
    return config


def cluster_sizes(base: Config, gpus: Sequence[int]) -> list[Size]:
    """Return the parts of the cluster to try.

    Raises:
        ConfigError: a number of GPUs needs a part of a node.
    """
    nodes, per_node = base.cluster.nodes, base.cluster.workers_per_node or 1
    if not gpus:
        return [Size(nodes, per_node)]
    is_one_machine = base.cluster.launcher == "local" and nodes == 1
    errors = [
        f"choose.gpus={number} is no multiple of the {per_node} workers of a node: use {number // per_node * per_node}"
        for number in gpus
        if number > per_node and number % per_node and not is_one_machine
    ]
    if errors:
        raise ConfigError(errors)
    sizes = (
        Size(1, number) if number <= per_node or is_one_machine else Size(number // per_node, per_node)
        for number in gpus
    )
    return list(dict.fromkeys(sizes))


def _combinations(base: Config, sizes: Sequence[Size], axes: Axes, typed: Container[str]) -> Iterator[Candidate]:
    """Yield the candidates, without their configurations. Defaults that the command does not set are left out."""
    for size in sizes:
        for strategy, offload in _strategies(size, axes):
            others = [_values(key, axes) for key in (CHECKPOINTING, KERNELS)] + [
                [f"{key}={value}" for value in values]
                for key, values in axes.further.items()
                if _applies(key, strategy)
            ]
            for chosen in product(*others):
                every = (*strategy, *offload, *chosen, *_cluster_overrides(base, size))
                family = tuple(text for text in every if text and not _is_default(text, typed))
                for micro_batch in _micro_batches(base, size, axes):
                    overrides = (*family, f"{MICRO_BATCH}={micro_batch}")
                    yield Candidate(overrides, family, micro_batch, size.workers)


def _is_default(override: str, typed: Container[str]) -> bool:
    """Return whether an override sets the default of an axis, and the command does not set another value."""
    key, _, value = override.partition("=")
    return key in (OFFLOAD, CHECKPOINTING, KERNELS) and value == DEFAULT_VALUES[key][0] and key not in typed


def _values(key: str, axes: Axes) -> list[str]:
    """Return the overrides of an axis; one that is empty if it does not vary."""
    return [f"{key}={value}" for value in axes.values.get(key, ())] or [""]


def _strategies(size: Size, axes: Axes) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield the overrides of the strategy, and of offloading, for a number of workers."""
    offloads = axes.values.get(OFFLOAD, ())
    if STRATEGY not in axes.values:
        yield from (((), (text,) if text else ()) for text in _values(OFFLOAD, axes))
        return
    for name in axes.values[STRATEGY]:
        axis = {"fsdp": SHARDING, "deepspeed": STAGE}.get(name)
        if axis is None:
            if size.workers == 1 or name != "single":
                skipped = name == "ddp" and size.workers == 1 and len(axes.values[STRATEGY]) > 1
                yield from [] if skipped else [((f"{STRATEGY}={name}",), ())]
            continue
        values = axes.values.get(axis, ())
        for value in values or ("",):
            if value == "hybrid_shard" and size.nodes == 1 and len(values) > 1:
                continue
            strategy = f"{axis}={value}" if value else f"{STRATEGY}={name}"
            for offload in offloads or ("",):
                # On one worker nothing is sharded, so only offloading makes a difference to ``single``.
                if offload == "false" and size.workers == 1 and "single" in axes.values[STRATEGY]:
                    continue
                if offload == "true" and len(values) > 1 and value not in WITH_OFFLOAD:
                    continue
                yield (strategy,), (f"{OFFLOAD}={offload}",) if offload else ()


def _applies(key: str, strategy: Sequence[str]) -> bool:
    """Return whether a key is for a strategy. The keys of a strategy's section are for that one only."""
    section = key.partition(".")[0]
    owners = {"ddp": f"{STRATEGY}=ddp", "fsdp": SHARDING, "deepspeed": STAGE}
    return section not in owners or not strategy or any(text.startswith(owners[section]) for text in strategy)


def _cluster_overrides(base: Config, size: Size) -> list[str]:
    nodes = [] if size.nodes == base.cluster.nodes else [f"cluster.nodes={size.nodes}"]
    return [*nodes, f"cluster.workers_per_node={size.workers_per_node}"]


def _micro_batches(base: Config, size: Size, axes: Axes) -> list[int]:
    """Return the micro-batches of a number of workers: divisors of the samples of each worker and step."""
    if axes.micro_batches == ():
        return [base.train.micro_batch]
    if axes.micro_batches is not None:
        return sorted(set(axes.micro_batches))
    total = base.train.global_batch_size or 0
    if total % size.workers:
        return [1]  # invalid, with the reason
    whole = total // size.workers
    return [number for number in range(1, whole + 1) if whole % number == 0]


def _set_config(candidate: Candidate, cell: Cell) -> None:
    """Set the configuration of a candidate, or why it is invalid."""
    candidate.config = cell.config
    if cell.config is None:
        candidate.prune("invalid: " + " | ".join(cell.errors))


def _prune_duplicates(candidates: Sequence[Candidate]) -> None:
    """Prune each candidate whose configuration is that of an earlier one, as ``kernels=fast`` may be on a CPU."""
    seen: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.config is None:
            continue
        first = seen.setdefault(repr(replace(candidate.config, kernels=KernelsConfig())), candidate)
        if first is not candidate:
            candidate.prune(f"the same as {' '.join(first.overrides)}")
