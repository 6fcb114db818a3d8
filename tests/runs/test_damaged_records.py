"""Records that are torn, foreign or from another version: status, report and resume name them and read the others."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distexp import status
from distexp.cli.main import main
from distexp.launch import run_dirs
from distexp.launch.slurm import client
from distexp.launch.slurm.status import poll
from distexp.report import figures
from distexp.report.data.rows import load_rows
from distexp.runs.record import ExistingRuns, RunRecord
from distexp.runs.record_sections import RunError, RunInfo
from distexp.runs.run_dir import memory_trace_paths
from distexp.runs.run_state import read_progress
from tests.helpers.records import record, write

HUGE = 10**400
TORN = {  # whole files
    "empty": "",
    "torn": '{"schema_version": 2, "status": "comp',
    "array": "[]",
    "number": "3",
    "null": "null",
    "text": '"x"',
    "no sections": '{"schema_version": 2}',
    "a run only": '{"schema_version": 2, "run": {"number": 1}}',
    "a run that is an array": '{"schema_version": 2, "run": []}',
    "older version": '{"schema_version": 1}',
    "newer version": '{"schema_version": 3}',
    "deep": "[" * 100_000,
    "too many digits": "1" * 5_000,
    "not UTF-8": "\udcff",
}
WRONG: dict[str, Any] = {  # values of single keys
    "status": "done",
    "run": [],
    "run.number": "one",
    "run.overrides": "strategy=ddp",
    "run.attempts": [3],
    "run.hosts": [None],
    "run.duration_s": HUGE,
    "config": [],
    "config.cluster": None,
    "config.cluster.nodes": "2",
    "config.train.log_every": "often",
    "config.dataset.max_length": "auto",
    "config.train.betas": 0.9,
    "error": "failed",
    "error.message": 5,
    "built": [1],
    "built.world_size": "two",
    "built.mesh": 3,
    "environment": 7,
    "environment.variables": ["NCCL_ALGO"],
    "metrics": None,
    "metrics.train_loss": "low",
    "metrics.train_samples_per_second": HUGE,
    "metrics.eval_accuracies": "high",
    "metrics.step_time_s": [0.1],
    "metrics.step_time_s.p50": "fast",
    "memory": None,
    "memory.gpu": {"peak_mib": 3},
    "memory.gpu.0": 3,
    "memory.gpu.0.peak_mib": "much",
    "utilization": [],
    "preflight": 3,
}
IMPOSSIBLE: dict[str, Any] = {  # numbers that no run has
    "config.cluster.price_per_gpu_hour": -1,
    "config.train.micro_batch_size": 0,
    "built.world_size": -3,
    "environment.gpu_total_mib": -80_000,
    "metrics.total_steps": 0,
    "metrics.step_time_s.p50": -0.1,
    "metrics.train_samples_per_second": True,
    "memory.gpu.0.peak_mib": -5,
    "memory.gpu.0.average_mib": True,
    "memory.gpu.0.used_mib": 1e17,
    "metrics.step_time_s.max": 0.05,
    "metrics.step_breakdown.0.step_ms": 5e-324,
    "metrics.step_breakdown.0.bubble_ms": 1e6,
    "metrics.step_breakdown.0.waiting_ms": "x",
    "metrics.step_breakdown.0.launches": -1,
    "metrics.communication.share": 5.0,
    "metrics.communication.by_collective.all_reduce": "much",
    "metrics.explanation.share": -0.5,
}
HARMLESS: dict[str, Any] = {  # values with which a record can be read
    "metrics.train_loss": float("nan"),
    "metrics.train_samples_per_second": float("inf"),
    "metrics.train_losses": [float("nan")],
    "memory.gpu.0.peak_mib": None,
    "config.future_section": {"key": [1]},
    "metrics.future_metric": "x",
}


def make_content() -> dict[str, Any]:
    content = asdict(record(1, peak=100.0, strategy="fsdp"))
    content["error"] = asdict(RunError("E", "m"))
    content["environment"] = {"python": "3.11", "variables": {}}
    content["metrics"]["step_time_s"] = {"p50": 0.1, "max": 0.2}
    content["metrics"]["step_breakdown"] = [{"rank": 0, "step_ms": 100.0, "matmul_ms": 60.0, "host_ms": 40.0}]
    content["metrics"]["communication"] = {"share": 0.1, "by_collective": {"all_reduce": 0.01}}
    content["metrics"]["explanation"] = {"loss": "host", "share": 0.4}
    return content


def change(key: str, value: Any) -> str:
    """Return a record as JSON, with another value of a dotted key."""
    content = make_content()
    *sections, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    parent: Any = content
    for part in sections:
        parent = parent[part]
    parent[last] = copy.deepcopy(value)
    return json.dumps(content)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Return a sweep with two good runs and an empty directory for a third one."""
    for number in (0, 2):
        write(tmp_path, record(number, train__seed=number))
    (tmp_path / "1").mkdir()
    (tmp_path / "command.json").write_text('{"words": [], "directory": "/", "cells": "many"}')
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [*TORN.values(), *(change(*item) for item in (*WRONG.items(), *IMPOSSIBLE.items()))],
    ids=[*TORN, *WRONG, *IMPOSSIBLE],
)
def test_a_damaged_record_is_named_and_the_others_are_read(
    text: str, sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sweep / "1" / "record.json"
    damaged.write_bytes(text.encode(errors="surrogateescape"))
    rows, (skipped,) = load_rows([sweep])
    assert [row.label for row in rows] == ["0", "2"]
    assert str(damaged) in skipped
    assert len(skipped) < 400
    monkeypatch.setenv("COLUMNS", "300")
    assert status.main([str(sweep)]) == 0
    shown = capsys.readouterr().out
    assert "2 completed, 1 no record" in shown
    runs = ExistingRuns.read(sweep)
    assert [run.number for run in runs.runs] == [0, 1, 2]
    assert runs.match([RunInfo("other", "name", 0, ["a=1"])]) == [None]


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_an_impossible_number_is_named_with_its_key(key: str, sweep: Path) -> None:
    (sweep / "1" / "record.json").write_text(change(key, IMPOSSIBLE[key]))
    (message,) = load_rows([sweep])[1]
    assert message.startswith(f"{sweep}/1/record.json is not a record of distexp: ")
    assert key.rpartition(".")[2] in message
    assert str(IMPOSSIBLE[key]) in message.replace("1e+06", "1000000.0")


def test_a_number_that_no_program_measures_makes_a_record_foreign(sweep: Path) -> None:
    (sweep / "1" / "record.json").write_text(change("metrics.padding_share", 1e308))
    rows, (skipped,) = load_rows([sweep])
    assert [row.label for row in rows] == ["0", "2"]
    assert "it contains the number 1e+308" in skipped


PEAKS = {"a rank without parts": [{}], "zeros": [{"phase": "forward", "allocated_mib": 0.0}], "no lists": []}


@pytest.mark.parametrize("parts", PEAKS.values(), ids=PEAKS)
def test_a_record_without_parts_of_the_memory_does_not_stop_the_report(
    parts: list[dict[str, Any]], sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "1" / "record.json").write_text(change("memory.parts", parts))
    assert main(["report", str(sweep)]) == 0
    assert 'id="run-2"' in (sweep / "report" / "report.html").read_text()
    assert "left out" not in capsys.readouterr().err


def test_a_figure_that_cannot_be_drawn_is_left_out_and_named(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_broken(overview: object, traces: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(figures, "FIGURES", (build_broken, *figures.FIGURES))
    assert main(["report", str(sweep)]) == 0
    assert "the figure 'broken' is left out, because a record has a value" in capsys.readouterr().err
    assert 'id="run-2"' in (sweep / "report" / "report.html").read_text()


@pytest.mark.parametrize("key", HARMLESS)
def test_a_value_that_is_not_finite_or_not_known_is_left_out(key: str, sweep: Path) -> None:
    (sweep / "1" / "record.json").write_text(change(key, HARMLESS[key]))
    rows, skipped = load_rows([sweep])
    assert ([row.label for row in rows], skipped) == (["0", "1", "2"], [])


def test_a_record_without_keys_that_were_added_later_is_read(sweep: Path) -> None:
    content = make_content()
    del content["preflight"], content["config"]["train"]["profile_steps"], content["metrics"]["eval_top5_accuracies"]
    (sweep / "1" / "record.json").write_text(json.dumps(content))
    assert load_rows([sweep])[1] == []


def test_a_record_of_another_schema_version_is_refused_with_what_to_do(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = sweep / "1" / "record.json"
    path.write_text(change("schema_version", 1))
    message = (
        f"{path} has schema_version=1, and this version of distexp reads 2: "
        "run it again, or read it with the distexp that wrote it"
    )
    assert load_rows([sweep])[1] == [message]
    monkeypatch.setenv("COLUMNS", "400")
    assert status.main([str(sweep)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "no record" in line and "schema_version" in line]
    assert "and this version of distexp reads 2: run it again" in row


@pytest.mark.parametrize(
    "line", ['{"step": "x", "loss": "y"}', '{"step": 1e999, "loss": []}', "[]", '{"total_steps": {}}', '{"step": true}']
)
def test_strange_lines_of_metrics_and_events_are_left_out(line: str, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(f"{line}\n")
    assert str(read_progress(tmp_path)) == "start"


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"


def test_control_characters_in_a_record_are_shown_and_not_obeyed(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    strange = record(1, status="failed", overrides=(f"name={ESCAPES}",), error=RunError("ValueError", ESCAPES, "train"))
    strange.write(sweep / "1")
    read = RunRecord.read(sweep / "1" / "record.json")
    assert read.error is not None
    assert read.error.message == "\\x1b]0;owned\\x07\\x1b[2J\\u202e\\x9b31m"
    monkeypatch.setenv("COLUMNS", "300")
    status.main([str(sweep)])
    shown = capsys.readouterr().out
    assert "\\x1b]0;owned" in shown
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(shown)


def test_a_line_break_in_a_record_breaks_no_table(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = make_content()
    content["environment"]["gpu_name"] = "H100\n| 9 | <script>x</script>\u2028|"
    content["run"] |= {"overrides": ["name=a\nb"], "hosts": ["node\n1"]}
    (sweep / "1" / "record.json").write_text(json.dumps(content))
    assert main(["report", str(sweep)]) == 0
    assert "H100 | 9 | <script>" not in (sweep / "report" / "report.html").read_text()
    lines = (sweep / "report" / "results.md").read_text().splitlines()
    assert not [line for line in lines if line.startswith("| 9 |") or "<script>" in line]
    assert main(["status", str(sweep)]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("b")] == []
    assert RunRecord.read(sweep / "1" / "record.json").run.overrides == ["name=a b"]


def test_a_number_in_another_script_is_no_number(sweep: Path) -> None:
    """``'²'.isdigit()`` is true, but ``int('²')`` fails."""
    (sweep / "1").rename(sweep / "²")
    (sweep / "²" / "record.json").write_text(change("run.number", 7))
    (sweep / "0" / "memory").mkdir()
    (sweep / "0" / "memory" / "node².csv").touch()
    assert {row.label for row in load_rows([sweep])[0]} == {"0", "2", "²"}
    assert memory_trace_paths(sweep / "0") == []


def test_half_a_character_in_a_record_is_shown_as_a_code(sweep: Path) -> None:
    """No file and no terminal can contain the half of a surrogate pair, but JSON can."""
    (sweep / "1" / "record.json").write_text(change("run.name", "\ud800"))
    assert RunRecord.read(sweep / "1" / "record.json").run.name == "\\ud800"


@pytest.mark.parametrize("name", ["record.json", "spec.json", "events.jsonl", "metrics.jsonl", "owner.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_a_file_that_never_ends_is_not_read(
    kind: str, name: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"id": "a", "name": "b", "number": 1, "overrides": []}
    (sweep / "1" / "spec.json").write_text(json.dumps({"run": run}))
    strange = sweep / "1" / name
    strange.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(strange)
    elif kind == "folder":
        strange.mkdir()
    else:
        strange.symlink_to("/dev/zero")
    assert status.main([str(sweep)]) == 0
    assert "2 completed" in capsys.readouterr().out
    assert [row.label for row in load_rows([sweep])[0]] == ["0", "2"]


def test_a_huge_record_is_not_read(sweep: Path) -> None:
    with (sweep / "1" / "record.json").open("wb") as file:
        file.truncate(2**40)  # It takes no space on disk.
    assert "it has 1,048,576 MB, more than 256" in load_rows([sweep])[1][0]


ENTRY = {"run": 1, "id": "a", "directory": "1", "job": "5_0", "state": "submitted", "unix_time_s": 0.0}


@pytest.mark.parametrize(
    "changes",
    [
        {"run": [1]},
        {"run": None},
        {"id": 3},
        {"directory": 3},
        {"directory": "/etc"},
        {"directory": "../.."},
        {"directory": "outside"},
        {"job": "--user=me"},
        {"job": "5_0,6_0"},
        {"job": "5_0\n"},
        {"job": 5},
        {"state": []},
    ],
    ids=str,
)
def test_entries_of_the_ledger_that_no_distexp_writes_are_left_out(changes: dict[str, Any], tmp_path: Path) -> None:
    """A command would write into their directories, and pass their jobs to Slurm."""
    (tmp_path / "outside").symlink_to("/etc")
    (tmp_path / "ledger.jsonl").write_text(f"{json.dumps(ENTRY | changes)}\n{json.dumps(ENTRY | {'run': 2})}\n")
    assert list(run_dirs.latest(tmp_path)) == [2]


def test_a_run_directory_that_was_deleted_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "query_jobs", lambda jobs: {})
    (tmp_path / "ledger.jsonl").write_text(f"{json.dumps(ENTRY)}\n")
    (state,) = poll(tmp_path)
    assert (state.state, state.job) == ("no record", "5_0")
    assert "1/spec.json" in state.reason
