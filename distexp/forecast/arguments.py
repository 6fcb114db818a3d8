"""The command line of a forecast: that of the profiled run, with other sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from distexp.cli.argument_checks import short_key_errors
from distexp.cli.overrides import parse
from distexp.config import ConfigError
from distexp.config.override_text import key_of, value_of
from distexp.forecast.profiled_run import ProfiledRun
from distexp.forecast.sizes import SIZE_KEYS, as_cell, choose_sizes
from distexp.guard.sweep_files import check_stored_command
from distexp.runs.run_dir import RECORD
from distexp.system.hardware import visible_gpus
from distexp.system.units import MIB_PER_GB

KEPT_SECTIONS = ("cluster", "scaling", "forecast", "plan", "choose")
"""Sections and groups that do not change what a worker computes in a micro-batch.

``choose`` has no effect, which the command line then reports.
"""

KEPT_KEYS = (
    *("train.global_batch_size", "train.gradient_accumulation_steps", "dataset.train_size"),
    "trusted_packages",
)
"""Further keys that the user may set."""

NOT_REPEATED = ("profile", "repeats", "tracker", "preflight", "plan", "forecast", "choose", "sweep", "hydra")
"""Keys, groups and sections of the profiled run that a forecast does not need."""

NOT_REPEATED_KEYS = ("train.profile_steps", "train.resume", "train.micro_batch_search_s", "scale.workers")


def forecast_arguments(run: ProfiledRun, typed: Sequence[str], *, as_json: bool) -> list[str]:
    """Return the arguments with which the sizes of a forecast are composed.

    Args:
        run: The profiled run.
        typed: Overrides that the user has typed.
        as_json: Whether the output is JSON.

    Raises:
        ConfigError: an override changes what the workers compute, or another user's run may run code.
    """
    errors = list(short_key_errors(typed)) or [_refused(run, text) for text in typed if not _may_be_set(run, text)]
    if errors:
        raise ConfigError(errors)
    _check_sweeps(typed)
    stored = run.record.run.overrides
    if not run.is_own:
        check_stored_command(run.directory / RECORD, stored, typed)
    fixed, added = list(_fixed_values(run, typed)), [text for text in typed if key_of(text) not in SIZE_KEYS]
    fixed += _replaced_size(typed)
    replaced = {*NOT_REPEATED_KEYS, *map(key_of, [*fixed, *added])}
    kept = [text for text in stored if key_of(text) not in replaced and _section(text) not in NOT_REPEATED]
    cells = json.dumps([as_cell(size) for size in choose_sizes(run, typed)], separators=(",", ":"))
    output = ["plan.output=json", "forecast.output=json"] if as_json else []
    return [
        *kept, *fixed, *map(_absolute, added), *output, f"sweep.cells={cells}",
        f'forecast.run="{run.directory}"',
    ]  # fmt: skip


def _fixed_values(run: ProfiledRun, typed: Sequence[str]) -> Iterator[str]:
    """Yield the values that the profiled run found on its machine, and those that would restrict other sizes."""
    yield _device(run)
    if not isinstance(run.setting("train", "micro_batch_size"), int) and run.micro_batch_size is not None:
        yield f"train.micro_batch_size={run.micro_batch_size}"
    yield "scale.workers=null"
    yield "repeats=1"
    # A preset may sweep the sizes. Values on the command line replace its sweep.
    yield from as_cell(run.size)
    memory_mib = run.record.environment.gpu_total_mib if run.record.environment else None
    predicts = not any(key_of(text) == "forecast.memory" and value_of(text) == "off" for text in typed)
    is_set = any(key_of(text) in ("plan.gpu", "plan.gpu_memory_gb") for text in typed)
    if predicts and not is_set and run.on_gpu and memory_mib and not visible_gpus():
        yield f"plan.gpu_memory_gb={memory_mib / MIB_PER_GB:.1f}"


def _replaced_size(typed: Sequence[str]) -> list[str]:
    """Return what replaces the size of the training set, which ``scaling=weak_data`` computes."""
    scales = any(key_of(text) == "scaling" and value_of(text) == "weak_data" for text in typed)
    is_typed = any(key_of(text) == "dataset.train_size" for text in typed)
    return ["dataset.train_size=null"] if scales and not is_typed else []


def _device(run: ProfiledRun) -> str:
    return f"cluster.device={run.setting('cluster', 'device')}"


def _section(override: str) -> str:
    return key_of(override).partition(".")[0]


def _may_be_set(run: ProfiledRun, override: str) -> bool:
    if key_of(override) == "cluster.device":
        return override == _device(run)
    return _section(override) in KEPT_SECTIONS or key_of(override) in KEPT_KEYS


def _refused(run: ProfiledRun, text: str) -> str:
    return (
        f"{text} changes what a worker computes, but the forecast is from the profile of {run.directory}: leave it "
        "out, or run this training with profile=true and forecast that run"
    )


def _check_sweeps(typed: Sequence[str]) -> None:
    """Check that only sizes have several values."""
    errors = [
        f"{override.input_line} has several values, but only {' and '.join(SIZE_KEYS)} can: set one value"
        for override in parse(typed)
        if override.is_sweep_override() and override.get_key_element().lstrip("+") not in SIZE_KEYS
    ]
    if errors:
        raise ConfigError(errors)


def _absolute(override: str) -> str:
    """Return an override with an absolute path, because the run may have been started in another folder."""
    key, value = key_of(override), value_of(override)
    return f'{key}="{Path(value).absolute()}"' if key == "forecast.preflight" and value != "null" else override
