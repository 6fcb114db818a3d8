"""Files that a snapshot of the code leaves out: secrets, because others may read the copy, and large files."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from distexp.system.units import MIB

LARGE_MB = 50

SECRET_FILES = (
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", ".npmrc", ".pypirc", ".git-credentials", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.kdbx", "*.ppk", "*.gpg"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*"),
    *("credentials", "credentials.*", "*credentials.json", "secrets.*", "service_account*.json", "kaggle.json"),
)
"""Names of files with secrets, in lower case."""

NO_SECRETS = (".env.example", ".env.sample", ".env.template", "*.pub", "*.py")


def left_out(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the files that are not copied, each with the reason.

    Args:
        files: Path on disk by path in the snapshot.
    """
    found = {name: _reason(name, path) for name, path in files.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def describe_left_out(reasons: Mapping[str, str]) -> str:
    """Return the note about files that are not copied."""
    shown = ", ".join(f"{name} ({reason})" for name, reason in reasons.items())
    return f"not copied for the jobs: {shown}"


def _reason(name: str, path: Path) -> str | None:
    base = PurePosixPath(name).name.lower()
    if _matches(base, SECRET_FILES) and not _matches(base, NO_SECRETS):
        return "may be a secret"
    size = path.lstat().st_size / MIB
    return f"{size:,.0f} MB, more than {LARGE_MB}" if size > LARGE_MB else None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
