"""Candidates of a search with their trials and labels, the keys that vary, and the rules of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from pathlib import Path

from distexp.config import Config
from distexp.config.overrides import format_count, key_of
from distexp.plan.estimate import Estimate
from distexp.resolve.resources import launcher_traits
from distexp.runs.record_sections import Predicted
from distexp.statistics.noise import UsualErrors
from distexp.strategies.base import shipped_strategies, strategy_label
from distexp.strategies.parallel.checks import SCHEDULE, degrees
from distexp.system.units import MIB_PER_GIB

FAILED_ELSEWHERE = "failed in another trial"  # part of the reason of a candidate with a setting that failed
INVALID = "invalid: "  # start of the reason of a candidate whose settings contradict each other
OOM_GPU, OOM_HOST = "oom_gpu", "oom_host"


class Status(StrEnum):
    """Status of a candidate. After a search none is waiting."""

    WAITING = "waiting"
    PRUNED = "pruned"
    TRIED = "tried"
    FAILED = "failed"


class Objective(StrEnum):
    """A value of ``choose.objective``."""

    THROUGHPUT = "throughput"
    ENERGY = "energy"
    COST = "cost"
    MEMORY = "memory"


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What one or more trials measured. None: not measured."""

    samples_per_second: float | None = None  # throughput of all workers together
    step_s: float | None = None  # median time of a step
    peak_allocated_mib: float | None = None  # highest peak of any worker
    j_per_sample: float | None = None  # energy of a sample
    price_per_sample: float | None = None

    def value(self, objective: Objective) -> float | None:
        """Return the metric of an objective."""
        return {
            Objective.THROUGHPUT: self.samples_per_second,
            Objective.ENERGY: self.j_per_sample,
            Objective.COST: self.price_per_sample,
            Objective.MEMORY: self.peak_allocated_mib,
        }[objective]

    def minimized(self, objective: Objective) -> float | None:
        """Return what the objective minimizes: its metric, or the inverse of the throughput."""
        value = self.value(objective)
        if objective is Objective.THROUGHPUT:
            return 1 / value if value else None
        return value

    def dominates(self, other: Metrics) -> bool:
        """Return whether these values are nowhere worse than others, and somewhere better."""
        pairs = [(self.minimized(each), other.minimized(each)) for each in Objective]
        known = [(own, theirs) for own, theirs in pairs if own and theirs]
        return all(own <= theirs for own, theirs in known) and any(own < theirs for own, theirs in known)


@dataclass(frozen=True)
class Trial(Metrics):
    """One short run of a candidate."""

    steps: int  # number of measured steps
    status: str  # status of the run's record
    directory: Path | None = None  # run directory; None if there is none
    gpu_seconds: float = 0.0  # time of the trial, with its start, times the number of workers
    error: str = ""  # why it failed, in one line; empty if it did not
    disturbed: bool = False  # whether its repeat was so much better that this trial does not count
    dropout: float | None = None  # largest dropout rate of its model; None if it is unknown
    process_mib: float | None = None  # on CPUs, what the processes of a node needed in addition to tensors

    @property
    def ran_out_of_memory(self) -> bool:
        """Return whether the run ran out of memory."""
        return self.status in (OOM_GPU, OOM_HOST)

    def score(self, objective: Objective) -> float | None:
        """Return what the objective minimizes; None if it is unknown.

        Nothing needs no energy. If a short run has 0, its counter did not advance.
        """
        return self.minimized(objective) or None


