"""The clipping of ``deepspeed.async_update`` gives what DeepSpeed's gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import HELPERS, run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what both give for the same gradients on two ranks."""
    path: Path = tmp_path_factory.mktemp("async") / "found.json"
    run_ranks(2, HELPERS / "async_update.py", str(path))
    return json.loads(path.read_text())


@pytest.mark.slow
def test_the_norm_of_all_ranks_is_that_of_deepspeed(found: Any) -> None:
    assert len(found["norms"]) == 2
    for theirs, ours, own in found["norms"]:
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert own < 0.95 * ours, "the other rank has a part of the norm"
    assert found["empty"] == 0


@pytest.mark.slow
def test_clipped_gradients_are_those_of_deepspeed(found: Any) -> None:
    assert all(equal for *_, equal, _ in found["clipped"]), found["clipped"]
    changed = [(limit, norm) for limit, norm, _, unchanged in found["clipped"] if not unchanged]
    assert changed == [(0.1, 3.0), (0.1, float("inf")), (1e6, float("inf"))]


@pytest.mark.slow
def test_another_optimizer_is_refused_with_a_hint() -> None:
    from distexp.strategies.zero.ds_model import avoid_waits

    with pytest.raises(RuntimeError, match=r"async_update=true does not support object of DeepSpeed .*: set deepsp"):
        avoid_waits(object())
