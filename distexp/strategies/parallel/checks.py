"""Which trainings the section ``parallel`` supports, checked before a worker starts. Nothing here imports torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distexp.config import Config
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

EXPERT_TYPES = (
    *("deepseek_v2", "deepseek_v3", "granitemoe", "gpt_oss", "jamba", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
    "qwen3_moe",
)
"""The same for ``parallel.expert``, by ``tests/strategies/test_expert.py``."""

EXPERT_TENSOR_TYPES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")
"""Those of them that ``parallel.tensor`` cuts too, by the same test."""

PIPELINE_TYPES = (*TENSOR_TYPES, "apertus", "gpt2", "persimmon", "stablelm")
"""The same for ``parallel.pipeline``, by ``tests/strategies/test_pipeline.py``."""

TENSOR, CONTEXT = "parallel.tensor", "parallel.context"
EXPERT, PIPELINE, SCHEDULE = "parallel.expert", "parallel.pipeline", "parallel.schedule"
SHARED_ROWS = (TENSOR, CONTEXT, PIPELINE)  # the workers of a group have the same rows
DEGREES = (*SHARED_ROWS, EXPERT)

STAGES_PER_WORKER = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 2}
"""Stages that a worker has, by ``parallel.schedule``."""


def schedule_of(config: Config) -> str:
    """Return the order of the micro-batches in a pipeline."""
    return config.parallel.schedule or "1f1b"


def expected_stages(config: Config) -> dict[str, Any]:
    """Return the fields of ``Built`` that a pipeline must have; empty without one."""
    degree = config.parallel.pipeline
    return {"pipeline": degree, "schedule": schedule_of(config)} if degree > 1 else {}


def stages_of_worker(worker: int, workers: int, schedule: str) -> tuple[int, ...]:
    """Return the numbers of the stages of a worker. With ``zero_bubble`` one worker has both ends of the model."""
    if STAGES_PER_WORKER[schedule] == 1:
        return (worker,)
    return (worker, 2 * workers - 1 - worker if schedule == "zero_bubble" else workers + worker)


def cut_evenly(first: int, blocks: Sequence[int], last: int, stages: int) -> list[range]:
    """Return the blocks of each stage, so that the stages have numbers of parameters as equal as possible.

    ``blocks`` has the parameters of each block. ``first`` are those before the blocks, and ``last`` those after them,
    with the output head. The sum of the squares of the sizes is the smallest one.
    """
    sizes = [*blocks]
    sizes[0], sizes[-1] = sizes[0] + first, sizes[-1] + last
    # Smallest sum for all blocks up to a number, with the starts of their stages.
    found: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(stages):
        found = {
            end: min((found[start][0] + sum(sizes[start:end]) ** 2, [*found[start][1], start]) for start in starts)
            for end in range(1, len(sizes) + 1)
            if (starts := [start for start in found if start < end])
        }
    starts = found[len(sizes)][1]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def bubble_share(workers: int, schedule: str, micro_batches: int) -> float:
    """Return the share of a step in which a worker of a pipeline computes nothing, if all stages take equally long.

    The zero bubble schedule fills it with the gradients of weights, if there are enough micro-batches.
    """
    if schedule == "zero_bubble" and micro_batches >= 2 * workers - 1:
        return 0.0
    return (workers - 1) / (STAGES_PER_WORKER[schedule] * micro_batches + workers - 1)


def degrees(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each way in which workers share a model as it was typed, and what to type instead."""
    shares = config.parallel
    sharing = {TENSOR: shares.tensor, CONTEXT: shares.context, EXPERT: shares.expert, PIPELINE: shares.pipeline}
    for key, degree in sharing.items():
        if degree > 1:
            unused = " parallel.schedule=null" if key == PIPELINE and shares.schedule else ""
            yield f"{key}={degree}", f"{key}=1{unused}"


def shares_weights(config: Config) -> bool:
    """Return whether each worker has some weights of a layer only, without what the strategy shards."""
    return config.parallel.tensor > 1 or config.parallel.expert > 1


def unshared(config: Config) -> tuple[str, ...]:
    """Return the options of speed that ``kernels=fast`` leaves at their reference, because of shared layers."""
    shares = config.parallel
    selects_none = max(shares.context, shares.pipeline) > 1
    return (UNSHARED if any(degrees(config)) else ()) + (("train.logits",) if selects_none else ())


