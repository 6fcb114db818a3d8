"""Any model of transformers for one of distexp's tasks, with pretrained or random weights."""

import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.model_checks import MODEL_TYPE, architecture_of, causality_error, validate_model, vocabulary_key
from distexp.data.base import TaskData
from distexp.exceptions import first_line
from distexp.models import task_models
from distexp.models.adapter import save_adapter
from distexp.models.blueprint import build_empty
from distexp.models.dropout import DROPOUT_ENDINGS, fit_number, set_configured_dropout
from distexp.runs.run_dir import MODEL
from distexp.system.cache_dir import offline_if_unreachable
from distexp.system.files import replace_atomically, write_json
from distexp.system.restricted_loading import refused_as_config_error
from distexp.system.torch_internals.tensors import replaced

PRELOAD = ("transformers",)

CLASS_NAMES = "class_names.json"
"""File next to a saved adapter with the names of the classes, which the files of peft have no place for."""


def build(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build a model for a task. Raise ConfigError if it does not exist, or does not fit the task or the tokenizer.

    It maps the inputs of the task to ``.logits``: (batch, length, vocabulary or classes), or (batch, classes). A null
    dropout is that of the architecture. On the meta device, no weights are read.
    """
    validate_model(model)
    auto_class = task_models.auto_class(model.task)
    config = _read_config(model, num_classes)
    replaces_attention = config.model_type == "bloom" and model.attention in ("sdpa", "flex")
    if model.attention != "auto" and not replaces_attention:
        with task_models.named_options(model):
            _set_attention(config, model)
    # Once its Trainer has started with ZeRO-3, transformers would partition each new model, which is a collective.
    unpartitioned = replaced("transformers.integrations.deepspeed", "_hf_deepspeed_config_weak_ref", lambda _: None)
    with unpartitioned, task_models.named_options(model):
        if model.init == "pretrained" and not on_meta_device():
            built = read_weights(auto_class, "model.name", model.name, config, new_head=model.traits.has_classes)
        else:
            built = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    is_causal = [module.is_causal for module in built.modules() if hasattr(module, "is_causal")]
    if model.traits.is_causal and is_causal and not any(is_causal):  # an encoder with a language model head
        raise task_models.wrong_task(model, config)
    if replaces_attention:
        from distexp.models.bloom import use_attention

        use_attention(built, model.attention)
    task_models.adapt(built, model)
    return built


def _read_config(model: ModelConfig, num_classes: int) -> Any:
    """Read the configuration of a model with room for the tokenizer or the classes, and set its dropout."""
    if MODEL_TYPE in model.options:  # no file has the architecture
        config = _config_of(dict(architecture_of(model)))
    else:
        config = read_config("model.name", model.name, model.options)
    if model.traits.is_causal and (error := causality_error(model, config.to_dict())):
        raise ConfigError(error)
    if not task_models.supports(config, model.task):
        raise task_models.wrong_task(model, config)
    if model.traits.has_classes:
        config.num_labels = num_classes
    elif num_classes > (rows := config.get_text_config().vocab_size):
        own, key = "model.tokenizer=auto for the model's own", vocabulary_key(model)
        hint = f"correct {key}" if model.tokenizer == "auto" or key.startswith("model.") else own
        raise ConfigError(
            f"the tokenizer has {num_classes} entries, more than the {rows} embeddings of "
            f"model.name={model.name}: use a smaller tokenizer, or {hint}"
        )
    config.use_cache = False  # training never uses cached keys and values, which take memory
    # One rate is that of embeddings, attention and residuals, whose names differ.
    is_set = model.dropout is None or set_configured_dropout(config, model.dropout)
    if model.dropout and not is_set:
        wanted = ", ".join(f"*{ending}" for ending in DROPOUT_ENDINGS)
        raise ConfigError(
            f"model.dropout={model.dropout:g} is not supported: the configuration of model.name={model.name} "
            f"({config.model_type}) has no dropout rate ({wanted}): leave model.dropout out"
        )
    return config


def _config_of(values: dict[str, Any]) -> Any:
    """Build a configuration from the values of a config.json. Raise ConfigError if one is wrong."""
    from transformers import AutoConfig

    kind = values.pop(MODEL_TYPE)
    try:
        config = AutoConfig.for_model(kind)
        known = {*config.to_dict(), *(name for name in OLD_NAMES if _is_known(config, name))}
        _check_parts(config, values, f"model.options.{MODEL_TYPE}={kind}")
        if unknown := sorted(set(values) - known):
            raise _unknown_option(unknown[0], config, f"model.options.{MODEL_TYPE}={kind}")
        return AutoConfig.for_model(kind, **_fit_numbers(config, _merge(config, values)))
    except ConfigError:
        raise
    except Exception as error:  # any: transformers checks values in several ways
        raise ConfigError(f"model.options describes no model of transformers ({_reason(error)}): correct it") from error


def _fit_numbers(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a configuration, and of its parts, with the types of numbers that transformers takes."""
    fitted = {}
    for name, value in changes.items():
        part = _value_of(config, name)
        is_part = isinstance(value, Mapping) and hasattr(part, "sub_configs")
        fitted[name] = _fit_numbers(part, value) if is_part else fit_number(config, name, value)
    return fitted


def _value_of(config: Any, name: str) -> Any:
    """Return a value of a configuration, or None. transformers refuses to read one that may vary between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return config.to_dict().get(name)


def _merge(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of a configuration, and of its parts, with the other values of its dictionaries.

    Otherwise transformers replaces a dictionary. Values of ``rope_parameters`` may be named as in older files.
    """
    merged = dict(changes)
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and not _layer_types(config):
        scaling = merged.pop("rope_scaling") if isinstance(merged.get("rope_scaling"), Mapping) else {}
        moved = {"rope_type" if name == "type" else name: value for name, value in scaling.items()}
        for name in {"rope_theta", "partial_rotary_factor"} & {*merged} & {*rope}:
            moved[name] = merged[name]
            if not hasattr(config, name):  # A few types have both.
                del merged[name]
        if moved:
            merged["rope_parameters"] = {**moved, **(merged.get("rope_parameters") or {})}
    for name, value in merged.items():
        current = _value_of(config, name)
        if isinstance(value, Mapping) and hasattr(current, "sub_configs"):
            is_same = value.get(MODEL_TYPE, current.model_type) == current.model_type
            merged[name] = _merge(current, value) if is_same else value
        elif isinstance(value, Mapping) and isinstance(current, dict) and name not in ("id2label", "label2id"):
            merged[name] = _merge_values(current, value)
    return merged


def _merge_values(current: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for name, value in changes.items():
        known = current.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            merged[name] = _merge_values(known, value)
        else:
            merged[name] = float(value) if type(known) is float and type(value) is int else value
    return merged


def _layer_types(config: Any) -> list[str]:
    """Return the types of layers that have each their own RoPE parameters; empty if all layers have the same."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [name for name, value in rope.items() if isinstance(value, Mapping)]


def _reason(error: Exception) -> str:
    """Return why transformers does not accept a configuration. The first line may only be the title of a list."""
    first, *others = [line.strip() for line in str(error).splitlines()] or [""]
    if not first.endswith(":") or not others:
        return first_line(error)
    reason = others[-1].partition(". Errors:")[0]
    return re.sub(r"^\w+Error: ", "", re.sub(r"<class '(\w+)'>", r"\1", reason))


def _check_parts(config: Any, changes: Mapping[str, Any], where: str, prefix: str = "") -> None:
    """Raise ConfigError if a change of a part of a configuration, such as ``text_config``, has an unknown name."""
    for name, value in changes.items():
        part = _value_of(config, name)
        if isinstance(value, Mapping) and name in ("rope_parameters", "rope_scaling"):
            _check_rope(config, name, value, where, prefix)
        if not isinstance(value, Mapping) or not hasattr(part, "sub_configs"):
            continue
        if value.get(MODEL_TYPE, part.model_type) != part.model_type:
            continue  # another kind of part, with other names
        _check_parts(part, value, where, f"{prefix}{name}.")
        if wrong := sorted(key for key in value if not _is_known(part, key)):
            raise _unknown_option(wrong[0], part, f"{prefix}{name} of {where}", f"{prefix}{name}.")


ROPE_NAMES = frozenset([
    "alpha", "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "long_mscale",
    "low_freq_factor", "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type", "short_factor",
    "short_mscale", "truncate", "type",
])  # fmt: skip
"""Parameters of RoPE that transformers or its models read. It accepts any name, and ignores others."""


def _check_rope(config: Any, name: str, values: Mapping[str, Any], where: str, prefix: str) -> None:
    """Raise ConfigError if a parameter of RoPE has an unknown name, or lacks that of its type of layers."""
    types, wrong = _layer_types(config), dict[str, list[str]]()
    known = sorted({*ROPE_NAMES, *((not types and _value_of(config, "rope_parameters")) or ())})
    for section, value in values.items():
        if types:
            inner = value if isinstance(value, Mapping) else {"": value}
            owner = get_close_matches(section, types, n=1)
            for key in inner:
                last = (get_close_matches(key or ("" if owner else section), known, n=1) or ["rope_theta"])[0]
                if name != "rope_parameters" or section not in types or key not in known:
                    typed = f"{section}.{key}" if key else f"{section}={value}"
                    wrong[typed] = [f"rope_parameters.{each}.{last}" for each in owner or types]
        elif section not in known:
            near = get_close_matches(section, known, n=3, cutoff=0.4) or ["rope_theta"]
            wrong[section] = [f"{name}.{each}" for each in near]
    for typed, names in wrong.items():
        raise ConfigError(
            f"model.options.{prefix}{name}.{typed} is not a value of the config.json of {where} ({config.model_type}): "
            f"use {', '.join(f'{prefix}{each}' for each in names)}, or leave it out"
        )


OLD_NAMES = ("rope_theta", "rope_scaling")
"""Names that transformers reads and stores in ``rope_parameters``."""


def _is_known(config: Any, name: str) -> bool:
    """Return whether a value can have a name. Values of each type of layers have no older names."""
    if name in OLD_NAMES and hasattr(config, "rope_parameters"):
        return not _layer_types(config)
    return name in config.to_dict() or hasattr(config, name) or name == "torch_dtype"


def _unknown_option(name: str, config: Any, where: str, prefix: str = "") -> ConfigError:
    known = get_close_matches(name, config.to_dict(), n=3, cutoff=0.4) or ["one of its keys"]
    if name in OLD_NAMES and (types := _layer_types(config)):
        last = "rope_theta" if name == "rope_theta" else "rope_type"
        known = [f"{prefix}rope_parameters.{each}.{last}" for each in types]
    return ConfigError(
        f"model.options.{prefix}{name} is not a value of the config.json of {where} ({config.model_type}): use "
        f"{', '.join(known)}, or leave it out"
    )


def _set_attention(config: Any, model: ModelConfig) -> None:
    """Set the implementation of the attention, after a model was built with it. Raise ConfigError if that fails."""
    if model.attention == "flex":
        text = config.get_text_config()
        for name in ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob"):
            if value := getattr(text, name, 0):
                raise ConfigError(
                    f"model.attention=flex has no dropout, but {name}={value} in model.name={model.name}: set "
                    "model.dropout=0, or use model.attention=sdpa"
                )
    implementation = {"flex": "flex_attention", "flash": "flash_attention_2"}.get(model.attention, model.attention)
    try:
        config._attn_implementation = implementation
        with torch.device("meta"):
            task_models.auto_class(model.task).from_config(config, trust_remote_code=False)
    except (ValueError, ImportError) as error:
        reason = str(error).split(". ")[0].splitlines()[0]
        raise ConfigError(
            f"model.attention={model.attention} is not supported by model.name={model.name} ({reason}): use "
            "model.attention=auto"
        ) from error


def read_config(key: str, source: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Read the configuration of a model from a hub id, or from a folder written by ``save_pretrained``; change values.

    Raise ConfigError, which names the key of the source, if there is none, or transformers does not support it, or the
    configuration has no such value.
    """
    from transformers import AutoConfig

    offline_if_unreachable(source)
    merged: dict[str, Any] = {}
    load = partial(AutoConfig.from_pretrained, source, trust_remote_code=False, return_unused_kwargs=True)
    try:
        config, unknown = original, _ = load()
        _check_parts(original, changes or {}, f"{key}={source}")
        merged = _merge(original, changes or {})
        varied = {*merged} & {*(getattr(original, "per_layer_attributes", None) or ())}  # transformers would read them
        later = _fit_numbers(original, {name: merged.pop(name) for name in varied})
        try:
            if merged:
                config, unknown = load(**merged)
        except Exception as error:
            if isinstance(error, OSError):
                raise
            config, unknown = load(**_fit_numbers(original, merged))
        for name, value in later.items():
            setattr(config, name, value)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise _read_error(key, source, "a model's config.json", error) from error
    except Exception as error:  # any: transformers checks values in several ways
        named = next(
            (f"model.options.{name}" for name in changes or {} if f"'{name}'" in str(error)), "its config.json"
        )
        raise ConfigError(
            f"transformers does not accept the configuration of {key}={source} ({_reason(error)}): correct {named}"
        ) from error
    old = {name for name in OLD_NAMES if name in (changes or {}) and not _is_known(original, name)}
    if wrong := sorted({*unknown} & {*merged} | old):
        raise _unknown_option(wrong[0], original, f"{key}={source}")
    return config


def read_weights(model_class: Any, key: str, source: str, config: Any, *, new_head: bool = False) -> nn.Module:
    """Build a model with pretrained weights and a configuration of ``read_config``, in fp32 and in training mode.

    With ``new_head``, weights outside of the base model may be missing, and are random then. Raise ConfigError if
    others are missing, if weights are damaged or have other shapes, or if they contain code.
    """
    from safetensors import SafetensorError
    from transformers.utils import logging

    offline_if_unreachable(source)
    logging.disable_progress_bar()  # each update would be a line in the log
    try:
        with refused_as_config_error(Path(source)):  # transformers reads pytorch_model.bin with weights_only
            model, info = model_class.from_pretrained(
                source, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise _read_error(key, source, "a model's weights", error) from error
    # transformers would initialize these at random and continue.
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if new_head and (created := [name for name in missing if task_models.is_of_head(model, name)]):
        print(f"note: {key}={source} has no weights for {', '.join(created)}: they start at random", flush=True)
        missing = [name for name in missing if name not in created]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"{key}={source} lacks weights of {type(model).__name__}, or they have another shape: "
            f"{', '.join(missing[:3])}{more}: use the complete weights of this task, or model.init=random"
        )
    built: nn.Module = model.train()  # from_pretrained leaves it in evaluation mode
    return built


def on_meta_device() -> bool:
    """Return whether modules that are built now have parameters on the meta device, so that no weights are read."""
    probe = nn.Module()
    probe.weight = nn.Parameter(torch.empty(0))
    return probe.weight.is_meta


def _read_error(key: str, source: str, what: str, error: Exception) -> ConfigError:
    reason = first_line(error).rstrip(". ")
    if type(error).__name__ == "SafetensorError":
        return ConfigError(f"{key}={source}: the weights are damaged ({reason}): copy them again")
    return ConfigError(
        f"{key}={source} is neither a folder with {what} nor available from the local cache or the hub ({reason}): "
        f"correct {key}, or set it to a local folder"
    )


StateDict = dict[str, Tensor]


@runtime_checkable
class Exportable(Protocol):
    """A model that can be converted to an equivalent model of transformers."""

    def to_hugging_face(self, state: StateDict) -> tuple[Any, StateDict]:
        """Return the equivalent model on the meta device, and the weights under its names."""


def check_exportable(model: nn.Module) -> None:
    """Raise ConfigError if a model cannot be saved in the Hugging Face layout."""
    if not hasattr(model, "save_pretrained") and not isinstance(model, Exportable):
        raise ConfigError(
            f"train.save_model=true is not supported by {type(model).__name__}, which is not a model of transformers: "
            "add a method to_hugging_face(state) to it, or set train.save_model=false"
        )


def save_model(
    weights: Iterator[tuple[str, Tensor]], build: Callable[[], nn.Module], data: TaskData, run_dir: Path, rank: int
) -> None:
    """Collect the weights on rank 0, and write them to ``run_dir/model``.

    This is a collective: every rank must consume all ``weights``, which are whole parameters and buffers by name. They
    are in rank 0's CPU memory until they are written. ``build`` is called on the meta device.
    """
    state: StateDict = {}
    for name, tensor in weights:  # The other ranks only take part in gathering them.
        if rank == 0:
            state[name] = tensor.detach().cpu()
    if rank != 0:
        return
    from transformers.utils import logging

    logging.disable_progress_bar()  # each update would be a line in the log
    model: Any = build_empty(build, torch.device("meta"))[0]
    if hasattr(model, "peft_config"):
        with replace_atomically(run_dir / MODEL) as folder:
            save_adapter(model, state, folder)
            if data.class_names:  # With a config.json, transformers would look for the weights of a whole model.
                write_json(folder / CLASS_NAMES, list(data.class_names))
            if data.tokenizer is not None:  # In the folder itself, peft would cut the embedding to its size.
                data.tokenizer.save(folder / "tokenizer")
        return
    if isinstance(model, Exportable):
        model, state = model.to_hugging_face(state)
    task_models.describe_data(model, data)
    with replace_atomically(run_dir / MODEL) as folder:
        model.save_pretrained(folder, state_dict=state)
        if data.tokenizer is not None:
            data.tokenizer.save(folder)
