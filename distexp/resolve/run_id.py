"""Run ids: two runs have the same id if and only if their training is the same."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from distexp.checkpoints.folder import MANIFEST, candidates, read_manifest
from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch
from distexp.config.field_info import info_of
from distexp.config.key_info import schema_fields
from distexp.config.model_checks import loads_from_source, weights_source_key

CLUSTER_KEYS = ("nodes", "workers_per_node", "device")
"""Keys of ``cluster`` that determine the training."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
PIECES, PIECE_BYTES = 64, 1 << 16
"""Number of pieces to read of a large file, and the size of a piece."""


def run_id(config: Config) -> str:
    """Return the run id: 12 hexadecimal digits, a hash of everything that determines the training.

    Local datasets and models count by content, not by path.
    """
    content: dict[str, Any] = asdict(config)
    irrelevant = ("name", "exercise", "scale", "scaling", "sweep", "measure", "preflight", "tracker", "kernels", "plan")
    for key in (*irrelevant, "choose", "forecast", "profile", "repeats", "trusted_packages"):
        del content[key]
    content["cluster"] = {key: content["cluster"][key] for key in CLUSTER_KEYS}
    for key, spec in schema_fields():
        section, _, name = key.rpartition(".")
        if info_of(spec).path in ("file", "folder") or key == "dataset.path":
            path = content[section][name]
            if path is not None and os.path.exists(path):
                content[section][name] = fingerprint(path)
    _identify_model(config, content["model"])
    _remove_unchanged(content)
    for key in ("checkpoint_every", "profile_steps", "micro_batch_search_s", _redundant_size(config)):
        content["train"].pop(key, None)
    if content["train"]["compile"] == "blocks":
        content["train"]["compile"] = True
    if content["train"]["resume"] is not None:
        content["train"]["resume"] = checkpoint_fingerprint(Path(content["train"]["resume"]))
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _redundant_size(config: Config) -> str:
    """Return the key of ``train`` that follows from the others.

    A searched micro-batch is no part of the id, so that all machines give one id. Then the global batch is one.
    """
    return "gradient_accumulation_steps" if searches_micro_batch(config) else "global_batch_size"


def _remove_unchanged(content: dict[str, Any]) -> None:
    """Remove the keys that were added later, if they have their default. So the ids of older runs stay."""
    for key, spec in schema_fields():
        if not info_of(spec).id_if_changed:
            continue
        section, _, name = key.rpartition(".")
        reference = info_of(spec).reference
        if content[section][name] == (spec.default if reference is None else reference):
            del content[section][name]
        if name in content[section].get("keys", ()):
            content[section]["keys"] = [each for each in content[section]["keys"] if each != name]


def _identify_model(config: Config, content: dict[str, Any]) -> None:
    model = config.model
    if not loads_from_source(model):
        content["path"] = None
    for key in {weights_source_key(model), "tokenizer"}:
        source = content[key]
        if source is not None and os.path.isabs(source) and os.path.isdir(source):
            weights = key != "tokenizer" and model.init == "pretrained"
            content[key] = model_fingerprint(source, weights=weights)


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
