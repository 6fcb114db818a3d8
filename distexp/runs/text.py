"""Short texts about runs that several commands print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distexp.runs.checked_values import number_of, texts_of
from distexp.runs.record import RunError, RunRecord

MAX_ITEMS = 8
STAND_IN = "stand-in for"

MAX_MESSAGE = 300
"""Characters of an error message on the screen. The record and the log have the whole message."""

TRACEBACK = "Traceback (most recent call last)"

EXCEPTION_LINE = re.compile(r"(?:\w+\.)*(\w+): (.+)")
"""Last line of a traceback: class with its module, and message."""

TORCH_CHECK = re.compile(r"\[enforce fail at [^\]]*\]\s*(?:err == 0)?\.?\s*")
"""Source line of a check of torch, at the start of its message."""


TYPED_BOOLEAN = re.compile(r"(?<=[=,\[:])(True|False)(?=[,\]}]|$)")
"""A boolean as Hydra writes it in the overrides of a sweep."""


def format_override(text: str) -> str:
    """Return an override as it is typed: without Hydra's quotes, and with ``true`` for ``True``."""
    return TYPED_BOOLEAN.sub(lambda found: found[0].lower(), text.replace("'", ""))


def join_first(items: Iterable[str], limit: int = MAX_ITEMS) -> str:
    """Join the first items with commas and count the others: ``a, b and 3 more``."""
    known = list(items)
    rest = len(known) - limit
    return ", ".join(known[:limit]) + (f" and {rest} more" if rest > 0 else "")


def join_errors(errors: Iterable[str]) -> str:
    """Join the errors of an invalid cell."""
    return " | ".join(errors)


def format_ids(numbers: Sequence[int]) -> str:
    """Join run numbers: ``0-5, 8, 9``.

    Three or more consecutive numbers become a range.
    """
    return join_first(part for block in _consecutive(numbers) for part in _format_block(block))


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun in singular or plural: ``1 run``, ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_runs(numbers: Sequence[int]) -> str:
    """Name runs by number: ``run 3``, ``runs 0-5, 8``."""
    return f"run{'' if len(numbers) == 1 else 's'} {format_ids(numbers)}"


def format_about(seconds: float) -> str:
    """Return a rough duration: ``25 s``, ``3 min``, ``2 h 10 min``."""
    if seconds < 57.5:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = max(1, round(seconds / 60))
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


def suggest_command(name: str, directory: Path) -> str:
    """Return the command line of a sub-command: ``distexp status DIR``."""
    return f"distexp {name} {shlex.quote(str(directory))}"


def model_label(name: str, scale: str) -> str:
    """Return a model's name; ``tiny stand-in for bloom_560m`` if its sizes were made small.

    A local folder is shown by its last part.
    """
    short = Path(name).name if Path(name).is_absolute() else name
    return short if scale == "full" or short.endswith(f"_{scale}") else f"{scale} {STAND_IN} {short}"


def record_model_label(record: RunRecord) -> str:
    """Return the label of a record's model; see ``model_label``."""
    scale = (record.config.get("scale") or {}).get("name") or "full"
    return model_label(str(record.config["model"]["name"]), scale)


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
    return f"{error.type}{phase}: {shorten_message(error)}"


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


def _consecutive(numbers: Sequence[int]) -> Iterator[list[int]]:
    """Yield blocks of consecutive numbers, in ascending order."""
    block: list[int] = []
    for number in sorted(numbers):
        if block and number != block[-1] + 1:
            yield block
            block = []
        block.append(number)
    if block:
        yield block


def _format_block(block: Sequence[int]) -> list[str]:
    return [f"{block[0]}-{block[-1]}"] if len(block) > 2 else [str(number) for number in block]


def describe_straggler(entry: Mapping[str, Any]) -> str:
    """Return an entry of ``metrics.stragglers`` as a sentence without its period.

    For example: ``Rank 3 (GPU 3 of node07) is 12% slower: its SM clock is 1,200 MHz, that of the others 1,755 MHz``.
    """
    places = [f"GPU {entry['gpu']}" if entry.get("gpu") is not None else None, entry.get("host")]
    place = " of ".join(str(each) for each in places if each is not None)
    slower = number_of(entry, "slower_by_pct")
    up_to = "up to " if entry.get("is_upper_bound") is True else ""
    verb = "has a problem" if slower is None else f"is {up_to}{slower:.0f}% slower"
    evidence = "; ".join(texts_of(entry, "evidence"))
    return f"Rank {entry.get('rank')}{f' ({place})' if place else ''} {verb}{f': {evidence}' if evidence else ''}"


def format_amount(value: float) -> str:
    """Return a number with three significant digits, never in scientific notation."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}" if abs(value) >= 0.001 or not value else f"{value:.6f}"


def format_kwh(kwh: float) -> str:
    """Return an energy with its unit: ``1.25 kWh``, or below 0.01 kWh ``3.50 Wh``."""
    return f"{format_amount(kwh)} kWh" if kwh >= 0.01 or not kwh else f"{format_amount(1000 * kwh)} Wh"
