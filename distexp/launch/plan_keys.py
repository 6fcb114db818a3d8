"""Keys of the section ``plan`` that a command would ignore: each with the reason, and what to type instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from distexp.cli.overrides import parse, plain_value
from distexp.config import Command, Config, PlanConfig
from distexp.config.batch_sizes import searches_micro_batch
from distexp.runs.command_text import format_override

MODE, SEARCH = ("name",), ("search_timeout_s",)
TIMES = ("timeout_s", *SEARCH)
MEMORIES = ("gpu", "gpu_memory_gb", "host_memory_gb")
LEAVE_OUT = "leave it out"


class Rule(NamedTuple):
    """Keys without effect in one situation.

    Attributes:
        keys: Names in the section; ``name`` is the group ``plan`` itself.
        reason: Which situation, and why it does not use the keys.
        hint: What to type instead.
    """

    keys: Sequence[str]
    reason: str
    hint: str = LEAVE_OUT


RULES = {
    "distexp plan": (
        Rule(MODE, "in distexp plan, which starts no run"),
        Rule(SEARCH, "in distexp plan, which predicts every change"),
    ),
    "distexp choose": (
        Rule(MODE, "in distexp choose, which always predicts"),
        Rule(
            SEARCH,
            "in distexp choose, which tries its candidates",
            f"set choose.budget_min to limit the trials, or {LEAVE_OUT}",
        ),
    ),
    "distexp forecast": (Rule((*MODE, *SEARCH), "in distexp forecast, which starts no run"),),
    "forecast.memory=cached": (
        Rule((*MODE, *TIMES), "with forecast.memory=cached, which only uses predictions in the cache"),
    ),
    "forecast.memory=off": (Rule((*MODE, *TIMES, *MEMORIES), "with forecast.memory=off"),),
    "distexp preflight": (Rule((*MODE, *TIMES, *MEMORIES), "in distexp preflight, which trains nothing"),),
    "auto": (
        Rule(
            (*TIMES, *MEMORIES),
            "with train.micro_batch_size=auto, whose size is found by trials",
            f"set a number of samples, or {LEAVE_OUT}",
        ),
    ),
    "plan=check": (),
    "plan=warn": (
        Rule(TIMES, "with plan=warn, which only uses predictions in the cache", f"add plan=check, or {LEAVE_OUT}"),
    ),
    "plan=off": (
        Rule(TIMES, "with plan=off", f"use plan=check, or {LEAVE_OUT}"),
        Rule(MEMORIES, "with plan=off", f"use plan=warn or plan=check, or {LEAVE_OUT}"),
    ),
}
"""Rules by situation."""

DEVICE_RULES = {
    "cpu": Rule(("gpu", "gpu_memory_gb"), "in a run on cpu", f"set plan.host_memory_gb, or {LEAVE_OUT}"),
    "cuda": Rule(("host_memory_gb",), "in a run on GPUs", "set plan.gpu_memory_gb, or cluster.device=cpu"),
}
"""Rules by device, in any situation."""


def ignored_plan_keys(cells: Iterable[tuple[Sequence[str], Config | None]]) -> list[str]:
    """Return an error for each override of ``plan`` that has no effect in any cell. One with the default is none.

    Args:
        cells: Overrides and configuration of each cell. An override of a cell without a configuration is no error.
    """
    errors: dict[str, str | None] = {}
    for overrides, config in cells:
        for text in overrides:
            if text.lstrip("+").startswith("plan") and errors.get(text, "") is not None:
                rule = None if config is None else next(_broken_rules(text, _rules(config)), None)
                shown = format_override(text)
                errors[text] = rule and f"{shown} has no effect {rule.reason}: {rule.hint}"
    return [error for error in errors.values() if error]


def _rules(config: Config) -> Sequence[Rule]:
    return (*RULES[_situation(config)], DEVICE_RULES[config.cluster.device])


def _situation(config: Config) -> str:
    """Return which rules hold for a cell."""
    memory = config.forecast.memory
    situations = {
        f"forecast.memory={memory}": config.command == Command.FORECAST and memory != "predict",
        f"distexp {config.command}": config.command != Command.TRAIN,
        "auto": searches_micro_batch(config),
    }
    return next((name for name, holds in situations.items() if holds), f"plan={config.plan.name}")


def _broken_rules(text: str, rules: Sequence[Rule]) -> Iterator[Rule]:
    """Yield the rules by which an override has no effect."""
    changed = {name for name, value in _values(text).items() if value != vars(PlanConfig()).get(name)}
    return (rule for rule in rules if changed and changed.issubset(rule.keys))


def _values(text: str) -> dict[str, Any]:
    """Return the keys of the section that an override sets, with their values."""
    override = parse([text])[0]
    section, _, name = str(override.key_or_group).partition(".")
    return {name or "name": plain_value(override.value())} if section == "plan" else {}
