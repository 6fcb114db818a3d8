"""The ds_config.json for DeepSpeed: the user's file plus distexp's values."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distexp.config import Config
from distexp.config.model_checks import searches_micro_batch
from distexp.runs.run_dir import DS_CONFIG
from distexp.system.files import load_json, write_json

SYNCHRONIZED_TIMER = "timers", "throughput", "synchronized"
CHECKED_GRADIENTS = "bf16", "check_grad_overflow"

Values = Iterator[tuple[tuple[str, ...], Any]]
"""Values for a ds_config, each with the keys that lead to it, such as ``("bf16", "enabled")``."""


def effective_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return the ds_config: the user's file plus the values that distexp sets."""
    settings = read_file(config.deepspeed.config_file)
    for section in ("optimizer", "scheduler"):  # distexp builds these; ``conflicts`` has refused other values
        settings.pop(section, None)
    for keys, value in values_set_by_distexp(config, world_size):
        *sections, last = keys
        parent = settings
        for key in sections:
            parent = parent.setdefault(key, {})
        parent[last] = value
    return _without_auto(settings)


def uses_autocast(config: Config) -> bool:
    """Return whether bf16 means torch's autocast over fp32 weights.

    It does at stage 0, as in the other strategies. A user's file can enable DeepSpeed's own bf16 there.
    """
    in_file = get_nested(read_or_empty(config.deepspeed.config_file), ("bf16", "enabled"))
    return config.precision.name == "bf16" and config.deepspeed.zero_stage == 0 and in_file is not True


def _without_auto(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without "auto" values, for which DeepSpeed uses its default."""
    return {
        key: _without_auto(value) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != "auto"
    }


def values_set_by_distexp(config: Config, world_size: int) -> Values:
    """Yield every value that distexp sets."""
    yield from _batch_sizes(config, world_size)
    yield ("gradient_clipping",), config.train.gradient_clipping or 0.0
    yield from _precision(config)
    uses_cpu_adam = config.deepspeed.cpu_optimizer == "deepspeed" and config.offload.enabled
    yield ("zero_force_ds_cpu_optimizer",), uses_cpu_adam
    # DeepSpeed does not test torch's SGD; distexp's parity tests do.
    yield ("zero_allow_untested_optimizer",), True
    options = config.deepspeed
    yield ("zero_optimization", "stage"), options.zero_stage
    if config.offload.enabled:
        target = {"device": "cpu", "pin_memory": config.offload.pin_memory}
        yield ("zero_optimization", "offload_optimizer"), target
        if options.zero_stage == 3:
            yield ("zero_optimization", "offload_param"), target
    if options.overlap_comm:
        yield ("zero_optimization", "overlap_comm"), True
    for key in (  # with the same names in DeepSpeed
        *("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"),
        *("stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    ):
        if (value := getattr(options, key)) is not None:
            yield ("zero_optimization", key), value
    in_file = get_nested(read_or_empty(config.deepspeed.config_file), SYNCHRONIZED_TIMER)
    if config.deepspeed.async_update and in_file in (None, "auto"):
        yield SYNCHRONIZED_TIMER, False


def _batch_sizes(config: Config, world_size: int) -> Values:
    train = config.train
    yield ("train_micro_batch_size_per_gpu",), train.micro_batch_size
    if searches_micro_batch(config):
        yield ("gradient_accumulation_steps",), "auto"
        yield ("train_batch_size",), train.global_batch_size
    else:
        yield ("gradient_accumulation_steps",), train.gradient_accumulation_steps
        yield ("train_batch_size",), train.micro_batch * train.gradient_accumulation_steps * world_size


def _precision(config: Config) -> Values:
    autocast = uses_autocast(config)
    yield ("bf16", "enabled"), config.precision.name == "bf16" and not autocast
    if config.deepspeed.check_overflow is False:
        yield CHECKED_GRADIENTS, False
    yield ("fp16", "enabled"), config.precision.name == "fp16"
    if autocast:
        yield ("torch_autocast",), {"enabled": True, "dtype": "bfloat16"}


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
        return read_file(path)
    except ValueError:
        return {}


def read_file(path: str | None) -> dict[str, Any]:
    """Return the content of a ds_config file; empty if there is none. Raise ValueError if it is not a JSON object."""
    if path is None or not Path(path).is_file():
        return {}
    settings = load_json(Path(path))
    if not isinstance(settings, dict):
        raise ValueError(f"it is a {type(settings).__name__}")
    return settings


VARIED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer", "scheduler"),
)
"""Keys of a ds_config that the configuration of a run sets, and that differ between the phases of ``verify``."""


def copy_without_varied(config: Config, directory: Path) -> list[str]:
    """Write a copy of the user's file without the keys of VARIED; return its override. Without a file there is none."""
    settings, copy = read_file(config.deepspeed.config_file), directory / DS_CONFIG
    if not settings:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    write_json(copy, {key: value for key, value in settings.items() if key not in VARIED})
    return [f"deepspeed.config_file={copy}"]


MIN_BUCKET_ELEMENTS = 5_000_000
MAX_BUCKET_ELEMENTS, MAX_PREFETCH_ELEMENTS, MAX_PERSISTENT_ELEMENTS = 500_000_000, 50_000_000, 100_000
"""DeepSpeed's defaults for all models. With the last one, stage 3 would shard no parameter of a small model."""


def fit_buckets(settings: dict[str, Any], parameters: int, largest: int, trained: int | None = None) -> dict[str, int]:
    """Set bucket sizes that the user left open in an ``effective_config`` to a sixteenth of the model; return them.

    DeepSpeed's default of 500 million elements can take more memory than a stage saves on a model of that size. Only
    the gradients of ``trained`` parameters are reduced, by default all.
    """
    zero = settings["zero_optimization"]
    bucket, gathered = (
        # DeepSpeed refuses an odd bucket, and a larger one than the model is useless.
        min(max(elements // 16, MIN_BUCKET_ELEMENTS), MAX_BUCKET_ELEMENTS, elements + elements % 2)
        for elements in (parameters if trained is None else trained, parameters)
    )
    fitting = {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if zero["stage"] == 0:
        fitting = {}
    elif zero["stage"] == 3:
        live = max(largest, parameters // 4)
        fitting = {
            "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": min(gathered, MAX_PREFETCH_ELEMENTS),
            "stage3_param_persistence_threshold": min(parameters // 100, MAX_PERSISTENT_ELEMENTS),
            "stage3_max_live_parameters": live,
            "stage3_max_reuse_distance": live,
        }
    filled = {key: value for key, value in fitting.items() if key not in zero}
    zero.update(filled)
    return filled


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
