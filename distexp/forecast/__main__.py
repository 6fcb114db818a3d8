"""The command ``distexp forecast [RUN] [OVERRIDES] [--json]``: the speed of a profiled run on other numbers of GPUs."""

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, chdir, suppress
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from distexp.cli.arguments import short_key_errors
from distexp.cli.errors import explain
from distexp.cli.run import main as run_command
from distexp.config import Command, ConfigError, register_schema
from distexp.config.keys import conf_dir, config_groups, options_of
from distexp.config.overrides import (
    add_plus_prefix,
    copyable_command,
    copyable_override,
    is_override,
    key_of,
    parse,
    plain_value,
    quote_choice,
    quote_for_hydra,
    shell_quote,
    value_of,
)
from distexp.exceptions import print_error, run_until_pipe_closes
from distexp.forecast.profiled_run import ProfiledRun, find_profiled_run
from distexp.forecast.size_rows import SIZE_KEYS, as_cell, choose_sizes
from distexp.guard.config_files import check_stored_command, use_checked_loader
from distexp.resolve import resolve, without_hydra
from distexp.runs.record import choose_newest_sweep, config_dir_options
from distexp.runs.run_dir import RECORD
from distexp.strategies.base import recorded_strategy, shipped_strategies
from distexp.strategies.parallel.checks import DEGREES
from distexp.system import cgroups, files, units

USAGE = """usage: distexp forecast [RUN] [KEY=VALUE ...] [--json]

Forecast the speed, efficiency and memory of a profiled run on other numbers of
GPUs. Nothing is trained, and no GPU is needed. RUN is the directory of a run
with profile=true, or of a sweep with one such run. Default: the newest sweep.

  cluster.nodes=1,2,4            numbers of nodes; no --multirun is needed
  cluster.workers_per_node=4     workers of each node; lists make all pairs
  scaling=weak_data              scale the work with the workers, as in a run
  train.global_batch_size=256    the same global batch on every size
  train.global_batch_size=null   a batch that grows with the workers
  forecast.memory=off            do not predict the memory
  forecast.preflight=DIR         use the bandwidths that this run measured
  --config-dir FOLDER            folder of a custom model, dataset or strategy
  --json                         print JSON for programs

Without sizes: powers of two up to 64 workers.

examples:
  distexp strategy=fsdp cluster.workers_per_node=2 profile=true
  distexp forecast multirun_outputs/distexp/2026-05-20_10-00-00/0
  distexp forecast RUN cluster.nodes=1,2,4,8,16 cluster.workers_per_node=4"""

JSON = "--json"
CONFIG_DIR = "--config-dir"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the forecast; return the exit code, 2 if the run or an argument is wrong."""
    given, folders = _split_config_dir(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(USAGE)
        return 0
    try:
        run, overrides = _read_arguments([text for text in given if text != JSON])
        composed = forecast_arguments(run, overrides, as_json=JSON in given, folders=folders)
    except (ConfigError, HydraException) as error:
        for message in explain(error):
            print_error(message)
        return 2
    if run.is_own:
        # Paths of the run are relative to the folder in which this user has started it.
        try:
            os.chdir(_folder_of(run))
        except (OSError, ValueError, KeyError, TypeError) as error:
            note = f"relative paths of the run are read from the current folder, because its own is not known: {error}"
            print_error(f"note: {note}")
    return run_command([*folders, *composed], Command.FORECAST)


def _folder_of(run: ProfiledRun) -> str:
    """Return the folder in which a run was started. Raise an error if its command file is missing or damaged."""
    return str(files.read_json(run.command_path)["directory"])


def _split_config_dir(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--config-dir FOLDER``, and this option with an absolute path."""
    parser = ArgumentParser(prog="distexp forecast", add_help=False, allow_abbrev=False)
    parser.add_argument(CONFIG_DIR, type=Path)
    known, others = parser.parse_known_args(arguments)
    return others, [] if known.config_dir is None else [CONFIG_DIR, str(known.config_dir.absolute())]


def _read_arguments(arguments: Sequence[str]) -> tuple[ProfiledRun, list[str]]:
    """Return the profiled run and the overrides. Raise ConfigError if there are several directories, or no such run."""
    overrides = [text for text in arguments if is_override(text) and not Path(text).is_dir()]
    directories = [text for text in arguments if text not in overrides]
    if options := [text for text in directories if text.startswith("-")]:
        hint = "lists need no --multirun" if "--multirun" in options else "distexp forecast --help lists the options"
        raise ConfigError(f"{' '.join(options)} is not an option of forecast: leave it out; {hint}")
    if len(directories) > 1:
        hint = "give the directory of one profiled run, as in distexp forecast RUN cluster.nodes=2"
        raise ConfigError(f"{len(directories)} directories ({' '.join(directories)}): {hint}")
    others = (Command.PREFLIGHT, Command.CHOOSE)
    directory = Path(directories[0]) if directories else choose_newest_sweep(leave_out=others)
    return find_profiled_run(directory.absolute()), overrides


