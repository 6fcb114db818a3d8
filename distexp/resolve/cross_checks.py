"""What only makes sense together: model and data set, files that must be there, trackers, precision and device.

What a strategy or an engine cannot do is its own to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from distexp.checkpoints.folder import candidates, suggest
from distexp.config import Config
from distexp.config.model_checks import loads_from_source, weights_source, weights_source_key
from distexp.config.size_checks import check_samples_per_rank, check_sequence_length

LIBRARIES = frozenset({"tensorboard", "wandb", "mlflow"})
"""Trackers of ours, each of the name of its library, which need not be installed."""

MODELS = {"causal_lm": "bloom_tiny, gpt_tiny or another text model", "image_classification": "resnet_tiny or resnet50"}
DATASETS = {
    "causal_lm": "squad_sample, squad or synthetic",
    "image_classification": "tinyimagenet_sample, tinyimagenet or synthetic",
}
"""What there is for each task."""


def cross_field_errors(config: Config) -> Iterator[str]:
    """A sentence for each error of a configuration whose device is decided."""
    rules = (_task_errors, _size_errors, _file_errors, _tracker_errors, _model_source_errors, _device_errors)
    for rule in rules:
        yield from rule(config)


def _task_errors(config: Config) -> Iterator[str]:
    model, dataset = config.model, config.dataset
    if not _is_of_one_task(config):
        models = f"choose model={MODELS[dataset.task]}, or " if dataset.task in MODELS else "choose "
        yield (
            f"dataset={dataset.name} is for {dataset.task}, and model={model.name} does {model.task}: "
            f"{models}dataset={DATASETS[model.task]}"
        )
    if config.train.logits == "targets" and model.task != "causal_lm":
        yield (
            f"train.logits=targets chooses among the positions of a text, and model={model.name} does {model.task}: "
            "leave it out"
        )
    if config.train.score_answers and "answer_tokens" not in dataset.keys:
        yield (
            f"train.score_answers=true scores answers against references, and dataset={dataset.name} has none: "
            "choose dataset=squad or squad_sample, or leave it out"
        )


def _size_errors(config: Config) -> Iterator[str]:
    samples, cluster = config.dataset.train_size, config.cluster
    errors = [check_sequence_length(config.dataset, config.model)]
    if samples is not None:
        workers = cluster.world_size
        errors.append(check_samples_per_rank(samples, workers, config.train.micro_batch_size))
    yield from filter(None, errors)


def _is_of_one_task(config: Config) -> bool:
    return config.dataset.task in (config.model.task, "any")


def _file_errors(config: Config) -> Iterator[str]:
    dataset = config.dataset
    for key, path, kind in (
        ("dataset.train_path", dataset.train_path, "file"),
        ("dataset.eval_path", dataset.eval_path, "file"),
        ("dataset.root", dataset.root, "folder"),
        ("deepspeed.config_file", config.deepspeed.config_file, "file"),
    ):
        there = os.path.isfile if kind == "file" else os.path.isdir
        if path is not None and not there(path):
            yield f"{key}={path} is not a {kind} here: correct the path"
    resume = config.train.resume
    if resume is not None and not candidates(Path(resume)):
        near = ", ".join(map(str, suggest(Path(resume))))
        mend = near or "the folder of one, or of a run that wrote some"
        yield f"train.resume={resume} holds no checkpoint: give {mend}"
    # Where the model needs another data set, it is not said yet that this one stays.
    if dataset.root is None and "root" in dataset.keys and _is_of_one_task(config):
        yield f"dataset={dataset.name} reads a folder: set dataset.root to one in TinyImageNet's official layout"
    pair = {"dataset.train_path": dataset.train_path, "dataset.eval_path": dataset.eval_path}
    given = [key for key, path in pair.items() if path is not None]
    if len(given) == 1:
        (lacking,) = set(pair) - set(given)
        yield (
            f"{given[0]}={pair[given[0]]} is set and {lacking} is not, but training and evaluation come from "
            "the same place: set both or neither"
        )


def _tracker_errors(config: Config) -> Iterator[str]:
    tracker = config.tracker
    if tracker._target_ is not None and tracker.name in LIBRARIES and find_spec(tracker.name) is None:
        yield f"tracker={tracker.name} needs its library: pip install {tracker.name}, or choose tracker=none"
    for key, owner in (("online", "wandb"), ("uri", "mlflow")):
        value = getattr(tracker, key)
        if value and tracker.name in {*LIBRARIES, "none"} - {owner}:
            yield (
                f"tracker.{key}={value} belongs to tracker={owner}, and this run has tracker={tracker.name}: "
                "leave it out"
            )


def _model_source_errors(config: Config) -> Iterator[str]:
    """What can be seen of a local model without transformers; a hub id is judged when it is read."""
    model = config.model
    where = weights_source(model)
    if where is None or not loads_from_source(model):
        return
    key = f"model.{weights_source_key(model)}"
    if os.path.exists(where):
        if not os.path.isfile(os.path.join(where, "config.json")):
            yield f"{key}={where} holds no config.json: give a folder written by save_pretrained, or a hub id"
    elif where.startswith(("/", "~", ".")) or where.count("/") > 1:
        yield f"{key}={where} is not a folder here: correct the path, or give a hub id"


def _device_errors(config: Config) -> Iterator[str]:
    on_gpu = config.cluster.device == "cuda"
    if config.precision.name == "fp16" and not on_gpu:
        yield "precision=fp16 needs a GPU, and this run is on cpu: choose precision=bf16 or fp32"
    if config.offload.pin_memory and not on_gpu:
        yield (
            "offload=pinned needs a GPU: page-locked memory speeds copies to one, and this run is on cpu: "
            "choose offload=true"
        )
