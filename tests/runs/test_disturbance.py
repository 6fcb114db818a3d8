"""Whether other programs slowed a run down, from its record, which may be old or damaged."""

from __future__ import annotations

from typing import Any

import pytest

from distexp.runs.disturbance import describe_disturbance, starved_share
from distexp.runs.record import RunRecord
from tests.helpers.records import record


def on_cores(used: list[float], cpu_count: int = 8, **settings: Any) -> RunRecord:
    """Return the record of a run on CPUs.

    Args:
        used: CPU time of each node in the training, in percent of its cores.
        cpu_count: Cores of the machine.
        settings: Keys such as ``cluster__nodes``.
    """
    run = record(0, **settings)
    assert run.environment is not None
    run.environment.cpu_count, run.metrics.train_runtime = cpu_count, 400.0
    run.metrics.total_steps, run.metrics.train_steps_per_second = 105, 1.0
    run.utilization["cpu"] = [{"node": node, "phases": {"train": percent}} for node, percent in enumerate(used)]
    return run


def test_simulated_nodes_have_equal_parts_of_the_cores() -> None:
    """Each of two nodes has 4 of the 8 cores, and 2 workers with 2 threads each."""
    two_nodes = {"cluster__nodes": 2, "cluster__cpus_per_worker": 2}
    assert starved_share(on_cores([60.0, 60.0], **two_nodes)) == pytest.approx(0.6)
    assert starved_share(on_cores([90.0, 90.0], **two_nodes)) is None
    assert starved_share(on_cores([60.0], **two_nodes)) == pytest.approx(0.6), "the trace of a node is missing"
    real = on_cores([60.0, 50.0], **two_nodes)
    real.run.hosts = ["node-a", "node-b"]
    assert starved_share(real) is None, "4 of 8 cores"


@pytest.mark.parametrize(
    ("key", "value", "share"),
    [
        ("nodes", None, 0.3),
        ("workers_per_node", None, 0.3),
        ("cpus_per_worker", "auto", None),
        ("device", None, None),
    ],
)
def test_records_may_lack_keys_of_the_cluster(key: str, value: Any, share: float | None) -> None:
    run = on_cores([30.0], cpu_count=2, cluster__cpus_per_worker=2, cluster__workers_per_node=1)
    if value is None:
        del run.config["cluster"][key]
    run.config["cluster"] |= {} if value is None else {key: value}
    found = starved_share(run)
    assert found == (None if share is None else pytest.approx(share))


def test_the_share_of_a_short_training_is_unknown() -> None:
    """The runtime has evaluations and earlier attempts. The 100 measured steps of this attempt take 2 s or 10 s."""
    run = on_cores([5.0])
    run.metrics.train_steps_per_second = 50.0
    assert starved_share(run) is None
    run.metrics.train_steps_per_second = 10.0
    assert starved_share(run) is not None
    run.run.attempts = [{"resumed_from_step": None}, {"resumed_from_step": 80}]
    assert starved_share(run) is None, "20 steps"
    run.run.attempts, run.metrics.communication = [], {"first_step": 21}
    assert starved_share(run) is None, "15 steps before the profiler"
    run.metrics.communication, run.metrics.total_steps = None, None
    assert starved_share(run) is None


def test_threads_that_sleep_while_they_wait_leave_their_cores_unused() -> None:
    run = on_cores([15.0], cluster__cpus_per_worker=2)
    assert run.environment is not None
    assert starved_share(run) is not None
    run.environment.variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    assert starved_share(run) is None, "of the shell"
    run.config["cluster"]["environment"] = {"OMP_WAIT_POLICY": "active"}
    assert starved_share(run) is not None, "the setting of the run replaces it"


@pytest.mark.parametrize("utilization", [{}, {"cpu": []}, {"cpu": [{}]}, {"cpu": [{"phases": [1]}]}])
def test_the_share_is_unknown_without_a_trace(utilization: dict[str, Any]) -> None:
    run = on_cores([15.0])
    run.utilization = utilization
    assert describe_disturbance(run) is None
    run.config["cluster"] = {"device": "cuda"}
    assert describe_disturbance(run) is None


@pytest.mark.parametrize(
    ("compiled", "is_evaluated", "warmup", "is_disturbed"),
    [
        ({"seconds": 60.0, "recompilations": 3}, True, 5, False),
        ({"seconds": 20.0, "recompilations": 3}, True, 5, True),
        ({"seconds": 60.0, "recompilations": 1}, True, 5, True),
        ({"seconds": 60.0, "recompilations": 1}, False, 5, False),
        ({"seconds": 60.0, "recompilations": 0}, False, 0, False),
        (None, True, 5, True),
    ],
    ids=["recompiled", "longer", "by the evaluation", "not evaluated", "no warmup", "not compiled"],
)
def test_steps_that_are_compiled_are_no_disturbance(
    compiled: dict[str, Any] | None, is_evaluated: bool, warmup: int, is_disturbed: bool
) -> None:
    """The mean of 100 steps is twice the median of 0.5 s: 50 s more than 100 medians."""
    run = on_cores([], train__measure_after_step=warmup)
    run.metrics.total_steps, run.metrics.step_time_s = 100 + warmup, {"p50": 0.5}
    run.metrics.compile, run.metrics.eval_losses = compiled, [2.0] if is_evaluated else []
    assert (describe_disturbance(run) is not None) == is_disturbed


def test_the_share_is_unknown_without_workers_or_cores() -> None:
    run = on_cores([5.0])
    assert starved_share(run) is not None
    run.built = None
    assert starved_share(run) is None
    run = on_cores([5.0])
    run.environment = None
    assert starved_share(run) is None
