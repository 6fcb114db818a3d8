"""Tests of memory limits and counters, on this machine and on a hand-written hierarchy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.launch import oom
from distexp.system import cgroups
from distexp.system.cgroups import MemoryCgroup, memory_limits, oom_kills, usable_memory


def test_usable_memory_is_at_most_that_of_the_machine() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < usable_memory() <= machine * 1.01
    assert usable_memory(os.getpid()) == usable_memory()


@pytest.mark.parametrize(
    ("version", "name", "no_limit"), [(2, "memory.max", "max"), (1, "memory.limit_in_bytes", str(2**63 - 4096))]
)
def test_limits_of_all_parents_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str, no_limit: str
) -> None:
    (tmp_path / "job" / "step").mkdir(parents=True)
    (tmp_path / "job" / "step" / name).write_text(f"{no_limit}\n")
    (tmp_path / "job" / name).write_text(f"{64 * 2**20}\n")
    monkeypatch.setattr(cgroups, "memory_cgroups", lambda pid: [MemoryCgroup(tmp_path, "job/step", version)])
    assert min(memory_limits()) == usable_memory() == 64 * 2**20


@pytest.mark.parametrize(("version", "name"), [(2, "memory.events"), (1, "memory.oom_control")])
def test_oom_kills_of_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / name).write_text("oom 3\noom_kill 2\n")
    found = [MemoryCgroup(tmp_path, "job", version), MemoryCgroup(tmp_path, "", 2)]  # the other version, without memory
    monkeypatch.setattr(cgroups, "memory_cgroups", lambda: found)
    assert oom_kills()["cgroup"] == 2


def test_kills_of_other_cgroups_are_not_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"machine": 5, "cgroup": 1}
    monkeypatch.setattr(oom, "oom_kills", lambda: dict(counters))
    oom.save_counters(tmp_path)
    counters["machine"] += 1
    assert not oom.oom_killed(tmp_path)
    counters["cgroup"] += 1
    assert oom.oom_killed(tmp_path)
    del counters["cgroup"]
    assert oom.oom_killed(tmp_path), "the machine decides if the cgroup is unknown"
