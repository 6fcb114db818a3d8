"""One rank of a run; by hand: ``torchrun --nproc-per-node 2 -m distexp.worker RUN_DIR``.

It imports no torch before its log is open. Its error goes to a file next to the log.
"""

import argparse
import faulthandler
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from distexp.config import ConfigError, custom_code
from distexp.exceptions import MAX_CAUSES, TRACE_VARIABLE, SearchError, text_of, text_or_repr
from distexp.runs import attempts, texts
from distexp.runs.events import Events, ProgressWriter
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import ALLOCATOR, RANK_ERROR, RANK_LOG, SPEC
from distexp.system import environment_variables, files, processes
from distexp.worker.preload import check_torch


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one rank that torchrun has started."""
    environment_variables.captured_environment()  # before torch and DeepSpeed set some of these variables
    usage = "torchrun --nproc-per-node N -m distexp.worker RUN_DIR"
    parser = argparse.ArgumentParser("distexp.worker", usage=usage, description="Run one rank of a run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun")
    run_worker(options.run_dir.absolute(), launched=False)


def run_worker(run_dir: Path, *, launched: bool) -> NoReturn:
    """Run one rank and exit with 0, or 1 after an error. The launcher, if there is one, writes the record."""
    started = time.time()
    rank, node = int(os.environ["RANK"]), int(os.environ["GROUP_RANK"])
    events = None
    try:
        redirect_output(RANK_LOG.path(run_dir, node, rank))
        processes.die_with_parent()
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)  # The agent sends it to get the stacks when a run hangs.
        events = Events(run_dir, enabled=rank == 0, progress=ProgressWriter(run_dir, node, rank))
        check_torch()
        from distexp.worker.rank import run_rank

        run_rank(run_dir, events, started, launched=launched)
    except BaseException as raised:
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a data loader process ends.
            error = loader_error(raised)
            phase = events.phase if events else "setup"
            try:
                cause = describe_error(error, run_dir, phase, rank)
            except Exception:  # Custom code may define an error that no code can inspect.
                cause = RunError(type(error).__name__, "its message cannot be printed", phase, rank)
            texts.release_reserve(run_dir)  # The disk may be full, and what follows needs space.
            attempts.write_error_file(RANK_ERROR.path(run_dir, node, rank), cause)
            print_error(error)
            _write_allocator_peaks(run_dir, node, rank)
        finally:
            # Other ranks may hang in a collective, and an orderly exit would hang too.
            os._exit(1)
    # Everything is written, and every rank knows. An orderly exit aborts now and then, on threads that gloo's and
    # DDP's static objects still hold.
    processes.end_at_once(0)


def redirect_output(path: Path, mode: str = "w") -> None:
    """Send the output of this process to a file, including that of C libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def print_error(error: BaseException) -> None:
    """Print the messages and the cause of a ConfigError, and the traceback of any other error or on request."""
    print(attempts.ERROR_HEADING, file=sys.stderr)
    if isinstance(error, ConfigError) and os.environ.get(TRACE_VARIABLE) != "1":
        print("\n".join(f"{type(error).__name__}: {message}" for message in error.errors), file=sys.stderr)
        if error.__cause__ is not None:
            print(*traceback.format_exception_only(error.__cause__)[-1].splitlines()[:1], file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stderr.flush()


def loader_error(error: BaseException) -> BaseException:
    """Return the error of a data loader process, if another one hides it; else the error.

    torch passes the message by name if the class has the attribute ``message``. That of a group takes no such argument.
    Tensors of a process that ended cannot be received.
    """
    if isinstance(error, FileNotFoundError | ConnectionError | EOFError) or "ancdata" in text_of(error):
        return lost_loader(error) or error
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "reraise")
    wrapper: Any = next((frame.f_locals.get("self") for frame in frames), None)
    if not hasattr(wrapper, "exc_msg") or text_of(error).startswith("Caught "):
        return error
    message = f"Caught {wrapper.exc_type.__name__} {wrapper.where}.\nOriginal {wrapper.exc_msg}"
    return RuntimeError(message).with_traceback(error.__traceback__)


LOADER_END_S = 1.0
"""Time for the end of a process that has already closed its connections."""


