"""Fake Slurm commands, for tests of the submission that need no cluster."""

from __future__ import annotations

import os
from pathlib import Path

COMMANDS = {
    "sbatch": 'number=$(cat {root}/jobs 2>/dev/null || echo 100); echo $((number + 1)) > {root}/jobs; echo "$number"',
    "scontrol": "echo 'MaxArraySize = {max_array_size}'",
    "squeue": "exit 0",
    "sacct": "exit 0",
    "scancel": "exit 0",
}
"""Shell lines of each command. The jobs are 100, 101 and so on, and Slurm knows none of them afterwards."""


def fake_slurm(root: Path, max_array_size: int = 1001, **extra: str) -> dict[str, str]:
    """Write the commands to a folder, and return environment variables that put them on the PATH.

    Args:
        root: Folder of the commands. ``calls`` lists every call with its arguments.
        max_array_size: Slurm's MaxArraySize.
        extra: Shell lines to run first, by the name of a command.
    """
    root.mkdir()
    for name, lines in COMMANDS.items():
        path = root / name
        script = lines.format(root=root, max_array_size=max_array_size)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {root}/calls\n{extra.get(name, "")}\n{script}\n')
        path.chmod(0o755)
    return {**os.environ, "PATH": f"{root}:{os.environ['PATH']}"}


def calls(root: Path, name: str) -> list[str]:
    """Return the arguments of each call of a command."""
    lines = (root / "calls").read_text().splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
