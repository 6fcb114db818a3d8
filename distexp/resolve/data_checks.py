"""Checks of dataset and model together: their task, the lengths of texts, and the number of samples."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch
from distexp.config.size_checks import check_samples_per_rank, check_sequence_length
from distexp.data.sample_sizes import GENERATED_TRAIN_SIZES

UNPACKED_ATTENTION = {
    "distexp.models.bloom.build": ("auto", "eager"),
    "distexp.models.hf.build": ("flash",),
}
"""Values of ``model.attention`` that cannot keep the samples of a row apart."""

MODEL_HINTS = {
    "causal_lm": "bloom_tiny, gpt_tiny or another text model",
    "image_classification": "resnet_tiny or resnet50",
}
DATASET_HINTS = {
    "causal_lm": "squad_sample, squad or synthetic",
    "image_classification": "tinyimagenet_sample, tinyimagenet or synthetic",
}


def check_task(config: Config) -> Iterator[str]:
    """Yield an error for each setting that belongs to another task than the model."""
    model, dataset = config.model, config.dataset
    if not same_task(config):
        models = f"choose model={MODEL_HINTS[dataset.task]}, or " if dataset.task in MODEL_HINTS else "choose "
        yield (
            f"dataset={dataset.name} is for {dataset.task}, but model={model.name} is for {model.task}: "
            f"{models}dataset={DATASET_HINTS[model.task]}"
        )
    for setting in ("train.logits=targets", "train.loss=chunked"):
        is_set = setting in (f"train.logits={config.train.logits}", f"train.loss={config.train.loss}")
        if is_set and model.task != "causal_lm":
            yield f"{setting} is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    if config.train.score_answers and "answer_tokens" not in dataset.keys:
        yield (
            f"train.score_answers=true needs reference answers, but dataset={dataset.name} has none: "
            "choose dataset=squad or squad_sample, or leave it out"
        )


def check_lengths(config: Config) -> Iterator[str]:
    """Yield an error for each setting about the lengths of texts that the model or another setting excludes."""
    dataset, model = config.dataset, config.model
    for key in ("packing", "bucketing"):
        if getattr(dataset, key) and model.task != "causal_lm":
            yield f"dataset.{key}=true is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    if dataset.packing and dataset.bucketing:
        yield "dataset.bucketing=true has no effect on packed rows: set dataset.packing=false, or leave it out"
    if dataset.packing and model.attention in UNPACKED_ATTENTION.get(model._target_, ()):
        yield (
            f"dataset.packing=true is not supported by model={model.name} with model.attention={model.attention}: use "
            "model.attention=sdpa, or flex on a GPU"
        )


def same_task(config: Config) -> bool:
    """Return whether the dataset fits the task of the model."""
    return config.dataset.task in (config.model.task, "any")


def check_sizes(config: Config) -> Iterator[str]:
    """Yield an error for texts or micro-batches that are too long or too large."""
    samples = config.dataset.train_size
    if samples is None and not (config.is_prediction or config.is_preflight):  # A prediction needs no samples.
        samples = GENERATED_TRAIN_SIZES.get(config.dataset._target_)
    errors = [check_sequence_length(config.dataset, config.model)]
    smallest = 1 if searches_micro_batch(config) else config.train.micro_batch
    if samples is not None:
        errors.append(
            check_samples_per_rank(
                samples, config.cluster.world_size, smallest, global_batch=config.train.global_batch_size
            )
        )
    yield from filter(None, errors)
