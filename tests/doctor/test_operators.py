"""``distexp doctor`` and DeepSpeed's operators: the check, and the build ahead of a run, with a fake DeepSpeed."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.doctor import __main__ as doctor
from distexp.doctor import __main__ as verdict
from tests.helpers.fake_deepspeed import fake_deepspeed


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with a fake DeepSpeed and an empty cache of extensions."""
    return fake_deepspeed(tmp_path)


def test_the_doctor_builds_ahead_and_reports_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verdict, "DEFAULT_OPERATORS", {"cpu": ("adam",)})
    monkeypatch.setattr(doctor, "visible_gpus", tuple)
    before = verdict.check_operators("cpu")
    assert (before.state, before.found) == ("warning", "not compiled yet: adam")
    assert before.hint is not None
    assert "distexp doctor --build" in before.hint
    assert doctor.main(["--build"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "compiling DeepSpeed's operator adam, once, about 3 minutes"
    assert verdict.check_operators("cpu").state == "ok"
    assert doctor.main(["--build"]) == 0
    assert capsys.readouterr().out == "compiled: adam\n", "nothing is left to compile"


def test_a_failed_build_of_the_doctor_names_the_error(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(verdict, "DEFAULT_OPERATORS", {"cpu": ("broken",)})
    monkeypatch.setattr(doctor, "visible_gpus", tuple)
    assert doctor.main(["--build"]) == 1
    assert "one.cpp:3:1: fatal error: no omp.h" in capsys.readouterr().out
