"""Test of a node of a Slurm job that cannot start its workers, without Slurm."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distexp.launch.slurm import node_task
from distexp.launch.slurm.node_task import Job, Peers
from distexp.runs.run_dir import AGENT_ERROR
from tests.helpers.runs import make_spec


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the handler that an attempt replaces at its end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_node_that_cannot_start_its_workers_leaves_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_node(*arguments: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/run/workers")

    monkeypatch.setattr(node_task, "run_node", run_node)
    job = Job("7_0", 0, "7_0.0", 1, ["node1", "node2"])
    spec = make_spec("strategy=single", "cluster.device=cpu")
    task = node_task.NodeTask(spec, tmp_path, job, Peers(tmp_path, job, 2), 0.0)
    assert task.run_attempt() == 1
    error = json.loads(AGENT_ERROR.path(tmp_path, 1).read_text())
    assert error["type"] == "PermissionError"
    assert "/run/workers" in error["message"]
