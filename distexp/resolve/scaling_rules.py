"""Scaling rules (``scaling=``): the work of a run as a function of its workers; and the limits of ``scale=``."""

from collections.abc import Callable, Iterator
from typing import Any, cast

from omegaconf import OmegaConf

from distexp.config import Config, DatasetConfig, ModelConfig
from distexp.config.keys import conf_dir
from distexp.config.model_checks import searches_micro_batch
from distexp.resolve.resources import parameter_count, ties_embeddings
from distexp.strategies.base import load_strategy

KV_HEADS = "num_key_value_heads"
"""Option of models of transformers that is limited as ``model.num_heads`` is."""


def apply_scaling(config: Config) -> list[str]:
    """Apply the chosen rule, unless the run has too many workers, and return the errors."""
    return check_worker_limit(config) or _foreign_key_errors(config) or RULES[config.scaling.name](config)


def _foreign_key_errors(config: Config) -> list[str]:
    """Return an error for each key of another rule."""
    owners, rule = {"samples_per_worker": "weak_data", "base_workers": "weak_model"}, config.scaling.name
    return [
        f"scaling.{key}={getattr(config.scaling, key)} has no effect with scaling={rule}: set it to null, or choose "
        f"scaling={owner}"
        for key, owner in owners.items()
        if getattr(config.scaling, key) is not None and not rule.startswith(owner)
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
    dataset.train_size = samples * config.data_parallel
    return []


def _scale_model(config: Config) -> list[str]:
    """Keep the parameters per worker constant, and so the work per worker: parameters x samples."""
    model, errors = config.model, _micro_batch_errors(config)
    if config.cluster.world_size > 1 and not load_strategy(config).shards_all_parameters(config):
        errors.append(
            f"scaling=weak_model needs all parameters sharded over all workers, but strategy={config.strategy.name} "
            "with these options does not shard them: choose sharding=full_shard or zero_stage=3"
        )
    if parameter_count(model) is None:
        errors.append(
            f"scaling=weak_model cannot count the parameters of model={model.name}: "
            "choose model=gpt, or a BLOOM with model.init=random"
        )
    elif not ties_embeddings(model):
        errors.append(
            "scaling=weak_model needs model.tie_embeddings=true: a separate embedding has parameters but no work, so "
            "not both can be constant. scaling=weak_model_workshop has no such requirement"
        )
    if errors:
        return errors
    # The embedding does not grow.
    configured = _count(model, model.num_layers)
    per_layer = _count(model, 2) - _count(model, 1)
    wanted = configured * config.cluster.world_size / _base_workers(config)
    layers = (model.num_layers or 0) + round((wanted - configured) / per_layer)
    if layers < 1:
        return [
            f"scaling=weak_model leaves no layer for {config.cluster.world_size} workers, because the embedding alone "
            "is larger: raise model.num_layers, or lower scaling.base_workers"
        ]
    config.model.num_layers = layers
    _split_batch(config)
    return []


def _count(model: ModelConfig, layers: int | None) -> int:
    parameters = parameter_count(model, layers)
    assert parameters is not None, "_scale_model refuses such models"
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


RULES: dict[str, Callable[[Config], list[str]]] = {
    "fixed": lambda config: [],
    "weak_data": _scale_data,
    "weak_model": _scale_model,
    "weak_model_workshop": _scale_model_as_workshop,
}


OTHER_MICRO_BATCH = ", or another micro-batch size"
"""End of the error about a global batch. A forecast leaves it out, because the profile has one micro-batch size."""


def set_accumulation(config: Config) -> Iterator[str]:
    """Set the accumulation to the global batch size, and yield an error if no whole number fits."""
    train, workers = config.train, config.data_parallel
    total = train.global_batch_size
    if searches_micro_batch(config):
        yield from _search_errors(config)
        train.gradient_accumulation_steps = 1  # The workers set it, because it depends on the size that they find.
    elif total is not None:
        per_pass, copies = train.micro_batch * workers, config.parallel.copies
        if total % per_pass:
            which = "workers" if copies == 1 else f"groups of {copies} workers"
            yield (
                f"train.global_batch_size={total} is no multiple of train.micro_batch_size={train.micro_batch} x "
                f"{workers} {which} = {per_pass}: use {multiples_near(total, per_pass)}{OTHER_MICRO_BATCH}"
            )
        train.gradient_accumulation_steps = max(1, total // per_pass)


def _search_errors(config: Config) -> Iterator[str]:
    train, workers = config.train, config.data_parallel
    total = train.global_batch_size
    if total is None:
        yield (
            "train.micro_batch_size=auto needs the samples of an optimizer step: set train.global_batch_size, for "
            f"example to {16 * workers}"
        )
    elif total % workers:
        yield (
            f"train.global_batch_size={total} is no multiple of the {workers} workers: use "
            f"{multiples_near(total, workers)}"
        )
    if config.engine.name != "native":
        yield (
            f"train.micro_batch_size=auto is not supported by engine={config.engine.name}: use engine=native, or a "
            "number"
        )


def multiples_near(total: int, factor: int) -> str:
    """Return the multiples of a factor next to a number, as in ``60 or 72``."""
    below = total // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


def shrink_to_scale(config: Config) -> list[str]:
    """Apply the limits of the scale, and return an error if the model has no sizes to shrink."""
    if config.scale.name == "full":
        return [
            f"scale.{key}={value} has no effect with scale={config.scale.name}: add scale=tiny, or leave it out"
            for key, value in vars(config.scale).items()
            if key not in ("name", "workers", "workers_per_node") and value is not None  # these have an effect then too
        ]
    errors = _shrink_model(config)
    _replace_by_sample(config)
    _limit(config.dataset, max_length=config.scale.max_length, image_size=config.scale.image_size)
    # A null number of samples means all, so it becomes the limit.
    scale, train, data, scaling = config.scale, config.train, config.dataset, config.scaling
    data.eval_size = scale.eval_size if data.eval_size is None else _at_most(data.eval_size, scale.eval_size)
    if scaling.samples_per_worker is not None:
        scaling.samples_per_worker = _at_most(scaling.samples_per_worker, scale.train_size)
    else:
        data.train_size = scale.train_size if data.train_size is None else _at_most(data.train_size, scale.train_size)
    # The global batch shrinks in the proportion of the micro-batch.
    if not searches_micro_batch(config):
        original = train.micro_batch
        train.micro_batch_size = _at_most(original, scale.micro_batch_size)
        if train.global_batch_size is not None:
            train.global_batch_size = train.global_batch_size * train.micro_batch // original
    _limit(train, gradient_accumulation_steps=scale.gradient_accumulation_steps)
    in_half = config.precision.name == "fp16" or (config.exercise and config.precision.name == "bf16")
    if in_half and config.cluster.device == "cpu":
        config.precision.name = "fp32"  # fp16 needs a GPU, and losses of exercises are compared
    return errors


def shrink_global_batch(config: Config) -> None:
    """Limit the global batch size to what the limits of the scale give."""
    scale, train = config.scale, config.train
    searches = searches_micro_batch(config)
    largest = scale.micro_batch_size or (None if searches else train.micro_batch)
    if train.global_batch_size is not None and largest and scale.gradient_accumulation_steps:
        per_worker = largest * scale.gradient_accumulation_steps
        if not searches:
            per_worker = max(1, per_worker // train.micro_batch) * train.micro_batch
        train.global_batch_size = min(train.global_batch_size, per_worker * config.data_parallel)


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
    """Return an error if an exercise in fp16 or bf16 and of full size is on a machine without a GPU."""
    full_on_cpu = config.scale.name == "full" and config.cluster.device == "cpu"
    if not (config.exercise and full_on_cpu and config.precision.name in ("fp16", "bf16")):
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
    if KV_HEADS in model.options:
        model.options = {**model.options, KV_HEADS: _at_most(model.options[KV_HEADS], scale.heads)}
    if model.depths is not None:
        model.depths = [_at_most(depth, scale.layers) for depth in model.depths]
    if scale.shrink is not None:
        step = 4 * model.num_heads if model.num_heads else 8  # four numbers in each head, or eight channels
        for key in ("hidden_size", "ff_dim", "width"):
            width = getattr(model, key)
            if width is not None:
                setattr(model, key, max(step, width // scale.shrink // step * step))
    return []


def _replace_by_sample(config: Config) -> None:
    """Replace a dataset that must be downloaded by its generated sample, if it has one. Keep the settings."""
    sample = conf_dir() / "dataset" / f"{config.dataset.name}_sample.yaml"
    if not sample.is_file():
        return
    original = config.dataset
    typed: Any = OmegaConf.merge(OmegaConf.structured(DatasetConfig), OmegaConf.load(sample))
    config.dataset = cast(DatasetConfig, OmegaConf.to_object(typed))
    for key in set(config.dataset.keys) - {"num_workers"}:  # a generated dataset sets it itself
        setattr(config.dataset, key, getattr(original, key))


def _limit(section: Any, **limits: int | None) -> None:
    """Lower the values of keys to their limits. A key that is null stays null."""
    for key, limit in limits.items():
        value = getattr(section, key)
        if value is not None:
            setattr(section, key, _at_most(value, limit))


def _at_most(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
