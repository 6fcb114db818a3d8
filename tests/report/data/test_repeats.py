"""Tests of repeats: which runs are repeats of each other, and their noise."""

from __future__ import annotations

import pytest

from distexp.report.data.answer import build_tiles, recommended
from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import Overview, pareto_fronts
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Environment, RunError
from tests.helpers.printed_tables import header, printed, unwrapped
from tests.helpers.records import add_parts, invalid, record


def test_repeats_with_different_seeds_show_mean_and_deviation() -> None:
    records = [
        record(3 * cell + n, strategy=strategy, train__seed=n, speed=speed + n)
        for cell, (strategy, speed) in enumerate((("ddp", 100.0), ("fsdp", 100.5), ("single", 50.0)))
        for n in range(3)
    ]
    text = unwrapped(printed(records))
    assert "101.0 ± 1.0" in text
    assert "seed" not in header(printed(records))
    assert "Speeds on CPU vary with other programs: equal runs differed by ±1.4% here (standard deviation)." in text
    fsdp, ddp = "run 3 +2 (strategy=fsdp), 101.5 samples/s", "run 0 +2 (strategy=ddp), 101.0 samples/s"
    assert f"Fastest: {fsdp}, and {ddp}, are equal within the noise of ±2.8%." in text
    assert " ~1 " in text
    assert "0.50 ± 0.01 " in text
    apart = [r for r in records if r.config["strategy"]["name"] != "fsdp"]
    single = "run 6 +2 (strategy=single), 51.0 samples/s"
    assert f"Fastest: {ddp}. The next is {single}, beyond the noise of ±2.8%." in unwrapped(printed(apart))


def test_speeds_of_single_runs_on_cpu_are_not_ranked() -> None:
    """Equal runs on two busy cores had 169.5 and 289.1 samples/s."""
    cells = zip(("ddp", "fsdp", "single", "deepspeed"), (289.1, 275.0, 169.5, 50.0), strict=True)
    text = unwrapped(printed([record(n, strategy=name, speed=speed) for n, (name, speed) in enumerate(cells)]))
    assert "compare only those that differ by more than 1.8x, or use repeats=3." in text
    assert "run 0 (strategy=ddp), 289.1 samples/s, and run 1 (strategy=fsdp), 275.0 samples/s, are equal" in text
    assert "Also equal within the noise: run 2." in text
    assert " ~1 " in text
    assert "0.17 " in text
    assert "~1: equal to this run within the noise." in text


def with_cpu_memory(run: RunRecord, peak_mib: float) -> RunRecord:
    run.memory["cpu"] = [{"node": 0, "peak_mib": peak_mib, "average_mib": peak_mib, "mode_mib": peak_mib}]
    return run


def test_cpu_memory_of_single_runs_is_ranked_only_beyond_what_other_processes_change() -> None:
    """Equal runs had 626 to 908 MiB, because they share libraries with other processes of the machine."""
    runs = [record(n, strategy=name) for n, name in enumerate(("ddp", "fsdp", "single"))]
    peaks = zip(runs, (865.0, 908.0, 626.0), strict=True)
    text = unwrapped(printed([with_cpu_memory(run, peak) for run, peak in peaks]))
    assert "626 MiB, and run 0 (strategy=ddp), 865 MiB, are equal within the noise of ±45%" in text
    large = zip(runs, (4000.0, 9000.0, 5000.0), strict=True)
    text = unwrapped(printed([with_cpu_memory(run, peak) for run, peak in large]))
    assert "Lowest peak CPU memory: run 0 (strategy=ddp), 4,000 MiB." in text


def test_cpu_memory_decides_only_what_is_more_than_the_processes_need() -> None:
    """In a sweep of a tiny pipeline, the second run had 300 MiB more, because the first one's process was shared."""
    runs = [add_parts(with_cpu_memory(record(n, strategy=f"ddp{n}"), 600.0 + 350 * n), parameters=10.0) for n in (0, 1)]
    overview = Overview.from_records(runs)
    process_mib = METRICS_BY_NAME["cpu_process_mib"].read(runs[0])
    assert process_mib == pytest.approx(600 - (4 * 10 * 2.01 + 2 * 2))  # two ranks, of which one has 1 % more
    assert process_mib is not None
    why = f"differ by less than the {process_mib:,.0f} MiB that their processes need without tensors"
    assert f"run 0 (strategy=ddp0), 600 MiB, and run 1 (strategy=ddp1), 950 MiB, {why}." in unwrapped(printed(runs))
    assert list(recommended(overview)) == []
    assert [tile.value for tile in build_tiles(overview) if tile.name.startswith("smallest")] == ["not decided"]
    assert [len(front) for front in pareto_fronts(overview, "cpu_peak_mib")] == [1]
    add_parts(with_cpu_memory(runs[1], 1950.0), parameters=1000.0 / 8)
    assert [group.label for group in recommended(Overview.from_records(runs))] == ["0"]


