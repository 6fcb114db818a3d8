"""Tests of the keys of ``plan`` that a command would ignore."""

from __future__ import annotations

import pytest

from distexp.compose.composition import ignored_plan_keys
from tests.helpers.runs import resolve_cell

CPU = "cluster.device=cpu"

USED = (
    ("command=plan", "plan.timeout_s=5", "plan.host_memory_gb=4"),
    ("command=plan", "plan.search=true"),
    ("command=plan", "plan=warn", "plan.search_timeout_s=30"),  # the defaults
    ("command=choose", "plan.timeout_s=5", "plan.host_memory_gb=4"),
    ("command=forecast", "plan.timeout_s=5"),
    ("plan=check", "plan.timeout_s=5", "plan.search_timeout_s=5", "plan.host_memory_gb=4"),
    ("plan=warn", "plan.host_memory_gb=4"),
    ("experiment=memory/parts", "plan.search_timeout_s=5", "scale=tiny"),  # which has plan=check
)

IGNORED = {
    ("command=plan", "plan.search_timeout_s=5"): "in distexp plan, which predicts every change: leave it out",
    ("command=plan", "plan=check"): "in distexp plan, which starts no run: leave it out",
    ("command=forecast", "plan=off"): "in distexp forecast, which starts no run: leave it out",
    ("command=forecast", "forecast.memory='off'", "plan.timeout_s=5"): ("with forecast.memory=off: leave it out"),
    ("command=choose", "plan=off"): "in distexp choose, which always predicts: leave it out",
    ("command=choose", "plan.search_timeout_s=5"): "set choose.budget_min, or leave it out",
    ("command=choose", "plan.search=true"): "outside of distexp plan: leave it out",
    ("plan=check", "plan.search=true"): "outside of distexp plan: leave it out",
    ("command=preflight", "plan=check"): "in distexp preflight, which trains nothing: leave it out",
    ("plan=off", "plan.host_memory_gb=4"): "with plan=off: use plan=warn or plan=check, or leave it out",
    ("plan=off", "plan.timeout_s=5"): "with plan=off: use plan=check, or leave it out",
    ("++plan.timeout_s=5",): "with plan=warn, which only uses predictions in the cache",
    ("plan.timeout_s=5",): "with plan=warn, which only uses predictions in the cache: add plan=check, or leave it out",
    ("plan.gpu=a100-80gb",): "in a run on cpu: set plan.host_memory_gb, or leave it out",
    ("train.micro_batch_size=auto", "train.global_batch_size=16", "plan.host_memory_gb=4"): (
        "with train.micro_batch_size=auto, whose size is found by trials: set a number of samples, or leave it out"
    ),
}


@pytest.mark.parametrize("overrides", USED)
def test_a_key_that_is_used_is_accepted(overrides: tuple[str, ...]) -> None:
    assert ignored_plan_keys([(overrides, resolve_cell(CPU, *overrides))]) == []


@pytest.mark.parametrize("overrides", IGNORED)
def test_a_key_without_effect_is_refused_with_the_reason(overrides: tuple[str, ...]) -> None:
    (error,) = ignored_plan_keys([(overrides, resolve_cell(CPU, *overrides))])
    assert error.startswith(f"{overrides[-1]} has no effect ")
    assert IGNORED[overrides] in error


def test_a_key_is_refused_once_and_only_if_no_cell_uses_it() -> None:
    cells = [(mode, "plan.timeout_s=5") for mode in ("plan=off", "plan=warn", "plan=check")]
    configs = [(overrides, resolve_cell(CPU, *overrides)) for overrides in cells]
    assert len(ignored_plan_keys(configs[:2])) == 1
    assert ignored_plan_keys(configs) == []
