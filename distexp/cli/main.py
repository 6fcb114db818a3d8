"""Entry point of ``distexp``: a sub-command, the help, the version, or a run."""

import argparse
import difflib
import errno
import importlib
import os
import stat
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from distexp import __version__
from distexp.exceptions import ConfigError, run_until_pipe_closes
from distexp.system.silence import announced


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    The code is 0 on success, 1 if a run failed, 2 if the command line is wrong, and 128 + n after signal n.
    """
    open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given and given[0] in COMMANDS else "run"
    rest = given[1:] if given[:1] == [name] else given
    return run_until_pipe_closes(lambda: _run(name, rest))


def open_closed_streams() -> None:
    """Open the standard streams that are closed, as by ``>&-``. A file or socket would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _run(name: str, arguments: Sequence[str]) -> int:
    if "" in arguments:  # As a path, it would be the current folder.
        raise ConfigError("an argument is empty, as after an unset variable: leave it out, or give a value")
    if name == "run" and {"-h", "--help"} & set(arguments):
        from distexp.cli.help_topics import help_text

        print(help_text())
        return 0
    if name == "run" and "--version" in arguments:
        print(f"distexp {__version__}")
        return 0
    os.getcwd()  # It raises an error that is explained if the folder was deleted.
    for argument in () if name in ("help", "experiments") else arguments:
        check_path(argument)
    with announced("preparing" if name == "run" else f"distexp {name}"):
        return run_command(name, arguments)


UNREADABLE = {
    errno.ENAMETOOLONG: "it is longer than the file system allows",
    errno.ELOOP: "it is a loop of links",
    errno.EACCES: "you have no permission to read it",
}
"""What is wrong with a path that cannot even be looked up, by the number of the error."""


def check_path(argument: str) -> None:
    """Raise ConfigError if an argument of the command line is a path that cannot be read. It may not exist."""
    option, equals, value = argument.partition("=")
    if equals and not option.startswith("--"):
        return  # The configuration checks the paths of overrides.
    path = value or argument
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        number = 0 if os.access(path, os.R_OK | (os.X_OK if is_folder else 0)) else errno.EACCES
    except ValueError:
        raise ConfigError(f"{path!r} contains a NUL byte, which no path can: give another path") from None
    except OSError as error:
        number = error.errno or 0
    if number in UNREADABLE:
        shown = path if len(path) <= MAX_SHOWN else f"{path[:MAX_SHOWN]}..."
        raise ConfigError(f"{shown} cannot be read, because {UNREADABLE[number]}: give another path")


MAX_SHOWN = 60
"""Characters of a path that are shown if it is too long."""


class Command(NamedTuple):
    """A sub-command."""

    help: str
    module: str


COMMANDS = {
    "run": Command("start a run, or a sweep with --multirun (the word run may be left out)", "distexp.cli.run"),
    "ls": Command("list the sweeps, with the states of their runs", "distexp.ls"),
    "status": Command("show the state of every run of a sweep", "distexp.status"),
    "resume": Command("run what is missing or failed in a sweep", "distexp.resume"),
    "cancel": Command("end the runs of a sweep", "distexp.cancel"),
    "rm": Command("delete sweeps and runs, after a question", "distexp.rm"),
    "archive": Command("write records, metrics and logs of a sweep into one file", "distexp.archive"),
    "plan": Command("predict the GPU memory of a run or a sweep, also without a GPU", "distexp.plan.__main__"),
    "choose": Command("find the fastest configuration of a training by short runs", "distexp.choose.__main__"),
    "verify": Command("check that a strategy trains exactly as single does", "distexp.verify.__main__"),
    "explain": Command("show what the steps of a profiled run spend their time on", "distexp.explain.__main__"),
    "forecast": Command("forecast the speed of a profiled run on other numbers of GPUs", "distexp.forecast.__main__"),
    "report": Command("make tables, figures and a page from finished runs", "distexp.report.__main__"),
    "serve": Command("show the report in a browser, live while runs are running", "distexp.serve"),
    "experiments": Command("list the presets, or run those that match", "distexp.experiments"),
    "doctor": Command("check this machine", "distexp.doctor.__main__"),
    "preflight": Command("measure the bandwidth between workers, and matrix products", "distexp.preflight.__main__"),
    "memory": Command("summarize nvidia-smi and psrecord logs", "distexp.memory"),
    "help": Command("print this text, or help on a command, a group or a key", "distexp.help"),
    "reference": Command("print a generated reference page", "distexp.reference"),
}
"""Sub-commands by name. Each module has a ``main(arguments)`` that returns the exit code."""


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Import the module of a sub-command, run it and return its exit code."""
    code: int = importlib.import_module(COMMANDS[name].module).main(arguments)
    return code


class CommandParser(argparse.ArgumentParser):
    """Parser of the arguments of a command. It accepts no abbreviated option, which may be a mistyped one."""

    def __init__(self, **options: Any) -> None:
        """Accept whole names only."""
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError for an unknown option, with the whole names that may be meant."""
        _, is_unknown, arguments = message.partition("unrecognized arguments: ")
        typed = next((text.partition("=")[0] for text in arguments.split() if text.startswith("-")), None)
        if not is_unknown or typed is None:
            super().error(message)
        known = list(self._option_string_actions)
        near = [name for name in known if name.startswith(typed)] or difflib.get_close_matches(typed, known, cutoff=0.7)
        hint = f"write {' or '.join(near)}" if near else f"see {self.prog} --help"
        raise ConfigError(f"{typed} is not an option: {hint}")
