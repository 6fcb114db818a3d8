"""The lock of a run directory: two commands never run the same run at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distexp.runs.run_lock import run_lock

HOLD = """
import sys, time
from pathlib import Path
from distexp.runs.run_lock import run_lock
with run_lock(Path(sys.argv[1])) as owner:
    print(owner, flush=True)
    time.sleep(600)
"""


def test_a_second_command_learns_which_process_has_the_lock(tmp_path: Path) -> None:
    with run_lock(tmp_path) as mine:
        assert mine is None
        with run_lock(tmp_path) as owner:
            assert owner is not None
            assert owner.startswith(f"process {os.getpid()} on ")
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_killed_process_frees_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "None\n"
        with run_lock(tmp_path) as owner:
            assert owner is not None
            assert str(holder.pid) in owner
        holder.kill()
        holder.wait()
        with run_lock(tmp_path) as owner:
            assert owner is None
