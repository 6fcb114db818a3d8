"""Random samples depend on seed and index only, and have the configured shapes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import GPT2Config

from distexp.config import ConfigError, DatasetConfig
from distexp.data import synthetic
from tests.helpers.datasets import IMAGE_MODEL, TEXT_MODEL, dataset
from tests.helpers.runs import resolve_cell

CONFIG = dataset("synthetic", train_size=50, eval_size=5, max_length=16, image_size=8, num_classes=7)


def test_tokens_have_the_configured_shape_and_vocabulary() -> None:
    data = synthetic.load(CONFIG, replace(TEXT_MODEL, vocab_size=11), 1)
    assert (data.task, data.num_classes, len(data.train), len(data.evaluation)) == ("causal_lm", 11, 50, 5)
    batch = data.collate([data.train[index] for index in range(50)])
    assert batch.labels.shape == batch.inputs["input_ids"].shape == (50, 16)
    assert batch.inputs["input_ids"].unique().tolist() == list(range(11))
    assert (batch.num_samples, batch.num_targets, batch.num_tokens) == (50, 50 * 15, 50 * 16)
    assert batch.inputs["attention_mask"].all()


def test_images_have_the_configured_shape_and_classes() -> None:
    data = synthetic.load(CONFIG, IMAGE_MODEL, 1)
    assert (data.task, data.num_classes) == ("image_classification", 7)
    batch = data.collate([data.train[index] for index in range(50)])
    assert batch.inputs["images"].shape == (50, 3, 8, 8)
    assert batch.labels.unique().tolist() == list(range(7))
    assert batch.inputs["images"].unique().numel() == 256


@pytest.mark.parametrize("task", ["causal_lm", "image_classification"])
def test_a_sample_depends_on_seed_and_index_only(task: str) -> None:
    model = replace(TEXT_MODEL, task=task)
    name = "input_ids" if task == "causal_lm" else "images"
    data, same, other = (synthetic.load(CONFIG, model, seed) for seed in (1, 1, 2))
    assert data.train[3][name].equal(same.train[3][name])
    assert pickle.loads(pickle.dumps(data.train))[3][name].equal(data.train[3][name])
    for different in (data.train[4], data.evaluation[3], other.train[3]):
        assert not data.train[3][name].equal(different[name])
    with pytest.raises(IndexError):
        data.train[50]


@pytest.mark.parametrize(
    ("key", "task"),
    [("train_size", "causal_lm"), ("eval_size", "causal_lm"), ("max_length", "causal_lm"),
     ("image_size", "image_classification"), ("num_classes", "image_classification")],
)  # fmt: skip
def test_sizes_that_the_task_needs_must_be_set(key: str, task: str) -> None:
    config: DatasetConfig = replace(CONFIG, **{key: None})
    with pytest.raises(ConfigError, match=rf"dataset.{key} is null"):
        synthetic.load(config, replace(TEXT_MODEL, task=task), 0)


def test_the_vocabulary_size_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab_size is null"):
        synthetic.load(CONFIG, replace(TEXT_MODEL, vocab_size=None), 0)


def test_the_vocabulary_is_that_of_a_model_of_transformers(tmp_path: Path) -> None:
    GPT2Config(vocab_size=77, n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    config = resolve_cell("model=hf", f"model.name={tmp_path}", "model.init=random", "dataset=synthetic")
    data = synthetic.load(config.dataset, config.model, seed=1)
    assert data.num_classes == 77
    assert max(int(data.train[index]["input_ids"].max()) for index in range(9)) < 77
    changed = replace(config.model, options={"vocab_size": 50})
    assert synthetic.load(config.dataset, changed, seed=1).num_classes == 50


def test_the_vocabulary_is_that_of_an_architecture_without_a_file() -> None:
    config = resolve_cell("model=hf", "model.name=x", "model.init=random", "dataset=synthetic")
    for options, size in (({}, 50257), ({"vocab_size": 77}, 77)):
        model = replace(config.model, options={"model_type": "gpt2", **options})
        assert synthetic.load(config.dataset, model, seed=1).num_classes == size
    with pytest.raises(ConfigError, match=r"model.options.model_type=vit, which has none .*: correct model.options"):
        synthetic.load(config.dataset, replace(config.model, options={"model_type": "vit"}), seed=1)
