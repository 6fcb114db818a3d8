"""Checks that involve several sections: task, sizes, tracker and device."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec

from distexp.config import Config
from distexp.config.batch_sizes import searches_micro_batch
from distexp.config.size_checks import check_samples_per_rank, check_sequence_length
from distexp.system.gpu_models import GPU_MODELS

TRACKER_LIBRARIES = frozenset({"tensorboard", "wandb", "mlflow"})
"""Trackers whose name is that of an optional library."""

TRACKER_KEYS = {"online": "wandb", "uri": "mlflow"}
"""Keys of ``tracker`` that only one tracker has."""

UNPACKED_ATTENTION = {
    "distexp.models.bloom.build": ("auto", "eager"),
    "distexp.models.hf.build": ("flash",),
}
"""Values of ``model.attention`` that cannot keep the samples of a row apart."""

MODEL_HINTS = {
    "causal_lm": "bloom_tiny, gpt_tiny or another text model",
    "image_classification": "resnet_tiny or resnet50",
}
DATASET_HINTS = {
    "causal_lm": "squad_sample, squad or synthetic",
    "image_classification": "tinyimagenet_sample, tinyimagenet or synthetic",
}


def check_task(config: Config) -> Iterator[str]:
    """Yield an error for each setting that belongs to another task than the model."""
    model, dataset = config.model, config.dataset
    if not same_task(config):
        models = f"choose model={MODEL_HINTS[dataset.task]}, or " if dataset.task in MODEL_HINTS else "choose "
        yield (
            f"dataset={dataset.name} is for {dataset.task}, but model={model.name} is for {model.task}: "
            f"{models}dataset={DATASET_HINTS[model.task]}"
        )
    for setting in ("train.logits=targets", "train.loss=chunked"):
        is_set = setting in (f"train.logits={config.train.logits}", f"train.loss={config.train.loss}")
        if is_set and model.task != "causal_lm":
            yield f"{setting} is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    if config.train.score_answers and "answer_tokens" not in dataset.keys:
        yield (
            f"train.score_answers=true needs reference answers, but dataset={dataset.name} has none: "
            "choose dataset=squad or squad_sample, or leave it out"
        )


def check_lengths(config: Config) -> Iterator[str]:
    """Yield an error for each setting about the lengths of texts that the model or another setting excludes."""
    dataset, model = config.dataset, config.model
    for key in ("packing", "bucketing"):
        if getattr(dataset, key) and model.task != "causal_lm":
            yield f"dataset.{key}=true is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    if dataset.packing and dataset.bucketing:
        yield "dataset.bucketing=true has no effect on packed rows: set dataset.packing=false, or leave it out"
    if dataset.packing and model.attention in UNPACKED_ATTENTION.get(model._target_, ()):
        yield (
            f"dataset.packing=true is not supported by model={model.name} with model.attention={model.attention}: use "
            "model.attention=sdpa, or flex on a GPU"
        )


def same_task(config: Config) -> bool:
    """Return whether the dataset fits the task of the model."""
    return config.dataset.task in (config.model.task, "any")


def check_sizes(config: Config) -> Iterator[str]:
    """Yield an error for texts or micro-batches that are too long or too large."""
    samples = config.dataset.train_size
    errors = [check_sequence_length(config.dataset, config.model)]
    smallest = 1 if searches_micro_batch(config) else config.train.micro_batch
    if samples is not None:
        errors.append(check_samples_per_rank(samples, config.cluster.world_size, smallest))
    yield from filter(None, errors)


def check_tracker(config: Config) -> Iterator[str]:
    """Yield an error for a missing library, and for each key of another tracker."""
    tracker = config.tracker
    if tracker._target_ is not None and tracker.name in TRACKER_LIBRARIES and find_spec(tracker.name) is None:
        yield f"tracker={tracker.name} needs its library: pip install {tracker.name}, or choose tracker=none"
    for key, owner in TRACKER_KEYS.items():
        value = getattr(tracker, key)
        if value and tracker.name in {*TRACKER_LIBRARIES, "none"} - {owner}:
            yield (
                f"tracker.{key}={value} is for tracker={owner}, but this run has tracker={tracker.name}: leave it out"
            )


def check_plan(config: Config) -> Iterator[str]:
    """Yield an error for an unknown GPU model, for two memories, and for a micro-batch that is not known yet."""
    plan = config.plan
    if searches_micro_batch(config) and (plan.only or plan.name == "check"):
        hint = (
            "type train.micro_batch_size=1, and the output has the largest size that fits"
            if plan.only
            else "type a number, or leave plan=check out, because the search finds a size that fits"
        )
        yield f"a prediction of memory needs a number of samples, but train.micro_batch_size=auto: {hint}"
    if plan.only or plan.name == "check":
        yield from _check_kind_of_memory(config)
    if plan.gpu is not None and plan.gpu not in GPU_MODELS:
        near = get_close_matches(plan.gpu.lower(), GPU_MODELS, n=3, cutoff=0.4) or list(GPU_MODELS)
        yield f"plan.gpu={plan.gpu} is not a known GPU: use {', '.join(near)}, or set plan.gpu_memory_gb"
    if plan.gpu is not None and plan.gpu_memory_gb is not None:
        yield f"plan.gpu={plan.gpu} and plan.gpu_memory_gb={plan.gpu_memory_gb:g} both set the memory: leave one out"


def _check_kind_of_memory(config: Config) -> Iterator[str]:
    """Yield an error for each memory that is not that of the run's device."""
    plan = config.plan
    if config.cluster.device == "cpu":
        yield from (
            f"{key}={value} is for GPUs, but this run is on cpu: set plan.host_memory_gb, or leave it out"
            for key, value in (("plan.gpu", plan.gpu), ("plan.gpu_memory_gb", plan.gpu_memory_gb))
            if value is not None
        )
    elif plan.host_memory_gb is not None:
        yield (
            f"plan.host_memory_gb={plan.host_memory_gb:g} is for runs on CPUs, but this run is on GPUs: set "
            "plan.gpu_memory_gb, or cluster.device=cpu"
        )


def check_device(config: Config) -> Iterator[str]:
    """Yield an error for each setting that needs a GPU, if the run has none."""
    on_gpu = config.cluster.device == "cuda"
    if config.cluster.gpu_memory_limit_gb is not None and not (on_gpu or config.plan.only):
        yield (
            f"cluster.gpu_memory_limit_gb={config.cluster.gpu_memory_limit_gb:g} needs a GPU, but this run is on "
            "cpu: leave it out"
        )
    if config.precision.name == "fp16" and not on_gpu:
        yield "precision=fp16 needs a GPU, but this run is on cpu: choose precision=bf16 or fp32"
    if config.model.attention in ("flex", "flash") and not on_gpu:
        yield (
            f"model.attention={config.model.attention} needs a GPU, because it has no backward pass on a CPU: choose "
            "model.attention=sdpa"
        )
    if config.dataset.cache == "gpu" and not on_gpu:
        yield "dataset.cache=gpu needs a GPU, but this run is on cpu: choose dataset.cache=cpu"
    if config.offload.pin_memory and not on_gpu:
        yield "offload=pinned needs a GPU, but this run is on cpu: choose offload=true"
