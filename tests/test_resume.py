"""Resuming a sweep on this machine: finished runs are kept, missing ones run again, new cells are added."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest

from distexp.cli.arguments import normalize_arguments
from distexp.cli.main import main as cli
from distexp.config.overrides import parse, plain_value
from distexp.guard.config_files import remember_file
from distexp.resolve.run_id import fingerprint
from distexp.resume import main, merge
from distexp.runs.record import ExistingRun, ExistingRuns, RunRecord, RunSpec
from distexp.runs.record_sections import RunInfo
from tests.helpers.forked_cli import ServedProcess
from tests.helpers.runs import REPOSITORY, run_distexp, run_module

SMALL = (
    "model=gpt_tiny",
    "dataset=synthetic",
    "dataset.train_size=16",
    "dataset.eval_size=4",
    "train.max_steps=2",
    "cluster.device=cpu",
)


@pytest.mark.slow
def test_a_resumed_sweep_runs_what_is_missing(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    # The last cell is invalid, because strategy=single has one worker.
    cells = 'sweep.cells=[["cluster.workers_per_node=1"],["cluster.workers_per_node=2","train.seed=1"]]'
    arguments = ("--multirun", "strategy=single", "train.seed=1,2", cells)
    assert run_distexp(*arguments, *SMALL, f"hydra.sweep.dir={sweep}", cwd=tmp_path).returncode == 0
    assert [RunRecord.read(sweep / n / "record.json").status for n in "012"] == ["completed", "completed", "invalid"]
    kept = (sweep / "0/record.json").read_bytes()
    for name in ("record.json", "owner.json"):  # With its launcher known, status would write the record again.
        (sweep / "1" / name).unlink()
    shown = run_module("distexp.status", str(sweep), cwd=tmp_path)
    assert "no record" in shown.stdout
    assert "1 completed, 1 no record, 1 invalid" in shown.stdout

    assert all(line == line.rstrip() for line in shown.stdout.splitlines())
    narrow = run_module("distexp.status", str(sweep), cwd=tmp_path, env={"COLUMNS": "60"}).stdout.splitlines()
    assert all(line == line.rstrip() and len(line) <= 60 for line in narrow[:4])
    wide = run_module("distexp.status", str(sweep), cwd=tmp_path, env={"COLUMNS": "400"}).stdout
    cause = RunRecord.read(sweep / "2/record.json").error
    assert cause is not None
    assert [wide.count(cause.message), "\n".join(narrow).count(cause.message)] == [1, 1], "complete, and once"
    below = run_module("distexp.resume", str(sweep / "0"), cwd=tmp_path)
    assert below.returncode == 2
    assert below.stderr == f"distexp: {sweep / '0'} is not a sweep but is inside one: give {sweep}\n"

    done = run_module("distexp.resume", str(sweep), "train.seed=1,2,3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 0: already completed" in done.stdout
    assert (sweep / "0/record.json").read_bytes() == kept
    again, new = (RunRecord.read(sweep / n / "record.json") for n in "13")
    assert [attempt["reason"] for attempt in again.run.attempts] == ["ended without a record", "completed"]
    assert [attempt["reason"] for attempt in new.run.attempts] == ["completed"]
    assert (again.config["train"]["seed"], new.config["train"]["seed"]) == (2, 3)
    assert (sweep / "1/attempts/0/metrics.jsonl").exists()
    assert sorted(path.parent.name for path in sweep.rglob("record.json")) == ["0", "1", "2", "3"]
    assert json.loads((sweep / "2/record.json").read_text())["status"] == "invalid"


@pytest.mark.slow
def test_of_two_commands_for_one_directory_one_trains(tmp_path: Path) -> None:
    """The second is refused; after the first is killed, it trains all runs to their end."""
    sweep = tmp_path / "sweep"
    overrides = (
        "--multirun",
        "train.seed=1,2",
        "strategy=single",
        *SMALL,
        "train.num_epochs=100",
        "train.checkpoint_every=1",
    )
    arguments = (*overrides, "train.max_steps=20", f"hydra.sweep.dir={sweep}")
    both = [
        ServedProcess("distexp", arguments, os.environ, stderr=tmp_path / name, cwd=REPOSITORY) for name in ("a", "b")
    ]
    while all(process.poll() is None for process in both):
        time.sleep(0.1)
    loser, winner = sorted(both, key=lambda process: process.poll() is None)
    message = (tmp_path / ("a" if loser is both[0] else "b")).read_text()
    assert loser.returncode == 2
    assert message.startswith((f"distexp: process {winner.pid} on ", "distexp: another process "))
    assert f"runs the sweep in {sweep}: follow it with 'distexp status {sweep} --watch'" in message
    while not any(sweep.glob("*/checkpoints/step-*")):
        assert winner.poll() is None
        time.sleep(0.1)
    winner.kill()
    winner.wait()
    done = run_module("distexp.resume", str(sweep), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [RunRecord.read(path) for path in sorted(sweep.glob("*/record.json"))]
    assert [(record.status, record.config["train"]["seed"]) for record in records] == [
        ("completed", 1),
        ("completed", 2),
    ]
    assert [attempt["reason"] for attempt in records[0].run.attempts] == ["killed", "completed"]
    for number in "01":
        lines = [json.loads(line)["step"] for line in (sweep / number / "metrics.jsonl").read_text().splitlines()]
        assert lines == sorted(set(lines))
        assert lines[-1] == 20


def test_cells_with_the_same_id_keep_their_runs(tmp_path: Path) -> None:
    """Cells that differ only in hardware settings have the same run.id. Run 0 is missing; run 1 must not replace it."""
    one, two, seven = ([f"cluster.cpus_per_worker={n}"] for n in (1, 2, 7))
    first, second, refused = (
        ExistingRun(1, tmp_path / "1", "a", two, "completed"),
        ExistingRun(2, tmp_path / "2", "a", seven, "killed"),
        ExistingRun(3, tmp_path / "3", "invalid", one, "invalid"),
    )
    existing = ExistingRuns([first, second, refused])
    cells = [RunInfo(run_id, "name", 0, overrides) for run_id, overrides in (("a", two), ("b", one), ("c", two))]
    assert existing.match(cells) == [first, refused, None]
    assert existing.match([RunInfo("a", "name", 0, one)]) == [second], "other overrides, but the same training"
    assert existing.runs == []


@pytest.mark.slow
def test_new_overrides_start_a_new_run_with_a_warning(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    assert run_distexp("strategy=single", *SMALL, f"hydra.sweep.dir={sweep}", cwd=tmp_path).returncode == 0
    record = RunRecord.read(sweep / "0/record.json")
    record.status = "killed"
    record.write(sweep / "0")
    done = run_module("distexp.resume", str(sweep), "train.max_steps=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run 0 (killed) was not resumed: new overrides or changed data make it another run" in done.stdout
    assert [RunRecord.read(sweep / n / "record.json").status for n in "01"] == ["killed", "completed"]


def test_a_single_run_whose_data_have_changed_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No new override was typed, so the message names the data. A checkpoint is offered if it can be resumed."""

    def start_only(spec: RunSpec, directory: Path, *_: object) -> None:
        spec.write(directory)
        raise OSError("the run ends here")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["distexp"])
    monkeypatch.setattr("distexp.launch.local.runner.run_locally", start_only)
    monkeypatch.setattr("distexp.cli.run.MAX_ERRORS", 1)  # The search for more errors takes as long as the command.
    data, typed = tmp_path / "data.txt", ("strategy=single", "model=gpt_tiny", "dataset=text", "cluster.device=cpu")
    data.write_text("one line\n\n" * 20)
    assert cli([*typed, "dataset.path=data.txt", "hydra.run.dir=run"]) == 1
    data.write_text("one line\n\n" * 21)
    fingerprint.cache_clear()
    capsys.readouterr()
    assert cli(["resume", "run"]) == 2
    assert capsys.readouterr().err == (
        f"distexp: {tmp_path}/run contains a single run (hydra.run.dir), and the content of dataset.path={data} or its "
        "configuration has changed since: undo the change to continue it, or start the new run in another directory\n"
    )
    spec = RunSpec.read(tmp_path / "run")
    spec.config.model.path = f"{tmp_path}/deleted"
    spec.write(tmp_path / "run")
    assert cli(["resume", "run"]) == 2
    lost = f"model.path={tmp_path}/deleted does not exist any more: restore it to continue the run, or start"
    assert lost in capsys.readouterr().err
    changed = data.read_text()
    (tmp_path / "run/checkpoints/step-00000001").mkdir(parents=True)
    original = "one line\n\n" * 20
    cases = [
        ("train.seed=3", original, True),
        ("train.seed=3", changed, False),  # Other data may have other steps.
        ("train.optimizer=sgd", original, False),
        ("train.max_steps=1", original, False),
        ("model=bloom_tiny", original, False),
        ("", changed, False),
    ]
    for new, text, can_be_resumed in cases:
        data.write_text(text)
        fingerprint.cache_clear()
        assert cli(["resume", "run", *new.split()]) == 2
        is_offered = f"Add train.resume={tmp_path}/run to start it from the last" in capsys.readouterr().err
        assert is_offered == can_be_resumed, new
    (tmp_path / "run/checkpoints/step-00000001").rmdir()
    assert cli(["resume", "run", "train.seed=3"]) == 2
    assert "train.resume" not in capsys.readouterr().err


