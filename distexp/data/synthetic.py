"""Random tokens and images, to measure speed and memory without data."""

from dataclasses import dataclass

import torch
from torch import Generator

from distexp.config import ConfigError, DatasetConfig, ModelConfig
from distexp.config.model_checks import MODEL_TYPE, loads_from_source, named_vocabulary, weights_source
from distexp.config.tasks import DECODER_LABELS, task_of
from distexp.data.base import IGNORE, Sample, TaskData
from distexp.data.images import collate_images
from distexp.data.text import TextCollate, sequence_length
from distexp.exceptions import first_line
from distexp.system.cache_dir import offline_if_unreachable


@dataclass(frozen=True)
class RandomTokens:
    """Sequences of random tokens with random labels for a task, generated on access.

    Every token is a target, but of masked_lm one in seven.
    """

    samples: int
    length: int
    vocab_size: int
    seed: int
    task: str = "causal_lm"
    classes: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, with those of a decoder."""
        return [self.length * (2 if self.task == "seq2seq_lm" else 1)] * self.samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        generator = _sample_generator(self.seed, index, self.samples)
        tokens = torch.randint(self.vocab_size, (self.length,), generator=generator)
        if self.task == "causal_lm":
            return {"input_ids": tokens, "labels": tokens.clone()}
        if self.task == "masked_lm":
            is_target = torch.randperm(self.length, generator=generator) % 7 == 0
            return {"input_ids": tokens, "labels": torch.where(is_target, tokens, IGNORE)}
        shape = (self.length,) if task_of(self.task).labels_tokens else ()
        labels = torch.randint(self.classes or self.vocab_size, shape, generator=generator)
        sample = {"input_ids": tokens, "labels": labels}
        return sample | {DECODER_LABELS: labels} if self.task == "seq2seq_lm" else sample


@dataclass(frozen=True)
class RandomImages:
    """Random images of shape (3, size, size) with random classes, generated on access."""

    samples: int
    size: int
    classes: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        generator = _sample_generator(self.seed, index, self.samples)
        label = torch.randint(self.classes, (), generator=generator)
        shape = (3, self.size, self.size)
        return {"images": torch.randint(256, shape, dtype=torch.uint8, generator=generator), "labels": label}


def load(dataset: DatasetConfig, model: ModelConfig, seed: int) -> TaskData:
    """Return random samples for the task of the model. Raise ConfigError if a size that the task needs is null.

    A sample depends on ``seed`` and its index only. The evaluation set uses ``seed + 1``.
    """
    train_size = _require("dataset.train_size", dataset.train_size)
    eval_size = _require("dataset.eval_size", dataset.eval_size)
    kind = model.traits
    classes = _require("dataset.num_classes", dataset.num_classes) if kind.has_classes else 0
    if kind.is_text:
        vocab_size = model.vocab_size or _vocabulary_of_source(model)
        length = sequence_length(dataset, model)
        return TaskData(
            task=model.task,
            train=RandomTokens(train_size, length, vocab_size, seed, model.task, classes),
            evaluation=RandomTokens(eval_size, length, vocab_size, seed + 1, model.task, classes),
            collate=TextCollate(pad_id=0, length=length, task=model.task, decoder_length=length),
            num_classes=classes or vocab_size,
        )
    size = _require("dataset.image_size", dataset.image_size)
    return TaskData(
        task=model.task,
        train=RandomImages(train_size, size, classes, seed),
        evaluation=RandomImages(eval_size, size, classes, seed + 1),
        collate=collate_images,
        num_classes=classes,
    )


def _vocabulary_of_source(model: ModelConfig) -> int:
    """Return the size of the vocabulary in the configuration of a model of transformers."""
    source = weights_source(model)
    if source is None or not loads_from_source(model):
        return _require("model.vocab_size", None)
    if size := named_vocabulary(model.options):
        return size
    from transformers import AutoConfig

    kind = model.options.get(MODEL_TYPE)
    if kind is None:
        offline_if_unreachable(source)
    try:
        load = AutoConfig.from_pretrained
        config = load(source, trust_remote_code=False) if kind is None else AutoConfig.for_model(kind)
        return int(config.get_text_config().vocab_size)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        key, value = ("model.name", source) if kind is None else (f"model.options.{MODEL_TYPE}", kind)
        what = ", whose config.json cannot be read" if kind is None else ", which has none"
        raise ConfigError(
            f"dataset=synthetic needs the vocab_size of {key}={value}{what} ({first_line(error)}): correct {key}"
        ) from error


def _require(key: str, value: int | None) -> int:
    if value is None:
        raise ConfigError(f"{key} is null, but random samples need it: set {key}")
    return value


def _sample_generator(seed: int, index: int, samples: int) -> Generator:
    if not 0 <= index < samples:
        raise IndexError(index)
    return Generator().manual_seed(seed * 1_000_003 + index)
