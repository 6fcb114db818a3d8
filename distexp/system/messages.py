"""Messages between two processes on one machine, over a Unix socket that keeps their limits."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

MOST_BYTES, MOST_DESCRIPTORS = 65536, 4


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with open files for the other process.

    Raises:
        OSError: the other process has closed its socket.
    """
    # No SIGPIPE: the caller handles the error.
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Wait for a message; return it and its open files. It is None if the other process has closed its socket.

    Raises:
        BlockingIOError: no message is there, and the socket does not block.
        TimeoutError: no message has arrived within the timeout of the socket.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_DESCRIPTORS)
    except ConnectionResetError:
        return None, []
    for each in descriptors:
        os.set_inheritable(each, False)
    return (json.loads(content) if content else None), descriptors
