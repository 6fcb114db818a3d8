"""Tests of the test cluster itself, and of a preflight between its nodes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from distexp.runs.record import RunRecord
from tests.helpers.processes import have_ended
from tests.helpers.runs import run_module
from tests.helpers.slurm_cluster import Cluster
from tests.helpers.slurm_sweeps import wait_for

pytestmark = pytest.mark.slurm


def test_the_cluster_starts_and_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))

    def sleeps() -> int:
        return sum((process.info["cmdline"] or [])[1:] == ["600"] for process in cluster.processes(*cluster.nodes))

    def links() -> str:
        return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout

    try:
        cluster.start()
        claim = os.dup(cluster.claim)  # so that no other cluster takes the slot before the checks
        cluster.command("sbatch", "-N4", "-o", "/dev/null", "--wrap", "trap '' TERM; srun sleep 600")
        wait_for(lambda: sleeps() == len(cluster.nodes))
        inside = cluster.processes()
    finally:
        cluster.stop()
    wait_for(lambda: have_ended(inside))
    assert all(daemon.poll() is not None for daemon in cluster.daemons.values())
    assert not list(Path("/run/netns").glob(f"dx{cluster.slot}[hn]*"))
    # The kernel deletes the links of a network namespace some time after the namespace.
    wait_for(lambda: not re.search(rf"\bdx(br{cluster.slot}\b|{cluster.slot}v)", links()))
    os.close(claim)


@pytest.mark.slow
def test_the_preflight_measures_between_two_nodes(slurm: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = ("cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", "cluster.device=cpu")
    small = ("preflight.max_bytes=65536", "preflight.rounds=3", "preflight.warmup_rounds=1")
    done = run_module("distexp.preflight", *overrides, *small, f"hydra.run.dir={run}", cwd=tmp_path, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    record = RunRecord.read(run / "record.json")
    assert (record.status, len(record.run.hosts)) == ("completed", 2)
    assert record.preflight is not None
    across = [one for one in record.preflight["measurements"] if one["group"] == "all"]
    assert {one["operation"] for one in across} == {"all_reduce", "all_gather", "reduce_scatter", "send_receive"}
    assert all(one["correct"] for one in across)
    assert "bus bandwidth" in done.stdout
