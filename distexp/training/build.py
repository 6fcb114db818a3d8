"""The data, the loaders and the model that a configuration names, and the targets of its micro-batches."""

import json
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distexp.config import WHOLE_MODEL, Config, ConfigError, ModelConfig, model_checks
from distexp.config.custom_code import PAGE, check_returned, locate
from distexp.data import base, text
from distexp.data.base import Samples, TaskData
from distexp.data.image_cache import cache_images
from distexp.data.loader import BatchSharding, ShardedBatchSampler, ShardedLoader
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.models import attention, dropout, head, hf, task_models, transforms
from distexp.models import blueprint as introspection
from distexp.models.adapter import add_adapter
from distexp.models.blueprint import Blueprint
from distexp.strategies.base import load_strategy
from distexp.strategies.parallel.context import share_tokens, shared_tokens
from distexp.training import generation, inputs


def load_data(config: Config, context: Context) -> TaskData:
    """Load the data set. One rank per node builds the cached parts; rank 0 prints the notes."""
    target = config.dataset._target_
    try:
        data = _load_within_limits(config)
    except base.TooFewSamplesError:  # ``distexp verify`` uses what the data have.
        raise
    except ConfigError as error:
        raise ConfigError([*error.errors, *_source_errors(config.model)]) from error.__cause__
    check_returned(data, TaskData, f"dataset._target_={target}")
    base.check_task_data(data, config.model.task, f"dataset._target_={target}")
    data = replace(data, num_classes=int(data.num_classes))  # It may be an integer of NumPy, which JSON does not take.
    base.check_not_empty(data, evaluates=config.train.evaluate)
    if config.dataset.cache in ("cpu", "gpu"):
        data = cache_images(data, config.dataset.cache, context.device)
    if config.dataset.packing:
        data = text.pack_training_set(data, text.sequence_length(config.dataset, config.model), config.train.seed)
    if config.dataset.bucketing:
        data = text.pad_to_batch(data, text.sequence_length(config.dataset, config.model))
    if config.model.attention in ("sdpa", "flex") and not isinstance(data.collate, text.TextCollate):
        data = replace(data, collate=text.RightPadding(data.collate))
    if config.train.logits == "targets":
        data = _keep_targets(config, data)
    if config.train.loss in ("chunked", "own"):
        data = replace(data, collate=base.LabelsForHead(data.collate))
    if context.slices > 1:
        data = replace(data, collate=base.SharedRows(data.collate, shared_tokens(context)))
    if config.train.score_answers:
        generation.check_has_references(data)
    if context.rank == 0:
        for note in data.notes:
            print(f"note: {note}", flush=True)
    return data


def _load_within_limits(config: Config) -> TaskData:
    """Load the data set. A size that ``scale=tiny`` has set is a limit, so smaller data are whole."""
    load, dataset = locate(config.dataset._target_), config.dataset
    while True:
        try:
            data: TaskData = load(dataset, config.model, config.train.seed)
        except base.TooFewSamplesError as error:
            key = f"{error.key}_size"
            limit = getattr(config.scale, key)
            if limit is None or getattr(dataset, key) != limit or error.available >= limit:
                raise
            changed: dict[str, Any] = {key: error.available}
            dataset = replace(dataset, **changed)
        else:
            return data


def _source_errors(model: ModelConfig) -> list[str]:
    """Return the errors of the model's own source, if its tokenizer is from there. So a user sees both at once."""
    source = model_checks.weights_source(model)
    if not source or model.tokenizer != "auto" or not model_checks.loads_from_source(model):
        return []
    try:
        hf.read_config(f"model.{model_checks.weights_source_key(model)}", source)
    except ConfigError as error:
        return error.errors
    return []


def _keep_targets(config: Config, data: TaskData) -> TaskData:
    """Let batches keep only the tokens that predict a target.

    A compiled model is compiled again for each shape of a batch, which takes minutes with a whole model. So all of its
    batches keep as many tokens as the one with the most targets. During the search for a micro-batch size, the batches
    are not known yet.
    """
    known = config.train.compiled in WHOLE_MODEL and config.train.micro_batch_size != "auto"
    fixed = max_targets(config, data) if known else {}
    return replace(data, collate=base.TargetTokens(data.collate, bool(config.train.compile), fixed))


