"""Model FLOPs and executed FLOPs of training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distexp.data.base import BLOCK, POSITIONS, Workload, measure_workload
from distexp.distributed.context import Context
from distexp.measure.flops import FlopCounter, TrainingFlops, training_flops
from distexp.models.attention import block_mask, number_documents
from distexp.training.build import load_data, make_loaders
from tests.helpers.attention import make_batch
from tests.helpers.runs import resolve_cell

HIDDEN, LAYERS, INNER, VOCABULARY = 64, 2, 256, 1024
"""Sizes of gpt_tiny."""

TEXT = ("model=gpt_tiny", "dataset.max_length=64", "dataset.train_size=30", "dataset.eval_size=8")
IMAGES = ("model=resnet_tiny", "dataset=tinyimagenet_sample", "dataset.train_size=8", "dataset.eval_size=8")
CPU = torch.device("cpu")


def epoch_flops(folder: Path, *overrides: str) -> tuple[TrainingFlops, Workload]:
    """Return the FLOPs of an epoch on one worker, and the sizes of its batches."""
    config = resolve_cell("strategy=single", "cluster.device=cpu", "train.micro_batch_size=4", *overrides)
    context = Context(0, 1, 0, 1, 1, CPU, folder)
    data = load_data(config, context)
    training, _ = make_loaders(config, data, context)
    done = sum((step.workload for step in training.iter_steps(0)), start=Workload())
    return training_flops(config, data, done, CPU), done


def text_flops(tokens: int, pairs: int, head_tokens: int) -> int:
    """Return the FLOPs of forward and backward pass of the tiny models; a backward pass has twice those of forward."""
    layer = 2 * tokens * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER) + 2 * (2 * pairs * HIDDEN)
    return 3 * (LAYERS * layer + 2 * head_tokens * HIDDEN * VOCABULARY)


def test_bloom_560m_has_the_published_flops(tmp_path: Path) -> None:
    """6 x parameters of the matrices + 12 x layers x hidden x length, per token (PaLM, appendix B)."""
    sizes = ("model=bloom_560m", "model.init=random", "model.vocab_size=250880", "dataset.max_length=512")
    config = resolve_cell("strategy=single", "cluster.device=cpu", "dataset=synthetic", *sizes, "train.logits=targets")
    rates = FlopCounter(config, load_data(config, Context(0, 1, 0, 1, 1, CPU, tmp_path))).model_rates()
    all_logits, no_logits = (rates.total(rows=1, tokens=512, pairs=512**2, head_tokens=kept) for kept in (512, 0))
    assert all_logits == 512 * (6 * (24 * 12 * 1024**2 + 250_880 * 1024) + 12 * 24 * 1024 * 512)
    assert all_logits == pytest.approx(1.794e12, rel=1e-3)
    assert no_logits == pytest.approx(1.005e12, rel=1e-3)


def test_model_flops_depend_on_the_samples_alone(tmp_path: Path) -> None:
    padded, done = epoch_flops(tmp_path, *TEXT)
    assert done.positions == 32 * 64  # two padding samples
    assert padded.model == text_flops(done.tokens, done.token_pairs, done.tokens)
    assert padded.executed == text_flops(32 * 64, 32 * 64**2, 32 * 64)
    for change in ("dataset.packing=true", "dataset.bucketing=true", "train.activation_checkpointing=true"):
        changed, changed_done = epoch_flops(tmp_path, *TEXT, "model.attention=sdpa", change)
        assert changed.model == padded.model, change
        assert changed.executed != padded.executed
        assert (changed_done.samples, changed_done.targets) == (done.samples, done.targets) == (30, done.targets)


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_only_selected_tokens_count_for_the_head(loss: str, tmp_path: Path) -> None:
    flops, done = epoch_flops(tmp_path, *TEXT, "train.logits=targets", f"train.loss={loss}")
    assert 30 <= done.targets < done.head_tokens < done.tokens
    assert flops.model == text_flops(done.tokens, done.token_pairs, done.targets)
    assert flops.executed == text_flops(done.positions, done.position_pairs, done.head_tokens)


def test_a_compiled_block_is_recomputed_to_its_end(tmp_path: Path) -> None:
    """Eager recomputation stops as soon as it has the saved tensors. So it skips the last product of a block."""
    plain, done = epoch_flops(tmp_path, *TEXT)
    blocks = text_flops(done.positions, done.position_pairs, 0) / 3
    eager, _ = epoch_flops(tmp_path, *TEXT, "train.activation_checkpointing=true")
    compiled, _ = epoch_flops(tmp_path, *TEXT, "train.activation_checkpointing=true", "train.compile=blocks")
    assert compiled.executed - plain.executed == blocks
    assert eager.executed - plain.executed == blocks - LAYERS * 2 * done.positions * HIDDEN * INNER


def test_the_first_convolution_has_no_gradient_of_its_input(tmp_path: Path) -> None:
    flops, done = epoch_flops(tmp_path, *IMAGES)
    side = 16  # half of the 32 pixels of an image
    assert flops.model - flops.executed == done.rows * 2 * 3 * 16 * 7 * 7 * side * side
    assert done.tokens == done.positions == 0


@pytest.mark.parametrize("length", [100, 300])
def test_visited_blocks_are_those_of_flex_attention(length: int) -> None:
    lengths = (90, 10, 40, 100, 60)
    positions = torch.cat([torch.arange(document) for document in lengths])[:length].expand(2, -1)
    batch = make_batch(length, length)
    packed = replace(batch, inputs={"input_ids": batch.inputs["input_ids"], POSITIONS: positions})
    assert sum(lengths) == 300
    for inputs, documents in ((batch, None), (packed, number_documents(positions))):
        mask = block_mask(length, CPU, documents).to_dense()[:, 0].bool()
        sizes = (length - torch.arange(0, length, BLOCK)).clamp(max=BLOCK)
        expected = (mask * sizes[:, None] * sizes).sum() * (2 // len(mask))
        assert measure_workload([inputs]).visited_pairs == int(expected)
