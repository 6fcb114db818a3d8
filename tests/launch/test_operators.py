"""Tests of the build of DeepSpeed's operators before the workers start, with a fake DeepSpeed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from distexp.doctor import __main__ as doctor
from distexp.doctor import operators
from distexp.launch import agent
from distexp.launch.failures import TIMEOUT_CODE, classify_failure
from distexp.launch.operators import OperatorError, build_operators, missing_operators
from distexp.launch.timeouts import watch
from distexp.runs.jsonl import append_line, read_entries
from distexp.runs.progress import read_progress
from distexp.runs.run_dir import OPERATORS, log_dir
from distexp.strategies.base import load_strategy
from tests.helpers.runs import make_spec

FAKE_DEEPSPEED = """
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace


class Operator:
    def __init__(self, name):
        self.folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name
        self.library = self.folder / (name + ".so")
        self.plan = self.folder / "build.ninja"

    def is_compatible(self):
        return True

    def load(self, verbose):
        assert verbose
        assert not (self.folder / "lock").exists(), "torch would wait for the lock of a killed build"
        plan = "build one.o: compile " + str(Path(__file__).parents[2] / "one.cpp") + "\\n"
        if not self.library.exists() or self.plan.read_text() != plan:
            self.plan.write_text(plan)
            print("[1/2] c++ one.cpp")
            print("[2/2] c++ -shared one.o", flush=True)
            self.library.write_text("")
        return SimpleNamespace(__file__=str(self.library))


class Unsupported(Operator):
    def is_compatible(self):
        return False


class Broken(Operator):
    def is_compatible(self):
        print("one.cpp:3:1: fatal error: no omp.h", flush=True)
        raise RuntimeError("Error building extension")


ALL_OPS = {"adam": Operator("adam"), "gpu": Unsupported("gpu"), "broken": Broken("broken")}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a fake DeepSpeed and an empty cache of extensions."""
    package = tmp_path / "fake/deepspeed/ops/op_builder"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "all_ops.py").write_text(FAKE_DEEPSPEED)
    return {**os.environ, "PYTHONPATH": str(tmp_path / "fake"), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}


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


def test_operators_are_built_again_after_another_environment_built(tmp_path: Path, environment: dict[str, str]) -> None:
    build_operators(["adam"], environment, tmp_path / "log", lambda _: None)
    assert missing_operators(["adam"], environment) == []
    plan = tmp_path / "extensions/adam/build.ninja"
    plan.write_text("build one.o: compile /other/site-packages/deepspeed/one.cpp\n")
    assert missing_operators(["adam"], environment) == ["adam"]
    entries: list[dict[str, Any]] = []
    build_operators(["adam"], environment, tmp_path / "log", entries.append)
    assert entries[0] == {"compiling": "adam"}
    assert str(tmp_path / "fake/deepspeed") in plan.read_text()
    assert missing_operators(["adam"], environment) == []


def test_a_failed_build_names_the_error_of_the_compiler(tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(OperatorError, match=r"\(broken\) could not be compiled: one.cpp:3:1: fatal error: no omp.h"):
        build_operators(["broken"], environment, tmp_path / "log", lambda _: None)
    assert missing_operators(["broken"], environment) == ["broken"]


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


def test_a_run_without_its_operators_fails_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(names: list[str], environment: dict[str, str], log: Path, report: Any) -> None:
        report({"compiling": names[0]})
        assert read_progress(tmp_path).phase == "compile"
        raise OperatorError(f"{names[0]} could not be compiled")

    spec = make_spec("zero_stage='1'", "cluster.device=cpu", "cluster.workers_per_node=2")
    log_dir(tmp_path, 0).mkdir(parents=True)
    monkeypatch.setattr(agent, "missing_operators", lambda names, environment: list(names))
    monkeypatch.setattr(agent, "build_operators", fail)
    assert agent.lacks_operators(spec, tmp_path, 0)
    assert [entry.get("compiling") for entry in read_entries(tmp_path / OPERATORS)] == ["deepspeed_shm_comm"]
    status, error = classify_failure(tmp_path, {0: 1}, spec)
    assert (status, error.type, error.phase) == ("failed", "OperatorError", "compile")
    assert error.message == "deepspeed_shm_comm could not be compiled"


def test_the_phase_is_compile_until_the_build_ends(tmp_path: Path) -> None:
    assert read_progress(tmp_path).phase is None
    with (tmp_path / OPERATORS).open("a") as file:
        append_line(file, {"compiling": "cpu_adam"})
        assert str(read_progress(tmp_path)) == "compile"
        append_line(file, {"compiled_s": 100})
    assert str(read_progress(tmp_path)) == "start"


def test_the_doctor_builds_ahead_and_reports_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(operators, "USUAL", {"cpu": ("adam",)})
    monkeypatch.setattr(doctor, "visible_gpus", tuple)
    before = operators.check_operators("cpu")
    assert (before.state, before.found) == ("warning", "not compiled yet: adam")
    assert before.hint is not None
    assert "distexp doctor --build" in before.hint
    assert doctor.main(["--build"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "compiling DeepSpeed's operator adam, once, about 3 minutes"
    assert operators.check_operators("cpu").state == "ok"
    assert doctor.main(["--build"]) == 0
    assert capsys.readouterr().out == "compiled: adam\n", "nothing is left to compile"


def test_a_failed_build_of_the_doctor_names_the_error(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(operators, "USUAL", {"cpu": ("broken",)})
    monkeypatch.setattr(doctor, "visible_gpus", tuple)
    assert doctor.main(["--build"]) == 1
    assert "one.cpp:3:1: fatal error: no omp.h" in capsys.readouterr().out


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
