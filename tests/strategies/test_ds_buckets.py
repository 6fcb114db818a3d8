"""Tests of the note about DeepSpeed's buckets."""

from __future__ import annotations

from distexp.strategies.ds_buckets import describe_buckets, fit_buckets


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