def make_loaders(config: Config, data: TaskData, context: Context) -> tuple[ShardedLoader, ShardedLoader]:
    """Return this rank's loaders of the training and the evaluation set; a collective."""
    train, place = config.train, (context.data_rank, context.data_parallel)
    unit = "rows" if config.dataset.packing else "samples"
    _check_equal_sizes(data, unit, evaluates=train.evaluate)
    if data.evaluation is data.train:  # Each loader sets the epoch of its own object.
        data = replace(data, evaluation=copy(data.evaluation))
    error = model_checks.check_samples_per_rank(
        len(data.train), context.data_parallel, train.micro_batch, global_batch=train.global_batch_size, unit=unit
    )
    if error:
        raise ConfigError(error)
    training = BatchSharding(*place, train.micro_batch, train.gradient_accumulation_steps, context.copies)
    evaluation = BatchSharding(*place, train.eval_batch_size or train.micro_batch, copies=context.copies)
    lengths = text.sample_lengths(data.train) if config.dataset.bucketing else None
    load = partial(ShardedLoader, seed=train.seed, num_workers=config.dataset.num_workers)
    return (
        load(data.train, data, training, context.device, shuffle=True, lengths=lengths),
        load(data.evaluation, data, evaluation, context.device, shuffle=False, lengths=None),
    )


def _check_equal_sizes(data: TaskData, unit: str, *, evaluates: bool) -> None:
    """Raise ConfigError if sizes of the data differ between the ranks; a collective.

    Such ranks have other numbers of steps or other weights, and wait for each other.
    """
    sizes = {f"the training set has {{}} {unit}": len(data.train), "num_classes of the data is {}": data.num_classes}
    if evaluates:
        sizes["the evaluation set has {} samples"] = len(data.evaluation)
    for message, found in zip(sizes, zip(*gather_to_all(list(sizes.values())), strict=True), strict=True):
        other = next((rank for rank, size in enumerate(found) if size != found[0]), None)
        if other is not None:
            raise ConfigError(
                f"{message.format(found[0])} on rank 0, but {found[other]} on rank {other}: load the same data on "
                "every rank, because distexp gives each its share of the samples"
            )


def model_factory(config: Config, data: TaskData) -> Callable[[], nn.Module]:
    """Return a function that makes the configured model on torch's default device."""
    target = config.model._target_
    build = locate(target)

    def build_checked() -> nn.Module:
        model: nn.Module = build(config.model, data.num_classes)
        check_returned(model, nn.Module, f"model._target_={target}")
        if type(model).forward is nn.Module.forward and "forward" not in vars(model):
            raise ConfigError(f"model._target_={target} returned a module without forward(): add it, as in {PAGE}")
        if config.model.task == "sequence_classification" and isinstance(data.collate, text.TextCollate):
            task_models.set_padding(model, data.collate.pad_id)
        if config.precision.name == "float8":
            from distexp.strategies.low_bits import use_float8

            wrap = config.fsdp.wrap
            use_float8(model, transforms.find_units(model, "auto" if wrap == transforms.NO_UNITS else wrap))
        return add_adapter(model, config)

    return build_checked


def build_model(
    config: Config, data: TaskData, context: Context, blueprint_class: type[Blueprint] = Blueprint
) -> Blueprint:
    """Return the model, not distributed, without memory for its weights."""
    make, key = model_factory(config, data), weights_key(config, data)
    is_checked = config.model.task == "causal_lm" and config.model._target_ not in model_checks.ATTENTIONS
    check: dict[str, Any] = {"check": partial(task_models.check_causal, model=config.model)} if is_checked else {}
    blueprint = blueprint_class(make, context, broadcast=config.fsdp.sync_module_states, weights_key=key, **check)
    if not any(weight.requires_grad for weight in blueprint.model.parameters()):
        raise ConfigError(
            f"{type(blueprint.model).__name__} of model={config.model.name} has no weight to train: set "
            "requires_grad=True for some of its weights, or add adapter=lora"
        )
    if config.dataset._target_.startswith("distexp."):
        introspection.check_forward_arguments(blueprint.model, config.model.traits.inputs)
    if config.model.traits.is_text:
        _check_positions(blueprint.model, config)
        if data.tokenizer is not None and config.model.traits.has_classes:  # ``num_classes`` is not its size
            task_models.check_vocabulary(blueprint.model, data.tokenizer.size)
    elif config.dataset.image_size is not None:
        task_models.check_images(blueprint.model, config.dataset.image_size)
    if config.dataset.packing:
        attention.check_packing(blueprint.model)
    if config.train.save_model:
        hf.check_exportable(blueprint.model)
    if context.world_size > 1 and load_strategy(config).keeps_states_whole(config) is not True:
        dropout.check_layerdrop(blueprint.model)
    if config.train.loss == "own":
        introspection.check_forward_arguments(blueprint.model, (*config.model.traits.inputs, base.TARGET_LABELS))
    head.adapt_router(blueprint.model)
    head.adapt_head(blueprint.model, config.train)
    if load_strategy(config).casts_weights(config):
        transforms.use_fp32_batch_norms(blueprint.model)
    transforms.transform_blocks(blueprint.model, config)
    if context.slices > 1:
        share_tokens(blueprint.model, config, context)
    return blueprint


