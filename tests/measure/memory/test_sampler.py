"""Tests of the sampler with real processes that hold known amounts of memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from distexp.measure.memory import process_tree
from distexp.measure.memory import sampler as sampler_module
from distexp.measure.memory.process_tree import CostLimit, ProcessTree
from distexp.measure.memory.sampler import Sampler, summarize, summarize_run
from distexp.runs.memory_trace import read_memory_trace
from tests.measure.memory.sampled_process import (
    INTERVAL_S,
    descendants,
    read_samples,
    sampled,
    start,
    started,
    wait_until,
)


@pytest.fixture(scope="module")
def known_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run a process that holds 800 MiB in the phase train, and 400 MiB in the phase eval.

    A sample belongs to the phase in which it starts. So the memory changes only between two samples of one phase.
    """
    run_dir = tmp_path_factory.mktemp("known")
    with sampled(run_dir) as child:
        for phase, mib in (("setup", 0), ("train", 800), ("eval", 400), ("save", 0)):
            child.run(f"enter({phase!r})")
            child.settle()
            child.run(f"block = hold({mib})")
            child.settle()
            child.run("del block")
            child.settle()
    return run_dir


def test_known_amounts_in_known_phases(known_run: Path) -> None:
    summary = summarize_run(known_run, nodes=1)
    (entry,) = summary.memory["cpu"]
    phases = entry["phases"]
    assert list(phases) == ["setup", "train", "eval", "save"]
    assert phases["train"] - phases["setup"] == pytest.approx(800, abs=16)
    assert phases["eval"] - phases["setup"] == pytest.approx(400, abs=16)
    assert entry["peak_mib"] == phases["train"]
    assert entry["source"].startswith("pss")
    assert summary.notes == []


def test_trace_contains_the_phases(known_run: Path) -> None:
    trace = known_run / "memory/node0.csv"
    assert {sample.phase for sample in read_samples(trace)} - {""} == {"setup", "train", "eval", "save"}
    (entry,) = summarize([trace]).memory["cpu"]  # without the events
    assert entry["phases"]["train"] - entry["phases"]["setup"] == pytest.approx(800, abs=16)


def test_phase_that_reaches_the_disk_late(tmp_path: Path, known_run: Path) -> None:
    """On a network file system, the sampler may see an event after the samples that it covers."""
    shutil.copytree(known_run, tmp_path, dirs_exist_ok=True)
    path, events = tmp_path / "memory/node0.csv", tmp_path / "events.jsonl"
    header, *rows = path.read_text().splitlines()
    blank = [",".join([row.split(",")[0], "", *row.split(",")[2:]]) for row in rows]
    path.write_text("\n".join([header, *blank]) + "\n")
    train = json.loads(events.read_text().splitlines()[1])
    assert train["phase"] == "train"
    (entry,) = summarize([path], events).memory["cpu"]
    assert entry["phases"]["train"] - entry["phases"]["setup"] == pytest.approx(800, abs=16)


SHARE_PAGES = """
shared = mmap.mmap(-1, 200 * 2**20)
parent, (wait_end, ready_end) = os.getpid(), os.pipe()
other = os.fork()
for page in range(0, len(shared), mmap.PAGESIZE):
    shared[page] = 1
if other == 0:
    os.write(ready_end, b"1")
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
os.read(wait_end, 1)
"""


def test_shared_pages_count_once(tmp_path: Path) -> None:
    with sampled(tmp_path) as child:
        before = child.settle()
        child.run(SHARE_PAGES)
        after = child.settle()
        resident = sum(process.memory_info().rss for process in descendants(child.shell)) / 2**20
    assert after - before == pytest.approx(200, abs=16)
    assert resident > after + 150


def test_growth_during_a_reading_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "PSS_SHARE", 1e-9)  # no second reading of PSS
    blocks: list[bytes] = []
    read = process_tree.read_proc

    def read_while_growing(name: str) -> bytes:
        if name.endswith("smaps_rollup"):
            blocks.append(b"1" * (100 * 2**20))
        return read(name)

    monkeypatch.setattr(process_tree, "read_proc", read_while_growing)
    reader = process_tree.PssReader()
    first, second = reader.read([os.getpid()]), reader.read([os.getpid()])
    assert first is not None
    assert second is not None
    assert (first.source, second.source, len(blocks)) == ("pss", "pss+delta", 1)
    assert second.mib == pytest.approx(first.mib, abs=16)


