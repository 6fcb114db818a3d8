"""What was chosen for a run, under the short names that people type, and which of it differs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distexp.report.data.environment_settings import (
    is_distinguishing,
    is_environment_key,
    is_environment_setting,
    is_hardware,
    knows_hardware,
    read_environment_settings,
)
from distexp.report.data.short_names import flatten, overridden_names, short_name
from distexp.runs.record import RunRecord

ORDER = (
    "model", "dataset", "engine", "strategy", "sharding", "zero_stage", "offload", "precision", "scaling",
    "device", "gpu", "nodes", "workers",
)  # fmt: skip
"""The usual ones stand first, in this order."""

STRATEGY_SECTIONS = ("ddp", "fsdp", "deepspeed")
"""Sections that mean nothing under another strategy."""

FOLLOWS = {"sharding": "strategy", "zero_stage": "strategy"} | dict.fromkeys(STRATEGY_SECTIONS, "strategy")
"""What is given by another setting as a rule: such a column is shown only where it adds something."""

NOT_A_SETTING = ("name", "exercise", "scale", "sweep", "trusted_packages", "cluster")
"""Places and bookkeeping; what matters of ``cluster`` is added by name."""

SEED = "seed"


def read_settings(record: RunRecord) -> dict[str, Any]:
    """The settings of a run under their short names, then its conditions; KeyError where a section is missing."""
    config = record.config
    strategy = config["strategy"]["name"]
    found: dict[str, Any] = {}
    for key, value in flatten(config):
        section, _, rest = key.partition(".")
        if section in NOT_A_SETTING or section == "offload" or rest in ("_target_", "keys") or is_environment_key(key):
            continue
        foreign = section in STRATEGY_SECTIONS and section != strategy
        found[short_name(key)] = None if foreign else value
    offload, cluster = config["offload"], config["cluster"]
    found["offload"] = "pinned" if offload["pin_memory"] else offload["enabled"]
    found["device"], found["nodes"] = cluster["device"], cluster["nodes"]
    found["workers"] = world_size(record)
    found |= read_environment_settings(record)
    first = {name: found.pop(name) for name in ORDER if name in found}
    return {**first, **found}


def world_size(record: RunRecord) -> int | None:
    """Workers in all; None where an invalid cell never decided."""
    if record.built is not None:
        return record.built.world_size
    cluster = record.config["cluster"]
    per_node = cluster["workers_per_node"]
    return None if per_node is None else int(cluster["nodes"]) * int(per_node)


def task_name(settings: Mapping[str, Any]) -> str:
    """The model on its data: speed, memory and losses of others are no better or worse."""
    return f"{settings.get('model')} on {settings.get('dataset')}"


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Samples of an optimizer step over all workers; None where one of its factors is not known."""
    parts = [settings.get(name) for name in ("micro_batch_size", "gradient_accumulation_steps", "workers")]
    return math.prod(int(part) for part in parts if part) if all(parts) else None


def varying_settings(records: Sequence[RunRecord], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell these runs apart, without those that follow from another one.

    A setting that someone typed is never taken for one that follows: with ``model=a,b`` a model's width
    is part of the model, with ``fsdp.replicas=1,2`` it is a choice.
    """
    names = list(dict.fromkeys(name for each in settings for name in each))
    typed = overridden_names(records)
    kept = []
    for name in names:
        if is_environment_setting(name) and not is_distinguishing(name, typed):
            continue
        decided = [
            (each.get(name), each) for record, each in zip(records, settings, strict=True)
            if not _undecided(record, name, each)
        ]  # fmt: skip
        if len({_key(value) for value, _ in decided}) < 2:
            continue
        leader = FOLLOWS.get(name) or _leader(name)
        if leader is None or name in typed or not _follows(decided, leader):
            kept.append(name)
    return kept


def _leader(name: str) -> str | None:
    """``model.hidden_size`` belongs to ``model``, ``fsdp.wrap`` to ``strategy``."""
    section, dot, _ = name.partition(".")
    return FOLLOWS.get(section, section) if dot else None


def _follows(decided: Sequence[tuple[Any, Mapping[str, Any]]], leader: str) -> bool:
    given: dict[str, str] = {}
    return all(given.setdefault(_key(each.get(leader)), _key(value)) == _key(value) for value, each in decided)


def _undecided(record: RunRecord, name: str, settings: Mapping[str, Any]) -> bool:
    """A refused cell was never resolved, a broken run may not know its GPU: that is no difference."""
    value = settings.get(name)
    if is_hardware(name):
        return value is None and not knows_hardware(record)
    if name not in settings:
        return True
    if record.status != "invalid":
        return False
    return value in (None, "auto") or (_rescaled(record) and name not in overridden_names([record]))


def _rescaled(record: RunRecord) -> bool:
    """Whether resolving would have changed what was composed: by ``scale`` or ``scaling``."""
    sections = ((record.config.get(section) or {}).get("name") for section in ("scale", "scaling"))
    return any(name not in (None, "full", "fixed") for name in sections)


def _key(value: Any) -> str:
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)  # most are, and a report has a million of them
    return json.dumps(value, sort_keys=True, default=str)


def training_key(settings: Mapping[str, Any]) -> str:
    """Equal for runs that differ by their seed, or by conditions, at most."""
    return _key({name: value for name, value in settings.items() if name != SEED and not is_environment_setting(name)})


def format_setting(value: Any, limit: int | None = None) -> str:
    """A value as it is typed; its end where it is longer than a limit, for that is what paths differ in."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")
    return text if limit is None or len(text) <= limit else "…" + text[-limit + 1 :]
