"""The sampler over real processes that hold known amounts of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distexp.measure.memory.sampler import Sampler
from distexp.measure.memory.summary import summarize, summarize_run
from distexp.runs.memory_trace import MemorySample, read_memory_trace

INTERVAL_S = 0.05
OTHERS_MIB = 40  # helpers of Python's that other tests may have left below the test runner

MARKS = """
import json, mmap, os, sys, time
import numpy as np
events = open(sys.argv[1], "a")
def enter(phase):
    events.write(json.dumps({"unix_time_s": time.time(), "phase": phase}) + "\\n")
    events.flush()
def hold(mib):
    return np.ones(mib * 2**20, dtype=np.uint8)
"""

KNOWN = (
    MARKS
    + """
enter("setup"); time.sleep(1.0)  # what the libraries share shows within 50 times the cost of reading it
enter("train"); block = hold(800); time.sleep(0.6)
del block
enter("eval"); block = hold(400); time.sleep(0.6)
del block
enter("save"); time.sleep(0.3)
enter("done")
"""
)

SHARED = (
    MARKS
    + """
enter("setup"); time.sleep(0.4)
shared = mmap.mmap(-1, 200 * 2**20)
enter("train")
other = os.fork()
pages = np.frombuffer(shared, dtype=np.uint8)
pages[:] = 1
time.sleep(1.5)  # a change of shared memory shows within 50 times the cost of reading it
if other == 0:
    os._exit(0)
os.waitpid(other, 0)
"""
)


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


@contextmanager
def sampled(run_dir: Path, code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose tree is sampled by this one, its parent, until it has ended."""
    with Sampler(path=run_dir / "memory/node0.csv", interval_s=INTERVAL_S):
        process = start(code, str(run_dir / "events.jsonl"))
        try:
            yield process
            process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()


def cpu_samples(run_dir: Path) -> list[MemorySample]:
    return read_memory_trace(run_dir / "memory/node0.csv").samples


def test_known_amounts_in_known_phases(tmp_path: Path) -> None:
    with sampled(tmp_path, KNOWN):
        pass
    summary = summarize_run(tmp_path, nodes=1)
    (entry,) = summary.memory["cpu"]
    phases = entry["phases"]
    assert list(phases)[:4] == ["setup", "train", "eval", "save"]  # done may be too short for a sample
    assert phases["train"] - phases["setup"] == pytest.approx(800, rel=0.02)
    # What a phase begins with belongs to it as well: the bare process of its end is its least.
    held = [s.used_mib for s in cpu_samples(tmp_path) if s.phase == "eval" and s.used_mib is not None]
    # 16 MiB, as for 800: what it shares with other processes is counted as theirs end and begin.
    assert max(held) - phases["setup"] == pytest.approx(400, abs=16)
    assert entry["peak_mib"] == phases["train"]
    assert entry["source"].startswith("pss")
    assert summary.notes == []


def test_phases_are_in_the_file_itself(tmp_path: Path) -> None:
    with sampled(tmp_path, KNOWN):
        pass
    written = [sample.phase for sample in cpu_samples(tmp_path)]
    assert set(written) - {"done"} == {"", "setup", "train", "eval", "save"}
    (entry,) = summarize([tmp_path / "memory/node0.csv"]).memory["cpu"]  # without the events
    assert entry["phases"]["train"] - entry["phases"]["setup"] == pytest.approx(800, rel=0.02)


def test_shared_pages_count_once(tmp_path: Path) -> None:
    with sampled(tmp_path, SHARED):
        pass
    (entry,) = summarize_run(tmp_path, nodes=1).memory["cpu"]
    assert entry["phases"]["train"] - entry["phases"]["setup"] == pytest.approx(200, rel=0.02)


