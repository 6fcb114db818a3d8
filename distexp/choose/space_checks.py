"""Checks of the entries of ``choose.space``: which keys may vary, and which values they may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hydra.core.global_hydra import GlobalHydra

from distexp.choose.axis_keys import AXES, CHECKPOINTING, DEFAULT_VALUES, GROUP_OF_KEY, MICRO_BATCH
from distexp.choose.space_entries import SpaceEntry
from distexp.config import ConfigError
from distexp.config.field_info import info_of
from distexp.config.key_info import schema_fields
from distexp.config.paths import options_of
from distexp.strategies.base import shipped_strategies

FURTHER_SECTIONS = (*(kind.section for kind in shipped_strategies().values() if kind.section), "offload")
FURTHER_KEYS = (
    *("train.logits", "train.loss", "train.loss_chunk_tokens", "train.compile", "train.activation_budget"),
    *("train.compute_weights", "train.fused_update", "train.channels_last"),
    *("model.attention", "dataset.num_workers", "dataset.cache"),
)
"""Keys outside of FURTHER_SECTIONS that ``choose.space`` may add, because the training stays the same."""


def check_entry(entry: SpaceEntry) -> None:
    """Check the key and the values of an entry.

    Raises:
        ConfigError: with what is possible instead.
    """
    _check_key(entry)
    if entry.values is not None:
        _check_values(entry, entry.values)
    elif entry.key not in AXES:
        raise ConfigError(f"choose.space: {entry.text} has no values: write {entry.key}=VALUE,VALUE")


def further_keys() -> tuple[str, ...]:
    """Return the keys that ``choose.space`` may add to the axes."""
    fields = [(name, spec) for name, spec in schema_fields() if name.partition(".")[0] in FURTHER_SECTIONS]
    varies = (name for name, spec in fields if name not in GROUP_OF_KEY and not info_of(spec).path)
    return (*varies, *FURTHER_KEYS)


def _check_key(entry: SpaceEntry) -> None:
    known = (*AXES, *further_keys())
    if entry.key in known:
        return
    if entry.key in {name for name, _ in schema_fields()}:
        raise ConfigError(
            f"choose.space: {entry.text} changes the training or its resources: leave it out, or set it for all "
            "candidates"
        )
    similar = get_close_matches(entry.key, known, n=1) or [key for key in known if key.endswith(f".{entry.key}")]
    hint = f"did you mean {similar[0]}?" if similar else f"use {', '.join(AXES)}"
    raise ConfigError(f"choose.space: {entry.key} is not a key that can vary: {hint}")


@dataclass(frozen=True)
class _ValueProblem:
    """Values that a key cannot have, and the text of those that it can."""

    wrong: Sequence[str]
    limits: str


def _check_values(entry: SpaceEntry, values: Sequence[str]) -> None:
    if entry.key == MICRO_BATCH:
        problem = _ValueProblem([value for value in values if not value.isdecimal() or int(value) < 1], "at least 1")
    elif entry.key in DEFAULT_VALUES:
        problem = _check_axis(entry.key, values)
    else:
        problem = _check_further(entry.key, values)
    if problem.wrong:
        raise ConfigError(
            f"choose.space: {entry.text}: {entry.key}={problem.wrong[0]} is not possible: use {problem.limits}"
        )


def _check_axis(axis: str, values: Sequence[str]) -> _ValueProblem:
    options = ("false", "true") if axis == CHECKPOINTING else _options_of(axis)
    return _ValueProblem([value for value in values if value not in options], ", ".join(options))


def _options_of(group: str) -> Sequence[str]:
    """Return the options of a config group, also those in a folder of the user (``--config-dir``)."""
    hydra = GlobalHydra.instance()
    found = hydra.config_loader().get_group_options(group) if hydra.is_initialized() else []
    return sorted({*options_of(group), *found})


def _check_further(key: str, values: Sequence[str]) -> _ValueProblem:
    """Check values of a key with a list of choices. Other values are checked when the candidates are composed."""
    info = next(info_of(spec) for name, spec in schema_fields() if name == key)
    choices = [str(choice).lower() if isinstance(choice, bool) else choice for choice in info.choices]
    if not choices or info.at_least:
        return _ValueProblem([], info.limits)
    return _ValueProblem([value for value in values if value not in (*choices, "null")], info.limits)
