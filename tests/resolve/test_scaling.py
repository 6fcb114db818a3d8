"""Tests of the scaling rules, compared with models that are built."""

from __future__ import annotations

import pytest
import torch

from distexp.config import Config, ConfigError
from distexp.config.custom_code import locate
from distexp.resolve.resources import parameter_count
from tests.helpers.runs import resolve_cell

GPT = ("model=gpt", "dataset=squad", "train.micro_batch_size=8", "cluster.device=cpu")
TIED = (*GPT, "model.tie_embeddings=true", "sharding=full_shard")


def on(workers: int, *words: str) -> Config:
    return resolve_cell(*words, f"cluster.workers_per_node={workers}")


def built_parameters(config: Config) -> int:
    with torch.device("meta"):
        model = locate(config.model._target_)(config.model, config.model.vocab_size)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "words",
    [GPT, TIED, ("model=gpt_tiny",), ("model=bloom_tiny",), ("model=bloom_560m",), ("model=bloom_3b",)],
    ids=["gpt", "tied gpt", "gpt_tiny", "bloom_tiny", "bloom_560m", "bloom_3b"],
)
def test_parameter_count_matches_the_built_model(words: tuple[str, ...]) -> None:
    config = on(1, *words)
    assert parameter_count(config.model) == built_parameters(config)


def test_weak_model_keeps_parameters_and_work_per_worker() -> None:
    configs = {workers: on(workers, *TIED, "scaling=weak_model") for workers in (2, 4, 8, 16)}
    sizes = {workers: built_parameters(config) / workers for workers, config in configs.items()}
    for workers, config in configs.items():
        train = config.train
        assert workers * train.micro_batch_size == 16, "the global batch stays"
        assert sizes[workers] == pytest.approx(sizes[2], rel=0.01), "and so parameters x samples of a worker"
    assert [config.model.num_layers for config in configs.values()] == [3, 8, 18, 38]


def test_workshop_rule_does_not_keep_parameters_per_worker() -> None:
    configs = {workers: on(workers, *GPT, "scaling=weak_model_workshop") for workers in (2, 4, 8, 16)}
    assert [config.model.num_layers for config in configs.values()] == [3, 6, 12, 24]
    assert [config.train.micro_batch_size for config in configs.values()] == [8, 4, 2, 1]
    sizes = [built_parameters(config) / workers / 1e6 for workers, config in configs.items()]
    assert sizes == [pytest.approx(size, abs=1) for size in (178, 127, 101, 88)], "a GPU"


def test_weak_data_keeps_samples_per_worker() -> None:
    words = ("scaling=weak_data", "cluster.device=cpu")
    assert [on(workers, *words).dataset.train_size for workers in (1, 2, 3, 6)] == [250, 500, 750, 1500]
    assert on(2, *words, "cluster.nodes=2", "scaling.samples_per_worker=10").dataset.train_size == 40
    assert on(2, "cluster.device=cpu").dataset.train_size is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("scaling=weak_data", "dataset.train_size=500"), "set dataset.train_size=null, or choose scaling=fixed"),
        (("scaling=weak_data", "scaling.samples_per_worker=null"), "needs scaling.samples_per_worker"),
        (("scaling.samples_per_worker=3",), "set it to null, or choose scaling=weak_data"),
        (("scaling=weak_data", "scaling.base_workers=2"), "has no effect with scaling=weak_data: set it to null"),
        ((*TIED, "scaling=weak_model", "scaling.samples_per_worker=3"), "has no effect with scaling=weak_model: set"),
        (
            ("scale.train_size=16",),
            "scale.train_size=16 has no effect with scale=full: add scale=tiny, or leave it out",
        ),
        (("scale=tiny", "scale.shrink=0"), "scale.shrink=0 must be at least 1"),
        (("scaling.name=other",), "scaling.name=other is not one of fixed, weak_data"),
        ((*GPT, "scaling=weak_model", "sharding=full_shard"), "needs model.tie_embeddings=true"),
        ((*TIED, "scaling=weak_model", "sharding=no_shard"), "strategy=fsdp with these options does not shard them"),
        ((*TIED[:-1], "scaling=weak_model", "strategy=ddp"), "strategy=ddp with these options does not shard them"),
        (("model=resnet_tiny", "scaling=weak_model", "sharding=full_shard"), "cannot count the parameters"),
        (("model=resnet_tiny", "scaling=weak_model_workshop"), "needs layers, but model=resnet_tiny has none"),
        ((*TIED, "scaling=weak_model", "train.micro_batch_size=1", "scaling.base_workers=3"), "evenly among 4 workers"),
        ((*TIED, "scaling=weak_model", "scaling.base_workers=12"), "leaves no layer for 4 workers"),
        ((*GPT, "scaling=weak_model_workshop", "scaling.base_workers=8"), "needs a whole number of layers"),
    ],
)
def test_impossible_scaling_is_an_error(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        on(4, *overrides)
    assert any(message in error for error in caught.value.errors), caught.value.errors


def test_scale_tiny_keeps_the_settings_of_a_dataset_that_it_replaces() -> None:
    overrides = ("dataset.packing=true", "model.attention=sdpa", "dataset.answer_tokens=2", "dataset.num_workers=4")
    dataset = resolve_cell("dataset=squad", "scale=tiny", *overrides).dataset
    assert (dataset.name, dataset.packing, dataset.answer_tokens) == ("squad_sample", True, 2)
    assert (dataset.max_length, dataset.num_workers) == (64, 0)


def test_scale_tiny_shrinks_models_and_reports_what_it_cannot() -> None:
    sizes = [
        resolve_cell(f"model=bloom_{size}", "scale=tiny").model.hidden_size for size in ("560m", "1b1", "1b7", "3b")
    ]
    assert sizes == [32, 48, 64, 80], "four sizes stay four sizes"
    config = resolve_cell(
        "model=resnet50", "dataset=tinyimagenet", "scale=tiny", "precision=fp16", "scale.train_size=99"
    )
    assert (config.model.width, config.model.depths, config.dataset.train_size) == (8, [2, 2, 2, 2], 99)
    assert (config.dataset.name, config.precision.name, config.cluster.device) == ("tinyimagenet_sample", "fp32", "cpu")
    with pytest.raises(ConfigError, match="cannot shrink model=someone/a-model"):
        resolve_cell("model=hf", "model.name=someone/a-model", "scale=tiny")
    with pytest.raises(ConfigError, match=r"makes 6 workers, but scale=tiny allows 4: raise scale.workers"):
        resolve_cell("scale=tiny", "cluster.workers_per_node=6")
