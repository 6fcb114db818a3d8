"""Output that cannot be written: closed, full or without Unicode."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from distexp import status
from distexp.cli.main import main
from distexp.console.screen import RunConsole, Screen
from tests.helpers.records import record, write


def test_a_closed_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 0


def test_a_file_never_gets_the_number_of_a_closed_stream() -> None:
    """The workers of a run would print to it, and a socket that ends looks like a closed output."""
    program = (
        "import os\nfrom distexp.cli.main import main\nfor number in range(3): os.close(number)\n"
        "main(['--version'])\nos._exit(os.open('/', os.O_RDONLY))\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 3


def test_a_full_output_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, record(0))
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "distexp: No space left on device\n"


def test_runs_continue_if_the_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        screen = Screen(1, tmp_path)
        for line in ("lost", "lost too"):
            screen.print(line)
    lost = "standard output cannot be written (No space left on device), so the command continues without it"
    assert capfd.readouterr().err == f"distexp: warning: {lost}\n"


def test_an_unwritable_standard_error_leaves_the_output(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        RunConsole(stderr=True).print("lost")
    print("{}", flush=True)
    assert capfd.readouterr().out == "{}\n"


def test_a_configuration_for_a_full_output_is_no_sweep_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--cfg", "job"]) == 1
    assert capsys.readouterr().err == "distexp: No space left on device\n"


@pytest.mark.parametrize("command", ["status", "help"])
def test_an_output_without_a_reader_ends_a_command(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rich, which prints the table of ``status``, has an exit code of its own."""
    write(tmp_path, record(0))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main([command, *([str(tmp_path)] if command == "status" else [])]) == 141


@pytest.mark.parametrize("module", ["plan", "choose", "preflight"])
def test_a_module_without_a_reader_ends_like_its_command(module: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", f"distexp.{module}", "--help"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_output_without_unicode_gets_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, record(0, overrides=("name=ü",)), record(1))
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["status", str(tmp_path)]) == 0
    output.seek(0)
    assert "name=\\xfc" in output.read()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, record(0))
    (tmp_path / "ledger.jsonl").mkdir()
    assert main(["status", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"distexp: {tmp_path}/ledger.jsonl: it is not a regular file\n"
    with pytest.raises(OSError, match="not a regular file"):
        status.main([str(tmp_path)])


def test_a_deleted_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert main(["resume", "."]) == 1
    assert capsys.readouterr().err == "distexp: the current folder was deleted: change to another one\n"
