"""Tests of speedup, efficiency and their baselines."""

from __future__ import annotations

from distexp.report.data.repeats import group_repeats
from distexp.report.data.rows import row_from_record
from distexp.report.data.scaling_series import samples_of
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from tests.helpers.printed_tables import header, printed, unwrapped
from tests.helpers.records import record


def test_speedup_and_efficiency_name_their_baseline() -> None:
    records = [
        record(0, status="failed", error=RunError("ValueError", "no"), strategy="fsdp", cluster__device="cuda"),
        *(
            record(n, cluster__nodes=nodes, speed=speed, cluster__device="cuda")
            for n, nodes, speed in ((1, 1, 100.0), (2, 2, 180.0), (3, 4, 320.0))
        ),
    ]
    text = unwrapped(printed(records))
    assert "1.80 90" in text
    assert "3.20 80" in text
    assert "Speedup: samples/s relative to run 1 (" in text
    flat = unwrapped(printed([record(0, model__name="resnet_tiny"), record(1), record(2, strategy="fsdp")]))
    assert "Speedup: samples/s relative to run 1 (" in flat, "the first task that two runs share"
    flat = printed([record(0), record(1, strategy="fsdp")])
    assert "effi" not in header(flat)


def test_workers_that_share_a_model_train_on_the_same_samples() -> None:
    """Two workers with one model have one global batch, so the same steps have the same samples."""
    alone, shared = (
        record(
            n, cluster__workers_per_node=n + 1, parallel__tensor=n + 1, train__max_steps=40, dataset__train_size=4000
        )
        for n in range(2)
    )
    counts = {samples_of(group) for run in (alone, shared) for group in group_repeats([row_from_record(run, "0")])}
    assert counts == {40 * 4}


def scaled(*threads: int, speeds: tuple[float, ...], cores: int = 2) -> list[RunRecord]:
    """Return runs on 1, 2, 4 ... workers with these threads per worker."""
    runs = [
        record(n, cluster__workers_per_node=2**n, cluster__cpus_per_worker=count, speed=speeds[n])
        for n, count in enumerate(threads)
    ]
    for run in runs:
        assert run.environment is not None
        run.environment.cpu_count = cores
    return runs


def test_an_efficiency_above_ideal_means_a_slow_baseline() -> None:
    runs = scaled(2, 2, speeds=(10.0, 91.8), cores=4)
    text = unwrapped(printed(runs))
    assert "Efficiency 459% is above 100%: do not trust the baseline, run 0." in text
    assert "Likely reason: its 2 threads per worker wait on busy cores. Set cluster.cpus_per_worker=1." in text
    runs = scaled(1, 1, speeds=(10.0, 91.8))
    assert "Likely reason: other programs used its cores. Repeat with repeats=3." in unwrapped(printed(runs))
    for run in runs:
        run.config["cluster"]["device"] = "cuda"
        run.memory["torch"] = [{"rank": 0, "alloc_retries": 3}]
    assert "Likely reason: its GPU memory was nearly full." in unwrapped(printed(runs))
    assert "do not trust" not in printed(scaled(1, 1, speeds=(100.0, 208.0)))


def test_baselines_have_the_same_threads_per_worker() -> None:
    text = unwrapped(printed(scaled(2, 1, speeds=(10.0, 91.8))))
    assert "effi-" not in text
    assert "No efficiency for runs 0, 1: other runs have another number of threads per worker than here (1, 2)." in text
    assert "set cluster.cpus_per_worker=1 for all runs." in text
    text = unwrapped(printed(scaled(2, 1, 1, speeds=(10.0, 100.0, 180.0), cores=4)))
    assert "No efficiency for run 0:" in text
    assert " 90 " in text, "run 2 relative to run 1"
    on_gpus = [record(n, cluster__workers_per_node=n, cluster__cpus_per_worker=8 // n, peak=9.0) for n in (1, 2)]
    assert "effi-" in printed(on_gpus), "threads of the CPU hardly matter on GPUs"


def test_more_workers_than_cores_are_reported() -> None:
    text = unwrapped(printed(scaled(1, 1, 1, speeds=(100.0, 190.0, 200.0))))
    assert "More workers than CPU cores in run 2 (for example 4 on 2)." in text
    assert "More workers" not in printed(scaled(1, 1, speeds=(100.0, 190.0)))
