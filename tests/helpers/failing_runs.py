"""Data sets that fail on purpose, used as a custom package: ``dataset._target_=failing_runs.NAME``.

Each loads the generated SQuAD sample. It fails when rank ``options.rank`` reads its sample number ``options.at``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from distexp.config import DatasetConfig, ModelConfig
from distexp.data import squad_sample
from distexp.data.base import Sample, Samples, TaskData


class FailingSamples:
    """Samples of which one causes a failure when it is read."""

    def __init__(self, samples: Samples, at: int, failure: Callable[[Sample], Sample]) -> None:
        self.samples, self.left, self.failure = samples, at, failure

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        self.left -= 1
        sample = self.samples[index]
        return self.failure(sample) if self.left == 0 else sample


def failing(failure: Callable[[Sample], Sample]) -> Callable[..., TaskData]:
    def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
        options: dict[str, Any] = dict(dataset.options)
        data = squad_sample.load(replace(dataset, options={}), model, seed)
        if int(os.environ["RANK"]) != options.get("rank", 0):
            return data
        return replace(data, train=FailingSamples(data.train, options.get("at", 40), failure))

    return load


def _raise(sample: Sample) -> Sample:
    raise ValueError("this sample is broken")


def _change_token(sample: Sample) -> Sample:
    """Return a sample with a token that no vocabulary has, so that the embedding of the model raises an error."""
    return {**sample, "input_ids": torch.full_like(sample["input_ids"], 10**9)}


def _kill(sample: Sample) -> Sample:
    os.kill(os.getpid(), signal.SIGKILL)
    return sample


def _segfault(sample: Sample) -> Sample:
    os.kill(os.getpid(), signal.SIGSEGV)
    return sample


def _hang(sample: Sample) -> Sample:
    time.sleep(600)
    return sample


def _eat_memory(sample: Sample) -> Sample:
    """Allocate memory until the allocator reports a failure."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    held = []
    while True:
        held.append(torch.ones(64 << 20))


def _eat_until_killed(sample: Sample) -> Sample:
    """Allocate 8 GiB, at 1 GiB a second, and wait for the kill, which may come late on a busy machine."""
    held = []
    for _ in range(256):
        held.append(torch.ones(8 << 20))
        time.sleep(0.03)
    time.sleep(600)
    return sample


class Slow:
    """Samples that take some time each. After a number of them, the rank waits until a file exists, the gate."""

    def __init__(self, samples: Samples, *, delay: float = 0.025, at: int = 0, gate: str = os.devnull) -> None:
        self.samples, self.delay, self.left, self.gate = samples, delay, at, Path(gate)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        time.sleep(self.delay)
        self.left -= 1
        while self.left < 0 and not self.gate.exists():
            time.sleep(0.05)
        return self.samples[index]


def slow(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    data = squad_sample.load(replace(dataset, options={}), model, seed)
    return replace(data, train=Slow(data.train, **dataset.options))


def held(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load slow samples. After the first twelve, a rank waits for the file ``options.until``."""
    return slow(replace(dataset, options={"at": 12, "gate": dataset.options["until"]}), model, seed)


def reports_threads(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load the samples, and print the threads of all libraries."""
    print(torch.__config__.parallel_info(), flush=True)
    return squad_sample.load(dataset, model, seed)


fails = failing(_raise)
fails_in_model = failing(_change_token)
killed = failing(_kill)
segfaults = failing(_segfault)


def exits(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load samples. One of them ends the process with the exit code ``options.code``."""

    def end(sample: Sample) -> Sample:
        os._exit(dataset.options["code"])

    return failing(end)(dataset, model, seed)


hangs = failing(_hang)
eats_memory = failing(_eat_memory)
eats_until_killed = failing(_eat_until_killed)