def _check_positions(model: nn.Module, config: Config) -> None:
    limit, length = introspection.learned_positions(model), config.dataset.max_length
    if limit is not None and length is not None and length > limit:
        raise ConfigError(
            f"dataset.max_length={length} exceeds the {limit} positions of model.name={config.model.name}: use "
            f"dataset.max_length={limit}, or less"
        )


def weights_key(config: Config, data: TaskData) -> str | None:
    """Return what random weights depend on; None: they are read, or made by custom code. Attention has none."""
    model = config.model
    if model.init != "random" or not model._target_.startswith("distexp."):
        return None
    adapter = [asdict(config.adapter)] if config.adapter.freezes_model else []
    return json.dumps([asdict(replace(model, attention="auto")), data.num_classes, *adapter], sort_keys=True)


MAX_EPOCHS = 10  # Epochs whose batches are compared. More would take time and find hardly larger ones.


def training_micro_batches(config: Config, samples: Samples, *, epochs: int) -> Tensor:
    """Return the micro-batches of all ranks, shape (micro-batches, samples). Larger indices are padding samples."""
    train = config.train
    sharding = BatchSharding(0, config.data_parallel, train.micro_batch, train.gradient_accumulation_steps)
    lengths = lengths_of(samples) if config.dataset.bucketing else None
    sampler = ShardedBatchSampler(len(samples), sharding, seed=train.seed, shuffle=True, lengths=lengths)
    plan = inputs.StepPlan(train, sampler.steps_per_epoch)
    used = [sampler.global_batches(epoch)[: len(plan.steps_of(epoch, 0))] for epoch in list(plan.epochs(0))[:epochs]]
    return torch.cat(used).view(-1, train.micro_batch)


def max_targets(config: Config, data: TaskData) -> dict[int, int]:
    """Return the most targets of a micro-batch by its number of samples, for the sets whose targets are known."""
    found: dict[int, int] = {}
    for rows, targets in _micro_batch_targets(config, data):
        summed = torch.from_numpy(np.concatenate([targets, np.zeros_like(targets)]))[rows].sum(dim=1)
        found[rows.shape[1]] = max(found.get(rows.shape[1], 0), int(summed.max()))
    return found


def _micro_batch_targets(config: Config, data: TaskData) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
    train = config.train
    if (targets := _known_targets(data.train)) is not None:
        yield training_micro_batches(config, data.train, epochs=MAX_EPOCHS), targets
    if train.evaluate and (targets := _known_targets(data.evaluation)) is not None:
        size = train.eval_batch_size or train.micro_batch
        sharding = BatchSharding(0, config.data_parallel, size)
        sampler = ShardedBatchSampler(len(data.evaluation), sharding, seed=train.seed, shuffle=False)
        yield sampler.global_batches(0).view(-1, size), targets


def _known_targets(samples: Samples) -> NDArray[np.int64] | None:
    """Return the targets of each sample; None without prompts, because they may then be fewer than the tokens."""
    whole = samples.samples if isinstance(samples, text.PackedSamples) else samples
    return token_counts(samples)[1] if isinstance(whole, text.TokenSamples) else None


def lengths_of(samples: Samples) -> NDArray[np.int64] | None:
    """Return the tokens of each sample; None if they are not known without reading the samples."""
    lengths = getattr(samples, "lengths", None)
    return None if lengths is None else np.asarray(lengths, dtype=np.int64)


def token_counts(samples: Samples) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    """Return tokens and targets of each sample, if known. All but the first may be targets, unless it has a prompt."""
    if isinstance(samples, text.PackedSamples):
        lengths, targets = token_counts(samples.samples)
        if lengths is None or targets is None:
            return None, None
        rows = [list(row) for row in samples.rows]
        return _sums(lengths, rows), _sums(targets, rows)
    lengths = lengths_of(samples)
    if lengths is None:
        return None, None
    return lengths, samples.target_counts if isinstance(samples, text.TokenSamples) else lengths - 1


def _sums(values: NDArray[np.int64], rows: list[list[int]]) -> NDArray[np.int64]:
    return np.array([int(values[row].sum()) for row in rows], dtype=np.int64)
