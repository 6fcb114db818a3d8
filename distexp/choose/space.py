"""The candidates of a search: all combinations of the axes, and the settings of the command that starts it."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import gcd

from omegaconf import DictConfig, OmegaConf

from distexp.choose.axes import Axes, ClusterSize, Kinds, cluster_sizes, strategy_choices
from distexp.choose.candidate import (
    CHECKPOINTING,
    DEFAULT_VALUES,
    GROUP_OF_KEY,
    INVALID,
    KERNELS,
    MICRO_BATCH,
    OFFLOAD,
    STRATEGY,
    STRATEGY_OF,
    Candidate,
    Objective,
    strategy_in,
)
from distexp.compose.composition import Cell, MakeCell, compose_all
from distexp.config import Config, ConfigError, KernelsConfig, model_checks
from distexp.config.keys import config_groups
from distexp.config.overrides import MAX_CELLS, key_of, quote_choice, sets_key
from distexp.config.sections import ChooseConfig, ParallelConfig
from distexp.measure.run_energy import POWERCAP, can_read_energy
from distexp.plan.plan_table import replace_overrides
from distexp.resolve import resources, scaling_rules
from distexp.runs.texts import join_errors
from distexp.strategies.base import recorded_strategy, shipped_strategies
from distexp.strategies.parallel.checks import DEGREES, SCHEDULE, SHARED_ROWS
from distexp.strategies.single import REFERENCE
from distexp.strategies.traits import Traits
from distexp.tables.columns import show_progress


def make_space(make: MakeCell, command: Sequence[str], gpus: Sequence[int], axes: Axes) -> list[Candidate]:
    """Return all candidates for one training. Those that are invalid are pruned, with the reason.

    Raise a ConfigError without a global batch size, if the numbers of GPUs are impossible or cannot share the batch, or
    if all candidates are invalid for the same reason.
    """
    base = base_config(make, command)
    if base.train.global_batch_size is None:
        raise ConfigError(
            "distexp choose compares configurations of the same training, so it needs the samples of an optimizer step:"
            f" set train.global_batch_size, for example to {16 * base.data_parallel}"
        )
    if (kept := kept_micro_batch(base, gpus, axes)) is not None:
        axes = replace(axes, micro_batches=(kept,))
    typed = {key_of(text) for text in command}
    sizes, kinds = cluster_sizes(base, gpus), _kinds(make, command, axes)
    samples, counts = base.train.global_batch_size, sorted({size.workers for size in sizes})
    varied = [f"{key}={value}" for key in SHARED_ROWS for value in axes.further.get(key, ())]
    if all(samples % _groups(base, workers, [text]) for workers in counts for text in ("", *varied)):
        raise ConfigError(
            f"train.global_batch_size={samples} is no multiple of {' or '.join(map(str, counts))} workers: use "
            f"{scaling_rules.multiples_near(samples, counts[0])}, or other numbers of workers (choose.gpus)"
        )
    combinations = (candidate for size in sizes for candidate in _combinations(base, size, axes, typed, kinds))
    candidates = list(islice(combinations, MAX_CELLS + 1))
    if len(candidates) > MAX_CELLS:
        raise ConfigError(f"choose.space makes more than {MAX_CELLS:,} candidates: name fewer values")
    if not candidates:
        raise ConfigError("no configuration is left to try: strategy=single needs choose.gpus=1, or vary more keys")
    overrides = [with_overrides(command, candidate.overrides) for candidate in candidates]
    errors = []
    with show_progress("composing", len(overrides)) as advance:
        for candidate, cell in zip(candidates, compose_all(make, overrides), strict=True):
            candidate.config = cell.config
            if cell.config is None:
                candidate.prune(INVALID + join_errors(cell.errors))
            errors.append([] if cell.config is not None else cell.errors)
            advance()
    if shared := [error for error in errors[0] if all(error in found for found in errors)]:
        raise ConfigError(shared)
    _prune_duplicates(candidates)
    return candidates


def kept_micro_batch(base: Config, gpus: Sequence[int], axes: Axes) -> int | None:
    """Return the one micro-batch of all candidates, because another one is another training; None if it varies.

    It is the largest one that all numbers of workers can have, and not above that of the configuration. A typed one is
    kept anyway.
    """
    samples, is_chosen = base.train.global_batch_size, axes.is_micro_batch_named or axes.micro_batches is not None
    if samples is None or is_chosen or not model_checks.depends_on_micro_batch(base):
        return None
    counts = {size.workers for size in cluster_sizes(base, gpus)}
    common = gcd(*(samples // workers for workers in counts if samples % workers == 0))
    # No number of workers may divide the samples, which is an error later.
    return max(model_checks.divisors(common, base.train.micro_batch)) if common else None


def base_config(make: MakeCell, command: Sequence[str]) -> Config:
    """Return the configuration of the command with all workers, even if its batch sizes do not fit."""
    kinds = shipped_strategies()
    limiting = [f"{STRATEGY}={name}" for name, kind in kinds.items() if kind.max_workers is not None]
    # The strategy of the command may decide the size of the cluster. Otherwise it is read with the simplest one that
    # runs on any number of workers.
    limits = any(text in limiting or text.startswith(tuple(f"{group}=" for group in STRATEGY_OF)) for text in command)
    probe = next(f"{STRATEGY}={name}" for name in kinds if f"{STRATEGY}={name}" not in limiting)
    cell = make(command if limits else replace_overrides(command, [probe]))
    config = cell.config or cell.decided
    if config is None or config.cluster.workers_per_node is None:
        raise ConfigError(cell.errors)
    return config


def _kinds(make: MakeCell, command: Sequence[str], axes: Axes) -> Kinds:
    """Return the classes of all strategies, also of custom ones that vary. One that is not trusted states nothing."""
    found: dict[str, type[Traits]] = dict(shipped_strategies())
    for name in axes.values.get(STRATEGY, ()):
        if name not in found:
            cell = make(replace_overrides(command, [f"{STRATEGY}={name}"]))
            config = cell.config or cell.decided  # Its batch sizes may not fit.
            strategy = None if config is None else recorded_strategy(config, config.trusted_packages)
            found[name] = Traits if strategy is None else type(strategy)
    return found


def _combinations(
    base: Config, size: ClusterSize, axes: Axes, typed: Container[str], kinds: Kinds
) -> Iterator[Candidate]:
    """Yield the candidates on a part of the cluster, without their configurations."""
    nodes = [] if size.nodes == base.cluster.nodes else [f"cluster.nodes={size.nodes}"]
    cluster = (*nodes, f"cluster.workers_per_node={size.workers_per_node}")
    # Defaults are left out of the overrides, unless the command sets another value.
    defaults = {f"{key}={DEFAULT_VALUES[key][0]}" for key in (OFFLOAD, CHECKPOINTING, KERNELS) if key not in typed}
    defaults |= {f"{key}=1" for key in DEGREES if key not in typed}
    owners = {kind.section: name for name, kind in shipped_strategies().items() if kind.section}
    for strategy, offload in strategy_choices(size, axes, kinds):
        chosen = strategy_in([strategy])
        further = [
            [f"{key}={value}" for value in values]
            for key, values in axes.further.items()
            # The keys of a strategy's section are for that one only.
            if not strategy or owners.get(key.partition(".")[0], chosen) == chosen
        ]
        families = []
        for others in product(axes.overrides_of(CHECKPOINTING), axes.overrides_of(KERNELS), *further):
            overrides = (strategy, offload, *others, *cluster)
            family = tuple(text for text in overrides if text and text not in defaults)
            if _shared(base, family).pipeline == 1:  # Without a pipeline, the micro-batches have one order only.
                family = tuple(text for text in family if not text.startswith(f"{SCHEDULE}="))
            families.append(family)
        for family in dict.fromkeys(families):
            for micro_batch in _micro_batches(base, _groups(base, size.workers, family), axes):
                yield Candidate((*family, f"{MICRO_BATCH}={micro_batch}"), family, micro_batch, size.workers)


def _shared(base: Config, overrides: Sequence[str]) -> ParallelConfig:
    """Return the degrees of a candidate. One that is no number keeps that of the command, and is an error later."""
    typed = dict(text.split("=", 1) for text in overrides if text.startswith("parallel."))
    shared = replace(base.parallel)
    for key, value in typed.items():
        if value.isdecimal() and int(value):
            setattr(shared, key.partition(".")[2], int(value))
    return shared


def _groups(base: Config, workers: int, overrides: Sequence[str]) -> int:
    """Return how many groups of workers have their own rows, by the degrees of a candidate."""
    return max(1, workers // _shared(base, overrides).copies)


def _micro_batches(base: Config, groups: int, axes: Axes) -> list[int]:
    """Return the micro-batches of a number of groups with their own rows: divisors of the samples of each and step."""
    if axes.micro_batches == ():
        return [base.train.micro_batch]
    if axes.micro_batches is not None:
        return sorted(set(axes.micro_batches))
    total = base.train.global_batch_size or 0
    if total % groups:
        return [1]  # invalid, with the reason
    return model_checks.divisors(total // groups)


def _prune_duplicates(candidates: Sequence[Candidate]) -> None:
    """Prune each candidate whose configuration is that of an earlier one, as ``kernels=fast`` may be on a CPU."""
    seen: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.config is None:
            continue
        first = seen.setdefault(repr(replace(candidate.config, kernels=KernelsConfig())), candidate)
        if first is not candidate:
            candidate.prune(f"the same as {' '.join(first.overrides)}")


SHARDED_KEYS = (*(f"{key}=" for key in (*STRATEGY_OF, *GROUP_OF_KEY)), "offload.", "parallel.")
"""Overrides of a command that contradict the reference."""


def with_overrides(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, with those of a candidate in their place."""
    return replace_overrides(command, [quote_choice(text, config_groups()) for text in overrides])


