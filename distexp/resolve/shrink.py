"""Shrinking of a run to the limits of the section ``scale``, as in ``scale=tiny``."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import OmegaConf

from distexp.config import Config, DatasetConfig, ModelConfig, ScaleConfig
from distexp.config.batch_sizes import searches_micro_batch
from distexp.config.paths import conf_dir

MIN_HEAD_WIDTH = 4
MIN_CHANNELS = 8

USED_AT_FULL_SCALE = ("name", "workers", "workers_per_node")
"""Keys of ``scale`` with an effect on runs that are not shrunk."""

SAMPLE_KEYS = ("num_workers",)
"""Keys that a generated dataset sets itself. It needs no loader processes."""


def shrink_to_scale(config: Config) -> list[str]:
    """Apply the limits of the scale, and return an error if the model has no sizes to shrink."""
    if config.scale.name == "full":
        return _unused_limits(config.scale)
    errors = _shrink_model(config)
    _replace_by_sample(config)
    _shrink_texts_and_images(config)
    _shrink_sample_counts(config)
    _shrink_batch(config)
    if config.precision.name == "fp16" and config.cluster.device == "cpu":
        config.precision.name = "fp32"  # fp16 needs a GPU
    return errors


def _unused_limits(scale: ScaleConfig) -> list[str]:
    """Return an error for each limit that is set although nothing is shrunk."""
    return [
        f"scale.{key}={value} has no effect with scale={scale.name}: add scale=tiny, or leave it out"
        for key, value in vars(scale).items()
        if key not in USED_AT_FULL_SCALE and value is not None
    ]


def shrink_global_batch(config: Config) -> list[str]:
    """Limit the global batch size to what the limits of the scale give; return no errors."""
    scale, train = config.scale, config.train
    micro_batch = scale.micro_batch_size if searches_micro_batch(config) else train.micro_batch
    if train.global_batch_size is not None and micro_batch and scale.gradient_accumulation_steps:
        largest = micro_batch * scale.gradient_accumulation_steps * config.cluster.world_size
        train.global_batch_size = min(train.global_batch_size, largest)
    return []


def check_worker_limit(config: Config) -> list[str]:
    """Return an error if the run has more workers than the scale allows."""
    cluster, limit = config.cluster, config.scale.workers
    if limit is None or cluster.world_size <= limit:
        return []
    return [
        f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} makes "
        f"{cluster.world_size} workers, but scale={config.scale.name} allows {limit}: raise scale.workers, or "
        "leave scale out"
    ]


def check_exercise_device(config: Config) -> list[str]:
    """Return an error if an exercise in fp16 and of full size is on a machine without a GPU."""
    full_on_cpu = config.scale.name == "full" and config.cluster.device == "cpu"
    if not (config.exercise and full_on_cpu and config.precision.name == "fp16"):
        return []
    return [
        f"experiment={config.exercise} needs GPUs, but this run is on cpu: add scale=tiny to run it on CPUs, or "
        "cluster=slurm to run it on a cluster"
    ]


def _shrink_model(config: Config) -> list[str]:
    """Shrink all sizes of the model. Its weights are random, because no pretrained ones have these sizes."""
    model, scale = config.model, config.scale
    if model.hidden_size is None and model.width is None:
        return [f"scale={scale.name} cannot shrink model={model.name}, whose sizes are unknown: choose another model"]
    model.init = "random"
    if "path" in model.keys:
        model.path = ModelConfig().path
    model.tokenizer = None if model.tokenizer is None else "byte"
    _limit(model, num_layers=scale.layers, num_heads=scale.heads)
    _limit(model, vocab_size=scale.vocab_size, seq_length=scale.max_length)
    if model.depths is not None:
        model.depths = [_at_most(depth, scale.layers) for depth in model.depths]
    if scale.shrink is not None:
        _divide_widths(model, scale.shrink)
    return []


def _divide_widths(model: ModelConfig, divisor: int) -> None:
    """Divide all widths of a model, and keep them multiples of the number of heads."""
    step = MIN_HEAD_WIDTH * model.num_heads if model.num_heads else MIN_CHANNELS
    for key in ("hidden_size", "ff_dim", "width"):
        width = getattr(model, key)
        if width is not None:
            setattr(model, key, max(step, width // divisor // step * step))


def _replace_by_sample(config: Config) -> None:
    """Replace a dataset that must be downloaded by its generated sample, if it has one. Keep the settings."""
    sample = conf_dir() / "dataset" / f"{config.dataset.name}_sample.yaml"
    if not sample.is_file():
        return
    original = config.dataset
    typed: Any = OmegaConf.merge(OmegaConf.structured(DatasetConfig), OmegaConf.load(sample))
    config.dataset = cast(DatasetConfig, OmegaConf.to_object(typed))
    for key in config.dataset.keys:
        if key not in SAMPLE_KEYS:
            setattr(config.dataset, key, getattr(original, key))


def _shrink_texts_and_images(config: Config) -> None:
    _limit(config.dataset, max_length=config.scale.max_length, image_size=config.scale.image_size)


def _shrink_sample_counts(config: Config) -> None:
    """Limit the numbers of samples. A null number means all samples, so it becomes the limit."""
    scale, data, scaling = config.scale, config.dataset, config.scaling
    data.eval_size = scale.eval_size if data.eval_size is None else _at_most(data.eval_size, scale.eval_size)
    if scaling.samples_per_worker is not None:
        scaling.samples_per_worker = _at_most(scaling.samples_per_worker, scale.train_size)
    else:
        data.train_size = scale.train_size if data.train_size is None else _at_most(data.train_size, scale.train_size)


def _shrink_batch(config: Config) -> None:
    """Limit the micro-batch and the accumulation. The global batch shrinks in the proportion of the micro-batch."""
    scale, train = config.scale, config.train
    if not searches_micro_batch(config):
        original = train.micro_batch
        train.micro_batch_size = _at_most(original, scale.micro_batch_size)
        if train.global_batch_size is not None:
            train.global_batch_size = train.global_batch_size * train.micro_batch // original
    _limit(train, gradient_accumulation_steps=scale.gradient_accumulation_steps)


def _limit(section: Any, **limits: int | None) -> None:
    """Lower the values of keys to their limits. A key that is null stays null."""
    for key, limit in limits.items():
        value = getattr(section, key)
        if value is not None:
            setattr(section, key, _at_most(value, limit))


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
