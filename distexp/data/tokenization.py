"""Tokenizers: a byte-level BPE trained on the data, which needs no download, or any of Hugging Face."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from distexp.config import ConfigError, ModelConfig, model_checks
from distexp.exceptions import first_line
from distexp.system.cache_dir import build_once, cache_dir, offline_if_unreachable

# Forked loader workers never tokenize. Without this, tokenizers would print a warning at every fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

PAD, EOS, MASK = "<pad>", "</s>", "<mask>"
DEFAULT_VOCAB_SIZE = 1024
ENCODE_BATCH_SIZE = 2048
"""Texts per call of the tokenizer; limits the memory of its intermediate results."""

TokenIds = NDArray[np.int32]
Affixes = tuple[tuple[int, ...], tuple[int, ...]]


class Tokenizer(ABC):
    """A tokenizer for data sets and evaluation."""

    name: str  # ``byte(1024)``, or the name or path it was loaded from
    size: int  # entries of the vocabulary
    eos_id: int
    pad_id: int
    mask_id: int | None  # token that hides another one from a masked LM; None: it has none
    affixes: Affixes  # special tokens before and after a text
    fingerprint: str  # hash of everything that the token ids depend on
    _tokenizer: Any  # that of the library

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the token ids of each text, shape (length,), without special tokens.

        A text such as ``</s>`` is text here too.
        """
        starts = range(0, len(texts), ENCODE_BATCH_SIZE)
        batches = (self._encode(list(texts[start : start + ENCODE_BATCH_SIZE])) for start in starts)
        return [np.asarray(ids, dtype=np.int32) for batch in batches for ids in batch]

    @cached_property
    def space(self) -> str:
        """Return what to put before a part of a text that follows another one, to encode it alone as in the whole text.

        It is empty for a tokenizer that puts a space before each text, as that of Llama 2: it would encode two.
        """
        whole, *parts = self.encode_batch(["b a", "b", "a"])
        return "" if np.array_equal(whole, np.concatenate(parts)) else " "

    @abstractmethod
    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write files that ``AutoTokenizer.from_pretrained(folder)`` reads."""

    @abstractmethod
    def for_chat(self) -> Any:
        """Return the tokenizer of transformers, which has the chat template. It reads special tokens in a text."""


class ByteTokenizer(Tokenizer):
    """A byte-level BPE tokenizer, which encodes any text without loss."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        # Encode "</s>" in a text as text, not as the end of an answer.
        self._tokenizer.encode_special_tokens = True
        self.size: int = self._tokenizer.get_vocab_size()
        self.name = f"byte({self.size})"
        # Special tokens come first in the vocabulary, in the order of the trainer's list.
        self.pad_id, self.eos_id = 0, 1
        self.mask_id: int | None = self._tokenizer.token_to_id(MASK)
        self.affixes: Affixes = ((), (self.eos_id,))
        self.fingerprint = _digest(self._tokenizer.to_str())

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return (encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write files that ``AutoTokenizer.from_pretrained(folder)`` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": PAD}
        settings |= {} if self.mask_id is None else {"mask_token": MASK}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def for_chat(self) -> Any:
        """Return the tokenizer of transformers. It has no chat template."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_file=str(self._file), eos_token=EOS, pad_token=PAD)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer that AutoTokenizer of transformers loads, by name or path."""

    def __init__(self, name: str) -> None:
        self._tokenizer = _auto_tokenizer(name)
        if len(self._tokenizer) <= len(set(self._tokenizer.all_special_ids)):
            # For a model folder without tokenizer files, transformers makes an empty tokenizer.
            raise ConfigError(
                f"model.tokenizer={name} is a folder without a tokenizer: "
                "set model.tokenizer to the name or path of a tokenizer, or to byte"
            )
        # BERT ends texts with its separator.
        end = self._tokenizer.sep_token_id if self._tokenizer.eos_token_id is None else self._tokenizer.eos_token_id
        if end is None:
            raise ConfigError(
                f"model.tokenizer={name} has no end-of-sequence token, which must end each answer: "
                "use another tokenizer, or model.tokenizer=byte"
            )
        self.name = name
        self.size = len(self._tokenizer)
        self.eos_id: int = end
        self.mask_id: int | None = getattr(self._tokenizer, "mask_token_id", None)
        self.affixes = self._find_affixes()
        pad = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_id if pad is None else pad
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.fingerprint = self._hash_files() if backend is None else _digest(backend.to_str())

    def _hash_files(self) -> str:
        """Return the hash of what the tokenizer saves. One that is written in Python has no other text of its rules."""
        with TemporaryDirectory() as folder:
            self.save(Path(folder))
            files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            return _digest(" ".join(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files))

    def _find_affixes(self) -> Affixes:
        """Return the special tokens before and after a text."""
        whole, inner = (
            self._tokenizer(["a"], add_special_tokens=special, return_attention_mask=False)["input_ids"][0]
            for special in (True, False)
        )
        for start in range(len(whole) - len(inner) + 1):
            if whole[start : start + len(inner)] == inner:
                return tuple(whole[:start]), tuple(whole[start + len(inner) :])
        return (), (self.eos_id,)

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        # With this option, special tokens in a text are text. mistral-common needs none, and refuses it.
        needs_option = type(self._tokenizer).__name__ != "MistralCommonBackend"
        options = {"split_special_tokens": True} if needs_option else {}
        found = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, **options)
        ids: list[list[int]] = found["input_ids"]
        return ids

    def save(self, folder: Path) -> None:
        """Write the files of the tokenizer."""
        self._tokenizer.save_pretrained(str(folder))

    def for_chat(self) -> Any:
        """Return the tokenizer of transformers."""
        return self._tokenizer


