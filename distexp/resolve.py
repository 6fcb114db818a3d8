"""From a composed configuration to a run that can start, or to every reason why it cannot.

Nothing here imports torch: a wrong command line is refused in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, MissingMandatoryValue, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config, ConfigError
from distexp.engines.base import TrainingEngine
from distexp.hardware import cpu_count, visible_gpus
from distexp.keys import model_faults, reads_source, source_key, unused_keys
from distexp.request import decide_request, request_faults
from distexp.rules import faults_together
from distexp.scale import shrink, too_many_workers
from distexp.scaling import RULES, scale_work
from distexp.strategies.base import Strategy
from distexp.targets import check_target, locate

Choices = Mapping[str, str | None]

KNOBS = {"sharding": "fsdp", "zero_stage": "deepspeed"}
"""Groups that mean something to one strategy only, and imply it."""

MIN_BUSBW_GBPS = 5.0
"""The gate of the workshop that this tool grew out of: an all-reduce of 4 GiB slower than this is broken."""

ALLOWED: dict[str, tuple[str, ...]] = {
    "model.task": ("causal_lm", "image_classification"),
    "dataset.padding": ("max_length", "longest"),
    "precision.name": ("fp32", "bf16", "fp16"),
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


def without_hydra(composed: DictConfig) -> DictConfig:
    """What Hydra composed, less its own node."""
    content = composed.copy()
    with open_dict(content):
        del content["hydra"]
    return content


def load_strategy(config: Config) -> Strategy:
    """The chosen strategy."""
    strategy: Strategy = locate(config.strategy._target_)()
    return strategy


def load_engine(config: Config) -> TrainingEngine:
    """The chosen engine."""
    engine: TrainingEngine = locate(config.engine._target_)()
    return engine


def resolve(composed: DictConfig, choices: Choices) -> Config:
    """Types a composed configuration, fills in what was left open, and judges all of it at once.

    Args:
        composed: the DictConfig that Hydra composed on our schema, with its ``hydra`` node or without.
        choices: the chosen option of each config group.

    Raises:
        ConfigError: with a sentence for each fault.
    """
    try:
        config = _as_dataclasses(composed)
    except MissingMandatoryValue as error:
        missing = ", ".join(sorted(key for key in OmegaConf.missing_keys(composed) if not key.startswith("hydra.")))
        raise ConfigError(f"Nothing is said of {missing}: set it, or choose an option of its group") from error
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    faults = [*_bad_values(config), *_bad_targets(config), *_misplaced_knobs(config, choices)]
    faults += [*model_faults(config.model), *unused_keys("dataset", config.dataset), *request_faults(config.cluster)]
    if faults:
        raise ConfigError(faults)
    faults += shrink(config)
    _make_paths_absolute(config)
    strategy = load_strategy(config)
    faults += _decide_placement(config)
    strategy.complete(config)
    faults += too_many_workers(config) or scale_work(config)
    faults += [*faults_together(config), *strategy.validate(config), *load_engine(config).validate(config)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return config


def _as_dataclasses(composed: DictConfig) -> Config:
    """The sections as they are, which Hydra composed on our schema: merging them into it anew takes 20 ms a run."""
    unknown = sorted({*_unknown(composed, Config)} - {"hydra"})
    if unknown:
        raise ConfigError(
            [f"{key} is no key of the configuration: leave it out (docs/configuration.md has all)" for key in unknown]
        )
    values = {field.name: composed[field.name] for field in fields(Config)}
    typed: dict[str, Any] = {
        name: OmegaConf.to_object(value) if OmegaConf.is_config(value) else value for name, value in values.items()
    }
    return Config(**typed)


def _unknown(section: DictConfig, schema: Any) -> Iterator[str]:
    """Keys that were added with a plus, and that no dataclass has."""
    known = {field.name for field in fields(schema)}
    for key, node in section.items_ex(resolve=False):
        if key not in known:
            yield str(key)
        elif isinstance(node, DictConfig) and is_dataclass(below := OmegaConf.get_type(node)):
            yield from (f"{key}.{name}" for name in _unknown(node, below))


def _bad_values(config: Config) -> Iterator[str]:
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


def _bad_targets(config: Config) -> Iterator[str]:
    targets = [section._target_ for section in (config.model, config.dataset, config.strategy, config.engine)]
    for target in [*targets, *filter(None, [config.tracker._target_])]:
        fault = check_target(target, config.trusted_packages)
        if fault:
            yield fault


def _misplaced_knobs(config: Config, choices: Choices) -> Iterator[str]:
    for knob, strategy in KNOBS.items():
        choice = choices.get(knob)
        if choice not in (None, "null") and config.strategy.name != strategy:
            yield (
                f"{knob}={choice} belongs to strategy={strategy}, but this run has "
                f"strategy={config.strategy.name}: leave {knob} out, or choose strategy={strategy}"
            )


def _make_paths_absolute(config: Config) -> None:
    """Paths mean the same to a worker that starts elsewhere; hub ids are left alone."""

    def absolute(section: Any, key: str, *, only_existing: bool = False) -> None:
        value = getattr(section, key)
        if value is not None and (not only_existing or Path(value).expanduser().exists()):
            setattr(section, key, os.path.abspath(os.path.expanduser(value)))

    for key in ("train_path", "eval_path", "root"):
        absolute(config.dataset, key)
    absolute(config.deepspeed, "config_file")
    absolute(config.train, "resume")
    absolute(config.dataset, "path", only_existing=True)
    if config.model.tokenizer not in ("auto", "byte"):
        absolute(config.model, "tokenizer", only_existing=True)
    if reads_source(config.model):
        absolute(config.model, source_key(config.model), only_existing=True)


def _decide_placement(config: Config) -> list[str]:
    """Fills in device, workers and threads; the faults of what the machine cannot give."""
    cluster = config.cluster
    if cluster.launcher == "slurm":
        return decide_request(config)
    gpus = visible_gpus()
    if cluster.device == "auto":
        cluster.device = "cuda" if gpus else "cpu"
    on_gpu = cluster.device == "cuda"
    if config.preflight.min_busbw_gbps is None and on_gpu:
        config.preflight.min_busbw_gbps = MIN_BUSBW_GBPS
    if cluster.workers_per_node is None:
        available = max(1, (len(gpus) if on_gpu else 2) // cluster.nodes)
        cluster.workers_per_node = 1 if config.strategy.name == "single" else available
    world_size = cluster.nodes * cluster.workers_per_node
    if cluster.cpus_per_worker is None:
        # The share of one machine: simulated nodes stand on it side by side.
        cluster.cpus_per_worker = max(1, cpu_count() // world_size)
    if on_gpu and not gpus:
        return ["cluster.device=cuda needs a GPU, and none is visible here: choose cluster.device=cpu"]
    if on_gpu and world_size > len(gpus):
        return [
            f"cluster.nodes={cluster.nodes} x cluster.workers_per_node={cluster.workers_per_node} needs "
            f"{world_size} GPUs, and {len(gpus)} are visible here: lower one of them, or choose cluster.device=cpu"
        ]
    return []
