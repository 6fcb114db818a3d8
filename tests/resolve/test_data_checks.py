"""Tests of the numbers of samples that a run needs."""

from __future__ import annotations

import pytest

from distexp.config import ConfigError
from tests.helpers.runs import resolve_cell


@pytest.mark.parametrize(("workers", "is_valid"), [(73, True), (74, False)])
def test_a_generated_data_set_has_too_few_samples_for_many_workers(workers: int, is_valid: bool) -> None:
    """The sample of SQuAD has 512 questions, and the default micro-batch is 8."""
    words = (f"cluster.workers_per_node={workers}", "cluster.device=cpu")
    assert resolve_cell(*words, "plan.only=true").cluster.world_size == workers, "a prediction needs no samples"
    if is_valid:
        assert resolve_cell(*words).cluster.world_size == workers
    else:
        with pytest.raises(ConfigError, match=r"than the 7 samples of each worker .* at most 73 workers, or a larger"):
            resolve_cell(*words)
