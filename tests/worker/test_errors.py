"""The error of a rank, as written to its record."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from traceback import StackSummary
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError
from torch._utils import ExceptionWrapper
from torch.distributed.checkpoint import CheckpointException
from torch.utils.data import DataLoader

from distexp.config.custom_code import shorten_errors
from distexp.exceptions import ConfigError
from distexp.system.files import append_line
from distexp.worker.__main__ import describe_error, loader_error, message_of, print_error, without_tracebacks
from tests.helpers.runs import make_spec

TORCH_ERROR = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
WRAPPED = RuntimeError("CheckpointException\nTraceback\nOSError: [Errno 28] No space left on device")
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
QUOTA = OSError(errno.EDQUOT, "Disk quota exceeded")
SAFETENSORS = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
LOW, HIGH = 300 * 1024, 1 << 30  # free bytes


@pytest.fixture
def spec_dir(tmp_path: Path) -> Path:
    make_spec().write(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "case",
    [
        (
            "save",
            LOW,
            TORCH_ERROR,
            "the disk of {run} is full (300 KiB free): make room, or start again on another",
        ),
        ("save", LOW, WRAPPED, "the disk of {run} is full (300 KiB free): make room, or start again on another"),
        ("eval", LOW, NO_SPACE, "the disk of {run} is full (300 KiB free): make room, or start again on another"),
        ("train", HIGH, QUOTA, "the disk quota of {run} is exhausted: make room, or start again on another disk"),
        ("train", HIGH, NO_SPACE, "a disk is full, but not that of {run} (1,024 MiB free): make room in "),
        ("train", HIGH, OSError(errno.ENOSPC, "No space", "/dev/shm/x"), "the disk of /dev/shm is full ("),
        ("save", HIGH, SAFETENSORS, "the disk of {run} is full (1,048,576 KiB free after the incomplete files were "),
    ],
)
def test_a_full_disk_is_named(
    case: tuple[str, int, Exception, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase, free, error, message = case
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = describe_error(error, tmp_path, phase, rank=1)
    assert (found.type, found.phase, found.rank) == ("DiskFull", phase, 1)
    assert found.message.startswith(message.format(run=tmp_path))
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("phase", "free", "error"), [("save", HIGH, RuntimeError("shape '[2]' is invalid")), ("train", 0, TORCH_ERROR)]
)
def test_another_error_is_kept(
    phase: str, free: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = describe_error(error, tmp_path, phase, rank=1)
    assert (found.type, found.message) == ("RuntimeError", str(error))


def test_a_folder_that_was_deleted_during_the_run_is_named(spec_dir: Path) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", f"{spec_dir}/metrics.jsonl")
    assert describe_error(error, spec_dir, "save", rank=0).message == str(error), "the folder exists"
    shutil.rmtree(spec_dir)
    found = describe_error(error, spec_dir, "save", rank=0)
    assert found.message == f"the folder {spec_dir} was deleted during the run: type the command of the run again"
    other = FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/rows")
    assert describe_error(other, spec_dir, "train", rank=0).message == str(other)


def test_the_rank_that_could_not_save_is_named_by_all_ranks(tmp_path: Path) -> None:
    error = CheckpointException("save", {1: (OSError(errno.EMFILE, "Too many open files"), StackSummary())})
    found = describe_error(error, tmp_path, "save", rank=0)
    assert (found.type, found.rank, found.message) == ("OSError", 1, "[Errno 24] Too many open files")


@pytest.mark.parametrize("error", [TORCH_ERROR, RuntimeError("basic_ios::clear: iostream error")])
def test_a_file_that_torch_cannot_write_is_named_and_an_exhausted_quota_found(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The free space of a disk is not that of a quota."""
    folder = tmp_path / "checkpoints" / ".step-00000004.tmp"
    folder.mkdir(parents=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=HIGH))
    found = describe_error(error, tmp_path, "save", rank=1)
    assert found.type == "RuntimeError"
    assert found.message == (
        f"torch could not write a file in {folder}: check the quota of its disk, and how much is free ({error})"
    )
    assert not list(folder.iterdir())

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", refuse)
    found = describe_error(error, tmp_path, "save", rank=1)
    assert found.type == "DiskFull"
    assert found.message.startswith(f"the disk quota of {folder} is exhausted: make room, or ")


def raised_by_custom_code(error: Exception, *, in_loader: bool) -> BaseException:
    """Return an error with the traceback of custom code, or as torch raises it again for a data loader process."""
    with pytest.raises(type(error)) as caught:
        exec(compile("raise error", "/home/user/mine/dataset.py", "exec"), {"error": error})
    if not in_loader:
        return caught.value
    wrapper = ExceptionWrapper((caught.type, caught.value, caught.tb), "in DataLoader worker process 0")
    with pytest.raises((type(error), RuntimeError, TypeError)) as again:
        wrapper.reraise()
    return again.value