def test_a_new_override_replaces_the_original_one() -> None:
    arguments = ["--multirun", "zero_stage='1','2'", "hydra.sweep.dir=old", "+cluster.sbatch.begin=now"]
    new = ["zero_stage=1,2,0", "cluster.sbatch.begin=later"]
    assert merge(arguments, new) == ["--multirun", *new]


def test_another_directory_cannot_be_resumed_into(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_command(tmp_path, *SMALL)
    remember_file(tmp_path / "command.json")
    assert cli(["resume", str(tmp_path), "hydra.sweep.dir=other"]) == 2
    assert capsys.readouterr().err == (
        f"distexp: hydra.sweep.dir=other has no effect in distexp resume, which continues in {tmp_path}: leave it out\n"
    )


def test_a_folder_of_sweeps_is_refused_with_the_newest_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age, name in ((0, "b/new"), (60, "b/old"), (90, "a")):
        (tmp_path / name).mkdir(parents=True)
        make_command(tmp_path / name, *SMALL)
        os.utime(tmp_path / name / "command.json", (time.time() - age,) * 2)
    assert cli(["resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"distexp: {tmp_path} contains no command.json: give the directory of a sweep, such as {tmp_path}/b/new\n"
    )


@pytest.mark.parametrize("command", ["resume", "status", "cancel"])
def test_empty_and_missing_directories_have_different_messages(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory, reason in (
        (tmp_path, "contains no "),
        (tmp_path / "gone", "does not exist: give the directory of"),
    ):
        assert cli([command, str(directory)]) == 2
        assert capsys.readouterr().err.startswith(f"distexp: {directory} {reason}")


UNSAFE = {  # arguments in command.json that the user must repeat
    "trusted_packages=[strange]": "'trusted_packages=[strange]'",
    'sweep.cells=[["trusted_packages=[strange]"]]': """'sweep.cells=[["trusted_packages=[strange]"]]'""",
    "+hydra.callbacks.x._target_=strange.Callback": "+hydra.callbacks.x._target_=strange.Callback",
    "hydra.launcher.setup=['touch x']": "'hydra.launcher.setup=[touch x]'",
    "cluster='site_1'": "cluster=site_1",
    "cluster.setup=['touch x']": "'cluster.setup=[touch x]'",
    "++cluster.environment.LD_PRELOAD=x.so": "++cluster.environment.LD_PRELOAD=x.so",
    "++cluster.environment.NCCL_ALGO=Tree": "++cluster.environment.NCCL_ALGO=Tree",
    "tracker=theirs": "tracker=theirs",
    "tracker.uri=http://127.0.0.1:9": "tracker.uri=http://127.0.0.1:9",
}
SAFE = ("tracker=mlflow", "cluster=slurm", "cluster.partition=a", "hydra.sweep.dir=x")


def make_command(folder: Path, *arguments: str) -> None:
    (folder / "command.json").write_text(json.dumps({"words": arguments, "directory": str(folder), "cells": 1}))


@pytest.mark.parametrize("argument", UNSAFE)
def test_code_in_a_stored_command_must_be_repeated(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("distexp.resume.distexp", lambda arguments: started.append(arguments) or 0)
    monkeypatch.chdir(tmp_path)
    make_command(tmp_path, *SAFE, argument)
    assert main([str(tmp_path)]) == 2
    shown = UNSAFE[argument]
    danger = "would get the results and your credentials" if "tracker" in argument else "could run code"
    assert capsys.readouterr().err == (
        f"distexp: {tmp_path}/command.json contains {shown}, which {danger}: "
        f"if you trust it, add {shown} to the command\n"
    )
    assert started == []
    assert main([str(tmp_path), *shlex.split(shown)]) == 0
    make_command(tmp_path, *SAFE)
    assert main([str(tmp_path)]) == 0
    assert len(started) == 2


@pytest.mark.parametrize("name", ["a, b", "it's", "(1)", "é[", "x=y"])
def test_a_sweep_is_resumed_in_a_folder_with_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed: list[str] = []
    monkeypatch.setattr(
        "distexp.resume.distexp", lambda arguments: composed.extend(normalize_arguments(arguments)) or 0
    )
    sweep = tmp_path / name
    sweep.mkdir()
    make_command(sweep, *SMALL)
    monkeypatch.chdir(sweep)
    assert main([str(sweep)]) == 0
    directories = [
        plain_value(override.value()) for override in parse(composed[1:]) if "sweep.dir" in str(override.input_line)
    ]
    assert directories == [str(sweep)]


def test_the_users_own_command_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distexp.resume.distexp", lambda arguments: 0)
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_command(tmp_path, "trusted_packages=[mine]")
    remember_file(tmp_path / "command.json")
    assert main([str(tmp_path)]) == 0
    make_command(tmp_path, "trusted_packages=[strange]")
    assert main([str(tmp_path)]) == 2


def test_a_foreign_command_runs_only_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python imports packages from the current folder, so a file must not choose it."""
    theirs, mine = tmp_path / "their code", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    (theirs / "command.json").write_text(json.dumps({"words": SMALL, "directory": str(theirs), "cells": 1}))
    started: list[Path] = []
    monkeypatch.setattr("distexp.resume.distexp", lambda arguments: started.append(Path.cwd()) or 0)
    monkeypatch.chdir(mine)
    assert main([str(theirs)]) == 2
    assert f"run cd '{theirs}' and resume again" in capsys.readouterr().err
    assert started == []
    monkeypatch.chdir(theirs)
    assert main(["."]) == 0
    monkeypatch.chdir(mine)
    remember_file(theirs / "command.json")
    assert main([str(theirs)]) == 0
    assert started == [theirs, theirs]


@pytest.mark.parametrize("command", ["resume {}", "hydra.sweep.dir={} sweep.resume=true"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_a_foreign_sweep_with_links_out_of_it_is_refused(
    kind: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, outside = tmp_path / "sweep", tmp_path / "outside"
    (sweep / "0").mkdir(parents=True)
    (sweep / "latest").symlink_to("0")
    outside.mkdir()
    make_command(sweep, *SMALL)
    strange = sweep / "0" / ".running"
    if kind == "pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to(outside / "file" if kind == "link" else outside)
    monkeypatch.chdir(sweep)
    assert cli([*command.format(sweep).split(), *SMALL]) == 2
    message = capsys.readouterr().err
    assert f"contains {strange}, which are not files of the sweep" in message
    assert "latest" not in message
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"words": 3, "directory": "/"}', '{"words": [3], "directory": "/"}']
)
def test_a_damaged_command_file_is_an_error_with_a_hint(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "command.json").write_text(content)
    assert main([str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"distexp: {tmp_path}/command.json is damaged (")
    assert message.endswith(f"repeat the command of the sweep with hydra.sweep.dir={tmp_path} sweep.resume=true\n")
    (tmp_path / ".hydra").mkdir()
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(f" with hydra.run.dir={tmp_path} sweep.resume=true\n"), "a single run"
