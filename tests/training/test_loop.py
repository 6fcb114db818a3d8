"""The native training loop against a hand-written one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.hand_written_loop import SMALL_GPT, STEPS, build_loops


def test_native_loop_has_the_losses_of_a_hand_written_loop(tmp_path: Path) -> None:
    native, hand_written = build_loops(SMALL_GPT, tmp_path, torch.device("cpu"))
    for _ in range(2):
        native.train_epoch()
        hand_written.train_epoch()
    assert len(native.losses) == 2 * STEPS
    assert native.losses == pytest.approx(hand_written.losses, rel=1e-4)
