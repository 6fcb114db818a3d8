"""Exceptions that end a command without being bugs, and the exit code of a closed pipe."""

import errno
import io
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

LONG = re.compile(r"\S{1000,}")
"""A value that is too long for a message, such as a number of thousands of digits."""


def shorten(message: str) -> str:
    """Return a message with the start of each very long value."""
    return LONG.sub(lambda found: f"{found[0][:57]}...", message)


class ConfigError(ValueError):
    """One or more errors of a configuration; each states the value, what is wrong with it, and a hint."""

    def __init__(self, errors: list[str] | str, config: Any = None) -> None:
        self.errors = [shorten(error) for error in ([errors] if isinstance(errors, str) else errors)]
        self.config = config  # with the values that were decided before the errors were found, or None
        super().__init__("\n".join(self.errors))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if it has none."""
    return (text_of(error).strip().splitlines() or [type(error).__name__])[0]


MAX_CAUSES = 3
"""Errors of a group in a message. The log has all."""


def text_or_repr(error: BaseException) -> str:
    """Return the message of an error; if it is empty, how Python shows the error, or its class."""
    try:
        return text_of(error).strip() or repr(error)
    except Exception:
        return type(error).__name__


def text_of(error: BaseException) -> str:
    """Return the message of an error, with those in a group. Custom code may raise an error that cannot be printed."""
    try:
        text = str(error)
    except Exception:
        return "its message cannot be printed"
    if not isinstance(error, BaseExceptionGroup):
        return text
    members = leaf_errors(error)
    causes = [": ".join(dict.fromkeys((type(each).__name__, first_line(each)))) for each in members[:MAX_CAUSES]]
    return f"{text}: {'; '.join([*causes, *(['...'] if len(members) > MAX_CAUSES else [])])}"


def leaf_errors(error: BaseException) -> list[BaseException]:
    """Return the errors in a group and in the groups in it; the error itself if it is none."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for member in error.exceptions for leaf in leaf_errors(member)]


class SearchError(RuntimeError):
    """A process of a trial on ``rank`` failed, not for lack of memory. ``place`` is the line of custom code, if any."""

    def __init__(self, message: str, rank: int, place: str | None) -> None:
        super().__init__(message)
        self.rank, self.place = rank, place


class SweepFailedError(Exception):
    """A finished sweep with a failed run. The command exits with code 1."""


class InterruptedRunError(BaseException):
    """Ctrl-C, SIGTERM, SIGUSR1 or SIGUSR2 during a run. The record is written, and no other run is started.

    ``reason`` is for the record of the run. The message for the user has the consequence too.
    """

    def __init__(self, number: int, consequence: str = "; no further run is started") -> None:
        self.number, self.reason = number, f"stopped by {signal.Signals(number).name}"
        super().__init__(f"{self.reason}{consequence}")


class SweepInterrupted(BaseException):
    """Ctrl-C before the runs of a sweep were started. The message reports what was done."""


class MonitoringInterrupted(BaseException):
    """Ctrl-C while jobs were monitored. The jobs continue."""


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change the state of a terminal or the direction of a text, or that no file can contain."""


def printable(text: str) -> str:
    """Replace control characters, except line breaks and tabs, by visible escape codes."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_error(message: object) -> None:
    """Print a message to stderr. It may contain the name of a file, and so control characters."""
    print(f"distexp: {printable(shorten(str(message)))}", file=sys.stderr)


def print_text(text: str) -> None:
    """Print a text to stdout that may contain the name of a file, and so control characters."""
    print(printable(text))


TRACE_VARIABLE = "HYDRA_FULL_ERROR"
"""Environment variable with which errors are shown with their traceback."""


