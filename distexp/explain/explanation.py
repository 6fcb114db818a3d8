"""The bottleneck of a profiled step, and what would reduce it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, TrainConfig
from distexp.config.overrides import copyable_command, format_count, format_override, key_of, shell_quote
from distexp.exceptions import printable
from distexp.explain import step_profile
from distexp.explain.advice import advise, larger_global_batches
from distexp.measure.profiling.intervals import MIN_EPOCH_STEPS, ProfileWindow
from distexp.runs.metrics import PARTS
from distexp.runs.record import (
    RunRecord,
    config_dir_options,
    describe_no_training,
    no_readable_record,
    not_a_folder,
    read_records,
)
from distexp.runs.run_dir import COMMAND, command_path
from distexp.strategies.base import recorded_strategy
from distexp.strategies.parallel.checks import STAGES_PER_WORKER, bubble_share
from distexp.strategies.traits import Traits
from distexp.system.files import read_or_none
from distexp.system.typed_values import number_of, texts_of

MIN_SHARE = 0.1  # smallest share of a step that is called a bottleneck


@dataclass(frozen=True)
class Explanation:
    """The bottleneck of a step, and the overrides that would reduce it."""

    bottleneck: str  # name of the part; ``compute`` if no other part is large enough
    share: float  # fraction of the step
    sentence: str  # what the profile shows
    alternatives: list[str] = field(default_factory=list)  # Two overrides of one are separated by a space.
    larger_batch: list[str] = field(default_factory=list)  # those with a larger global batch: they change the training
    reasons: dict[str, str] = field(default_factory=dict)  # why each of them would help

    def to_json(self) -> dict[str, Any]:
        """Return ``metrics.explanation`` of the record, where the bottleneck is named ``loss``."""
        return {
            "loss": self.bottleneck,
            "share": self.share,
            "sentence": self.sentence,
            "try": list(self.alternatives),
            "larger_global_batch": list(self.larger_batch),
            "reasons": dict(self.reasons),
        }

    @classmethod
    def from_json(cls, raw: Any) -> Explanation | None:
        """Return ``metrics.explanation`` of a record; None if it has none, or a damaged one."""
        if not isinstance(raw, dict):
            return None
        bottleneck, share, sentence = raw.get("loss"), number_of(raw, "share"), raw.get("sentence")
        if not isinstance(bottleneck, str) or not isinstance(sentence, str) or share is None:
            return None
        stored = raw.get("reasons")
        reasons = {str(key): str(text) for key, text in stored.items()} if isinstance(stored, dict) else {}
        return cls(bottleneck, share, sentence, texts_of(raw, "try"), texts_of(raw, "larger_global_batch"), reasons)


def explain(record: RunRecord, strategy: Traits | None = None) -> Explanation | None:
    """Return the bottleneck of a run; None if it was not profiled. ``strategy`` is as in ``StepProfile.of``."""
    profile = step_profile.StepProfile.of(record, strategy)
    return None if profile is None else explain_profile(profile)


def explain_profile(profile: step_profile.StepProfile) -> Explanation:
    """Return the bottleneck of a profile."""
    shares = profile.shares()
    bottleneck, share = largest_overhead(shares)
    if share < MIN_SHARE:
        bottleneck, share = "compute", sum(shares[name] for name in step_profile.COMPUTE)
    advice = advise(bottleneck, profile)
    if bottleneck == "compute":
        sentence = describe_compute(share, shares)
        overhead, lost = largest_overhead(shares)
        advice += advise(overhead, profile) if lost >= NAMED_SHARE else []
    elif bottleneck == "waiting" and step_profile.are_others_ahead(profile):
        # The slowest rank is launch-bound, as the others are.
        bottleneck, share = "launch_idle", profile.slowest.time_ms("launch_idle") / profile.slowest.step_ms
        idle = _idle(f"the GPU of rank {profile.slowest.rank}", share, profile)
        text = f"{idle}. The other ranks are as slow, but ahead: their GPUs wait in collectives"
        sentence = _sentence(bottleneck, share, text, profile)
    else:
        sentence = _sentence(bottleneck, share, _description(bottleneck, share, profile), profile)
    text = " ".join(filter(None, (sentence, describe_bubble(profile), describe_missing_cores(profile))))
    reasons = dict(reversed(advice))  # If two give the same overrides, the first one has the reason.
    alternatives = list(dict.fromkeys(overrides for overrides, _ in advice))
    return Explanation(bottleneck, share, text, alternatives, larger_global_batches(profile, alternatives), reasons)


BOUND_SHARE = 0.3  # share from which a run is bound by its bottleneck
COMPUTE_BOUND_SHARE = 0.7  # share of kernels from which a run without a bottleneck is compute-bound
NAMED_SHARE = 0.05  # share from which the largest part other than the kernels is named in a compute-bound run
# Share of a step without cores from which the parts of a CPU are not those of the training alone.
NOTED_WAIT_FOR_CORES = 0.1
BOUND = {  # what a run is called if the part takes BOUND_SHARE of its steps
    "exposed_communication": "communication-bound",
    "waiting": "waiting for a slow rank",
    "launch_idle": "launch-bound",
    "data_wait": "data-bound",
    "optimizer": "optimizer-bound",
    "host": "bound by the CPU",
    "bubble": "bound by the bubble of the pipeline",
}

WORK_OF_PART = {  # what a slow rank spends its time on
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "launch_idle": "launching kernels",
    "data_wait": "waiting for its data",
    "optimizer": "the optimizer",
    "host": "work of its CPU",
}


def largest_overhead(shares: Mapping[str, float]) -> tuple[str, float]:
    """Return the largest part other than the kernels, and its share."""
    name = max(step_profile.OVERHEADS, key=lambda name: shares[name])
    return name, shares[name]


def describe_compute(share: float, shares: Mapping[str, float]) -> str:
    """Return what the kernels take, and the largest other parts: one if the run is compute-bound, else two."""
    kernels = f"matrix kernels take {shares['matmul']:.0%} and other kernels {shares['other_kernels']:.0%} of the step"
    names = sorted(step_profile.OVERHEADS, key=lambda name: -shares[name])[:2]
    first, second = (f"{PARTS[name]} {shares[name]:.1%}" for name in names)
    if share < COMPUTE_BOUND_SHARE:
        return f"No bottleneck: {kernels}, {first} and {second}."
    named = f" The largest other part is {first}." if shares[names[0]] >= NAMED_SHARE else ""
    return f"Compute-bound: {kernels}.{named}"


def scheduled_bubble(profile: step_profile.StepProfile) -> float | None:
    """Return the predicted share of the bubble of a pipeline; None without one."""
    workers, schedule = profile.number("parallel.pipeline", 1), profile.setting("parallel.schedule", "1f1b")
    if workers == 1 or schedule not in STAGES_PER_WORKER:
        return None
    return bubble_share(workers, schedule, profile.number("train.gradient_accumulation_steps", 1))


def describe_bubble(profile: step_profile.StepProfile) -> str:
    """Return the bubble of the schedule of a pipeline, and what the workers wait for each other; empty without one."""
    predicted, known = scheduled_bubble(profile), profile.collective_shares()
    if predicted is None:
        return ""
    workers, schedule = profile.number("parallel.pipeline", 1), profile.setting("parallel.schedule", "1f1b")
    micro_batches = profile.number("train.gradient_accumulation_steps", 1)
    between = sum(share for kind, share in known.items() if "send" in kind or "recv" in kind)
    waited = profile.shares()["exposed_communication"] * between / (sum(known.values()) or 1.0)
    measured = (
        f" Sending and receiving between stages, which includes the bubble, takes {waited:.0%}." if between else ""
    )
    if profile.ranks[0].parts["bubble"] is not None:
        measured = f" It was {profile.shares()['bubble']:.0%}, with the transfers."
    return (
        f"The bubble of parallel.schedule={schedule} with {workers} workers and {micro_batches} micro-batches is "
        f"{predicted:.0%} of the step, if all stages take equally long.{measured}"
    )


def describe_missing_cores(profile: step_profile.StepProfile) -> str:
    """Return that other programs or threads used the cores, if this is much of the step; empty if it is not."""
    share = profile.without_core_share
    if share is None or share < NOTED_WAIT_FOR_CORES:
        return ""
    return (
        f"For {share:.0%} of the step the ranks had to wait for a free CPU core. This waiting is part of every time in "
        "the table. Profile again when no other program runs."
    )


def _sentence(bottleneck: str, share: float, description: str, profile: step_profile.StepProfile) -> str:
    is_all = bottleneck == "host" and not profile.on_gpu  # All of the training is work of the CPU.
    text = f"{BOUND[bottleneck]}: {description}" if share >= BOUND_SHARE and not is_all else description
    return text[0].upper() + text[1:] + "."


def _description(bottleneck: str, share: float, profile: step_profile.StepProfile) -> str:
    """Return what a bottleneck is, without the period."""
    match bottleneck:
        case "launch_idle":
            return _idle("the GPU", share, profile)
        case "waiting":
            return _waiting(share, profile)
        case "exposed_communication":
            known = profile.collective_shares()
            largest = max(known, key=lambda kind: known[kind], default="")
            collective = f", most of it {largest}" if len(known) > 1 else f", in {largest}" if known else ""
            return f"communication that no computation hides takes {share:.0%} of the step{collective}"
        case "data_wait":
            loaders = profile.number("dataset.num_workers", 0)
            return f"the training waits for its data for {share:.0%} of the step, with dataset.num_workers={loaders}"
        case "optimizer" | "bubble":
            update, wait = (
                "clipping and the update of the weights take",
                "the stages of the pipeline wait for each other",
            )
            return f"{update if bottleneck == 'optimizer' else f'{wait} for'} {share:.0%} of the step"
        case _:
            part = f"{share:.0%} of the step"
            on_cpu = f"spends {part} outside of operators and collectives, for example in Python"
            return f"the CPU {f'does other work than launching kernels for {part}' if profile.on_gpu else on_cpu}"


def _idle(gpu: str, share: float, profile: step_profile.StepProfile) -> str:
    launches = max((rank.launches or 0.0) for rank in profile.ranks)
    steps = profile.number("train.gradient_accumulation_steps", 1)
    kernels = f"{round(launches / steps):,} kernels per micro-batch" if launches else "kernels"
    return f"{gpu} is idle for {share:.0%} of the step, because the CPU launches {kernels} too slowly"


def _waiting(share: float, profile: step_profile.StepProfile) -> str:
    if not step_profile.is_one_rank_slow(profile):
        return f"ranks wait for each other for {share:.0%} of the step, and no single rank is the cause"
    it = f"the ranks wait for rank {profile.slowest.rank} for {share:.0%} of the step, because it"
    if step_profile.had_no_core(profile):
        longer = f"{step_profile.without_core_excess_ms(profile):,.1f} ms longer"
        return f"{it} waited {longer} for a free CPU core than the others: other programs may have used it"
    work = WORK_OF_PART[step_profile.slow_part(profile).part]
    return f"{it} spends {step_profile.describe_excess(profile)} more than the others on {work}"


@dataclass(frozen=True)
class ProfiledRun:
    """A run with a profile."""

    directory: Path
    record: RunRecord
    profile: step_profile.StepProfile

    @property
    def explanation(self) -> Explanation:
        """Return the bottleneck. Code of a custom strategy is not imported here, so it is what the run has stored."""
        is_custom = recorded_strategy(self.record.config) is None
        stored = Explanation.from_json(self.record.metrics.explanation) if is_custom else None
        return stored or explain_profile(self.profile)

    @property
    def title(self) -> str:
        """Return directory and overrides, as they are typed."""
        # Records have no quotes of Hydra, so an apostrophe is part of a value. Earlier ones have True.
        shown = (text if "'" in text else format_override(text) for text in self.record.run.overrides)
        return f"{self.directory}: {' '.join(shown)}".removesuffix(": ")

    def to_json(self) -> dict[str, Any]:
        """Return the run for programs."""
        return {
            "run": str(self.directory),
            "overrides": self.record.run.overrides,
            "step_breakdown": self.record.metrics.step_breakdown,
            "explanation": self.explanation.to_json(),
        }


def read_profiled_run(directory: Path) -> ProfiledRun:
    """Return the only profiled run of a directory. Raise ConfigError if there are several, or none."""
    runs = read_profiled_runs(directory)
    if len(runs) > 1:
        raise ConfigError(f"{directory} has {len(runs)} profiled runs: give one of them, such as {runs[0].directory}")
    return runs[0]


def read_profiled_runs(directory: Path) -> list[ProfiledRun]:
    """Return the profiled runs of a run directory or a sweep. Raise ConfigError if there are none."""
    if not directory.is_dir():
        raise ConfigError(not_a_folder(directory))
    found = read_records(directory)
    if not found.stored:
        raise ConfigError(no_readable_record([directory], found.messages))
    for message in found.messages:
        print(f"skipped: {printable(message)}", file=sys.stderr)
    profiles = [(path.parent, record, step_profile.StepProfile.of(record)) for path, record in found.stored]
    runs = [ProfiledRun(where, record, profile) for where, record, profile in profiles if profile is not None]
    if not runs:
        raise ConfigError(_not_profiled(directory, found.records))
    return runs


def _not_profiled(directory: Path, records: Sequence[RunRecord]) -> str:
    record = next((record for record in records if record.status == "completed"), None)
    if record is None:
        return f"{directory} has no profile, because the run is {records[0].status}: give a completed run"
    if other := describe_no_training(record):
        return f"{directory} {other}"
    if note := (record.metrics.communication or {}).get("note"):  # A second run would have it too.
        return f"{directory} has no profile: {note}"
    arguments, cells = (read_or_none(directory / COMMAND, key) for key in ("words", "cells"))
    is_sweep = isinstance(cells, int) and cells > 1 and isinstance(arguments, list)
    sweep = [printable(text) for text in arguments if isinstance(text, str)] if is_sweep else []
    return f"{directory} has no profile: {profile_advice(directory, record, sweep)}"


def profile_advice(directory: Path, record: RunRecord, sweep: Sequence[str] = ()) -> str:
    """Return the command for a profile, with enough steps, or what else a training with short epochs needs."""
    per_epoch = record.metrics.steps_per_epoch
    if per_epoch and per_epoch < MIN_EPOCH_STEPS:
        return (
            f"its epochs have {format_count(per_epoch, 'step')}, and a profile needs {MIN_EPOCH_STEPS}: use more "
            "samples, or a smaller global batch, and add profile=true"
        )
    return f"run it with {_profile_command(directory, record, sweep)}"


def _profile_command(directory: Path, record: RunRecord, sweep: Sequence[str]) -> str:
    """Return the command that repeats a run, or the arguments of its sweep, with a profile and enough steps for it."""
    longer = [*_longer_training(record)]
    replaced = {"profile", "train.profile_steps", "sweep.resume", *map(key_of, longer)}
    starts = ("hydra.sweep.", *(f"{key}=" for key in replaced))
    options = [text for text in sweep or record.run.overrides if not text.startswith(starts)]
    folders = [] if sweep else config_dir_options(directory)  # The arguments of a sweep have it.
    command = copyable_command([*options, *longer, "profile=true", *folders], may_sweep=bool(sweep))
    started = read_or_none(command_path(directory), "directory")  # The folder of relative paths.
    if not isinstance(started, str) or not os.path.isdir(started) or os.path.samefile(started, os.curdir):
        return command
    return f"cd {shell_quote(printable(started))} && {command}"


MAX_ADDED_STEPS = 20
"""Enough for a profile, with the steps that count in no speed."""


def _longer_training(record: RunRecord) -> Iterator[str]:
    """Yield the overrides for enough steps for a profile, if the recorded training has too few."""
    total, per_epoch, train = record.metrics.total_steps, record.metrics.steps_per_epoch, record.config.get("train")
    if not (total and per_epoch and train):
        return
    settings = TrainConfig(measure_after_step=train.get("measure_after_step") or 0, profile_steps=1)
    lengths = range(total, total + settings.measure_after_step + MAX_ADDED_STEPS)
    windows = ((steps, ProfileWindow.of(settings, total=steps, per_epoch=per_epoch, done=0)) for steps in lengths)
    needed = next((steps for steps, window in windows if window is not None), total)
    if needed > total and train.get("max_steps"):
        yield f"train.max_steps={needed}"
    if (epochs := -(-needed // per_epoch)) > train.get("num_epochs", epochs):
        yield f"train.num_epochs={epochs}"
