"""A node's workers that are forked from a process with the libraries (``distexp.worker.shared_start``)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from distexp.launch.failures import encode_group_code
from distexp.system.processes import receive, send

LOST_CODE = encode_group_code(-signal.SIGKILL)
"""Exit code of an agent whose workers have died with the process that they were forked from."""

POLL_S = 0.1
"""Time between two checks of the limits, while the shared process imports. A slow file system may take minutes."""


class NotStartedError(Exception):
    """The workers were not started, because a limit was exceeded or the shared process has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code  # exit code of the agent


class ForkedWorkers:
    """The parent process of a node's workers. It has the methods of a ``Popen`` that the agent uses.

    Attributes:
        pid: Its process id. It stays reserved until ``close``, also if the process has ended.
        server: Id of the process that forked it, whose memory it shares.
        others: Ids of other shared processes on this node, which have the files of the libraries in memory too.
    """

    def __init__(self, channel: socket.socket, pid: int, server: int, others: Sequence[int] = ()) -> None:
        self.pid, self.server, self.others = pid, server, others
        self._channel = channel
        self._code: int | None = None

    @classmethod
    def start(
        cls, descriptor: int, arguments: Sequence[str], output: IO[str], limit: Callable[[], int | None] = lambda: None
    ) -> ForkedWorkers:
        """Request the workers from the shared process, and wait until its imports are done.

        Raise NotStartedError if the process has ended, or if ``limit`` returns an exit code, because a limit is
        exceeded.
        """
        channel = socket.socket(fileno=descriptor)
        channel.set_inheritable(False)
        channel.settimeout(POLL_S)
        run_dir, node, address, port = arguments
        request = {"run_dir": str(Path(run_dir).absolute()), "node": int(node), "address": address, "port": int(port)}
        try:
            send(channel, request, [output.fileno()])
            started = _wait_for_start(channel, limit)
        except BaseException as error:
            channel.close()
            if isinstance(error, OSError):
                raise NotStartedError(LOST_CODE) from error
            raise
        return cls(channel, started["pid"], started["server"], started["others"])

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        self._channel.setblocking(False)
        with suppress(BlockingIOError):
            self._receive()
        return self._code

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        self._channel.setblocking(True)
        return self._receive()

    def _receive(self) -> int:
        if self._code is None:
            message = receive(self._channel).message
            # A dead server sends no exit code. The kernel kills its groups.
            self._code = -signal.SIGKILL if message is None else message["code"]
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # The server may have died just now.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the connection; the server then ends and forgets the process."""
        self._channel.close()


def _wait_for_start(channel: socket.socket, limit: Callable[[], int | None]) -> dict[str, Any]:
    """Wait until the shared process has forked the workers, and return its message."""
    while True:
        try:
            started = receive(channel).message
        except TimeoutError:
            code = limit()
            if code is not None:
                raise NotStartedError(code) from None
        else:
            if started is None or "pid" not in started:
                raise NotStartedError(LOST_CODE)
            return started
