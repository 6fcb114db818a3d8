"""Checks of the ``model`` and ``dataset`` sections, without importing torch.

The schema is the same for all options of a group. The YAML of an option lists its keys, and any other is an error.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from distexp.config import Config, ConfigError, DatasetConfig, ModelConfig
from distexp.config.keys import NAMED_MODELS, conf_dir, options_of, shown, value_errors
from distexp.config.overrides import format_count
from distexp.config.tasks import tasks_of_dataset
from distexp.exceptions import first_line
from distexp.system.files import load_json

ATTENTIONS = {
    "distexp.models.bloom.build": ("auto", "eager", "sdpa", "flex"),
    "distexp.models.gpt.build": ("auto", "sdpa", "flex"),
}
"""Values of ``model.attention`` for models that do not support all."""


DECODER_KEYS = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
            *("reformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"),
            *("xlm-roberta-xl", "xmod"),
        ),
        "is_decoder",
    ),
    "xlm": "causal",
    "xlnet": "",
}
"""Value of config.json with which a type of models of transformers sees only earlier tokens; empty if it has none."""


def causality_error(model: ModelConfig, architecture: Mapping[str, Any]) -> str | None:
    """Return an error if a causal LM of transformers sees later tokens; the architecture is that of config.json."""
    kind = str(architecture.get("model_type"))
    decoder_key = DECODER_KEYS.get(kind)
    if decoder_key is None or {**architecture, **model.options}.get(decoder_key):
        return None
    setting = f" with {decoder_key}=false" if decoder_key else ""
    hint = f"add model.options.{decoder_key}=true, or " if decoder_key else ""
    hint += "" if kind in ("bert-generation", "xlnet") else "type model.task=masked_lm or sequence_classification, or "
    return (
        f"model.name={model.name} is not a causal LM, because its tokens see later ones ({kind}{setting}): {hint}use a "
        "model such as GPT-2, Llama, Qwen or OPT"
    )


TIMM_MISSING = "model=timm needs its library: pip install 'distexp[vision]'"


MODEL_TYPE = "model_type"
"""Option that makes the keys of ``model`` and its ``options`` a whole model of transformers, without a config.json."""

TRANSFORMERS_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "ff_dim": "intermediate_size",
    "seq_length": "max_position_embeddings",
}
"""Keys of ``model`` for such a model, and their names in its config.json."""


def architecture_of(model: ModelConfig) -> Mapping[str, Any]:
    """Return config.json of a model of transformers with the changes of ``model.options``; empty if unreadable."""
    if MODEL_TYPE in model.options:
        sizes = {name: vars(model)[key] for key, name in TRANSFORMERS_NAMES.items() if key in model.keys}
        return {**sizes, **model.options}
    found = read_architecture(model.name)
    return {**found, **model.options} if found else {}


def read_architecture(source: str) -> Mapping[str, Any]:
    """Return config.json of a folder, or of a hub id in the local cache; empty if it cannot be read."""
    path = Path(source, "config.json")
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = Path(str(try_to_load_from_cache(source, "config.json")))
        except HFValidationError:
            return {}
    try:
        content = load_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
WIDTHS = ("hidden_size", "d_model", "n_embd")
INNER_WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim", "d_ff", "n_inner")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEY_HEADS = "num_key_value_heads"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

SIZE_LIMITS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(LAYERS, (1, 10_000)),
    **dict.fromkeys((*HEADS, KEY_HEADS), (1, 100_000)),
    **dict.fromkeys((*EXPERTS, *CHOSEN_EXPERTS), (0, 100_000)),
    **dict.fromkeys((*WIDTHS, *INNER_WIDTHS), (1, 10_000_000)),
    **dict.fromkeys(("vocab_size", *POSITIONS), (1, 1_000_000_000)),
}
"""Smallest and largest value of the usual sizes in a config.json, of any type of model. Null is a default."""


TEXT = "text_config"
"""Section of a config.json with the sizes of the language model, next to those of images or sounds."""


def named_vocabulary(architecture: Mapping[str, Any]) -> int | None:
    """Return the size of the vocabulary in the values of a config.json; None if they have none."""
    text = architecture.get(TEXT)
    size = architecture.get("vocab_size") or (text.get("vocab_size") if isinstance(text, Mapping) else None)
    return size if isinstance(size, int) else None


def vocabulary_key(model: ModelConfig) -> str:
    """Return the key that sets the size of the vocabulary, or its place in the config.json of the model."""
    if "vocab_size" in model.options:
        return "model.options.vocab_size"
    is_read = model.vocab_size is None and names_source(model) and MODEL_TYPE not in model.options
    return "vocab_size in its config.json" if is_read else "model.vocab_size"


def architecture_errors(model: ModelConfig) -> Iterator[str]:
    """Yield an error for each size of a model of transformers that no model has, without importing transformers."""
    found = architecture_of(model)
    kind = found.get(MODEL_TYPE)
    if isinstance(kind, str) and not is_known_type(kind):
        yield (
            f"{_place(model, MODEL_TYPE, kind)}, which the installed transformers does not support: use another model, "
            "or pip install -U transformers"
        )
        return
    yield from _size_errors(model, found)
    if isinstance(text := found.get(TEXT), dict) and TEXT not in model.options:
        yield from _size_errors(model, {f"{TEXT}.{key}": value for key, value in text.items()}, f"{TEXT}.")


def _size_errors(model: ModelConfig, found: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield an error for each size whose key starts with ``prefix``."""
    for name, (least, most) in SIZE_LIMITS.items():
        key, value = f"{prefix}{name}", found.get(f"{prefix}{name}")
        if value is not None and not _is_size(value, name, least, most):
            yield f"{_place(model, key, value)}, but it must be an integer from {least} to {most}: {_hint(model, key)}"
    if not prefix:
        yield from _divisor_errors(model, {key: size for key, size in found.items() if type(size) is int and size > 0})


