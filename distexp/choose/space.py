"""The candidates of a search: all combinations of strategy, micro-batch, checkpointing and kernels."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd

from distexp.choose.axes import Axes
from distexp.choose.axis_keys import (
    CHECKPOINTING,
    DEFAULT_VALUES,
    KERNELS,
    MICRO_BATCH,
    OFFLOAD,
    STRATEGY,
    STRATEGY_OF,
    strategy_in,
)
from distexp.choose.candidate import Candidate
from distexp.choose.cluster_sizes import ClusterSize, cluster_sizes
from distexp.choose.command_overrides import with_overrides
from distexp.choose.strategy_choices import Kinds, StrategyChoice, strategy_choices
from distexp.config import Config, ConfigError, KernelsConfig
from distexp.config.batch_sizes import depends_on_micro_batch, divisors
from distexp.config.override_text import key_of
from distexp.console.progress import show_progress
from distexp.launch.cell import Cell, MakeCell
from distexp.launch.parallel_composition import compose_all
from distexp.plan.cells import replace_overrides
from distexp.resolve.accumulation import multiples_near
from distexp.runs.failure_text import join_errors
from distexp.strategies.base import recorded_strategy, shipped_strategies
from distexp.strategies.step_traits import StepTraits


def make_space(make: MakeCell, command: Sequence[str], gpus: Sequence[int], axes: Axes) -> list[Candidate]:
    """Return all candidates for one training. Those that are invalid are pruned, with the reason.

    Args:
        make: Composes a cell.
        command: Overrides of the command's cell. They set the global batch.
        gpus: Numbers of workers, over all nodes; empty for that of the command.
        axes: What to vary.

    Raises:
        ConfigError: the command has no global batch size, or a number of GPUs is impossible, or no number of workers
            can share the global batch.
    """
    base = base_config(make, command)
    if base.train.global_batch_size is None:
        raise ConfigError(
            "distexp choose compares configurations of the same training, so it needs the samples of an optimizer step:"
            f" set train.global_batch_size, for example to {16 * base.cluster.world_size}"
        )
    if (kept := kept_micro_batch(base, gpus, axes)) is not None:
        axes = replace(axes, micro_batches=(kept,))
    typed = {key_of(text) for text in command}
    sizes, kinds = cluster_sizes(base, gpus), _kinds(make, command, axes)
    _check_global_batch(base.train.global_batch_size, sizes)
    candidates = [candidate for size in sizes for candidate in _combinations(base, size, axes, typed, kinds)]
    if not candidates:
        raise ConfigError("no configuration is left to try: strategy=single needs choose.gpus=1, or vary more keys")
    overrides = [with_overrides(command, candidate.overrides) for candidate in candidates]
    with show_progress("composing", len(overrides)) as advance:
        for candidate, cell in zip(candidates, compose_all(make, overrides), strict=True):
            _set_config(candidate, cell)
            advance()
    _prune_duplicates(candidates)
    return candidates


def kept_micro_batch(base: Config, gpus: Sequence[int], axes: Axes) -> int | None:
    """Return the one micro-batch of all candidates, because another one is another training; None if it varies.

    It is the largest one that all numbers of workers can have, and not above that of the configuration. A typed one is
    kept anyway.
    """
    samples = base.train.global_batch_size
    if (
        samples is None
        or not depends_on_micro_batch(base)
        or axes.is_micro_batch_named
        or axes.micro_batches is not None
    ):
        return None
    counts = {size.workers for size in cluster_sizes(base, gpus)}
    common = gcd(*(samples // workers for workers in counts if samples % workers == 0))
    return max(divisors(common, base.train.micro_batch))


def _check_global_batch(samples: int, sizes: Sequence[ClusterSize]) -> None:
    """Check that some number of workers can share the samples of a step.

    Raises:
        ConfigError: none can.
    """
    counts = sorted({size.workers for size in sizes})
    if all(samples % workers for workers in counts):
        raise ConfigError(
            f"train.global_batch_size={samples} is no multiple of {' or '.join(map(str, counts))} workers: use "
            f"{multiples_near(samples, counts[0])}, or other numbers of workers (choose.gpus)"
        )


def base_config(make: MakeCell, command: Sequence[str]) -> Config:
    """Return the configuration of the command with all of its workers. Its batch sizes may not fit.

    Raises:
        ConfigError: the command is invalid for another reason than its strategy or sizes.
    """
    cell = make(command if _limits_workers(command) else replace_overrides(command, [_probe()]))
    config = cell.config or cell.decided
    if config is None or config.cluster.workers_per_node is None:
        raise ConfigError(cell.errors)
    return config


def _limits_workers(command: Sequence[str]) -> bool:
    """Return whether the strategy of a command decides the size of the cluster, or the command has an option of it."""
    is_set = any(text.startswith(tuple(f"{group}=" for group in STRATEGY_OF)) for text in command)
    return is_set or any(
        f"{STRATEGY}={name}" in command for name, kind in shipped_strategies().items() if kind.max_workers
    )


def _probe() -> str:
    """Return the simplest strategy for which the size of the cluster can be read: one for any number of workers."""
    return next(f"{STRATEGY}={name}" for name, kind in shipped_strategies().items() if kind.max_workers is None)


def _kinds(make: MakeCell, command: Sequence[str], axes: Axes) -> Kinds:
    """Return the classes of all strategies, also of custom ones that vary. One that is not trusted states nothing."""
    found: dict[str, type[StepTraits]] = dict(shipped_strategies())
    for name in axes.values.get(STRATEGY, ()):
        if name not in found:
            cell = make(replace_overrides(command, [f"{STRATEGY}={name}"]))
            config = cell.config or cell.decided  # Its batch sizes may not fit.
            strategy = None if config is None else recorded_strategy(config, config.trusted_packages)
            found[name] = StepTraits if strategy is None else type(strategy)
    return found


def _combinations(
    base: Config, size: ClusterSize, axes: Axes, typed: Container[str], kinds: Kinds
) -> Iterator[Candidate]:
    """Yield the candidates on a part of the cluster, without their configurations.

    Args:
        base: Configuration of the command with all of its workers.
        size: The part of the cluster.
        axes: What to vary.
        typed: Keys that the command sets. Defaults of other keys are left out of the overrides.
        kinds: Classes of the strategies.
    """
    for choice in strategy_choices(size, axes, kinds):
        further = [
            [f"{key}={value}" for value in values] for key, values in axes.further.items() if _applies(key, choice)
        ]
        for others in product(axes.overrides_of(CHECKPOINTING), axes.overrides_of(KERNELS), *further):
            overrides = (choice.strategy, choice.offload, *others, *_cluster_overrides(base, size))
            family = tuple(text for text in overrides if text and not _is_default(text, typed))
            for micro_batch in _micro_batches(base, size, axes):
                yield Candidate((*family, f"{MICRO_BATCH}={micro_batch}"), family, micro_batch, size.workers)


def _is_default(override: str, typed: Container[str]) -> bool:
    """Return whether an override sets the default of an axis, and the command does not set another value."""
    key, _, value = override.partition("=")
    return key in (OFFLOAD, CHECKPOINTING, KERNELS) and value == DEFAULT_VALUES[key][0] and key not in typed


def _applies(key: str, choice: StrategyChoice) -> bool:
    """Return whether a key is for a strategy. The keys of a strategy's section are for that one only."""
    section = key.partition(".")[0]
    owners = {kind.section: name for name, kind in shipped_strategies().items() if kind.section}
    return section not in owners or not choice.strategy or strategy_in([choice.strategy]) == owners[section]