KEPT_SECTIONS = ("cluster", "scaling", "forecast", "plan", "choose")
"""Sections and groups that do not change what a worker computes in a micro-batch.

``choose`` has no effect, which the command line then reports.
"""

KEPT_KEYS = (  # further keys that the user may set
    *("train.global_batch_size", "train.gradient_accumulation_steps", "dataset.train_size"),
    "trusted_packages",
)

# Keys, groups and sections of the profiled run that a forecast does not need.
NOT_REPEATED = ("profile", "repeats", "tracker", "preflight", "plan", "forecast", "choose", "sweep", "hydra")
NOT_REPEATED_KEYS = ("train.profile_steps", "train.resume", "train.micro_batch_search_s", "scale.workers")


def forecast_arguments(
    run: ProfiledRun, typed: Sequence[str], *, as_json: bool, folders: Sequence[str] = ()
) -> list[str]:
    """Return the arguments with which the sizes of a forecast are composed. ``folders`` is that of ``--config-dir``.

    Raise ConfigError if an override changes what the workers compute, or if another user's run may run code.
    """
    stored = [*map(copyable_override, run.record.run.overrides)]  # A record has them without quotes.
    if not run.is_own:
        check_stored_command(run.directory / RECORD, stored, typed)
    if errors := list(_errors(run, typed, folders)):
        raise ConfigError(errors)
    fixed, added = list(_fixed_values(run, typed)), [text for text in typed if key_of(text) not in SIZE_KEYS]
    replaced = {*NOT_REPEATED_KEYS, *map(key_of, [*fixed, *added])}
    kept = [text for text in stored if key_of(text) not in replaced and _section(text) not in NOT_REPEATED]
    for position, text in enumerate(added):
        if key_of(text) == "forecast.preflight" and (value := plain_value(parse([text])[0].value())) is not None:
            path = quote_for_hydra(str(Path(str(value)).absolute()))
            added[position] = f"forecast.preflight={path}"  # The run may be of another folder.
    cells = json.dumps([as_cell(size) for size in choose_sizes(run, typed)], separators=(",", ":"))
    output = ["plan.output=json", "forecast.output=json"] if as_json else []
    directory = quote_for_hydra(str(run.directory))
    return [*kept, *fixed, *added, *output, f"sweep.cells={cells}", f"forecast.run={directory}"]


def _errors(run: ProfiledRun, typed: Sequence[str], folders: Sequence[str]) -> Iterator[str]:
    """Yield the errors of short keys; else those of values that change the work; else those of several values.

    A missing ``--config-dir`` and keys of Hydra come between the first two.
    """
    if errors := list(short_key_errors(typed)):
        yield from errors
        return
    own = [] if folders else config_dir_options(run.directory)
    lost = [text for text in run.record.run.overrides if own and _is_lost(text)]
    if lost:
        with suppress(OSError, ValueError, KeyError, TypeError):  # of a damaged command file
            own[1:] = [str(Path(_folder_of(run), own[1]))]
        hint = f"add {' '.join(map(shell_quote, own))}"
        yield f"{' '.join(lost)} of {run.directory} is an option of another folder: {hint}"
        return
    if errors := [text for text in typed if _section(text) == "hydra"]:
        yield f"{' '.join(errors)} has no effect, because a forecast makes no directory: leave it out"
        return
    others = [text for text in typed if _section(text) not in KEPT_SECTIONS and key_of(text) not in KEPT_KEYS]
    others = [text for text in others if not (key_of(text) in DEGREES and value_of(text) == _degree(run, text))]
    others += [text for text in typed if key_of(text) == "cluster.device" and text != _device(run)]
    for text in sorted(others, key=list(typed).index):
        instead = ", or run this training with profile=true and forecast that run"
        if key_of(text) in DEGREES and value_of(text).isdecimal():
            overrides = _profile_of_degree(run, text)
            problems = find_errors(run, overrides, folders)
            command = " ".join([copyable_command(overrides), *map(shell_quote, folders)])
            instead = f", or forecast the run of {command}"
            if problems:
                about_it = [problem for problem in problems if problem.startswith(key_of(text))]
                instead = f". This training cannot be profiled with it either: {'; '.join(about_it or problems)}"
        yield (
            f"{text} changes what a worker computes, but the forecast is from the profile of {run.directory}: "
            f"leave it out{instead}"
        )
    yield from _unused_accumulation(run, typed)
    for override in () if others else parse(typed):
        if override.is_sweep_override() and override.get_key_element().lstrip("+") not in SIZE_KEYS:
            only = f"but only {' and '.join(SIZE_KEYS)} can: set one value"
            yield f"{override.input_line} has several values, {only}"


