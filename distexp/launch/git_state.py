"""Git state of the code that runs: it goes into each record, so that a result can be traced to a commit."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from distexp.config.paths import PACKAGE


@dataclass(frozen=True)
class GitState:
    """Commit of the code, and whether the code has uncommitted changes; None outside a checkout."""

    sha: str | None = None
    dirty: bool | None = None


def package_git_state() -> GitState:
    """Return the state of the checkout that this distexp is imported from."""
    return git_state(git_root(PACKAGE))


def git_root(folder: Path) -> Path | None:
    """Return the root of the git checkout that tracks a folder, or None."""
    top = run_git(folder, "rev-parse", "--show-toplevel")
    if top is None or not run_git(folder, "ls-files", "--", "."):
        return None
    return Path(top.strip())


def git_state(root: Path | None) -> GitState:
    """Return the state of a checkout. New files that git does not ignore count as changes."""
    if root is None:
        return GitState()
    sha = run_git(root, "rev-parse", "HEAD")
    return GitState(sha.strip() if sha else None, bool(run_git(root, "status", "--porcelain")))


def run_git(folder: Path, *arguments: str) -> str | None:
    """Return what a git command prints in a folder; None if it fails, or if git is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None