@dataclass(eq=False)
class Candidate:
    """One configuration of a search. The search changes status, reason and trials in place."""

    overrides: tuple[str, ...]  # overrides besides those of the command
    family: tuple[str, ...]  # the overrides without that of the micro-batch
    micro_batch: int  # samples per worker and forward pass; 0 for an invalid candidate of which it is not known
    workers: int = 1  # number of workers
    config: Config | None = None  # resolved configuration; None for an invalid candidate
    estimate: Estimate | None = None  # of ``plan``; None if not predicted, or if it follows from another member
    predicted: Predicted | None = None  # prediction of its memory; None as for ``estimate``
    # Expected peak, perhaps interpolated; None if it is unknown. On a GPU it is that of the allocated memory, on CPUs
    # that of all processes of a node.
    expected_mib: float | None = None
    too_close: bool = False  # whether it may not fit, by the prediction. Then it is tried after the others.
    forecast_s: float | None = None  # forecast of the step time; None if it is unknown
    status: Status = Status.WAITING
    reason: str = ""  # why it is pruned or failed
    trials: tuple[Trial, ...] = field(default=())  # all of its trials, in order

    @property
    def is_waiting(self) -> bool:
        """Return whether the candidate may be tried."""
        return self.status is Status.WAITING

    @property
    def is_tried(self) -> bool:
        """Return whether a trial has measured the objective, or the losses."""
        return self.status is Status.TRIED

    @property
    def has_failed(self) -> bool:
        """Return whether its last trial failed, or did not measure the objective."""
        return self.status is Status.FAILED

    def prune(self, reason: str) -> None:
        """Remove the candidate from the search."""
        self.status, self.reason = Status.PRUNED, reason

    @property
    def on_cpus(self) -> bool:
        """Return whether its workers have no GPUs."""
        return self.config is not None and self.config.cluster.device == "cpu"

    @property
    def offloads(self) -> bool:
        """Return whether some of its states are in CPU memory."""
        return self.config is not None and self.config.offload.enabled

    @property
    def checkpoints(self) -> bool:
        """Return whether it computes activations again."""
        return self.config is not None and bool(self.config.train.activation_checkpointing)

    @property
    def queues(self) -> bool:
        """Return whether its trials wait in a queue, so that several may run at the same time."""
        return self.config is not None and launcher_traits(self.config).queues

    @property
    def completed(self) -> tuple[Trial, ...]:
        """Return the trials that completed, without disturbed ones."""
        return tuple(trial for trial in self.trials if trial.status == "completed" and not trial.disturbed)

    @property
    def ran_out_of_memory(self) -> bool:
        """Return whether a trial ran out of memory."""
        return any(trial.ran_out_of_memory for trial in self.trials)

    @property
    def ran_out_of_predicted_memory(self) -> bool:
        """Return whether a trial ran out of the memory that is predicted: that of a GPU, or on CPUs that of a node."""
        return any(trial.status == (OOM_HOST if self.on_cpus else OOM_GPU) for trial in self.trials)

    @property
    def required_mib(self) -> float | None:
        """Return the predicted MiB, of a GPU or on CPUs of a node; None if it was not predicted."""
        return None if self.predicted is None else self.predicted.required_mib

    @property
    def measured_steps(self) -> int:
        """Return the measured steps of all trials that completed."""
        return sum(trial.steps for trial in self.completed)

    @property
    def longest_steps(self) -> int:
        """Return the measured steps of the longest trial that completed; 0 without one."""
        return max((trial.steps for trial in self.completed), default=0)

    def score(self, objective: Objective) -> float | None:
        """Return the mean score of the completed trials, weighted by their steps; None without one."""
        known = self.scores(objective)
        return sum(score * steps for score, steps in known) / sum(steps for _, steps in known) if known else None

    def scores(self, objective: Objective) -> list[tuple[float, int]]:
        """Return the known scores of the completed trials, and their steps."""
        found = [(trial.score(objective), trial.steps) for trial in self.completed]
        return [(score, steps) for score, steps in found if score is not None]

    def known_score(self, objective: Objective) -> float:
        """Return the score of a candidate that has one."""
        score = self.score(objective)
        assert score is not None, "only candidates with a score are compared"
        return score

    @property
    def step_s(self) -> float | None:
        """Return the mean step time of the completed trials; None without one."""
        known = [trial.step_s for trial in self.completed if trial.step_s is not None]
        return sum(known) / len(known) if known else None

    def forecast(self, objective: Objective) -> float | None:
        """Return the forecast of a number in proportion to the score; None if it is unknown."""
        return self.expected_mib if objective is Objective.MEMORY else self._worker_time(self.forecast_s, objective)

    def measured_time(self, objective: Objective) -> float | None:
        """Return what ``forecast`` would be if it had no error, for an objective that is no memory."""
        return self._worker_time(self.step_s, objective)

    def _worker_time(self, step_s: float | None, objective: Objective) -> float | None:
        """Return a step time, for energy and cost that of all workers together."""
        return step_s if step_s is None or objective is Objective.THROUGHPUT else step_s * self.workers


