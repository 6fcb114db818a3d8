"""A node's workers that are forked from the shared start-up process (``distexp.worker.shared_start``)."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from distexp.system.messages import receive, send

START_TIMEOUT_S = 600.0
"""Time to wait for the imports of the shared process. A slow file system may take minutes."""


class NotSharedError(Exception):
    """The shared start-up process cannot fork the workers."""


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
    def start(cls, descriptor: int, arguments: Sequence[str], output: IO[str]) -> ForkedWorkers:
        """Request the workers from the shared process, and wait until its imports are done.

        Args:
            descriptor: Socket that the launcher has connected with the shared process.
            arguments: Arguments of ``distexp.worker.group``.
            output: File for stdout and stderr.

        Raises:
            NotSharedError: the process has ended, or its imports take too long.
        """
        channel = socket.socket(fileno=descriptor)
        channel.set_inheritable(False)
        channel.settimeout(START_TIMEOUT_S)
        run_dir, node, address, port = arguments
        request = {"run_dir": str(Path(run_dir).absolute()), "node": int(node), "address": address, "port": int(port)}
        try:
            send(channel, request, [output.fileno()])
            started = receive(channel).message
        except OSError as error:
            channel.close()
            raise NotSharedError(f"{type(error).__name__}: {error}") from error
        if started is None or "pid" not in started:
            channel.close()
            raise NotSharedError("it has ended")
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
