"""What each key may be by itself: one of some words, or a number from a least one on."""

from __future__ import annotations

from collections.abc import Iterator

from distexp.config import Config
from distexp.resolve.scaling import RULES

ALLOWED: dict[str, tuple[str, ...]] = {
    "model.task": ("causal_lm", "image_classification"),
    "dataset.padding": ("max_length", "longest"),
    "precision.name": ("fp32", "bf16", "fp16"),
    "train.logits": ("all", "targets"),
    "train.optimizer": ("adamw", "sgd"),
    "train.schedule": ("linear", "step", "constant"),
    "train.on_nan": ("stop", "record"),
    "cluster.device": ("auto", "cuda", "cpu"),
    "scaling.name": tuple(RULES),
}

AT_LEAST: dict[str, float] = {
    "train.num_epochs": 1,
    "train.max_steps": 1,
    "train.micro_batch_size": 1,
    "train.eval_batch_size": 1,
    "train.gradient_accumulation_steps": 1,
    "train.learning_rate": 0,
    "train.weight_decay": 0,
    "train.eps": 0,
    "train.momentum": 0,
    "train.step_size": 1,
    "train.gamma": 0,
    "train.warmup_steps": 0,
    "train.measure_after_step": 0,
    "train.profile_steps": 0,
    "train.log_every": 1,
    "train.seed": 0,
    "cluster.nodes": 1,
    "cluster.workers_per_node": 1,
    "cluster.cpus_per_worker": 1,
    "preflight.min_busbw_gbps": 0,
    "preflight.max_bytes": 1024,
    "preflight.warmup_rounds": 0,
    "preflight.rounds": 1,
    "scaling.samples_per_worker": 1,
    "scaling.base_workers": 1,
    "cluster.gpus_per_node": 0,
    "cluster.array_parallelism": 1,
    "cluster.signal_delay_s": 0,
    "dataset.train_size": 1,
    "dataset.eval_size": 1,
    "dataset.max_length": 2,
    "dataset.answer_tokens": 1,
    "dataset.image_size": 1,
    "dataset.num_workers": 0,
}


def bad_values(config: Config) -> Iterator[str]:
    """A sentence for each value that is wrong whatever the others are."""
    for key, allowed in ALLOWED.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value not in allowed:
            yield f"{key}={value} is not one of {', '.join(allowed)}"
    for key, least in AT_LEAST.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not value >= least:
            yield f"{key}={value} must be at least {least:g}"
    if len(config.train.betas) != 2 or not all(0 <= beta < 1 for beta in config.train.betas):
        yield f"train.betas={config.train.betas} must be two numbers from 0 to below 1, as [0.9,0.999]"
    clipping = config.train.gradient_clipping
    if clipping is not None and not clipping > 0:
        yield f"train.gradient_clipping={clipping:g} must be above 0; null switches clipping off"
    for key, positive in (
        ("cluster.timeout_min", config.cluster.timeout_min),
        ("cluster.hang_timeout_min", config.cluster.hang_timeout_min),
        ("cluster.memory_gb", config.cluster.memory_gb),
        ("measure.interval_s", config.measure.interval_s),
        ("ddp.bucket_cap_mb", config.ddp.bucket_cap_mb),
    ):
        if positive is not None and not positive > 0:
            yield f"{key}={positive:g} must be above 0"
    every = config.train.checkpoint_every
    if every is not None and every != "epoch" and not (isinstance(every, int) and every >= 1):
        yield f"train.checkpoint_every={every} must be a number of steps from 1, or epoch"
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f"name={config.name} must be the name of one folder, without a slash"