HOLDS_MEMORY = """
import sys
for line in sys.stdin:
    held = b"1" * (int(line) * 2**20)
    print("held", flush=True)
"""


def test_a_process_that_starts_between_two_readings_of_pss_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "PSS_SHARE", 1e-9)  # no second reading of PSS
    reader = process_tree.PssReader()
    first = reader.read([os.getpid()])
    new = start(HOLDS_MEMORY)
    assert (first, new.stdin, new.stdout) != (None, None, None)
    found = [first.mib]  # type: ignore[union-attr]
    try:
        for mib in (100, 300):
            new.stdin.write(f"{mib}\n".encode())  # type: ignore[union-attr]
            new.stdin.flush()  # type: ignore[union-attr]
            assert new.stdout.readline() == b"held\n"  # type: ignore[union-attr]
            reading = reader.read([os.getpid(), new.pid])
            assert reading is not None
            found.append(reading.mib)
    finally:
        new.communicate()
    assert [after - before for before, after in pairwise(found)] == pytest.approx([105, 200], abs=16)


@pytest.mark.parametrize("ends", [False, True])
def test_a_fork_counts_only_the_pages_that_its_parent_does_not_have(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it ends during its first reading, between that of its counts and that of its pages."""
    monkeypatch.setattr(process_tree, "PSS_SHARE", 1e-9)
    shared = b"1" * (200 * 2**20)
    reader, read = process_tree.PssReader(), process_tree.read_proc
    first = reader.read([os.getpid()])
    read_end, write_end = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(len(shared) % 2)

    def end() -> None:
        os.close(write_end)
        os.waitpid(pid, 0)

    def read_after_the_end(name: str) -> bytes:
        if ends and name == f"{pid}/smaps_rollup":
            end()
        return read(name)

    monkeypatch.setattr(process_tree, "read_proc", read_after_the_end)
    both = reader.read([os.getpid(), pid])
    if not ends:
        end()
    assert first is not None
    assert both is not None
    assert both.mib == pytest.approx(first.mib, abs=32)


READS_FILE = """
import mmap, sys
file = open(sys.argv[1], "rb")
content = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
pages = sum(content[at] for at in range(0, len(content), mmap.PAGESIZE))
print("read", flush=True)
sys.stdin.read()
"""


def test_files_that_another_shared_process_reads_count_in_full(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"1" * (64 * 2**20))
    member, other = (start(READS_FILE, str(file)) for _ in range(2))
    try:
        for process in (member, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"read\n"
        alone, both = (process_tree.PssReader((), holders).read([member.pid]) for holders in ((), (other.pid,)))
    finally:
        for process in (member, other):
            process.communicate()
    assert alone is not None
    assert both is not None
    assert both.mib - alone.mib == pytest.approx(32, abs=12), "half of the file counts in the other process"


START_COMPILER = """
parent, (wait_end, ready_end), (compile_end, start_end) = os.getpid(), os.pipe(), os.pipe()
if os.fork() == 0:
    with open("/proc/self/comm", "w") as name:
        name.write("cc1plus")
    os.write(ready_end, b"1")
    os.read(compile_end, 1)
    block = hold(300)
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
os.read(wait_end, 1)
"""


def test_memory_of_compilers_is_not_in_the_peak(tmp_path: Path) -> None:
    with sampled(tmp_path) as child:
        before = child.settle()
        child.run('enter("setup")\n' + START_COMPILER)
        wait_until(lambda: read_samples(child.trace)[-1].compiler_mib is not None, "the name of the compiler")
        child.run('os.write(start_end, b"1")')
        wait_until(lambda: (read_samples(child.trace)[-1].compiler_mib or 0) > 300, "the memory of the compiler")
    (entry,) = summarize_run(tmp_path, nodes=1).memory["cpu"]
    assert entry["peak_mib"] < before + 50
    assert entry["compiler_peak_mib"] == pytest.approx(300, abs=16)


def test_process_is_followed_after_its_parent_is_killed(tmp_path: Path) -> None:
    parent = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', "
        "'import os, time; x = bytearray(100 * 2**20); print(os.getpid(), flush=True); time.sleep(600)'])\n"
        "time.sleep(600)"
    )
    path = tmp_path / "memory/node0.csv"

    def used() -> float:
        samples = read_samples(path)
        return (samples[-1].used_mib or 0.0) if samples else 0.0

    process = start(parent)
    assert process.stdout is not None
    orphan = int(process.stdout.readline())
    with Sampler(path=path, interval_s=INTERVAL_S, root_pid=process.pid):
        try:
            wait_until(lambda: used() > 100, "the memory of the tree")
            process.kill()
            process.wait()
            count = len(read_samples(path))
            wait_until(lambda: len(read_samples(path)) > count + 5, "samples of the orphan")
            alone = [sample.used_mib for sample in read_samples(path)[count + 1 :]]  # the first may be from before
        finally:
            os.kill(orphan, signal.SIGKILL)
        wait_until(lambda: used() < 50, "the end of the orphan")
    assert all(mib is not None and mib > 100 for mib in alone)


def test_killed_agent_leaves_its_trace_without_its_own_memory(tmp_path: Path) -> None:
    path = tmp_path / "memory/node0.csv"
    agent = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from distexp.measure.memory.sampler import Sampler\n"
        f"with Sampler(path=Path({str(path)!r}), interval_s=0.05):\n"
        "    subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=subprocess.PIPE)\n"
        "    block = bytearray(200 * 2**20)\n"  # after the child: until it runs its own program, it shares all memory
        "    time.sleep(600)\n"
    )
    process = start(agent)
    try:
        wait_until(lambda: len(read_samples(path)) > 5 and read_samples(path)[-1].used_mib is not None, "six samples")
    finally:
        process.kill()
        process.wait()
    trace = read_memory_trace(path)
    assert trace.notes == []
    assert trace.samples[-1].used_mib is not None
    assert all(sample.used_mib is None or sample.used_mib < 100 for sample in trace.samples)


def run_on_fake_clock(
    sampler: Sampler,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    cost_s: Callable[[float], float],
    on_wait: Callable[[], object] = lambda: None,
) -> list[float]:
    """Run a sampler for some seconds of a clock that only its waits and readings move.

    Args:
        sampler: The sampler.
        monkeypatch: The fixture of the test.
        seconds: When the sampler is stopped.
        cost_s: Returns the CPU time of a reading that starts at some second.
        on_wait: Called before each wait.

    Returns:
        The seconds at which its samples started.
    """
    start, read = 1000.0, sampler._tree.read
    clock = SimpleNamespace(now=start)
    fake_time = SimpleNamespace(**dict.fromkeys(("time", "monotonic", "thread_time"), lambda: clock.now))

    def wait(timeout_s: float) -> bool:
        on_wait()
        clock.now += max(timeout_s, 0)
        return bool(clock.now > start + seconds - 1e-6)

    def slow_read() -> object:
        clock.now += cost_s(clock.now - start)
        return read()

    monkeypatch.setattr(sampler_module, "time", fake_time)
    monkeypatch.setattr(process_tree, "time", fake_time)
    monkeypatch.setattr(sampler, "_stopped", SimpleNamespace(wait=wait))
    monkeypatch.setattr(sampler._tree, "read", slow_read)
    sampler._run()
    return [sample.unix_time_s - start for sample in read_samples(sampler.path)]


def test_timestamps_do_not_drift_and_the_file_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lengths = tmp_path / "memory/node0.csv", []
    sampler = Sampler(path=path, interval_s=0.5)
    monkeypatch.setattr(sampler, "_limit", CostLimit(float("inf")))

    def read_trace() -> None:
        trace = read_memory_trace(path)
        assert trace.notes == []
        lengths.append(len(trace.samples))

    times = run_on_fake_clock(sampler, monkeypatch, 5.0, lambda second: 1.2 if 1.4 < second < 1.6 else 0.2, read_trace)
    # The slow sample at 1.5 s misses those at 2.0 and 2.5 s. The last one is taken at the end.
    assert times == pytest.approx([0.0, 0.5, 1.0, 1.5, 3.0, 3.5, 4.0, 4.5, 5.0])
    assert lengths == list(range(9))


def test_utilization_is_relative_to_all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cores = tmp_path / "memory/node0.csv", 4
    monkeypatch.setattr(sampler_module, "time", SimpleNamespace(time=time.monotonic, monotonic=time.monotonic))
    busy = "import sys\nprint(flush=True)\nsys.stdin.readline()\nwhile True: pass"
    with started(busy) as shell, Sampler(path=path, interval_s=0.2, cores=cores, root_pid=shell.pid):
        assert shell.stdin is not None
        assert shell.stdout is not None
        shell.stdout.readline()
        (process,) = descendants(shell)
        idle, first = sum(process.cpu_times()[:2]), wait_for_samples(path, 2)
        shell.stdin.write(b"\n")
        shell.stdin.flush()
        wait_until(lambda: sum(process.cpu_times()[:2]) > idle + 0.5, "half a second of CPU time")
        least = sum(process.cpu_times()[:2]) - idle
        last = wait_for_samples(path, 2)
        most = sum(process.cpu_times()[:2]) - idle
    cpu_s = sum(
        (sample.utilization_pct or 0.0) / 100 * cores * (sample.unix_time_s - before.unix_time_s)
        for before, sample in pairwise(read_samples(path)[first - 1 : last])
    )
    assert 0.95 * least - 0.05 <= cpu_s <= 1.05 * most + 0.05


def wait_for_samples(path: Path, count: int) -> int:
    """Wait for further samples; return the number of all. The first of them may have started before."""
    before = len(read_samples(path))
    wait_until(lambda: len(read_samples(path)) >= before + count, f"{count} more samples")
    return len(read_samples(path))


def test_pss_is_read_for_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel walks all page tables for it. Here each process takes 10 ms of a clock that stands for CPU time."""
    held = "import time; x = b'1' * (32 * 2**20); print(flush=True); time.sleep(600)"
    clock, names, read = SimpleNamespace(now=0.0), Counter[str](), process_tree.read_proc

    def slow_read(name: str) -> bytes:
        names[Path(name).name] += 1
        clock.now += 0.01 if name.endswith("smaps_rollup") else 0.0
        return read(name)

    fake_time = SimpleNamespace(monotonic=lambda: clock.now, thread_time=lambda: clock.now)
    monkeypatch.setattr(process_tree, "time", fake_time)
    monkeypatch.setattr(process_tree, "read_proc", slow_read)
    readings = []
    with started(held, count=3) as shell:
        assert shell.stdout is not None
        for _ in range(3):
            shell.stdout.readline()
        tree = ProcessTree(shell.pid)
        for _ in range(100):
            readings.append(tree.read().memory)
            clock.now += 0.5
    assert all(memory is not None and memory.mib > 3 * 32 for memory in readings)
    exact = [number for number, memory in enumerate(readings) if memory is not None and memory.source == "pss"]
    assert exact == list(range(0, 100, 6)), "30 ms every 3 s"
    assert (names["statm"], names["smaps_rollup"]) == (3 * 100, 3 * len(exact))


def test_expensive_samples_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sampler = Sampler(path=tmp_path / "memory/node0.csv", interval_s=0.05)
    times = run_on_fake_clock(sampler, monkeypatch, 1.0, lambda second: 0.018)
    # After three samples the cost is known, and 18 ms are 10 % of 180 ms. The last sample is taken at the end.
    assert times == pytest.approx([0.0, 0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "a sample costs 18 ms of CPU time, more than 10% of 0.05 s: some samples are skipped" in message


def test_failure_is_reported_once_and_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "memory").write_text("not a folder")
    with Sampler(path=tmp_path / "memory/node0.csv", interval_s=INTERVAL_S) as sampler:
        sampler._thread.join()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "cannot be written" in message
    summary = summarize_run(tmp_path, nodes=1)
    assert summary.memory["cpu"][0]["peak_mib"] is None
    assert summary.memory["gpu"] == []
    assert len(summary.notes) == 1


def test_a_run_without_a_free_thread_has_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with Sampler(path=tmp_path / "node0.csv", interval_s=INTERVAL_S):
        pass
    assert "can't start new thread: the limit of processes may be reached: raise it" in capsys.readouterr().err


def test_lost_samples_leave_a_gap(
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
        wait_until(lambda: len(read_samples(path)) > 4, "five samples")
    monkeypatch.undo()
    assert "2 line(s) are not samples" in read_memory_trace(path).notes[0]
    assert capsys.readouterr().err.count("a sample is lost") == 1


def test_interval_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"interval_s=0 must be greater than 0"):
        Sampler(path=tmp_path / "node0.csv", interval_s=0)
