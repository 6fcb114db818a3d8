"""Which trainings ``parallel.tensor`` supports, checked before a worker starts. Nothing here imports torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config import Command, Config
from distexp.config.model_checks import read_architecture

GPT, BLOOM, HUGGING_FACE = "distexp.models.gpt.build", "distexp.models.bloom.build", "distexp.models.hf.build"

TENSOR_TYPES = (
    *("arcee", "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt_neox", "granite", "helium", "llama", "ministral", "mistral", "nemotron", "olmo", "olmo2", "phi", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
"""Types of transformers whose training ``tests/strategies/test_tensor.py`` has compared with that of one worker."""

UNSHARED = ("train.compile", "train.compute_weights", "train.fused_update", "train.loss", "ddp.bucket_cap_mb")
"""Options of speed that ``kernels=fast`` leaves at their reference if workers share layers."""

ALONE = "parallel.tensor=1"


def tensor_errors(config: Config) -> Iterator[str]:
    """Yield an error for each setting with which workers cannot share layers, with what to type instead."""
    if not config.parallel.shares_layers:
        return
    degree, cluster, typed = config.parallel.tensor, config.cluster, f"parallel.tensor={config.parallel.tensor}"
    per_node = cluster.workers_per_node or 1
    if per_node % degree:
        larger = -(-per_node // degree) * degree
        yield (
            f"{typed} must divide the workers of a node, cluster.workers_per_node={per_node}, because workers that "
            f"share layers exchange data in each of them: use cluster.workers_per_node={larger}, or {ALONE}"
        )
    for setting, instead in _unsupported(config):
        yield f"{typed} is not supported by {setting}: use {instead}, or {ALONE}"
    yield from _model_errors(config, typed)


def _unsupported(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that excludes shared layers, and what to use in its place."""
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


def _model_errors(config: Config, typed: str) -> Iterator[str]:
    """Yield an error if the layers of a model are not known to be divisible. A worker checks those of custom code."""
    model, degree = config.model, config.parallel.tensor
    sizes: dict[str, Any] = {"model.num_heads": model.num_heads}
    if model._target_ == HUGGING_FACE:
        found = read_architecture(model.name)
        kind = found.get("model_type")
        if found and kind not in TENSOR_TYPES:
            yield (
                f"{typed} is not supported by model.name={model.name} ({kind}), because no plan for its layers was "
                f"compared with one worker: use {ALONE} sharding=full_shard, or one of {', '.join(TENSOR_TYPES)}"
            )
            return
        sizes = _heads({**found, **model.options})
    elif model._target_.startswith("distexp.") and model._target_ not in (GPT, BLOOM):
        yield (
            f"{typed} is not supported by model={model.name}, which has no attention to share: use {ALONE} "
            "sharding=full_shard"
        )
    for name, size in sizes.items():
        if isinstance(size, int) and size % degree:
            fitting = max(number for number in range(1, degree) if size % number == 0)
            yield f"{typed} must divide {name}={size}: use parallel.tensor={fitting}"


def _heads(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of heads of a config.json. Without one of keys and values, it is that of the queries."""
    names = ("num_attention_heads", "n_head", "num_key_value_heads")
    return {f"{name} of the model": architecture[name] for name in names if name in architecture}