def _cluster_overrides(base: Config, size: ClusterSize) -> list[str]:
    nodes = [] if size.nodes == base.cluster.nodes else [f"cluster.nodes={size.nodes}"]
    return [*nodes, f"cluster.workers_per_node={size.workers_per_node}"]


def _micro_batches(base: Config, size: ClusterSize, axes: Axes) -> list[int]:
    """Return the micro-batches of a number of workers: divisors of the samples of each worker and step."""
    if axes.micro_batches == ():
        return [base.train.micro_batch]
    if axes.micro_batches is not None:
        return sorted(set(axes.micro_batches))
    total = base.train.global_batch_size or 0
    if total % size.workers:
        return [1]  # invalid, with the reason
    return divisors(total // size.workers)


def _set_config(candidate: Candidate, cell: Cell) -> None:
    """Set the configuration of a candidate, or why it is invalid."""
    candidate.config = cell.config
    if cell.config is None:
        candidate.prune("invalid: " + join_errors(cell.errors))


def _prune_duplicates(candidates: Sequence[Candidate]) -> None:
    """Prune each candidate whose configuration is that of an earlier one, as ``kernels=fast`` may be on a CPU."""
    seen: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.config is None:
            continue
        first = seen.setdefault(repr(replace(candidate.config, kernels=KernelsConfig())), candidate)
        if first is not candidate:
            candidate.prune(f"the same as {' '.join(first.overrides)}")
