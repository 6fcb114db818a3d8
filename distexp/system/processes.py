"""Start and end of Python processes; a child never outlives its parent."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any, NamedTuple, NoReturn, Protocol

import psutil

from distexp.system.files import PACKAGE

PR_SET_PDEATHSIG = 1
"""Option of ``prctl(2)`` that sets the signal for the death of the parent."""

NOTICE_SIGNAL = signal.SIGUSR2
"""Signal that Slurm sends before it ends a job; submitit requests this one."""

_libc = ctypes.CDLL(None, use_errno=True)


def end_at_once(code: int) -> NoReturn:
    """Write the output, and end this process without Python's cleanup.

    After an import of torch, the cleanup takes a third of a second, and threads of its libraries may abort it.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # The log may be on a full disk.
            stream.flush()
    os._exit(code)


def signal_name(number: int) -> str:
    """Return the name of a signal. Python has names for the first and the last real-time signal only."""
    if number in {*signal.Signals}:
        return signal.Signals(number).name
    return f"SIGRTMIN+{number - signal.SIGRTMIN}" if signal.SIGRTMIN < number < signal.SIGRTMAX else f"signal {number}"


def start_module(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    output: IO[str] | None = None,
    death_signal: signal.Signals = signal.SIGKILL,
    inherited: Sequence[int] = (),
    command: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a new session, with this distexp on its PYTHONPATH.

    The child receives ``death_signal`` when this process dies. The kernel binds that signal to the *thread* that
    starts the child, so call this from the main thread.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), env.get("PYTHONPATH")]))
    python = ("-m", module, *arguments)
    return subprocess.Popen(
        [sys.executable, *python] if command is None else command(python),
        env={**env, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output is not None else None,
        start_new_session=True,
        pass_fds=inherited,
        preexec_fn=_bind_to_parent(death_signal),  # noqa: PLW1509
    )


def _bind_to_parent(number: signal.Signals) -> Callable[[], None]:
    def bind() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, number)
        # Slurm signals every process of a job before it ends the job. Only the agent must react.
        signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)

    return bind


def die_with_parent(number: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Request a signal for the death of the parent process; send it now if the parent is already dead."""
    expected = os.getppid() if parent is None else parent
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != expected or (parent is None and orphaned()):
        os.kill(os.getpid(), number)


def orphaned() -> bool:
    """Return whether the parent of this process has died."""
    return os.getppid() == 1


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot, which identifies it; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    state, *numbers = stat.rpartition(")")[2].split()  # The name before may contain spaces.
    return None if state in "ZX" else int(numbers[18])  # The field ``starttime`` of proc(5).


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal, as by SIGSTOP or Ctrl-Z."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def machine_id() -> str:
    """Return an identity of this machine since its last boot, and of the container in which process ids count."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


POLL_S = 0.05


def descendants(pid: int, *, recursive: bool = True) -> list[psutil.Process]:
    """Return the descendants of a process, or only its children; empty if it does not exist."""
    try:
        return psutil.Process(pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


class WatchedProcess(Protocol):
    """A process that this one has started, or had started. It has these methods of a ``Popen``."""

    @property
    def pid(self) -> int:
        """Return its id, which no other process gets before its end is known here."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def wait(self) -> int:
        """Wait for the end and return the exit code."""

    def send_signal(self, number: int, /) -> None:
        """Send a signal if the process runs."""

    def kill(self) -> None:
        """Send SIGKILL if the process runs."""


def end_tree(process: WatchedProcess, grace_s: float) -> None:
    """End a child process and all its descendants by SIGTERM, after some seconds by SIGKILL, and wait for their end."""
    family = _terminate(process, grace_s)
    left = [member for member in family if _is_alive(member)]
    for member in left:
        with suppress(psutil.NoSuchProcess):  # It may have ended by itself meanwhile.
            member.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
    wait_until(lambda: not any(map(_is_alive, left)), 10)  # One that waits for a file system may take forever.


def _terminate(process: WatchedProcess, grace_s: float) -> list[psutil.Process]:
    """Send SIGTERM to a child process, give its tree some seconds to end, and return all its descendants."""
    family: dict[int, psutil.Process] = {}

    def find_family() -> None:
        family.update((member.pid, member) for member in descendants(process.pid))

    def has_ended() -> bool:
        find_family()
        return process.poll() is not None and not any(map(_is_alive, family.values()))

    find_family()  # The descendants of a child that has ended cannot be found.
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    wait_until(has_ended, grace_s)
    return list(family.values())


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition, at most some seconds; return whether it became true."""
    deadline = time.monotonic() + timeout_s
    while not (reached := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return reached


def kill_tree(pid: int) -> None:
    """Kill a child process and all its descendants. It waits for none of them."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)  # It starts no further process.
    for member in descendants(pid):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def handle_signals(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Use a handler for some signals until the block ends."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def collect_interrupts() -> Iterator[list[int]]:
    """Yield the list of Ctrl-C and SIGTERM inside the block, which do not stop it."""
    received: list[int] = []
    with handle_signals(lambda number, _: received.append(number), signal.SIGINT, signal.SIGTERM):
        yield received


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM take effect at the end of the block."""
    with collect_interrupts() as received:
        yield
    for number in received[:1]:
        signal.raise_signal(number)


MAX_BYTES, MAX_DESCRIPTORS = 65536, 4  # of a message


class Received(NamedTuple):
    """A message, and the descriptors of its open files. Without a message, the other process closed its socket."""

    message: dict[str, Any] | None
    descriptors: list[int]


def message_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for messages, whose limits they keep."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message, with open files for the other process. Raise OSError if that has closed its socket."""
    # No SIGPIPE: the caller handles the error.
    socket.send_fds(channel, [json.dumps(message).encode()], descriptors, socket.MSG_NOSIGNAL)


def receive(channel: socket.socket) -> Received:
    """Wait for a message. Raise BlockingIOError or TimeoutError if there is none in time."""
    try:
        content, descriptors, _, _ = socket.recv_fds(channel, MAX_BYTES, MAX_DESCRIPTORS)
    except ConnectionResetError:
        return Received(None, [])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return Received(json.loads(content) if content else None, descriptors)
