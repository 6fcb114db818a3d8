"""``python -m distexp.report`` as a command: files, exit codes, what is skipped, how fast it is."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
from factory import record, write

from distexp.results import RunError, RunRecord


def report(*arguments: object, columns: int | None = 140) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"COLUMNS": str(columns)} if columns else {})}
    command = [sys.executable, "-m", "distexp.report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)


def two_runs() -> tuple[RunRecord, RunRecord]:
    return record(0, strategy="ddp", peak=2000.0), record(1, strategy="fsdp", speed=50.0, peak=1000.0)


def test_the_files_hold_a_row_a_run(tmp_path: Path) -> None:
    failed = record(2, strategy="single", status="failed", error=RunError("ValueError", "a | b, <c>", "eval", 1))
    sweep = write(tmp_path / "deep" / "sweep", *two_runs(), failed)
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "report"
    assert sorted(path.name for path in folder.iterdir()) == ["results.csv", "results.md", "results.parquet"]

    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["completed", "completed", "failed"]
    assert rows[0]["train_samples_per_second"] == "100.0"
    assert rows[0]["config.train.learning_rate"] == "5e-05"
    assert rows[0]["gpu_peak_mib"] == "2000.0"  # of the fullest GPU
    assert rows[1]["scale_factor"] == "0.5"
    assert rows[1]["config.fsdp.sharding"] == "full_shard"
    assert rows[2]["train_loss"] == ""  # absent, never 0
    assert [rows[2][f"error_{key}"] for key in ("phase", "rank", "message")] == ["eval", "1", "a | b, <c>"]
    assert rows[2]["record"] == str(sweep / "2" / "record.json")

    frame = pd.read_parquet(folder / "results.parquet")
    assert list(frame.columns) == list(rows[0])
    assert frame["train_samples_per_second"].dtype == "float64"
    assert frame["energy_j_per_sample"].dtype == "float64"
    assert frame["energy_j_per_sample"].isna().all()
    assert frame["config.train.num_epochs"].tolist() == [3, 3, 3]

    markdown = (folder / "results.md").read_text().splitlines()
    assert markdown[0].startswith("| run | strategy | status |")
    assert len({line.count(" | ") for line in markdown[:5]}) == 1
    assert any("a \\| b, &lt;c>" in line for line in markdown)


def test_configurations_of_different_types_share_a_column(tmp_path: Path) -> None:
    write(tmp_path, record(0, dataset__max_length=64), record(1, dataset__max_length="auto"))
    assert report(tmp_path).returncode == 0
    frame = pd.read_parquet(tmp_path / "report" / "results.parquet")
    assert frame["config.dataset.max_length"].tolist() == ["64", "auto"]


def test_several_folders_are_one_report_in_the_first(tmp_path: Path) -> None:
    first, second = two_runs()
    write(tmp_path / "2026-01-01_10-00-00", first)
    write(tmp_path / "2026-01-01_11-00-00", second)
    a, b = tmp_path / "2026-01-01_10-00-00", tmp_path / "2026-01-01_11-00-00"
    done = report(a, b, a)
    assert "10-00-00/0" in done.stdout
    assert "11-00-00/1" in done.stdout
    assert "2026-01-01_10-00-00/0 " not in done.stdout
    assert len(pd.read_parquet(a / "report" / "results.parquet")) == 2  # the folder given twice counts once
    assert not (b / "report").exists()


def test_unreadable_records_are_named_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    good = json.loads((tmp_path / "0" / "record.json").read_text())
    bad = {
        "torn": json.dumps(good)[:300],
        "foreign": '{"hello": 1}',
        "list": "[1, 2]",
        "older": json.dumps({**good, "schema_version": 0}),
        "status": json.dumps({**good, "status": "splendid"}),
        "run": json.dumps({**good, "run": [1]}),
        "config": json.dumps({**good, "config": {"strategy": "ddp"}}),
        "metrics": json.dumps({**good, "metrics": {"train_loss": "low"}}),
        "memory": json.dumps({**good, "memory": {"gpu": 3}}),
        "binary": "\x00\x01",
    }
    for name, text in bad.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    (tmp_path / "dangling").mkdir()
    (tmp_path / "dangling" / "record.json").symlink_to(tmp_path / "gone")
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(bad) + 1
    for name in (*bad, "dangling"):
        assert sum(f"/{name}/record.json" in line for line in said) == 1, name
    assert len(pd.read_parquet(tmp_path / "report" / "results.parquet")) == 2


def test_no_records_is_code_2_with_what_was_looked_for(tmp_path: Path) -> None:
    done = report(tmp_path)
    assert done.returncode == 2
    assert f"no readable record.json below {tmp_path}" in done.stderr
    assert not (tmp_path / "report").exists()
    gone = report(tmp_path / "gone")
    assert gone.returncode == 2
    assert "is not a folder" in gone.stderr
    assert report().returncode == 2


def test_files_that_cannot_be_written_do_not_cost_the_table(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    (tmp_path / "report").write_text("in the way")
    done = report(tmp_path)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert "samples/s" in done.stdout


def test_nothing_is_dropped_where_there_is_no_terminal(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "distexp.report", str(tmp_path)],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert "Left out" not in done.stdout


def test_the_command_never_imports_torch(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    code = (
        "import sys; from distexp.report.__main__ import main; main(sys.argv[1:]); "
        "import distexp.doctor.__main__; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_table_needs_neither_pandas_nor_pyarrow() -> None:
    code = "import sys, distexp.report.table; print({'pandas', 'pyarrow', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_five_thousand_records_in_under_twenty_seconds(tmp_path: Path) -> None:
    template = json.dumps({**json.loads(_text(record(0))), "run": "RUN"})
    for number in range(5000):
        directory = tmp_path / str(number)
        directory.mkdir()
        run = {"id": f"{number:012x}", "name": "distexp", "number": number, "overrides": []}
        text = template.replace('"RUN"', json.dumps(run)).replace('"seed": 42', f'"seed": {number % 5}')
        text = text.replace('"learning_rate": 5e-05', f'"learning_rate": {1 + number // 5}e-7')
        (directory / "record.json").write_text(text)
    start = time.monotonic()
    done = report(tmp_path, columns=80)
    assert time.monotonic() - start < 20
    assert done.returncode == 0, done.stderr
    assert "more rows are not shown here" in done.stdout
    assert len(pd.read_parquet(tmp_path / "report" / "results.parquet")) == 5000


def _text(each: RunRecord) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(each))


# ---- --compare ----


def sweep(path: Path, *, speed: float = 1.0, peak: float = 1000.0, loss: float = 2.0) -> Path:
    return write(
        path,
        *(
            record(n, strategy=name, speed=speed * (n + 1) * 100, peak=peak, loss=loss, run_id=f"same{n}")
            for n, name in enumerate(("ddp", "fsdp"))
        ),
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speed": 0.9}, "strategy=ddp: slower, 100.0 -> 90.0 samples/s (-10.0%)"),
        ({"peak": 1100.0}, "strategy=fsdp: more GPU memory at peak, 1,000 -> 1,100 MiB (+10.0%)"),
        ({"loss": 2.1}, "strategy=ddp: worse eval loss, 2.0000 -> 2.1000 (+5.0%)"),
    ],
)
def test_regressions_are_named_with_code_1(tmp_path: Path, change: dict[str, float], said: str) -> None:
    before, after = sweep(tmp_path / "a"), sweep(tmp_path / "b", **change)
    done = report("--compare", before, after)
    assert done.returncode == 1, done.stdout
    assert f"Regression: {said}" in done.stdout
    assert done.stdout.count("Regression:") == 2
    back = report("--compare", after, before)
    assert back.returncode == 0, back.stdout
    assert "No regression in 2 matched configurations." in back.stdout


def test_small_changes_and_changes_within_the_spread_are_no_regressions(tmp_path: Path) -> None:
    assert report("--compare", sweep(tmp_path / "a"), sweep(tmp_path / "b", speed=0.96, peak=1040)).returncode == 0
    speeds = {"before": (100.0, 130.0, 70.0), "after": (90.0, 60.0, 110.0)}
    for name, values in speeds.items():
        write(tmp_path / name, *(record(n, train__seed=n, speed=speed) for n, speed in enumerate(values)))
    done = report("--compare", tmp_path / "before", tmp_path / "after")
    assert done.returncode == 0, done.stdout
    assert "0.87x~" in done.stdout
    assert "within the spread" in done.stdout


def test_a_run_that_no_longer_completes_is_a_regression(tmp_path: Path) -> None:
    before = sweep(tmp_path / "a")
    first = record(0, strategy="ddp", speed=100.0, run_id="same0", peak=1000.0)
    broken = record(1, strategy="fsdp", status="failed", run_id="same1", error=RunError("ValueError", "oh"), peak=1.0)
    done = report("--compare", before, write(tmp_path / "b", first, broken))
    assert done.returncode == 1
    assert "Regression: strategy=fsdp: completed -> failed (ValueError: oh)" in done.stdout


def test_sweeps_that_differ_throughout_match_by_what_varies(tmp_path: Path) -> None:
    names = ("ddp", "fsdp")
    before = write(tmp_path / "a", *(record(n, strategy=name) for n, name in enumerate(names)))
    bf16 = [record(n, strategy=name, precision__name="bf16", speed=150.0) for n, name in enumerate(names)]
    done = report("--compare", before, write(tmp_path / "b", *bf16, record(2, strategy="single")))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("1.50x") == 2
    assert "-> bf16" not in done.stdout  # one of B's runs is fp32
    assert "In B alone: strategy=single" in done.stdout


def test_what_differs_throughout_is_said(tmp_path: Path) -> None:
    before = write(tmp_path / "a", record(0))
    done = report("--compare", before, write(tmp_path / "b", record(0, precision__name="bf16")))
    assert "B differs from A throughout in precision fp32 -> bf16." in done.stdout
    assert report("--compare", before, tmp_path).returncode in (0, 1)
    nothing = tmp_path / "empty"
    nothing.mkdir()
    assert report("--compare", before, nothing).returncode == 2
