"""Checks of local files and folders: a wrong path is reported before any worker starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from distexp.checkpoints.folder import candidates, suggest
from distexp.config import Config
from distexp.config.field_info import info_of
from distexp.config.key_info import get_value, schema_fields
from distexp.config.weights_source import loads_from_source, weights_source, weights_source_key
from distexp.data.squad_json import find_small_file_error
from distexp.resolve.data_checks import same_task

EXISTS = {"file": os.path.isfile, "folder": os.path.isdir}
"""Checks by the kind of path that a key has in the schema."""

TINYIMAGENET = "distexp.data.tinyimagenet."
"""Start of the targets of datasets that read a folder of TinyImageNet."""

TINYIMAGENET_FILES = ("wnids.txt", "train", "val/val_annotations.txt")
"""Files and folders of the official archive of TinyImageNet that a run reads."""

SQUAD = "distexp.data.squad"
"""Start of the targets of datasets that need a tokenizer."""

SQUAD_FILES = "distexp.data.squad.load"
"""Target of the dataset that reads JSON files of SQuAD."""

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken")
"""Files of which a folder with a tokenizer has at least one."""


def check_files(config: Config) -> Iterator[str]:
    """Yield an error for each path that does not exist."""
    for key, spec in schema_fields():
        value, kind = get_value(config, key), info_of(spec).path
        if value is not None and kind in EXISTS and not EXISTS[kind](value):
            yield f"{key}={value} is not a {kind}: correct the path"
    for key, source in (("dataset.path", config.dataset.path), ("model.tokenizer", config.model.tokenizer)):
        if source is not None and looks_like_path(source) and not os.path.exists(source):
            yield f"{key}={source} does not exist: correct the path, or use a hub id"


def check_dataset_files(config: Config) -> Iterator[str]:
    """Yield an error for each dataset path that is missing, and for each small file that is not in the format."""
    yield from _image_folder_errors(config)
    pair = {"dataset.train_path": config.dataset.train_path, "dataset.eval_path": config.dataset.eval_path}
    given = [key for key, path in pair.items() if path is not None]
    if len(given) == 1:
        (missing,) = set(pair) - set(given)
        yield f"{given[0]}={pair[given[0]]} is set but {missing} is not: set both or neither"
    if config.dataset._target_ == SQUAD_FILES:
        for key, path in pair.items():
            if path is not None and os.path.isfile(path) and (error := find_small_file_error(path)):
                yield f"{key}={error}"  # an error starts with the path


def _image_folder_errors(config: Config) -> Iterator[str]:
    """Yield an error if ``dataset.root`` is needed and missing, or is no folder of TinyImageNet."""
    dataset = config.dataset
    # A dataset of another task is an error already, and the user will probably replace it.
    if dataset.root is None and "root" in dataset.keys and same_task(config):
        yield f"dataset={dataset.name} needs a folder: set dataset.root to one in the official layout of TinyImageNet"
    if dataset.root is not None and os.path.isdir(dataset.root) and dataset._target_.startswith(TINYIMAGENET):
        missing_files = [name for name in TINYIMAGENET_FILES if not os.path.exists(os.path.join(dataset.root, name))]
        if missing_files:
            yield (
                f"dataset.root={dataset.root} contains no {', '.join(missing_files)}: set it to the top folder of the "
                "official archive of TinyImageNet"
            )


def check_checkpoint(config: Config) -> Iterator[str]:
    """Yield an error if the folder to resume from contains no checkpoint."""
    resume = config.train.resume
    if resume is not None and not candidates(Path(resume)):
        near = ", ".join(map(str, suggest(Path(resume))))
        hint = near or "the folder of a checkpoint, or of a run that wrote one"
        yield f"train.resume={resume} contains no checkpoint: use {hint}"


def check_model_files(config: Config) -> Iterator[str]:
    """Yield an error if the weights source is a folder without a model. Hub ids are checked when loaded."""
    model = config.model
    source, key = weights_source(model), f"model.{weights_source_key(model)}"
    if source is None or not loads_from_source(model):
        return
    if os.path.exists(source):
        if not os.path.isfile(os.path.join(source, "config.json")):
            yield f"{key}={source} contains no config.json: use a folder written by save_pretrained, or a hub id"
    elif looks_like_path(source):
        yield f"{key}={source} does not exist: correct the path, or use a hub id"


def check_tokenizer_files(config: Config) -> Iterator[str]:
    """Yield an error if text data has no tokenizer. Hub ids are checked when loaded."""
    model = config.model
    if not config.dataset._target_.startswith(SQUAD) or not same_task(config):
        return
    if model.tokenizer is None:
        yield f"model.tokenizer is null, but dataset={config.dataset.name} needs one: set byte, a hub id or a folder"
        return
    source = model.tokenizer
    if source == "auto":
        source = (weights_source(model) if loads_from_source(model) else None) or "byte"
    folder = Path(source)
    if folder.is_absolute() and folder.is_dir() and not _has_tokenizer(folder):
        yield (
            f"model.tokenizer={model.tokenizer} needs a tokenizer in {source}, which contains none: "
            "set it to byte, a hub id, or a folder with a tokenizer"
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def looks_like_path(text: str) -> bool:
    """Return whether a text can only be a path; a hub id is ``name`` or ``owner/name``."""
    return text.startswith(("/", "~", "./", "../")) or text in (".", "..") or text.count("/") > 1
