"""Checkpoints on disk: ``checkpoints/step-00000010/`` in a run's directory, and whether one is whole.

A checkpoint is written beside, in ``.step-00000010.tmp``, and renamed when every rank has written. Its
manifest says the size and the CRC-32 of every file, so that a torn or rotten one is found out before
anything is read from it. Nothing here needs torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.runs.record import write_json

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
KEPT = 2
NAME = re.compile(r"step-(\d{8,})")
CHUNK = 1 << 22

Sums = dict[str, tuple[int, int]]
"""Size in bytes and CRC-32 by the path of a file, relative to its checkpoint."""


@dataclass(frozen=True)
class Meta:
    """What a training must have in common with a checkpoint that it goes on from."""

    run_id: str
    step: int  # optimizer steps that are done
    steps_per_epoch: int
    global_batch: int  # samples of a step
    parameters: int
    checkpoint_format: str  # DistributedModel.checkpoint_format of the writer
    world_size: int


def checkpoints_root(run_dir: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_dir / FOLDER


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after a step."""
    return checkpoints_root(run_dir) / f"step-{step:08d}"


def tmp_dir(run_dir: Path, step: int) -> Path:
    """Where that checkpoint is while it is written."""
    return checkpoints_root(run_dir) / f".step-{step:08d}.tmp"


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint by its name; None of another name."""
    found = NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def in_run(run_dir: Path) -> list[Path]:
    """A run's checkpoints, the newest first; whether one is whole is yet to be seen."""
    found = [(step, path) for path in checkpoints_root(run_dir).glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def candidates(folder: Path) -> list[Path]:
    """The checkpoints to start from that a folder names: itself, or those of a run, the newest first."""
    if step_of(folder) is not None:
        return [folder] if folder.is_dir() else []
    return in_run(folder.parent if folder.name == FOLDER else folder)


def suggest(folder: Path) -> list[Path]:
    """What may have been meant by a folder that names none: checkpoints beside it, or runs below it."""
    if folder.parent.name == FOLDER:
        return in_run(folder.parent.parent)
    return sorted(path.parent for path in folder.glob(f"*/{FOLDER}") if in_run(path.parent))


def write_manifest(folder: Path, meta: Meta, sums: Sums) -> None:
    """Says what the checkpoint is and what its files hold; the last file to be written."""
    write_json(folder / MANIFEST, {"meta": vars(meta), "files": sums})


def read_manifest(folder: Path) -> tuple[Meta, Sums] | None:
    """What a checkpoint is; None where its manifest is missing or torn."""
    try:
        raw: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        files = {name: (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        return Meta(**raw["meta"]), files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def find_damage(folder: Path, sums: Sums) -> str | None:
    """The first file that is not as the manifest says, and how; None where all are."""
    for name, (size, crc) in sums.items():
        path = folder / name
        try:
            there = path.stat().st_size
            if there != size:
                return f"{name} has {there} bytes and not {size}"
            if checksum(path)[1] != crc:
                return f"{name} has another checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def checksum(path: Path, *, flush: bool = False) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file; ``flush`` waits until the disk has it."""
    size = crc = 0
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def files_in(folder: Path) -> list[str]:
    """All files below a folder, relative to it, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def put_in_place(run_dir: Path, step: int) -> None:
    """Renames the finished checkpoint of a step, then drops those that it makes superfluous.

    The newest two stay. Later ones, which a run that goes on from here did not find whole, are dropped too.
    """
    target = checkpoint_dir(run_dir, step)
    if target.exists():
        shutil.rmtree(target)
    tmp_dir(run_dir, step).rename(target)
    _flush(target.parent)
    known = [(number, path) for path in in_run(run_dir) if (number := step_of(path)) is not None]
    kept = [path for number, path in known if number <= step][:KEPT]
    for _, path in known:
        if path not in kept:
            shutil.rmtree(path)


def remove_unfinished(run_dir: Path) -> None:
    """Drops what attempts that died while writing left."""
    for path in checkpoints_root(run_dir).glob(".step-*.tmp"):
        shutil.rmtree(path)


def _flush(folder: Path) -> None:
    """Waits until the disk has the names in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