def test_runs_equal_within_the_noise_are_no_pareto_front() -> None:
    """A front through them would show a trend that is not there."""
    runs = [
        record(n, speed=speed, strategy=name) for n, (name, speed) in enumerate({"ddp": 86.0, "fsdp": 99.0}.items())
    ]
    for run, peak in zip(runs, (690.0, 1900.0), strict=True):
        with_cpu_memory(run, peak)
    assert _front_labels(runs) == ["0"]
    runs[1].metrics.train_samples_per_second = 400.0
    assert _front_labels(runs) == ["0", "1"]


def _front_labels(runs: list[RunRecord]) -> list[str]:
    (front,) = pareto_fronts(Overview.from_records(runs), "cpu_peak_mib")
    return [group.label for group in front]


def test_noise_of_repeats_holds_for_runs_without_repeats() -> None:
    twice = [record(n, run_id="a", speed=speed) for n, speed in enumerate((169.5, 289.1))]
    text = unwrapped(printed([*twice, record(2, strategy="fsdp", speed=240.0)]))
    assert "equal runs differed by ±37% here" in text
    assert "are equal within the noise of more than ±100%" in text


def test_without_repeats_the_noise_on_gpus_is_that_of_the_steps() -> None:
    runs = [record(0, speed=100.0, peak=9.0), record(1, strategy="fsdp", speed=105.0, peak=9.0)]
    text = unwrapped(printed(runs))
    assert "noise of ±" not in text
    assert "Fastest: run 1" in text
    assert "Repeat with repeats=3 to measure the noise." in text
    assert "CPU" not in text
    for run, error in zip(runs, (0.001, 0.04), strict=True):
        run.metrics.speed_error = {"relative": error, "blocks": 10.0}
    assert "are equal within the noise of ±9%." in unwrapped(printed(runs))
    runs[1].metrics.speed_error = {"relative": 0.001, "blocks": 10.0}
    assert "Fastest: run 1 (strategy=fsdp), 105.0 samples/s. The next is run 0" in unwrapped(printed(runs))


def test_a_failed_repeat_is_not_in_the_mean() -> None:
    error = RunError("ValueError", "no", "train")
    records = [
        record(0, run_id="a"),
        record(1, run_id="a", status="failed", error=error),
        record(2, strategy="fsdp"),
    ]
    text = unwrapped(printed(records))
    assert "1 of 2 completed" in text
    assert "run 1 failed: ValueError" in text


def test_a_run_that_failed_without_recording_its_gpu_is_a_repeat() -> None:
    error = RunError("WorkerDied", "gone", "setup")
    failed = record(0, run_id="a", status="failed", error=error)
    records = [failed, record(1, run_id="a", peak=9.0), record(2, strategy="fsdp", peak=9.0)]
    text = printed(records)
    assert "gpu" not in header(text)
    assert "1 of 2 completed" in text
    records[2].environment.gpu_name = "Tesla V100"  # type: ignore[union-attr]
    assert "gpu" in header(printed(records))


def test_a_run_that_was_stopped_before_its_workers_recorded_their_arithmetic_distinguishes_no_runs() -> None:
    runs = [record(n, strategy=strategy) for n, strategy in enumerate(("ddp", "fsdp", "single"))]
    runs[2].status, runs[2].error = "killed", RunError("Stopped", "stopped by SIGTERM", "train")
    for each, arithmetic in zip(runs, ("fp32 highest", "fp32 highest", None), strict=True):
        assert each.environment is not None
        each.environment.gpu_name, each.environment.arithmetic = "NVIDIA H200", arithmetic
    assert "arithmetic" not in printed(runs)
    runs[1].environment.arithmetic = "fp32 high"  # type: ignore[union-attr]
    assert "arithmetic" in printed(runs)


