"""Our loop against one written by hand, on a GPU: ``python tests/perf/gpu_loop.py TRAIN.json EVAL.json``.

BLOOM-560m, bf16, length 512, SQuAD text; prints the ratio of their times, which should be at most 1.01.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from distexp.distributed.context import Context
from distexp.worker.rank import load_data
from tests.helpers.runs import resolve_cell
from tests.perf.test_loop_speed import Bare, Ours

SAMPLES, REPEATS = 480, 5  # of an epoch; turns


def main() -> None:
    train_path, eval_path = sys.argv[1:]
    device = torch.device("cuda")
    for batch in (16, 4):
        with tempfile.TemporaryDirectory() as folder:
            config = resolve_cell(
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
            context = Context(
                rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=device, run_dir=Path(folder)
            )
            data = load_data(config, context)
            ours, bare = Ours(config, data, context), Bare(config, data, context)
            ours.epoch(), bare.epoch()
            pairs = [(ours.epoch(), bare.epoch()) for _ in range(REPEATS)]
            for mine, theirs in pairs:
                print(f"batch {batch}: ours {SAMPLES / mine:.1f}, by hand {SAMPLES / theirs:.1f} samples/s")
            ratio = statistics.median(theirs / mine for mine, theirs in pairs)
            print(f"batch {batch}: our speed over theirs, median of {REPEATS}: {ratio:.4f}")
            assert abs(ours.losses[-1] / bare.losses[-1] - 1) < 0.02, "not the same training"
            del ours, bare
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
