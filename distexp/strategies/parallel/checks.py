"""Which trainings the section ``parallel`` supports, checked before a worker starts. Nothing here imports torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config import Command, Config
from distexp.config.model_checks import architecture_of

GPT, BLOOM, HUGGING_FACE = "distexp.models.gpt.build", "distexp.models.bloom.build", "distexp.models.hf.build"

TENSOR_TYPES = (
    *("arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt_neox", "granite", "helium", "llama", "ministral", "mistral", "nemotron", "olmo", "olmo2", "phi", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
"""Types of transformers whose training ``tests/strategies/test_tensor.py`` has compared with that of one worker."""

CONTEXT_TYPES = (
    *(kind for kind in TENSOR_TYPES if kind not in ("bloom", "gemma2")),  # Gemma 2 has another attention.
    *("apertus", "gpt2", "opt", "persimmon", "stablelm"),
)
"""The same for ``parallel.context``, without the models of distexp, by ``tests/strategies/test_context.py``."""

UNSHARED = ("train.compile", "train.compute_weights", "train.fused_update", "train.loss", "ddp.bucket_cap_mb")
"""Options of speed that ``kernels=fast`` leaves at their reference if workers share layers."""

TENSOR, CONTEXT = "parallel.tensor", "parallel.context"


def degrees(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each way in which workers share rows as it was typed, and what to type instead."""
    for key, degree in ((TENSOR, config.parallel.tensor), (CONTEXT, config.parallel.context)):
        if degree > 1:
            yield f"{key}={degree}", f"{key}=1"


def unshared(config: Config) -> tuple[str, ...]:
    """Return the options of speed that ``kernels=fast`` leaves at their reference, because of shared rows."""
    shares = config.parallel
    return (UNSHARED if shares.copies > 1 else ()) + (("train.logits",) if shares.context > 1 else ())


def needed_attention(config: Config) -> str | None:
    """Return the attention that the workers need to exchange heads, if it is not the default of the model."""
    return "sdpa" if config.parallel.context > 1 and config.model._target_ == BLOOM else None


def parallel_errors(config: Config) -> Iterator[str]:
    """Yield an error for each setting with which workers cannot share rows, with what to type instead."""
    parallel = config.parallel
    if parallel.shares_layers and parallel.context > 1:
        yield (
            f"parallel.tensor={parallel.tensor} with parallel.context={parallel.context} is not supported: use "
            f"parallel.context=1, or parallel.tensor=1 parallel.context={parallel.copies}"
        )
        return
    for typed, alone in degrees(config):
        yield from _errors(config, typed, alone)


def _errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    degree, per_node = config.parallel.copies, config.cluster.workers_per_node or 1
    if per_node % degree:
        larger = -(-per_node // degree) * degree
        yield (
            f"{typed} must divide the workers of a node, cluster.workers_per_node={per_node}, because workers with "
            f"the same rows exchange data in each layer: use cluster.workers_per_node={larger}, or {alone}"
        )
    further = _unsupported_slices(config) if config.parallel.context > 1 else ()
    for setting, instead in (*_unsupported(config), *further):
        yield f"{typed} is not supported by {setting}: use {instead}, or {alone}"
    yield from _model_errors(config, typed, alone)


def _unsupported(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that excludes shared rows, and what to use in its place."""
    train = config.train
    if config.engine.name != "native":
        yield f"engine={config.engine.name}", "engine=native"
    if config.adapter.freezes_model:
        yield f"adapter={config.adapter.name}", "adapter=none"
    if config.offload.enabled:
        yield "offload=true", "offload=false"
    if train.micro_batch_size == "auto":
        yield "train.micro_batch_size=auto", "a number"
    if train.compile:
        yield f"train.compile={train.compiled}", "train.compile=false"
    if train.compute_weights == "step":
        yield "train.compute_weights=step", "train.compute_weights=autocast"
    if train.fused_update:
        yield "train.fused_update=true", "train.fused_update=false"
    if train.loss == "own":
        yield "train.loss=own", "train.loss=full"
    if config.model.dropout:  # Workers of a group would drop the same units of different heads.
        yield f"model.dropout={config.model.dropout:g}", "model.dropout=0"
    if config.scaling.name not in ("fixed", "weak_data"):
        yield f"scaling={config.scaling.name}", "scaling=fixed"
    if config.model._target_ == BLOOM and config.model.attention == "flex":
        yield "model.attention=flex of a BLOOM", "model.attention=sdpa"
    if config.command in (Command.CHOOSE, Command.FORECAST):
        yield f"distexp {config.command}, which has no model of its collectives", "distexp train or distexp verify"


def _unsupported_slices(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each further setting that excludes slices of rows, and what to use in its place."""
    model, data, train, degree = config.model, config.dataset, config.train, config.parallel.context
    if not model.traits.is_causal:
        yield f"model.task={model.task}", "model.task=causal_lm"
    if train.logits == "targets":
        yield "train.logits=targets", "train.logits=all"
    if train.score_answers:  # Texts grow by one token at a time.
        yield "train.score_answers=true", "train.score_answers=false"
    if data.bucketing:
        yield "dataset.bucketing=true", "dataset.bucketing=false"
    if "padding" in data.keys and data.padding != "max_length":
        yield f"dataset.padding={data.padding}", "dataset.padding=max_length"
    length = data.max_length or model.seq_length
    if length is not None and (rest := length % degree):
        yield f"dataset.max_length={length}", f"dataset.max_length={length - rest or degree}"
    if model.attention not in ("auto", "sdpa"):
        yield f"model.attention={model.attention} of model={model.name}", "model.attention=sdpa"


def _model_errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    """Yield an error if the layers of a model are not known to be divisible. A worker checks those of custom code."""
    model, degree, is_tensor = config.model, config.parallel.copies, config.parallel.shares_layers
    types, compared = (TENSOR_TYPES, "plan for its layers") if is_tensor else (CONTEXT_TYPES, "training of this type")
    sizes: dict[str, Any] = {"model.num_heads": model.num_heads}
    if model._target_ == HUGGING_FACE:
        found = architecture_of(model)
        kind = found.get("model_type")
        if found and kind not in types:
            yield (
                f"{typed} is not supported by model.name={model.name} ({kind}), because no {compared} was "
                f"compared with one worker: use {alone} strategy=fsdp, or one of {', '.join(types)}"
            )
            return
        sizes = _heads(found or model.options)
    elif model._target_ not in (GPT, BLOOM) and (model._target_.startswith("distexp.") or not is_tensor):
        is_own = model._target_.startswith("distexp.")
        reason = "which has no attention to share" if is_own else "whose attention cannot exchange heads"
        yield f"{typed} is not supported by model={model.name}, {reason}: use {alone} strategy=fsdp"
    for name, size in sizes.items():
        if isinstance(size, int) and size % degree:
            fitting = max(number for number in range(1, degree) if size % number == 0)
            yield f"{typed} must divide {name}={size}: use {typed.partition('=')[0]}={fitting}"


def _heads(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of heads of a config.json. Without one of keys and values, it is that of the queries."""
    names = ("num_attention_heads", "n_head", "num_key_value_heads")
    return {f"{name} of the model": architecture[name] for name in names if name in architecture}
