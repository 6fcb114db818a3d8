"""The byte tokenizer, and Hugging Face tokenizers with the same interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.data import tokenization
from distexp.data.tokenization import HuggingFaceTokenizer, load_tokenizer, train_byte_tokenizer
from tests.helpers.datasets import TEXT_MODEL

CORPUS = ["Ada is a baker from Oslo.", "Hugo keeps two goats.", "Where is Ada from? Oslo."] * 3
UNUSUAL = ["", " ", "naïve café 東京 🐐\n\ttabs", "a </s> in a text <pad>", "\x00\x7f", "  two  spaces  "]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a separate cache for each test."""
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_text_decodes_to_itself() -> None:
    tokenizer = train_byte_tokenizer(CORPUS, 300)
    ids = tokenizer.encode_batch(UNUSUAL)
    assert [tokenizer.decode(tokens.tolist()) for tokens in ids] == UNUSUAL
    assert all(tokens.size == 0 or 0 <= tokens.min() <= tokens.max() < tokenizer.size for tokens in ids)


def test_special_tokens_in_a_text_are_text() -> None:
    tokenizer = train_byte_tokenizer(CORPUS, 300)
    ids = tokenizer.encode_batch(["</s><pad>"])[0].tolist()
    assert tokenizer.eos_id not in ids
    assert tokenizer.pad_id not in ids
    assert {tokenizer.pad_id, tokenizer.eos_id} == {0, 1}


class MistralCommonBackend:
    """A stand-in for the tokenizer that AutoTokenizer returns if mistral-common is installed."""

    all_special_ids = (0, 1)
    eos_token_id, pad_token_id = 1, None

    def __len__(self) -> int:
        return 300

    def __call__(
        self,
        texts: Sequence[str],
        add_special_tokens: bool,
        return_attention_mask: bool,
        split_special_tokens: bool = False,
    ) -> dict[str, list[list[int]]]:
        if split_special_tokens:
            raise ValueError("`MistralCommonBackend` does not support `split_special_tokens`.")
        return {"input_ids": [[len(text)] for text in texts]}

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tekken.json").write_text("{}")


def test_a_tokenizer_of_mistral_common_gets_no_option_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenization, "_auto_tokenizer", lambda name: MistralCommonBackend())
    assert HuggingFaceTokenizer("any").encode_batch(["four"])[0].tolist() == [4]


def test_training_merges_words_up_to_the_size() -> None:
    tokenizer = train_byte_tokenizer(CORPUS, 290)
    assert tokenizer.size == 290
    assert tokenizer.name == "byte(290)"
    assert len(tokenizer.encode_batch([" Oslo"])[0]) < len(" Oslo")


def test_another_process_trains_the_same_tokenizer(tmp_path: Path, cache: Path) -> None:
    train_byte_tokenizer(CORPUS, 320)
    code = f"from distexp.data.tokenization import *; train_byte_tokenizer({CORPUS!r}, 320)"
    environment = {"DISTEXP_CACHE": str(tmp_path / "other"), "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    (here,), (there,) = cache.glob("*.json"), (tmp_path / "other").glob("*.json")
    assert here.name == there.name
    assert here.read_bytes() == there.read_bytes()


def test_a_trained_tokenizer_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_byte_tokenizer(CORPUS, 300)
    monkeypatch.setattr(tokenization, "_train", None)
    assert train_byte_tokenizer(CORPUS, 300).fingerprint == first.fingerprint
    with pytest.raises(TypeError):
        train_byte_tokenizer([*CORPUS, "another text"], 300)


def test_too_small_a_vocabulary_is_refused() -> None:
    message = r"a vocabulary of 257 is too small for model.tokenizer=byte.*to at least 258"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(replace(TEXT_MODEL, vocab_size=257), CORPUS)


def test_the_default_size_is_1024() -> None:
    texts = [f"{number * 7919:x} {number * 104729:x}" for number in range(3000)]
    assert load_tokenizer(replace(TEXT_MODEL, vocab_size=None), texts).size == 1024


def test_transformers_reads_a_saved_tokenizer(tmp_path: Path) -> None:
    ours = train_byte_tokenizer(CORPUS, 300)
    ours.save(tmp_path / "saved")
    theirs = HuggingFaceTokenizer(str(tmp_path / "saved"))
    texts = [*CORPUS, "naïve 東京 🐐", "the tag </s> and <pad>"]
    for mine, other in zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True):
        assert mine.tolist() == other.tolist()
        assert ours.decode(mine.tolist()) == theirs.decode(mine.tolist())
    assert (ours.eos_id, ours.pad_id, ours.size) == (theirs.eos_id, theirs.pad_id, theirs.size)
    theirs.save(tmp_path / "again")
    automatic = load_tokenizer(
        replace(TEXT_MODEL, path=str(tmp_path / "again"), tokenizer="auto", init="pretrained"), []
    )
    assert automatic.name == str(tmp_path / "again")
    assert automatic.fingerprint == theirs.fingerprint


def test_a_changed_tokenizer_of_python_has_another_fingerprint(tmp_path: Path) -> None:
    """Its token ids are read from the cache by it. The folder and the size of the vocabulary are the same."""
    folder = tmp_path / "ctrl"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer", "eos_token": "<unk>"}')
    (folder / "vocab.json").write_text('{"<unk>": 0, "a": 1, "b": 2, "ab": 3}')
    found = []
    for merges in ("", "", "a b</w>\n"):
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        found.append(HuggingFaceTokenizer(str(folder)).fingerprint)
    assert found[0] == found[1] != found[2]


def test_no_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.tokenizer is null, but text data needs one: set byte, auto"):
        load_tokenizer(replace(TEXT_MODEL, tokenizer=None), [])


def test_a_missing_tokenizer_is_a_config_error() -> None:
    message = r"model.tokenizer=/nowhere/at/all is neither a folder.*local cache.*hub.*model.tokenizer=byte"
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(replace(TEXT_MODEL, tokenizer="/nowhere/at/all"), [])
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    train_byte_tokenizer(CORPUS, 300).save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=r"no end-of-sequence token.*use another tokenizer, or model.tokenizer=byte"):
        HuggingFaceTokenizer(str(tmp_path / "saved"))


def test_byte_runs_never_import_transformers_or_datasets() -> None:
    code = """
import sys
from distexp.config import DatasetConfig, ModelConfig
from distexp.data import squad_sample
from distexp.models import gpt, objective
from distexp.models import blueprint as introspection
model = ModelConfig(name="gpt_tiny", tokenizer="byte", task="causal_lm")
squad_sample.load(DatasetConfig(name="squad_sample", max_length=64), model, 0)
print([name for name in ("transformers", "datasets", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""