def load_tokenizer(model: ModelConfig, texts: Iterable[str]) -> Tokenizer:
    """Load or train the tokenizer of ``model.tokenizer``. Raise ConfigError if it does not exist or cannot be used.

    For ``auto``, it comes from the same place as the weights or the architecture. A random model of distexp's own
    architectures has no such place. It gets a byte tokenizer, trained on the texts, of at most ``vocab_size``.
    """
    if model.tokenizer is None:
        raise ConfigError("model.tokenizer is null, but text data needs one: set byte, auto, or a name or path")
    name: str | None = model.tokenizer
    if name == "auto":
        name = model_checks.weights_source(model) if model_checks.loads_from_source(model) else "byte"
    if name == "byte" or name is None:
        special = (PAD, EOS, MASK) if model.task == "masked_lm" else (PAD, EOS)
        size = model.vocab_size or min(DEFAULT_VOCAB_SIZE, _embeddings(model))
        return train_byte_tokenizer(texts, size, special, key=model_checks.vocabulary_key(model))
    return HuggingFaceTokenizer(name)


def _embeddings(model: ModelConfig) -> int:
    """Return the vocabulary in the config.json of a model; ``DEFAULT_VOCAB_SIZE`` if none names one."""
    found = model_checks.architecture_of(model) if model_checks.names_source(model) else {}
    return model_checks.named_vocabulary(found) or DEFAULT_VOCAB_SIZE


def train_byte_tokenizer(
    texts: Iterable[str], max_size: int, special: tuple[str, ...] = (PAD, EOS), *, key: str = "model.vocab_size"
) -> ByteTokenizer:
    """Train a byte-level BPE of at most ``max_size`` entries, or read it. Raise ConfigError if that is too small.

    ``key`` is what sets the size, for the message.
    """
    if max_size < (least := 256 + len(special)):
        raise ConfigError(
            f"a vocabulary of {max_size} is too small for model.tokenizer=byte, which has all 256 bytes and "
            f"{len(special)} special tokens: set {key} to at least {least}"
        )
    corpus = list(texts)
    digest = _digest("\x1e".join(corpus))
    kind = "" if MASK not in special else "-mask"
    path = cache_dir() / f"byte-tokenizer-v1{kind}-{max_size}-{digest}.json"
    return ByteTokenizer(build_once(path, lambda file: _train(corpus, max_size, special, file)))


def _train(corpus: list[str], max_size: int, special: tuple[str, ...], file: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=max_size,
        special_tokens=list(special),
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
            f"model.tokenizer={name} is neither a folder with a tokenizer nor available from the local cache or "
            f"the hub ({first_line(error)}): set a local path, or model.tokenizer=byte"
        ) from error


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