def families_of(candidates: Iterable[Candidate]) -> dict[tuple[str, ...], list[Candidate]]:
    """Return the members of each family in the order of their micro-batches."""
    families: dict[tuple[str, ...], list[Candidate]] = {}
    for candidate in candidates:
        families.setdefault(candidate.family, []).append(candidate)
    return {family: sorted(members, key=attrgetter("micro_batch")) for family, members in families.items()}


MICRO_BATCH = "train.micro_batch_size"
CHECKPOINTING = "train.activation_checkpointing"
STRATEGY, OFFLOAD, KERNELS = "strategy", "offload", "kernels"

_WITH_OPTIONS = {name: kind for name, kind in shipped_strategies().items() if kind.option_group}

STRATEGY_OF = {kind.option_group: name for name, kind in _WITH_OPTIONS.items()}
"""The strategy that an override of an option group chooses: ``fsdp`` for ``sharding``."""

DEFAULT_VALUES: Mapping[str, tuple[str, ...]] = {
    STRATEGY: tuple(shipped_strategies()),
    **{kind.option_group: tuple(option.value for option in kind.options) for kind in _WITH_OPTIONS.values()},
    OFFLOAD: ("false", "true"),
    CHECKPOINTING: ("false", "true"),
    KERNELS: ("reference", "fast"),
}
"""Values of each axis, without the micro-batch, whose values are the divisors of a worker's samples."""

AXES = (*DEFAULT_VALUES, MICRO_BATCH)  # all keys that vary by default

GROUP_OF_KEY = {kind.option_key: kind.option_group for kind in _WITH_OPTIONS.values()} | {"offload.enabled": OFFLOAD}
"""The axis of a key that a config group sets. A user may type either."""


def strategy_in(overrides: Iterable[str]) -> str:
    """Return the name of the strategy that overrides choose, also by its option group; empty if they choose none."""
    for text in overrides:
        key, _, value = text.partition("=")
        if key == STRATEGY or key in STRATEGY_OF:
            return STRATEGY_OF.get(key, value)
    return ""


def override_pairs(candidate: Candidate) -> Iterator[tuple[str, str]]:
    """Yield the overrides as pairs of key and value. A sharding or a stage also names its strategy."""
    for override in candidate.overrides:
        key, _, value = override.partition("=")
        if key in STRATEGY_OF:
            yield STRATEGY, STRATEGY_OF[key]
        yield key, value


