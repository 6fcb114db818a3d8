"""The sizes to forecast: those that the user typed, or powers of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from distexp.cli.overrides import parse
from distexp.config import ConfigError
from distexp.forecast.profiled_run import ProfiledRun
from distexp.system.hardware import visible_gpus

NODES, WORKERS_PER_NODE = "cluster.nodes", "cluster.workers_per_node"
SIZE_KEYS = (NODES, WORKERS_PER_NODE)

MAX_WORKERS = 4096
"""Most workers of a forecast."""

DEFAULT_WORKERS = 64
"""Most workers that are forecast if no size is typed."""

USUAL_GPUS = 8
"""GPUs of a node, if nothing is known about the nodes."""

Size = tuple[int, int]
"""Number of nodes, and workers of each node."""


def choose_sizes(run: ProfiledRun, typed: Sequence[str]) -> list[Size]:
    """Return the sizes to forecast, in the order of the command line.

    Args:
        run: The profiled run.
        typed: Overrides that the user has typed. Those of other keys are ignored.

    Raises:
        ConfigError: a size is not a positive whole number, or too large.
    """
    values = dict(_typed_values(typed))
    if not values:
        return default_sizes(_workers_of_node(run))
    nodes, workers = run.size
    sizes = list(dict.fromkeys(product(values.get(NODES, [nodes]), values.get(WORKERS_PER_NODE, [workers]))))
    for count, per_node in sizes:
        if count * per_node > MAX_WORKERS:
            raise ConfigError(
                f"{NODES}={count} x {WORKERS_PER_NODE}={per_node} makes {count * per_node:,} workers, but a forecast "
                f"has at most {MAX_WORKERS:,}: lower one of them"
            )
    return sizes


def _typed_values(typed: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    for override in parse(typed):
        key = override.get_key_element().lstrip("+")
        if key in SIZE_KEYS:
            values = list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]
            yield key, [_checked(key, value) for item in values for value in _items(item)]


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _checked(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f"{key}={value} must be a whole number from 1: write {key}=1,2,4")


def default_sizes(workers_of_node: int) -> list[Size]:
    """Return powers of two up to 64 workers: of a node first, then of full nodes."""
    powers = [2**exponent for exponent in range(DEFAULT_WORKERS.bit_length())]
    in_node = [(1, count) for count in powers if count < workers_of_node and count <= DEFAULT_WORKERS]
    full = [(nodes, workers_of_node) for nodes in powers if nodes * workers_of_node <= DEFAULT_WORKERS]
    return in_node + full


def _workers_of_node(run: ProfiledRun) -> int:
    """Return how many workers a node has room for."""
    _, workers = run.size
    if not run.on_gpu:
        environment = run.record.environment
        threads = run.setting("cluster", "cpus_per_worker") or 1
        return max(workers, ((environment.cpu_count if environment else None) or 1) // threads)
    if gpus := run.setting("cluster", "gpus_per_node"):
        return max(workers, int(gpus))
    known = max(workers, len(visible_gpus()))
    return known if known > 1 else USUAL_GPUS


def as_cell(size: Size) -> list[str]:
    """Return the overrides of a size."""
    return [f"{key}={value}" for key, value in zip(SIZE_KEYS, size, strict=True)]


def sizes_of(overrides: Mapping[str, Any]) -> Size:
    """Return the size of composed values of ``cluster``."""
    return int(overrides["nodes"]), int(overrides["workers_per_node"])
