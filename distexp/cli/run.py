"""``distexp [run] [OVERRIDE ...]``: runs and sweeps, started through Hydra with a normalized command line."""

import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from itertools import islice
from typing import Any, cast

import hydra
import hydra._internal.hydra as hydra_app
import hydra._internal.utils as hydra_utils
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from distexp import exceptions
from distexp.cli.arguments import HYDRA_FLAGS, normalize_arguments
from distexp.cli.errors import explain, explain_os_error
from distexp.config import Command, Config, ConfigError, register_schema
from distexp.config.keys import check_values, conf_dir
from distexp.config.overrides import is_override, key_of, parse, sets_key
from distexp.exceptions import TRACE_VARIABLE, describe_os_error, print_error
from distexp.guard.command_line import check_arguments_for_secrets
from distexp.guard.config_files import use_checked_loader
from distexp.resolve.section_checks import check_files

WRONG = (ConfigError, HydraException, OmegaConfBaseException, YAMLError)
"""Errors of a command line or of a configuration file."""

MAX_ERRORS = 5
"""Most wrong overrides that are searched for: each takes as long as composing a configuration."""


def main(arguments: Sequence[str], command: Command = Command.TRAIN, added: Sequence[str] = ()) -> int:
    """Run a command line and return its exit code; 2 if it is wrong, after printing every error.

    ``added`` has the overrides that the command puts in front of the typed ones.
    """
    wants_trace = os.environ.get(TRACE_VARIABLE) == "1"
    try:
        return _run_hydra(arguments, command, added)
    except WRONG as error:
        if wants_trace:
            raise
        for message in _all_errors(arguments, command, added, error):
            print_error(message)
        return 2
    except RecursionError:
        if wants_trace:
            raise
        print_error("the configuration is nested too deeply, or refers to itself: write it flatter")
        return 2
    except OSError as error:
        if wants_trace or isinstance(error, BrokenPipeError):
            raise
        prints_only = any(text.partition("=")[0] in HYDRA_FLAGS for text in arguments)
        prints_only |= command in (Command.PLAN, Command.FORECAST)
        key = "hydra.run.dir" if sets_key(arguments, "hydra.run.dir") else "hydra.sweep.dir"
        message = explain_os_error(error, resumes=sets_key(arguments, "sweep.resume"), key=key)
        print_error(describe_os_error(error) if prints_only else f"the sweep stops: {message}")
        return 1


def _all_errors(arguments: Sequence[str], command: Command, added: Sequence[str], error: Exception) -> list[str]:
    """Return the messages of an error and of further ones: Hydra stops at the first wrong override.

    So the configuration is composed again without the overrides that the messages are about: of a sweep, with the first
    value of each override, then with the second ones, and so on.
    """
    found = explain(error)
    # The values of a pattern are only known to Hydra.
    typed = [text for text in arguments if text not in ("-m", "--multirun") and "=glob(" not in text]
    previous: list[str] = []
    for position in range(MAX_ERRORS):
        cell = [_value_at(text, position) for text in typed]
        left = [text for text in cell if not any(_is_about(message, text) for message in found)]
        if left in (previous, typed):  # There are no other values, or nothing is to be left out.
            break
        previous = left
        while len(found) < MAX_ERRORS and (new := _further_errors(left, command, added, found)):
            found += new
            left = [text for text in left if not any(_is_about(message, text) for message in new)]
    return found


def _further_errors(left: list[str], command: Command, added: Sequence[str], found: Sequence[str]) -> list[str]:
    """Return the new messages about the overrides that are left. Others may only come from what was left out."""
    printed = StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(StringIO()):  # Warnings were printed before.
            _run_hydra([*left, "--cfg", "job"], command, added)
        # Hydra has no error. Values outside of their limits and missing files do not depend on what was left out.
        values = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(printed.getvalue()))
        config = cast(Config, OmegaConf.to_object(values))
        messages = [*check_values(config), *(check_files(config) if config.scale.name == "full" else ())]
    except WRONG as error:
        messages = explain(error)
    except (OSError, RecursionError):  # What is left has another problem. The first messages matter more.
        return []
    return [text for text in messages if text not in found and any(_is_about(text, override) for override in left)]


def _is_about(message: str, text: str) -> bool:
    """Return whether a message starts with the key of an override, or with a section of it that does not exist."""
    named = re.match(r"[\w./@]+", message)
    return is_override(text) and named is not None and f"{key_of(text)}.".startswith(f"{named[0].rstrip('.')}.")


def _value_at(text: str, position: int) -> str:
    """Return an override with one of its values, the last one if it has fewer."""
    with suppress(ConfigError, HydraException):
        if is_override(text) and (override := parse([text])[0]).is_sweep_override():
            values = list(islice(override.sweep_string_iterator(), position + 1))
            return f"{override.get_key_element()}={values[-1]}" if values else text
    return text


def _run_hydra(arguments: Sequence[str], command: Command, added: Sequence[str]) -> int:
    check_arguments_for_secrets(arguments)
    register_schema(command)
    use_checked_loader()
    vars(hydra_app)["Hydra"] = _MultirunHydra
    # Hydra raises its errors instead of printing them, as with HYDRA_FULL_ERROR=1, which workers would read too.
    vars(hydra_utils)["_is_env_set"] = lambda name: True
    Plugins.instance()  # before the current folder is searched, so that Hydra loads no plugin from there
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # so that custom packages are found as with `python -m`
    sys.argv = [sys.argv[0], *normalize_arguments(arguments, command, added)]
    try:
        with exceptions.interruptions_kept():
            hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(_never_called)()
    except exceptions.SweepFailedError:
        return 1
    except exceptions.InterruptedRunError as interruption:
        print_error(interruption)
        return 128 + interruption.number
    except (exceptions.SweepInterrupted, KeyboardInterrupt) as interruption:
        print_error(f"{str(interruption) or 'interrupted'}")
        return 128 + signal.SIGINT
    except exceptions.MonitoringInterrupted:
        return 128 + signal.SIGINT
    return 0


class _MultirunHydra(hydra_app.Hydra):
    """Hydra's application. It does not compose the configuration only to read ``hydra.mode``: each run is a sweep."""

    def get_mode(self, config_name: str | None, overrides: list[str]) -> None:
        """Return None, so that ``--multirun`` decides."""


def _never_called(config: Any) -> None:
    raise AssertionError("the launchers of distexp run the jobs")
