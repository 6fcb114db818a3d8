"""Checks of local files and folders: a wrong path is reported before any worker starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from distexp.checkpoints.folder import candidates, suggest
from distexp.config import Config
from distexp.config.model_checks import loads_from_source, weights_source, weights_source_key
from distexp.resolve.cross_checks import same_task


def check_dataset_files(config: Config) -> Iterator[str]:
    """Yield an error for each dataset path that is missing or does not exist."""
    dataset = config.dataset
    yield from _check_path("dataset.train_path", dataset.train_path, "file")
    yield from _check_path("dataset.eval_path", dataset.eval_path, "file")
    yield from _check_path("dataset.root", dataset.root, "folder")
    if dataset.path is not None and looks_like_path(dataset.path) and not os.path.exists(dataset.path):
        yield f"dataset.path={dataset.path} does not exist: correct the path, or use a hub id"
    # A dataset of another task is an error already, and the user will probably replace it.
    if dataset.root is None and "root" in dataset.keys and same_task(config):
        yield f"dataset={dataset.name} needs a folder: set dataset.root to one in the official layout of TinyImageNet"
    pair = {"dataset.train_path": dataset.train_path, "dataset.eval_path": dataset.eval_path}
    given = [key for key, path in pair.items() if path is not None]
    if len(given) == 1:
        (missing,) = set(pair) - set(given)
        yield f"{given[0]}={pair[given[0]]} is set but {missing} is not: set both or neither"


def check_training_files(config: Config) -> Iterator[str]:
    """Yield an error for a DeepSpeed file or a checkpoint that does not exist."""
    yield from _check_path("deepspeed.config_file", config.deepspeed.config_file, "file")
    resume = config.train.resume
    if resume is not None and not candidates(Path(resume)):
        near = ", ".join(map(str, suggest(Path(resume))))
        hint = near or "the folder of a checkpoint, or of a run that wrote one"
        yield f"train.resume={resume} contains no checkpoint: use {hint}"


def check_model_files(config: Config) -> Iterator[str]:
    """Yield an error for each local model or tokenizer that does not exist. Hub ids are checked when loaded."""
    model = config.model
    source, tokenizer = weights_source(model), model.tokenizer
    if source is not None and loads_from_source(model):
        key = f"model.{weights_source_key(model)}"
        if os.path.exists(source):
            if not os.path.isfile(os.path.join(source, "config.json")):
                yield f"{key}={source} contains no config.json: use a folder written by save_pretrained, or a hub id"
        elif looks_like_path(source):
            yield f"{key}={source} does not exist: correct the path, or use a hub id"
    if tokenizer is not None and looks_like_path(tokenizer) and not os.path.exists(tokenizer):
        yield f"model.tokenizer={tokenizer} does not exist: correct the path, or use a hub id"


def looks_like_path(text: str) -> bool:
    """Return whether a text can only be a path; a hub id is ``name`` or ``owner/name``."""
    return text.startswith(("/", "~", "./", "../")) or text in (".", "..") or text.count("/") > 1


def _check_path(key: str, path: str | None, kind: str) -> Iterator[str]:
    exists = os.path.isfile if kind == "file" else os.path.isdir
    if path is not None and not exists(path):
        yield f"{key}={path} is not a {kind}: correct the path"
