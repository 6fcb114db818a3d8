"""Scaling rules (``scaling=``): the work of a run as a function of its number of workers.

A rule runs when the number of workers is known. It changes dataset.train_size, model.num_layers and
train.micro_batch_size in place and returns its errors.
"""

from __future__ import annotations

from collections.abc import Callable

from distexp.config import Config, ModelConfig
from distexp.config.batch_sizes import searches_micro_batch
from distexp.resolve.parameter_count import parameter_count, ties_embeddings
from distexp.resolve.shrink import check_worker_limit
from distexp.strategies.base import load_strategy


def apply_scaling(config: Config) -> list[str]:
    """Apply the chosen rule, unless the run has too many workers, and return the errors."""
    return check_worker_limit(config) or RULES[config.scaling.name](config)


def _keep_fixed(config: Config) -> list[str]:
    """Change nothing. Refuse keys of the other rules."""
    owners = {"samples_per_worker": "weak_data", "base_workers": "weak_model"}
    return [
        f"scaling.{key}={getattr(config.scaling, key)} has no effect with scaling=fixed: leave it out, or choose "
        f"scaling={owner}"
        for key, owner in owners.items()
        if getattr(config.scaling, key) is not None
    ]


def _scale_data(config: Config) -> list[str]:
    """Keep the samples per worker constant."""
    samples, dataset = config.scaling.samples_per_worker, config.dataset
    if samples is None:
        return ["scaling=weak_data needs scaling.samples_per_worker: set it, for example to 250"]
    if dataset.train_size is not None:
        return [
            f"dataset.train_size={dataset.train_size} conflicts with scaling=weak_data, which computes it from "
            f"scaling.samples_per_worker={samples}: set dataset.train_size=null, or choose scaling=fixed"
        ]
    dataset.train_size = samples * config.cluster.world_size
    return []


def _scale_model(config: Config) -> list[str]:
    """Keep the parameters per worker constant, and so the work per worker: parameters x samples."""
    errors = [*_micro_batch_errors(config), *_sharding_errors(config), *_countable_errors(config.model)]
    if errors:
        return errors
    layers = _layers_for_workers(config)
    if layers < 1:
        return [
            f"scaling=weak_model leaves no layer for {config.cluster.world_size} workers, because the embedding alone "
            "is larger: raise model.num_layers, or lower scaling.base_workers"
        ]
    config.model.num_layers = layers
    _split_batch(config)
    return []


def _layers_for_workers(config: Config) -> int:
    """Return the layers with which the parameters grow as the workers. The embedding does not grow."""
    model = config.model
    configured = _count(model, model.num_layers)
    per_layer = _count(model, 2) - _count(model, 1)
    wanted = configured * config.cluster.world_size / _base_workers(config)
    return (model.num_layers or 0) + round((wanted - configured) / per_layer)


def _count(model: ModelConfig, layers: int | None) -> int:
    parameters = parameter_count(model, layers)
    assert parameters is not None, "_countable_errors refuses such models"
    return parameters


def _scale_model_as_workshop(config: Config) -> list[str]:
    """Multiply the layers by the workers. The embedding does not grow, so the parameters per worker fall."""
    errors = _micro_batch_errors(config)
    layers, workers = config.model.num_layers, config.cluster.world_size
    if layers is None:
        return [f"scaling=weak_model_workshop needs layers, but model={config.model.name} has none: choose model=gpt"]
    if layers * workers % _base_workers(config):
        errors.append(
            f"scaling=weak_model_workshop needs a whole number of layers, but model.num_layers={layers} x {workers} "
            f"workers / scaling.base_workers={_base_workers(config)} is none: change one of them"
        )
    if not errors:
        config.model.num_layers = layers * workers // _base_workers(config)
        _split_batch(config)
    return errors


def _base_workers(config: Config) -> int:
    """Return the workers for which layers and micro-batch are configured."""
    return config.scaling.base_workers or 1


def _split_batch(config: Config) -> None:
    """Split the global batch of ``base_workers`` among all workers. A searched micro-batch needs no split."""
    if not searches_micro_batch(config):
        config.train.micro_batch_size = config.train.micro_batch * _base_workers(config) // config.cluster.world_size


def _micro_batch_errors(config: Config) -> list[str]:
    """Return an error if ``_split_batch`` would leave a remainder."""
    if searches_micro_batch(config):
        return []
    samples = config.train.micro_batch * _base_workers(config)
    if samples % config.cluster.world_size == 0:
        return []
    return [
        f"scaling={config.scaling.name} cannot split {samples} samples (train.micro_batch_size="
        f"{config.train.micro_batch} x scaling.base_workers={_base_workers(config)}) evenly among "
        f"{config.cluster.world_size} workers: change one of them"
    ]


def _countable_errors(model: ModelConfig) -> list[str]:
    """Return an error if the parameters of a model cannot be counted, or do not determine its work."""
    if parameter_count(model) is None:
        return [
            f"scaling=weak_model cannot count the parameters of model={model.name}: "
            "choose model=gpt, or a BLOOM with model.init=random"
        ]
    if not ties_embeddings(model):
        return [
            "scaling=weak_model needs model.tie_embeddings=true: a separate embedding has parameters but no work, so "
            "not both can be constant. scaling=weak_model_workshop has no such requirement"
        ]
    return []


def _sharding_errors(config: Config) -> list[str]:
    if config.cluster.world_size == 1 or load_strategy(config).shards_all_parameters(config):
        return []
    return [
        f"scaling=weak_model needs all parameters sharded over all workers, but strategy={config.strategy.name} "
        "with these options does not shard them: choose sharding=full_shard or zero_stage=3"
    ]


RULES: dict[str, Callable[[Config], list[str]]] = {
    "fixed": _keep_fixed,
    "weak_data": _scale_data,
    "weak_model": _scale_model,
    "weak_model_workshop": _scale_model_as_workshop,
}
"""Rules by the values of ``scaling.name``."""
