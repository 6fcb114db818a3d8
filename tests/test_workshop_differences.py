"""The page ``docs/workshop-differences.md``: its overrides exist, and an exercise takes each."""

from __future__ import annotations

import re

import pytest

from tests.helpers.presets import cells_of
from tests.helpers.runs import REPOSITORY

PRESETS = {
    "model.tokenizer=bigscience/bloom-560m": "deepspeed/baseline",
    "model.init=pretrained": "deepspeed/baseline",
    "dataset.train_size=496": "deepspeed/baseline",
    "scaling.samples_per_worker=500": "deepspeed/multi_gpu_weak_scaling",
    "scaling.samples_per_worker=10000": "deepspeed/multi_node_weak_scaling",
    "model.dropout=0.1": "fsdp/custom_single",
    "scaling=weak_model_workshop model.tie_embeddings=false": "fsdp/custom_weak_scaling",
    "deepspeed.reduce_bucket_size=500000000": "deepspeed/two_gpu_stages",
    "deepspeed.allgather_bucket_size=500000000": "deepspeed/two_gpu_stages",
    "zero_stage=1,2,3": "deepspeed/pin_memory",
    "zero_stage=2 offload=pinned": "deepspeed/multi_gpu_weak_scaling",
    "train.score_answers=true": "fsdp/baseline",
    "train.micro_batch_size=4 train.num_epochs=3": "fsdp/baseline",
}
"""The overrides of the page, and an exercise that takes each."""


def test_the_page_has_these_overrides() -> None:
    rows = re.findall(r"^\|.*\| *([^|]*) \|$", (REPOSITORY / "docs/workshop-differences.md").read_text(), re.MULTILINE)
    found = [code for cell in rows for code in re.findall(r"`([^`]*=[^`]*)`", cell)]
    assert found
    assert sorted(found) == sorted(PRESETS)


@pytest.mark.parametrize("overrides", PRESETS)
def test_an_exercise_takes_the_overrides(overrides: str) -> None:
    assert cells_of(PRESETS[overrides], *overrides.split())
