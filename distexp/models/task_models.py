"""Models of transformers for a task, and image models of timm and torchvision."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import ConfigError, ModelConfig
from distexp.config.keys import shown
from distexp.config.model_checks import TIMM_MISSING, validate_model
from distexp.config.overrides import join_first
from distexp.config.tasks import TASKS, task_of
from distexp.data.base import IGNORE, TaskData
from distexp.exceptions import first_line, text_of
from distexp.models.dropout import set_dropout
from distexp.models.objective import LOSS_SUM, get_logits
from distexp.models.transforms import embedding_of
from distexp.system.cache_dir import build_once, cache_dir
from distexp.system.restricted_loading import refused_as_config_error


def auto_class(task: str) -> Any:
    """Return the class of transformers that builds models for a task."""
    import transformers

    return getattr(transformers, task_of(task).auto_class)


def supports(config: Any, task: str) -> bool:
    """Return whether transformers has a model for a task with this configuration."""
    return type(config) in auto_class(task)._model_mapping


def wrong_task(model: ModelConfig, config: Any) -> ConfigError:
    """Return the error of a model that does not fit its task, with the tasks that fit."""
    fitting = [f"model.task={task}" for task in TASKS if task != model.task and supports(config, task)]
    kind = f"a causal LM ({config.model_type})" if model.traits.is_causal else f"for {model.task} ({config.model_type})"
    hint = f"type {' or '.join(fitting)}, or use another model" if fitting else "use another model"
    return ConfigError(f"model.name={model.name} is not {kind}: {hint}")


BUILD_ERRORS = (LookupError, AssertionError, AttributeError, TypeError, ValueError, ArithmeticError)
"""Errors of transformers about values of a configuration that it has not checked. Others are of the machine."""


@contextmanager
def named_options(model: ModelConfig) -> Iterator[None]:
    """Raise ConfigError, which names ``model.options``, if a model cannot be built with them during the block."""
    try:
        yield
    except BUILD_ERRORS as error:
        if isinstance(error, ConfigError) or not model.options:
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        named = [
            name for name, value in model.options.items() if isinstance(value, str) and repr(value) in text_of(error)
        ]
        typed = [f"model.options.{name}={shown(model.options[name])}" for name in named or model.options]
        raise ConfigError(
            f"transformers cannot build model.name={model.name} with {join_first(typed, 4)} ({reason}): correct "
            "these options, or leave them out"
        ) from error


def is_of_head(model: Any, name: str) -> bool:
    """Return whether a weight is not one of the base model, whose pooler belongs to the head."""
    return not name.startswith(f"{model.base_model_prefix}.") or ".pooler." in name


def adapt(model: Any, settings: ModelConfig) -> None:
    """Let ``forward`` take the inputs of the task, and set a typed dropout in heads whose rate is a constant."""
    if settings.dropout is not None:
        set_dropout(model, settings.dropout, of_all=False)
    if settings.task == "sequence_classification" and getattr(model.config, "summary_type", None) == "last":
        raise ConfigError(
            f"{type(model).__name__} reads the class of a text at its last position, which is padding in a batch: add "
            "model.options.summary_type=first"
        )
    if settings.traits.is_image:
        model.forward = _with_images(model.forward, "pixel_values")
    elif settings.task == "seq2seq_lm":
        model.forward = _with_decoder_labels(model, settings)


def _with_images(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    def forward(images: Tensor) -> Any:
        return plain(**{name: images})

    return forward


def _with_decoder_labels(model: Any, settings: ModelConfig) -> Callable[..., Any]:
    """Return a ``forward`` whose decoder gets the labels, shifted by the model's own function.

    Raise ConfigError if the model has none, or its configuration lacks the token that starts the decoder.
    """
    plain, shift = model.forward, getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        of_module = getattr(sys.modules[type(model).__module__], "shift_tokens_right", None)
        if of_module is None:
            raise ConfigError(
                f"model.name={settings.name} is not supported for seq2seq_lm, because {type(model).__name__} has no "
                "function that shifts labels: use a model such as T5, BART or Marian"
            )

        def shift(labels: Tensor) -> Any:
            return of_module(labels, model.config.pad_token_id, model.config.decoder_start_token_id)

    def shift_rows(labels: Tensor) -> Any:
        # mBART needs a token in each row, also in one without targets. FSMT changes the labels that it gets.
        token = int(model.config.pad_token_id == 0)
        first = torch.where((labels == IGNORE).all(dim=1, keepdim=True), token, labels[:, :1])
        return shift(labels=torch.cat([first, labels[:, 1:]], dim=1))

    try:
        shift_rows(torch.full((1, 1), IGNORE, device="cpu"))
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.name={settings.name} cannot start its decoder ({first_line(error)}): set decoder_start_token_id "
            "and pad_token_id in its config.json, which are the same token for a T5"
        ) from error

    def forward(input_ids: Tensor, attention_mask: Tensor | None = None, *, decoder_labels: Tensor) -> Any:
        return plain(input_ids=input_ids, attention_mask=attention_mask, decoder_input_ids=shift_rows(decoder_labels))

    return forward


def describe_data(model: Any, data: TaskData) -> None:
    """Set the names of the classes of a model that is saved, and its special tokens to those of its tokenizer."""
    tokenizer, configs = data.tokenizer, [model.config]
    if data.class_names:
        model.config.id2label = dict(enumerate(data.class_names))
        model.config.label2id = {name: number for number, name in enumerate(data.class_names)}
    if tokenizer is None:
        return
    if getattr(model, "generation_config", None) is not None:
        configs.append(model.generation_config)
    generates = not task_of(data.task).has_classes and data.task != "masked_lm"
    if generates:
        model.config.use_cache = True
    for settings in configs:
        settings.pad_token_id = tokenizer.pad_id
        if generates:
            settings.eos_token_id = tokenizer.eos_id
        if task_of(data.task).is_causal:
            with suppress(Exception):  # A type of model that takes no null keeps its own.
                settings.bos_token_id = None


def set_padding(model: nn.Module, pad_id: int) -> None:
    """Set the padding of a model of transformers that classifies texts by their last token, as decoders do."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "pad_token_id"):
        config.pad_token_id = config.get_text_config().pad_token_id = pad_id


