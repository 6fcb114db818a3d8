"""``distexp resume [DIR] [OVERRIDE ...]``: repeat the command of a sweep in its directory, without the finished runs.

A run that failed or has no record runs again in its directory. A new cell gets a new number.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from distexp.cli.arguments import OUTPUT_DIRS
from distexp.cli.errors import explain
from distexp.cli.main import main as distexp
from distexp.config import Command, ConfigError
from distexp.config.overrides import is_override, key_of, shell_quote, sweep_dir_override
from distexp.exceptions import print_error
from distexp.guard.config_files import check_files, check_stored_command, check_working_directory, is_own_file
from distexp.runs.record import choose_newest_sweep, not_a_sweep
from distexp.runs.run_dir import COMMAND, directory_key
from distexp.system.files import read_json

USAGE = """usage: distexp resume [DIR] [KEY=VALUE ...]

Run the failed and missing runs of a sweep in their directories (default: the
newest sweep below multirun_outputs). Finished runs are kept.

A KEY=VALUE replaces that of the original command. New values add runs, as in
zero_stage=1,2,3,0. cluster=slurm and cluster=local are possible too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Resume a sweep and return its exit code, or 2 if the directory is not a sweep."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE)
        return 0
    try:
        if not arguments or (is_override(arguments[0]) and not os.path.isdir(arguments[0])):
            arguments.insert(0, str(choose_newest_sweep()))
        sweep_dir, new = Path(arguments[0]).absolute(), arguments[1:]
        command, original, directory = read_command(sweep_dir)
        if not is_own_file(sweep_dir / COMMAND):
            check_stored_command(sweep_dir / COMMAND, original, new)
            check_working_directory(sweep_dir / COMMAND, directory)
            check_files(sweep_dir)
        if elsewhere := [text for text in new if key_of(text) in OUTPUT_DIRS]:  # Nothing could be resumed there.
            unused = f"has no effect in distexp resume, which continues in {sweep_dir}: leave it out"
            raise ConfigError([f"{text} {unused}" for text in elsewhere])
        merged = merge(original, new)
    except (ConfigError, HydraException) as error:
        for message in explain(error):
            print_error(message)
        return 2
    if os.path.isdir(directory):
        os.chdir(directory)  # The relative paths of the command are relative to it.
    name = [] if command == Command.TRAIN else [str(command)]
    return distexp([*name, *merged, sweep_dir_override(sweep_dir), "sweep.resume=true"])


def read_command(sweep_dir: Path) -> tuple[Command, list[str], str]:
    """Return the command, its arguments and its working directory. Raise ConfigError if they cannot be read."""
    path = sweep_dir / COMMAND
    try:
        stored = read_json(path)
        words, directory = stored["words"], stored["directory"]
        command = Command(stored.get("command", Command.TRAIN))
    except OSError:
        raise ConfigError(not_a_sweep(sweep_dir, COMMAND)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(damaged_message(path, error)) from None
    if not isinstance(words, list) or not all(isinstance(text, str) for text in [*words, directory]):
        raise ConfigError(damaged_message(path, "the arguments are not texts"))
    return command, words, directory


def damaged_message(path: Path, reason: object) -> str:
    """Return the message for a command file that cannot be used."""
    directory = shell_quote(sweep_dir_override(path.parent, directory_key(path.parent)))
    return f"{path} is damaged ({reason}): repeat the command of the sweep with {directory} sweep.resume=true"


def merge(original: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the original arguments with the new ones. A new override replaces one of the same key."""
    replaced = {key_of(argument) for argument in new if is_override(argument)}
    replaced |= {"hydra.sweep.dir", "sweep.resume"}  # which this command sets
    kept = [argument for argument in original if not (is_override(argument) and key_of(argument) in replaced)]
    multirun = [] if "--multirun" in kept or "-m" in kept else ["--multirun"]
    return [*multirun, *kept, *new]


if __name__ == "__main__":
    sys.exit(main())
