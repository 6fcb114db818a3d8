"""Files of a snapshot of the code: which ones belong to the code, and which of them are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distexp.config import ConfigError
from distexp.launch.git_state import run_git
from distexp.launch.snapshot_filter import left_out
from distexp.system.units import MIB

MAX_TOTAL_MB = 500
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed libraries."""


@dataclass(frozen=True)
class SnapshotFiles:
    """Files of the code.

    Attributes:
        copied: Path on disk by path in the snapshot.
        omitted: Why a file is left out, by its path in the snapshot.
    """

    copied: dict[str, Path]
    omitted: dict[str, str]


def select_files(package: Path, root: Path | None, sweep_dir: Path, trusted: Sequence[str]) -> SnapshotFiles:
    """Return the files to copy, without those that may be secrets and without large ones.

    Args:
        package: Folder of distexp.
        root: Root of its git checkout, or None.
        sweep_dir: Directory of the sweep, which is left out.
        trusted: Names of the user's packages.

    Raises:
        ConfigError: if there are more than ``MAX_TOTAL_MB`` to copy.
    """
    own = _package_files(package) if root is None else _tracked_files(package.parent, sweep_dir)
    files = dict(own) | {name: path for name in trusted for name, path in _trusted_files(name, root)}
    omitted = left_out(files)
    copied = {name: path for name, path in files.items() if name not in omitted}
    _check_size(copied)
    return SnapshotFiles(copied, omitted)


def _tracked_files(base: Path, sweep_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files below a folder of a checkout that git tracks or would track.

    The folder is the parent of distexp, which may be a folder of a larger project.
    """
    listed = run_git(base, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
    for name in sorted(set(listed.split("\0")) - {""}):
        path = base / name
        if (path.is_file() or path.is_symlink()) and not path.resolve().is_relative_to(sweep_dir.resolve()):
            yield name, path


def _trusted_files(package: str, root: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a user's package, if they are not part of the checkout.

    There are none of a package that is installed like any library, and of a missing one, which ``resolve`` reports.
    """
    found = importlib.util.find_spec(package.partition(".")[0])
    origin = Path(found.origin) if found is not None and found.origin else None
    if origin is None or any(part in INSTALLED for part in origin.parts):
        return
    if root is None or not origin.is_relative_to(root):
        yield from _package_files(origin.parent if origin.name == "__init__.py" else origin)


def _package_files(package: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a package, or of a module that is one file."""
    if package.is_file():
        yield package.name, package
        return
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(Path(package.name) / path.relative_to(package)), path


def _check_size(files: Mapping[str, Path]) -> None:
    sizes = {name: path.lstat().st_size for name, path in files.items()}
    total_mb = sum(sizes.values()) / MIB
    if total_mb > MAX_TOTAL_MB:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"the code to copy for the jobs has {total_mb:,.0f} MB, more than {MAX_TOTAL_MB}: add files that are not "
            f"code to .gitignore. The largest is {files[largest]} with {sizes[largest] / MIB:,.0f} MB"
        )
