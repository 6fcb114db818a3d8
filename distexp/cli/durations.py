"""Hints for durations such as ``30m``, ``1:30`` and Slurm's ``1-12:00:00`` in a key that takes a number."""

from __future__ import annotations

import re

UNITS = {"_min": ("minutes", 60), "_s": ("seconds", 1)}
"""Unit of a key, and its length in seconds, by the end of the key."""

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Length of the units that users type, by their first letter."""

PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*(d|days?|h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?)(?![a-z])\s*")
"""A number with a unit, as in ``30m`` or ``30 minutes``."""

CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d{1,2}):(\d{1,2})")
"""Hours, minutes and seconds, as Slurm writes them, with or without days."""

SHORT_CLOCK = re.compile(r"(\d+):(\d{1,2})")
"""Hours and minutes, or minutes and seconds."""


def explain_duration(key: str, value: str) -> str:
    """Return which number to write for a duration, as the end of a message; empty if it is none."""
    unit = next((unit for end, unit in UNITS.items() if key.endswith(end)), None)
    if unit is None:
        return ""
    name, length = unit
    text = value.strip("'\" ").lower()
    if short := SHORT_CLOCK.fullmatch(text):
        first, second = (int(part) for part in short.groups())
        long, brief = 3600 * first + 60 * second, 60 * first + second
        return (
            f", in {name}: write {key}={long / length:g} for {first} h {second} min, or "
            f"{key}={brief / length:g} for {first} min {second} s"
        )
    seconds = _seconds(text)
    return "" if seconds is None else f", in {name}: write {key}={seconds / length:.12g}"


def _seconds(text: str) -> float | None:
    """Return the seconds of a duration with units, or of days, hours, minutes and seconds; None for another text."""
    if clock := CLOCK.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    parts = PARTS.findall(text)
    if not parts or PARTS.sub("", text):
        return None
    return sum(float(number) * SECONDS[unit[0]] for number, unit in parts)
