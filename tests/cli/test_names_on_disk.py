"""Tests of names of files and folders that other users have chosen: they are shown, and never obeyed or traced."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from distexp.cli.main import main
from tests.test_status import write_sweep

NAME = "a\x1b[31m\x1b]0;owned\x07\u202eb"
SHOWN = "a\\x1b[31m"
COMMANDS: tuple[tuple[str, ...], ...] = (
    *(("ls", "."), ("ls", NAME), ("status", "."), ("status", f"{NAME}/none")),
    *(("archive", NAME), ("rm", NAME), ("rm", "--yes", NAME), ("cancel", f"{NAME}/none")),
    *(("resume", f"{NAME}/none"), ("report", f"{NAME}/none"), ("report", "--compare", NAME, f"{NAME}/0")),
    *(("explain", NAME), ("explain", f"{NAME}/none"), ("forecast", NAME), ("forecast", f"{NAME}/none")),
    *(("serve", f"{NAME}/none"), ("memory", f"{NAME}/command.json"), ("archive", f"{NAME}/none")),
)
FOLDER_COMMANDS = ("ls", "status", "archive", "rm", "cancel", "resume", "report", "explain", "forecast", "serve")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distexp.cli.run.MAX_ERRORS", 1)  # The search for more errors takes as long as the command.


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments).replace(NAME, "NAME"))
def test_control_characters_in_the_name_of_a_folder_are_shown(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(Path(NAME), ("strategy=ddp",), ("strategy=fsdp",))
    write_sweep(Path("other"), ("strategy=ddp",))
    main(arguments)
    printed = capsys.readouterr()
    assert SHOWN in printed.out + printed.err
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.out + printed.err)


def test_the_report_shows_control_characters_in_the_name_of_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(Path(NAME), ("strategy=ddp",), ("strategy=fsdp",))
    assert main(["report", NAME]) == 0
    assert "\x1b" not in capsys.readouterr().out + (Path(NAME) / "report" / "report.html").read_text()


PATHS = {
    "too long": ("x" * 300, "longer than the file system allows"),
    "too long as a whole": ("a/" * 3000, "longer than the file system allows"),
    "a NUL byte": ("a\0b", "contains a NUL byte"),
    "a loop": ("loop", "a loop of links"),
}


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    "arguments",
    [
        *((command,) for command in (*FOLDER_COMMANDS, "memory", "--config-dir")),
        *(("report", "--compare", "."), ("report", ".", "--figures"), ("archive", ".", "--output"), ("explain", ".")),
    ],
    ids=" ".join,
)
def test_a_path_that_cannot_be_looked_up_is_an_error_of_the_user(
    arguments: tuple[str, ...], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.symlink("loop", "loop")
    path, problem = PATHS[kind]
    assert main([*arguments, path]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.endswith(": give another path\n")
    assert len(error) < 200


@pytest.mark.parametrize("key", ["dataset.train_path", "model", "name"])
def test_a_name_that_is_not_utf8_is_an_error_of_the_user(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dataset=squad", f"{key}='/a\udcff'"]) == 2  # as Python reads such a byte of the command line
    error = capsys.readouterr().err
    assert error.startswith(f"distexp: {key}=")
    assert "Traceback" not in error


@pytest.mark.parametrize("command", [*FOLDER_COMMANDS, "memory"])
def test_a_folder_without_permission_is_an_error_of_the_user(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Root may read everything.
    Path("locked").mkdir()
    assert main([command, "locked"]) == 2
    assert "locked cannot be read, because you have no permission" in capsys.readouterr().err


@pytest.mark.parametrize("command", FOLDER_COMMANDS)
@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_file_in_place_of_a_folder_is_an_error_of_the_user(
    command: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert main([command, path]) == 2
    error = capsys.readouterr().err
    assert path in error
    assert path != "file" or "is a file" in error


@pytest.mark.parametrize("arguments", [*((command, "x") for command in FOLDER_COMMANDS), ("ls",), ("status",), ()])
def test_in_a_deleted_folder_all_commands_print_the_same_sentence(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert main(list(arguments)) == 1
    assert capsys.readouterr().err == "distexp: the current folder was deleted: change to another one\n"


@pytest.mark.parametrize("option", [("--config-dir=conf",), ("-cd", "conf")])
def test_a_primary_configuration_that_is_not_read_is_named(
    option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/config.yaml").write_text("train: {seed: 7}\n")
    moved = "# @package _global_\ntrain: {seed: 7}\n"
    Path("conf/experiment/my.yaml").write_text(moved)
    assert main([*option, "--cfg", "job", "experiment=my"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("distexp: warning: conf/config.yaml is not read, because the primary configuration")
    assert "into conf/experiment/my.yaml" in printed.err
    assert "seed: 7" in printed.out


@pytest.mark.parametrize(
    "name",
    [
        *("a'[.jsonl", "a,b.jsonl"),
        *(pytest.param(name, marks=pytest.mark.release) for name in ("a[1].jsonl", "a{x}.jsonl", 'a"b.jsonl')),
    ],
)
def test_a_file_with_signs_of_hydra_in_its_name_is_advised_in_quotes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text('{"text": "a"}\n')
    assert main([f"dataset={name}", "strategy=single"]) == 2
    (typed,) = shlex.split(capsys.readouterr().err.partition(", write " if "," in name else ": write ")[2])
    assert main([typed, "strategy=single"]) == 2
    data = shlex.split(capsys.readouterr().err.partition("is data and not an option: write ")[2])
    assert main([*data, "--cfg", "job"]) == 0
    assert name in capsys.readouterr().out
