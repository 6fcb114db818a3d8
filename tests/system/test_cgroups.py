"""Tests of memory limits and counters, on this machine and on a hand-written hierarchy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distexp.launch import failures
from distexp.plan.planner import parallel_processes
from distexp.system import cgroups
from distexp.system.cgroups import (
    Cgroup,
    available_memory,
    cpu_limit,
    memory_limits,
    oom_kills,
    usable_memory,
)


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
    monkeypatch.setattr(cgroups, "memory_cgroups", lambda pid: [Cgroup(tmp_path, "job/step", version)])
    assert min(memory_limits()) == usable_memory() == 64 * 2**20


@pytest.mark.parametrize(
    ("version", "names", "cached"),
    [
        (2, ("memory.max", "memory.current"), {"inactive_file": 10}),
        (1, ("memory.limit_in_bytes", "memory.usage_in_bytes"), {"inactive_file": 3, "total_inactive_file": 10}),
    ],
)
def test_available_memory_is_what_the_cgroups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, names: tuple[str, str], cached: dict[str, int]
) -> None:
    (tmp_path / "job").mkdir()
    for name, mib in zip(names, (64, 50), strict=True):
        (tmp_path / "job" / name).write_text(f"{mib * 2**20}\n")
    lines = [f"{name} {mib * 2**20}\n" for name, mib in {"anon": 40, **cached}.items()]
    (tmp_path / "job" / "memory.stat").write_text("".join(lines))
    monkeypatch.setattr(cgroups, "memory_cgroups", lambda: [Cgroup(tmp_path, "job", version)])
    assert available_memory() == 24 * 2**20
    assert parallel_processes() == 1, "there is memory for less than one process, and one is needed"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/job", {"job/cpu.max": "250000 100000", "cpu.max": "max 100000"}, 2.5),
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/job", {"job/other": ""}, None),
    ],
)
def test_cores_that_the_cgroups_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: float | None
) -> None:
    for name, text in {**files, "self": f"{group}\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "self")
    assert cpu_limit() == cores


@pytest.mark.parametrize(("version", "name"), [(2, "memory.events"), (1, "memory.oom_control")])
def test_oom_kills_of_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, name: str) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / name).write_text("oom 3\noom_kill 2\n")
    found = [Cgroup(tmp_path, "job", version), Cgroup(tmp_path, "", 2)]  # the other version, without memory
    monkeypatch.setattr(cgroups, "memory_cgroups", lambda: found)
    assert oom_kills()["cgroup"] == 2


def test_kills_of_other_cgroups_are_not_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"machine": 5, "cgroup": 1}
    monkeypatch.setattr(failures, "oom_kills", lambda: dict(counters))
    failures.save_counters(tmp_path)
    counters["machine"] += 1
    assert not failures.oom_killed(tmp_path)
    counters["cgroup"] += 1
    assert failures.oom_killed(tmp_path)
    del counters["cgroup"]
    assert failures.oom_killed(tmp_path), "the machine decides if the cgroup is unknown"


def test_the_mark_of_another_node_counts_as_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {"cgroup": 1}
    monkeypatch.setattr(failures, "oom_kills", lambda: dict(counters))
    failures.save_counters(tmp_path)
    (tmp_path / "logs" / "node1").mkdir(parents=True)
    failures.mark_if_killed(tmp_path, 1, {"cgroup": 1})
    assert not failures.oom_killed(tmp_path)
    failures.mark_if_killed(tmp_path, 1, {"cgroup": 0})
    assert failures.oom_killed(tmp_path)
