"""The error of a rank, as written to its record."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from distexp.worker.__main__ import describe_error

TORCH_ERROR = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")


@pytest.mark.parametrize(
    "case",
    [
        ("save", 300 * 1024, TORCH_ERROR, "DiskFull"),
        ("save", 300 * 1024, OSError(28, "No space left on device"), "OSError"),
        ("save", 1 << 30, TORCH_ERROR, "RuntimeError"),
        ("train", 0, TORCH_ERROR, "RuntimeError"),
    ],
)
def test_a_failed_save_on_a_full_disk_names_the_disk(
    case: tuple[str, int, Exception, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase, free, error, name = case
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = describe_error(error, tmp_path, phase, rank=1)
    assert (found.type, found.phase, found.rank) == (name, phase, 1)
    assert found.message.startswith(f"the disk of {tmp_path} is full (300 KiB free): make room") == (name == "DiskFull")