def needed_attention(config: Config) -> str | None:
    """Return the attention that the workers need to exchange heads, if it is not the default of the model."""
    return "sdpa" if config.parallel.context > 1 and config.model._target_ == BLOOM else None


def parallel_errors(config: Config) -> Iterator[str]:
    """Yield an error for each setting with which workers cannot share rows, with what to type instead."""
    parallel, found = config.parallel, [*degrees(config)]
    if parallel.schedule is not None and parallel.pipeline == 1:
        yield (
            f"parallel.schedule={parallel.schedule} is the order of the micro-batches in a pipeline, but "
            f"{PIPELINE}=1: use {PIPELINE}=2, or leave parallel.schedule out"
        )
    if parallel.expert > 1:
        yield from _expert_errors(config, f"{EXPERT}={parallel.expert}", f"{EXPERT}=1")
        return
    if parallel.pipeline > 1 and parallel.context > 1:
        first, second = f"{CONTEXT}={parallel.context}", f"{PIPELINE}={parallel.pipeline}"
        yield f"{first} with {second} is not supported: use {dict(found)[second]}, or {CONTEXT}=1"
        return
    if found:
        typed, alone = (" ".join(texts) for texts in zip(*found, strict=True))
        yield from _errors(config, typed, alone)


def _expert_errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    degree, workers = config.parallel.expert, config.cluster.world_size
    for other, without in degrees(config):
        if other != typed and not other.startswith(TENSOR):
            yield f"{typed} with {other} is not supported: use {without}, or {alone}"
    if workers % degree:
        per_node = next(number for number in range(1, degree + 1) if number * config.cluster.nodes % degree == 0)
        yield (
            f"{typed} must divide the {workers} workers, because each group of them has all experts: use "
            f"cluster.workers_per_node={per_node}, or {alone}"
        )
    settings = list(_unsupported(config))
    if config.train.score_answers:  # Texts grow by one token at a time, until the last worker has finished.
        settings.append(("train.score_answers=true", "train.score_answers=false"))
    for setting, instead in settings:
        yield f"{typed} is not supported by {setting}: use {instead}, or {alone}"
    yield from _mixture_errors(config, typed, alone)
    if config.parallel.tensor > 1 and config.model._target_ == HUGGING_FACE:
        tensor = (f"{TENSOR}={config.parallel.tensor}", f"{TENSOR}=1")
        yield from (*_model_errors(config, *tensor), *_placement_errors(config, *tensor))
        if architecture_of(config.model).get("output_router_logits"):  # Each worker has a share of the tokens.
            key = "model.options.output_router_logits"
            yield f"{typed} with {tensor[0]} does not support {key}=true: use {key}=false, or {tensor[1]}"


def _mixture_errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    """Yield an error if a model is no mixture of experts, or its experts do not divide evenly."""
    model, degree = config.model, config.parallel.expert
    types = f"one of the types that were compared with one worker: {', '.join(EXPERT_TYPES)}"
    if model._target_ != HUGGING_FACE:
        yield f"{typed} is not supported by model={model.name}: use {alone}, or model=hf with {types}"
        return
    found = architecture_of(model)
    if (kind := found.get("model_type")) and kind not in EXPERT_TYPES:
        yield f"{typed} is not supported by model.name={model.name} ({kind}): use {alone}, or {types}"
        return
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if isinstance(size := found.get(name), int) and size % degree:
            fitting = max(n for n in range(1, degree) if size % n == config.cluster.world_size % n == 0)
            yield f"{typed} must divide {name}={size} of the model: use {EXPERT}={fitting}"


def _errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    for way, _ in degrees(config):
        if found := [*_model_errors(config, way, alone)]:  # Another degree or model changes all other errors.
            yield from found
            return
    yield from _placement_errors(config, typed, alone)
    further: Iterable[tuple[str, str]] = _unsupported_slices(config) if config.parallel.context > 1 else ()
    if config.parallel.pipeline > 1:
        yield from _schedule_errors(config, alone)
        further = _unsupported_stages(config)
    for setting, instead in (*_unsupported(config), *further):
        yield f"{typed} is not supported by {setting}: use {instead}, or {alone}"