def check_vocabulary(model: nn.Module, entries: int) -> None:
    """Raise ConfigError if the tokenizer of a classifier has more entries than the model has embeddings."""
    rows = getattr(embedding_of(model, "input"), "num_embeddings", entries)
    if entries > rows:
        raise ConfigError(
            f"the tokenizer has {entries} entries, more than the {rows} embeddings of {type(model).__name__}: use a "
            "smaller tokenizer, or model.tokenizer=auto for the model's own"
        )


def check_images(model: nn.Module, size: int) -> None:
    """Raise ConfigError if a model on the meta device does not take images of this size."""
    expected, error = _image_size(model), _error_with(model, size)
    if error is None:
        return
    if isinstance(error, RuntimeError) and (expected in (None, size) or _error_with(model, expected) is not None):
        return  # It needs values. The first step shows whether it takes the images.
    raise ConfigError(
        f"dataset.image_size={size} is not supported by {type(model).__name__} ({first_line(error)}): use "
        + (f"dataset.image_size={expected}" if expected not in (None, size) else "another size")
    ) from error


def _error_with(model: nn.Module, size: int) -> Exception | None:
    """Return the error of a model on the meta device with images of this size, or None. The model does not change."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with torch.no_grad():
            model(images=torch.empty(2, 3, size, size, device="meta"))
    except (AssertionError, ValueError, RuntimeError) as error:
        return error
    finally:
        for module, before in attributes:  # Swin keeps windows that are as large as the first images.
            vars(module).update(before)
    return None


def _image_size(model: Any) -> int | None:
    """Return the height and width for which a model is made, if it states one."""
    cfg = getattr(model, "default_cfg", None) or {}
    stated = (getattr(getattr(model, "config", None), "image_size", None), getattr(model, "image_size", None))
    return next((size for size in (*stated, *cfg.get("input_size", ())[1:2]) if isinstance(size, int)), None)


def build_timm(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build an image classifier of timm by name. Raise ConfigError if timm or the name is missing."""
    validate_model(model)
    if find_spec("timm") is None:
        raise ConfigError(TIMM_MISSING)
    import timm

    if not timm.is_model(model.name):
        raise _unknown_name(model, timm.list_models())
    return _image_model(model, timm.create_model(model.name, num_classes=num_classes), num_classes)


def build_torchvision(model: ModelConfig, num_classes: int) -> nn.Module:
    """Build an image classifier of torchvision by name. Raise ConfigError if there is none with this name."""
    validate_model(model)
    from torchvision import models

    known = models.list_models(module=models)
    if model.name in set(models.list_models()) - set(known):
        raise ConfigError(f"model.name={model.name} is no image classifier: use one, such as resnet18")
    if model.name not in known:
        raise _unknown_name(model, known)
    return _image_model(model, models.get_model(model.name, weights=None, num_classes=num_classes), num_classes)


