"""Data without targets or without samples, used as ``dataset._target_=tests.helpers.untargeted.NAME``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from distexp.config import DatasetConfig, ModelConfig
from distexp.data import synthetic
from distexp.data.base import IGNORE, Sample, Samples, TaskData


@dataclass(frozen=True)
class WithoutTargets:
    """Samples that have no target from an index on."""

    samples: Samples
    start: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        sample = self.samples[index]
        if index < self.start:
            return sample
        return {**sample, "labels": torch.full_like(sample["labels"], IGNORE)}


def training(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load training samples of which some have no target."""
    data = synthetic.load(dataset, model, seed)
    return replace(data, train=WithoutTargets(data.train, start=2))


def evaluation(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load evaluation samples without a target."""
    data = synthetic.load(dataset, model, seed)
    return replace(data, evaluation=WithoutTargets(data.evaluation, start=0))


def no_training(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load no training sample."""
    return replace(synthetic.load(dataset, model, seed), train=[], notes=["3 were left out: they have no answer"])


def no_evaluation(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Load no evaluation sample."""
    return replace(synthetic.load(dataset, model, seed), evaluation=[])
