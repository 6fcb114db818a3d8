"""Tests of the figure of where the step goes, of energy totals, and of sentences about stragglers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures.base import Figure
from distexp.report.figures.labels import LINE_HEIGHT, bar_height, label_axis
from distexp.report.figures.step_figures import build_step_breakdown
from distexp.report.overview_table import summarize
from distexp.runs.attempts import NO_RECORD
from distexp.runs.metrics import PARTS
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import ARCHIVED_RECORD, ATTEMPTS, RECORD
from tests.helpers.records import invalid, record, write

STEP_PARTS = {f"{name}_ms": title for name, title in PARTS.items()}
OWN = dict(zip(STEP_PARTS, (40.0, 20.0, 10.0, 0.0, 8.0, 2.0, 15.0, 5.0, 0.0), strict=True))


def breakdown(rank: int, waiting: float = 0.0, **parts: float | None) -> dict[str, Any]:
    """Return an entry whose parts are 100 ms and the time of waiting, unless other ``parts`` are given."""
    return {"rank": rank, **OWN, "waiting_ms": waiting, "step_ms": 100 + waiting, "hidden_communication_ms": 30.0,
            **parts}  # fmt: skip


def profiled(number: int, *ranks: dict[str, Any], **settings: Any) -> RunRecord:
    run = record(number, train__micro_batch_size=4, overrides=(f"run={number}",), **settings)
    run.metrics.step_breakdown = list(ranks)
    return run


def overview(path: Path, *runs: RunRecord) -> Overview:
    write(path, *runs)
    return Overview.from_rows(load_rows([path])[0])


def figure(path: Path, *runs: RunRecord) -> Figure:
    built = build_step_breakdown(overview(path, *runs), [])
    assert built is not None
    return built


def bars(drawn: Figure) -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = drawn.panels[0].chart.to_dict(validate=False)["layer"][0]["data"]["values"]
    return values


def lengths(drawn: Figure) -> dict[str, float]:
    """Return the length of the bar of each run."""
    return {name: sum(part["ms"] for part in bars(drawn) if part["run"] == name) for name in ("0", "1")}


def test_a_single_run_has_a_bar_for_each_rank(tmp_path: Path) -> None:
    drawn = figure(tmp_path, profiled(0, breakdown(0, 25.0), breakdown(1)))
    sums = {name: sum(bar["ms"] for bar in bars(drawn) if bar["bar"] == name) for name in ("rank 0", "rank 1")}
    assert sums == pytest.approx({"rank 0": 125.0, "rank 1": 100.0})
    (table,) = drawn.tables
    cells = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [(row["rank"], row["step (ms)"], row["matrix kernels"]) for row in cells] == [
        ("0", "125.00", "32.0"),
        ("1", "100.00", "40.0"),
    ]
    assert cells[1]["hidden communication"] == "30.0"
    assert [entry.label for entry in drawn.legend] == list(STEP_PARTS.values())[:-1]  # no pipeline


def test_a_record_whose_parts_are_all_zero_has_no_chart(tmp_path: Path) -> None:
    nothing = breakdown(0, **dict.fromkeys(STEP_PARTS, 0.0))
    drawn = figure(tmp_path, profiled(0, nothing))
    assert not drawn.panels
    assert drawn.tables


def test_runs_are_compared_by_the_rank_that_the_others_wait_for(tmp_path: Path) -> None:
    slow = breakdown(1, matmul_ms=65.0, step_ms=125.0)
    runs = [profiled(n, breakdown(0, 25.0), slow, strategy=name) for n, name in enumerate(("ddp", "fsdp"))]
    drawn = figure(tmp_path, *runs)
    assert {bar["rank"] for bar in bars(drawn)} == {1}
    assert {bar["bar"] for bar in bars(drawn)} == {"run 0 (strategy=ddp)", "run 1 (strategy=fsdp)"}
    assert "per sample" not in drawn.caption


def test_runs_with_other_global_batches_are_compared_per_sample(tmp_path: Path) -> None:
    runs = [profiled(n, breakdown(0)) for n in range(2)]
    runs[1].config["train"]["micro_batch_size"] = 8
    drawn = figure(tmp_path, *runs)
    assert "Times are per sample, because the global batch sizes differ." in drawn.caption
    sums = {name: sum(bar["ms"] for bar in bars(drawn) if bar["run"] == name) for name in ("0", "1")}
    assert sums == pytest.approx({"0": 100 / 8, "1": 100 / 16})
    assert [row[-1] for row in drawn.tables[0].rows] == ["30.0", "30.0"], "percent of the step"


def test_packed_rows_have_several_samples(tmp_path: Path) -> None:
    runs = [profiled(n, breakdown(0), dataset__train_size=96) for n in range(2)]
    for run in runs:
        run.config["dataset"]["packing"] = run.run.number == 1
        run.metrics.steps_per_epoch = 3 if run.run.number else 12
    drawn = figure(tmp_path, *runs)
    sums = {name: sum(bar["ms"] for bar in bars(drawn) if bar["run"] == name) for name in ("0", "1")}
    assert sums == pytest.approx({"0": 100 / 8, "1": 100 / 32})


def test_a_part_that_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    drawn = figure(tmp_path, profiled(0, breakdown(0, launch_idle_ms=None), breakdown(1, launch_idle_ms=None)))
    title = STEP_PARTS["launch_idle_ms"]
    assert title not in {bar["part"] for bar in bars(drawn)} | set(drawn.tables[0].header)
    assert title not in {entry.label for entry in drawn.legend}


def test_bars_of_a_cpu_have_the_shares_of_the_profiled_step(tmp_path: Path) -> None:
    scaled = breakdown(0, launch_idle_ms=None, profiled_step_ms=150.0, includes_overhead=True)
    run = profiled(0, scaled)
    run.metrics.step_time_s = {"p50": 0.1}
    assert "On a CPU a bar has the length of the median of the other steps" in figure(tmp_path / "cpu", run).caption
    run.metrics.step_breakdown = [{**scaled, "launch_idle_ms": 8.0}]
    assert "On a CPU" not in figure(tmp_path / "gpu", run).caption


def test_settings_start_a_line_if_the_first_line_is_too_long() -> None:
    short, long = (f"run {run} (strategy=ddp, zero_stage=2)" for run in ("0", "name_of_a_sweep/0"))
    assert ["replace" in label_axis([name]).to_dict()["labelExpr"] for name in (short, long)] == [False, True]
    assert bar_height([long], 0) - bar_height([short], 0) == LINE_HEIGHT
    assert label_axis([short, long]).to_dict() == label_axis([long]).to_dict(), "all bars are labeled alike"


def test_the_bottleneck_is_explained_with_what_to_try(tmp_path: Path) -> None:
    runs = [profiled(n, breakdown(0), strategy=name) for n, name in enumerate(("ddp", "fsdp"))]
    for run, overrides in zip(runs, (["kernels=fast", "train.micro_batch_size=32"], []), strict=True):
        run.metrics.explanation = {
            "loss": "launch_idle", "share": 0.17, "sentence": "17% idle; see kernels=fast.", "try": overrides,
            "larger_global_batch": overrides[1:],
        }  # fmt: skip
    drawn = figure(tmp_path, *runs)
    assert drawn.sentences == (
        "Run 0 (strategy=ddp): 17% idle; see kernels=fast. Try train.micro_batch_size=32. "
        "A larger global batch changes the training: train.micro_batch_size=32.",
        "Run 1 (strategy=fsdp): 17% idle; see kernels=fast.",
    )
    assert drawn.tables[0].header[-1] == "bottleneck"
    assert [row[-1] for row in drawn.tables[0].rows] == ["GPU idle: slow launches, 17%"] * 2


def test_bars_have_the_order_of_the_steps_that_were_not_profiled(tmp_path: Path) -> None:
    """Both profiled steps take 100 ms. Without the profiler, one run is twice as fast."""
    fast, slow = profiled(0, breakdown(0)), profiled(1, breakdown(0), strategy="fsdp")
    fast.metrics.step_time_s, slow.metrics.step_time_s = {"p50": 0.05}, {"p50": 0.1}
    drawn = figure(tmp_path, fast, slow)
    assert lengths(drawn) == pytest.approx({"0": 50.0, "1": 100.0})
    assert {part["share"] for part in bars(drawn) if part["part"] == STEP_PARTS["matmul_ms"]} == {0.4}
    assert "Some profiled steps (1 of 2 runs) are shorter or longer than the median of the other steps" in drawn.caption
    assert "So each bar has the length of that median" in drawn.caption
    table = drawn.tables[0]
    assert [row[table.header.index("median of the other steps (ms)")] for row in table.rows] == ["50.00", "100.00"]
    same = figure(tmp_path / "same", profiled(0, breakdown(0)), slow)
    assert "median" not in same.caption.replace("median profiled step", "")
    assert "median of the other steps (ms)" not in same.tables[0].header


def test_bars_are_not_scaled_if_a_median_is_unknown(tmp_path: Path) -> None:
    fast, unknown = profiled(0, breakdown(0)), profiled(1, breakdown(0), strategy="fsdp")
    fast.metrics.step_time_s = {"p50": 0.05}
    drawn = figure(tmp_path, fast, unknown)
    assert lengths(drawn) == pytest.approx({"0": 100.0, "1": 100.0})
    assert "Compare the shares of the bars, not their times." in drawn.caption


def test_a_hundred_runs_are_a_few_bars(tmp_path: Path) -> None:
    runs = [profiled(n, breakdown(0)) for n in range(30)]
    for run in runs:
        run.config["train"]["learning_rate"] = (1 + run.run.number) / 1e6
        run.metrics.explanation = {"sentence": "It is compute-bound."}
    drawn = figure(tmp_path, *runs)
    assert len({bar["bar"] for bar in bars(drawn)}) == 24
    assert "Drawn: 24 of 30." in drawn.caption
    assert drawn.sentences[-1] == "22 more are in the records (metrics.explanation)."


@pytest.mark.parametrize("content", [None, [], [{}], [{"rank": 0, "step_ms": "long"}], [{"rank": "a", "step_ms": 1}]])
def test_records_without_a_breakdown_have_no_figure(tmp_path: Path, content: Any) -> None:
    run = record(0)
    run.metrics.step_breakdown = content
    assert build_step_breakdown(overview(tmp_path, run), []) is None


def sentences(path: Path, *runs: RunRecord) -> list[str]:
    return list(summarize(overview(path, *runs)))


def test_energy_and_cost_of_all_runs_are_added(tmp_path: Path) -> None:
    runs = [record(0), record(1, status="failed"), invalid(2, "no such mesh")]
    assert not any("In total" in text for text in sentences(tmp_path / "without", *runs))
    for run, price in zip(runs[:2], (0.5, None), strict=True):
        run.metrics.energy = {"kwh": 0.125, "gpu_hours": 1.5, "co2e_g": 50.0, "price": price}
    found = sentences(tmp_path / "with", *runs)
    assert "In total: 0.250 kWh, 3.00 GPU-hours, 100 g CO2e, price 0.50 (1 of 2 runs)." in found


def test_earlier_attempts_count_in_the_sums(tmp_path: Path) -> None:
    """The second run has three attempts: one with a record, one whose launcher died, and the latest."""
    runs = [record(0), record(1)]
    for run in runs:
        run.metrics.energy = {"kwh": 0.25, "gpu_hours": 1.0}
    runs[1].run.attempts = [{"reason": "preempted"}, {"reason": NO_RECORD}, {"reason": "completed"}]
    data = overview(tmp_path, *runs)
    assert "In total: 0.500 kWh (2 of 4 attempts), 2.00 GPU-hours (2 of 4 attempts)." in summarize(data)
    earlier = tmp_path / "1" / ATTEMPTS / "0" / ARCHIVED_RECORD
    earlier.parent.mkdir(parents=True)
    failed = record(1, status="failed")
    failed.metrics.energy = {"kwh": 0.125, "gpu_hours": None}
    failed.write(earlier.parent)
    (earlier.parent / RECORD).rename(earlier)
    assert "In total: 0.625 kWh (3 of 4 attempts), 2.00 GPU-hours (2 of 4 attempts)." in summarize(data)


def test_stragglers_are_named_with_their_evidence(tmp_path: Path) -> None:
    run = record(3)
    run.metrics.stragglers = [
        {"rank": 1, "gpu": 1, "host": "n1", "slower_by_pct": 23.4, "evidence": "SM clock at 1,200 MHz"},
        {"rank": 2, "gpu": None, "host": None, "slower_by_pct": 5, "evidence": None},
        {"rank": 3, "gpu": 3, "host": None, "slower_by_pct": None, "evidence": "ECC errors"},
    ]
    found = sentences(tmp_path, run)
    assert "In run 3, rank 1 (GPU 1 of n1) is 23% slower: SM clock at 1,200 MHz." in found
    assert "In run 3, rank 2 is 5% slower." in found
    assert "In run 3, rank 3 (GPU 3) has a problem: ECC errors." in found


def test_the_end_of_a_long_key_starts_a_line() -> None:
    short, long = (f"run 0 (strategy=ddp, {key}=2)" for key in ("zero_stage", "gradient_accumulation_steps"))
    axes = [label_axis([name]).to_dict() for name in (short, long)]
    assert "replace" not in axes[0]["labelExpr"]
    assert bar_height([long], 0) - bar_height([short], 0) == LINE_HEIGHT
    assert axes[0]["minExtent"] < axes[1]["minExtent"] < axes[1]["labelLimit"], "the key fits in two lines"
