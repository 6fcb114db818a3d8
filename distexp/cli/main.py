"""The command line: Hydra's, with choices quoted, traps refused, and errors said in a sentence."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from distexp.cli.argument_checks import check_arguments
from distexp.cli.overrides import parse, quote_choice, suggest, suggest_key
from distexp.config import ConfigError, register_schema
from distexp.config.key_info import known_keys, values_of
from distexp.config.paths import conf_dir, config_groups, options_of
from distexp.exceptions import InterruptedRunError, MonitoringInterrupted, SweepFailedError, run_until_pipe_closes

HYDRA_FLAGS = ("--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "--hydra-help", "--version")
"""Hydra's own commands, which run nothing."""

OPEN_SECTIONS = (
    *("model.options.", "dataset.options.", "strategy.options."),
    *("cluster.environment.", "cluster.sbatch."),
)
"""Sections whose keys are the user's own."""

RESERVED = {
    "hydra/launcher": "cluster= chooses the launcher",
    "hydra.launcher": "cluster= chooses the launcher",
    "cluster.launcher": "cluster= chooses the launcher",
    "hydra/sweeper": "sweep.cells adds cells beside the product",
    "hydra.mode": "every run is a sweep, of one cell at the least",
    "hydra.output_subdir": "a run directory is claimed by its .hydra folder",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit code is 0, 1 where a run failed, 2 where it was refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if any(word in ("-h", "--help") for word in words):
        return run_until_pipe_closes(_help)
    wants_trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises, and the errors are put into words here
    try:
        return _run(words)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        if wants_trace:
            raise
        for sentence in explain(error):
            print(f"distexp: {sentence}", file=sys.stderr)
        return 2
    except OSError as error:
        if wants_trace:
            raise
        print(f"distexp: {error}: the sweep cannot go on", file=sys.stderr)
        return 1
    finally:
        if not wants_trace:
            del os.environ["HYDRA_FULL_ERROR"]


def _run(words: list[str]) -> int:
    register_schema()
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a package of one's own, as `python -m` finds it
    sys.argv = [sys.argv[0], *prepare(words)]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_never_called)()
    except SweepFailedError:
        return 1
    except InterruptedRunError as interruption:
        print(f"distexp: {interruption}; no further run was started", file=sys.stderr)
        return 128 + interruption.number
    except MonitoringInterrupted:
        return 128 + signal.SIGINT
    return 0


def _help() -> int:
    from distexp.cli.help import help_text

    print(help_text())
    return 0


def _never_called(config: Any) -> None:
    raise AssertionError("our launcher runs the jobs itself")


def prepare(words: Sequence[str]) -> list[str]:
    """The words that Hydra gets: choices quoted, and every run a sweep, of one cell at the least."""
    check_arguments(words)
    quoted = [quote_choice(_added(word), config_groups()) if is_override(word) else word for word in words]
    if any(word.split("=")[0] in HYDRA_FLAGS for word in quoted):
        refuse_sweep_of_one([word for word in quoted if is_override(word)])
        return quoted
    multirun = any(word in ("-m", "--multirun") for word in quoted)
    overrides = parse([word for word in quoted if is_override(word)])
    refuse_traps(overrides, multirun=multirun)
    rest = [word for word in quoted if word not in ("-m", "--multirun", "-r", "--run")]
    return ["--multirun", *[mended for word in rest for mended in _as_sweep_dir(word)]]


def _added(word: str) -> str:
    """Keys of an open section are new to Hydra, which wants a plus before such."""
    return f"++{word}" if word.startswith(OPEN_SECTIONS) else word


def is_override(word: str) -> bool:
    """Whether Hydra takes a word for an override, and not for an option or an option's value."""
    return not word.startswith("-") and ("=" in word or word.startswith("~"))


