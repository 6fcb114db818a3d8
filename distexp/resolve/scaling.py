"""How the work follows the number of workers: what ``scaling=`` decides, before anything runs.

Each rule changes a configuration whose number of workers is known, and returns a sentence for each thing
that does not fit. What it decided is in the configuration: dataset.train_size, model.num_layers,
train.micro_batch_size.
"""

from __future__ import annotations

from collections.abc import Callable

from distexp.config import Config
from distexp.resolve.parameter_count import parameter_count, ties_embeddings


def scale_work(config: Config) -> list[str]:
    """Applies the chosen rule."""
    return RULES[config.scaling.name](config)


def _fixed(config: Config) -> list[str]:
    unused = ("samples_per_worker", "base_workers")
    return [
        f"scaling.{key}={getattr(config.scaling, key)} means nothing to scaling=fixed: choose scaling="
        + ("weak_data" if key == "samples_per_worker" else "weak_model")
        for key in unused
        if getattr(config.scaling, key) is not None
    ]


def _weak_data(config: Config) -> list[str]:
    """Samples per worker are constant."""
    samples, dataset = config.scaling.samples_per_worker, config.dataset
    if samples is None:
        return ["scaling=weak_data needs scaling.samples_per_worker: set it, as to 250"]
    if dataset.train_size is not None:
        return [
            f"scaling=weak_data makes dataset.train_size of scaling.samples_per_worker={samples} and the workers, and "
            f"it is {dataset.train_size} already: leave it out, or choose scaling=fixed"
        ]
    dataset.train_size = samples * config.cluster.world_size
    return []


def _weak_model(config: Config) -> list[str]:
    """Parameters per worker are constant, and so is the work of a worker: parameters x samples."""
    errors = [*_micro_batch_errors(config), *_not_sharded(config)]
    model, base = config.model, parameter_count(config.model)
    if base is None or model.num_layers is None:
        errors.append(
            f"scaling=weak_model counts parameters, and those of model={model.name} are not known beforehand: "
            "choose model=gpt, or a BLOOM with model.init=random"
        )
    elif not ties_embeddings(model):
        errors.append(
            "scaling=weak_model needs model.tie_embeddings=true: an embedding of its own has parameters and no work, "
            "so not both can be constant (scaling=weak_model_seed does not ask for that)"
        )
    if errors or base is None or model.num_layers is None:
        return errors
    wanted = base * config.cluster.world_size / _base_workers(config)
    one_more = (parameter_count(model, 2) or 0) - (parameter_count(model, 1) or 0)
    layers = model.num_layers + round((wanted - base) / one_more)
    if layers < 1:
        return [
            f"scaling=weak_model finds no layer left for {config.cluster.world_size} workers, for the embedding alone "
            "has more than their share of parameters: raise model.num_layers, or lower scaling.base_workers"
        ]
    model.num_layers = layers
    _share_batch(config)
    return []


def _weak_model_seed(config: Config) -> list[str]:
    """Layers x workers, whatever the embedding holds."""
    errors = _micro_batch_errors(config)
    layers, share = config.model.num_layers, config.cluster.world_size
    if layers is None:
        return [f"scaling=weak_model_seed scales layers, and model={config.model.name} has none: choose model=gpt"]
    if layers * share % _base_workers(config):
        errors.append(
            f"scaling=weak_model_seed makes model.num_layers={layers} x {share} workers / "
            f"scaling.base_workers={_base_workers(config)}, which is no whole number: change one of them"
        )
    if not errors:
        config.model.num_layers = layers * share // _base_workers(config)
        _share_batch(config)
    return errors


def _base_workers(config: Config) -> int:
    return config.scaling.base_workers or 1


def _share_batch(config: Config) -> None:
    """The global batch of ``base_workers`` for all workers."""
    config.train.micro_batch_size = config.train.micro_batch_size * _base_workers(config) // config.cluster.world_size


def _micro_batch_errors(config: Config) -> list[str]:
    whole = config.train.micro_batch_size * _base_workers(config)
    if whole % config.cluster.world_size == 0:
        return []
    return [
        f"scaling={config.scaling.name} shares a batch of train.micro_batch_size={config.train.micro_batch_size} x "
        f"scaling.base_workers={_base_workers(config)} = {whole} among the workers, and {config.cluster.world_size} do "
        "not divide it: change one of them"
    ]


def _not_sharded(config: Config) -> list[str]:
    strategy = config.strategy.name
    sharded = (
        config.fsdp.sharding in ("full_shard", "shard_grad_op") if strategy == "fsdp"
        else strategy == "deepspeed" and config.deepspeed.zero_stage == 3
    )  # fmt: skip
    if sharded or config.cluster.world_size == 1:
        return []
    detail = {"fsdp": f" sharding={config.fsdp.sharding}", "deepspeed": f" zero_stage={config.deepspeed.zero_stage}"}
    return [
        "scaling=weak_model keeps the parameters of a worker constant where all workers share them, and "
        f"strategy={strategy}{detail.get(strategy, '')} does not: choose sharding=full_shard or zero_stage=3"
    ]


RULES: dict[str, Callable[[Config], list[str]]] = {
    "fixed": _fixed,
    "weak_data": _weak_data,
    "weak_model": _weak_model,
    "weak_model_seed": _weak_model_seed,
}
