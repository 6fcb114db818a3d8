"""The cache with real processes: one builder, others wait, and no partial results."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.system.cache_dir import build_once, cache_dir
from tests.helpers.small_disk import small_disk

BUILDER = """
import sys, time
from pathlib import Path
from distexp.system.cache_dir import build_once

target, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])

def build(folder):
    with log.open("a") as file:
        file.write("built\\n")
    folder.mkdir()
    (folder / "first").write_text("1")
    print("halfway", flush=True)
    time.sleep(seconds)
    (folder / "second").write_text("2")

build_once(target, build)
print(sorted(file.name for file in target.iterdir()), flush=True)
"""


def test_a_user_without_a_home_directory_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTEXP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    with pytest.raises(ConfigError, match="set the environment variable DISTEXP_CACHE"):
        cache_dir()


def start_builder(target: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(target), str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def wait_until_halfway(builder: subprocess.Popen[str]) -> None:
    assert builder.stdout is not None
    assert builder.stdout.readline() == "halfway\n"


def test_the_environment_sets_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert cache_dir() == Path("/a")
    monkeypatch.delenv("DISTEXP_CACHE")
    assert cache_dir() == Path("/b/distexp")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/c/.cache/distexp")


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    target, log = tmp_path / "deep" / "result", tmp_path / "log"
    builders = [start_builder(target, log, 0.5) for _ in range(4)]
    outputs = [builder.communicate(timeout=300)[0] for builder in builders]
    assert all(builder.returncode == 0 for builder in builders)
    assert log.read_text() == "built\n"
    assert all(output.endswith("['first', 'second']\n") for output in outputs)
    assert sum("halfway" in output for output in outputs) == 1


def test_a_waiting_process_builds_if_the_builder_is_killed(tmp_path: Path) -> None:
    target, log = tmp_path / "result", tmp_path / "log"
    killed = start_builder(target, log, 600)
    wait_until_halfway(killed)
    waiting = start_builder(target, log, 0)
    killed.send_signal(signal.SIGKILL)
    output, _ = waiting.communicate(timeout=300)
    killed.communicate()
    assert output.endswith("['first', 'second']\n")
    assert log.read_text() == "built\n" * 2
    assert not list(tmp_path.glob(".result*partial")), "the partial result is removed"


def test_a_killed_builder_leaves_no_result(tmp_path: Path) -> None:
    target = tmp_path / "result"
    killed = start_builder(target, tmp_path / "log", 600)
    wait_until_halfway(killed)
    killed.kill()
    killed.communicate()
    assert not target.exists()
    build_once(target, lambda file: file.write_text("whole") and None)
    assert target.read_text() == "whole"


def test_a_damaged_result_is_built_again_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build(folder: Path) -> None:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "first").write_text("1234")
        (folder / "second").write_text("5678")

    folder, file = tmp_path / "folder", tmp_path / "file.json"
    first, second = folder / "deep" / "first", folder / "second"
    for damage, wrong in (
        (lambda: os.truncate(first, 2), f"{first} has 2 bytes, not 4"),
        (second.unlink, f"{second} is missing"),
        (lambda: os.truncate(file, 1), f"{file} has 1 bytes, not 5"),
    ):
        for _ in range(2):
            assert build_once(folder, build) == folder
            assert build_once(file, lambda path: path.write_text("whole") and None) == file
        assert capsys.readouterr().out == "", "a whole result is not built again"
        damage()
        build_once(folder, build)
        build_once(file, lambda path: path.write_text("whole") and None)
        assert (first.read_text(), second.read_text(), file.read_text()) == ("1234", "5678", "whole")
        note = f"note: a file of the cache is damaged and is made again: {wrong}\n"
        assert capsys.readouterr().out == note


def test_an_error_of_the_builder_is_raised_and_leaves_no_result(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "result", fail)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == [".result.lock"]


def test_a_read_only_cache_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write to the cache directory .*/file \(.+\): set .* DISTEXP_CACHE"):
        build_once(tmp_path / "file" / "result", lambda path: path.mkdir())


def test_without_locks_the_first_result_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "result"

    def raise_oserror(*_: object) -> None:
        raise OSError

    def build_after_another_process(folder: Path) -> None:
        for result, text in ((folder, "mine"), (target, "theirs")):
            result.mkdir()
            (result / "text").write_text(text)

    monkeypatch.setattr(fcntl, "flock", raise_oserror)
    build_once(target, build_after_another_process)
    assert (target / "text").read_text() == "theirs"
    assert not list(tmp_path.glob("*.partial"))


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np, tokenizers
from distexp.system.cache_dir import build_once

def write_text(file):
    file.write_text("x" * 100_000)

def write_array(file):
    with file.open("wb") as opened:
        np.save(opened, np.zeros(100_000))

def write_tokenizer(file):
    vocabulary = {str(number): number for number in range(10_000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="0")).save(str(file))

if sys.argv[2] == "limit":
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
for write in (write_text, write_array, write_tokenizer):
    try:
        build_once(Path(sys.argv[1], "result"), write)
    except Exception as error:
        print(type(error).__name__, error)
"""


def errors_of_builders(folder: Path, *arguments: str) -> list[str]:
    """Return the errors of a text, an array and a tokenizer that do not fit."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_a_cache_without_room_is_named_with_what_to_set(tmp_path: Path) -> None:
    """The errors of Python, NumPy and tokenizers name no file, and only that of Python has a number."""
    text = f"ConfigError cannot write to the cache directory {tmp_path / 'cache'} "
    limit = "(File too large): raise the limit with ulimit -f unlimited"
    assert errors_of_builders(tmp_path / "cache", "limit") == [f"{text}{limit}"] * 3
    with small_disk(tmp_path / "disk", "60k") as disk:
        text, variable = f"ConfigError cannot write to the cache directory {disk} ", "the environment variable"
        full = f"(No space left on device): make room, or set {variable} DISTEXP_CACHE to a folder on another disk"
        assert errors_of_builders(disk, "disk") == [f"{text}{full}"] * 3


def test_a_cache_without_inodes_is_named(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        folder.mkdir()
        for number in range(9):
            (folder / str(number)).touch()

    reason = "No space left on device: no inodes are left.: delete files, or set .* DISTEXP_CACHE to a folder on"
    with small_disk(tmp_path / "disk", "2m", 8) as disk, pytest.raises(ConfigError, match=reason):
        build_once(disk / "result", write)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota", "/data/rows")])
def test_a_full_disk_that_is_not_that_of_the_cache_is_kept(error: OSError, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        raise error

    with pytest.raises(OSError, match=error.strerror) as caught:
        build_once(tmp_path / "result", write)
    assert caught.value is error
