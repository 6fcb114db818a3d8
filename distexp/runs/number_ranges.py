"""Ranges of the numbers that a run writes: another program may have written or changed its files.

A time is 0 or at least a nanosecond, a part is at most as large as its whole, and no number is larger than what a
machine can have. A number outside of its range makes a file foreign: it is named, and not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from distexp.config.fields import FieldInfo, info_of
from distexp.config.keys import schema_fields
from distexp.runs.metrics import PARTS
from distexp.system.typed_values import matches, number_of

LARGEST = 1e18
"""Limit of numbers without a unit, such as counts of parameters and bytes."""

UNITS = {"_ms": 1e-3, "_s": 1.0, "_runtime": 1.0}
"""Ends of the keys of times, with their unit in seconds."""

SHORTEST_S, LONGEST_S = 1e-9, 1e10
"""Limits of a time that is not 0: a nanosecond, and 300 years."""

OTHER_ENDS = ("_mib", "_pct", "_j", "_w", "_share")
"""Ends of the keys of other numbers."""

NUMBERS = frozenset(
    {"rank", "node", "index", "share", "launches", "p50", "p90", "max", "relative", "blocks", "seconds"}
)
"""Other keys whose values are numbers in the parts of a record that have no types."""

BY_NAME = {
    **{f"utilization.{kind}.phases": ".average_pct" for kind in ("gpu", "cpu")},
    **{".phases": "_mib", ".by_collective": "_s"},
}
"""Ends of the keys of numbers by name, with a key that has their unit."""

SPREADS = ("step_time_s",)
"""Keys with ``p50``, ``p90`` and ``max``."""

SIGNED = frozenset(
    {"train_loss", "train_losses", "train_router_loss", "eval_loss", "eval_losses"}
    | {"power_difference_pct", "slower_by_pct", "watchers"}
)
"""Keys whose numbers may have any sign and size, as the loss of a custom model."""

COUNTED = tuple(
    f".{name}"
    for name in ("world_size", "total_steps", "steps_per_epoch", "mesh", "tensor", "context", "expert", "pipeline")
)
"""Ends of the keys whose numbers are at least 1."""

ROUNDING = 1.01
"""Largest ratio of a part and its whole. The parts are sums of many rounded numbers."""

LIMITS = {
    **dict.fromkeys((".padding_share", ".share", ".exposed_share", "_accuracies", ".expert_load"), ROUNDING),
    **dict.fromkeys((".exact_match", ".f1"), 100 * ROUNDING),
    **dict.fromkeys((".mfu", ".hfu", ".mfu_of_ceiling", ".hfu_of_ceiling"), 10.0),
    ".average_pct": 200.0,
    **dict.fromkeys(("_per_second", "_per_second_overall", "_mib"), 1e12),
    **dict.fromkeys(("_tflops_per_sample", "_tflops", "_per_device"), 1e9),
}
"""Ends of the keys of other numbers, with their limits. Peaks of datasheets and sampled values are not exact."""

SECTIONS = ("run", "error", "built", "environment", "metrics", "memory", "utilization", "predicted", "preflight")


def number_errors(raw: dict[str, Any]) -> Iterator[str]:
    """Yield an error for each impossible number of a record: a negative time, or ``cluster.nodes`` of 0."""
    if raw["status"] != "invalid":
        for key, info in _limited_keys():
            section, _, name = key.partition(".")
            value = (raw["config"].get(section) or {}).get(name)
            if isinstance(value, (int, float)) and (error := info.find_error(value)):
                yield f"config.{key}={value} {error}"
    for section in SECTIONS:
        yield from range_errors(raw.get(section), section)
    metrics = raw.get("metrics")
    if isinstance(metrics, dict):
        listed, spread = metrics.get("step_breakdown"), metrics.get("step_time_s")
        for entry in listed if isinstance(listed, list) else ():
            yield from (f"metrics.step_breakdown.{error}" for error in _breakdown_errors(entry))
        yield from (f"metrics.step_time_s.{error}" for error in _spread_errors(spread))


@cache
def _limited_keys() -> list[tuple[str, FieldInfo]]:
    """Return each key that takes a number within limits."""
    known = ((key, info_of(spec)) for key, spec in schema_fields())
    return [(key, info) for key, info in known if info.at_least is not None or info.above is not None]


def range_errors(content: Any, name: str) -> Iterator[str]:
    """Yield an error for each number in the content of a JSON file that is outside of its range, or is no number."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in SIGNED:
                yield from _type_errors(key, value, name)
                yield from range_errors(value, f"{name}.{key}")
    elif isinstance(content, list):
        for value in content:
            yield from range_errors(value, name)
    elif isinstance(content, (int, float)) and (problem := find_problem(name, content)):
        yield f"{name}={content} {problem}"


