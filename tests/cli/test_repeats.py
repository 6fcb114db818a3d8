"""Tests of ``repeats``: each cell runs several times with different seeds."""

from __future__ import annotations

import pytest

from distexp.cli.arguments import normalize_arguments
from distexp.config import ConfigError
from distexp.report.data.overview import Overview
from distexp.resolve.run_id import run_id
from tests.helpers.presets import cells_of, finished
from tests.helpers.runs import resolve_cell


def test_all_cells_run_once_before_the_first_repeats() -> None:
    cells = cells_of("deepspeed/two_gpu_stages", "offload=false", "repeats=2")
    assert len(cells) % 2 == 0
    half = len(cells) // 2
    assert half > 1
    for first, second in zip(cells[:half], cells[half:], strict=True):
        assert first[:-1] == second[:-1]
        assert (first[-1], second[-1]) == ("train.seed=42", "train.seed=43")


def test_a_single_run_repeats_from_its_seed() -> None:
    cells = cells_of("ddp/baseline", "repeats=3", "train.seed=7")
    assert [cell[-1] for cell in cells] == ["train.seed=7", "train.seed=8", "train.seed=9"]
    assert cells_of("ddp/baseline", "repeats=1") == [["experiment=ddp/baseline", "repeats=1"]]


def test_repeats_have_different_run_ids_and_one_row() -> None:
    cells = cells_of("ddp/baseline", "repeats=3")
    records = [finished(resolve_cell(*cell, "scale=tiny"), n, cell) for n, cell in enumerate(cells)]
    assert len({record.run.id for record in records}) == 3
    assert [len(group.rows) for group in Overview.from_records(records).groups] == [3]


def test_repeats_are_no_part_of_the_run_id() -> None:
    assert run_id(resolve_cell("repeats=3")) == run_id(resolve_cell())


def test_wrong_repeats_are_errors() -> None:
    with pytest.raises(ConfigError, match="repeats=0 must be at least 1"):
        resolve_cell("repeats=0")
    for words, message in (
        (("--multirun", "repeats=1,2"), "repeats=1,2 cannot be swept"),
        (("--multirun", "train.seed=1,2", "repeats=3"), "set one seed, or leave repeats out"),
        (("repeats=2", "hydra.run.dir=x"), "set hydra.sweep.dir instead"),
    ):
        with pytest.raises(ConfigError, match=message):
            normalize_arguments(words)
    assert "hydra.sweep.dir=x" in normalize_arguments(("repeats=1", "hydra.run.dir=x"))
