"""Generated questions: official format, stable content, and no cut contexts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distexp.config import ConfigError, DatasetConfig
from distexp.data import squad_sample
from distexp.data.squad_sample import FORMAT, generate, sample_file
from tests.helpers.datasets import REPOSITORY, TEXT_MODEL, dataset

SAMPLE = dataset("squad_sample", max_length=64)


def test_the_questions_match_their_format_version() -> None:
    digest = hashlib.sha256(json.dumps([generate("train", 512), generate("dev", 128)]).encode()).hexdigest()
    assert (FORMAT, digest[:16]) == ("squad-sample-v1", "f3eb713a89116dbf"), "new questions need a new FORMAT"


@pytest.mark.parametrize(("split", "number"), [("train", 512), ("dev", 128), ("train", 7)])
def test_questions_are_in_the_official_format(split: str, number: int) -> None:
    content = json.loads(sample_file(split, number).read_text())
    assert content["version"] == "1.1"
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    entries = [(paragraph["context"], entry) for paragraph in paragraphs for entry in paragraph["qas"]]
    assert len(entries) == len({entry["id"] for _, entry in entries}) == number
    assert all(article["title"] for article in content["data"])
    assert max(len(paragraph["qas"]) for paragraph in paragraphs) == 4
    for context, entry in entries:
        assert entry["question"].endswith("?")
        (answer,) = entry["answers"]
        start = answer["answer_start"]
        assert context[start : start + len(answer["text"])] == answer["text"] != ""
        before, after = context[start - 1], context[start + len(answer["text"])]
        assert before == " ", "the answer starts at a word"
        assert after in " ."


def test_a_larger_sample_starts_with_the_smaller_one() -> None:
    few, many = ([*list_questions(number)] for number in (100, 1000))
    assert len(many) == 1000
    assert many[:100] == few


def list_questions(number: int) -> list[tuple[str, str]]:
    return [
        (paragraph["context"], json.dumps(entry))
        for article in generate("train", number)["data"]
        for paragraph in article["paragraphs"]
        for entry in paragraph["qas"]
    ]


def test_training_and_evaluation_differ() -> None:
    train = {context for context, _ in list_questions(512)}
    held_out = {p["context"] for a in generate("dev", 128)["data"] for p in a["paragraphs"]}
    assert not train & held_out


def test_the_default_sample_is_loaded_without_cuts() -> None:
    loaded = OmegaConf.load(REPOSITORY / "conf" / "dataset" / "squad_sample.yaml")
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DatasetConfig), loaded))
    assert isinstance(config, DatasetConfig)
    data = squad_sample.load(config, TEXT_MODEL, 0)
    assert (len(data.train), len(data.evaluation)) == (512, 128)
    assert data.notes == []
    assert data.tokenizer_name == f"byte({data.num_classes})"


def test_sizes_reduce_and_extend_the_sample() -> None:
    data = squad_sample.load(replace(SAMPLE, train_size=600, eval_size=10), TEXT_MODEL, 0)
    assert (len(data.train), len(data.evaluation)) == (600, 10)


@pytest.mark.parametrize("key", ["path", "train_path", "eval_path"])
def test_paths_are_refused(key: str, tmp_path: Path) -> None:
    message = f"dataset.{key}=.* has no effect with dataset=squad_sample.*use dataset=squad"
    with pytest.raises(ConfigError, match=message):
        squad_sample.load(replace(SAMPLE, **{key: str(tmp_path)}), TEXT_MODEL, 0)
