"""Tests of the timeline of one step, and of its links to the full traces."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.figures.base import Figure
from distexp.report.figures.step_figures import MAX_RANKS, build_step_timeline
from distexp.report.page import write_page
from distexp.report.traces import load_traces
from tests.helpers.records import record, write

LABELS = ["matmul", "all_reduce", "forward"]


def profile(run_dir: Path, content: Any, *, traces: int = 0) -> None:
    """Write the summary and some empty full traces of a run."""
    (run_dir / "profile").mkdir()
    (run_dir / "profile" / "summary.json").write_text(json.dumps(content))
    for rank in range(traces):
        (run_dir / "profile" / f"rank{rank}.json.gz").touch()


def lanes(rank: int, spans: int = 2) -> dict[str, Any]:
    """Return the entry of a rank with a lane of kernels, one of communication and one of the CPU."""
    names = ("cpu", "communication", "compute")
    each = [[k, k + 0.5] for k in range(spans)]
    return {
        "rank": rank, "step_ms": float(spans),
        "lanes": [{"name": name, "spans": [[*span, 2 - n] for span in each]} for n, name in enumerate(names)],
    }  # fmt: skip


def summary(ranks: int, spans: int = 2) -> dict[str, Any]:
    return {"schema": 1, "steps": 3, "labels": LABELS, "ranks": [lanes(rank, spans) for rank in range(ranks)]}


def sweep(path: Path, runs: int, ranks: int) -> Path:
    for number in range(runs):
        run = record(number, train__learning_rate=(1 + number) / 1e4)
        run.metrics.step_breakdown = [
            {"rank": rank, "step_ms": 10.0, "waiting_ms": 0.0 if rank == 3 else 1.0} for rank in range(ranks)
        ]
        write(path, run)
        profile(path / str(number), summary(ranks), traces=ranks)
    return path


def overview(path: Path) -> Overview:
    return Overview.from_rows(load_rows([path])[0])


def figure_of(path: Path) -> Figure | None:
    runs = overview(path)
    return build_step_timeline(runs, load_traces(runs))


def rows_of(figure: Figure, panel: int = 0) -> list[dict[str, str]]:
    data = figure.panels[panel].chart.to_dict(validate=False)["data"]
    return list(csv.DictReader(data["values"].splitlines()))


def test_each_rank_has_its_lanes_in_order(tmp_path: Path) -> None:
    figure = figure_of(sweep(tmp_path, 1, 2))
    assert figure is not None
    rows = rows_of(figure)
    assert list(dict.fromkeys(row["lane"] for row in rows)) == [
        f"rank {rank} {lane}" for rank in (0, 1) for lane in ("compute", "communication", "CPU")
    ]
    assert rows[3] == {"lane": "rank 0 communication", "begin": "1.0", "end": "1.5", "label": "all_reduce"}
    assert [entry.label for entry in figure.legend] == ["matrix kernels", "forward", "all_reduce"]
    assert len({entry.color for entry in figure.legend}) == 3
    assert [path.name for path in figure.panels[0].traces] == ["rank0.json.gz", "rank1.json.gz"]


def test_of_many_ranks_the_slowest_one_is_drawn(tmp_path: Path) -> None:
    figure = figure_of(sweep(tmp_path, 2, 2 * MAX_RANKS))
    assert figure is not None
    drawn = {row["lane"].split()[1] for row in rows_of(figure)}
    assert "3" in drawn
    assert len(drawn) == MAX_RANKS // 2
    assert "Not all ranks are drawn, but the slowest one of each run is." in figure.caption


def test_a_thousand_spans_of_eight_runs_are_a_small_page(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path, record(number, train__learning_rate=(1 + number) / 1e4))
        profile(tmp_path / str(number), summary(2, spans=400))
    runs = overview(tmp_path)
    figure = build_step_timeline(runs, load_traces(runs))
    assert figure is not None
    write_page(runs, [figure], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 1.5e6


def test_the_page_links_the_full_traces(tmp_path: Path) -> None:
    runs = overview(sweep(tmp_path / "a b", 1, 2))
    figure = build_step_timeline(runs, load_traces(runs))
    assert figure is not None
    (tmp_path / "report").mkdir()
    write_page(runs, [figure], tmp_path / "report" / "report.html")
    text = (tmp_path / "report" / "report.html").read_text()
    assert '<a href="../a%20b/0/profile/rank1.json.gz">rank1</a>' in text
    assert "https://ui.perfetto.dev" in text


@pytest.mark.parametrize(
    "content",
    [
        None,
        {"schema": 2, "ranks": [], "labels": []},
        {"schema": 1, "ranks": [{"rank": 0}, 7], "labels": LABELS},
        {"schema": 1, "labels": LABELS,
         "ranks": [{"rank": 0, "step_ms": 1, "lanes": [{"name": "compute", "spans": [[0, 1, 9], ["x", 1, 0], 3]}]}]},
    ],
)  # fmt: skip
def test_a_damaged_summary_is_no_timeline(tmp_path: Path, content: Any) -> None:
    write(tmp_path, record(0))
    profile(tmp_path / "0", content)
    assert figure_of(tmp_path) is None