def without_other_strategy(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, without those that contradict the reference if others choose it."""
    if REFERENCE[0] not in overrides:
        return list(command)
    return [text for text in command if not text.startswith(SHARDED_KEYS)]


BATCH = "train.global_batch_size"
ACCUMULATION = "train.gradient_accumulation_steps"


@dataclass(frozen=True)
class Settings:
    """The section ``choose``, the command without the overrides of the search, and notes for the user."""

    section: ChooseConfig
    command: list[str]
    notes: list[str]
    options: list[str] = field(default_factory=list)  # of Hydra, as --config-dir

    @property
    def objective(self) -> Objective:
        """Return the objective."""
        return Objective(self.section.objective)

    @property
    def as_json(self) -> bool:
        """Return whether stdout gets JSON only."""
        return self.section.output == "json"

    def budget_gpu_s(self, workers: int) -> float:
        """Return the GPU time of the trials."""
        return 60.0 * self.section.budget_min * workers


def read_settings(cells: Sequence[Cell], master: DictConfig) -> Settings:
    """Return the settings of a command. Raise a ConfigError if it has several cells, or settings that are wrong."""
    if len(cells) != 1:
        raise ConfigError(
            f"distexp choose is for one training, and these arguments have {len(cells)} cells: leave out presets with "
            "a sweep, swept values and repeats. To try several values of a key, use choose.space"
        )
    cell = cells[0]
    section = OmegaConf.to_object(cell.composed.choose)
    assert isinstance(section, ChooseConfig)
    config = cell.config or cell.decided
    if error := "" if config is None else _unmeasured_on_cpus(section, config):
        raise ConfigError(error)
    if errors := _errors(section, cell, master):
        raise ConfigError(errors)
    command = [text for text in cell.overrides if not text.startswith(("choose.", "hydra.", "sweep."))]
    plan = cell.composed.plan
    if section.dry_run and (plan.gpu is not None or plan.gpu_memory_gb is not None):
        command.append("choose.dry_run=true")  # Without it, this machine must have as many GPUs.
    settings = Settings(section, command, []) if config is None else _with_fixed_batch(section, command, config)
    return replace(settings, options=cell.config_dir_options)


def _unmeasured_on_cpus(section: ChooseConfig, config: Config) -> str:
    """Return why no run on the CPUs of this machine has the metric of the objective; empty if it may have it."""
    if config.cluster.device != "cpu":
        return ""
    if section.objective == Objective.COST:
        return "choose.objective=cost needs GPUs, because a run on CPUs has no price: use throughput"
    if section.objective == Objective.ENERGY and resources.launcher_traits(config).runs_here and not can_read_energy():
        return f"choose.objective=energy: the energy of these CPUs cannot be read (RAPL, {POWERCAP}): use throughput"
    return ""


def _with_fixed_batch(section: ChooseConfig, command: list[str], config: Config) -> Settings:
    notes, batch = [], config.train.global_batch_size
    if sets_key(command, ACCUMULATION) and batch is not None:
        raise ConfigError(
            f"{ACCUMULATION} has no effect: {BATCH}={batch} and each micro-batch set the accumulation: leave it out"
        )
    if not sets_key(command, BATCH) and config.train.global_batch_size is None:
        train = config.train
        if isinstance(train.micro_batch_size, str):  # The workers would search it.
            raise ConfigError(f"distexp choose needs the samples of an optimizer step: set {BATCH}=64, for example")
        samples = train.micro_batch_size * train.gradient_accumulation_steps * config.data_parallel
        command = [*(text for text in command if not sets_key([text], ACCUMULATION)), f"{BATCH}={samples}"]
        notes.append(f"the global batch is {samples} samples, from these arguments: set {BATCH} for another one")
    if config.scale.name != "full":
        # Limits of a scale would give candidates with other micro-batches another global batch.
        command = [text for text in command if not any(sets_key([text], key) for key in model_checks.BATCH_LIMITS)]
        kept = [] if sets_key(command, BATCH) else [f"{BATCH}={batch}"]
        command += [*kept, *(f"{key}=null" for key in model_checks.BATCH_LIMITS)]
    return Settings(section, command, notes)


def _errors(section: ChooseConfig, cell: Cell, master: DictConfig) -> list[str]:
    """Return the errors of the section ``choose``, and of settings that a search does not support."""
    # A search ignores other errors, because a candidate may be valid.
    found = [error for error in cell.errors if error.startswith("choose.")]
    if found:
        return found
    sweep = OmegaConf.to_container(master.hydra.sweep)
    if isinstance(sweep, dict) and sweep["subdir"] == ".":
        found.append("hydra.run.dir is for a single run, and choose starts several: use hydra.sweep.dir")
    cluster = cell.composed.cluster
    if section.objective == Objective.COST and not cluster.price_per_gpu_hour:
        found.append("choose.objective=cost needs a price: set cluster.price_per_gpu_hour=2.5, for example")
    if not cluster.wait:
        found.append("cluster.wait=false: choose decides by the results of its trials, so it waits: leave it out")
    if cluster.dry_run:
        found.append("cluster.dry_run=true prints sbatch files: use choose.dry_run=true")
    return found
