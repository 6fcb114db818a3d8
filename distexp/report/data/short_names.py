"""Dotted keys, and the short names under which people type them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from distexp.runs.record import RunRecord

SHORT = {
    "strategy.name": "strategy",
    "fsdp.sharding": "sharding",
    "deepspeed.zero_stage": "zero_stage",
    "precision.name": "precision",
    "engine.name": "engine",
    "scaling.name": "scaling",
    "model.name": "model",
    "dataset.name": "dataset",
    "offload.enabled": "offload",
    "offload.pin_memory": "offload",
    "cluster.nodes": "nodes",
    "cluster.workers_per_node": "workers",
    "cluster.device": "device",
}


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; an empty mapping has none."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def short_name(key: str) -> str:
    """``train.seed`` -> ``seed``, ``fsdp.sharding`` -> ``sharding``, ``model.num_layers`` as it is."""
    for prefix in ("cluster.environment.", "cluster.", "train."):
        if key.startswith(prefix) and key not in SHORT:
            return key.removeprefix(prefix)
    return SHORT.get(key, key)


def overridden_names(records: Sequence[RunRecord]) -> set[str]:
    """Short names of what the overrides of some runs set."""
    keys = {text.split("=", 1)[0].lstrip("+~") for record in records for text in record.run.overrides}
    return {short_name(key) for key in keys}
