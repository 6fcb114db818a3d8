"""The copy of the code for jobs: what it leaves out, and who may write it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from distexp.launch import snapshot

SECRET = "TOKEN=0123456789"
CODE = ("distexp/__init__.py", "distexp/keys.py", ".env.example", "id_rsa.pub", "tokenizer.json", "distexp/token.py")
OMITTED = (
    *(".env", "certs/server.pem", "distexp/.env.local", "home/.netrc", "id_ed25519", "secrets.yaml"),
    *("token.txt", "api_key.txt", "service-account.json", "hf_token", "my-password.txt"),
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a git checkout with code, with files that must not be copied, and with uncommitted changes to both."""
    folder = tmp_path / "project"
    for name in (*CODE, *OMITTED):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("first\n")
    with (folder / "weights.bin").open("wb") as file:
        file.truncate(60 * 1024**2)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "distexp", ".env", "secrets.yaml"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    (folder / ".env").write_text(SECRET)
    (folder / "distexp" / "keys.py").write_text("changed = 1\n")
    (folder / "distexp" / "keys.py").chmod(0o666)
    monkeypatch.setattr(snapshot, "PACKAGE", folder / "distexp")
    return folder


def test_secrets_and_large_files_are_left_out_with_a_note(project: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    copy = snapshot.take_snapshot(sweep, [], notes.append).folder
    copied = {str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file()}
    assert copied == {*CODE, ".complete.json"}
    (note,) = notes
    assert note.startswith("not copied for the jobs: ")
    assert all(f"{name} (may be a secret)" in note for name in OMITTED)
    assert "weights.bin (60 MB, more than 50)" in note
    assert set(json.loads((copy / ".complete.json").read_text())["left_out"]) == {*OMITTED, "weights.bin"}
    files = [path for path in sweep.rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET in path.read_text()]
    assert "changed = 1" in (sweep / "snapshot.info" / "uncommitted.diff").read_text()
    assert snapshot.take_snapshot(sweep, [], notes.append).folder == copy
    assert len(notes) == 1, "the same code is not copied again"


def test_the_difference_has_no_secret_that_was_deleted_or_renamed(project: Path, tmp_path: Path) -> None:
    for name in ("keys/server.pem", "old.key", "notes.txt"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(f"{SECRET} of {name}\n" if name != "notes.txt" else "obsolete\n")
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["add", "keys", "old.key", "notes.txt", ".env"], ["commit", "-qm", "second"]):
        subprocess.run([*git, *arguments], check=True)
    for name in (".env", "keys/server.pem", "notes.txt"):
        (project / name).unlink()
    subprocess.run([*git, "mv", "old.key", "new.key"], check=True)
    notes: list[str] = []
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    snapshot.take_snapshot(sweep, [], notes.append)
    difference = (sweep / "snapshot.info" / "uncommitted.diff").read_text()
    assert "-obsolete" in difference
    assert SECRET not in difference
    deleted = ".env, keys/server.pem, old.key"
    assert notes[1:] == [f"not in snapshot.info/uncommitted.diff, because they may be secrets: {deleted}"]


def test_the_snapshot_of_another_user_is_not_used(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    theirs = snapshot.take_snapshot(sweep, [], print).folder
    (theirs / "distexp" / "keys.py").write_text("changed by a stranger\n")
    marker = json.loads((theirs / ".complete.json").read_text())
    (theirs / ".complete.json").write_text(json.dumps(marker))
    mine = snapshot.take_snapshot(sweep, [], print).folder
    assert mine != theirs
    assert (mine / "distexp" / "keys.py").read_text() == "changed = 1\n"


def test_other_users_can_write_no_copied_file(project: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    before = os.umask(0o022)
    try:
        sweep.mkdir()
        copy = snapshot.take_snapshot(sweep, [], print).folder
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [copy, *copy.rglob("*")]}
    assert {path.name: oct(mode) for path, mode in modes.items() if mode & stat.S_IWOTH} == {}