def test_a_process_is_followed_when_its_parent_is_killed(tmp_path: Path) -> None:
    tree = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen([sys.executable, '-c', "
        "'x = bytearray(100 * 2**20); import time; time.sleep(60)']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    path = tmp_path / "memory/node0.csv"
    with Sampler(path=path, interval_s=INTERVAL_S):
        process = subprocess.Popen([sys.executable, "-c", tree], stdout=subprocess.PIPE)
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        time.sleep(0.6)
        process.kill()
        process.wait()
        killed = time.time()
        time.sleep(0.4)
        os.kill(orphan, signal.SIGKILL)
        gone = time.time()
        time.sleep(0.3)
    alone = [s.used_mib for s in cpu_samples(tmp_path) if killed + 0.1 < s.unix_time_s < gone]
    after = [s.used_mib for s in cpu_samples(tmp_path) if s.unix_time_s > gone + 0.1]
    assert alone
    assert all(used is not None and used > 100 for used in alone)
    assert after
    assert all(used is None or used < OTHERS_MIB for used in after)


def test_a_killed_agent_leaves_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "memory/node0.csv"
    agent = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from distexp.measure.memory.sampler import Sampler\n"
        f"with Sampler(path=Path({str(path)!r}), interval_s=0.05):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3)'])\n"
        "    time.sleep(60)\n"
    )
    process = start(agent)
    time.sleep(1.0)
    process.kill()
    process.wait()
    trace = read_memory_trace(path)
    assert trace.notes == []
    assert len(trace.samples) > 5
    assert trace.samples[-1].used_mib is not None


def test_timestamps_do_not_drift_and_the_file_is_readable_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "memory/node0.csv"
    begun = time.time()
    with Sampler(path=path, interval_s=INTERVAL_S):
        lengths = []
        while time.time() < begun + 3:
            time.sleep(0.1)
            trace = read_memory_trace(path)
            assert trace.notes == []
            lengths.append(len(trace.samples))
    times = [sample.unix_time_s for sample in cpu_samples(tmp_path)]
    assert lengths == sorted(lengths)
    assert lengths[-1] > lengths[0]
    assert times[0] - begun < 0.2
    offsets = [(moment - times[0]) / INTERVAL_S for moment in times[:-1]]  # the last is at the end
    late = sorted(offset - int(offset + 0.1) for offset in offsets)
    assert late[len(late) // 2] < 0.2  # a busy machine delays some, but a later one is not later
    assert abs(times[-1] - (begun + 3)) < 0.3


def test_utilisation_is_of_all_cores(tmp_path: Path) -> None:
    path = tmp_path / "memory/node0.csv"
    with Sampler(path=path, interval_s=0.2, cores=4):
        process = start("while True: pass")
        time.sleep(1.5)
        process.kill()
        process.wait()
    (entry,) = summarize([path]).utilization["cpu"]
    assert 5 < entry["average_pct"] < 30  # one of four cores, where the machine is not full


def test_the_sampling_process_itself_is_left_out(tmp_path: Path) -> None:
    block = bytearray(64 * 2**20)
    path = tmp_path / "memory/node0.csv"
    with Sampler(path=path, interval_s=INTERVAL_S, root_pid=os.getpid()):
        time.sleep(0.2)
    assert len(block) > 0
    used = [sample.used_mib for sample in read_memory_trace(path).samples]
    assert used
    assert all(mib is None or mib < OTHERS_MIB for mib in used)


def test_it_is_cheap(tmp_path: Path) -> None:
    held = "import numpy as np, time; x = np.ones(4 * 2**20); print(flush=True); time.sleep(60)"
    processes = [subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE) for _ in range(6)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        path = tmp_path / "memory/node0.csv"
        import psutil  # noqa: F401  # a first import costs more than the samples

        with Sampler(path=path, interval_s=0.1):
            begun = time.process_time()
            time.sleep(2)
            spent = time.process_time() - begun
    finally:
        for process in processes:
            process.kill()
            process.wait()
    samples = read_memory_trace(path).samples
    assert spent / len(samples) < 0.005
    assert samples[-1].used_mib is not None
    assert samples[-1].used_mib > 6 * 32


def test_dear_samples_lengthen_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory/node0.csv"
    sampler = Sampler(path=path, interval_s=INTERVAL_S)
    read = sampler._tree.read

    def slow_read() -> object:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return read()

    monkeypatch.setattr(sampler._tree, "read", slow_read)
    with sampler:
        time.sleep(1.6)
    assert len(read_memory_trace(path).samples) < 16
    said = capsys.readouterr().err
    assert "of CPU time, more than 10% of 0.05 s: sampling every" in said


def test_a_failure_is_said_once_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "memory").write_text("in the way")
    with Sampler(path=tmp_path / "memory/node0.csv", interval_s=INTERVAL_S):
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be written" in said
    summary = summarize_run(tmp_path, nodes=1)
    assert summary.memory["cpu"][0]["peak_mib"] is None
    assert summary.memory["gpu"] == []
    assert len(summary.notes) == 1


def test_a_lost_sample_is_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "memory/node0.csv"
    real, calls = os.write, 0

    def write(descriptor: int, content: bytes) -> int:
        nonlocal calls
        calls += b",cpu," in content
        full = b",cpu," in content and calls in (2, 3)
        return real(descriptor, content[:7] if full else content)

    monkeypatch.setattr(os, "write", write)
    with Sampler(path=path, interval_s=INTERVAL_S):
        time.sleep(0.5)
    monkeypatch.undo()
    trace = read_memory_trace(path)
    assert len(trace.samples) > 4
    assert "2 line(s) are not samples" in trace.notes[0]
    assert capsys.readouterr().err.count("a sample is lost") == 1


def test_a_bad_interval_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"interval_s=0 is not above 0"):
        Sampler(path=tmp_path / "node0.csv", interval_s=0)


def test_a_mark_that_comes_late_is_joined(tmp_path: Path) -> None:
    """Over a network file system the sampler may see a mark after the samples that it covers."""
    with sampled(tmp_path, KNOWN):
        pass
    path, events = tmp_path / "memory/node0.csv", tmp_path / "events.jsonl"
    header, *rows = path.read_text().splitlines()
    blank = [",".join([row.split(",")[0], "", *row.split(",")[2:]]) for row in rows]
    path.write_text("\n".join([header, *blank]) + "\n")
    train = json.loads(events.read_text().splitlines()[1])
    assert train["phase"] == "train"
    (entry,) = summarize([path], events).memory["cpu"]
    assert entry["phases"]["train"] - entry["phases"]["setup"] == pytest.approx(800, rel=0.02)