def _unknown_name(model: ModelConfig, known: list[str]) -> ConfigError:
    near = get_close_matches(model.name, known, n=3, cutoff=0.4) or known[:3]
    library = model._target_.rpartition("_")[2]
    return ConfigError(f"model.name={model.name} is not a model of {library}: use {', '.join(near)}")


def _image_model(settings: ModelConfig, model: nn.Module, num_classes: int) -> nn.Module:
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    model.forward = _with_images(model.forward, "x")
    on_meta = torch.empty(0).device.type == "meta"
    if settings.init == "pretrained" and settings.path is not None and not on_meta:
        _load_file(model, settings.path, num_classes)
    return model


def _load_file(model: nn.Module, path: str, num_classes: int) -> None:
    """Load weights from a local file; those of the classifier only if they have its shape. Raise ConfigError."""
    from safetensors import SafetensorError, safe_open

    try:
        with refused_as_config_error(Path(path)):
            if path.endswith(".safetensors"):
                with safe_open(path, "pt") as file:
                    weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            else:
                weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, SafetensorError, RuntimeError) as error:
        raise ConfigError(
            f"model.path={path} is not a file with weights ({first_line(error)}): set it to a .safetensors or .pth file"
        ) from error
    own = model.state_dict()
    found = weights.get("state_dict", weights) if isinstance(weights, Mapping) else {}
    fitting = {name: tensor for name, tensor in found.items() if name in own and tensor.shape == own[name].shape}
    missing = sorted(own.keys() - fitting.keys())
    if any(name not in found or len(own[name]) != num_classes for name in missing):
        raise ConfigError(
            f"model.path={path} lacks weights of {type(model).__name__}, or they have another shape: "
            f"{', '.join(missing[:3])}: use the weights of this model, or model.init=random"
        )
    if missing:
        print(f"note: model.path={path} has other classes, so {', '.join(missing)} start at random", flush=True)
    model.load_state_dict(fitting, strict=False)


def check_causal(built: nn.Module, model: ModelConfig) -> None:
    """Raise ConfigError if the logits at a position depend on a later token.

    The model, which has weights on the CPU, computes two rows that differ in their last token. Print a note if it
    cannot compute them. The result for an architecture of transformers is kept in the cache.
    """
    settings = getattr(built, "config", None)
    result: Path | None = None
    if model._target_.startswith("distexp.") and settings is not None:
        if settings.model_type in CAUSAL_TYPES and getattr(settings, "is_causal", True):
            return
        key = hashlib.sha256(settings.to_json_string(use_diff=True).encode()).hexdigest()[:16]
        result = cache_dir() / f"causal-{metadata.version('transformers')}-{settings.model_type}-{key}"
        if result.exists():
            return
    rows = torch.tensor([[1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 1]])
    was_training = built.training
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = built.eval()(input_ids=rows, attention_mask=torch.ones_like(rows))
        if isinstance(outputs, dict) and LOSS_SUM in outputs:
            return
        logits = get_logits(outputs).float()
    except Exception as error:  # any: the code of the model raises it, and its own message comes later
        print(f"note: not checked whether {type(built).__name__} sees later tokens: {first_line(error)}", flush=True)
        return
    finally:
        built.train(was_training)
    changes = (logits[0] - logits[1]).abs().amax(dim=-1)
    if changes[:-1].max() > CAUSAL_TOLERANCE * changes[-1]:
        raise ConfigError(
            f"{type(built).__name__} of model={model.name} is not a causal LM: its logits change with a later token, "
            "so that its loss would be too small. Use a model whose tokens see only earlier ones"
        )
    if result is not None:
        build_once(result, Path.touch)


CAUSAL_TYPES = frozenset([
    "apertus", "arcee", "bamba", "biogpt", "bitnet", "bloom", "codegen", "cohere", "cohere2", "ctrl", "dbrx",
    "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma", "gemma2",
    "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granitemoe", "helium", "jamba", "llama", "mamba", "mamba2", "ministral", "mistral", "mixtral",
    "moshi", "mpt", "nemotron", "olmo", "olmo2", "olmoe", "openai-gpt", "opt", "persimmon", "phi", "phi3", "phimoe",
    "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "recurrent_gemma", "rwkv", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "xglm", "zamba2",
])  # fmt: skip
"""Types of transformers that ``tests/models/test_zoo.py`` has checked, so that a run need not."""

CAUSAL_TOLERANCE = 1e-4
"""Change of earlier logits by rounding, as a share of the change at the changed token."""
