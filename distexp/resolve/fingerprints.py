"""Fingerprints: short hashes of the content of datasets, models and checkpoints.

Two runs with the same data have the same run id, wherever the data is.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path

from distexp.checkpoints.folder import MANIFEST, candidates, read_manifest

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
"""Endings of files with weights."""

PIECES, PIECE_BYTES = 64, 1 << 16
"""Number of pieces to read of a large file, and the size of a piece."""


@lru_cache(maxsize=64)
def model_fingerprint(folder: str, *, weights: bool) -> str:
    """Return a hash of the files of a model: all of a small file, evenly spaced pieces of a large one.

    Pieces are enough: two trainings of one architecture differ nearly everywhere.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or (path.suffix in WEIGHTS and not weights):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        step = max(PIECE_BYTES, size // PIECES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()[:16]


def checkpoint_fingerprint(folder: Path) -> str | None:
    """Return a hash of the newest checkpoint in a folder, None if it has none.

    The manifest is hashed, because it contains a checksum of every file.
    """
    for candidate in candidates(folder):
        if read_manifest(candidate) is not None:
            return fingerprint(str(candidate / MANIFEST))
    return None


@lru_cache(maxsize=64)
def fingerprint(path: str) -> str:
    """Return a hash of the content of a file, or of the file names and sizes of a folder."""
    digest = hashlib.sha256()
    if os.path.isfile(path):
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    else:
        for root, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                file_path = Path(root) / name
                digest.update(f"{file_path.relative_to(path)}:{file_path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