def refuse_traps(overrides: Sequence[Override], *, multirun: bool) -> None:
    """What Hydra would do silently, and other than it was meant."""
    by_key = {override.get_key_element().lstrip("+~"): override for override in overrides}
    swept = [key for key, override in by_key.items() if override.is_sweep_override()]
    errors = []
    for key in sorted({"cluster", "experiment"}.intersection(swept)):
        errors.append(
            f"{by_key[key].input_line} cannot be swept, for it decides how the sweep itself runs: "
            f"start one command for each {key}"
        )
    if swept and not multirun and "experiment" not in by_key:
        shown = " ".join(str(by_key[key].input_line).replace("'", "") for key in swept)
        errors.append(f"{shown} is a sweep: add --multirun, or give one value")
    if "hydra.run.dir" in by_key and (swept or "sweep.cells" in by_key):
        errors.append("hydra.run.dir is the directory of one run, and this is a sweep: set hydra.sweep.dir instead")
    errors += [f"{key} is not for the command line: {mend}" for key, mend in RESERVED.items() if key in by_key]
    if errors:
        raise ConfigError(errors)


def refuse_sweep_of_one(words: Sequence[str]) -> None:
    """Several values where one configuration is to be shown; Hydra would call them ambiguous."""
    swept = [word.replace("'", "") for word in words if any(part.is_sweep_override() for part in parse([word]))]
    if swept:
        raise ConfigError([f"{word} is a sweep, and --cfg and --info show one run: give one value" for word in swept])


def _as_sweep_dir(word: str) -> list[str]:
    """A single run is a sweep of one, so its directory is the sweep's, without a number below it."""
    key, _, value = word.partition("=")
    return [f"hydra.sweep.dir={value}", "hydra.sweep.subdir=."] if key == "hydra.run.dir" else [word]


def explain(error: Exception) -> list[str]:
    """A sentence or several for what was wrong, with what may have been meant."""
    if isinstance(error, ConfigError):
        return error.errors
    if isinstance(error, MissingConfigException):
        return [_missing_option(error)]
    lines = str(error).strip().splitlines()
    text = lines[0]
    if isinstance(error, OverrideParseException):
        return [_unreadable(str(error.override), text)]
    for pattern in (r"Could not override '([^']+)'", r"Key '([^']+)' not in 'Config'"):
        wrong = re.match(pattern, text)
        if wrong:
            return [_unknown_key(wrong.group(1), error)]
    refused = re.match(r"Error merging override ((?:\+\+)?([\w.]+)=.*)", text)
    if refused and isinstance(error.__cause__, ValidationError) and (wanted := values_of(refused.group(2))):
        return [f"{refused.group(1)} must be {wanted}"]
    if isinstance(error.__cause__, OmegaConfBaseException):
        text = f"{text.rstrip('.')}: {str(error.__cause__).splitlines()[0]}"
    return [text]


def _unreadable(word: str, why: str) -> str:
    """Of a word that Hydra's grammar refuses; a value that is a plain text may stand in quotes there."""
    key, equals, value = word.partition("=")
    if not equals:
        return f"{word} is not KEY=VALUE: write one, as in strategy=fsdp"
    if re.search(r"[^\x20-\x7e]|[~()&;]", value) and not re.search(r"['\"\[\]{}]", value):
        return f"{word} has letters that Hydra takes in quotes only: write \"{key}='{value}'\""
    return f"{word} cannot be read: {why}"


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").partition("/")
    if not option:
        return str(error).splitlines()[0]
    options = sorted({*options_of(group), *(error.options or [])})
    near = suggest(option, options)
    return f"{group}={option} is not an option{near or ';'} {'O' if near else 'o'}ptions: {', '.join(options)}"


def _unknown_key(key: str, error: Exception) -> str:
    cause = error.__cause__
    if cause is not None and "not in" not in str(cause) and "not found" not in str(cause):
        return f"{key}: {str(cause).splitlines()[0]}"  # the key is right, and the value is not
    return f"{key} is not a key" + (suggest_key(key, known_keys()) or "; --cfg job lists all keys")
