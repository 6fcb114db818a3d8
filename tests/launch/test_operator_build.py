"""Tests of the build of DeepSpeed's operators before the workers start, with a fake DeepSpeed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distexp.launch import node_setup
from distexp.launch.agent import watch
from distexp.launch.failures import TIMEOUT_CODE, classify_failure
from distexp.launch.node_setup import (
    OperatorError,
    build_operators,
    current_environment,
    extensions_dir,
    missing_operators,
)
from distexp.runs.run_dir import OPERATORS, log_dir
from distexp.runs.run_state import read_progress
from distexp.strategies.base import load_strategy
from distexp.system.files import append_line, read_entries
from tests.helpers.fake_deepspeed import fake_deepspeed
from tests.helpers.runs import make_spec

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a fake DeepSpeed and an empty cache of extensions."""
    return fake_deepspeed(tmp_path)


def test_operators_are_built_once_and_each_step_is_reported(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "extensions/adam"
    folder.mkdir(parents=True)
    for left_by_a_killed_build in ("lock", ".distexp_build"):
        (folder / left_by_a_killed_build).touch()
    entries: list[dict[str, Any]] = []
    names = ["adam", "gpu"]
    assert missing_operators(names, environment) == names
    build_operators(names, environment, tmp_path / "log", entries.append)
    reported = [entry for entry in entries if entry.keys() != {"elapsed_s"}]
    assert reported[0] == {"compiling": "adam"}
    assert [(entry["step"], entry["steps"]) for entry in reported[1:-1]] == [(1, 2), (2, 2)]
    assert reported[-1].keys() == {"compiled_s"}
    assert missing_operators(names, environment) == []
    assert missing_operators(names, {**environment, "CXX": "clang++"}) == names
    (folder / "adam.so").unlink()
    assert missing_operators(names, environment) == ["adam"]


def test_each_environment_builds_in_a_folder_of_its_own(tmp_path: Path, environment: dict[str, str]) -> None:
    """With one folder for all, Ninja would compile again whenever another environment has built last."""
    folder = extensions_dir(environment)
    assert folder.parent == tmp_path / "extensions"
    assert extensions_dir({**environment, "TORCH_EXTENSIONS_DIR": str(folder)}) == folder, "that of a worker"
    assert extensions_dir({**environment, "CXX": "clang++"}) != folder
    other = tmp_path / "site-packages/deepspeed-0.19.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Name: deepspeed\nVersion: 0.19\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(other.parent)
        assert extensions_dir(environment) != folder, "DeepSpeed is installed elsewhere"
    assert current_environment("cpu")["TORCH_EXTENSIONS_DIR"] != current_environment("cuda")["TORCH_EXTENSIONS_DIR"]


def build_adam(tmp_path: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Build the operator, and return what was reported apart from times."""
    entries: list[dict[str, Any]] = []
    build_operators(["adam"], environment, tmp_path / "log", entries.append)
    return [entry for entry in entries if entry.keys() & {"compiling", "waiting"}]


def test_a_build_that_was_cut_off_is_repeated(tmp_path: Path, environment: dict[str, str]) -> None:
    """A full disk or a lost node cuts off a library, which Ninja takes for built. A killed worker leaves a lock."""
    build_adam(tmp_path, environment)
    folder = tmp_path / "extensions/adam"
    (folder / "lock").touch()
    assert missing_operators(["adam"], environment) == ["adam"], "the workers would wait for the lock"
    (folder / "lock").unlink()
    assert missing_operators(["adam"], environment) == []
    (folder / "lock").touch()
    (folder / "adam.so").write_text("cut")
    for path in folder.iterdir():
        os.utime(path, (time.time() - 3600,) * 2)  # so that the file system does not matter
    assert build_adam(tmp_path, environment) == [{"compiling": "adam"}]
    assert (folder / "adam.so").read_text() == "library"
    assert not (folder / "lock").exists()
    assert missing_operators(["adam"], environment) == []


def test_the_lock_of_a_running_program_is_waited_for(tmp_path: Path, environment: dict[str, str]) -> None:
    lock = tmp_path / "extensions/adam/lock"
    lock.parent.mkdir(parents=True)
    held, reported = lock.open("w"), []

    def release(entry: dict[str, Any]) -> None:
        if "waiting" in entry:
            reported.append(entry["waiting"])
            assert lock.exists()
            held.close()
            lock.unlink()

    build_operators(["adam"], environment, tmp_path / "log", release)
    assert reported == [f"another program that compiles (its lock: {lock})"]
    assert (lock.parent / "adam.so").read_text() == "library"


def test_the_time_that_a_run_waits_for_the_build_of_another_one_is_reported(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    build_operators(["adam"], environment, tmp_path / "log", lambda _: None)
    held, entries = (tmp_path / "extensions/adam/.distexp_lock").open("w"), []
    fcntl.flock(held, fcntl.LOCK_EX)

    def release(entry: dict[str, Any]) -> None:
        entries.append(entry)
        held.close()

    build_operators(["adam"], environment, tmp_path / "log", release)
    assert entries[0] == {"waiting": "another run"}
    assert [entry.keys() for entry in entries[1:]] == [{"waited_s"}]


def test_a_library_that_cannot_be_imported_is_built_again(tmp_path: Path, environment: dict[str, str]) -> None:
    """Another program has built it, so no stamp shows that it is outdated."""
    folder = tmp_path / "extensions/adam"
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text(f"build one.o: compile {tmp_path}/fake/deepspeed/one.cpp\n")
    (folder / "adam.so").write_text("cut")
    assert build_adam(tmp_path, environment) == [{"compiling": "adam"}]
    assert (folder / "adam.so").read_text() == "library"


def test_a_failed_build_names_the_error_of_the_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(OperatorError, match=r"\(broken\) could not be compiled: one.cpp:3:1: fatal error: no omp.h"):
        build_operators(["broken"], environment, tmp_path / "log", lambda _: None)
    assert missing_operators(["broken"], environment) == ["broken"]


def test_a_folder_of_operators_that_cannot_be_created_is_named(tmp_path: Path, environment: dict[str, str]) -> None:
    missing = {**environment, "TORCH_EXTENSIONS_DIR": "/proc/1/nocache"}
    with pytest.raises(OperatorError, match="or set TORCH_EXTENSIONS_DIR to a folder that you can write"):
        build_operators(["adam"], missing, tmp_path / "log", lambda _: None)


def test_a_full_disk_is_named_before_the_symbols_of_the_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(OperatorError) as caught:
        build_operators(["unwritten"], environment, tmp_path / "log", lambda _: None)
    room = f"Make room for {extensions_dir(environment)} and in {environment.get('TMPDIR', '/tmp')}"
    assert str(caught.value) == (
        "DeepSpeed's operators (unwritten) could not be compiled: No space left on device. "
        f"{room}, or set TORCH_EXTENSIONS_DIR to a folder on another disk"
    )


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (("strategy=ddp",), ()),
        (("zero_stage='1'",), ("deepspeed_shm_comm",)),
        (("zero_stage='2'", "offload='true'"), ("deepspeed_shm_comm",)),
        (("zero_stage='2'", "offload='true'", "deepspeed.cpu_optimizer=deepspeed"), ("deepspeed_shm_comm", "cpu_adam")),
    ],
)
def test_only_the_operators_that_a_run_needs_are_built(overrides: tuple[str, ...], needed: tuple[str, ...]) -> None:
    config = make_spec("cluster.device=cpu", "cluster.workers_per_node=2", *overrides).config
    assert load_strategy(config).operators(config) == needed


@pytest.mark.parametrize(
    ("reason", "name"),
    [("could not be compiled", "OperatorError"), ("could not be compiled: No space left on device", "DiskFull")],
)
def test_a_run_without_its_operators_fails_with_the_reason(
    reason: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(names: list[str], environment: dict[str, str], log: Path, report: Any) -> None:
        report({"compiling": names[0]})
        assert read_progress(tmp_path).phase == "compile"
        raise OperatorError(f"{names[0]} {reason}")

    spec = make_spec("zero_stage='1'", "cluster.device=cpu", "cluster.workers_per_node=2")
    log_dir(tmp_path, 0).mkdir(parents=True)
    monkeypatch.setattr(node_setup, "missing_operators", lambda names, environment: list(names))
    monkeypatch.setattr(node_setup, "build_operators", fail)
    assert node_setup.lacks_operators(spec, tmp_path, 0)
    assert [entry.get("compiling") for entry in read_entries(tmp_path / OPERATORS)] == ["deepspeed_shm_comm"]
    status, error = classify_failure(tmp_path, {0: 1}, spec)
    assert (status, error.type, error.phase) == ("failed", name, "compile")
    assert (error.message, error.log) == (f"deepspeed_shm_comm {reason}", "logs/node0/operators.log")


@pytest.mark.parametrize("ended", ["compiled_s", "waited_s"])
def test_the_phase_is_compile_until_the_build_ends(tmp_path: Path, ended: str) -> None:
    assert read_progress(tmp_path).phase is None
    with (tmp_path / OPERATORS).open("a") as file:
        append_line(file, {"compiling": "cpu_adam"})
        assert str(read_progress(tmp_path)) == "compile"
        append_line(file, {ended: 100})
    assert str(read_progress(tmp_path)) == "start"


@pytest.mark.parametrize(("built", "code"), [(False, TIMEOUT_CODE), (True, 0)])
def test_the_time_limit_starts_after_the_build(tmp_path: Path, built: bool, code: int) -> None:
    if built:
        (tmp_path / OPERATORS).touch()
    spec = make_spec("strategy=single", "cluster.device=cpu", "cluster.timeout_min=30")
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as group:
        try:
            # The peer has failed, so that a run within its time ends with 0.
            assert watch(group, spec, tmp_path, 0, time.time() - 3600, peer_failed=lambda: True) == code
        finally:
            group.kill()
