"""Random tokens and random images: to measure speed and memory without any data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.data.base import Sample, TaskData
from distexp.data.images import collate_images
from distexp.data.text import TextCollate, sequence_length


@dataclass(frozen=True)
class RandomTokens:
    """Samples of ``length`` random tokens, each of them a label too; drawn when asked for."""

    samples: int
    length: int
    vocabulary: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        chance = _chance(self.seed, index, self.samples)
        tokens = torch.randint(self.vocabulary, (self.length,), generator=chance)
        return {"input_ids": tokens, "labels": tokens.clone()}


@dataclass(frozen=True)
class RandomImages:
    """Samples of random pixels, ``images`` of shape (3, size, size), with a random class; drawn when asked for."""

    samples: int
    size: int
    classes: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        chance = _chance(self.seed, index, self.samples)
        label = torch.randint(self.classes, (), generator=chance)
        shape = (3, self.size, self.size)
        return {"images": torch.randint(256, shape, dtype=torch.uint8, generator=chance), "labels": label}


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Random samples for the task of the model; every sample is decided by ``seed`` and its index.

    Args:
        dataset: train_size and eval_size; max_length (tokens), or image_size (pixels) and num_classes.
        model: its task, and the vocabulary of a causal LM.
        seed: of the training set; the evaluation set has the next one.

    Raises:
        ConfigError: a size that the task needs is null.
    """
    train_size = _needed("dataset.train_size", dataset.train_size)
    eval_size = _needed("dataset.eval_size", dataset.eval_size)
    if model.task == "causal_lm":
        vocabulary = _needed("model.vocab_size", model.vocab_size)
        length = sequence_length(dataset, model)
        return TaskData(
            task=model.task,
            train=RandomTokens(train_size, length, vocabulary, seed),
            evaluation=RandomTokens(eval_size, length, vocabulary, seed + 1),
            collate=TextCollate(pad_id=0, length=length),
            num_classes=vocabulary,
        )
    classes = _needed("dataset.num_classes", dataset.num_classes)
    size = _needed("dataset.image_size", dataset.image_size)
    return TaskData(
        task=model.task,
        train=RandomImages(train_size, size, classes, seed),
        evaluation=RandomImages(eval_size, size, classes, seed + 1),
        collate=collate_images,
        num_classes=classes,
    )


def _needed(key: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{key} is null, and random samples need it: set it")
    return value


def _chance(seed: int, index: int, samples: int) -> Generator:
    if not 0 <= index < samples:
        raise IndexError(index)
    return Generator().manual_seed(seed * 1_000_003 + index)
