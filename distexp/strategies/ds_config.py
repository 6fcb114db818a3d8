"""The ds_config.json that DeepSpeed gets: the user's own file, with everything that distexp decides filled in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distexp.config import Config

BUCKETS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
    "stage3_max_live_parameters",
)
"""Keys of ``deepspeed`` in the configuration, by the names that they have in zero_optimization."""

SMALLEST_BUCKET = 5_000_000
LARGEST_BUCKET = 500_000_000
"""Elements; the second is DeepSpeed's own default."""


def effective_config(config: Config, world_size: int) -> dict[str, Any]:
    """The ds_config that DeepSpeed gets: the user's file, with everything that distexp decides filled in."""
    settings = _read(config.deepspeed.config_file)
    for section in ("optimizer", "scheduler"):  # ours, the same for every strategy; conflicts were refused
        settings.pop(section, None)
    for path, value in _decided(config, world_size):
        node = settings
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return _without_auto(settings)


def autocasts(config: Config) -> bool:
    """Whether bf16 is torch's autocast over fp32 weights, as in the other strategies.

    Stage 0 has it, for DeepSpeed's own bf16 keeps no fp32 weights there; a file that asks for bf16 gets that.
    """
    theirs = at(read_or_empty(config.deepspeed.config_file), ("bf16", "enabled"))
    return config.precision.name == "bf16" and config.deepspeed.zero_stage == 0 and theirs is not True


def fit_buckets(settings: dict[str, Any], parameters: int, largest: int) -> dict[str, int]:
    """Fills in buckets of a sixteenth of the model where nobody chose any; returns what was filled in.

    DeepSpeed's own hold 500 million elements, which is more than all that a stage saves on a model of that size.

    Args:
        settings: an effective_config; changed in place.
        parameters: of the whole model.
        largest: elements of its largest parameter.
    """
    zero = settings["zero_optimization"]
    if zero["stage"] == 0:
        return {}
    bucket = min(max(parameters // 16, SMALLEST_BUCKET), LARGEST_BUCKET)
    fitting = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 3:
        live = max(largest, parameters // 4)
        fitting |= {"stage3_prefetch_bucket_size": min(bucket, 50_000_000)}
        fitting |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
        del fitting["allgather_bucket_size"]
    filled = {key: value for key, value in fitting.items() if key not in zero}
    zero.update(filled)
    return filled


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Leaves out every "auto" that distexp does not decide: DeepSpeed's own default holds there."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto"
    }


def _decided(config: Config, world_size: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What distexp decides, as paths into a ds_config."""
    train, options = config.train, config.deepspeed
    micro, accumulation = train.micro_batch_size, train.gradient_accumulation_steps
    yield ("train_micro_batch_size_per_gpu",), micro
    yield ("gradient_accumulation_steps",), accumulation
    yield ("train_batch_size",), micro * accumulation * world_size
    yield ("gradient_clipping",), train.gradient_clipping or 0.0
    autocast = autocasts(config)
    yield ("bf16", "enabled"), config.precision.name == "bf16" and not autocast
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
    # DeepSpeed calls torch's SGD untested; the parity tests hold it to the others.
    yield ("zero_allow_untested_optimizer",), True
    if options.overlap_comm:
        yield ("zero_optimization", "overlap_comm"), True
    for key in BUCKETS:
        if (value := getattr(options, key)) is not None:
            yield ("zero_optimization", key), value


def conflicts(config: Config) -> Iterator[str]:
    """Where the user's ds_config.json says something else than the configuration does."""
    path = config.deepspeed.config_file
    if path is None or not Path(path).is_file():
        return
    try:
        settings = _read(path)
    except ValueError as error:
        yield f"deepspeed.config_file={path} is not a JSON object: {error}"
        return
    world_size = config.cluster.world_size
    decided = dict(_decided(config, world_size))
    for keys, value in {**decided, **_decided_optimizer(config)}.items():
        theirs = at(settings, keys)
        if theirs not in (None, "auto") and theirs != value:
            yield (
                f"deepspeed.config_file sets {'.'.join(keys)}={json.dumps(theirs)}, and this run has "
                f'{json.dumps(value)}: make them equal, or write "auto" in the file'
            )
    if "scheduler" in settings:
        yield "deepspeed.config_file has a scheduler: leave it out, train.schedule sets the learning rate"
    for name in ("offload_optimizer", "offload_param"):
        device = at(settings, ("zero_optimization", name, "device"))
        if not config.offload.enabled and device not in (None, "auto", "none"):
            yield f"deepspeed.config_file sets zero_optimization.{name}.device={device}: choose offload=true as well"


def _decided_optimizer(config: Config) -> dict[tuple[str, ...], Any]:
    train = config.train
    return {
        ("optimizer", "type"): {"adamw": "AdamW", "sgd": "SGD"}[train.optimizer],
        ("optimizer", "params", "lr"): train.learning_rate,
        ("optimizer", "params", "weight_decay"): train.weight_decay,
        ("optimizer", "params", "betas"): list(train.betas),
        ("optimizer", "params", "eps"): train.eps,
    }


def at(settings: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(settings, dict):
            return None
        settings = settings.get(key)
    return settings


def read_or_empty(path: str | None) -> dict[str, Any]:
    """As _read, before the file has been judged."""
    try:
        return _read(path)
    except ValueError:
        return {}


def _read(path: str | None) -> dict[str, Any]:
    if path is None or not Path(path).is_file():
        return {}
    settings = json.loads(Path(path).read_text())
    if not isinstance(settings, dict):
        raise ValueError("it holds a " + type(settings).__name__)
    return settings
