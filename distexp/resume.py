"""``python -m distexp.resume DIR [OVERRIDE ...]``: runs what a sweep lacks, and keeps what it has.

It is the sweep's own command again, in its own directory: a run that is done is known by its ``run.id``
and kept, one that failed or left no record runs again where it was, and a new cell gets a new number.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distexp.cli.main import main as distexp
from distexp.cli.overrides import is_override
from distexp.config import ConfigError
from distexp.runs.existing import COMMAND, not_a_sweep

USAGE = """usage: python -m distexp.resume DIR [KEY=VALUE ...]

Runs the failed and the missing runs of a sweep again, in their directories; keeps those that are done.
A key that is given replaces the sweep's own, as in zero_stage=1,2,3,0: what is new in it is added.
cluster=slurm or cluster=local may be given as well."""

OWN = ("hydra.sweep.dir", "sweep.resume")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the sweep; 2 where there is none to resume."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0 if words else 2
    sweep_dir, new = Path(words[0]).absolute(), words[1:]
    try:
        began, directory = original(sweep_dir)
    except ConfigError as error:
        print(f"distexp: {error}", file=sys.stderr)
        return 2
    merged = merge(began, new)
    if os.path.isdir(directory):
        os.chdir(directory)  # what its paths are relative to
    return distexp([*merged, f"hydra.sweep.dir={sweep_dir}", "sweep.resume=true"])


def original(sweep_dir: Path) -> tuple[list[str], str]:
    """The words that began a sweep, and where they were typed; ConfigError where the directory is none."""
    try:
        command = json.loads((sweep_dir / COMMAND).read_text())
    except (OSError, ValueError):
        raise ConfigError(not_a_sweep(sweep_dir, COMMAND)) from None
    return command["words"], command["directory"]


def merge(words: Sequence[str], new: Sequence[str]) -> list[str]:
    """The sweep's words with the new ones, which replace what they name."""
    replaced = {_key(word) for word in new if is_override(word)} | set(OWN)
    kept = [word for word in words if not (is_override(word) and _key(word) in replaced)]
    multirun = [] if "--multirun" in kept or "-m" in kept else ["--multirun"]
    return [*multirun, *kept, *new]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


if __name__ == "__main__":
    sys.exit(main())
