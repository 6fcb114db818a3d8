"""The ds_config.json for DeepSpeed: the user's file plus distexp's values."""

import json
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from distexp.config import Config, ConfigError
from distexp.config.model_checks import searches_micro_batch
from distexp.config.overrides import copyable_override
from distexp.runs.run_dir import DS_CONFIG
from distexp.system.files import TOO_DEEP, write_json

SYNCHRONIZED_TIMER = "timers", "throughput", "synchronized"
CHECKED_GRADIENTS = "bf16", "check_grad_overflow"
OVERLAP = "zero_optimization", "overlap_comm"

CHECK_STAGES = (1, 2)
"""Stages at which DeepSpeed can leave out the check for infinite gradients.

The check starts several kernels for each parameter. Two H200s waited about 15 ms per step for it with BLOOM-560m.
"""

Values = Iterator[tuple[tuple[str, ...], Any]]
"""Values for a ds_config, each with the keys that lead to it, such as ``("bf16", "enabled")``."""


def effective_config(config: Config, world_size: int) -> dict[str, Any]:
    """Return the ds_config: the user's file plus the values that distexp sets. Raise ConfigError if it is unsafe."""
    settings = read_file(config.deepspeed.config_file)
    if errors := list(unsafe_errors(settings)):  # The file may have changed while the job waited in a queue.
        raise ConfigError(errors)
    for section in ("optimizer", "scheduler"):  # distexp builds these; ``conflicts`` has refused other values
        settings.pop(section, None)
    for keys, value in values_set_by_distexp(config, world_size):
        *sections, last = keys
        parent = settings
        for key in sections:  # one that is null or "auto" in the file has no values
            parent[key] = parent[key] if isinstance(parent.get(key), dict) else {}
            parent = parent[key]
        parent[last] = value
    return _without_auto(settings)


def may_skip_check(config: Config) -> bool:
    """Return whether DeepSpeed can leave out its check for infinite gradients, which bf16 does not need."""
    return config.precision.name == "bf16" and config.deepspeed.zero_stage in CHECK_STAGES


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
    if options.overlap_comm is not None:
        yield OVERLAP, options.overlap_comm
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
    if may_skip_check(config):
        yield CHECKED_GRADIENTS, config.deepspeed.check_overflow is not False
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
    """Return the content of a ds_config file; empty if there is none. Raise ValueError if it is no JSON object."""
    if path is None or not Path(path).is_file():
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        settings = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except OSError as error:
        raise ValueError(error.strerror) from None
    except json.JSONDecodeError as error:
        is_comment = re.match(r"\s*(//|/\*|#)", text[error.pos :])
        reason = f"JSON has no comments, but line {error.lineno} has one" if is_comment else str(error)
        raise ValueError(reason) from None
    if not isinstance(settings, dict):
        raise ValueError(f"it is a {type(settings).__name__}")
    return settings


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some keys and values. Raise ValueError for a repeated key, as DeepSpeed does."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {max(keys, key=keys.count)} twice")
    return found


TOP_LEVEL = "top_level"


@lru_cache(maxsize=1)
def known_keys() -> Mapping[str, list[str]]:
    """Return the keys that DeepSpeed reads, by the path of their section, as in ``timers.throughput``."""
    content: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("ds_keys.yaml").read_text())
    return content


def key_errors(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each key of a file that DeepSpeed does not read, and each section that has a single value."""
    for name, known in known_keys().items():
        section = settings if name == TOP_LEVEL else get_nested(settings, tuple(name.split(".")))
        if section in (None, "auto"):
            continue
        if not isinstance(section, Mapping):
            yield f"deepspeed.config_file sets {name}={json.dumps(section)}, which is a section of keys: remove it"
            continue
        for key in (key for key in section if key not in known):
            path = key if name == TOP_LEVEL else f"{name}.{key}"
            yield f"deepspeed.config_file has {path}, which DeepSpeed does not read: {_hint(name, key)}"


def _hint(section: str, key: str) -> str:
    """Return what to write in place of an unknown key of a section: one of another section, or a similar one.

    Many sections have keys such as ``enabled``, which are no hint to one of them.
    """
    elsewhere = [(name, key) for name, known in known_keys().items() if key in known]
    found = elsewhere if len(elsewhere) == 1 else []
    found += [(section, match) for match in get_close_matches(key, known_keys()[section], n=1)]
    path = ".".join(name for name in found[0] if name != TOP_LEVEL) if found else ""
    return f"did you mean {path}?" if path else "remove it"


UNSAFE_SECTIONS = {
    "tensorboard": "set tracker=tensorboard",
    "csv_monitor": "read metrics.jsonl of the run",
    "wandb": "set tracker=wandb",
    "comet": "set tracker=wandb",
    "autotuning": "run distexp choose",
}
"""Sections with which DeepSpeed writes files in any folder or sends results, each with what to do instead."""

UNSAFE_KEYS = {"lower_precision_safe_modules": "imports a package", "debug_log": "writes files into the current folder"}
"""Keys of other sections with which DeepSpeed loads code or writes files, each with what it does."""

FILE_KEY = re.compile(r"(?!nvme_path)(\w+_)?(path|paths|dir|file)")
"""Keys of all sections that name a file or a folder, except that of swap files, which are new ones."""

INSTEAD = {"output_file": ", and set profile=true"}


def unsafe_errors(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for each value with which DeepSpeed writes to other folders, sends results or loads code.

    The file may be from somebody else.
    """
    for name, section in settings.items():
        if name not in UNSAFE_SECTIONS:
            yield from _unsafe_values(name, section)
        elif get_nested(section, ("enabled",)) not in (None, False, "auto"):
            yield (
                f"deepspeed.config_file has {name}, with which DeepSpeed writes files to any folder or sends results: "
                f"remove it, and {UNSAFE_SECTIONS[name]}"
            )


def _is_of_torch(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("torch.nn.")


def _unsafe_values(path: str, value: Any) -> Iterator[str]:
    key = path.rpartition(".")[2]
    if isinstance(value, Mapping):
        if value.get("enabled") is False:
            return
        for name, child in value.items():
            yield from _unsafe_values(f"{path}.{name}", child)
    elif key == "lower_precision_safe_modules" and isinstance(value, list) and all(map(_is_of_torch, value)):
        return
    elif value not in (None, "auto", "", False) and (key in UNSAFE_KEYS or FILE_KEY.fullmatch(key)):
        effect = UNSAFE_KEYS.get(key, "reads or writes files outside of the run")
        shown = f"{path}={json.dumps(value)}"
        yield f"deepspeed.config_file sets {shown}, which {effect}: remove it{INSTEAD.get(key, '')}"
    elif isinstance(value, list):
        for child in value:
            yield from _unsafe_values(path, child)


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
    return [copyable_override(f"deepspeed.config_file={copy}")]


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
