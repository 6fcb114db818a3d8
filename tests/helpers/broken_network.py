"""A broken rendezvous of the workers that are forked after this module is imported, as by ``sitecustomize``.

``$BROKEN_NETWORK`` is ``taken`` if another program listens on rank 0's port; ``dropped`` if nothing answers the
connections of the last rank, as behind a firewall; or ``address`` if that rank gets a name without an address.
"""

from __future__ import annotations

import os
import socket

SOCKETS: list[socket.socket] = []
forks: list[None] = []
"""An entry for each worker that was forked so far."""


def before_fork() -> None:
    if "MASTER_PORT" not in os.environ:
        return  # a process that forks no workers
    forks.append(None)
    if len(forks) > 1:
        return
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    SOCKETS.append(held)
    if os.environ["BROKEN_NETWORK"] == "taken":
        held.bind(("", int(os.environ["MASTER_PORT"])))
        held.listen()
    elif os.environ["BROKEN_NETWORK"] == "dropped":
        held.bind(("127.0.0.1", 0))
        held.listen(0)  # The kernel drops further connections while these wait.
        for _ in range(4):
            waiting = socket.socket()
            waiting.setblocking(False)
            waiting.connect_ex(held.getsockname())
            SOCKETS.append(waiting)


def after_fork() -> None:
    if not forks or len(forks) < int(os.environ["WORLD_SIZE"]):
        return
    if os.environ["BROKEN_NETWORK"] == "address":
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"
    elif os.environ["BROKEN_NETWORK"] == "dropped":
        os.environ["MASTER_PORT"] = str(SOCKETS[0].getsockname()[1])


os.register_at_fork(before=before_fork, after_in_child=after_fork)
