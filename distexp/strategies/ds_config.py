"""The ds_config.json for DeepSpeed: the user's file plus distexp's values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch

BUCKETS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
)
"""Keys of the section ``deepspeed`` that have the same name in ``zero_optimization``."""

SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 500_000_000
"""Limits in elements; the largest is DeepSpeed's default. No bucket is larger than the model."""

LARGEST_PERSISTENT = 100_000
"""Elements up to which stage 3 does not shard a parameter: DeepSpeed's default. It would shard no small model."""


def effective_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return the ds_config: the user's file plus the values that distexp sets."""
    settings = _read(config.deepspeed.config_file)
    for section in ("optimizer", "scheduler"):  # distexp builds these; ``conflicts`` has refused other values
        settings.pop(section, None)
    for path, value in _values_set_by_distexp(config, world_size):
        node = settings
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return _without_auto(settings)


def uses_autocast(config: Config) -> bool:
    """Return whether bf16 means torch's autocast over fp32 weights.

    It does at stage 0, because DeepSpeed's bf16 has no fp32 weights there. A user's file can still enable that bf16.
    """
    in_file = get_nested(read_or_empty(config.deepspeed.config_file), ("bf16", "enabled"))
    return config.precision.name == "bf16" and config.deepspeed.zero_stage == 0 and in_file is not True


def describe_buckets(fitted: Mapping[str, int], parameters: int) -> str:
    """State what the fitted bucket sizes mean for a model with this number of parameters."""
    bucket = fitted.get("reduce_bucket_size", 0)
    if bucket >= parameters:
        return (
            f"DeepSpeed's reduce_bucket_size={bucket:,} holds the whole model of {parameters:,} parameters: "
            "gradients are reduced once, after the backward pass"
        )
    values = ", ".join(f"{key}={value:,}" for key, value in fitted.items())
    return f"DeepSpeed's buckets are a fraction of the model's {parameters:,} parameters: {values}"


def fit_buckets(settings: dict[str, Any], parameters: int, largest: int) -> dict[str, int]:
    """Set bucket sizes that the user left open to a sixteenth of the model.

    DeepSpeed's default of 500 million elements can take more memory than a stage saves on a model of that size.

    Args:
        settings: the result of ``effective_config``; changed in place.
        parameters: number of parameters of the model.
        largest: number of elements of its largest parameter.

    Returns:
        The keys and values that were set.
    """
    zero = settings["zero_optimization"]
    if zero["stage"] == 0:
        return {}
    even = parameters + parameters % 2  # DeepSpeed refuses an odd bucket
    bucket = min(max(parameters // 16, SMALLEST_BUCKET), LARGEST_BUCKET, even)
    fitting = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(largest, parameters // 4)
        fitting |= {"stage3_prefetch_bucket_size": min(bucket, 50_000_000)}
        fitting |= {"stage3_param_persistence_threshold": min(parameters // 100, LARGEST_PERSISTENT)}
        fitting |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
        del fitting["allgather_bucket_size"]
    filled = {key: value for key, value in fitting.items() if key not in zero}
    zero.update(filled)
    return filled


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without "auto" values, for which DeepSpeed uses its default."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto"
    }


def _values_set_by_distexp(config: Config, world_size: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path into a ds_config and the value of every key that distexp sets."""
    train, options = config.train, config.deepspeed
    yield from _batch_sizes(config, world_size)
    yield ("gradient_clipping",), train.gradient_clipping or 0.0
    autocast = uses_autocast(config)
    yield ("bf16", "enabled"), config.precision.name == "bf16" and not autocast
    if options.check_overflow is False:
        yield ("bf16", "check_grad_overflow"), False
    yield ("fp16", "enabled"), config.precision.name == "fp16"
    if autocast:
        yield ("torch_autocast",), {"enabled": True, "dtype": "bfloat16"}
    yield ("zero_optimization", "stage"), options.zero_stage
    if config.offload.enabled:
        where = {"device": "cpu", "pin_memory": config.offload.pin_memory}
        yield ("zero_optimization", "offload_optimizer"), where
        if options.zero_stage == 3:
            yield ("zero_optimization", "offload_param"), where
    yield ("zero_force_ds_cpu_optimizer",), options.cpu_optimizer == "deepspeed" and config.offload.enabled
    # DeepSpeed does not test torch's SGD; distexp's parity tests do.
    yield ("zero_allow_untested_optimizer",), True
    if options.overlap_comm:
        yield ("zero_optimization", "overlap_comm"), True
    for key in BUCKETS:
        if (value := getattr(options, key)) is not None:
            yield ("zero_optimization", key), value


def _batch_sizes(config: Config, world_size: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    train = config.train
    yield ("train_micro_batch_size_per_gpu",), train.micro_batch_size
    if searches_micro_batch(config):
        yield ("gradient_accumulation_steps",), "auto"
        yield ("train_batch_size",), train.global_batch_size
    else:
        yield ("gradient_accumulation_steps",), train.gradient_accumulation_steps
        yield ("train_batch_size",), train.micro_batch * train.gradient_accumulation_steps * world_size


def conflicts(config: Config) -> Iterator[str]:
    """Yield an error for each value in the user's file that is set differently here."""
    path = config.deepspeed.config_file
    if path is None or not Path(path).is_file():
        return
    try:
        settings = _read(path)
    except ValueError as error:
        yield f"deepspeed.config_file={path} is not a JSON object ({error}): correct the file"
        return
    expected = dict(_values_set_by_distexp(config, config.cluster.world_size))
    for keys, value in {**expected, **_expected_optimizer(config)}.items():
        in_file = get_nested(settings, keys)
        if in_file not in (None, "auto") and in_file != value:
            yield (
                f"deepspeed.config_file sets {'.'.join(keys)}={json.dumps(in_file)}, but this run has "
                f'{json.dumps(value)}: make them equal, or write "auto" in the file'
            )
    if "scheduler" in settings:
        yield "deepspeed.config_file has a scheduler: remove it, and set train.schedule instead"
    for name in ("offload_optimizer", "offload_param"):
        device = get_nested(settings, ("zero_optimization", name, "device"))
        if not config.offload.enabled and device not in (None, "auto", "none"):
            yield f"deepspeed.config_file sets zero_optimization.{name}.device={device}: also choose offload=true"


def _expected_optimizer(config: Config) -> dict[tuple[str, ...], Any]:
    train = config.train
    return {
        ("optimizer", "type"): {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer],
        ("optimizer", "params", "lr"): train.learning_rate,
        ("optimizer", "params", "weight_decay"): train.weight_decay,
        ("optimizer", "params", "betas"): list(train.betas),
        ("optimizer", "params", "eps"): train.eps,
    }


def get_nested(settings: Any, keys: tuple[str, ...]) -> Any:
    """Return the value at a path of keys; None if it does not exist."""
    for key in keys:
        if not isinstance(settings, dict):
            return None
        settings = settings.get(key)
    return settings


def read_or_empty(path: str | None) -> dict[str, Any]:
    """Return the content of a ds_config file; empty if there is none or it is invalid."""
    try:
        return _read(path)
    except ValueError:
        return {}


def _read(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        return {}
    settings = json.loads(Path(path).read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"it is a {type(settings).__name__}")
    return settings