def lost_loader(error: BaseException) -> RuntimeError | None:
    """Return the error about a process of the data loader that raised ``error``, if one ended early, or None."""
    torch, deadline = sys.modules.get("torch"), time.monotonic() + LOADER_END_S
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    loaders: list[Any] = [owner for owner in owners if type(owner).__name__ == "_MultiProcessingDataLoaderIter"]
    while torch is not None:
        try:
            torch._C._error_if_any_worker_fails()
        except RuntimeError as found:
            return found
        # Torch's function passes over exit code 0, as after a KeyboardInterrupt.
        if ended := {worker.pid for loader in loaders for worker in loader._workers if not worker.is_alive()}:
            return RuntimeError(f"DataLoader worker (pid(s) {', '.join(map(str, ended))}) exited unexpectedly")
        if time.monotonic() > deadline or not processes.descendants(os.getpid(), recursive=False):
            return None
        time.sleep(0.05)
    return None


def describe_error(error: BaseException, run_dir: Path, phase: str, rank: int) -> RunError:
    """Return the error of a rank for its record."""
    if type(error).__name__ == "CheckpointException" and (failures := getattr(error, "failures", None)):
        rank, (error, _) = min(failures.items(), key=lambda failure: failure[0])  # Torch raises it on all ranks.
    missing = error.filename if isinstance(error, FileNotFoundError) else None
    is_ours = isinstance(missing, str) and Path(missing).is_relative_to(run_dir)
    if is_ours and not (run_dir / SPEC).exists():
        deleted = f"the folder {run_dir} was deleted during the run: type the command of the run again"
        return RunError(type(error).__name__, deleted, phase, rank)
    place, is_custom = None, False
    with suppress(Exception):  # The error must be written even if its place in custom code cannot be determined.
        trusted = RunSpec.read(run_dir).config.trusted_packages
        is_custom = custom_code.is_raised_by_custom_code(error, trusted)
        place = custom_code.custom_code_place(error, trusted) or None
    # Libraries do not always name a full disk, so the free space is checked after a failed save.
    is_lost_save = phase == "save" and not is_custom and files.free_bytes(run_dir) < files.FULL_BYTES
    if phase == "save" and not is_custom and not is_lost_save:
        error = texts.explain_lost_write(error, run_dir)
    if texts.is_full_disk(error, by_number=is_custom) or is_lost_save:
        return texts.full_disk_error(error, run_dir, phase, rank, place)
    oom = sys.modules.get("distexp.measure.memory.rank_memory")  # None if the error came before torch was imported
    memory = oom.report_of(error) if oom is not None else None
    if memory or isinstance(error, ConfigError):
        place = None
    if isinstance(error, SearchError):  # All ranks raise it.
        rank, place = error.rank, error.place
    name = custom_code.error_type(error)
    return RunError(name, message_of(error), phase, rank, place=place, memory=memory)


MAX_MESSAGE = 10_000
"""Characters of a message in a record. The log has all of them."""


def message_of(error: BaseException) -> str:
    """Return the message of an error without tracebacks, or its start if it is very long."""
    message = without_tracebacks(text_or_repr(error))
    with suppress(Exception):  # as for its place
        message = ". ".join(filter(None, (message, custom_code.hidden_library(error))))
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}... (cut)"


GROUP_LINE = re.compile(r"^ *\| (\S.*)$", re.MULTILINE)
"""A message or a heading in the traceback of a group of errors, whose other lines have more blanks after the bar."""


def without_tracebacks(message: str) -> str:
    """Return a message of an error without the traceback of its cause, which the log has; the cause itself stays.

    Loaders and distributed checkpoints put the tracebacks of other processes into their messages.
    """
    if message.startswith("Caught ") and "Exception Group Traceback" in message:
        group, *causes = [line for line in GROUP_LINE.findall(message) if "Traceback (most recent" not in line]
        shown = [*causes[:MAX_CAUSES], *(["..."] if len(causes) > MAX_CAUSES else [])]
        return f"{group.partition(': ')[2]}: {'; '.join(shown)}"
    before, found, last = message.rpartition("Traceback (most recent call last):")
    lines = last.splitlines()[1:]
    start = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), None)
    if not found or start is None:
        return message
    cause = "\n".join(lines[start:]).strip()
    context = before.partition("Traceback (most recent call last):")[0]
    if context.startswith("Caught "):  # by a worker of a DataLoader, which raises an error of the same type again
        return cause.partition(": ")[2] or cause
    return f"{' '.join(context.removesuffix('Original ').split()).rstrip('.:')}: {cause}".removeprefix(": ")


def _write_allocator_peaks(run_dir: Path, node: int, rank: int) -> None:
    """Write the allocator's peaks of a failed rank. They matter most for a run that was out of memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        from distexp.measure.memory.rank_memory import allocator_peaks

        files.write_json(ALLOCATOR.path(run_dir, node, rank), allocator_peaks(torch.device("cuda"), rank))


if __name__ == "__main__":
    main()
