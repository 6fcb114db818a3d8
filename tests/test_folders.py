"""Tests of the commands that delete and archive the folders of sweeps and runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from distexp.cli.main import main
from distexp.config.overrides import suggest_command
from distexp.guard.config_files import is_own_file, remember_file
from distexp.runs import attempts
from tests.helpers.runs import REPOSITORY, make_spec
from tests.helpers.small_disk import small_disk
from tests.helpers.terminal import Terminal
from tests.test_status import write_sweep


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a sweep of two runs, one with a checkpoint and a model. The current folder is above it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path.with_suffix(".cache")))
    write_sweep(tmp_path / "sweep", ("strategy=ddp",), ("strategy=fsdp",))
    for name in ("checkpoints/step-1/weights", "model/weights", "logs/node0/rank0.log", "attempts/0/metrics.jsonl"):
        path = tmp_path / "sweep" / "0" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(os.urandom(200_000))
    return Path("sweep")


def test_a_folder_is_deleted_only_after_a_yes(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", "sweep"]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith("sweep: 2 completed; 7 files, 0.78")
    assert shown.err.endswith("there is no terminal to ask: add --yes to delete it\n")
    for answer, code, is_left in (("\n", 1, True), ("y\n", 0, False)):
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        terminal = Terminal([sys.executable, "-m", "distexp", "rm", "sweep"], Path.cwd(), 80, environment)
        terminal.read_until("delete 1 folder? [y/N] ")
        terminal.press(answer)
        assert terminal.wait() == code
        assert sweep.exists() is is_left


def test_a_sweep_and_a_run_in_it_are_deleted(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started = (sweep / "command.json").stat().st_mtime_ns
    assert main(["rm", "--yes", "sweep/1"]) == 0
    assert (sweep / "command.json").stat().st_mtime_ns == started  # for the order of distexp ls
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "command.json"]
    capsys.readouterr()
    assert main(["status", "sweep"]) == 0
    hint = f"1 deleted: distexp resume {sweep.absolute()} runs it again\n"
    assert capsys.readouterr().out.endswith(f"1 completed\n{hint}")
    assert main(["rm", "--yes", "sweep/0", "sweep"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "deleted: sweep"
    assert not sweep.exists()


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ("rm --ye sweep/0", "--ye is not an option: write --yes"),
        ("archive sweep --out=x.tar.gz", "--out is not an option: write --output"),
        ("status sweep --wtach", "--wtach is not an option: write --watch"),
        ("report sweep --figur figures", "--figur is not an option: write --figures"),
        ("ls sweep --all", "--all is not an option: see distexp ls --help"),
    ],
)
def test_an_abbreviated_option_is_refused(
    typed: str, error: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    assert capsys.readouterr().err == f"distexp: {error}\n"
    assert [path.name for path in Path().iterdir()] == ["sweep"]
    assert (sweep / "0").is_dir()


def test_a_sweep_stays_that_of_the_user_after_runs_in_any_folder_of_it_are_deleted(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remember_file(sweep / "command.json")
    (sweep / "lr").mkdir()
    (sweep / "1").rename(sweep / "lr" / "first")
    assert main(["rm", "--yes", "sweep/lr/first"]) == 0
    assert is_own_file(sweep / "command.json")
    capsys.readouterr()
    assert main(["status", "sweep"]) == 0
    assert "1 deleted: distexp resume" in capsys.readouterr().out
    assert main(["rm", "--yes", "sweep/0"]) == 0
    assert main(["status", "sweep"]) == 2
    assert capsys.readouterr().err == "distexp: sweep has no runs: distexp resume sweep starts them\n"
    assert main(["rm", "--yes", "sweep"]) == 0
    assert not sweep.exists()


def test_printed_commands_take_no_folder_for_an_option(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.rename("-x")
    assert main(["archive", "./-x"]) == 0
    assert capsys.readouterr().out.endswith("to unpack: tar xzf ./-x.tar.gz\n")
    Path("-x", "notes").touch()
    assert main(["rm", "./-x", "--yes"]) == 2
    assert capsys.readouterr().err.endswith("delete everything by rm -r ./-x\n")
    assert suggest_command("status", Path("-x")) == "distexp status ./-x"


@pytest.mark.parametrize("deleted", [5, {"a": [1]}, [7, "3"], None])
def test_a_foreign_list_of_deleted_runs_is_no_obstacle(
    deleted: object, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((sweep / "command.json").read_text())
    (sweep / "command.json").write_text(json.dumps({**content, "deleted": deleted}))
    assert main(["rm", "--yes", "sweep/1"]) == 0
    assert capsys.readouterr().out.endswith("deleted: sweep/1\n")
    kept = ["3", "1"] if isinstance(deleted, list) else ["1"]
    assert json.loads((sweep / "command.json").read_text())["deleted"] == kept


@pytest.mark.parametrize("command", [["rm", "--yes"], ["archive"]])
def test_a_running_run_and_other_folders_are_refused(
    sweep: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes").mkdir()
    Path("link").symlink_to("sweep")
    running = sweep / "2"
    running.mkdir()
    make_spec("cluster.device=cpu").write(running)
    attempts.write_launcher_process(running)
    texts = {
        "sweep": "sweep: run 0 running. Wait for the end, or type distexp cancel sweep first",
        "sweep/2": "sweep/2: run 0 running. Wait for the end, or type distexp status sweep/2 first",
        "notes": "notes is not the folder of a sweep or a run of distexp: distexp ls notes lists the sweeps below it",
        "link": "link is a link: give the folder to which it leads, sweep",
        "link/command.json": "link/command.json is a file: give the folder of a sweep or a run",
        "missing": "missing: no such folder. 'distexp ls' lists the sweeps",
    }
    for folder, text in texts.items():
        assert main([*command, folder]) == 2
        assert capsys.readouterr().err == f"distexp: {text}\n"
    shutil.rmtree(running)
    with attempts.sweep_lock(sweep):  # also that of distexp verify, which has no runs
        assert main([*command, "sweep"]) == 2
    assert "sweep: its command is running. Wait for the end with distexp status sweep" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"sweep", "notes", "link"}


def test_what_distexp_did_not_write_is_not_deleted(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("elsewhere").mkdir()
    (sweep / "7").symlink_to(Path("elsewhere").resolve())
    (sweep / "notes.txt").write_text("mine")
    (sweep / "notes" / "copy").mkdir(parents=True)
    (sweep / "notes" / "mine.txt").write_text("mine")
    shutil.copy(sweep / "0" / "record.json", sweep / "notes" / "copy")
    assert main(["rm", "--yes", "sweep"]) == 2
    assert "sweep also contains what distexp did not write: 7, notes, notes.txt. Move it" in capsys.readouterr().err
    for name in ("7", "notes.txt"):
        (sweep / name).unlink()
    shutil.rmtree(sweep / "notes")
    (sweep / "0" / "outside").symlink_to(Path("elsewhere").resolve())
    monkeypatch.chdir(sweep / "0")
    assert main(["rm", "--yes", ".."]) == 2
    assert "the current folder is in it" in capsys.readouterr().err
    monkeypatch.chdir("../..")
    with attempts.run_lock(sweep):
        assert main(["rm", "--yes", "sweep"]) == 2
    assert "sweep was not deleted: process" in capsys.readouterr().err
    assert main(["rm", "--yes", "sweep"]) == 0
    assert Path("elsewhere").is_dir()
    assert not sweep.exists()


def test_the_report_of_an_unpacked_archive_is_that_of_the_sweep(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "0" / "tensors.pt").write_bytes(bytes(200_000))  # as of a verification
    assert main(["archive", "sweep"]) == 0
    written, left_out, unpack = capsys.readouterr().out.splitlines()
    assert written.startswith("written: sweep.tar.gz, 5 files, ")
    assert left_out == "left out: *.pt (0.191 MiB), checkpoints/ (0.191 MiB), model/ (0.191 MiB)"
    assert main(["archive", "sweep"]) == 2
    assert "sweep.tar.gz exists already, and is not overwritten" in capsys.readouterr().err
    with tarfile.open("sweep.tar.gz") as archive:
        assert {entry.uname for entry in archive} == {""}
    assert main(["report", "sweep"]) == 0
    shown = capsys.readouterr().out
    assert main(["rm", "--yes", "sweep"]) == 0
    subprocess.run(unpack.removeprefix("to unpack: "), shell=True, check=True)
    capsys.readouterr()
    assert main(["report", "sweep"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["archive", "sweep", "--output", "sweep/inside.tar.gz"]) == 2
    assert "would be inside of sweep" in capsys.readouterr().err


def test_an_archive_on_a_full_disk_leaves_no_partial_file(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk:
        (sweep / "0" / "noise").write_bytes(os.urandom(40_000))
        target = disk / "kept.tar.gz"
        assert main(["archive", "sweep", "--output", str(target)]) == 1
        assert capsys.readouterr().err == f"distexp: {target}: No space left on device\n"
        assert not target.exists()


def test_an_archive_with_a_colon_in_its_name_is_unpacked_as_shown(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep.rename("at 12:30")
    assert main(["archive", "at 12:30"]) == 0
    unpack = capsys.readouterr().out.splitlines()[-1]
    Path("to").mkdir()
    subprocess.run(unpack.removeprefix("to unpack: "), shell=True, check=True)
    assert Path("at 12:30", "0", "record.json").is_file()


def test_the_archive_of_a_run_is_named_after_its_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("to").mkdir()
    for output, hint in (("to", "as in --output to/sweep-0.tar.gz"), ("no/file", "there is no folder no: make it")):
        assert main(["archive", "sweep/0", "--output", output]) == 2
        assert hint in capsys.readouterr().err
    assert main(["archive", "sweep/0"]) == 0
    assert capsys.readouterr().out.startswith("written: sweep-0.tar.gz, ")
    with tarfile.open("sweep-0.tar.gz") as archive:
        assert {name.partition("/")[0] for name in archive.getnames()} == {"sweep-0"}