@pytest.mark.parametrize("in_loader", [False, True])
@pytest.mark.parametrize(
    ("error", "full"),
    [
        (NO_SPACE, "in the folders of caches, or where mine/dataset.py:1 writes"),
        (QUOTA, "the disk quota of the folder that mine/dataset.py:1 writes to is exhausted: make room, or "),
        (OSError(errno.EFBIG, "File too large"), "a file in the folder that mine/dataset.py:1 writes to would exceed "),
        (ValueError("File too large: picture of 12 MB, limit 10 MB"), None),
        (RuntimeError("the replay buffer has No space left on device"), None),
        (OSError("Disk quota exceeded for user bob in row 3"), None),
    ],
)
def test_an_error_of_custom_code_is_a_full_disk_only_by_its_number(
    error: Exception, full: str | None, in_loader: bool, spec_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=HIGH))
    found = describe_error(raised_by_custom_code(error, in_loader=in_loader), spec_dir, "train", rank=1)
    assert found.place == "mine/dataset.py:1"
    assert found.type == ("DiskFull" if full else type(error).__name__)
    assert (full or str(error)) in found.message


@pytest.mark.parametrize(
    "error",
    [
        ValueError("row 9 is odd"),
        json.JSONDecodeError("Expecting value", '{"price": }', 10),
        UnicodeDecodeError("utf-8", b"na\xefve", 2, 3, "invalid continuation byte"),
        KeyError("price"),
        ExceptionGroup("2 shards failed", [ValueError("shard 3 is empty"), ExceptionGroup("of 2", [KeyError("k")])]),
    ],
)
def test_an_error_of_a_data_loader_process_has_its_class(error: Exception, spec_dir: Path) -> None:
    """For them, torch raises RuntimeError if their constructor needs more than a message."""
    found = describe_error(loader_error(raised_by_custom_code(error, in_loader=True)), spec_dir, "train", rank=1)
    assert (found.type, found.place) == (type(error).__name__, "mine/dataset.py:1")
    causes = ": ValueError: shard 3 is empty; ExceptionGroup: of 2 (1 sub-exception); KeyError: 'k'"
    assert found.message == str(error) + (causes if isinstance(error, ExceptionGroup) else "")


class EndingSamples:
    """Samples whose data loader process ends with an exit code, after a while."""

    def __init__(self, code: int, seconds: float = 0) -> None:
        self.code, self.seconds = code, seconds

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        time.sleep(self.seconds)
        os._exit(self.code)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        RuntimeError("received 0 items of ancdata"),
    ],
)
def test_the_end_of_a_data_loader_process_is_the_cause_of_a_lost_connection(error: Exception) -> None:
    """The rank may notice first that it cannot receive a tensor."""
    assert loader_error(error) is error, "no process has ended"
    loader: Any = DataLoader(EndingSamples(3), num_workers=1)  # type: ignore[arg-type]
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        batches = iter(loader)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # The loader sets torch's handler, which raises the error too.
        found = loader_error(error)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert re.match(r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 3", str(found)), found
    del batches


def test_a_data_loader_process_that_ends_with_exit_code_0_is_the_cause_too() -> None:
    lost = FileNotFoundError(errno.ENOENT, "No such file or directory")

    def fail(timeout: float) -> None:
        raise lost

    loader: Any = DataLoader(EndingSamples(0, seconds=0.2), num_workers=1)  # type: ignore[arg-type]
    batches: Any = iter(loader)
    batches._data_queue = SimpleNamespace(get=fail)
    with pytest.raises(FileNotFoundError) as caught:
        next(batches)  # The process is alive.
    found = loader_error(caught.value)
    assert re.fullmatch(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(found)), found


def test_a_disk_that_custom_code_fills_in_a_save_may_be_another_one(
    spec_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=HIGH))
    found = describe_error(raised_by_custom_code(NO_SPACE, in_loader=False), spec_dir, "save", rank=1)
    assert f"the disk of {spec_dir} or of the folder that mine/dataset.py:1 writes to is full (" in found.message


def test_an_error_of_custom_code_in_a_save_is_kept_also_if_the_disk_is_full(
    spec_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    error = raised_by_custom_code(KeyError("head"), in_loader=False)
    assert describe_error(error, spec_dir, "save", rank=1).type == "KeyError"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("'Read-only file system' is no number"),
        ConfigError("mine.Engine: the constructor raised ValueError: File too large: picture (mine/engine.py:3)"),
    ],
)
def test_a_type_that_is_none_of_the_system_is_no_full_disk(error: Exception, tmp_path: Path) -> None:
    found = describe_error(error, tmp_path, "train", rank=1)
    assert (found.type, found.message) == (type(error).__name__, str(error))


