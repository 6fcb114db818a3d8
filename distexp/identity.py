"""``run.id``: equal for two runs exactly where their training is the same."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from distexp.config import Config

PLACE_KEYS = ("name", "cpus_per_worker", "timeout_min", "hang_timeout_min", "debug")
"""Keys of ``cluster`` that say where and how long, not what."""


def run_id(config: Config) -> str:
    """Twelve hexadecimal digits over what determines the training; data files count by content."""
    content: dict[str, Any] = asdict(config)
    for key in ("name", "sweep", "measure", "trusted_packages"):
        del content[key]
    for key in PLACE_KEYS:
        del content["cluster"][key]
    for key in ("train_path", "eval_path", "root", "path"):
        path = content["dataset"][key]
        if path is not None and os.path.exists(path):
            content["dataset"][key] = fingerprint(path)
    if content["deepspeed"]["config_file"] is not None:
        content["deepspeed"]["config_file"] = fingerprint(content["deepspeed"]["config_file"])
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


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
