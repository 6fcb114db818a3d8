"""Settings that vary between runs, without those that follow from another setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distexp.report.data.environment_settings import (
    is_distinguishing,
    is_environment_setting,
    is_hardware,
    knows_hardware,
)
from distexp.report.data.setting_names import is_strategy_option, kernel_options, overridden_names
from distexp.report.data.settings import value_key
from distexp.runs.record import RunRecord

Settings = Mapping[str, Any]

KERNELS_DEPEND_ON = ("kernels", "strategy", "zero_stage", "engine", "model", "dataset", "precision", "device")
"""Settings that decide what ``kernels=fast`` chooses."""


def varying_settings(records: Sequence[RunRecord], settings: Sequence[Settings]) -> list[str]:
    """Return the names of the settings in which some runs differ.

    A setting that follows from another one is left out: with ``model=a,b`` the width of a model is part of the
    model. A setting that a user typed is always kept: with ``fsdp.replicas=1,2`` it is a choice.

    Args:
        records: The records of the runs.
        settings: The settings of the same runs, as ``read_settings`` returns them.
    """
    overridden = overridden_names(records)
    kept = []
    for name in dict.fromkeys(name for settings_of_run in settings for name in settings_of_run):
        if is_environment_setting(name) and not is_distinguishing(name, overridden):
            continue
        known = [own for record, own in zip(records, settings, strict=True) if _is_known(record, name, own)]
        if len({value_key(own.get(name)) for own in known}) < 2:
            continue
        leaders = _leading_settings(name, known)
        if not leaders or name in overridden or not _follows(known, name, leaders):
            kept.append(name)
    return kept


def _leading_settings(name: str, known: Sequence[Settings]) -> tuple[str, ...]:
    """Return the settings that decide another together, as ``model`` of ``model.width``; empty if none do."""
    if name in kernel_options() and any(settings.get("kernels") == "fast" for settings in known):
        return KERNELS_DEPEND_ON
    if is_strategy_option(name):
        return ("strategy",)
    section, dot, _ = name.partition(".")
    return (section,) if dot else ()


def _follows(known: Sequence[Settings], name: str, leaders: Sequence[str]) -> bool:
    """Return whether equal values of the leading settings imply equal values."""
    values: dict[str, str] = {}
    for settings in known:
        leading, value = value_key([settings.get(leader) for leader in leaders]), value_key(settings.get(name))
        if values.setdefault(leading, value) != value:
            return False
    return True


def _is_known(record: RunRecord, name: str, settings: Settings) -> bool:
    """Return whether a run has a value of a setting that can be compared.

    An invalid cell was never resolved, and a failed run may not know its GPU. Neither is a difference.
    """
    value = settings.get(name)
    if is_hardware(name):
        return value is not None or knows_hardware(record)
    if name not in settings:
        return False
    if record.status != "invalid":
        return True
    return value not in (None, "auto") and (not _is_rescaled(record) or name in overridden_names([record]))


def _is_rescaled(record: RunRecord) -> bool:
    """Return whether resolving changes settings by ``scale`` or ``scaling``."""
    sections = ((record.config.get(section) or {}).get("name") for section in ("scale", "scaling"))
    return any(name not in (None, "full", "fixed") for name in sections)
