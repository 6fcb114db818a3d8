"""Messages between two processes on one machine, over a Unix socket that keeps their limits."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

MAX_BYTES = 65536
"""Size of the largest message."""

MAX_DESCRIPTORS = 4
"""Number of open files that a message may bring."""


class Received(NamedTuple):
    """A message, and the descriptors of its open files. Without a message, the other process closed its socket."""

    message: dict[str, Any] | None
    descriptors: list[int]


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


def receive(channel: socket.socket) -> Received:
    """Wait for a message.

    Raises:
        BlockingIOError: no message is there, and the socket does not block.
        TimeoutError: no message has arrived within the timeout of the socket.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return Received(None, [])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return Received(json.loads(content) if content else None, descriptors)
