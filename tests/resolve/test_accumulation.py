"""The accumulation that follows from the global batch size, and the search for the micro-batch size."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from distexp.config import Config, ConfigError
from distexp.config.model_checks import searches_micro_batch, with_micro_batch
from distexp.report.data.rows import global_batch, read_settings
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunRecord
from tests.helpers.runs import make_spec, resolve_cell

TWO = ("strategy=ddp", "cluster.workers_per_node=2", "cluster.device=cpu")
AUTO = (*TWO, "train.micro_batch_size=auto", "train.global_batch_size=48")


def sizes(config: Config) -> tuple[int | str, int]:
    return config.train.micro_batch_size, config.train.gradient_accumulation_steps


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*TWO, "train.micro_batch_size=auto"), r"needs the samples of an optimizer step: set .*, for example to 32"),
        ((*AUTO, "train.global_batch_size=47"), r"global_batch_size=47 is no multiple of the 2 workers: use 46 or 48"),
        ((*AUTO, "train.global_batch_size=1"), r"global_batch_size=1 is no multiple of the 2 workers: use 2"),
        (
            (*TWO, "train.micro_batch_size=5", "train.global_batch_size=48"),
            r"global_batch_size=48 is no multiple of train.micro_batch_size=5 x 2 workers = 10: use 40 or 50, or",
        ),
        ((*AUTO, "engine=hf_trainer"), r"micro_batch_size=auto is not supported by engine=hf_trainer: use engine=nat"),
        ((*TWO, "train.micro_batch_size=fast"), r"train.micro_batch_size=fast must be a number \(at least 1\) or auto"),
    ],
)
def test_impossible_sizes_are_refused_with_a_hint(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*overrides)


def test_the_global_batch_sets_the_accumulation() -> None:
    config = resolve_cell(*TWO, "train.micro_batch_size=6", "train.global_batch_size=48")
    assert sizes(config) == (6, 4)
    explicit = resolve_cell(*TWO, "train.micro_batch_size=6", "train.gradient_accumulation_steps=4")
    assert run_id(config) == run_id(explicit), "the same training"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("train.micro_batch_size=6", "train.global_batch_size=48"), (4, 2, 16)),
        (("train.micro_batch_size=6", "train.global_batch_size=12"), (4, 1, 8)),
        (("train.micro_batch_size=2", "train.global_batch_size=48"), (2, 4, 16)),
        (("train.micro_batch_size=auto", "train.global_batch_size=48"), ("auto", 1, 16)),
        (("train.micro_batch_size=auto", "train.global_batch_size=6"), ("auto", 1, 6)),
    ],
)
def test_the_scale_limits_the_global_batch(overrides: tuple[str, ...], expected: tuple[int | str, int, int]) -> None:
    config = resolve_cell(*TWO, "scale=tiny", *overrides)
    assert (*sizes(config), config.train.global_batch_size) == expected


def test_the_scale_repairs_no_global_batch() -> None:
    with pytest.raises(ConfigError, match=r"is no multiple of train.micro_batch_size=4 x 2 workers"):
        resolve_cell(*TWO, "scale=tiny", "train.micro_batch_size=6", "train.global_batch_size=14")


def test_a_searched_size_is_no_part_of_the_run_id() -> None:
    """So that a repeated sweep, or another machine, recognizes the run."""
    auto = resolve_cell(*AUTO)
    assert searches_micro_batch(auto)
    same = [
        resolve_cell(*AUTO, change)
        for change in ("train.gradient_accumulation_steps=7", "train.micro_batch_search_s=9")
    ]
    assert {run_id(config) for config in same} == {run_id(auto)}
    other = [resolve_cell(*AUTO, "train.global_batch_size=96"), with_micro_batch(auto, 6)]
    assert len({run_id(auto), *map(run_id, other)}) == 3
    assert sizes(with_micro_batch(auto, 6)) == (6, 4)


@pytest.mark.parametrize(("rule", "samples"), [("scale=tiny", 16), ("scaling=weak_model_workshop", 48)])
def test_rules_that_change_the_micro_batch_leave_the_search_alone(rule: str, samples: int) -> None:
    config = resolve_cell(*AUTO, "model=gpt_tiny", rule)
    assert (config.train.micro_batch_size, config.train.global_batch_size) == ("auto", samples)


def test_a_run_without_a_found_size_has_its_global_batch_in_the_report() -> None:
    spec = make_spec(*AUTO)
    record = RunRecord("failed", spec.run, asdict(spec.config))
    assert global_batch(read_settings(record)) == 48
