"""Warnings about keys that a command would ignore, and about sweeps over strategies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.types import Glob, Override

from distexp.config import Command, Config
from distexp.config.keys import get_value, sections, strategy_groups
from distexp.config.overrides import plain_value, values_of
from distexp.resolve.resolution import implied_strategy
from distexp.strategies.base import COMMUNICATION, shipped_strategies


class Reader(NamedTuple):
    """A sub-command that reads keys."""

    command: str  # How it is typed.
    commands: tuple[Command, ...]  # Those that run it.

    def example(self, key: str, override: str) -> str:
        """Return what to type for a key instead of an override."""
        return f"{self.command} {'--json' if key.endswith('.output') else override}"


CHOOSE = Reader("distexp choose", (Command.CHOOSE,))
FORECAST = Reader("distexp forecast RUN", (Command.FORECAST,))
VERIFY = Reader("distexp verify", (Command.VERIFY,))
PLAN = Reader("distexp plan", (Command.PLAN, Command.FORECAST))

READERS: Mapping[str, Reader] = {"choose": CHOOSE, "forecast": FORECAST, "verify": VERIFY, "plan.output": PLAN}
"""Sections and keys with the only command that reads them. The other keys of ``plan`` are for runs too."""


def ignored_keys(overrides: Sequence[Override], command: Command) -> Iterator[tuple[Override, str]]:
    """Yield each override that a command would ignore, with its error. An override with the default is none."""
    for override in overrides:
        reader, text = reader_of(_key(override)), str(override.input_line)
        if reader is not None and command not in reader.commands and _differs(override):
            hint = f"type {reader.example(_key(override), text)}, or leave it out"
            yield override, f"{text} is for {reader.command} and has no effect here: {hint}"


def reader_of(key: str) -> Reader | None:
    """Return the only command that reads a key; None if runs read it."""
    return READERS.get(key) or READERS.get(key.partition(".")[0])


def _differs(override: Override) -> bool:
    """Return whether an override sets another value than the default. Hydra refuses a key that is unknown."""
    section, _, name = _key(override).partition(".")
    defaults = vars(sections()[section]())
    if not name:
        value = override.value()
        return isinstance(value, dict) and any(plain_value(item) != defaults.get(key) for key, item in value.items())
    is_set = name in defaults and not override.is_delete()
    return is_set and any(plain_value(item) != defaults[name] for item in values_of(override))


def _key(override: Override) -> str:
    return str(override.key_or_group)


# Warnings about sweeps over strategies with an option that not all of them have: ``zero_stage=2``, or two workers.


@dataclass(frozen=True)
class _WorkerCount:
    """A key of the number of workers, with values other than 1."""

    key: str
    text: str  # The override as it is typed, such as ``cluster.nodes=1,2``.
    several: str  # The override without the value 1.


@lru_cache(maxsize=1)
def one_worker_strategies() -> frozenset[str]:
    """Return the strategies that train on one worker."""
    return frozenset(name for name, kind in shipped_strategies().items() if COMMUNICATION not in kind.requires)


def _alone(strategies: Sequence[str]) -> str:
    """Return the override with those of some strategies that train on one worker."""
    return f"strategy={','.join(name for name in strategies if name in one_worker_strategies())}"


def strategy_sweep_warning(overrides: Sequence[Override]) -> str | None:
    """Return a warning about invalid cells of a sweep over strategies, with the sweep to type; None without any."""
    by_key = {override.get_key_element(): override for override in overrides}
    swept = by_key.get("strategy")
    if swept is None or not swept.is_sweep_override() or isinstance(swept.value(), Glob):
        return None
    options, strategies = _implying_options(by_key), _values(swept)
    alone = one_worker_strategies()
    workers = _worker_counts(by_key) if alone.intersection(strategies) and not alone.issuperset(strategies) else []
    valid = set(strategies).intersection(*({strategy} for strategy in options.values()))
    if invalid := [strategy for strategy in strategies if strategy not in valid]:
        reasons = [f"{text} is for strategy={strategy}" for text, strategy in options.items()]
        reasons += [f"{_alone(strategies)} trains on one worker"] * bool(workers)
        which = "all cells" if len(invalid) == len(strategies) else f"the cells with strategy={','.join(invalid)}"
        shorter = "" if workers else _shorter(options, strategies)
        return (
            f"{' and '.join(reasons)}, so {which} are invalid: to compare them, write {shorter}"
            f"{_cells(options, strategies, workers)}"
        )
    if not workers:
        return None
    several = " or ".join(count.several for count in workers)
    return (
        f"{_alone(strategies)} trains on one worker, so it is invalid with {several}: "
        f"to compare it with the others, write {_cells({}, strategies, workers)} instead"
    )


def _cells(options: Mapping[str, str], strategies: Sequence[str], workers: Sequence[_WorkerCount]) -> str:
    """Return the sweep that has each option and each number of workers with its strategies only."""
    implied, typed = set(options.values()), [count.text for count in workers]
    alone = [strategy for strategy in strategies if workers and strategy in one_worker_strategies()]
    rest = [strategy for strategy in strategies if strategy not in {*implied, *alone}]
    cells = [[f"strategy={name}", *(f"{count.key}=1" for count in workers)] for name in alone]
    cells += [[f"strategy={','.join(rest)}", *typed]] * bool(rest)
    cells += [[text, *typed] for text in options]
    entries = ("[" + ",".join(f'"{text}"' for text in overrides) + "]" for overrides in cells)
    return f"'sweep.cells=[{','.join(entries)}]'"


def _implying_options(by_key: Mapping[str, Override]) -> dict[str, str]:
    """Return the overrides, such as ``zero_stage=1,2``, that imply one strategy each, with this strategy."""
    found = {}
    for override in (by_key[group] for group in strategy_groups() if group in by_key):
        implied = {implied_strategy(override.get_key_element(), option) for option in _values(override)}
        if len(implied) == 1 and None not in implied:
            found[str(override.input_line).replace("'", "")] = str(*implied)
    return found


def _worker_counts(by_key: Mapping[str, Override]) -> list[_WorkerCount]:
    """Return the keys of the number of workers that have values other than 1, and null: the strategy decides that."""
    found = []
    for key in (key for key in ("cluster.nodes", "cluster.workers_per_node") if key in by_key):
        if several := [value for value in _values(by_key[key]) if value not in ("1", str(None))]:
            found.append(_WorkerCount(key, str(by_key[key].input_line), f"{key}={','.join(several)}"))
    return found


def _values(override: Override) -> list[str]:
    return [] if isinstance(override.value(), Glob) else [str(plain_value(value)) for value in values_of(override)]


def _shorter(options: Mapping[str, str], strategies: Sequence[str]) -> str:
    """Return the shorter sweep, if all options are defaults; else an empty text."""
    for text, strategy in options.items():
        group, _, value = text.partition("=")
        config = Config()
        shipped_strategies()[strategy]().set_defaults(config)
        if str(get_value(config, strategy_groups()[group])) != value:
            return ""
    implied, default = options.values(), "defaults" if len(options) > 1 else "default"
    listed = ",".join([*(strategy for strategy in strategies if strategy not in implied), *implied])
    return f"strategy={listed} without {' and '.join(options)} (the {default}), or "


def config_dir_warning(folder: str | None) -> str:
    """Return the warning about the primary configuration in the folder of ``--config-dir``; empty if it has none.

    Hydra reads that of distexp only, which is first in its search path.
    """
    if folder is None or not (file := Path(folder, "config.yaml")).is_file():
        return ""
    moved = Path(folder, "experiment", "my.yaml")
    return (
        f"{file} is not read, because the primary configuration is that of distexp: move its settings into {moved}, "
        "with '# @package _global_' as the first line, and add experiment=my"
    )
