"""Packing and bucketing of the configured data, as a rank loads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.config import ConfigError
from distexp.distributed.context import Context
from distexp.training.build import load_data, make_loaders
from tests.helpers.runs import resolve_cell

SAMPLES, EVALUATED = 40, 8
SMALL = ("model=gpt_tiny", "strategy=single", "cluster.device=cpu", "dataset.max_length=128")
SIZES = (f"dataset.train_size={SAMPLES}", f"dataset.eval_size={EVALUATED}", "train.micro_batch_size=4")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context(0, 1, 0, 1, 1, torch.device("cpu"), tmp_path)


@pytest.mark.parametrize("key", ["packing", "bucketing"])
def test_training_batches_have_less_padding_and_the_same_samples(
    key: str, context: Context, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, config = (resolve_cell(*SMALL, *SIZES, *more) for more in ((), (f"dataset.{key}=true",)))
    steps = []
    for settings in (plain, config):
        data = load_data(settings, context)
        training, evaluation = make_loaders(settings, data, context)
        steps.append(list(training.iter_steps(0)))
        evaluated = list(evaluation.iter_steps(0))
        assert sum(step.num_samples for step in evaluated) == EVALUATED
        assert all("attention_mask" in batch.inputs for step in evaluated for batch in step.micro_batches)
    for name in ("num_samples", "num_targets", "num_tokens"):
        expected, found = (sum(getattr(batch, name) for step in run for batch in step.micro_batches) for run in steps)
        assert expected == found
    expected, found = (sum(batch.num_positions for step in run for batch in step.micro_batches) for run in steps)
    assert found < 0.7 * expected
    assert [sum(step.num_samples for step in run) for run in steps] == [SAMPLES, SAMPLES]
    assert (f"packing: {SAMPLES} samples are in" in capsys.readouterr().out) == (key == "packing")


def test_a_micro_batch_of_more_rows_than_there_are_is_refused(context: Context) -> None:
    config = resolve_cell(*SMALL, *SIZES, "dataset.packing=true", "train.micro_batch_size=30")
    with pytest.raises(
        ConfigError, match=r"train.micro_batch_size=30 is more than the \d+ rows of each worker \(\d+ rows"
    ):
        make_loaders(config, load_data(config, context), context)


@pytest.mark.parametrize(
    ("position", "packing", "error"),
    [
        (0, "false", f"the training set has {SAMPLES} samples on rank 0, but {SAMPLES + 1} on rank 2: load the same"),
        (0, "true", r"the training set has \d+ rows on rank 0, but \d+ on rank 2: load the same data"),
        (1, "false", r"num_classes of the data is \d+ on rank 0, but \d+ on rank 2: load the same data"),
        (2, "false", f"the evaluation set has {EVALUATED} samples on rank 0, but {EVALUATED + 1} on rank 2: load the"),
    ],
)
def test_data_of_other_sizes_on_the_ranks_are_refused(
    position: int, packing: str, error: str, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(sizes: list[int]) -> list[list[int]]:
        return [sizes, sizes, [size + (place == position) for place, size in enumerate(sizes)]]

    monkeypatch.setattr("distexp.training.build.gather_to_all", gather)
    config = resolve_cell(*SMALL, *SIZES, f"dataset.packing={packing}")
    with pytest.raises(ConfigError, match=error):
        make_loaders(config, load_data(config, context), context)
    if position == 2:
        config.train.evaluate = False
        make_loaders(config, load_data(config, context), context)


def test_data_below_the_limits_of_a_scale_are_whole(context: Context) -> None:
    rows = context.run_dir / "rows.jsonl"
    rows.write_text('{"text": "Ada is a baker from Oslo."}\n' * 20)
    tiny = ("model=gpt_tiny", "strategy=single", "scale=tiny", "dataset=text", f"dataset.path={rows}")
    data = load_data(resolve_cell(*tiny), context)
    assert 0 < len(data.evaluation) < 16
    assert len(data.train) + len(data.evaluation) == 20
    with pytest.raises(ConfigError, match=r"dataset.eval_size=15 is more than the "):
        load_data(resolve_cell(*tiny, "dataset.eval_size=15"), context)