def _placement_errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    """Yield an error if the workers of a group are not on one node, or are no whole groups."""
    parallel, total, per_node = config.parallel, config.cluster.world_size, config.cluster.workers_per_node or 1
    in_layers = parallel.tensor * parallel.context
    if per_node % in_layers:
        larger = -(-per_node // parallel.copies) * parallel.copies
        ways = " ".join(text for text, _ in degrees(config) if text.startswith((TENSOR, CONTEXT)))
        yield (
            f"{ways} must divide the workers of a node, cluster.workers_per_node={per_node}, because workers with "
            f"the same rows exchange data in each layer: use cluster.workers_per_node={larger}, or {alone}"
        )
    elif rest := total % parallel.copies:
        larger = total + parallel.copies - rest
        fitting = f"cluster.workers_per_node={larger}" + (" cluster.nodes=1" if config.cluster.nodes > 1 else "")
        groups = f"have groups of {parallel.copies} workers, which " if in_layers > 1 else ""
        yield f"{typed} {groups}must divide the {total} workers of the run: use {fitting}, or {alone}"


def _unsupported(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that excludes shared layers, and what to use in its place."""
    train = config.train
    if config.engine.name != "native":
        yield f"engine={config.engine.name}", "engine=native"
    if config.adapter.freezes_model:
        yield from _unsupported_adapter(config)
    if config.offload.enabled:
        yield "offload=true", "offload=false"
    if train.micro_batch_size == "auto":
        yield "train.micro_batch_size=auto", "a number"
    if train.compile:  # torch would compile each block, because each cut layer has its own ``forward``.
        yield f"train.compile={train.compiled}", "train.compile=false"
    if train.compute_weights == "step":
        yield "train.compute_weights=step", "train.compute_weights=autocast"
    if train.fused_update:
        yield "train.fused_update=true", "train.fused_update=false"
    if train.loss == "own":
        yield "train.loss=own", "train.loss=full"
    # Workers with the same rows would drop the same units of different heads.
    if config.model.dropout and config.parallel.copies > 1:
        yield f"model.dropout={config.model.dropout:g}", "model.dropout=0"
    if config.scaling.name not in ("fixed", "weak_data"):
        yield f"scaling={config.scaling.name}", "scaling=fixed"
    if config.model._target_ == BLOOM and config.model.attention == "flex":
        yield "model.attention=flex of a BLOOM", "model.attention=sdpa"


def _unsupported_adapter(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting of an adapter that excludes shared layers. Only the matrices of a layer are cut with it."""
    adapter, parallel = config.adapter, config.parallel
    if parallel.tensor < parallel.copies or parallel.expert > 1:
        yield f"adapter={adapter.name}", "adapter=none"
    elif adapter.dropout:
        yield f"adapter.dropout={adapter.dropout:g}", "adapter.dropout=0"


def _unsupported_lengths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting with which the logits of a causal LM differ in shape, and what to use in its place."""
    model, data, train = config.model, config.dataset, config.train
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


def _unsupported_slices(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each further setting that excludes slices of rows, and what to use in its place."""
    model, data, degree = config.model, config.dataset, config.parallel.context
    yield from _unsupported_lengths(config)
    length = data.max_length or model.seq_length
    if length is not None and (rest := length % degree):
        yield f"dataset.max_length={length}", f"dataset.max_length={length - rest or degree}"
    if model.attention not in ("auto", "sdpa"):
        yield f"model.attention={model.attention} of model={model.name}", "model.attention=sdpa"


def _unsupported_stages(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each further setting that excludes stages, and what to use in its place."""
    train = config.train
    yield from _unsupported_lengths(config)  # Workers receive tensors of a fixed shape.
    if train.loss == "chunked":
        yield "train.loss=chunked", "train.loss=full"
    if config.precision.name == "fp16":  # A step that one worker skips would have to be skipped by all.
        yield "precision=fp16", "precision=bf16"
    if schedule_of(config) == "zero_bubble" and train.activation_checkpointing:
        typed = str(train.activation_checkpointing).lower()
        yield f"parallel.schedule=zero_bubble with train.activation_checkpointing={typed}", "parallel.schedule=1f1b"


def _schedule_errors(config: Config, alone: str) -> Iterator[str]:
    """Yield an error if a step has too few micro-batches for the schedule, or the model too few blocks."""
    workers, schedule = config.parallel.pipeline, schedule_of(config)
    micro_batches, key = config.train.gradient_accumulation_steps, "train.gradient_accumulation_steps"
    typed = f"{PIPELINE}={workers} parallel.schedule={schedule}"
    if STAGES_PER_WORKER[schedule] > 1 and (units := units_of_stages(config)):
        one = "1f1b" if micro_batches >= workers else "gpipe"
        yield (
            f"{typed} is not supported by {units[0]}, because FSDP would gather the other stage of a worker too: use "
            f"parallel.schedule={one}, or {units[1]}"
        )
        return
    if schedule == "1f1b" and micro_batches < workers:
        yield (
            f"{typed} needs at least {workers} micro-batches in a step, but {key}={micro_batches}: use "
            f"{key}={workers}, or parallel.schedule=gpipe"
        )
    rounds = max(1, micro_batches // workers)
    if schedule == "interleaved" and micro_batches % rounds:
        yield (
            f"{typed} needs a multiple of {workers} micro-batches in a step, but {key}={micro_batches}: use "
            f"{key}={-(-micro_batches // workers) * workers}, or parallel.schedule=1f1b"
        )
    name, layers = "model.num_layers", config.model.num_layers
    if config.model._target_ == HUGGING_FACE:
        name = "num_hidden_layers of the model"
        layers = architecture_of(config.model).get("num_hidden_layers")
    stages = workers * STAGES_PER_WORKER[schedule]
    if layers is not None and layers < stages:
        most, total = layers // STAGES_PER_WORKER[schedule], config.cluster.world_size
        fitting = max((degree for degree in range(2, most + 1) if total % degree == 0), default=1)
        fewer = f"{PIPELINE}={fitting}" if fitting > 1 else alone
        yield f"{typed} has {stages} stages of at least one block, but {name}={layers}: use {fewer}" + (
            ", or parallel.schedule=1f1b" if STAGES_PER_WORKER[schedule] > 1 and layers >= workers else ""
        )


def units_of_stages(config: Config) -> tuple[str, str] | None:
    """Return what distributes each stage in units of FSDP, and what to type instead; None if nothing does."""
    if config.parallel.tensor > 1:
        return f"{TENSOR}={config.parallel.tensor}", f"{TENSOR}=1 strategy=ddp"
    return ("strategy=fsdp", "strategy=ddp") if config.strategy.name == "fsdp" else None


def _model_errors(config: Config, typed: str, alone: str) -> Iterator[str]:
    """Yield an error if the layers of a model are not known to be divisible. A worker checks those of custom code."""
    model, key = config.model, typed.partition("=")[0]
    degree, is_tensor, is_pipeline = int(typed.partition("=")[2]), key == TENSOR, key == PIPELINE
    types, compared = (TENSOR_TYPES, "plan for its layers") if is_tensor else (CONTEXT_TYPES, "training of this type")
    types = PIPELINE_TYPES if is_pipeline else EXPERT_TENSOR_TYPES if config.parallel.expert > 1 else types
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
        if is_pipeline:
            reason = "which is not cut into stages"
        yield f"{typed} is not supported by model={model.name}, {reason}: use {alone} strategy=fsdp"
    known = {name: size for name, size in sizes.items() if isinstance(size, int) and not is_pipeline}
    cut = config.parallel.tensor if key == CONTEXT else 1  # Its workers have a part of the heads already.
    if wrong := {name: size for name, size in known.items() if size % (degree * cut)}:
        length = (config.dataset.max_length or model.seq_length) if config.parallel.context > 1 else None
        fits = (n for n in range(1, degree) if all(size % (n * cut) == 0 for size in known.values()))
        fitting = max(n for n in fits if (length or 0) % n == 0)
        workers, group = config.cluster.workers_per_node or 1, fitting * cut
        more = f" cluster.workers_per_node={-(-workers // group) * group}" if workers % group else ""
        listed = " and ".join(f"{name}={size}" for name, size in wrong.items())
        both = f" {TENSOR}={cut} (together {degree * cut})" if cut > 1 else ""
        yield f"{typed}{both} must divide {listed}: use {key}={fitting}{more}"


def _heads(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of heads of a config.json. Without one of keys and values, it is that of the queries."""
    names = ("num_attention_heads", "n_head", "num_key_value_heads")
    return {f"{name} of the model": architecture[name] for name in names if name in architecture}
