"""A child process that executes code on request while a sampler watches it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from distexp.measure.memory.sampler import Sampler
from distexp.runs.memory_trace import MemorySample, read_memory_trace

INTERVAL_S = 0.05
DEADLINE_S = 300.0

# Only the standard library: shared pages of NumPy count more in this process when other Python processes end.
CHILD = """
import json, mmap, os, sys, time
events = open(sys.argv[1], "a")
def enter(phase):
    events.write(json.dumps({"unix_time_s": time.time(), "phase": phase}) + "\\n")
    events.flush()
def hold(mib):
    return b"1" * (mib * 2**20)
for line in sys.stdin:
    exec(json.loads(line))
    print("done", flush=True)
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll a condition; fail after a deadline that only a broken program misses."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:.0f} s: {what}"
        time.sleep(INTERVAL_S / 2)


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a Python process with pipes."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def started(code: str, *arguments: str, count: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python processes below a shell, and yield the shell.

    The shell is a root for a sampler. Its tree has no process of another test, for example of a Slurm cluster.
    """
    command = 'n=$1; shift; i=0; while [ $i -lt $n ]; do "$@" <&3 & i=$((i+1)); done; exec 3<&-; wait'
    shell = subprocess.Popen(
        ["sh", "-c", f"exec 3<&0; {command}", "sh", str(count), sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield shell
    finally:
        for process in descendants(shell):
            with suppress(psutil.NoSuchProcess):  # it ends by itself when its parent is killed
                process.kill()
        shell.communicate()


def descendants(root: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the processes below a process."""
    return psutil.Process(root.pid).children(recursive=True)


def read_samples(path: Path) -> list[MemorySample]:
    """Return the samples of a trace that may not exist yet."""
    return read_memory_trace(path).samples if path.exists() and path.stat().st_size else []


def pss_below_mib(root: subprocess.Popen[bytes]) -> float:
    """Return the PSS of all processes below a process, as the kernel reports it now."""
    total = 0
    for process in descendants(root):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total / 2**20


class SampledProcess:
    """A child process and the trace of its memory."""

    def __init__(self, trace: Path, shell: subprocess.Popen[bytes]) -> None:
        self.trace, self.shell = trace, shell

    def run(self, code: str) -> None:
        """Execute code in the child and wait for its end."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(json.dumps(code).encode() + b"\n")
        self.shell.stdin.flush()
        assert self.shell.stdout.readline() == b"done\n"

    def settle(self) -> float:
        """Wait until the newest sample is what the kernel reports at that time; return its MiB."""

        def agrees() -> bool:
            samples, kernel_mib = read_samples(self.trace), pss_below_mib(self.shell)
            used = samples[-1].used_mib if samples else None
            return used is not None and abs(used - kernel_mib) < max(2.0, 0.01 * kernel_mib)

        count = len(read_samples(self.trace))
        wait_until(lambda: len(read_samples(self.trace)) > count + 1, "two more samples")
        wait_until(agrees, "a sample that agrees with the kernel")
        used = read_samples(self.trace)[-1].used_mib
        assert used is not None
        return used


@contextmanager
def sampled(run_dir: Path) -> Iterator[SampledProcess]:
    """Sample a child process until the block ends."""
    trace = run_dir / "memory/node0.csv"
    with (
        started(CHILD, str(run_dir / "events.jsonl")) as shell,
        Sampler(path=trace, interval_s=INTERVAL_S, root_pid=shell.pid),
    ):
        yield SampledProcess(trace, shell)
