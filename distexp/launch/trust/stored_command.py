"""Check of the command line in ``command.json``, which another user may have written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from distexp.cli.overrides import is_override
from distexp.config import ConfigError
from distexp.config.paths import options_of
from distexp.launch.trust.packages import KEY, packages_of_environment, packages_trusted_by_user
from distexp.launch.trust.shell_values import CLUSTER_KEYS, is_harmless_variable
from distexp.launch.trust.typed_overrides import as_text, key_of, typed_overrides
from distexp.runs.copyable_command import copyable_override, shell_quote

SAFE_HYDRA_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose")
LAUNCHER = "hydra.launcher."
UNSAFE_LAUNCHER_KEYS = ("_target_", "setup", "additional_parameters")


def check_stored_command(path: Path, stored: Sequence[str], typed: Sequence[str]) -> None:
    """Check that the user repeats the overrides of a stored command that can run code.

    Args:
        path: File of the stored command, for the message.
        stored: Its arguments.
        typed: Arguments that the user has typed.

    Raises:
        ConfigError: with an error for each override that is not repeated.
    """
    repeated = {key_of(override) for override in typed_overrides(typed)}
    errors = [
        f"{path} contains {_shown(argument)}, which could run code: if you trust it, add {_shown(argument)} to the "
        "command"
        for argument in stored
        if is_override(argument) and _unsafe_keys(argument) - repeated
    ]
    if errors:
        raise ConfigError(errors)


def _shown(argument: str) -> str:
    """Return an argument as a shell needs it, without the quotes that distexp has added."""
    return shell_quote(copyable_override(argument, may_sweep=True))


def _unsafe_keys(argument: str) -> set[str]:
    """Return the keys of an override, and of those inside ``sweep.cells``, that can run code."""
    return {key_of(override) for override in typed_overrides([argument]) if _is_unsafe(argument, override)}


def _is_unsafe(argument: str, override: Override) -> bool:
    key = key_of(override)
    if key == KEY:
        return bool(set(packages_trusted_by_user([argument])) - set(packages_of_environment()))
    if key == "cluster":
        return as_text(override.value()) not in options_of("cluster")
    if key.startswith(LAUNCHER):
        return key.removeprefix(LAUNCHER).partition(".")[0] in UNSAFE_LAUNCHER_KEYS
    if key.startswith(("hydra.", "hydra/")):
        return key not in SAFE_HYDRA_KEYS
    return any(_names_command(key, f"cluster.{name}") for name in CLUSTER_KEYS)


def _names_command(key: str, section: str) -> bool:
    return (key == section or key.startswith(f"{section}.")) and not is_harmless_variable(key)
