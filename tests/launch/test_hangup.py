"""Test of a command whose terminal is closed, with a real pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from distexp.runs.run_dir import LAUNCHER_LOG
from tests.measure.memory.sampled_process import DEADLINE_S, wait_until

COMMAND = """
import signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # With nohup, the tests and their processes ignore it.
from pathlib import Path
from distexp.launch.local.launcher import continue_after_hangup
sweep = Path(sys.argv[1])
with continue_after_hangup(sweep):
    print("ready", flush=True)
    while not (sweep / "end").exists():
        time.sleep(0.05)
    print("run 1 of 2", flush=True)
"""


@pytest.mark.parametrize("piped", [False, True])
def test_runs_continue_after_the_terminal_is_closed(piped: bool, tmp_path: Path) -> None:
    """In a pipe, as with ``| tee log``, the reader of the output ends with the terminal."""
    terminal, inside = pty.openpty()
    reader, output = os.pipe() if piped else (os.dup(terminal), os.dup(inside))
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path)],
        stdin=inside,
        stdout=output,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,  # noqa: PLW1509
    )
    try:
        os.close(inside)
        os.close(output)
        shown = b""
        while not shown.endswith(b"\n"):  # An unbuffered command may write the end of the line separately.
            assert select.select([reader], [], [], DEADLINE_S)[0], f"the command printed only {shown!r}"
            shown += os.read(reader, 100)
        assert shown.strip() == b"ready"
        os.close(reader)
        os.close(terminal)
        log = tmp_path / LAUNCHER_LOG
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "the first line of the log")
        (tmp_path / "end").touch()
        assert command.wait(300) == 0
    finally:
        command.kill()
        command.wait()
    lines = log.read_text().splitlines()
    assert len(lines) == 2, lines
    first, second = lines
    assert "the terminal was closed (SIGHUP), and the runs continue" in first
    assert f"distexp status {tmp_path}. To end them: distexp cancel {tmp_path}" in first
    assert second == "run 1 of 2"
