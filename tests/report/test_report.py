"""Tests of the command ``distexp report``."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from distexp.config import ConfigError
from distexp.report.__main__ import main
from distexp.report.files import write_csv
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from tests.helpers.records import invalid, record, write
from tests.helpers.report_sweeps import enrich, with_traces
from tests.helpers.runs import run_module


@dataclass
class CommandResult:
    """Exit code and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def report(*arguments: object, columns: int = 140) -> CommandResult:
    """Run the command in this process, where the libraries are loaded already."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setenv("COLUMNS", str(columns))
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # from argparse
            code = int(error.code or 0)
    return CommandResult(code, stdout.getvalue(), stderr.getvalue())


def two_runs() -> tuple[RunRecord, RunRecord]:
    return record(0, strategy="ddp", peak=2000.0), record(1, strategy="fsdp", speed=50.0, peak=1000.0)


def test_result_files_have_a_row_per_run(tmp_path: Path) -> None:
    error = RunError("ValueError", "a | b, <c>", "eval", 1)
    failed = record(2, strategy="single", status="failed", error=error, cluster__device="cuda")
    sweep = write(tmp_path / "deep" / "sweep", *two_runs(), failed)
    done = report(tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "report"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["plots", "report.html", "results.csv", "results.md", "results.parquet"]
    plots = folder / "plots"
    assert sorted(path.name for path in plots.iterdir()) == ["memory_throughput.png", "memory_throughput.svg"]
    assert (plots / "memory_throughput.png").read_bytes().startswith(b"\x89PNG")
    drawing = (plots / "memory_throughput.svg").read_text()
    assert "peak GPU memory" in drawing
    assert "var(" not in drawing  # no variables of the page's style sheet
    assert f"written: {folder}, 6 files: plots/, report.html, results.csv, results.md, results.parquet" in done.stdout

    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["completed", "completed", "failed"]
    assert rows[0]["train_samples_per_second"] == "100.0"
    assert rows[0]["config.train.learning_rate"] == "5e-05"
    assert rows[0]["gpu_peak_mib"] == "2000.0"  # of the GPU that uses most
    assert rows[1]["speedup"] == "0.5"
    assert rows[1]["config.fsdp.sharding"] == "full_shard"
    assert rows[2]["train_loss"] == ""  # not measured, never 0
    assert [rows[2][f"error_{key}"] for key in ("phase", "rank", "message")] == ["eval", "1", "a | b, <c>"]
    assert rows[2]["record"] == str(sweep / "2" / "record.json")

    table = pq.read_table(folder / "results.parquet")
    assert table.column_names == list(rows[0])
    for name in ("train_samples_per_second", "energy_j_per_sample"):
        assert str(table.schema.field(name).type) == "double"
    assert table["energy_j_per_sample"].null_count == 3
    assert table["config.train.num_epochs"].to_pylist() == [3, 3, 3]

    markdown = (folder / "results.md").read_text().splitlines()
    assert "![Memory against throughput](plots/memory_throughput.svg)" in markdown
    assert markdown[0].startswith("| run | strategy | status |")
    assert len({line.count(" | ") for line in markdown[:5]}) == 1
    assert any("a \\| b, &lt;c>" in line for line in markdown)


def test_figures_and_tables_for_a_paper_are_written(tmp_path: Path) -> None:
    sweep = with_traces(tmp_path / "a_b", [enrich(run) for run in two_runs()])
    done = report(sweep, "--figures", tmp_path / "paper")
    assert done.returncode == 0, done.stderr
    assert f"written: {tmp_path / 'paper'}, " in done.stdout.replace("\n", "")
    starts = {"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}
    for kind, start in starts.items():
        assert (tmp_path / "paper" / f"memory_throughput.{kind}").read_bytes().startswith(start)
    assert "var(--" not in (tmp_path / "paper" / "memory_throughput.svg").read_text()
    latex = (tmp_path / "paper" / "runs.tex").read_text().splitlines()
    assert latex[1:3] == [r"\begin{tabular}{rl" + latex[1].split("{rl")[1], r"\toprule"]
    assert r"train loss" in latex[3]
    assert r"speedup \\" in latex[3]
    assert [line.split(" & ")[1] for line in latex[5:7]] == ["ddp", "fsdp"]
    markdown = (tmp_path / "paper" / "runs.md").read_text()
    assert "| 1 | fsdp | completed |" in markdown


def test_a_missing_package_of_the_figures_is_named(tmp_path: Path) -> None:
    sweep = write(tmp_path, *two_runs())
    program = (
        "import sys; sys.modules['vl_convert'] = None\n"
        f"from distexp.report.__main__ import main; sys.exit(main([{str(sweep)!r}, '--figures', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("figures need the package vl-convert-python: pip install vl-convert-python")


def test_configurations_of_different_types_share_a_column(tmp_path: Path) -> None:
    write(tmp_path, record(0, dataset__max_length=64), invalid(1, "wrong", dataset__max_length="auto"))
    assert report(tmp_path).returncode == 0
    table = pq.read_table(tmp_path / "report" / "results.parquet")
    assert table["config.dataset.max_length"].to_pylist() == ["64", "auto"]


def test_a_relative_folder_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(Path("sweep_10:30"), *two_runs())
    assert main([str(folder)]) == 0
    assert pq.read_metadata(tmp_path / folder / "report" / "results.parquet").num_rows == 2


def test_several_directories_make_one_report_in_the_first(tmp_path: Path) -> None:
    first, second = two_runs()
    write(tmp_path / "2026-01-01_10-00-00", first)
    write(tmp_path / "2026-01-01_11-00-00", second)
    a, b = tmp_path / "2026-01-01_10-00-00", tmp_path / "2026-01-01_11-00-00"
    done = report(a, b, a)
    assert "10-00-00/0" in done.stdout
    assert "11-00-00/1" in done.stdout
    assert "2026-01-01_10-00-00/0 " not in done.stdout
    assert pq.read_metadata(a / "report" / "results.parquet").num_rows == 2  # a directory given twice counts once
    assert not (b / "report").exists()


def test_unreadable_records_are_listed_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    good = json.loads((tmp_path / "0" / "record.json").read_text())
    bad = {
        "torn": json.dumps(good)[:300],
        "foreign": '{"hello": 1}',
        "list": "[1, 2]",
        "older": json.dumps({**good, "schema_version": 0}),
        "status": json.dumps({**good, "status": "unknown"}),
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
    messages = done.stderr.splitlines()
    assert len(messages) == len(bad) + 1
    for name in (*bad, "dangling"):
        assert sum(f"/{name}/record.json" in line for line in messages) == 1, name
    assert pq.read_metadata(tmp_path / "report" / "results.parquet").num_rows == 2


def test_no_records_is_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the repository may have runs
    done = report(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"distexp: no readable record.json below {tmp_path}")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "record.json").write_text('{"run": ')
    expected = f"distexp: no readable record.json below {tmp_path}: {tmp_path}/torn/record.json is not a"
    assert report(tmp_path).stderr.startswith(expected)
    assert not (tmp_path / "report").exists()
    with pytest.raises(ConfigError, match="no such directory"):
        report(tmp_path / "gone")
    with pytest.raises(ConfigError, match="no sweep below"):  # The entry point prints it.
        report()


def test_the_table_is_printed_if_files_cannot_be_written(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    (tmp_path / "report").write_text("a file")
    done = report(tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("distexp: ")
    assert "cannot write to" in done.stderr
    assert "samples/s" in done.stdout


def test_no_column_is_hidden_without_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    done = run_module("distexp.report", str(tmp_path))
    assert done.returncode == 0
    assert "Hidden columns" not in done.stdout


def test_the_command_never_imports_torch(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    code = (
        "import sys; from distexp.report.__main__ import main; main(sys.argv[1:]); "
        "import distexp.doctor.__main__; print({'torch', 'itables'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"  # itables would read a pyproject.toml in the working directory


def test_the_table_does_not_import_pyarrow() -> None:
    code = "import sys, distexp.report.overview_table; print({'pyarrow', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_open_shows_the_page_and_trace_chooses_the_drawn_runs(tmp_path: Path) -> None:
    runs = [enrich(record(n, train__learning_rate=1e-5 * (n + 1), peak=1000.0)) for n in range(10)]
    with_traces(tmp_path / "sweep", runs)
    page = tmp_path / "sweep" / "report" / "report.html"
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("webbrowser.open", lambda address: shown.append(address) or True)
        assert report(tmp_path / "sweep", "--open").returncode == 0
        text = (page.parent / "results.md").read_text()
        patch.setattr("webbrowser.open", lambda address: False)
        hinted = report(tmp_path / "sweep", "--open", "--trace", 3, 9)
    assert shown == [page.as_uri()]
    assert "Drawn: 8 of 10 rows of the table." in text
    assert hinted.returncode == 0
    assert f"no browser on this machine: copy {page} to yours, and open it there" in hinted.stdout
    assert "Drawn: 2 of 10 rows of the table." in (page.parent / "results.md").read_text()
    drawn = (page.parent / "plots" / "step_times.svg").read_text()
    assert "learning_rate=0.0001" in drawn
    assert "learning_rate=5e-05" not in drawn
    unknown = report(tmp_path / "sweep", "--trace", 3, 99)
    assert unknown.returncode == 2
    assert "--trace 99: no such run. Give labels such as 0" in unknown.stderr


def test_equal_workers_on_different_nodes_have_a_table_and_no_curve(tmp_path: Path) -> None:
    shapes = ((1, 2, 100.0), (2, 1, 80.0))
    runs = [
        record(n, cluster__nodes=nodes, cluster__workers_per_node=workers_per_node, cluster__device="cuda", speed=speed)
        for n, (nodes, workers_per_node, speed) in enumerate(shapes)
    ]
    assert report(write(tmp_path, *runs)).returncode == 0
    text = (tmp_path / "report" / "results.md").read_text()
    assert "| - | 2 | 1 x 2 | 100.0 | 2 x 1 | 80.0 | 0.80 |" in text
    assert "scaling.svg" not in text
    assert not (tmp_path / "report" / "plots" / "scaling.svg").exists()


def test_torn_traces_are_skipped(tmp_path: Path) -> None:
    with_traces(tmp_path, [enrich(record(n, peak=1000.0, train__seed=n)) for n in range(3)])
    with (tmp_path / "0" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "loss": 1.0}\n{"step": 4')
    with (tmp_path / "0" / "memory" / "node0.csv").open("a") as file:
        file.write("1031.0,eval,gpu,0,oops,,,\n1032.0,eval,gpu,0,999999.0,143771,90,500,,,,,,,,,\n1033.0,ev")
    (tmp_path / "1" / "memory" / "node0.csv").write_bytes(b"\x00\xff")
    shutil.rmtree(tmp_path / "2" / "memory")
    done = report(tmp_path, "--trace", 0)
    assert done.returncode == 0, done.stderr
    assert "999,999 MiB" in (tmp_path / "report" / "results.md").read_text()
    assert report(tmp_path, "--trace", 1, 2).returncode == 0


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
    ("change", "regression"),
    [
        ({"speed": 0.9}, "strategy=ddp: slower, 100.0 -> 90.0 samples/s (-10.0%)"),
        ({"peak": 1100.0}, "strategy=fsdp: more peak GPU memory, 1,000 -> 1,100 MiB (+10.0%)"),
        ({"loss": 2.1}, "strategy=ddp: higher eval loss, 2.0000 -> 2.1000 (+5.0%)"),
    ],
)
def test_regressions_are_listed_with_exit_code_1(tmp_path: Path, change: dict[str, float], regression: str) -> None:
    before, after = sweep(tmp_path / "a"), sweep(tmp_path / "b", **change)
    done = report("--compare", before, after)
    assert done.returncode == 1, done.stdout
    assert f"Regression: {regression}" in done.stdout
    assert done.stdout.count("Regression:") == 2
    back = report("--compare", after, before)
    assert back.returncode == 0, back.stdout
    assert "No regression in 2 matched configurations." in back.stdout


def test_small_changes_and_noise_are_not_regressions(tmp_path: Path) -> None:
    assert report("--compare", sweep(tmp_path / "a"), sweep(tmp_path / "b", speed=0.96, peak=1040)).returncode == 0
    speeds = {"before": (100.0, 130.0, 70.0), "after": (90.0, 60.0, 110.0)}
    for name, values in speeds.items():
        write(tmp_path / name, *(record(n, train__seed=n, speed=speed) for n, speed in enumerate(values)))
    done = report("--compare", tmp_path / "before", tmp_path / "after")
    assert done.returncode == 0, done.stdout
    assert " ~1 " in done.stdout
    assert "~, ~1: the difference is within the noise." in done.stdout
    assert "Not a regression: run 0 +2: 100.0 ± 30.0 -> 86.7 ± 25.2 samples/s (-13.3%), within the noise" in done.stdout


def test_more_cpu_memory_of_a_single_run_is_no_regression_within_the_noise(tmp_path: Path) -> None:
    def sweep_with(name: str, peak_mib: float) -> Path:
        run = record(0)
        run.memory["cpu"] = [{"node": 0, "peak_mib": peak_mib, "average_mib": peak_mib, "mode_mib": peak_mib}]
        return write(tmp_path / name, run)

    before = sweep_with("a", 626.0)
    done = report("--compare", before, sweep_with("b", 865.0))
    assert done.returncode == 0
    assert "626 -> 865 MiB of peak CPU memory (+38.2%), within the noise of ±45%" in " ".join(done.stdout.split())
    assert report("--compare", before, sweep_with("c", 1000.0)).returncode == 1


def test_single_runs_on_cpu_are_compared_within_a_large_noise(tmp_path: Path) -> None:
    """Equal runs on two busy cores had 169.5 and 289.1 samples/s."""
    before = write(tmp_path / "a", record(0, speed=289.1))
    done = report("--compare", before, write(tmp_path / "b", record(0, speed=169.5)))
    assert done.returncode == 0, done.stdout
    assert "Not a regression: run 0: 289.1 -> 169.5 samples/s (-41.4%), within the noise of ±46%." in done.stdout
    slow = report("--compare", before, write(tmp_path / "c", record(0, speed=50.0)))
    assert slow.returncode == 1, slow.stdout


def compare_disturbed(side: str, speeds: tuple[float, float], folder: Path) -> CommandResult:
    """Compare two runs, of which A or B was disturbed."""
    runs = [record(0, speed=speed) for speed in speeds]
    disturbed = runs["AB".index(side)].metrics
    disturbed.step_time_s, disturbed.train_steps_per_second = {"p50": 0.1}, 5.0
    return report("--compare", *(write(folder / name, run) for name, run in zip("ab", runs, strict=True)))


def test_the_speed_of_a_disturbed_run_is_no_regression(tmp_path: Path) -> None:
    done = compare_disturbed("B", (300.0, 50.0), tmp_path)
    assert done.returncode == 0, done.stdout
    change = "Not a regression: run 0: 300.0 -> 50.0 samples/s (-83.3%), but B was disturbed: its mean step took 2.0 "
    text = " ".join(done.stdout.split())
    assert f"{change}times as long as its median step: repeat it." in text
    assert "0.17x" not in text
    assert " ! " in text
    assert "If this is B, its lower speed does not count as a regression." in text


def test_a_run_slower_than_a_disturbed_one_is_a_regression(tmp_path: Path) -> None:
    slower = compare_disturbed("A", (300.0, 50.0), tmp_path / "slower")
    assert slower.returncode == 1, slower.stdout
    assert "slower, 300.0 -> 50.0 samples/s" in slower.stdout
    assert "!" not in slower.stdout
    faster = compare_disturbed("A", (50.0, 300.0), tmp_path / "faster")
    assert faster.returncode == 0, faster.stdout
    assert "6.00x" not in faster.stdout
    assert " ! " in faster.stdout


def test_step_times_give_the_noise_of_a_run(tmp_path: Path) -> None:
    def sweep_at(name: str, speed: float) -> Path:
        run = record(0, speed=speed, cluster__device="cuda")
        run.metrics.speed_error = {"relative": 0.04, "blocks": 10.0}
        return write(tmp_path / name, run)

    before = sweep_at("a", 100.0)
    done = report("--compare", before, sweep_at("b", 90.0))
    assert done.returncode == 0, done.stdout
    assert "100.0 -> 90.0 samples/s (-10.0%), within the noise of ±12%." in done.stdout
    assert report("--compare", before, sweep_at("c", 80.0)).returncode == 1
    report(before)
    row = next(csv.DictReader((before / "report" / "results.csv").open()))
    assert round(float(row["train_samples_per_second_noise_pct"]), 2) == 9.04  # 2.26 standard errors


def test_a_run_that_fails_after_a_change_is_a_regression(tmp_path: Path) -> None:
    before = sweep(tmp_path / "a")
    first = record(0, strategy="ddp", speed=100.0, run_id="same0", peak=1000.0)
    broken = record(1, strategy="fsdp", status="failed", run_id="same1", error=RunError("ValueError", "oh"), peak=1.0)
    done = report("--compare", before, write(tmp_path / "b", first, broken))
    assert done.returncode == 1
    assert "Regression: strategy=fsdp: completed -> failed (ValueError: oh)" in done.stdout


def test_sweeps_with_different_settings_match_by_varying_settings(tmp_path: Path) -> None:
    names = ("ddp", "fsdp")
    before = write(tmp_path / "a", *(record(n, strategy=name) for n, name in enumerate(names)))
    bf16 = [record(n, strategy=name, precision__name="bf16", speed=150.0) for n, name in enumerate(names)]
    done = report("--compare", before, write(tmp_path / "b", *bf16, record(2, strategy="single")))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" ~1 ") == 2
    assert "-> bf16" not in done.stdout  # one of B's runs is fp32
    assert "Only in B: strategy=single" in done.stdout


def test_settings_changed_in_all_runs_are_listed(tmp_path: Path) -> None:
    before = write(tmp_path / "a", record(0))
    done = report("--compare", before, write(tmp_path / "b", record(0, precision__name="bf16")))
    assert "Changed in all runs from A to B: precision fp32 -> bf16." in done.stdout
    assert report("--compare", before, tmp_path).returncode in (0, 1)
    nothing = tmp_path / "empty"
    nothing.mkdir()
    assert report("--compare", before, nothing).returncode == 2


def test_a_text_is_no_formula_of_a_spreadsheet(tmp_path: Path) -> None:
    texts = ('=HYPERLINK("http://a.b","c")', "+1", "-1", "@SUM(1)", "name==1")
    path = tmp_path / "results.csv"
    write_csv([{"name": text, "train_loss": -1.5} for text in texts], ["name", "train_loss"], path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [*(f"'{text}" for text in texts[:4]), "name==1"]
    assert {row["train_loss"] for row in rows} == {"-1.5"}


@pytest.mark.parametrize("link", ["report", "report/plots"])
def test_a_report_follows_no_link_out_of_a_sweep(link: str, tmp_path: Path) -> None:
    sweep, outside = tmp_path / "sweep", tmp_path / "outside"
    write(sweep, *two_runs())
    outside.mkdir()
    (sweep / link).parent.mkdir(exist_ok=True)
    (sweep / link).symlink_to(outside)
    done = report(sweep)
    assert done.returncode == 2
    assert f"{sweep / link} is a link to another place, and a report is written to none: remove it" in done.stderr
    assert list(outside.iterdir()) == []


def test_the_loss_of_a_diverged_run_breaks_no_figure(tmp_path: Path) -> None:
    """An axis up to the largest number of fp32 would need all memory for its ticks."""
    runs = two_runs()
    for key in ("train_loss", "train_samples_per_second", "eval_loss"):
        setattr(runs[0].metrics, key, -3e38)
    runs[0].metrics.train_losses = [3e38, -3e38]
    write(tmp_path, *runs)
    assert report(tmp_path).returncode == 0
    assert (tmp_path / "report" / "report.html").exists()


def test_runs_without_a_record_are_counted(tmp_path: Path) -> None:
    write(tmp_path, *two_runs())
    (tmp_path / "2").mkdir()
    shutil.copy(tmp_path / "1" / "record.json", tmp_path / "2" / "spec.json")
    done = report(tmp_path)
    assert done.returncode == 0
    assert done.stderr == f"left out: 1 run without a record: distexp status {tmp_path}\n"
