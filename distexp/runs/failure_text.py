"""Why a run failed, as one line: the error of its record, shortened to what a reader needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError

MAX_MESSAGE = 300
"""Characters of an error message on the screen. The record and the log have the whole message."""

TRACEBACK = "Traceback (most recent call last)"

EXCEPTION_LINE = re.compile(r"(?:\w+\.)*(\w+): (.+)")
"""Last line of a traceback: class with its module, and message."""

TORCH_CHECK = re.compile(r"\[enforce fail at [^\]]*\]\s*(?:err == 0)?\.?\s*")
"""Source line of a check of torch, at the start of its message."""


def join_errors(errors: Iterable[str]) -> str:
    """Join the errors of an invalid cell."""
    return " | ".join(errors)


def failure_text(record: RunRecord) -> str:
    """Return why a run failed: ``ValueError in phase train: bad value``.

    The message of an invalid run is returned as it is, and a message of a library is shortened. The text is empty if
    the record has no error.
    """
    error = record.error
    if error is None:
        return ""
    if record.status == "invalid":
        return error.message
    phase = f" in phase {error.phase}" if error.phase else ""
    place = f" at {error.place}" if error.place else ""
    return f"{error.type}{phase}{place}: {shorten_message(error)}"


def shorten_message(error: RunError, limit: int = MAX_MESSAGE) -> str:
    """Return the first meaningful line of an error message, and of a traceback in it the error at its end.

    A ConfigError is a list of short messages already.
    """
    lines = [line.rstrip() for line in error.message.splitlines() if line.strip()]
    starts = [position for position, line in enumerate(lines) if TRACEBACK in line]
    if starts:
        inner = [line for line in lines[starts[-1] + 1 :] if not line.startswith(" ")]
        text = _without_own_type(_first_statement(inner or lines), error.type)
    elif error.type == "ConfigError":
        return error.message
    else:
        text = _first_statement(lines)
    text = TORCH_CHECK.sub("", text)
    return text if len(text) <= limit else f"{text[: limit - 1].rpartition(' ')[0] or text[: limit - 1]}…"


def _first_statement(lines: Sequence[str]) -> str:
    """Return the first line. If it ends with a colon, the lines that it announces follow up to the next full line."""
    taken = list(lines[:1])
    for line in lines[1:]:
        if not taken[-1].endswith(":"):
            break
        taken.append(line.strip())
    return " ".join(taken)


def _without_own_type(line: str, name: str) -> str:
    """Return the last line of a traceback without its module, and without its class if that is ``name``."""
    found = EXCEPTION_LINE.fullmatch(line)
    if found is None:
        return line
    return found[2] if found[1] == name else f"{found[1]}: {found[2]}"
