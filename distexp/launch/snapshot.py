"""Snapshot of the code in the sweep directory, so that jobs run the code of the time of submission.

From a git checkout, it contains the tracked files with their uncommitted changes, and new files that git does not
ignore. For an installed distexp, it contains the package. The user's ``trusted_packages`` are copied too.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath

from distexp.config import ConfigError
from distexp.guard.config_files import is_own_file, remember_file
from distexp.launch.run_dirs import GitState, git_root, git_state, run_git
from distexp.runs.run_dir import SNAPSHOT, SNAPSHOT_MARKER
from distexp.system.files import PACKAGE, create_atomically, write_json
from distexp.system.units import MIB


@dataclass(frozen=True)
class Snapshot:
    """Copy of the code."""

    folder: Path  # Folder of the copy, directly in the sweep directory.
    git: GitState  # State of the checkout that was copied.


def take_snapshot(sweep_dir: Path, trusted: Sequence[str], warn: Callable[[str], None]) -> Snapshot:
    """Copy the code to the sweep directory, or find an existing snapshot of the same code.

    A snapshot of another user is never taken, because its files may differ from what its marker states. Files that may
    be secrets and large files are left out. Raise ConfigError if there is too much to copy.
    """
    root = git_root(PACKAGE)
    copied, omitted = _select_files(root, sweep_dir, trusted)
    git, digest = git_state(root), _digest(copied)
    folder = _folder_for(digest, sweep_dir)
    if not folder.exists():
        if omitted:
            shown = ", ".join(f"{name} ({reason})" for name, reason in omitted.items())
            warn(f"not copied for the jobs: {shown}")
        _copy(copied, folder, {"digest": digest, **asdict(git), "taken_at": time.time(), "left_out": omitted})
        remember_file(folder / SNAPSHOT_MARKER)
        _write_info(root, git, folder, omitted, warn)
    return Snapshot(folder, git)


def _folder_for(digest: str, sweep_dir: Path) -> Path:
    """Return the folder of the user's own snapshot with this digest; if there is none, the first free name."""
    for number in itertools.count(1):
        folder = sweep_dir / (SNAPSHOT if number == 1 else f"{SNAPSHOT}_{number}")
        marker = folder / SNAPSHOT_MARKER
        if not folder.exists() or (is_own_file(marker) and json.loads(marker.read_text())["digest"] == digest):
            return folder
    raise AssertionError("unreachable")


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(f"{name}:{len(content)}\n".encode() + content)
    return digest.hexdigest()


def _copy(files: Mapping[str, Path], folder: Path, marker: Mapping[str, object]) -> None:
    with create_atomically(folder) as temporary:
        for name, path in files.items():
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target, follow_symlinks=False)
            if not target.is_symlink():  # Other users write no copied file, even if they may write the original.
                target.chmod(target.stat().st_mode & ~stat.S_IWOTH)
        write_json(temporary / SNAPSHOT_MARKER, {**marker, "files": len(files)})


DIFFERENCE = "uncommitted.diff"


def _write_info(
    root: Path | None, git: GitState, folder: Path, omitted: Iterable[str], warn: Callable[[str], None]
) -> None:
    """Write the git state, changes of the copied files, and the installed packages to ``<snapshot>.info``."""
    info = folder.with_name(f"{folder.name}.info")
    info.mkdir(exist_ok=True)
    write_json(info / "git.json", asdict(git))
    if root is not None:
        base = PACKAGE.parent.relative_to(root)
        left_out = {(base / name).as_posix() for name in omitted}
        # The old content of a secret that was deleted or renamed since the commit is a change too.
        changed = run_git(root, "diff", "--name-only", "--no-renames", "-z", "HEAD") or ""
        secret = {name for name in changed.split("\0") if name and _may_be_secret(name)}
        if unknown := sorted(secret - left_out):
            warn(f"not in {info.name}/{DIFFERENCE}, because they may be secrets: {', '.join(unknown)}")
        excluded = [f":(exclude,literal){name}" for name in sorted(left_out | secret)]
        difference = run_git(root, "diff", "--binary", "--no-renames", "HEAD", "--", ".", *excluded)
        (info / DIFFERENCE).write_text(difference or "")
    named = (item for item in metadata.distributions() if item.metadata["Name"])
    packages = {f"{item.metadata['Name']}=={item.version}" for item in named}
    (info / "pip-freeze.txt").write_text("\n".join(sorted(packages, key=str.lower)) + "\n")


MAX_TOTAL_MB = 500
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed libraries."""


def _select_files(root: Path | None, sweep_dir: Path, trusted: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the files to copy, and why others are left out, both by their paths in the snapshot."""
    own = _package_files(PACKAGE) if root is None else _tracked_files(PACKAGE.parent, sweep_dir)
    files = dict(own) | {name: path for name in trusted for name, path in _trusted_files(name, root)}
    reasons = {name: _reason_to_omit(name, path) for name, path in files.items()}
    copied = {name: path for name, path in files.items() if reasons[name] is None}
    sizes_mb = {name: path.lstat().st_size / MIB for name, path in copied.items()}
    if (total_mb := sum(sizes_mb.values())) > MAX_TOTAL_MB:
        largest = max(sizes_mb, key=lambda name: sizes_mb[name])
        raise ConfigError(
            f"the code to copy for the jobs has {total_mb:,.0f} MB, more than {MAX_TOTAL_MB}: add files that are not "
            f"code to .gitignore. The largest is {files[largest]} with {sizes_mb[largest]:,.0f} MB"
        )
    return copied, {name: reason for name, reason in reasons.items() if reason is not None}


def _tracked_files(base: Path, sweep_dir: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files below the parent of distexp that git tracks or would track."""
    listed = run_git(base, "ls-files", "-z", "--cached", "--others", "--exclude-standard") or ""
    for name in sorted(set(listed.split("\0")) - {""}):
        path = base / name
        if (path.is_file() or path.is_symlink()) and not path.resolve().is_relative_to(sweep_dir.resolve()):
            yield name, path


def _trusted_files(package: str, root: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files of a user's package; none if it is in the checkout, installed, or missing."""
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


LARGE_MB = 50

SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "*.gpg"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials", "credentials.*", "*credentials.json", "service[_-]account*.json", "kaggle.json"),
    *("secret", "secret.*", "secrets.*", "*[_-]secret.*", "password*", "passwd", "*[_-]password.*"),
    *("token", "token.*", "*[_-]token", "*[_-]token.*", "*.token", "*api[_-]key*", "*apikey*", "*access[_-]key*"),
)
"""Names of files with secrets, in lower case."""

NO_SECRETS = (".env.example", ".env.sample", ".env.template", "*.pub", "*.py")


def _reason_to_omit(name: str, path: Path) -> str | None:
    """Return why a file is not copied: others may read the copy of a secret. None if it is copied."""
    if _may_be_secret(name):
        return "may be a secret"
    size = path.lstat().st_size / MIB
    return f"{size:,.0f} MB, more than {LARGE_MB}" if size > LARGE_MB else None


def _may_be_secret(name: str) -> bool:
    matches = partial(fnmatch, PurePosixPath(name).name.lower())
    return any(map(matches, SECRET_FILES)) and not any(map(matches, NO_SECRETS))
