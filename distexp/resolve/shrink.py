"""Shrinking of a run to the limits of the section ``scale``, as in ``scale=tiny``."""

from __future__ import annotations

from typing import Any, cast

from omegaconf import OmegaConf

from distexp.config import Config, DatasetConfig, ModelConfig
from distexp.config.batch_sizes import searches_micro_batch
from distexp.config.paths import conf_dir

MIN_HEAD_WIDTH, MIN_CHANNELS = 4, 8


def shrink_to_scale(config: Config) -> list[str]:
    """Apply the limits of the scale, and return an error if the model has no sizes to shrink."""
    scale, train = config.scale, config.train
    if scale.name == "full":
        return []
    errors = _shrink_model(config)
    _shrink_data(config)
    if not searches_micro_batch(config):
        before, train.micro_batch_size = train.micro_batch, _at_most(train.micro_batch, scale.micro_batch_size)
        if train.global_batch_size is not None:
            train.global_batch_size = train.global_batch_size * train.micro_batch // before
    train.gradient_accumulation_steps = _at_most(train.gradient_accumulation_steps, scale.gradient_accumulation_steps)
    if config.precision.name == "fp16" and config.cluster.device == "cpu":
        config.precision.name = "fp32"  # fp16 needs a GPU
    return errors


def shrink_global_batch(config: Config) -> list[str]:
    """Limit the global batch size to what the limits of the scale give; return no errors."""
    scale, train = config.scale, config.train
    micro_batch = scale.micro_batch_size if searches_micro_batch(config) else train.micro_batch
    if train.global_batch_size is not None and micro_batch and scale.gradient_accumulation_steps:
        largest = micro_batch * scale.gradient_accumulation_steps * config.cluster.world_size
        train.global_batch_size = min(train.global_batch_size, largest)
    return []


def check_worker_limit(config: Config) -> list[str]:
    """Return an error if the scale, or this machine, is too small for the run."""
    cluster, limit = config.cluster, config.scale.workers
    if limit is not None and cluster.world_size > limit:
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} makes "
            f"{cluster.world_size} workers, but scale={config.scale.name} allows {limit}: raise scale.workers, or "
            "leave scale out"
        ]
    return []


def check_exercise_device(config: Config) -> list[str]:
    """Return an error if an exercise of full size is on a machine without a GPU."""
    on_cpu = config.scale.name == "full" and config.cluster.device == "cpu"
    if config.exercise and on_cpu and config.precision.name == "fp16":
        return [
            f"experiment={config.exercise} needs GPUs, but this run is on cpu: add scale=tiny to run it on CPUs, or "
            "cluster=slurm to run it on a cluster"
        ]
    return []


def _shrink_model(config: Config) -> list[str]:
    model, scale = config.model, config.scale
    if model.hidden_size is None and model.width is None:
        return [f"scale={scale.name} cannot shrink model={model.name}, whose sizes are unknown: choose another model"]
    model.init = "random"
    if "path" in model.keys:
        model.path = ModelConfig().path
    model.tokenizer = None if model.tokenizer is None else "byte"
    for key in ("num_layers", "num_heads", "vocab_size", "seq_length"):
        limit = {"num_layers": scale.layers, "num_heads": scale.heads, "vocab_size": scale.vocab_size,
                 "seq_length": scale.max_length}[key]  # fmt: skip
        if getattr(model, key) is not None:
            setattr(model, key, _at_most(getattr(model, key), limit))
    if scale.shrink is not None:
        step = MIN_HEAD_WIDTH * model.num_heads if model.num_heads else MIN_CHANNELS
        for key in ("hidden_size", "ff_dim", "width"):
            if getattr(model, key) is not None:
                setattr(model, key, _narrower(getattr(model, key), scale.shrink, step))
    if model.depths is not None:
        model.depths = [_at_most(depth, scale.layers) for depth in model.depths]
    return []


def _shrink_data(config: Config) -> None:
    scale = config.scale
    sample = conf_dir() / "dataset" / f"{config.dataset.name}_sample.yaml"
    if sample.is_file():
        original = config.dataset
        typed: Any = OmegaConf.merge(OmegaConf.structured(DatasetConfig), OmegaConf.load(sample))
        config.dataset = cast(DatasetConfig, OmegaConf.to_object(typed))
        for key in ("train_size", "eval_size", "padding"):
            setattr(config.dataset, key, getattr(original, key))
        for key in ("max_length", "image_size"):
            if key in config.dataset.keys:
                setattr(config.dataset, key, getattr(original, key))
    data, scaling = config.dataset, config.scaling
    for key, limit in (("max_length", scale.max_length), ("image_size", scale.image_size)):
        if getattr(data, key) is not None:
            setattr(data, key, _at_most(getattr(data, key), limit))
    data.eval_size = scale.eval_size if data.eval_size is None else _at_most(data.eval_size, scale.eval_size)
    if scaling.samples_per_worker is not None:
        scaling.samples_per_worker = _at_most(scaling.samples_per_worker, scale.train_size)
    else:
        data.train_size = scale.train_size if data.train_size is None else _at_most(data.train_size, scale.train_size)


def _narrower(size: int, divisor: int, step: int) -> int:
    """Divide a size and round it down to a multiple of ``step``, at least one step."""
    return max(step, size // divisor // step * step)


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
