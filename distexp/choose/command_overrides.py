"""The overrides of a command with those of a candidate in their place."""

from __future__ import annotations

from collections.abc import Sequence

from distexp.choose.axis_keys import GROUP_OF_KEY, STRATEGY_OF
from distexp.cli.overrides import quote_choice
from distexp.config.paths import config_groups
from distexp.plan.cells import replace_overrides
from distexp.strategies.single import REFERENCE

SHARDED_KEYS = (*(f"{key}=" for key in (*STRATEGY_OF, *GROUP_OF_KEY)), "offload.")
"""Overrides of a command that contradict the reference."""


def with_overrides(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, with those of a candidate in their place."""
    return replace_overrides(command, [quote_choice(text, config_groups()) for text in overrides])


def without_other_strategy(command: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, without those that contradict the reference if others choose it."""
    if REFERENCE[0] not in overrides:
        return list(command)
    return [text for text in command if not text.startswith(SHARDED_KEYS)]
