"""Bucket sizes that distexp sets in a ds_config.json, and the note about them."""

from __future__ import annotations

from typing import Any

import pytest

from distexp.strategies.zero.ds_config import describe_buckets, fit_buckets


def fitted(stage: int, parameters: int, **chosen: int) -> dict[str, int]:
    settings: dict[str, Any] = {"zero_optimization": {"stage": stage, **chosen}}
    fit_buckets(settings, parameters, largest=parameters // 4)
    return settings["zero_optimization"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("parameters", "bucket", "persistent"),
    [
        (58_305, 58_306, 583),  # no bucket is larger than the model, or odd
        (25_600_000, 5_000_000, 100_000),
        (559_214_592, 34_950_912, 100_000),
        (20_000_000_000, 500_000_000, 100_000),
    ],
)
def test_buckets_fit_the_model(parameters: int, bucket: int, persistent: int) -> None:
    assert fitted(2, parameters)["reduce_bucket_size"] == bucket
    settings = fitted(3, parameters)
    assert settings["reduce_bucket_size"] == bucket
    assert settings["stage3_param_persistence_threshold"] == persistent


def test_buckets_of_the_user_stay() -> None:
    settings = fitted(3, 58_304, reduce_bucket_size=1000, stage3_param_persistence_threshold=0)
    assert (settings["reduce_bucket_size"], settings["stage3_param_persistence_threshold"]) == (1000, 0)
    assert fitted(0, 58_304) == {"stage": 0}


def note(parameters: int, stage: int = 2) -> str:
    """Return the note for a model with this number of parameters."""
    return describe_buckets(fit_buckets({"zero_optimization": {"stage": stage}}, parameters, 1000), parameters)


def test_a_bucket_may_hold_the_whole_model() -> None:
    for stage in (1, 2, 3):
        assert note(58_304, stage) == (
            "DeepSpeed's reduce_bucket_size=58,304 holds the whole model of 58,304 parameters: "
            "gradients are reduced once, after the backward pass"
        )


def test_buckets_of_a_large_model_are_listed() -> None:
    text = note(559_214_592)
    assert "reduce_bucket_size=34,950,912" in text
    assert "a fraction of the model's 559,214,592 parameters" in text
