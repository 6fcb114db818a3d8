"""Tests of the warning before more workers than CPU cores start."""

from __future__ import annotations

import pytest

from distexp.launch.local import runner
from distexp.launch.local.runner import crowded_core_warnings
from tests.helpers.runs import resolve_cell


def test_more_workers_than_cores_get_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "cpu_count", lambda: 8)
    monkeypatch.setattr(runner, "cpu_limit", lambda: 3.5)
    nodes = [resolve_cell("strategy=ddp", "cluster.workers_per_node=3", f"cluster.nodes={count}") for count in (1, 2)]
    assert list(crowded_core_warnings(nodes[:1])) == []
    (warning,) = crowded_core_warnings(nodes)
    assert warning.startswith("6 workers will share 4 CPU cores, so speeds cannot be compared between ")
    assert "use at most 4" in warning
