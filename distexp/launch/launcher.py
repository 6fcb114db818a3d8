"""Protocol of a launcher: what starts the runs of a command, and knows their states afterwards.

``cluster._target_`` names it. To add one, write a subclass and a YAML file (``docs/how-to/extend.md``). Agents and the
checks of a configuration import the module of a launcher too. So it imports the rest of its code only inside methods.
"""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from distexp.config import ClusterConfig, Config, ConfigError
from distexp.config.keys import conf_dir, options_of
from distexp.resolve.resources import LauncherTraits, find_launcher
from distexp.runs.run_dir import COMMAND, SPEC
from distexp.runs.run_state import RunState
from distexp.system.files import PACKAGE, read_json, read_or_none

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext
    from omegaconf import DictConfig
    from rich.console import Console

    from distexp.compose.composition import Cell
    from distexp.launch.run_dirs import AssignedRun, GitState
    from distexp.runs.record import ExistingRun


@dataclass(frozen=True)
class Sweep:
    """The runs to start."""

    context: HydraContext
    master: DictConfig
    cells: Sequence[Cell]  # All cells of the command, also the invalid ones.


@dataclass(frozen=True)
class Cancelled:
    """Result of cancelling runs."""

    runs: int = 0  # Number of runs that have ended, or will.
    left: list[str] = field(default_factory=list)  # Lines about those that have not ended yet.
    errors: list[str] = field(default_factory=list)  # Lines about runs that cannot be cancelled.


class CancelError(Exception):
    """No run was cancelled. The message is the reason."""


@dataclass(frozen=True)
class TrialRunner:
    """How a launcher runs the trials of ``distexp choose``."""

    # Runs all trials of a batch, and calls another function after each. Each has a record when it returns.
    run_all: Callable[[Sequence[AssignedRun], Callable[[], None]], None]
    code: GitState
    snapshot: str | None = None  # Copy of the code that the runs use, relative to the directory of the search.


class TrialLauncher(Protocol):
    """A launcher that can run trials."""

    def runner(self, sweep_dir: Path, console: Console) -> AbstractContextManager[TrialRunner]:
        """Return a context manager with the runner of trials."""


class Launcher(LauncherTraits):
    """Base class of all launchers."""

    def adjust(self, options: Mapping[str, Any], composed: DictConfig, overrides: Sequence[str]) -> None:
        """Apply the options under ``hydra.launcher`` to the composed configuration of a cell."""

    def check(self) -> None:
        """Check what would stop the start of every run, before anything is predicted.

        Raise ConfigError if the command cannot start runs on this machine, or OSError if a service does not answer.
        """

    @abstractmethod
    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Run all cells, or queue them. Each run gets a directory with ``spec.json`` and, at its end, ``record.json``.

        Raise SweepFailedError at the end, if a run failed.
        """

    def print_dry_run(self, sweep: Sweep) -> None:
        """Print what ``start`` would do (``cluster.dry_run=true``). Needed if ``reads`` contains ``dry_run``."""
        if "dry_run" not in self.reads:
            raise ConfigError("cluster.dry_run=true is for Slurm only: leave it out, or choose cluster=slurm")
        raise NotImplementedError(f"{type(self).__qualname__} reads dry_run, but lacks print_dry_run")

    def trials(self, sweep: Sweep, label: Callable[[Config], str]) -> TrialLauncher:
        """Return what runs the trials of ``distexp choose``."""
        raise ConfigError(
            f"distexp choose cannot run trials with cluster={sweep.master.cluster.name}: use cluster=local"
        )

    def claimed(self, sweep_dir: Path) -> Collection[int]:
        """Return the numbers of the runs that a file of the sweep assigns to this launcher."""
        return ()

    @abstractmethod
    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return the states of the runs of a sweep that this launcher has started."""

    @abstractmethod
    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """End runs that this launcher has started, and wait for their records. Raise CancelError if none was ended."""

    def follow(self, sweep_dir: Path, console: Console) -> None:
        """Show the runs of a queue until all have ended.

        Raise SweepFailedError if a run failed, or MonitoringInterrupted on Ctrl-C; the runs then continue.
        """
        from distexp.launch.queued_runs import follow
        from distexp.runs.record import ExistingRuns

        runs = ExistingRuns.read(sweep_dir).runs
        follow(lambda: self.states(sweep_dir, ExistingRuns.read(sweep_dir).runs), len(runs), sweep_dir, console)


