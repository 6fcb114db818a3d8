"""Speed of the native loop relative to a hand-written loop, on a GPU.

Usage: ``python benchmarks/gpu_loop.py TRAIN.json EVAL.json``, with files in the SQuAD format. The model is BLOOM-560m
in bf16 with sequences of 512 tokens.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers.hand_written_loop import build_loops

SAMPLES = 480
"""Samples of an epoch."""

REPEATS = 5
"""Epochs of each loop."""


def overrides(train_path: str, eval_path: str, batch: int) -> tuple[str, ...]:
    """Return the overrides of the training with a batch size."""
    return (
        "model=bloom_560m",
        "model.init=random",
        "dataset=squad",
        f"dataset.train_path={train_path}",
        f"dataset.eval_path={eval_path}",
        f"dataset.train_size={SAMPLES}",
        "dataset.eval_size=4",
        "strategy=single",
        "precision=bf16",
        "cluster.device=cuda",
        f"train.micro_batch_size={batch}",
        "train.gradient_accumulation_steps=1",
        "train.num_epochs=1",
        "train.schedule=constant",
        "train.learning_rate=1e-5",
        "train.weight_decay=0",
    )


def main() -> None:
    """Print the speed of both loops and the ratio, for two batch sizes."""
    train_path, eval_path = sys.argv[1:]
    for batch in (16, 4):
        with tempfile.TemporaryDirectory() as folder:
            settings = overrides(train_path, eval_path, batch)
            native, hand_written = build_loops(settings, Path(folder), torch.device("cuda"))
            native.train_epoch(), hand_written.train_epoch()
            pairs = [(native.train_epoch(), hand_written.train_epoch()) for _ in range(REPEATS)]
            for ours, theirs in pairs:
                print(f"batch {batch}: native {SAMPLES / ours:.1f}, hand-written {SAMPLES / theirs:.1f} samples/s")
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
            print(f"batch {batch}: native speed / hand-written speed, median of {REPEATS}: {ratio:.4f}")
            assert abs(native.losses[-1] / hand_written.losses[-1] - 1) < 0.02, "the losses differ"
            del native, hand_written
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
