"""Batches of token sequences."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import pad

from distexp.data.base import IGNORE, POSITIONS, TARGET_POSITIONS, Sample, TargetTokens
from distexp.data.text import TextCollate

LENGTHS = (3, 7, 1, 5)

COUNT_THREADS = """
import os, torch
torch.set_num_threads(4)
from distexp.data.text import RightPadding, TextCollate
from distexp.data.base import TargetTokens
row = {"input_ids": torch.arange(400), "labels": torch.arange(400)}
collate = TargetTokens(RightPadding(TextCollate(pad_id=0, length=512)))
before = len(os.listdir("/proc/self/task"))
batch = collate([row] * 256)
print(len(os.listdir("/proc/self/task")) - before, batch.num_targets)
(torch.zeros(10**7) + 1).sum()
print(len(os.listdir("/proc/self/task")) - before)
"""


def rows(dtype: torch.dtype) -> list[Sample]:
    """Return samples of different lengths whose first two tokens are a prompt."""
    tokens = [torch.arange(1, length + 1, dtype=dtype) for length in LENGTHS]
    return [{"input_ids": row, "labels": torch.where(torch.arange(len(row)) < 2, IGNORE, row)} for row in tokens]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("length", [7, 9, 4])
def test_rows_are_padded_on_the_right_or_cut(dtype: torch.dtype, length: int) -> None:
    samples = rows(dtype)
    batch = TextCollate(pad_id=9, length=length)(samples)
    for name, value in {"input_ids": 9, "labels": IGNORE}.items():
        expected = torch.stack([pad(sample[name], (0, length - len(sample[name])), value=value) for sample in samples])
        found = batch.labels if name == "labels" else batch.inputs[name]
        torch.testing.assert_close(found, expected)
    mask = torch.stack([(torch.arange(length) < size).to(dtype) for size in LENGTHS])
    torch.testing.assert_close(batch.inputs["attention_mask"], mask)
    kept = [min(size, length) for size in LENGTHS if size > 2]
    assert (batch.num_samples, batch.num_targets) == (len(kept), sum(size - 2 for size in kept))
    assert (batch.num_tokens, batch.num_token_pairs) == (sum(kept), sum(size**2 for size in kept))


def test_a_packed_row_is_cut_too() -> None:
    row = {"input_ids": torch.arange(6), "labels": torch.arange(6), POSITIONS: torch.tensor([0, 1, 2, 0, 1, 2])}
    batch = TextCollate(pad_id=9, length=4)([row])
    assert batch.inputs[POSITIONS].tolist() == [[0, 1, 2, 0]]
    assert (batch.num_samples, batch.num_tokens) == (2, 4)
    batch = TextCollate(pad_id=9, length=8)([row])
    assert batch.inputs[POSITIONS].tolist() == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert (batch.num_samples, batch.num_tokens) == (2, 6)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_targets_are_the_tokens_before_the_labels(dtype: torch.dtype) -> None:
    batch = TargetTokens(TextCollate(pad_id=9, length=7))(rows(dtype))
    assert batch.inputs[TARGET_POSITIONS].tolist() == [1, 8, 9, 10, 11, 12, 22, 23, 24, *[0] * 7]
    assert batch.labels.tolist() == [[IGNORE, 3, 3, 4, 5, 6, 7, 3, 4, 5, *[IGNORE] * 6]]
    assert batch.labels.dtype == dtype


def test_batching_starts_no_threads_of_torch() -> None:
    """On busy machines with many cores, their start took most of the time of a batch."""
    done = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    started, targets, after_large_sum = done.stdout.split()
    assert (started, targets) == ("0", str(256 * 399))
    assert int(after_large_sum) > 0, "torch starts threads here"
