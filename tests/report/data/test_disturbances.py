"""Tests of runs that something else slowed down: their speeds are marked and not ranked."""

from __future__ import annotations

from pathlib import Path

from distexp.report.data.answer import build_tiles, headline
from distexp.report.data.overview import Overview, pareto_fronts
from distexp.report.data.rows import rows_from_records
from distexp.report.files import result_row
from distexp.report.page import run_table
from distexp.runs.record import RunRecord
from tests.helpers.printed_tables import printed, unwrapped
from tests.helpers.records import record


def starved(run: RunRecord, used: float = 15.0) -> RunRecord:
    """Return the record of a run that got a share of its cores, in percent."""
    assert run.environment is not None
    run.environment.cpu_count, run.metrics.train_runtime = 2, 400.0
    run.metrics.total_steps, run.metrics.train_steps_per_second = 205, 0.5
    run.utilization["cpu"] = [{"node": 0, "average_pct": used, "phases": {"train": used}}]
    return run


def uneven(run: RunRecord, mean_in_medians: float) -> RunRecord:
    run.metrics.step_time_s = {"p50": 0.02, "p90": 0.1, "max": 1.0}
    run.metrics.train_steps_per_second = 1 / (0.02 * mean_in_medians)
    return run


def test_a_disturbed_run_is_marked_and_not_ranked() -> None:
    """Two equal trainings had median steps of 20.5 and 20.1 ms, but 58.0 and 384.3 samples/s."""
    runs = [uneven(record(0, speed=58.0), 6.7), uneven(record(1, strategy="fsdp", speed=384.3), 1.0)]
    text = unwrapped(printed(runs))
    assert "Run 0 (strategy=ddp) was disturbed: its mean step took 6.7 times as long as its median step." in text
    assert "58.0! " in text
    assert "6.63" not in text, "relative to a disturbed run"
    assert "384.3 " in text
    assert "!: This run, or the run it is compared with, was slowed down by another program." in text
    assert "Fastest: not decided, because the speed of run 0 is not known." in text
    assert "!" not in printed([uneven(run, 1.4) for run in runs])


def test_starved_baselines_mark_the_speedups_of_the_others() -> None:
    """A single run got 15 % of its cores: DDP with two workers seemed to be 8 times faster."""
    single = starved(record(0, strategy="single", speed=6.6, cluster__workers_per_node=1, cluster__cpus_per_worker=2))
    others = [record(1, speed=54.0), record(2, strategy="fsdp", speed=20.0)]
    text = unwrapped(printed([single, *others]))
    assert "was disturbed: it got 15% of the time of its CPU cores." in text
    assert "8.18" not in text
    assert "Fastest: run 1" in text, "the others are ranked"


def test_speedups_above_the_number_of_workers_are_marked() -> None:
    single = record(0, strategy="single", speed=50.0, cluster__workers_per_node=1, cluster__cpus_per_worker=2)
    overview = Overview.from_records([single, record(1, speed=400.0)])
    doubt = "ddp, workers=2 is faster than its workers explain, so do not trust the baseline, run 0"
    assert list(headline(overview)) == [f"Not decided: {doubt}."]
    tiles = {tile.name: tile for tile in build_tiles(overview)}
    assert (tiles["fastest"].value, tiles["fastest"].detail) == ("not decided", doubt)
    text = unwrapped(printed([single, record(1, speed=400.0), record(2, strategy="fsdp", speed=130.0)]))
    assert "!: The speedup of run 1 is larger than its number of workers. Do not trust the baseline, run 0 (" in text
    assert "Likely reason: its 2 threads per worker wait on busy cores. Set cluster.cpus_per_worker=1." in text
    assert "8.00" not in text
    assert "2.60 " in text, "not larger than the workers beyond the noise"
    fast = record(1, speed=400.0, precision__name="bf16")
    assert "8.00 " in unwrapped(printed([single, fast])), "the precision may explain it"


def test_more_threads_explain_a_speedup() -> None:
    workers = {"strategy": "single", "cluster__workers_per_node": 1}
    runs = [
        record(0, speed=100.0, overrides=("cluster.cpus_per_worker=1",), cluster__cpus_per_worker=1, **workers),
        record(1, speed=330.0, overrides=("cluster.cpus_per_worker=4",), cluster__cpus_per_worker=4, **workers),
    ]
    text = unwrapped(printed(runs))
    assert "3.30 " in text
    assert "!" not in text
    runs[1].metrics.train_samples_per_second = 800.0
    assert "8.00" not in unwrapped(printed(runs))


def test_the_page_and_the_files_know_disturbed_runs() -> None:
    runs = [uneven(record(0, speed=90.0, peak=9.0), 3.0), record(1, strategy="fsdp", speed=80.0, peak=20.0)]
    overview = Overview.from_records(runs)
    assert [[group.label for group in front] for front in pareto_fronts(overview, "gpu_peak_mib")] == [["1"]]
    tiles = {tile.name: tile for tile in build_tiles(overview)}
    assert tiles["fastest"].value == "not decided"
    assert list(headline(overview)) == ["Fastest: not decided: run 0, which another program slowed down."]
    rows = [result_row(row) for row in rows_from_records(runs)]
    assert [row["disturbance"] for row in rows] == ["its mean step took 3.0 times as long as its median step", None]


def test_a_single_disturbed_run_is_not_compared() -> None:
    overview = Overview.from_records([uneven(record(0, speed=90.0), 3.0)])
    first, *others = headline(overview)
    assert first == "Another program slowed this run down, so its speed is not known."
    assert not any("samples/s" in sentence for sentence in others)
    assert ("speed", "not known") in [(tile.name, tile.value) for tile in build_tiles(overview)]
    assert "Fastest" not in printed([uneven(record(0, speed=90.0), 3.0)])


def test_the_table_of_the_page_has_the_marks(tmp_path: Path) -> None:
    runs = [uneven(record(0, speed=90.0), 3.0), record(1, strategy="fsdp", speed=80.0)]
    columns = {column["title"]: column for column in run_table(Overview.from_records(runs), tmp_path)["columns"]}
    assert columns["samples/s"]["marks"] == ["!", ""]
    assert columns["speedup"]["texts"] == ["!", "!"]
    assert "marks" not in columns["train loss"]


def test_one_disturbed_repeat_does_not_disqualify_the_others(tmp_path: Path) -> None:
    repeats = [record(n, run_id="a", speed=speed, loss=2.0 + n) for n, speed in enumerate((100.0, 102.0, 20.0))]
    runs = [*repeats[:2], uneven(repeats[2], 5.0), record(3, strategy="fsdp", speed=50.0)]
    text = unwrapped(printed(runs))
    assert "101.0 ± 1.4 " in text
    assert "3.0000 ± 1.0000" in text, "the losses of all repeats"
    assert "Run 2 (strategy=ddp) was disturbed: its mean step took 5.0 times as long as its median step." in text
    assert "Fastest: run 0 +2" in text
    assert "!" not in text
    overview = Overview.from_records(runs)
    columns = {column["title"]: column for column in run_table(overview, tmp_path)["columns"]}
    assert columns["samples/s"]["marks"] == ["", "", "!", ""]
    repeats[:2] = [uneven(run, 2.0) for run in repeats[:2]]
    assert "Run 0 +2 (strategy=ddp) was disturbed" in unwrapped(printed(runs)), "all are"
