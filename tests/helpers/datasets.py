"""What the tests of the data layer share."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from distexp.config import DatasetConfig, ModelConfig

REPOSITORY = Path(__file__).resolve().parents[2]
REAL_DATA = Path(os.environ.get("DISTEXP_TEST_DATA", REPOSITORY.parent / "shared" / "data"))

TEXT_MODEL = ModelConfig(name="some_model", task="causal_lm", tokenizer="byte", vocab_size=1024)
IMAGE_MODEL = ModelConfig(name="some_model", task="image_classification")


def real_squad() -> DatasetConfig:
    """The real piece of SQuAD; its absence fails a test."""
    files = {"train_path": "train-v1.1.json", "eval_path": "dev-v1.1.json"}
    paths = {key: REAL_DATA / "squad" / name for key, name in files.items()}
    for path in paths.values():
        assert path.is_file(), f"{path} is missing: set DISTEXP_TEST_DATA to the folder of real pieces of data"
    return dataset("squad", max_length=512, **{key: str(path) for key, path in paths.items()})


def real_images() -> DatasetConfig:
    """The real piece of TinyImageNet; its absence fails a test."""
    root = REAL_DATA / "tinyimagenet32"
    assert root.is_dir(), f"{root} is missing: set DISTEXP_TEST_DATA to the folder of real pieces of data"
    return dataset("tinyimagenet", root=str(root))


def dataset(name: str, **keys: Any) -> DatasetConfig:
    return replace(DatasetConfig(name=name), **keys)
