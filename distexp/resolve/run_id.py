"""``run.id``: equal for two runs exactly where their training is the same."""

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
from distexp.config.model_checks import loads_from_source, weights_source_key

CLUSTER_KEYS = ("nodes", "workers_per_node", "device")
"""Keys of ``cluster`` that say what; all others say where and how long."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""How many pieces of a large file are looked at, and how long one is."""


def run_id(config: Config) -> str:
    """Twelve hexadecimal digits over what determines the training; local data and models count by content."""
    content: dict[str, Any] = asdict(config)
    not_the_training = ("name", "exercise", "scale", "scaling", "sweep", "measure", "preflight", "tracker")
    for key in (*not_the_training, "trusted_packages"):
        del content[key]
    content["cluster"] = {key: content["cluster"][key] for key in CLUSTER_KEYS}
    for key in ("train_path", "eval_path", "root", "path"):
        path = content["dataset"][key]
        if path is not None and os.path.exists(path):
            content["dataset"][key] = fingerprint(path)
    _identify_model(config, content["model"])
    for key in ("checkpoint_every", "profile_steps"):
        del content["train"][key]
    if content["train"]["resume"] is not None:
        content["train"]["resume"] = checkpoint_fingerprint(Path(content["train"]["resume"]))
    if content["deepspeed"]["config_file"] is not None:
        content["deepspeed"]["config_file"] = fingerprint(content["deepspeed"]["config_file"])
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _identify_model(config: Config, content: dict[str, Any]) -> None:
    model = config.model
    if not loads_from_source(model):
        content["path"] = None
    for key in {weights_source_key(model), "tokenizer"}:
        where = content[key]
        if where is not None and os.path.isabs(where) and os.path.isdir(where):
            weights = key != "tokenizer" and model.init == "pretrained"
            content[key] = model_fingerprint(where, weights=weights)


@lru_cache(maxsize=64)
def model_fingerprint(folder: str, *, weights: bool) -> str:
    """A model's folder by what its own files hold: small ones whole, large ones in evenly spaced pieces.

    Two trainings of one architecture have files of equal names and sizes, and differ nearly everywhere.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or (path.suffix in WEIGHTS and not weights):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        step = max(SAMPLE_BYTES, size // SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def checkpoint_fingerprint(folder: Path) -> str | None:
    """The newest checkpoint that a folder names by its manifest, which has a checksum of every file."""
    for candidate in candidates(folder):
        if read_manifest(candidate) is not None:
            return fingerprint(str(candidate / MANIFEST))
    return None


@lru_cache(maxsize=64)
def fingerprint(path: str) -> str:
    """A file by its bytes, a folder by the names and sizes of its files."""
    digest = hashlib.sha256()
    if os.path.isfile(path):
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    else:
        for where, folders, names in os.walk(path):
            folders.sort()
            for name in sorted(names):
                file_path = Path(where) / name
                digest.update(f"{file_path.relative_to(path)}:{file_path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