def test_runs_with_different_environment_settings_are_not_repeats() -> None:
    """Their run.id is equal, but the environment may be why their metrics differ."""

    def sweep_of(key: str, *values: object) -> list[RunRecord]:
        section, name = key.split("__")
        overrides = [(f"{section}.{name}={value}",) for value in values]
        return [record(n, run_id="a", overrides=overrides[n], **{key: value}) for n, value in enumerate(values)]

    for key, values in {
        "cluster__cpus_per_worker": (1, 4),
        "cluster__srun": (["--cpu-bind=none"], []),
        "measure__enabled": (True, False),
        "train__checkpoint_every": (None, "epoch"),
    }.items():
        text = printed(sweep_of(key, *values))
        assert " ± " not in text, key
        assert text.count("completed") == 2, key
    assert "cpus_" in header(printed(sweep_of("cluster__cpus_per_worker", 1, 4)))
    assert " ± " in printed(sweep_of("cluster__timeout_min", 10.0, 20.0)), "a time limit changes no metric"
    unset = [record(n, run_id="a", cluster__cpus_per_worker=n) for n in (1, 2)]
    assert " ± " in printed(unset), "the default share of the cores is not a choice"


def test_invalid_cells_are_not_repeats_of_each_other() -> None:
    """Their settings may be equal, because they are never resolved."""
    cells = [invalid(n, "no", overrides=("strategy=ddp", f"zero_stage={n}")) for n in (1, 2)]
    assert printed([*cells, record(0)]).count(" invalid") == 4, "two rows, a note and a summary"
    seeds = [invalid(n, "no", overrides=("strategy=ddp", f"train.seed={n}")) for n in (1, 2)]
    assert "1 +1" in printed([*seeds, record(0)])


def test_a_failed_run_keeps_the_variables_of_its_configuration() -> None:
    error = RunError("WorkerDied", "gone", "setup")
    passive = {"cluster__environment": {"OMP_WAIT_POLICY": "passive"}, "run_id": "a"}
    runs = [
        record(0, run_id="a", cluster__environment={"OMP_WAIT_POLICY": "active"}),
        record(1, status="failed", error=error, **passive),
    ]
    rows = [line.split()[:3] for line in printed(runs).splitlines() if line.startswith(("  0", "  1"))]
    assert rows == [["0", "active", "completed"], ["1", "passive", "failed"]]


def test_an_environment_variable_distinguishes_runs() -> None:
    records = [record(n, run_id="a", peak=9.0) for n in range(4)]
    for other in records[1:]:
        assert other.environment is not None
        other.environment.variables = {"NCCL_ALGO": "Ring", "NCCL_VERSION": f"2.{other.run.number}"}
    text = printed(records)
    assert "NCCL_" in header(text)
    rows = [line.split()[:4] for line in text.splitlines() if "completed" in line]
    assert rows == [["0", "1", "-", "completed"], ["1", "+2", "3", "Ring"]]


def test_a_run_without_workers_does_not_make_a_variable_a_difference() -> None:
    """The command knows the GPU of an invalid run, and no variable."""
    cells = [record(0, peak=9.0), record(1, peak=9.0, strategy="fsdp"), invalid(2, "no", strategy="fsdp")]
    for cell in cells:
        variables = {"NCCL_ALGO": "Ring"} if cell.status == "completed" else {}
        cell.environment = Environment(python="3.12", torch="2.11", gpu_name="H200", variables=variables)
    assert "NCCL" not in printed(cells)


def test_variables_of_the_logs_do_not_distinguish_runs() -> None:
    records = [record(n, run_id="a", peak=9.0) for n in range(2)]
    assert records[1].environment is not None
    records[1].environment.variables = {"NCCL_DEBUG": "WARN"}
    text = printed(records)
    assert "0 +1" in text
    assert "NCCL" not in text


def test_a_default_that_null_replaced_is_no_difference() -> None:
    """Records of DeepSpeed have ``overlap_comm=false`` until its default depended on the stage."""
    runs = [record(n, strategy="deepspeed", deepspeed__overlap_comm=value) for n, value in enumerate((False, None))]
    assert "overlap_" not in header(printed(runs))
    runs[0].run.overrides.append("deepspeed.overlap_comm=false")
    assert "overlap_" in header(printed(runs))
