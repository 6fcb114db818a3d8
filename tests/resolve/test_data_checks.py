"""Tests of the numbers of samples that a run needs."""

from __future__ import annotations

import pytest

from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize(
    ("samples", "hint"),
    [
        (50, "use train.micro_batch_size=8, or a larger dataset.train_size"),
        (2, "use train.micro_batch_size=1, or a larger dataset.train_size"),
    ],
)
def test_a_proposed_micro_batch_keeps_the_global_batch(samples: int, hint: str) -> None:
    """Four workers have 16 samples of a step each. With 13 samples per worker, 13 would not divide them."""
    words = ("train.global_batch_size=64", "train.micro_batch_size=16", "cluster.workers_per_node=4")
    with pytest.raises(ConfigError, match=hint):
        resolve_cell(*words, "cluster.device=cpu", f"dataset.train_size={samples}")


@pytest.mark.parametrize(("workers", "is_valid"), [(73, True), (74, False)])
def test_a_generated_data_set_has_too_few_samples_for_many_workers(workers: int, is_valid: bool) -> None:
    """The sample of SQuAD has 512 questions, and the default micro-batch is 8."""
    words = (f"cluster.workers_per_node={workers}", "cluster.device=cpu")
    assert resolve_cell(*words, "command=plan").cluster.world_size == workers, "a prediction needs no samples"
    if is_valid:
        assert resolve_cell(*words).cluster.world_size == workers
    else:
        with pytest.raises(ConfigError, match=r"than the 7 samples of each worker .* at most 73 workers, or a larger"):
            resolve_cell(*words)