def without_impossible(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a record with null for each number outside of its range, or no numbers for its list."""
    kept = raw | {section: _drop(raw.get(section), section) for section in SECTIONS}
    metrics = kept.get("metrics")
    if isinstance(metrics, dict):
        listed = metrics.get("step_breakdown")
        if isinstance(listed, list) and any(error for entry in listed for error in _breakdown_errors(entry)):
            metrics["step_breakdown"] = None
        if any(_spread_errors(metrics.get("step_time_s"))):
            metrics["step_time_s"] = None
    return kept


def _drop(content: Any, name: str) -> Any:
    if isinstance(content, dict):
        return {key: value if key in SIGNED else _drop(value, f"{name}.{key}") for key, value in content.items()}
    if isinstance(content, list):
        kept = [_drop(value, name) for value in content]
        return kept if kept.count(None) == content.count(None) else []  # Readers format each number of a list.
    return None if isinstance(content, (int, float)) and find_problem(name, content) else content


def _type_errors(key: str, value: Any, name: str) -> Iterator[str]:
    """Yield an error for the value of a key that must have a number, and has something else."""
    is_number = key in NUMBERS or key.endswith((*UNITS, *OTHER_ENDS)) or name.endswith(tuple(BY_NAME))
    if is_number and key not in SPREADS and not matches(value, float | None):
        yield f"{name}.{key}={repr(value)[:60]} is not a number"


def find_problem(name: str, number: float) -> str:
    """Return why the number of a dotted key is impossible; empty if it is possible."""
    if not math.isfinite(number):
        return "is not finite"
    if number < (1 if name.endswith(COUNTED) else 0):
        return "is too small"
    if (parent := name.rpartition(".")[0]).endswith(tuple(BY_NAME)):
        name = next(unit for end, unit in BY_NAME.items() if parent.endswith(end))
    unit_s = next((unit for end, unit in UNITS.items() if name.endswith(end)), None)
    if unit_s is not None and 0 < number < SHORTEST_S / unit_s:
        return "is too short for a time"
    limit = next((most for end, most in LIMITS.items() if name.endswith(end)), LARGEST)
    return "is too large" if number > (limit if unit_s is None else LONGEST_S / unit_s) else ""


def _spread_errors(spread: Any) -> Iterator[str]:
    """Yield why a median, the 90th percentile or the maximum is impossible: it is larger than the next one."""
    names = [name for name in ("p50", "p90", "max") if isinstance(spread, dict) and matches(spread.get(name), float)]
    for name, longer in pairwise(names):
        if spread[name] > ROUNDING * spread[longer]:
            yield f"{name}={spread[name]:g} is more than {longer}={spread[longer]:g}"


def _breakdown_errors(entry: Any) -> Iterator[str]:
    """Yield why an entry of ``metrics.step_breakdown`` is impossible: a step without a time, or with too long parts."""
    if not isinstance(entry, dict):
        return
    step_ms = number_of(entry, "step_ms")
    if step_ms is None or step_ms <= 0:
        yield f"step_ms={entry.get('step_ms')} must be above 0"
        return
    parts = {key: ms for name in PARTS if (ms := number_of(entry, key := f"{name}_ms")) is not None}
    largest = max(parts, key=lambda key: parts[key], default="")
    if sum(parts.values()) > step_ms * ROUNDING:
        yield f"{largest}={parts[largest]:g} and the other parts are more than step_ms={step_ms:g}"