def run_until_pipe_closes(command: Callable[[], int]) -> int:
    """Run a command and return its exit code.

    The code is 141 if stdout was closed (as by ``head``), 130 after Ctrl-C, 2 for an error that the command leaves to
    this function, such as a missing sweep, and 1 if a file cannot be read or written.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # A terminal without UTF-8 shows escape codes.
    try:
        with interruptions_kept():
            code = command()
        if sys.stdout is not None:  # as after >&-
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not is_closed_output(error):
            raise
        discard_output()
        return 128 + signal.SIGPIPE
    except ConfigError as error:
        if os.environ.get(TRACE_VARIABLE) == "1":
            raise
        for message in error.errors:
            print_error(message)
        return 2
    except OSError as error:
        if os.environ.get(TRACE_VARIABLE) == "1":
            raise
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            discard_output()
        print_error(describe_os_error(error))
        return 1
    except KeyboardInterrupt:
        print_error("interrupted")
        return 128 + signal.SIGINT
    return code


@contextmanager
def interruptions_kept() -> Iterator[None]:
    """Raise an interruption again if another error replaced it. Errors of files are kept, so that the user sees them.

    A signal can arrive at any line. When OmegaConf is interrupted while it fills a list, its own cleanup fails, and
    raises that error instead of the interruption.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, KeyboardInterrupt | InterruptedRunError):
            behind = behind.__context__
        if behind is None:
            raise
        raise behind from None


def is_closed_output(error: BaseException) -> bool:
    """Return whether an error means that the output was closed. Rich raises SystemExit then."""
    return isinstance(error, BrokenPipeError) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    )


def discard_output(stream: IO[str] | None = None) -> None:
    """Send the rest of the output nowhere, because Python would fail again when it exits."""
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def describe_os_error(error: OSError) -> str:
    """Return the path and the reason of an error of the system."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the current folder was deleted: change to another one"
    text = shorten(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
    return name_limit(text)


PROCESSES = "the limit of processes may be reached: raise it (ulimit -u, or pids.max of the cgroup), or end others"

LIMITS = {
    "Too many open files in system": "this machine has as many as it allows (sysctl fs.file-max): end other programs",
    "Too many open files": "raise their limit (ulimit -n)",
    "Resource temporarily unavailable": PROCESSES,
    "can't start new thread": PROCESSES,
}
"""Texts of errors at a limit of the system, with what to do. The first one in a message counts."""


ALLOCATION = re.compile(
    r"\bMemoryError|Unable to allocate|[Mm]emory allocation|allocate memory(?! in static TLS)|failed to map segment|"
    r"bad_alloc"
)
"""Texts of errors of memory that could not be allocated."""


def memory_limit_hint() -> str:
    """Return what to do about the limit of the memory of this process; empty if it has none."""
    limited = {
        "the address space is": (resource.RLIMIT_AS, "-v"),
        "the data of a process are": (resource.RLIMIT_DATA, "-d"),
    }
    for name, (kind, option) in limited.items():
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            return f"{name} limited (ulimit {option} {limit // 1024}): raise the limit, or use a shell without it"
    return ""


def file_size_hint(number: int | None = errno.EFBIG) -> str:
    """Return what to do about the limit of the size of the files of this process, which holds on every disk.

    Empty if it has no limit, or for the number of another error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if number != errno.EFBIG or soft == resource.RLIM_INFINITY:
        return ""
    # A shell cannot raise a limit that it has set with "ulimit -f 400", which also lowers the hard one.
    can_raise = hard == resource.RLIM_INFINITY
    return "raise the limit with ulimit -f unlimited" if can_raise else "use a shell without the limit (ulimit -f)"


def name_limit(message: str) -> str:
    """Return the message of an error; if it is about a limit of the system, with the limit in the same line."""
    lines = message.split("\n")
    for number, line in enumerate(lines):
        hints = [hint for text, hint in LIMITS.items() if text in line][:1]
        if PROCESSES in hints:  # A new thread needs memory too.
            hints = [memory_limit_hint() or PROCESSES]
        hints += [memory_limit_hint()] if ALLOCATION.search(line) else []
        if hint := next((hint for hint in hints if hint not in line), None):
            lines[number] = f"{line.rstrip('.')}: {hint}"
            break
    return "\n".join(lines)
