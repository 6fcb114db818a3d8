"""The axes of a search: the keys that vary, and the values of each. ``choose.space`` restricts or extends them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from distexp.choose.axis_keys import AXES, DEFAULT_VALUES, MICRO_BATCH, STRATEGY, STRATEGY_OF, axis_of
from distexp.choose.space_checks import check_entry
from distexp.choose.space_entries import SpaceEntry, parse_entry
from distexp.config import ConfigError
from distexp.config.override_text import key_of, value_of

AUTO = "auto"
Values = dict[str, tuple[str, ...]]
"""Values to try, by key."""


@dataclass(frozen=True)
class Axes:
    """The values to try, by key.

    Attributes:
        values: Values of the axes of DEFAULT_VALUES that vary. Others keep the value of the command.
        micro_batches: Micro-batches to try; None for all divisors, empty for that of the command.
        further: Values of other keys.
        is_micro_batch_named: Whether the user requests several micro-batches, or one.
    """

    values: Mapping[str, tuple[str, ...]]
    micro_batches: tuple[int, ...] | None
    further: Mapping[str, tuple[str, ...]]
    is_micro_batch_named: bool = False

    def overrides_of(self, axis: str) -> list[str]:
        """Return the overrides of an axis; one empty override if it does not vary."""
        return [f"{axis}={value}" for value in self.values.get(axis, ())] or [""]


def read_axes(space: Sequence[str], command: Sequence[str]) -> Axes:
    """Return what to vary.

    A key that is typed on the command line has that value only, unless ``choose.space`` names it.

    Args:
        space: Entries of ``choose.space``. ``KEY=VALUE,VALUE`` sets the values of an axis, or adds a key. A key alone
            keeps its default values; then only the named axes vary.
        command: Overrides of the command.

    Raises:
        ConfigError: with all entries that are wrong.
    """
    is_searched = any(key_of(text) == MICRO_BATCH and value_of(text) == AUTO for text in command)
    return _make_axes(_read_entries(space), _values_in_command(command), any_micro_batch=is_searched)


def _read_entries(space: Sequence[str]) -> list[SpaceEntry]:
    """Return the checked entries of ``choose.space``.

    Raises:
        ConfigError: with all entries that are wrong.
    """
    entries: list[SpaceEntry] = []
    errors: list[str] = []
    for text in space:
        try:
            entry = parse_entry(text)
            check_entry(entry)
        except ConfigError as error:
            errors += error.errors
        else:
            entries.append(entry)
    if errors:
        raise ConfigError(errors)
    return entries


def _values_in_command(command: Sequence[str]) -> Values:
    """Return the axes that the command sets, with their values."""
    found: Values = {}
    for text in command:
        axis = axis_of(key_of(text))
        if axis in AXES:
            found[axis] = (value_of(text),)
    if found.get(MICRO_BATCH) == (AUTO,):
        del found[MICRO_BATCH]
    return found


def _make_axes(entries: Sequence[SpaceEntry], in_command: Values, *, any_micro_batch: bool) -> Axes:
    """Return the axes.

    Args:
        entries: Entries of ``choose.space``.
        in_command: Values that the command sets.
        any_micro_batch: Whether the command has ``train.micro_batch_size=auto``.
    """
    named = {entry.key: entry.values for entry in entries}
    chosen = in_command | {key: values for key, values in named.items() if values is not None}
    only_named = None in named.values()
    varied = {
        key: chosen.get(key, default)
        for key, default in DEFAULT_VALUES.items()
        if key in chosen or key in named or not only_named
    }
    further = {key: values for key, values in named.items() if key not in AXES and values}
    is_named = any_micro_batch or MICRO_BATCH in named
    micro_batches = _micro_batches(chosen, is_varied=is_named or not only_named)
    return Axes(_with_implied_strategy(varied, chosen), micro_batches, further, is_named)


def _micro_batches(chosen: Values, *, is_varied: bool) -> tuple[int, ...] | None:
    """Return the micro-batches to try; None for all divisors, empty for that of the command."""
    if MICRO_BATCH in chosen:
        return tuple(map(int, chosen[MICRO_BATCH]))
    return None if is_varied else ()


def _with_implied_strategy(varied: Values, chosen: Container[str]) -> Values:
    """Return the axes. A chosen option of strategies, such as a sharding, restricts the strategies to these."""
    implied = tuple(name for axis, name in STRATEGY_OF.items() if axis in chosen)
    if not implied or STRATEGY in chosen or STRATEGY not in varied:
        return varied
    return varied | {STRATEGY: implied}
