"""The numbers of tokens that the batches of a compiled model keep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from distexp.data.base import TARGET_POSITIONS, Batch, TaskData
from distexp.data.loader import PaddedDataset, ShardedLoader
from distexp.data.text import TextCollate, TokenSamples
from distexp.distributed.context import Context
from distexp.training.build import load_data, make_loaders, max_targets
from tests.helpers.generated_data import write_squad
from tests.helpers.runs import resolve_cell

RUN = (
    *("model=gpt_tiny", "model.seq_length=512", "dataset=squad", "strategy=ddp", "cluster.device=cpu"),
    *("cluster.workers_per_node=2", "dataset.max_length=512", "train.logits=targets", "train.num_epochs=2"),
)
FILES = {"train": "train-v1.1.json", "eval": "dev-v1.1.json"}


def load_batches(rank: int, folder: Path, *overrides: str) -> tuple[list[Batch], list[Batch]]:
    """Return all batches of a rank: those of two epochs, and those of the evaluation."""
    if not (data_folder := folder / "squad").exists():
        write_squad(data_folder)
    paths = (f"dataset.{split}_path={data_folder / name}" for split, name in FILES.items())
    config = resolve_cell(*RUN, *paths, *overrides)
    context = Context(
        rank=rank, world_size=2, local_rank=rank, workers_per_node=2, nodes=1, device=torch.device("cpu"),
        run_dir=folder,
    )  # fmt: skip
    data = load_data(config, context)
    training, evaluation = make_loaders(config, data, context)
    batches = list(collate(training, data, epochs=2))
    return batches, list(collate(evaluation, data, epochs=1))


def collate(loader: ShardedLoader, data: TaskData, *, epochs: int) -> Iterator[Batch]:
    """Yield the batches of a loader without the other ranks, for which it would wait."""
    samples = PaddedDataset(loader.samples)
    for epoch in range(epochs):
        loader.sampler.epoch = epoch
        for indices in loader.sampler:
            yield data.collate([samples[index] for index in indices])


def kept(batches: list[Batch]) -> set[int]:
    return {len(batch.inputs[TARGET_POSITIONS]) for batch in batches}


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.micro_batch_size=24",),
        ("train.micro_batch_size=8", "train.eval_batch_size=20"),
        ("dataset.packing=true",),
    ],
)
def test_all_batches_of_a_compiled_model_have_one_shape(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The model would be compiled again for each other number of targets. The answers have different lengths."""
    batches = [load_batches(rank, tmp_path, *overrides, "train.compile=model") for rank in range(2)]
    for kind in (0, 1):
        shapes = kept(batches[0][kind]) | kept(batches[1][kind])
        targets = {batch.num_targets for pair in batches for batch in pair[kind]}
        assert len(targets) > 1
        assert len(shapes) == 1, "another shape is compiled in the middle of the training"
        assert max(targets) < min(shapes)


def test_batches_without_compilation_keep_few_tokens(tmp_path: Path) -> None:
    batches, _ = load_batches(0, tmp_path, "train.micro_batch_size=24")
    assert len(kept(batches)) > 1
    assert all(len(batch.inputs[TARGET_POSITIONS]) <= batch.num_targets + 8 for batch in batches)


def test_an_evaluation_set_that_is_not_used_may_be_empty() -> None:
    """A custom dataset may have none."""
    some = TokenSamples(np.arange(8, dtype=np.int32), np.array([4, 8]), np.array([2, 1], dtype=np.int32))
    none = TokenSamples(some.tokens[:0], some.ends[:0], some.prompt_lengths[:0])
    config = resolve_cell(*RUN, "dataset=squad_sample", "train.micro_batch_size=1", "train.evaluate=false")
    assert max_targets(config, TaskData("causal_lm", some, none, TextCollate(0, 8), 9)) == {1: 3}
