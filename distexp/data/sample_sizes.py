"""Numbers of the samples of generated data sets, if their configuration sets none."""

from __future__ import annotations

SQUAD_SAMPLE_TRAIN, SQUAD_SAMPLE_EVAL = 512, 128
TINYIMAGENET_SAMPLE_TRAIN, TINYIMAGENET_SAMPLE_EVAL = 400, 100

GENERATED_TRAIN_SIZES = {
    "distexp.data.squad_sample.load": SQUAD_SAMPLE_TRAIN,
    "distexp.data.tinyimagenet_sample.load": TINYIMAGENET_SAMPLE_TRAIN,
}
"""Training samples by the ``_target_`` of the dataset."""
