"""The directory of a sweep: its creation, its lock, and the files from which it can be resumed."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from distexp.guard.sweep_files import check_files, remember_file
from distexp.runs.full_disk import name_folder
from distexp.runs.json_files import write_json
from distexp.runs.run_dir import COMMAND, MULTIRUN
from distexp.runs.run_lock import sweep_lock


@contextmanager
def locked_sweep_dir(master: DictConfig, cells: int) -> Iterator[Path]:
    """Create the directory of a sweep with its files, and lock it during the block.

    A resumed sweep has a directory already.

    Args:
        master: Configuration of the command, with the hydra node.
        cells: Number of cells.

    Raises:
        ConfigError: a foreign sweep contains links that lead out of it, or another command runs a sweep there.
    """
    chosen = any(text.startswith("hydra.sweep.dir=") for text in master.hydra.overrides.hydra)
    if master.sweep.resume:
        check_files(Path(master.hydra.sweep.dir))
    sweep_dir = claim_sweep_dir(Path(master.hydra.sweep.dir), chosen_by_user=chosen)
    with name_folder(sweep_dir), sweep_lock(sweep_dir):
        write_sweep_files(master, sweep_dir, cells)
        yield sweep_dir


def claim_sweep_dir(wanted: Path, *, chosen_by_user: bool) -> Path:
    """Create the directory of a sweep. If another command has just taken the default one, add a suffix."""
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if chosen_by_user:
        wanted.mkdir(exist_ok=True)
        return wanted
    for attempt in itertools.count(1):
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}_{attempt}")
        try:
            candidate.mkdir()
        except FileExistsError:
            continue
        return candidate
    raise AssertionError("unreachable")


def write_sweep_files(master: DictConfig, sweep_dir: Path, cells: int) -> None:
    """Write Hydra's ``multirun.yaml``, and the command line for ``distexp resume``; keep existing files.

    Args:
        master: Configuration of the command, with the hydra node.
        sweep_dir: Directory of the sweep.
        cells: Number of cells.
    """
    path = sweep_dir / MULTIRUN
    if not path.exists():
        OmegaConf.save(master, path)
    if not (sweep_dir / COMMAND).exists():
        command = {"command": master.command, "words": sys.argv[1:], "directory": os.getcwd(), "cells": cells}
        write_json(sweep_dir / COMMAND, command)
        remember_file(sweep_dir / COMMAND)
