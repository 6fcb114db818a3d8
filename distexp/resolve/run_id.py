"""Run ids: hashes of the settings of a run. Equal ids mean equal trainings, but not the other way round."""

import glob
import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from distexp.checkpoints.folder import MANIFEST, candidates, read_manifest
from distexp.config import Config
from distexp.config.custom_code import custom_packages, library_versions, package_hash
from distexp.config.fields import info_of
from distexp.config.keys import schema_fields
from distexp.config.model_checks import loads_from_source, searches_micro_batch, weights_source_key
from distexp.system.cache_dir import cache_dir
from distexp.system.environment_variables import TF32_CONVOLUTIONS

IRRELEVANT = (
    *("name", "command", "exercise", "scale", "scaling", "sweep", "measure", "preflight", "tracker", "kernels", "plan"),
    *("choose", "forecast", "verify", "profile", "repeats", "trusted_packages"),
)
"""Sections and keys that do not change the training, or that only set values of other keys."""

CLUSTER_KEYS = ("nodes", "workers_per_node", "device")
"""Keys of ``cluster`` that determine the training."""


def run_id(config: Config) -> str:
    """Return the run id: 12 hexadecimal digits, a hash of the training with the content of local files."""
    text = json.dumps(_training_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


VERIFY_SETS = {
    "train": (
        *("micro_batch_size", "global_batch_size", "gradient_accumulation_steps", "eval_batch_size", "max_steps"),
        *("num_epochs", "learning_rate", "schedule", "warmup_steps", "step_size", "gamma", "weight_decay", "momentum"),
        *("eps", "gradient_clipping", "evaluate", "log_every", "measure_after_step", "resume", "save_model", "seed"),
        *("checkpoint_every", "profile_steps", "score_answers"),
    ),
    "dataset": ("train_size", "eval_size", "num_workers"),
    "model": ("dropout",),
}
"""Keys that ``distexp verify`` sets, so that its proof holds for each of their values."""


RESUMED_KEYS = (
    *("learning_rate", "schedule", "warmup_steps", "step_size", "gamma", "weight_decay", "gradient_clipping", "seed"),
    *("num_epochs", "max_steps", "evaluate", "eval_batch_size", "log_every", "save_model"),
)
"""Keys of ``train`` that may differ from those of a checkpoint."""


def fits_checkpoint(config: Config, saved: Config, saved_id: str) -> bool:
    """Return whether ``train.resume`` certainly takes a checkpoint of a training with the id ``saved_id``."""
    if run_id(saved) != saved_id:  # Its data have changed, so its steps may be others.
        return False
    new, old = map(_training_settings, (config, saved))
    limits = [(train.max_steps or math.inf, train.num_epochs) for train in (config.train, saved.train)]
    for settings in (new, old):
        settings["train"] = {key: each for key, each in settings["train"].items() if key not in RESUMED_KEYS}
    return new == old and all(limit >= before for limit, before in zip(*limits, strict=True))


def proof_file(config: Config, arithmetic: Sequence[str]) -> Path:
    """Return the file in the cache with the hash of the proof that a configuration trains as ``single`` does.

    Its name depends on the code of distexp and of the custom packages, on the versions of the libraries, and on how
    torch computes: its flags, and the variables that change them. Proofs are made without TF32_CONVOLUTIONS.
    """
    settings = _training_settings(config)
    for section, names in VERIFY_SETS.items():
        settings[section] = {key: each for key, each in settings[section].items() if key not in names}
    packages = ["distexp", *custom_packages(config), config.engine._target_.partition(".")[0]]
    code = {name: package_hash(name) for name in packages}
    known = [each for each in arithmetic if each != TF32_CONVOLUTIONS]
    text = json.dumps([settings, code, library_versions(), known], sort_keys=True)
    return cache_dir() / "proofs" / hashlib.sha256(text.encode()).hexdigest()[:24]


def _training_settings(config: Config) -> dict[str, Any]:
    """Return what determines the training. A change of its form would change the ids of all finished runs."""
    settings: dict[str, Any] = {name: value for name, value in asdict(config).items() if name not in IRRELEVANT}
    settings["cluster"] = {key: settings["cluster"][key] for key in CLUSTER_KEYS}
    for key, spec in schema_fields():
        section, _, name = key.rpartition(".")
        path = settings.get(section, {}).get(name)
        holds_data = info_of(spec).path in ("file", "folder") or key == "dataset.path"
        if holds_data and path is not None:
            # A file may be named like a pattern.
            found = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True)) or [path]
            known = [fingerprint(match) for match in found if os.path.exists(match)]
            settings[section][name] = (known[0] if found == [path] else known) if known else path
    if not config.adapter.freezes_model:
        del settings["adapter"]  # so that the ids of earlier runs stay
    _identify_model(config, settings["model"])
    _remove_unchanged(settings)
    if not settings["parallel"]:  # likewise
        del settings["parallel"]
    train = settings["train"]
    if config.kernels.compile is not None:  # What compiles may become known later, and does not change the training.
        train["compile"] = config.kernels.compile
    # A searched micro-batch is no part of the id, so that all machines give one id. Then the global batch is one.
    size = "gradient_accumulation_steps" if searches_micro_batch(config) else "global_batch_size"
    for key in ("checkpoint_every", "profile_steps", "micro_batch_search_s", size):
        train.pop(key, None)
    if train["compile"] == "blocks":
        train["compile"] = True  # the same
    if train["resume"] is not None:
        # The manifest of the newest checkpoint is hashed, because it contains a checksum of every file.
        whole = (folder for folder in candidates(Path(train["resume"])) if read_manifest(folder) is not None)
        train["resume"] = next((fingerprint(str(folder / MANIFEST)) for folder in whole), None)
    return settings


def _identify_model(config: Config, settings: dict[str, Any]) -> None:
    """Replace paths of weights and tokenizer by fingerprints. Remove a path that the run does not read."""
    model = config.model
    if not loads_from_source(model):
        settings["path"] = None
    for key in {weights_source_key(model), "tokenizer"}:
        source = settings[key]
        if source is not None and os.path.isabs(source) and os.path.isdir(source):
            reads_weights = key != "tokenizer" and model.init == "pretrained"
            settings[key] = model_fingerprint(source, weights=reads_weights)


def _remove_unchanged(settings: dict[str, Any]) -> None:
    """Remove the keys that were added later, if they have their default. So they change no id.

    Neither does a default that became null.
    """
    for key, spec in schema_fields():
        info, (section, _, name) = info_of(spec), key.rpartition(".")
        if section in settings and info.id_of_null is not None:
            swapped = {None: info.id_of_null, info.id_of_null: None}
            settings[section][name] = swapped.get(settings[section][name], settings[section][name])
        if section not in settings or not info.id_if_changed:
            continue
        if settings[section][name] == (spec.default if info.reference is None else info.reference):
            del settings[section][name]
        if "keys" in settings[section]:
            settings[section]["keys"] = [listed for listed in settings[section]["keys"] if listed != name]


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx")

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


@lru_cache(maxsize=64)
def fingerprint(path: str) -> str:
    """Return a hash of the content of a file, or of the file names and sizes of a folder."""
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    digest = hashlib.sha256()
    for root, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            file_path = Path(root) / name
            digest.update(f"{file_path.relative_to(path)}:{file_path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]