class UnknownLauncher(Launcher):
    """Stand-in for a launcher of another package whose code may not, or cannot be imported."""

    def __init__(self, reason: str) -> None:
        """Create the stand-in, with the reason for it."""
        self._reason = reason

    def decide_resources(self, config: Config) -> list[str]:
        """Return the reason."""
        return [self._reason]

    def start(self, sweep: Sweep) -> list[JobReturn]:
        """Raise the reason."""
        raise ConfigError(self._reason)

    def states(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[RunState]:
        """Return that the runs may not have ended."""
        return [RunState(run.number, run.directory, None, "unknown", self._reason) for run in runs]

    def cancel(self, sweep_dir: Path, runs: Sequence[ExistingRun]) -> Cancelled:
        """Return an error for each run."""
        return Cancelled(errors=[f"run {run.number} cannot be cancelled: {self._reason}" for run in runs])


def launchers_of(sweep_dir: Path, runs: Sequence[ExistingRun]) -> list[tuple[Launcher, list[ExistingRun]]]:
    """Return each launcher that has started runs of a sweep, with these runs, by their ``spec.json``.

    Runs that no other launcher knows are those of ``cluster=local``. The files in their directories decide their
    states.
    """
    found: list[tuple[Launcher, list[ExistingRun]]] = []
    left = list(runs)
    for launcher in shipped_launchers():
        if numbers := launcher.claimed(sweep_dir):
            found.append((launcher, [run for run in left if run.number in numbers]))
            left = [run for run in left if run.number not in numbers]
    by_target: dict[str, list[ExistingRun]] = defaultdict(list)
    for run in left:  # The record of a run that has ended is enough.
        stored = read_or_none(run.directory / SPEC, "config", "cluster", "_target_") if run.status is None else None
        is_foreign = isinstance(stored, str) and not stored.startswith(f"{PACKAGE.name}.")
        by_target[str(stored if is_foreign else ClusterConfig._target_)].append(run)
    return [*found, *((_stored_launcher(sweep_dir, target), own) for target, own in by_target.items())]


@cache
def shipped_launchers() -> tuple[Launcher, ...]:
    """Return the launcher of each option of the config group ``cluster``."""
    from omegaconf import OmegaConf

    options = (OmegaConf.load(conf_dir() / "cluster" / f"{name}.yaml") for name in options_of("cluster"))
    targets = dict.fromkeys(option.cluster._target_ for option in options)
    return tuple(find_launcher(target, (), Launcher) for target in targets)  # type: ignore[type-abstract]


def _stored_launcher(sweep_dir: Path, target: str) -> Launcher:
    """Return the launcher that a stored file names, if the user trusts its package."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return find_launcher(target, trusted_by_user(sweep_dir), Launcher)  # type: ignore[type-abstract]
    except ConfigError as error:
        package = target.partition(".")[0]
        hint = f"to ask it, set DISTEXP_TRUSTED_PACKAGES={package}"
        return UnknownLauncher(f"its launcher {target} is not used ({error.errors[0].partition(':')[0]}): {hint}")


def trusted_by_user(sweep_dir: Path) -> list[str]:
    """Return the packages that the environment trusts, and those that this user's own command has trusted."""
    from distexp.guard.command_line import packages_of_environment, packages_trusted_by_user
    from distexp.guard.config_files import is_own_file

    if not is_own_file(sweep_dir / COMMAND):
        return packages_of_environment()
    arguments = read_json(sweep_dir / COMMAND)["words"]
    return packages_trusted_by_user([text for text in arguments if isinstance(text, str)])