class UnprintableError(Exception):
    """An error of custom code whose message cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("no text")


class UnshowableError(Exception):
    """An error of custom code without a message, that cannot be shown either."""

    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnprintableError(), "its message cannot be printed"),
        (UnshowableError(), "UnshowableError"),
        (KeyError(), "KeyError()"),
        (RuntimeError("x" * 10**6), "x" * 10_000 + "... (cut)"),
    ],
)
def test_the_record_has_a_short_message_of_any_error(error: Exception, message: str, tmp_path: Path) -> None:
    assert describe_error(error, tmp_path, "train", rank=1).message == message


def test_a_group_of_errors_has_their_messages_and_the_line_of_the_first(spec_dir: Path) -> None:
    first = raised_by_custom_code(ValueError("shard 3 is empty\nof 8"), in_loader=False)
    group = ExceptionGroup("6 shards failed", [first, ExceptionGroup("", [KeyError("k"), OSError()]), OSError()])
    with pytest.raises(ExceptionGroup) as caught:
        raise group
    found = describe_error(caught.value, spec_dir, "train", rank=1)
    causes = "ValueError: shard 3 is empty; KeyError: 'k'; OSError; ..."
    assert (found.type, found.place) == ("ExceptionGroup", "mine/dataset.py:1")
    assert found.message == f"6 shards failed (3 sub-exceptions): {causes}"


def test_an_error_is_kept_if_its_place_cannot_be_determined(spec_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> str:
        raise OSError("the current folder was deleted")

    monkeypatch.setattr("distexp.config.custom_code.custom_code_place", fail)
    found = describe_error(TORCH_ERROR, spec_dir, "train", rank=1)
    assert (found.type, found.place) == ("RuntimeError", None)


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("profile", "import profile; profile.run", "module 'profile' has no attribute 'run'"),
        ("random", "from random import shuffle", "cannot import name 'shuffle' from 'random' ({file})"),
        ("torch", "import torch.distributed", "No module named 'torch.distributed'; 'torch' is not a package"),
        ("mine", "import mine; mine.data", None),
    ],
)
def test_a_module_that_hides_that_of_a_library_is_named(
    name: str, code: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored after the test
    monkeypatch.delitem(sys.modules, f"{name}.distributed", raising=False)
    del sys.modules[name]
    file = tmp_path / f"{name}.py"
    file.write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((AttributeError, ImportError)) as caught:
        exec(code, {})
    found = message_of(caught.value)
    assert (f"{file} hides the module {name} of " in found) == (message is not None)
    if message is not None:
        assert found.startswith(message.format(file=file))
        assert found.endswith(f"{name}.py: rename yours" if name != "torch" else "torch/__init__.py: rename yours")


def test_a_file_of_metrics_that_cannot_be_written_is_named() -> None:
    no_space = pytest.raises(OSError, match="No space left on device")
    with suppress(OSError), Path("/dev/full").open("w") as file, no_space as caught:  # The end of the file fails too.
        append_line(file, {"step": 1})
    assert caught.value.filename == "/dev/full"


def test_a_log_on_a_full_disk_does_not_fail_a_run() -> None:
    """``print`` raises an error here, and a second one makes the exit code 120."""
    program = "from distexp.runs.texts import print_despite_full_disk; print_despite_full_disk('note')"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", program], stderr=full, check=False).returncode == 0
        failing = "import sys; print('note', file=sys.stderr)"
        assert subprocess.run([sys.executable, "-c", failing], stderr=full, check=False).returncode != 0


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
            '  File "a.py", line 1, in f\n    g()\nValueError: first line\nsecond line: detail',
            "first line\nsecond line: detail",
        ),
        (
            "CheckpointException ranks:dict_keys([0])\nTraceback (most recent call last): (RANK 0)\n"
            '  File "a.py", line 1\nOSError: [Errno 27] File too large',
            "CheckpointException ranks:dict_keys([0]): OSError: [Errno 27] File too large",
        ),
        ("no traceback:\nbut two lines", "no traceback:\nbut two lines"),
    ],
)
def test_a_message_has_the_cause_and_no_traceback(message: str, shown: str) -> None:
    assert without_tracebacks(message) == shown


@pytest.mark.parametrize("value", ["0", "1"])
def test_hydra_full_error_prints_the_traceback_of_custom_code(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", value)
    prints = pytest.raises(ConfigError, match="HYDRA_FULL_ERROR=1 prints the traceback")
    with prints as caught, shorten_errors("my_package.Watch", "the constructor"):
        raise ValueError("too small")
    print_error(caught.value)
    assert ('raise ValueError("too small")' in capsys.readouterr().err) is (value == "1")
