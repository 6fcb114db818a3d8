"""The command ``distexp forecast [RUN] [OVERRIDES] [--json]``: the speed of a profiled run on other numbers of GPUs."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from distexp.cli.errors import explain
from distexp.cli.overrides import is_override
from distexp.cli.run import main as run_command
from distexp.config import Command, ConfigError
from distexp.exceptions import run_until_pipe_closes
from distexp.forecast.arguments import forecast_arguments
from distexp.forecast.profiled_run import ProfiledRun, find_profiled_run
from distexp.runs.json_files import read_json
from distexp.runs.sweep_dirs import choose_newest_sweep

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
        composed = forecast_arguments(run, overrides, as_json=JSON in given)
    except (ConfigError, HydraException) as error:
        for message in explain(error):
            print(f"distexp: {message}", file=sys.stderr)
        return 2
    _enter_directory_of(run)
    return run_command([*folders, *composed], Command.FORECAST)


def _split_config_dir(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without ``--config-dir FOLDER``, and this option with an absolute path."""
    parser = ArgumentParser(prog="distexp forecast", add_help=False, allow_abbrev=False)
    parser.add_argument(CONFIG_DIR, type=Path)
    known, others = parser.parse_known_args(arguments)
    return others, [] if known.config_dir is None else [CONFIG_DIR, str(known.config_dir.absolute())]


def _read_arguments(arguments: Sequence[str]) -> tuple[ProfiledRun, list[str]]:
    """Return the profiled run, and the overrides.

    Raises:
        ConfigError: there are several directories, or there is no profiled run.
    """
    overrides = [text for text in arguments if is_override(text)]
    directories = [text for text in arguments if not is_override(text)]
    if options := [text for text in directories if text.startswith("-")]:
        hint = "lists need no --multirun" if "--multirun" in options else "distexp forecast --help lists the options"
        raise ConfigError(f"{' '.join(options)} is not an option of forecast: leave it out; {hint}")
    if len(directories) > 1:
        raise ConfigError(
            f"{len(directories)} directories ({' '.join(directories)}): give the directory of one profiled run, as in "
            "distexp forecast RUN cluster.nodes=2"
        )
    directory = (
        Path(directories[0]) if directories else choose_newest_sweep(leave_out=(Command.PREFLIGHT, Command.CHOOSE))
    )
    return find_profiled_run(directory.absolute()), overrides


def _enter_directory_of(run: ProfiledRun) -> None:
    """Change to the folder in which this user has started the run, because its paths are relative to it."""
    if not run.is_own:
        return
    try:
        os.chdir(str(read_json(run.command_path)["directory"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        note = f"relative paths of the run are read from the current folder, because its own is not known: {error}"
        print(f"distexp: note: {note}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