@dataclass(frozen=True)
class SearchRules(UsualErrors):
    """Numbers that decide how thorough a search is, and the usual errors of its forecasts."""

    steps: int = 5  # measured steps of a first trial
    growth: int = 2  # factor of the steps of a repeat, compared with those of a first trial
    wave: int = 1  # families after the first one that are tried before the forecasts are scaled again
    families: int = 4  # families whose neighbors are tried
    near: float = 0.25  # most that a family's score may exceed the best one if its neighbors are tried, relative to it
    neighbor_forecast: float = 0.15  # most that a larger neighbor's forecast may exceed the best score
    # The same if other families have measured its micro-batch. A smaller neighbor must be expected to be as good as the
    # best one.
    neighbor_certain: float = 0.05
    worthwhile: float = 0.05  # least gain for which a candidate is tried that probably does not fit
    neighbor_rounds: int = 4  # most rounds of neighbors
    repeats: int = 12  # Most rounds of repeats. A round repeats one or two candidates.
    negligible: float = 0.04  # gain of a rival, at the end of the 95 % confidence interval, below which repeats end
    usual_noise: float = 0.02  # standard deviation of the score of a first trial on a quiet GPU, relative to it
    usual_trials: int = 3  # weight of the usual noise: degrees of freedom that it has next to the repeated trials
    checkpointing_pair: float = 0.2  # most excess of a forecast, if the family was tried with or without checkpointing
    # Least expected improvement for which a family is tried, relative to the best score. Jones et al., Efficient Global
    # Optimization of Expensive Black-Box Functions, 1998, end at 1 % too.
    least_gain: float = 0.01
    # The same, for a trial of all candidates together: in a large space, each of them costs a smaller part of an
    # exhaustive sweep, so a smaller improvement is worth it.
    gain_of_sweep: float = 0.25
    contradiction: float = 4.0  # factor by which a first trial must be worse than its scaled forecast to be repeated
    disturbed: float = 2.0  # factor by which it must then be worse than its repeat to be left out of the mean


DEFAULT_RULES = SearchRules()

SLURM_WAVE = 4  # families that are tried together on Slurm: trials run at the same time, and may wait in a queue
CPU_ERROR, CPU_ERROR_TRIALS = 0.4, 2
"""Usual error of the forecasts on CPUs, and its weight. Their scale is unknown: they are for a GPU."""


def rules_for(*, on_cpus: bool = False, on_slurm: bool = False) -> SearchRules:
    """Return the rules of a search on CPUs or GPUs, on Slurm or on this machine."""
    rules = replace(DEFAULT_RULES, wave=SLURM_WAVE) if on_slurm else DEFAULT_RULES
    if not on_cpus:
        return rules
    return replace(rules, usual_error=CPU_ERROR, usual_error_trials=CPU_ERROR_TRIALS, usual_scale_trials=0)


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
    if config is None:
        return " ".join(candidate.overrides)
    train = config.train
    parts = [f"{strategy_label(config)} {train.micro_batch_size}x{train.gradient_accumulation_steps}", *_shared(config)]
    if config.kernels.name != "reference":
        parts.append(config.kernels.name)
    if checkpointing := train.activation_checkpointing:
        parts.append("checkpointing" if checkpointing is True else f"{checkpointing} checkpointing")
    return ", ".join([*parts, *_added(candidate)])


def _added(candidate: Candidate) -> list[str]:
    return [text for text in candidate.overrides if key_of(text) not in LABELED and not text.startswith("parallel.")]


def _shared(config: Config) -> Iterator[str]:
    """Yield the degrees in which workers share the model, as they are typed."""
    yield from (typed for typed, _ in degrees(config))
    if config.parallel.schedule:
        yield f"{SCHEDULE}={config.parallel.schedule}"


def config_label(config: Config) -> str:
    """Return the label of a configuration, without what is the default."""
    train, world = config.train, config.cluster.world_size
    micro_batches = f"micro-batch {train.micro_batch_size} x {train.gradient_accumulation_steps}"
    parts = [strategy_label(config), *_shared(config), micro_batches]
    if config.kernels.name != "reference":
        parts.append(f"kernels={config.kernels.name}")
    if checkpointing := train.activation_checkpointing:
        parts.append("checkpointing" if checkpointing is True else f"{checkpointing} checkpointing")
    if world > 1:
        parts.append(format_count(world, "worker"))
    return ", ".join(parts)


def format_gib(mib: float | None) -> str:
    """Return a memory size in GiB; a dash if it is unknown."""
    return "-" if mib is None else f"{mib / MIB_PER_GIB:,.1f} GiB"


def format_share(share: float) -> str:
    """Return a share in percent, with a decimal if it is small."""
    percent = 100 * share
    return f"{percent:.1f} %" if abs(percent) < 10 else f"{percent:.0f} %"
