"""Tests of the live view of local runs."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from distexp.console.run_summary import most_important_first
from distexp.console.screen import LiveRun, Screen, TrialScreen
from distexp.console.sweep_table import RunLine
from distexp.runs.attempts import ERROR_HEADING
from distexp.runs.events import ProgressWriter
from distexp.runs.memory_trace import COLUMNS
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import METRICS, OPERATORS, RANK_PROGRESS
from distexp.system.files import Tail
from distexp.system.units import format_about
from tests.helpers.records import record
from tests.helpers.runs import resolve_cell

EVENTS = (
    {"phase": "train", "total_steps": 4},
    {"epoch": 1, "train_loss": 2.0, "eval_loss": 1.5, "eval_accuracy": 0.25, "eval_top5_accuracy": 0.75},
    {"measured_samples": 12},
    {"phase": "eval"},
    {"exact_match": 8.125, "f1": 9.0},
    {"phase": "done"},
)


def test_live_run_shows_every_kind_of_event(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100, color_system=None)
    live = LiveRun(console, Tail(tmp_path / "events"), Tail(tmp_path / "none"), Tail(tmp_path / "none"), RunLine())
    live.refresh()
    assert "epoch 1: train loss 2.0000, eval loss 1.5000, accuracy 25.0%, top-5 75.0%" in shown.getvalue()
    assert "answers: exact match 8.1%, F1 9.0%" in shown.getvalue()
    assert live.line is not None
    assert live.line.phase == "done"


def test_the_bar_moves_with_each_step_that_all_ranks_have_passed(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(json.dumps({"step": 10, "loss": 2.0, "samples_per_second": 3.0}) + "\n")
    RANK_PROGRESS.path(tmp_path, 0, 0).parent.mkdir(parents=True)
    ranks = [ProgressWriter(tmp_path, 0, rank) for rank in (0, 1)]
    tails = (Tail(tmp_path / name) for name in ("events", METRICS, "log"))
    line = RunLine()
    live = LiveRun(Console(file=io.StringIO()), *tails, line)
    line.add_event({"phase": "train", "total_steps": 40})
    for steps, shown in (((9, 9), "10/40"), ((13, 12), "12/40"), ((13, 13), "13/40")):
        for rank, step in zip(ranks, steps, strict=True):
            rank.advance("train", step)
        live.refresh()
        assert f" {shown}  loss 2.0000  " in drawn(line)


def drawn(line: RunLine, width: int = 100) -> str:
    """Return a line as a terminal shows it; it has one row."""
    shown = io.StringIO()
    Console(file=shown, force_terminal=True, width=width, color_system=None).print(line)
    (row,) = shown.getvalue().splitlines()
    return row.rstrip()


def test_the_line_shows_the_phases_before_the_first_step_and_then_the_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    line = RunLine([Tail(tmp_path / "memory")])
    now = 1007.0
    assert drawn(line) == "imports  7 s"
    for passed, event in ((0, {"phase": "setup"}), (1, {"preparing": "data"}), (3, {"preparing": "model"})):
        assert line.add_event({"unix_time_s": 1007.0 + passed, **event}) == ""
    now = 1012.0
    assert drawn(line) == "model  2 s"
    line.add_event({"unix_time_s": 1012.0, "phase": "warmup", "total_steps": 200})
    line.add_event({"compiling": "model", "elapsed_s": 1})
    now = 1017.0
    assert drawn(line) == "warmup  train.compile=model  5 s"
    durations = line.add_event({"unix_time_s": 1018.0, "phase": "train", "total_steps": 200})
    total = "the training starts after 18.0 s: "
    assert durations == total + "imports 7.0 s, setup 1.0 s, data 2.0 s, model 2.0 s, warmup 6.0 s"
    (tmp_path / "memory").write_text(
        f"{','.join(COLUMNS)}\n1.0,train,cpu,0,9000.0\n1.0,train,gpu,0,2048.0\n1.0,train,gpu,1,3072.0\n1.0,train,gpu,1,"
    )
    for step in (10, 20):
        now += 10.0
        line.add_step({"step": step, "loss": 2.5, "samples_per_second": 1234.5})
    assert drawn(line).startswith("train  ━")
    assert drawn(line).endswith("20/200  loss 2.5000  1,234.5 samples/s  GPU 3.0 GiB  3 min left")
    assert line.add_event({"unix_time_s": now, "phase": "eval"}) == ""
    assert drawn(line).startswith("eval ")
    narrow = drawn(line, width=40)
    assert len(narrow) < 40
    assert "20/200" in narrow
    assert "loss 2.5000" in narrow
    assert "GiB" not in narrow


def test_the_first_step_after_a_resumption_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "time", lambda: now)
    line = RunLine()
    line.add_event({"phase": "train", "total_steps": 1100})
    for step, at in ((1000, 100.0), (1010, 110.0)):
        now = at
        line.add_step({"step": step, "loss": None, "samples_per_second": 1.0})
    assert drawn(line).endswith("1010/1100  loss nan  1.0 samples/s  2 min left")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_live_lines_gets_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    (tmp_path / METRICS).write_text(json.dumps({"step": 1, "loss": 2.0, "samples_per_second": 3.0}) + "\n")

    def shown() -> str:
        screen, output = Screen(2, tmp_path), io.StringIO()
        screen.console = Console(file=output, force_terminal=True, width=100, color_system=None)
        screen.run_header(0, "train.seed=1")
        with screen.follow(RunSpec(resolve_cell("cluster.device=cpu"), record(0).run), tmp_path):
            pass
        return output.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b" in shown()
    monkeypatch.setenv(name, value)
    assert "\x1b" not in shown()
    assert shown().splitlines()[0] == "0 of 2 done, time left unknown until a run has ended"
    assert shown().splitlines()[-1] == "step 1: loss 2.0000  3.0 samples/s"


def test_a_step_has_no_total_before_it_is_known(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text(json.dumps({"step": 10, "loss": 2.0, "samples_per_second": 3.0}) + "\n")
    screen, shown = plain_screen(total=1)
    none = tmp_path / "none"
    LiveRun(screen.console, Tail(none), Tail(tmp_path / "metrics"), Tail(none)).refresh()
    assert shown.getvalue() == "step 10: loss 2.0000  3.0 samples/s\n"


def test_the_traceback_is_in_the_log_and_not_on_the_screen(tmp_path: Path) -> None:
    error = RunError(
        "CheckpointException", "ranks: 0\nTraceback (most recent call last):\n  File\nOSError: gone", "setup", 0
    )
    error.log = "logs/node0/rank0.log"
    (tmp_path / "log").write_text(f"note: resuming\n\0{ERROR_HEADING}\nTraceback (most recent call last):\n  File\n")
    screen, shown = plain_screen(total=1)
    LiveRun(screen.console, Tail(tmp_path / "none"), Tail(tmp_path / "none"), Tail(tmp_path / "log")).refresh()
    screen.show_result(record(0, status="failed", error=error), Path("/sweep/0"))
    lines = shown.getvalue().splitlines()
    assert lines[0] == "note: resuming"
    assert lines[1].startswith("╭─ failed")
    assert "CheckpointException in phase setup: OSError: gone (rank 0)" in lines[2]
    assert lines[-1] == "log: /sweep/0/logs/node0/rank0.log"
    assert "Traceback" not in shown.getvalue()


def plain_screen(total: int, invalid: Sequence[str] = ()) -> tuple[Screen, io.StringIO]:
    """Return a screen that writes plain text into a buffer."""
    screen, shown = Screen(total, Path("/sweep"), invalid=invalid), io.StringIO()
    screen.console = Console(file=shown, width=100, color_system=None)
    return screen, shown


def test_a_loaded_operator_is_not_announced_as_built(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully\nnote: kept\n")
    screen, shown = plain_screen(total=1)
    LiveRun(screen.console, Tail(tmp_path / "none"), Tail(tmp_path / "none"), Tail(tmp_path / "log")).refresh()
    assert shown.getvalue().splitlines() == ["note: kept"]


def test_run_header_has_the_number_of_the_directory() -> None:
    screen, shown = plain_screen(total=3)
    screen.show_skipped(record(0))
    screen.run_header(2, "train.seed=3")
    assert "run 0: already completed" in shown.getvalue()
    assert "run 2 (2 of 3): train.seed=3" in shown.getvalue()
    screen.show_interrupted()
    assert "1 run not started; to continue: distexp resume /sweep" in shown.getvalue()


def test_an_interrupted_sweep_prints_its_table_and_the_next_commands() -> None:
    screen, shown = plain_screen(total=3)
    screen.show_skipped(record(0))
    screen.show_skipped(record(1))
    screen.show_interrupted()
    assert "samples/s" in shown.getvalue()
    assert shown.getvalue().splitlines()[-2:] == [
        "to draw the report: distexp report /sweep",
        "1 run not started; to continue: distexp resume /sweep",
    ]


def test_a_sweep_interrupted_after_one_run_prints_its_table_too() -> None:
    screen, shown = plain_screen(total=3)
    screen.show_skipped(record(0))
    screen.show_interrupted()
    assert shown.getvalue().splitlines()[-2] == "to draw the report: distexp report /sweep"


def test_the_end_of_a_run_has_at_most_twelve_lines_the_most_important_first() -> None:
    run = record(0, peak=30000.0)
    run.run.duration_s = 9.0
    run.metrics.train_losses, run.metrics.eval_losses = [2.0], [1.5]
    run.metrics.step_time_s = {"p50": 0.1, "p90": 0.1, "max": 0.1}
    run.metrics.compile = {"seconds": 8.0, "graphs": 1}
    run.metrics.communication = {"share": 0.1, "exposed_share": 0.05, "profiled_steps": 3}
    run.metrics.energy = {"kwh": 0.1, "j_per_sample": 2.0, "gpu_hours": 0.1}
    run.metrics.tflops_per_device, run.metrics.executed_tflops_per_device, run.metrics.mfu = 100.0, 100.0, 0.3
    run.metrics.train_runtime, run.metrics.padding_share = 8.0, 0.7
    screen, shown = plain_screen(total=1)
    screen.show_result(run, Path("/sweep/0"), ["tracker: offline"])
    lines = shown.getvalue().splitlines()
    assert len(lines) <= 12
    assert lines[0].startswith("╭─ completed")
    assert [lines[n].split()[1] for n in (1, 2)] == ["throughput", "peak"]
    assert "record.json has: " in shown.getvalue()
    assert "built" in shown.getvalue().split("record.json has: ")[1]
    assert lines[-1] == "tracker: offline"


def test_what_lacks_for_a_price_is_in_a_full_panel() -> None:
    """Other files lack the reason."""
    lines = [(name, "") for name in ("built", "memory parts", "step time", "padding", "not measured", "runtime")]
    assert [name for name, _ in most_important_first(lines)][:2] == ["runtime", "not measured"]


def test_the_end_of_a_sweep_has_its_table_the_winner_and_one_command() -> None:
    screen, shown = plain_screen(total=2)
    for number, (strategy, speed) in enumerate((("ddp", 300.0), ("fsdp", 100.0))):
        screen.show_skipped(record(number, strategy=strategy, speed=speed, peak=1000.0))
    shown.truncate(0)
    screen.show_comparison()
    assert shown.getvalue().split("\n\n")[-1].splitlines() == [
        "Take ddp: it is 3.00x as fast as the next, fsdp full_shard.",
        "to draw the report: distexp report /sweep",
    ]


def test_a_path_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = RunSpec(resolve_cell("cluster.device=cpu"), record(0).run)
    Screen(1, tmp_path).show_start(spec, tmp_path / ":key:[0]")
    assert capsys.readouterr().out.endswith(f"{tmp_path}/:key:[0]\n")


def test_a_single_run_has_no_header() -> None:
    screen, shown = plain_screen(total=1)
    screen.run_header(0, "")
    assert shown.getvalue() == ""


def test_the_same_error_of_invalid_runs_is_printed_once() -> None:
    reasons = ["strategy=single has one worker", "offload=true", "strategy=single has one worker"]
    screen, shown = plain_screen(total=4, invalid=reasons)
    for number, reason in enumerate(reasons):
        run = record(number)
        run.status, run.error = "invalid", RunError("ConfigError", reason)
        screen.show_invalid(run)
    assert shown.getvalue().splitlines() == [
        "run 0 and 1 more: invalid: strategy=single has one worker",
        "run 1: invalid: offload=true",
    ]
    assert [record.run.number for record in screen.records] == [0, 1, 2]
    screen.run_header(3, "")
    assert shown.getvalue().splitlines()[-1].startswith("run 3 (4 of 4)")


def test_the_compilation_of_operators_is_announced_with_its_steps(tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [
        {"compiling": "cpu_adam"}, {"elapsed_s": 5}, {"step": 1, "steps": 3, "elapsed_s": 58}, {"compiled_s": 187}
    ]  # fmt: skip
    (tmp_path / "build").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    screen, shown = plain_screen(total=1)
    nothing = Tail(tmp_path / "none")
    LiveRun(screen.console, nothing, nothing, nothing, operators=Tail(tmp_path / "build")).refresh()
    assert shown.getvalue().splitlines() == [
        "compiling DeepSpeed's operator cpu_adam, once, about 3 minutes",
        "compiling: step 1 of 3, 58 s",
        "DeepSpeed's operators were compiled in 187 s",
    ]
    line = RunLine()
    live = LiveRun(screen.console, nothing, nothing, nothing, line, operators=Tail(tmp_path / "build"))
    with (tmp_path / "build").open("r+") as file:
        file.truncate(len("".join(json.dumps(entry) + "\n" for entry in entries[:3])))
    live.refresh()
    assert line.note == "DeepSpeed's operators, step 1 of 3"


def test_a_sweep_prints_what_is_done_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = plain_screen(total=5, invalid=["offload=true"])
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def progress_before(number: int) -> str:
        shown.truncate(0)
        shown.seek(0)
        screen.run_header(number, "")
        return shown.getvalue().splitlines()[0]

    def end(number: int, seconds: float, status: str = "completed") -> None:
        nonlocal now
        now += seconds
        run = record(number, status=status)
        run.run.duration_s = 0.5
        screen.show_result(run, Path(f"/sweep/{number}"))

    assert progress_before(0) == "0 of 5 done, time left unknown until a run has ended"
    end(0, 30.0)
    assert progress_before(1) == "1 of 5 done, about 2 min left", "three runs are left, and one invalid cell"
    screen.show_invalid(record(1, status="invalid"))
    assert progress_before(2) == "2 of 5 done, about 2 min left"
    end(2, 1.0, "failed")
    assert progress_before(3) == "3 of 5 done, about 1 min left", "a failed run may have ended early"
    end(3, 10.0)
    assert progress_before(4) == "4 of 5 done, about 10 s left (runs took 10 to 30 s)"


def test_a_resumed_sweep_counts_its_finished_runs() -> None:
    screen, shown = plain_screen(total=3)
    screen.show_skipped(record(0))
    screen.run_header(1, "")
    assert "1 of 3 done, time left unknown until a run has ended" in shown.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "5 s"), (42.0, "40 s"), (58.0, "1 min"), (95.0, "2 min"), (3590.0, "1 h 0 min"), (7800.0, "2 h 10 min")],
)
def test_durations_are_rounded(seconds: float, text: str) -> None:
    assert format_about(seconds) == text


def test_a_trial_shows_the_build_of_operators_and_nothing_else(tmp_path: Path) -> None:
    """A build takes minutes, or waits for another one. Without a line the search would seem to hang."""
    shown = io.StringIO()
    screen = TrialScreen(tmp_path, Console(file=shown, width=100), {})
    (tmp_path / OPERATORS).write_text(json.dumps({"waiting": "another run"}) + "\n")
    (tmp_path / METRICS).write_text(json.dumps({"step": 1, "loss": 2.0, "samples_per_second": 3.0}) + "\n")
    with screen.follow(RunSpec(resolve_cell("cluster.device=cpu"), record(0).run), tmp_path):
        pass
    assert shown.getvalue() == "DeepSpeed's operators: waiting for another run\n"
