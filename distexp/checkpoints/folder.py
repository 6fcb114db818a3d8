"""Checkpoints on disk: ``checkpoints/step-00000010/`` in a run directory. This module needs no torch.

A checkpoint is written to ``.step-00000010.tmp`` and renamed when all ranks have written. Its manifest holds the size
and the CRC-32 of each file, so that a damaged checkpoint is detected before it is loaded.
"""

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distexp.runs.run_dir import CHECKPOINTS
from distexp.system.files import flush_names, load_json, move_into_place, read_or_none, remove, write_json

MANIFEST = "manifest.json"
KEEP = 2  # number of checkpoints that a run keeps

NAME = re.compile(r"step-(\d{8,})")
CHUNK = 1 << 22  # bytes to read at once

Checksums = dict[str, tuple[int, int]]  # bytes and CRC-32 of each file, by its path in the checkpoint


@dataclass(frozen=True)
class CheckpointMeta:
    """What identifies a checkpoint, and what a training must have in common with it."""

    run_id: str
    step: int  # optimizer steps done
    steps_per_epoch: int
    global_batch: int  # samples of a step
    parameters: int
    checkpoint_format: str  # DistributedModel.checkpoint_format of the model that was saved
    world_size: int
    base: str | None = None  # hash of the weights that are not in the checkpoint, because they are not trained


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint after a step."""
    return run_dir / CHECKPOINTS / f"step-{step:08d}"


def tmp_dir(run_dir: Path, step: int) -> Path:
    """Return the folder in which that checkpoint is written."""
    return run_dir / CHECKPOINTS / f".step-{step:08d}.tmp"


def step_of(folder: Path) -> int | None:
    """Return the step of a checkpoint folder; None if the folder has another name."""
    found = NAME.fullmatch(folder.name)
    return int(found[1]) if found else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, newest first; they may be damaged."""
    found = {path: step for path in (run_dir / CHECKPOINTS).glob("step-*") if (step := step_of(path)) is not None}
    return sorted(found, key=lambda path: found[path], reverse=True)


def candidates(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first: itself, or those of a run or its ``checkpoints`` folder."""
    if step_of(folder) is not None:
        return [folder] if folder.is_dir() else []
    return list_checkpoints(folder.parent if folder.name == CHECKPOINTS else folder)


def suggest(folder: Path) -> list[Path]:
    """Return other checkpoints of the run, or the runs below a folder, as hints if the folder has no checkpoint."""
    if folder.parent.name == CHECKPOINTS:
        return list_checkpoints(folder.parent.parent)
    return sorted(path.parent for path in folder.glob(f"*/{CHECKPOINTS}") if list_checkpoints(path.parent))


def write_manifest(folder: Path, meta: CheckpointMeta, checksums: Checksums, settings: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint, after all of its other files."""
    write_json(folder / MANIFEST, {"meta": vars(meta), "files": checksums, "settings": settings})


def read_manifest(folder: Path) -> tuple[CheckpointMeta, Checksums] | None:
    """Return the manifest of a checkpoint; None if it is missing or invalid."""
    try:
        raw: dict[str, Any] = load_json(folder / MANIFEST)
        files = {name: (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        return CheckpointMeta(**raw["meta"]), files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the training that wrote a checkpoint; empty if it has none."""
    settings = read_or_none(folder / MANIFEST, "settings")
    return settings if isinstance(settings, dict) else {}


def find_damage(folder: Path, checksums: Checksums) -> str | None:
    """Describe the first damaged file; return None if all files are intact."""
    for name, (size, crc) in checksums.items():
        path = folder / name
        try:
            actual = path.stat().st_size
            if actual != size:
                return f"{name} has {actual} bytes instead of {size}"
            if checksum(path)[1] != crc:
                return f"{name} has a wrong checksum"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def checksum(path: Path, *, flush: bool = False) -> tuple[int, int]:
    """Return the size in bytes and the CRC-32 of a file; optionally flush it to disk."""
    size = crc = 0
    with path.open("rb") as file:
        if flush:
            os.fsync(file.fileno())
        while chunk := file.read(CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it and sorted."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def publish(run_dir: Path, step: int) -> None:
    """Rename the finished checkpoint of a step. Keep two up to this step, and no later ones, which are damaged."""
    target = checkpoint_dir(run_dir, step)
    move_into_place(tmp_dir(run_dir, step), target)
    flush_names(target.parent)
    known = list_checkpoints(run_dir)
    kept = [path for path in known if (step_of(path) or 0) <= step][:KEEP]
    for path in known:
        if path not in kept:
            remove(path, ignore_errors=False)


def remove_unfinished(run_dir: Path) -> None:
    """Delete the unfinished checkpoints of attempts that died while writing."""
    for path in (run_dir / CHECKPOINTS).glob(".step-*.tmp"):
        remove(path, ignore_errors=False)
