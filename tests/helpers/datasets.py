"""Data sets for tests: real subsets if available, otherwise generated data."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from distexp.config import DatasetConfig, ModelConfig
from tests.helpers.generated_data import write_squad, write_tinyimagenet

REPOSITORY = Path(__file__).resolve().parents[2]
NEIGHBOR = REPOSITORY.parent / "shared" / "data"
"""Real data of a development checkout: subsets of SQuAD v1.1 and of TinyImageNet."""

SQUAD, TINYIMAGENET = "squad", "tinyimagenet32"

TEXT_MODEL = ModelConfig(name="some_model", task="causal_lm", tokenizer="byte", vocab_size=1024)
IMAGE_MODEL = ModelConfig(name="some_model", task="image_classification")


def save_sentencepiece(folder: Path, *, legacy: bool) -> None:
    """Save a tokenizer that puts a space before a text, also after special tokens if ``legacy``, as Llama 2 does."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = ["<unk>", "</s>", "<pad>", *map(chr, range(33, 127)), "\n", "▁"]
    vocabulary = {token: number for number, token in enumerate([*characters, "▁▁", "▁a", "▁b"])}
    merges = [("▁", "▁"), ("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    special = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def real_data() -> Path | None:
    """Return the folder of real data; None if the tests use generated data.

    DISTEXP_TEST_DATA names the folder, and it must exist then. An empty value selects generated data.
    Without the variable, it is ../shared/data if that exists.
    """
    configured = os.environ.get("DISTEXP_TEST_DATA")
    if configured is None:
        return NEIGHBOR if NEIGHBOR.is_dir() else None
    if not configured:
        return None
    for name in (SQUAD, TINYIMAGENET):
        folder = Path(configured) / name
        assert folder.is_dir(), f"DISTEXP_TEST_DATA={configured} has no folder {name}: correct it, or unset it"
    return Path(configured)


def squad_dataset(folder: Path) -> DatasetConfig:
    """Return SQuAD's files; generated ones are written to ``folder``."""
    root = _real_or_generated(SQUAD, folder, write_squad)
    paths = {"train_path": str(root / "train-v1.1.json"), "eval_path": str(root / "dev-v1.1.json")}
    return dataset("squad", max_length=512, **paths)


def tinyimagenet_dataset(folder: Path) -> DatasetConfig:
    """Return TinyImageNet's folder; generated images are written to ``folder``."""
    return dataset("tinyimagenet", root=str(_real_or_generated(TINYIMAGENET, folder, write_tinyimagenet)))


def _real_or_generated(name: str, folder: Path, write: Callable[[Path], None]) -> Path:
    real = real_data()
    if real is not None:
        return real / name
    write(folder / name)
    return folder / name


def dataset(name: str, **keys: Any) -> DatasetConfig:
    """Return a data set's section with some keys set."""
    return replace(DatasetConfig(name=name), **keys)
