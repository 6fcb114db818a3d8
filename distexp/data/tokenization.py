"""Tokenizers behind one small protocol: a byte-level BPE of our own, or any of Hugging Face's.

``model.tokenizer=byte`` trains the first on the training texts, with neither a download nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import loads_from_source, weights_source
from distexp.data.cache import build_once, cache_dir
from distexp.system.hub import offline_if_unreachable

# A forked loader worker never tokenises; without a choice made here, every fork would warn of it.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

PAD, EOS = "<pad>", "</s>"
SMALLEST = 256 + len((PAD, EOS))
"""Every byte and the two special tokens."""

DEFAULT_SIZE = 1024
CHUNK = 2048
"""Texts encoded at a time: bounds the memory of what tokenizers return beside the ids."""

TokenIds = NDArray[np.int32]


class Tokenizer(Protocol):
    """What data and evaluation need of a tokenizer."""

    name: str  # byte(1024), or the name or path it was loaded from
    size: int  # entries of the vocabulary
    eos_id: int
    pad_id: int
    fingerprint: str  # of everything that decides the ids

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of each text, without special tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Writes files that ``AutoTokenizer.from_pretrained(folder)`` reads."""
        ...


class ByteTokenizer:
    """A byte-level BPE: every text has ids, and decodes to itself."""

    def __init__(self, file: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        # A text that holds "</s>" is text, not the end of an answer.
        self._tokenizer.encode_special_tokens = True
        self.size: int = self._tokenizer.get_vocab_size()
        self.name = f"byte({self.size})"
        # Their order among the special tokens that it was trained with.
        self.pad_id, self.eos_id = 0, 1
        self.fingerprint = _digest(self._tokenizer.to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [
            np.asarray(encoding.ids, dtype=np.int32)
            for start in range(0, len(texts), CHUNK)
            for encoding in self._tokenizer.encode_batch_fast(
                list(texts[start : start + CHUNK]), add_special_tokens=False
            )
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class HuggingFaceTokenizer:
    """A tokenizer that transformers' AutoTokenizer loads, by name or path."""

    def __init__(self, name: str) -> None:
        self._tokenizer = _auto_tokenizer(name)
        if len(self._tokenizer) <= len(set(self._tokenizer.all_special_ids)):
            # Of a model's folder without a tokenizer, transformers makes one that knows no text.
            raise ConfigError(
                f"model.tokenizer={name} has no tokenizer in its folder: set model.tokenizer to where there is one, "
                "or to byte"
            )
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(
                f"model.tokenizer={name} has no end-of-sequence token, and each answer is closed by one: "
                "choose another tokenizer, or byte"
            )
        self.name = name
        self.size = len(self._tokenizer)
        self.eos_id: int = self._tokenizer.eos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad is None else pad
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.fingerprint = _digest(f"{name} {self.size}" if backend is None else backend.to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        return [
            np.asarray(ids, dtype=np.int32)
            for start in range(0, len(texts), CHUNK)
            for ids in self._tokenizer(
                list(texts[start : start + CHUNK]), add_special_tokens=False, return_attention_mask=False
            )["input_ids"]
        ]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def load_tokenizer(model: ModelConfig, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that ``model.tokenizer`` names.

    Args:
        model: its ``tokenizer`` is ``byte``, a hub id or path, or ``auto``: the one that lies beside the
            weights or the architecture that are read, else ``byte``, for an architecture of our own with
            random weights knows no tokenizer. Its ``vocab_size`` is the largest size of a byte tokenizer,
            1024 when null.
        texts: what a byte tokenizer is trained on; consumed only then.

    Raises:
        ConfigError: no such tokenizer, or one that cannot be used.
    """
    if model.tokenizer is None:
        raise ConfigError("model.tokenizer is null, and texts need one: set byte, auto, or a name or path")
    name: str | None = model.tokenizer
    if name == "auto":
        name = weights_source(model) if loads_from_source(model) else "byte"
    if name == "byte" or name is None:
        return train_byte_tokenizer(texts, model.vocab_size or DEFAULT_SIZE)
    return HuggingFaceTokenizer(name)


def train_byte_tokenizer(texts: Iterable[str], size: int) -> ByteTokenizer:
    """A byte-level BPE of at most ``size`` entries; the same texts give the same one, from the cache."""
    if size < SMALLEST:
        raise ConfigError(
            f"model.vocab_size={size} is too small for model.tokenizer=byte, which holds every byte and "
            f"two special tokens: set at least {SMALLEST}"
        )
    corpus = list(texts)
    digest = _digest("\x1e".join(corpus))
    path = cache_dir() / f"byte-tokenizer-v1-{size}-{digest}.json"
    return ByteTokenizer(build_once(path, lambda file: _train(corpus, size, file)))


def _train(corpus: list[str], size: int, file: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(file))


def _auto_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    offline_if_unreachable(name)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"model.tokenizer={name} is neither a folder with a tokenizer, nor in the local cache, nor could "
            f"it be had from the hub ({_first_line(error)}): set a local path, or model.tokenizer=byte"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
