"""What is stored of a search, in ``choose.json``: its trials, so that it can be resumed, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distexp.config import ConfigError
from distexp.runs.command_text import suggest_command
from distexp.runs.json_files import read_json, write_json
from distexp.runs.run_dir import CHOICE
from distexp.runs.typed_values import parse_dataclass

VERSION = 1


@dataclass
class StoredTrial:
    """A trial in ``choose.json``: which run it is, and what it has cost.

    Attributes:
        overrides: Overrides of the candidate, and further ones of the trial.
        steps: Number of measured steps.
        repeat: Number of equal trials before it.
        number: Number of its run.
        status: Status of its record; None if it has not ended.
        gpu_seconds: Time of the run times the number of workers.
        startup_gpu_seconds: The part of it outside of training and evaluation.
        compares_losses: Whether it was run to compare the losses, after the search.
    """

    overrides: list[str]
    steps: int
    repeat: int
    number: int
    status: str | None = None
    gpu_seconds: float = 0.0
    startup_gpu_seconds: float = 0.0
    compares_losses: bool = False


def _no_content() -> dict[str, Any]:
    return {}


@dataclass
class SearchState:
    """The file of a search.

    Attributes:
        folder: Directory of the search.
        command: Overrides that the search is about.
        describe: Returns what else the file contains: winner, candidates and statements.
        trials: Trials that were started, in order.
    """

    folder: Path
    command: list[str]
    describe: Callable[[], dict[str, Any]] = _no_content
    trials: list[StoredTrial] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, command: Sequence[str]) -> SearchState:
        """Return the state of a directory, an empty one if it has no search yet.

        Raises:
            ConfigError: if the directory contains another search, or a damaged file.
        """
        path = folder / CHOICE
        try:
            raw = read_json(path)
            stored, trials = raw["command"], [parse_dataclass(StoredTrial, trial) for trial in raw["trials"]]
        except FileNotFoundError:
            return cls(folder, list(command))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}): start the search in another directory") from None
        if stored != list(command):
            raise ConfigError(
                f"{folder} contains the search for '{' '.join(map(str, stored))}', and this one is for "
                f"'{' '.join(command)}': choose another hydra.sweep.dir, or continue that one with "
                f"{suggest_command('resume', folder)}"
            )
        return cls(folder, list(command), trials=trials)

    def find(self, overrides: Sequence[str], steps: int, repeat: int) -> StoredTrial | None:
        """Return a trial that was started before; None if it was not."""
        wanted = (list(overrides), steps, repeat)
        return next((trial for trial in self.trials if (trial.overrides, trial.steps, trial.repeat) == wanted), None)

    def add(self, trial: StoredTrial) -> StoredTrial:
        """Add a trial and return it."""
        self.trials.append(trial)
        return trial

    @property
    def gpu_seconds(self) -> float:
        """Return the cost of all trials."""
        return sum(trial.gpu_seconds for trial in self.trials)

    @property
    def startup_gpu_seconds(self) -> float:
        """Return the part of the cost outside of training and evaluation."""
        return sum(trial.startup_gpu_seconds for trial in self.trials)

    @property
    def check_gpu_seconds(self) -> float:
        """Return the part of the cost for trials that compare the losses."""
        return sum(trial.gpu_seconds for trial in self.trials if trial.compares_losses)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            **self.describe(),
            "gpu_seconds": round(self.gpu_seconds, 1),
            "startup_gpu_seconds": round(self.startup_gpu_seconds, 1),
            "check_gpu_seconds": round(self.check_gpu_seconds, 1),
            "command": self.command,
            "trials": [asdict(trial) for trial in self.trials],
            "version": VERSION,
        }

    def write(self) -> None:
        """Write the file atomically."""
        write_json(self.folder / CHOICE, self.to_json())
