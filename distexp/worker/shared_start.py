"""The process from which the workers of local runs are forked: ``python -m distexp.worker.shared_start CONTROL``.

It forks a group (``distexp.worker.group``) for each request of an agent. So only the first run waits for the imports.
``CONTROL`` is a socket of the launcher. Its first message has the modules to import, and may bring a file in memory for
random weights, which the workers inherit. Each later one brings the connection to an agent.

A connection works like a ``Popen``: the agent gets the process id and the exit code, and the group dies with the agent.
The id stays reserved until the agent closes the connection, so the agent can send signals to no other process.
"""

import os
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NoReturn

from distexp.models import shared_weights
from distexp.runs.attempts import FORKED
from distexp.system.environment_variables import captured_environment
from distexp.system.processes import NOTICE_SIGNAL, die_with_parent, end_at_once, receive, send
from distexp.worker.group import run_group, set_torchrun_defaults
from distexp.worker.preload import preload

MAX_PRINTED = 1 << 20  # most bytes of the output of the imports that the log of a run gets


def main() -> int:
    """Import the libraries of the first run, and fork groups until the launcher closes its socket."""
    captured_environment()  # before torch and DeepSpeed are imported, which set some of these variables
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The launcher handles Ctrl-C.
    die_with_parent(signal.SIGTERM)
    set_torchrun_defaults()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    first, weights = receive(control)
    if first is None:  # The launcher has ended.
        return 0
    if weights:
        shared_weights.offer(weights[0])
    preload(first["modules"], first["device"])
    # The agents end their groups first if the launcher dies. Then this process ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    GroupServer(control).serve()
    return 0


@dataclass
class Connection:
    """Connection to the agent of one run, with its group."""

    socket: socket.socket  # the connection
    others: list[int]  # other processes that have imported libraries for the runs on this node
    pid: int | None = None  # process id of the group, once it is forked
    reported: bool = False  # whether the agent knows its exit code


class GroupServer:
    """Forks a group for each connection, and reports how it ended."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._selector = DefaultSelector()
        # SIGCHLD writes to this pair, so that it interrupts no system call and is never missed.
        self._children, self._wakeup = socket.socketpair()
        for end in (self._children, self._wakeup):
            end.setblocking(False)

    def serve(self) -> None:
        """Fork groups until the launcher and all agents have closed their sockets."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._control, EVENT_READ, self._accept)
        self._selector.register(self._children, EVENT_READ, self._report_ended)
        while self._control.fileno() >= 0 or self._connections:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        message, descriptors = receive(self._control)
        if message is None:
            self._selector.unregister(self._control)
            self._control.close()
            return
        connection = Connection(socket.socket(fileno=descriptors[0]), message.get("others", []))
        self._connections[descriptors[0]] = connection
        self._selector.register(connection.socket, EVENT_READ, lambda: self._serve_agent(connection))

    def _serve_agent(self, connection: Connection) -> None:
        """Start the group that an agent requests; end it if the agent has closed the connection."""
        message, descriptors = receive(connection.socket)
        if message is None:
            self._selector.unregister(connection.socket)
            del self._connections[connection.socket.fileno()]
            connection.socket.close()
            if connection.pid is not None:
                os.kill(connection.pid, signal.SIGKILL)
                os.waitpid(connection.pid, 0)
            return
        server = os.getpid()
        connection.pid = os.fork()
        if connection.pid == 0:
            self._become_group(connection, server, message, descriptors[0])
        os.close(descriptors[0])

    def _become_group(self, connection: Connection, server: int, request: dict[str, Any], output: int) -> NoReturn:
        """Run a group in the forked process, with the state of one that an agent has started."""
        code = 1
        try:
            die_with_parent(parent=server)
            os.setsid()
            # The log of the group starts with what this process has printed so far.
            printed = os.pread(1, MAX_PRINTED, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.write(1, printed)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)
            send(connection.socket, {"pid": os.getpid(), "server": server, "others": connection.others})
            self._forget()
            print(f"{FORKED} {server}, which has imported the libraries", flush=True)
            code = run_group(Path(request["run_dir"]), request["node"], request["address"], request["port"])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            end_at_once(code)

    def _forget(self) -> None:
        """Close what belongs to the server, so that the agents notice the end of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        connections = [connection.socket for connection in self._connections.values()]
        for opened in (self._control, self._children, self._wakeup, *connections):
            opened.close()

    def _report_ended(self) -> None:
        """Send the exit codes of the groups that have ended. They stay zombies until their agents have read them."""
        with suppress(BlockingIOError):
            while self._children.recv(4096):
                pass
        for connection in self._connections.values():
            if connection.pid is None or connection.reported:
                continue
            ended = os.waitid(os.P_PID, connection.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                connection.reported = True
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                with suppress(OSError):  # The agent may be dead.
                    send(connection.socket, {"code": code})


if __name__ == "__main__":
    end_at_once(main())
