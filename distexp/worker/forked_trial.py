"""Processes that try something before a training: one per rank, in a separate process group.

A rank that runs out of memory, or whose code does not compile, leaves the others in a collective, from which nothing
could free them. So each rank forks a process for the trials and waits for it. If one of them ends, all ranks end
theirs. The ranks themselves use no GPU until the trials are over, so the training starts in a clean process.
"""

import json
import os
import signal
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn

import torch

from distexp.config import ConfigError
from distexp.config.custom_code import custom_code_place
from distexp.distributed.context import Context
from distexp.distributed.process_group import Store, join, open_store, sub_store
from distexp.exceptions import SearchError
from distexp.runs import texts
from distexp.runs.record import RunSpec
from distexp.runs.run_dir import SEARCH_LOG
from distexp.strategies.base import load_strategy
from distexp.system import cgroups, processes, seeding
from distexp.worker.__main__ import redirect_output
from distexp.worker.compile_cache import use_compile_cache

LONGEST = timedelta(days=1)  # Timeout for a message of another rank. The agents end a run that hangs earlier.
MEMORY_CODE = 77  # exit code of a process that ran out of memory
LATE = "late"  # key of a store: rank 0 ended the processes because their time was over


@dataclass(frozen=True)
class ForkedTrial(ABC):
    """A process of each rank that tries something."""

    spec: RunSpec
    run_dir: Path
    store: Store  # that of ``store_of``; its content is the same on all ranks

    purpose: ClassVar[str]  # what failed, in an error message
    hint: ClassVar[str]  # what to do then

    @property
    @abstractmethod
    def prefix(self) -> str:
        """Return the prefix of the keys in the store, another one for each trial."""

    @abstractmethod
    def try_in_process(self, store: Store, context: Context) -> None:
        """Try something in the new process; a collective of these processes."""

    def is_late(self, deadline: float) -> bool:
        """Return on rank 0 whether the time of the processes is over. It is called while they run."""
        return time.monotonic() > deadline

    def run_processes(self, deadline: float = float("inf")) -> list[dict[str, Any]]:
        """Run the processes on all ranks; return how each ended: its exit ``code``, None if others ended it, and more.

        Rank 0 ends the processes if they are late, and sets the key LATE.
        """
        rank, world_size = int(os.environ["RANK"]), self.spec.world_size
        with TemporaryDirectory(prefix="distexp-search-") as folder:
            parent, kills_before, pid = os.getpid(), cgroups.oom_kills(), os.fork()
            if pid == 0:
                self._run_process(parent, Path(folder))
            code = explain_code(self._wait(pid, deadline, watches=rank == 0), kills_before)
            error = Path(folder, "error.json")
            known = code not in (0, None) and error.exists()
            self.store.set(f"end/{rank}", error.read_text() if known else json.dumps({"code": code}))
        if code not in (0, None):
            self.store.set("stop", "")
        self.store.wait([f"end/{number}" for number in range(world_size)], LONGEST)
        return [json.loads(self.store.get(f"end/{number}")) for number in range(world_size)]

    def _wait(self, pid: int, deadline: float, *, watches: bool) -> int | None:
        """Wait for the process of this rank; return its exit code, or None if it was ended: late, or another failed."""
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            late = watches and self.is_late(deadline)
            if late:
                self.store.set(LATE, "")
                self.store.set("stop", "")
            if late or self.store.check(["stop"]):
                os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                return None if code == -signal.SIGKILL else code  # it may have ended just before
            time.sleep(0.05)

    def _run_process(self, parent: int, folder: Path) -> NoReturn:
        code = 1
        try:
            processes.die_with_parent(parent=parent)
            node, rank = int(os.environ["GROUP_RANK"]), int(os.environ["RANK"])
            redirect_output(SEARCH_LOG.path(self.run_dir, node, rank), mode="a")
            store = sub_store(self.prefix, open_store(self.spec, is_forked=True))
            group, config = sub_store("group", store), self.spec.config
            overhead_mib = load_strategy(config).total_overhead_mib(config)
            context = replace(join(self.spec, self.run_dir, group, overhead_mib=overhead_mib), run_dir=folder)
            # After a fork, the first call repairs the thread pool of torch. Two threads must not do that at once.
            torch.set_num_threads(config.cluster.cpus_per_worker or 1)
            if config.train.compile:
                use_compile_cache()
            seeding.seed_everything(config.train.seed)
            self.try_in_process(store, context)
            # Wait until all ranks have left their last collective. Then the end of one process disturbs no other.
            if store.add("finished", 1) == context.world_size:
                store.set("all finished", "")
            store.wait(["all finished"], LONGEST)
            code = 0
        except BaseException as error:
            traceback.print_exception(error)
            code = MEMORY_CODE if is_out_of_memory(error) else 1
            content = {"code": code, "time": time.time(), "type": type(error).__name__, "message": str(error)}
            with suppress(Exception):  # as for the error of a rank
                content["place"] = custom_code_place(error, self.spec.config.trusted_packages) or None
            content["errors"] = error.errors if isinstance(error, ConfigError) else None
            content["cause"] = getattr(error, "cause", None)  # of a CompilationError
            (folder / "error.json").write_text(json.dumps(content))
        finally:
            os._exit(code)

    def raise_first(self, ends: Sequence[dict[str, Any]]) -> NoReturn:
        """Raise the error of the rank that failed first. Later ones are its consequences."""
        first, end = first_failure(ends)
        if end.get("errors"):
            raise ConfigError(end["errors"])
        code = f"exit code {end['code']}" if end["code"] > 0 else f"terminated by {processes.signal_name(-end['code'])}"
        detail = f"{end['type']}: {end['message']}" if "type" in end else code
        message = f"{self.purpose} failed on rank {first} ({detail}): see {log_of(first)}, or {self.hint}"
        raise SearchError(message, first, end.get("place"))


def log_of(rank: int) -> str:
    """Return the log of the process of a rank, relative to the run directory."""
    return f"logs/node*/rank{rank}.search.log"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory is full."""
    return texts.out_of_memory_status(type(error).__name__, str(error)) is not None


def explain_code(code: int | None, kills_before: Mapping[str, int]) -> int | None:
    """Return how a process ended: MEMORY_CODE if the kernel killed it for memory, or may have done so."""
    is_counted = not kills_before or cgroups.have_increased(kills_before, cgroups.oom_kills())
    return MEMORY_CODE if code == -signal.SIGKILL and is_counted else code


def ran_out_of_memory(ends: Sequence[dict[str, Any]]) -> bool:
    """Return whether a process ran out of memory."""
    return any(end["code"] == MEMORY_CODE for end in ends)


def first_failure(ends: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    """Return the rank that failed first, and how it ended."""
    failed = [rank for rank, end in enumerate(ends) if end["code"]]
    first = min(failed, key=lambda rank: float(ends[rank].get("time", 0)))
    return first, ends[first]
