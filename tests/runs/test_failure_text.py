"""Why a run failed, as one line."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

from distexp.cli.errors import explain_os_error
from distexp.exceptions import ConfigError
from distexp.runs.record_sections import RunError
from distexp.runs.texts import (
    MAX_MESSAGE,
    describe_disk_error,
    failure_text,
    full_disk_error,
    is_full_disk,
    shorten_message,
)
from tests.helpers.records import record


def test_failure_text_has_type_and_phase_except_for_invalid_runs() -> None:
    run = record(0)
    assert failure_text(run) == ""
    run.status, run.error = "failed", RunError("ValueError", "bad value", "setup")
    assert failure_text(run) == "ValueError in phase setup: bad value"
    run.status, run.error = "invalid", RunError("ConfigError", "bad value")
    assert failure_text(run) == "bad value"


CHECKPOINT_ERROR = """CheckpointException ranks:dict_keys([0])
Traceback (most recent call last): (RANK 0)
  File "utils.py", line 281, in all_gather
    result = map_fun()
             ^^^^^^^^^
RuntimeError: PytorchStreamReader failed reading file .format_version: invalid header or archive is corrupted.
"""

LOADER_ERROR = """Caught DataError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 358, in _worker_loop
    data = fetcher.fetch(index)
distexp.data.images.DataError: cannot read a.jpg
"""


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        (
            "CheckpointException",
            CHECKPOINT_ERROR,
            "RuntimeError: PytorchStreamReader failed reading file .format_version: invalid header or archive is "
            "corrupted.",
        ),
        ("DataError", LOADER_ERROR, "cannot read a.jpg"),
        (
            "RuntimeError",
            "\nCUDA error: out of memory\nCUDA kernel errors may be reported later",
            "CUDA error: out of memory",
        ),
        (
            "RuntimeError",
            "Error(s) in loading state_dict for GPT:\n\tMissing key(s): a\n\tb",
            "Error(s) in loading state_dict for GPT: Missing key(s): a",
        ),
        ("ConfigError", "one is wrong\ntwo is wrong", "one is wrong\ntwo is wrong"),
        ("KeyError", "'a'", "'a'"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: 8 bytes",
            "DefaultCPUAllocator: can't allocate memory: 8 bytes",
        ),
        ("RuntimeError", "", ""),
    ],
)
def test_a_message_of_a_library_becomes_one_line(name: str, message: str, text: str) -> None:
    assert shorten_message(RunError(name, message)) == text


def test_a_long_message_is_cut_between_words() -> None:
    short = shorten_message(RunError("RuntimeError", "abcdefghi " * 60))
    assert MAX_MESSAGE - 15 < len(short) <= MAX_MESSAGE
    assert short.endswith("abcdefghi…")
    assert len(shorten_message(RunError("RuntimeError", "a" * 900))) == MAX_MESSAGE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_cache_that_cannot_be_written_keeps_its_folder_and_its_hint(number: int, tmp_path: Path) -> None:
    """The disk of the run has room, so its folder would be wrong."""
    message = (
        f"cannot write to the cache directory /c ({os.strerror(number)}): set the environment variable DISTEXP_CACHE"
    )
    error = ConfigError(message)
    assert is_full_disk(error)
    found = full_disk_error(error, tmp_path, "setup", 1)
    assert (found.type, found.message) == ("DiskFull", message)


@pytest.mark.parametrize(
    ("hard", "hint"),
    [
        (resource.RLIM_INFINITY, "raise the limit with ulimit -f unlimited"),
        (400, "use a shell without the limit (ulimit -f)"),
    ],
)
def test_a_limit_of_the_size_of_files_holds_on_every_disk(
    hard: int, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    largest = f"a file in {tmp_path} would exceed the largest size of a file"
    on_disk = f"{largest} on its disk: start again on another disk with hydra.sweep.dir"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, hard))
    assert full_disk_error(error, tmp_path, "save").message == on_disk
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, hard))
    assert full_disk_error(error, tmp_path, "save").message == f"{largest}: {hint}"
    assert describe_disk_error(error) == f"File too large: {hint}"
    assert explain_os_error(error, resumes=False, key="hydra.sweep.dir") == f"File too large: {hint}"
