"""Time of the native loop relative to a hand-written loop, on a CPU.

Usage: ``python benchmarks/cpu_loop.py``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import paired_ratios, print_ratios
from tests.helpers.hand_written_loop import SMALL_GPT, build_loops

EPOCHS = 6
"""Epochs of each loop per ratio."""


def main() -> None:
    """Print the ratio."""
    torch.set_num_threads(1)  # more threads would measure the other programs on this machine
    with tempfile.TemporaryDirectory() as folder:
        native, hand_written = build_loops(SMALL_GPT, Path(folder), torch.device("cpu"))
        native.train_epoch(), hand_written.train_epoch()
        ratios = paired_ratios(native.train_epoch, hand_written.train_epoch, repeats=5, turns=EPOCHS)
        print_ratios("native loop relative to a hand-written one", ratios)


if __name__ == "__main__":
    main()