ACCUMULATION, BATCH = "train.gradient_accumulation_steps", "train.global_batch_size"


def _unused_accumulation(run: ProfiledRun, typed: Sequence[str]) -> Iterator[str]:
    """Yield an error for an accumulation next to a global batch, typed or of the run, which sets the accumulation."""
    values = {key_of(text): value_of(text) for text in typed}
    batch = values.get(BATCH, str(run.setting(*BATCH.split(".")) or "null"))
    if ACCUMULATION in values and batch != "null":
        instead = "leave one of the two out" if BATCH in values else f"leave it out, or add {BATCH}=null"
        yield f"{ACCUMULATION}={values[ACCUMULATION]} has no effect: {BATCH}={batch} sets the accumulation: {instead}"


def _is_lost(override: str) -> bool:
    """Return whether an override chooses an option that distexp does not have, as one of ``--config-dir``."""
    group, option = key_of(override), value_of(override)
    return group in config_groups() and option not in ("", "null", *options_of(group))


def find_errors(run: ProfiledRun, overrides: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Return why the launcher would refuse the overrides of a training; none if it would start it.

    As for a prediction, this machine does not need the GPUs of the training.
    """
    register_schema(Command.PLAN)
    use_checked_loader()
    groups, searched = config_groups(), [f"hydra.searchpath=['file://{path}']" for path in folders[1:]]
    kept = [text for text in overrides if key_of(text) != "cluster.device"]
    typed = [quote_choice(add_plus_prefix(text), groups) for text in (*kept, _device(run))]
    with ExitStack() as stack:
        if run.is_own:
            with suppress(OSError, ValueError, KeyError, TypeError):  # of a damaged command file
                stack.enter_context(chdir(_folder_of(run)))
        try:
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                composed = compose("config", [*typed, *searched], return_hydra_config=True)
            resolve(without_hydra(composed), composed.hydra.runtime.choices)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            return explain(error)
    return []


def _profile_of_degree(run: ProfiledRun, degree: str) -> list[str]:
    """Return the overrides that profile the training of a run with workers that share the model in another way.

    It has one group, whose collectives are all in this group.
    """
    workers = value_of(degree) if value_of(degree) != "1" else str(run.size[1])
    kinds = shipped_strategies()
    changed = {"cluster.nodes", "cluster.workers_per_node", "profile", "train.profile_steps"}
    strategy = recorded_strategy(run.record.config, ())
    shares = strategy is None or strategy.shares_layers
    changed |= set() if shares else {"strategy", *(kind.option_group for kind in kinds.values())}
    stored = run.record.run.overrides
    kept = [text for text in stored if key_of(text) not in changed and _section(text) != "parallel"]
    size = f"cluster.workers_per_node={workers}"
    other = [] if shares else [next(f"strategy={name}" for name, kind in kinds.items() if kind.shares_layers)]
    return [*kept, *other, degree, size, "profile=true"]


def _fixed_values(run: ProfiledRun, typed: Sequence[str]) -> Iterator[str]:
    """Yield the values that the profiled run found on its machine, and those that would restrict other sizes."""
    yield _device(run)
    if not isinstance(run.setting("train", "micro_batch_size"), int) and run.micro_batch_size is not None:
        yield f"train.micro_batch_size={run.micro_batch_size}"
    yield "scale.workers=null"
    yield "repeats=1"
    # A preset may sweep the sizes. Values on the command line replace its sweep.
    yield from as_cell(run.size)
    values = {key_of(text): value_of(text) for text in typed}
    memory_mib = run.record.environment.gpu_total_mib if run.record.environment else None
    predicts = values.get("forecast.memory") != "off" and not values.keys() & {"plan.gpu", "plan.gpu_memory_gb"}
    if predicts and run.on_gpu and memory_mib and not cgroups.visible_gpus():
        yield f"plan.gpu_memory_gb={memory_mib / units.MIB_PER_GIB:.1f}"
    if values.get("scaling") == "weak_data" and "dataset.train_size" not in values:
        yield "dataset.train_size=null"  # The rule computes the size of the training set.


def _device(run: ProfiledRun) -> str:
    return f"cluster.device={run.setting('cluster', 'device')}"


def _degree(run: ProfiledRun, override: str) -> str:
    """Return the value that the run had for the key of an override of ``parallel``."""
    return str(run.setting(*key_of(override).split(".")) or 1)


def _section(override: str) -> str:
    return key_of(override).partition(".")[0]


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
