"""Warnings about sweeps over strategies with an option that not all of them have: ``zero_stage=2``, or two workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import Glob, Override

from distexp.cli.overrides import plain_value
from distexp.resolve.implied_strategy import implied_strategy

IMPLYING_GROUPS = ("sharding", "zero_stage")
"""Groups whose options imply a strategy."""

STRATEGY_WITH_DEFAULT = {"zero_stage=2": "deepspeed", "sharding=full_shard": "fsdp"}
"""Options that are the default of a strategy."""

ONE_WORKER = "single"
"""Strategy that trains on one worker."""

WORKER_KEYS = ("cluster.nodes", "cluster.workers_per_node")
"""Keys whose product is the number of workers."""


@dataclass(frozen=True)
class _ImplyingOption:
    """An option of one strategy.

    Attributes:
        text: The override as it is typed, such as ``zero_stage=1,2``.
        strategy: The strategy that it implies.
    """

    text: str
    strategy: str

    @property
    def is_default(self) -> bool:
        """Return whether the strategy has this option if nothing is typed."""
        return STRATEGY_WITH_DEFAULT.get(self.text) == self.strategy


def strategy_sweep_warnings(overrides: Sequence[Override]) -> Iterator[str]:
    """Yield a warning for what makes cells of a sweep over strategies invalid, with the sweep to type."""
    by_key = {override.get_key_element(): override for override in overrides}
    swept = by_key.get("strategy")
    if swept is None or not swept.is_sweep_override() or isinstance(swept.value(), Glob):
        return
    options, strategies = _implying_options(by_key), _values(swept)
    valid = set(strategies).intersection(*({option.strategy} for option in options))
    if options and (invalid := [strategy for strategy in strategies if strategy not in valid]):
        yield _warning(options, strategies, invalid)
    yield from _warn_about_workers(by_key, strategies)


def _warn_about_workers(by_key: Mapping[str, Override], strategies: Sequence[str]) -> Iterator[str]:
    """Yield a warning if the sweep has ``single`` and others, all with the same numbers of workers."""
    typed = [by_key[key] for key in WORKER_KEYS if key in by_key and set(_values(by_key[key])) - {"1"}]
    others = [strategy for strategy in strategies if strategy != ONE_WORKER]
    if not typed or not others or ONE_WORKER not in strategies:
        return
    workers = [str(override.input_line) for override in typed]
    one = [f"{override.get_key_element()}=1" for override in typed]
    listed = ",".join(map(_cell, ([f"strategy={ONE_WORKER}", *one], [f"strategy={','.join(others)}", *workers])))
    yield (
        f"strategy={ONE_WORKER} trains on one worker, so it is invalid with {' '.join(workers)}: "
        f"to compare it with the others, write 'sweep.cells=[{listed}]' instead"
    )


def _cell(overrides: Sequence[str]) -> str:
    """Return an entry of ``sweep.cells``."""
    listed = ",".join(f'"{text}"' for text in overrides)
    return f"[{listed}]"


def _implying_options(by_key: Mapping[str, Override]) -> list[_ImplyingOption]:
    """Return the options that imply one strategy each."""
    found = []
    for override in (by_key[group] for group in IMPLYING_GROUPS if group in by_key):
        implied = {implied_strategy(override.get_key_element(), option) for option in _values(override)}
        if len(implied) == 1 and None not in implied:
            found.append(_ImplyingOption(str(override.input_line).replace("'", ""), str(*implied)))
    return found


def _values(override: Override) -> list[str]:
    if isinstance(override.value(), Glob):
        return []
    values = override.sweep_iterator() if override.is_sweep_override() else [override.value()]
    return [str(plain_value(value)) for value in values]


def _warning(options: Sequence[_ImplyingOption], strategies: Sequence[str], invalid: Sequence[str]) -> str:
    """Return the warning, with a sweep that has each strategy, and each option with its strategy only."""
    reasons = " and ".join(f"{option.text} is for strategy={option.strategy}" for option in options)
    which = "all cells" if len(invalid) == len(strategies) else f"the cells with strategy={','.join(invalid)}"
    implied = [option.strategy for option in options]
    rest = [strategy for strategy in strategies if strategy not in implied]
    cells = [f"strategy={','.join(rest)}"] * bool(rest) + [option.text for option in options]
    listed = ",".join(_cell([cell]) for cell in cells)
    return (
        f"{reasons}, so {which} are invalid: to compare them, write {_shorter(options, rest)}'sweep.cells=[{listed}]'"
    )


def _shorter(options: Sequence[_ImplyingOption], rest: Sequence[str]) -> str:
    """Return the shorter sweep, if all options are defaults; else an empty text."""
    if not all(option.is_default for option in options):
        return ""
    texts, default = " and ".join(option.text for option in options), "defaults" if len(options) > 1 else "default"
    strategies = ",".join([*rest, *(option.strategy for option in options)])
    return f"strategy={strategies} without {texts} (the {default}), or "
