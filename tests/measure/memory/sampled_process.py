"""A child process that executes code on request while a sampler watches it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from distexp.measure.memory.sampler import Sampler
from distexp.runs.memory_trace import MemorySample, read_memory_trace

INTERVAL_S = 0.05
DEADLINE_S = 60.0

CHILD = """
import json, mmap, os, sys, time
import numpy as np
events = open(sys.argv[1], "a")
def enter(phase):
    events.write(json.dumps({"unix_time_s": time.time(), "phase": phase}) + "\\n")
    events.flush()
def hold(mib):
    return np.ones(mib * 2**20, dtype=np.uint8)
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
    """Start a Python process."""
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


def read_samples(path: Path) -> list[MemorySample]:
    """Return the samples of a trace that may not exist yet."""
    return read_memory_trace(path).samples if path.exists() and path.stat().st_size else []


def pss_of_children_mib() -> float:
    """Return the PSS of all descendants of this process, as the kernel reports it now."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return total / 2**20


class SampledProcess:
    """A child process and the trace of its memory."""

    def __init__(self, run_dir: Path) -> None:
        self.trace = run_dir / "memory/node0.csv"
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(run_dir / "events.jsonl")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, code: str) -> None:
        """Execute code in the child and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(code).encode() + b"\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == b"done\n"

    def settle(self) -> float:
        """Wait until the newest sample is what the kernel reports at that time; return its MiB."""

        def agrees() -> bool:
            samples, kernel_mib = read_samples(self.trace), pss_of_children_mib()
            used = samples[-1].used_mib if samples else None
            return used is not None and abs(used - kernel_mib) < max(2.0, 0.01 * kernel_mib)

        count = len(read_samples(self.trace))
        wait_until(lambda: len(read_samples(self.trace)) > count + 1, "two more samples")
        wait_until(agrees, "a sample that agrees with the kernel")
        used = read_samples(self.trace)[-1].used_mib
        assert used is not None
        return used

    def end(self) -> None:
        """End the child."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def sampled(run_dir: Path) -> Iterator[SampledProcess]:
    """Sample a child of this process until the block ends."""
    with Sampler(path=run_dir / "memory/node0.csv", interval_s=INTERVAL_S):
        child = SampledProcess(run_dir)
        try:
            yield child
        finally:
            child.end()