def _is_size(value: Any, key: str, least: int, most: int) -> bool:
    """Return whether a value is a size within its limits. Some models have one for each layer or each part."""
    several = list(value.values()) if isinstance(value, dict) else value
    sizes = several if isinstance(several, list) and several and key not in WIDTHS else [value]
    numbers = (int, float) if key in POSITIONS else (int,)  # Positions are often computed, as 1200.0.
    return all(type(size) in numbers and least <= size <= most for size in sizes)


def _divisor_errors(model: ModelConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield an error for keys of heads that do not divide them evenly, and for more chosen experts than there are.

    That heads divide the width is no rule of all models: some round the width of a head.
    """
    heads, experts = (next((key for key in keys if key in sizes), "") for keys in (HEADS, EXPERTS))
    if heads and sizes[heads] % sizes.get(KEY_HEADS, 1):
        limit = f"a divisor of {heads}={sizes[heads]}"
        yield f"{_place(model, KEY_HEADS, sizes[KEY_HEADS])}, but it must be {limit}: {_hint(model, KEY_HEADS)}"
    for key in CHOSEN_EXPERTS:
        if experts and sizes.get(key, 0) > sizes[experts] > 1:  # One expert is a dense model, which has no router.
            limit = f"at most {experts}={sizes[experts]}"
            yield f"{_place(model, key, sizes[key])}, but it must be {limit}: {_hint(model, key)}"


def _place(model: ModelConfig, key: str, value: Any) -> str:
    """Return a value of the architecture, with its key, or with the file that contains the key."""
    setting = f'{key}="{shown(value)}"' if isinstance(value, str) else f"{key}={shown(value)}"
    is_option = key in model.options
    return f"model.options.{setting}" if is_option else f"model.name={model.name} has {setting} in its config.json"


def _hint(model: ModelConfig, key: str) -> str:
    if key in model.options:
        return "correct it"
    return "correct the file" if "." in key else f"correct the file, or add model.options.{key}=VALUE"


@lru_cache(maxsize=64)
def is_known_type(kind: str) -> bool:
    """Return whether the installed transformers has a type of models; true if that is not known."""
    spec = find_spec("transformers")
    folder = Path(spec.origin or "").parent / "models" / "auto" if spec else Path()
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*auto*.py")] if spec else []
    return not any('"llama"' in text for text in texts) or any(f'"{kind}"' in text for text in texts)


def config_error(path: Path) -> str | None:
    """Return what is wrong with the config.json of a model, as far as it can be seen without transformers."""
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        return f"cannot be read ({first_line(error)})"
    if not isinstance(content, dict) or not isinstance(content.get("model_type", ""), str):
        return "describes no model"
    return None


def unused_key_errors(group: str, section: ModelConfig | DatasetConfig) -> list[str]:
    """Return an error for each key that is set and that the chosen option does not have."""
    unset = type(section)()
    unknown = [key for key in section.keys if not isinstance(key, str) or key not in vars(unset)]
    if unknown:
        return [f"{group}.keys contains {unknown[0]!r}, which is not a key of {group}: leave it out"]
    available = ", ".join(key for key in section.keys if key != "options") or "none"
    return [
        f"{group}.{key}={getattr(section, key)} is not a key of {group}={section.name}: "
        + (_dataset_hint(section, key) or f"leave it out. Its keys: {available}")
        for key in vars(unset)
        if key not in ("_target_", "name", "task", "init", "keys")
        and key not in section.keys
        and getattr(section, key) != getattr(unset, key)
    ]


def _dataset_hint(section: ModelConfig | DatasetConfig, key: str) -> str:
    """Return which other datasets of the same task have a key; empty without one, and for custom datasets."""
    options = options_of("dataset")
    if not isinstance(section, DatasetConfig) or section.name not in options:
        return ""
    files: dict[str, Any] = {option: OmegaConf.load(conf_dir() / "dataset" / f"{option}.yaml") for option in options}
    having = [
        f"dataset={name}"
        for name, content in files.items()
        if key in content["keys"] and {*tasks_of_dataset(content["task"])} & {*tasks_of_dataset(section.task)}
    ]
    return f"add {' or '.join(having)}, or leave it out" if having else ""


def model_errors(model: ModelConfig) -> list[str]:
    """Return an error for each unused key, missing value and impossible combination of a model."""
    return [
        *unused_key_errors("model", model),
        *(
            f"model.{key} is null, but model={model.name} needs a value: set it"
            for key in model.keys
            if vars(model).get(key, "") is None and key not in ("path", "tokenizer", "vocab_size", "dropout")
        ),
        *_source_errors(model),
        *_attention_errors(model),
    ]


def validate_model(model: ModelConfig) -> None:
    """Check the values and the combination of the keys of a model. Raise ConfigError with all errors."""
    errors = [*value_errors("model", model), *model_errors(model)]
    if errors:
        raise ConfigError(errors)


def resolve_vocab_size(model: ModelConfig, num_classes: int) -> int:
    """Return the rows of the embedding. Raise ConfigError if they are fewer than the entries of the tokenizer."""
    if model.vocab_size is None:
        return num_classes
    if num_classes > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer, which has {num_classes} entries: set "
            f"model.vocab_size={num_classes} or null, or choose a smaller tokenizer"
        )
    return model.vocab_size


def _source_errors(model: ModelConfig) -> Iterator[str]:
    if model.init == "random":
        return
    if weights_source_key(model) not in model.keys:
        yield f"model.init={model.init} is not supported by model={model.name}: use model.init=random"
    elif weights_source(model) is None:
        kind = "a .safetensors or .pth file" if model._target_.startswith(NAMED_MODELS) else "a hub id or a folder"
        yield f"model.path is null, but model.init=pretrained loads weights from it: set {kind}"


def _attention_errors(model: ModelConfig) -> Iterator[str]:
    hidden, heads = model.hidden_size, model.num_heads
    if hidden and heads and heads > 0 and hidden % heads:
        yield f"model.hidden_size={hidden} must be a multiple of model.num_heads={heads}: change one of them"
    supported = ATTENTIONS.get(model._target_)
    if supported is not None and model.attention not in supported:
        yield (
            f"model.attention={model.attention} is not supported by model={model.name}: use one of "
            f"{', '.join(supported)}"
        )
    if model.attention == "flex" and model.dropout:
        yield (
            f"model.attention=flex has no dropout, but model.dropout={model.dropout}: use model.dropout=0, or "
            "model.attention=sdpa"
        )


def check_sequence_length(dataset: DatasetConfig, model: ModelConfig) -> str | None:
    """Return an error if texts may be longer than the positions of the model."""
    if dataset.max_length is None or model.seq_length is None or dataset.max_length <= model.seq_length:
        return None
    return (
        f"dataset.max_length={dataset.max_length} exceeds model.seq_length={model.seq_length}, the most positions of "
        f"model={model.name}: lower the first or raise the second"
    )


def check_samples_per_rank(
    samples: int, workers: int, micro_batch_size: int, *, global_batch: int | None = None, unit: str = "samples"
) -> str | None:
    """Return an error if a micro-batch is larger than the samples, or packed rows, of a rank.

    Such a micro-batch would be padded, and its speed would be that of padding. With a global batch, other micro-batches
    must divide the samples of a worker.
    """
    per_rank = -(-samples // workers)
    if micro_batch_size <= per_rank:
        return None
    share = f"{per_rank} {unit if per_rank > 1 else unit[:-1]}"
    if global_batch is None:
        # The largest micro-batch for these workers, or the most workers for this micro-batch.
        most = (samples - 1) // max(1, micro_batch_size - 1)
        fewer = f" at most {most} worker{'s' if most > 1 else ''}," if most else ""
        hint = f"train.micro_batch_size={per_rank},{fewer} or "
    else:
        divisor = max(divisors(global_batch // workers, per_rank), default=None)
        hint = f"train.micro_batch_size={divisor}, or " if divisor else ""
    return (
        f"train.micro_batch_size={micro_batch_size} is more than the {share} of each worker ({samples} {unit}, "
        f"{format_count(workers, 'worker')}): use {hint}a larger dataset.train_size"
    )


def several_lengths(dataset: DatasetConfig) -> str:
    """Return the setting because of which batches have different lengths; empty if all have the same."""
    if dataset.bucketing:
        return "dataset.bucketing=true"
    return "dataset.padding=longest" if dataset.padding == "longest" else ""  # packed rows are not all full


def weights_source(model: ModelConfig) -> str | None:
    """Return the hub id or folder of the weights and the tokenizer; None if the architecture has none."""
    return model.name if weights_source_key(model) == "name" else model.path


def weights_source_key(model: ModelConfig) -> str:
    """Return the key that holds the weights source: ``name`` if the model lists it and no ``path``, else ``path``."""
    return "name" if "name" in model.keys and "path" not in model.keys else "path"


def loads_from_source(model: ModelConfig) -> bool:
    """Return whether a run reads the weights source, for its weights or for its architecture."""
    return model.init == "pretrained" or names_source(model)


def names_source(model: ModelConfig) -> bool:
    """Return whether ``model.name`` is a hub id or a folder, whose config.json has the architecture."""
    return weights_source_key(model) == "name"


def searches_micro_batch(config: Config) -> bool:
    """Return whether the workers search the micro-batch size."""
    return config.train.micro_batch_size == "auto"


def depends_on_micro_batch(config: Config) -> bool:
    """Return whether another micro-batch may be another training: a batch norm or a router loss uses its statistics.

    Most image models have batch norms. Whether a custom one has none is not known before it is built.
    """
    model = config.model
    has_architecture = not model.traits.is_image and (MODEL_TYPE in model.options or names_source(model))
    return model.traits.is_image or bool(has_architecture and architecture_of(model).get("output_router_logits"))


def samples_per_worker(config: Config) -> int:
    """Return the samples of an optimizer step on each worker, for a configuration with a global batch size."""
    assert config.train.global_batch_size is not None, "resolve() requires it for micro_batch_size=auto"
    return config.train.global_batch_size // config.data_parallel


def divisors(number: int, limit: int | None = None) -> list[int]:
    """Return the divisors of a number up to a limit, in ascending order: the micro-batches that keep a global batch."""
    largest = number if limit is None else min(number, limit)
    return [size for size in range(1, largest + 1) if number % size == 0]


def with_micro_batch(config: Config, size: int, accumulation: int | None = None) -> Config:
    """Return a configuration with a micro-batch size, and by default as many as give the global batch size."""
    steps = samples_per_worker(config) // size if accumulation is None else accumulation
    return replace(config, train=replace(config.train, micro_batch_size=size, gradient_accumulation_steps=steps))


SQUAD_SAMPLE_TRAIN, SQUAD_SAMPLE_EVAL = 512, 128
TINYIMAGENET_SAMPLE_TRAIN, TINYIMAGENET_SAMPLE_EVAL = 400, 100

GENERATED_TRAIN_SIZES = {
    "distexp.data.squad_sample.load": SQUAD_SAMPLE_TRAIN,
    "distexp.data.tinyimagenet_sample.load": TINYIMAGENET_SAMPLE_TRAIN,
}

BATCH_LIMITS = ("scale.micro_batch_size", "scale.gradient_accumulation_steps")
"""Keys of a scale that lower the batch sizes of a command."""
