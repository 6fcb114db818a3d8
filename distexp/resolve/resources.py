"""Resources of a run: device, workers, GPUs and CPU threads. The launcher of the configuration decides them."""

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from distexp.config import WHOLE_MODEL, ClusterConfig, Command, Config, ConfigError, DatasetConfig, ModelConfig
from distexp.config.custom_code import PAGE, check_not_abstract, check_returned, check_target, locate, shorten_errors
from distexp.config.fields import info_of
from distexp.config.keys import get_value, schema_fields, set_value
from distexp.config.model_checks import loads_from_source, weights_source_key
from distexp.config.overrides import format_override
from distexp.data.sources.image_folder import IMAGE_FOLDER, find_images
from distexp.data.sources.rows import is_local
from distexp.engines.base import load_trainer
from distexp.strategies.base import COMMUNICATION, load_strategy
from distexp.strategies.parallel.checks import degrees


class LauncherTraits(ABC):
    """What a launcher states about its machines. ``distexp.launch.launcher.Launcher`` also starts runs on them."""

    runs_here: ClassVar[bool] = False
    """Whether this machine runs all nodes, so that its GPUs, CPU cores and memory are those of a run."""

    queues: ClassVar[bool] = False
    """Whether runs wait in a queue. Then several may run at the same time, and each one imports the libraries."""

    reads: ClassVar[Collection[str]] = ()
    """Names of the keys of ``cluster`` that it uses although they are for Slurm, such as ``dry_run``."""

    @abstractmethod
    def decide_resources(self, config: Config) -> list[str]:
        """Set device, workers per node and threads that the user left open. Return the errors."""

    def key_errors(self, config: Config) -> Iterator[str]:
        """Yield an error for each key of ``cluster`` that this launcher ignores, or does not support."""
        cluster, defaults = config.cluster, ClusterConfig()
        for spec in fields(ClusterConfig):
            value = getattr(cluster, spec.name)
            is_ignored = info_of(spec).slurm_only and spec.name not in self.reads
            if is_ignored and value != getattr(defaults, spec.name):
                typed = format_override(f"cluster.{spec.name}={value}")
                yield f"{typed} is for Slurm only: leave it out, or choose cluster=slurm"


Traits = TypeVar("Traits", bound=LauncherTraits)


def launcher_traits(config: Config) -> LauncherTraits:
    """Return what the launcher of a configuration states about its machines. Raise ConfigError as ``find_launcher``."""
    return find_launcher(config.cluster._target_, config.trusted_packages, LauncherTraits)  # type: ignore[type-abstract]


def find_launcher(target: str, trusted: Sequence[str], kind: type[Traits]) -> Traits:
    """Return the launcher with a dotted name. Raise ConfigError if it is none, or not trusted."""
    if error := check_target(target, trusted):
        raise ConfigError(error)
    launcher = _make(target)
    if not isinstance(launcher, kind):
        raise _wrong_class(target)
    return launcher


@cache
def _make(target: str) -> LauncherTraits:
    found = locate(target)
    if not (isinstance(found, type) and issubclass(found, LauncherTraits)):
        raise _wrong_class(target)
    check_not_abstract(found, LauncherTraits, f"cluster._target_={target}")
    with shorten_errors(target, "the constructor"):
        return found()


def _wrong_class(target: str) -> ConfigError:
    return ConfigError(
        f"cluster._target_={target} is not a launcher: derive the class from distexp.launch.launcher.Launcher, "
        f"as in {PAGE}"
    )


def decide_resources(config: Config) -> list[str]:
    """Decide device, workers and threads as the launcher does, and return the errors."""
    errors = launcher_traits(config).decide_resources(config)
    if config.cluster.device == "cuda" and config.preflight.min_busbw_gbps is None:
        config.preflight.min_busbw_gbps = 5.0  # A slower interconnect is broken.
    return errors


def set_strategy_defaults(config: Config) -> None:
    """Let the strategy set the options that the user left open."""
    strategy = load_strategy(config)
    with shorten_errors(config.strategy._target_, "set_defaults()"):
        strategy.set_defaults(config)


def check_strategy(config: Config) -> list[str]:
    """Return an error for each thing that the strategy cannot do."""
    strategy = load_strategy(config)
    if (shared := list(degrees(config))) and not strategy.shares_layers:
        return [
            f"{typed} is not supported by strategy={config.strategy.name}: choose strategy=fsdp or strategy=ddp, or "
            f"{alone}"
            for typed, alone in shared
        ]
    with shorten_errors(config.strategy._target_, "main_option()"):
        option = strategy.main_option(config)  # shown while the run trains, so an error would appear only then
    check_returned(option, str, f"strategy._target_={config.strategy._target_}: main_option()")
    with shorten_errors(config.strategy._target_, "validate()"):
        return _checked_messages(strategy.validate(config), config.strategy._target_)


def check_trainer(config: Config) -> list[str]:
    """Return an error for each thing that the trainer cannot do."""
    trainer = load_trainer(config)
    with shorten_errors(config.engine._target_, "validate()"):
        return _checked_messages(trainer.validate(config), config.engine._target_)


def needs_one_worker(config: Config) -> bool:
    """Return whether the strategy cannot use more than one worker."""
    return COMMUNICATION not in load_strategy(config).requires


def _checked_messages(returned: Any, target: str) -> list[str]:
    """Return what ``validate`` of a custom class returned, or raise ConfigError if it is no list of messages."""
    if isinstance(returned, list) and all(isinstance(message, str) for message in returned):
        return returned
    raise ConfigError(
        f"{target}: validate() returned {returned!r}: return a list of messages, empty if all is supported"
    )


def check_device(config: Config) -> Iterator[str]:
    """Yield an error for each setting that needs a GPU, if the run has none."""
    on_gpu = config.cluster.device == "cuda"
    if config.cluster.gpu_memory_limit_gb is not None and not (on_gpu or config.is_prediction):
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
        yield "offload=pinned needs a GPU, but this run is on cpu: choose offload=true or offload=false"


def check_low_bits(config: Config) -> Iterator[str]:
    """Yield an error for each setting that excludes activations on the CPU, states in 8 bits, or float8."""
    if config.train.activation_checkpointing == "offload" and config.train.compiled in WHOLE_MODEL:
        yield (
            f"train.activation_checkpointing=offload moves the inputs of blocks, which train.compile="
            f"{config.train.compiled} has in one graph: use train.compile=blocks"
        )
    if config.train.optimizer == "adamw8bit":
        excluded = ("offload=true",) if config.offload.enabled else ()
        why = "rounds the states in blocks of each shard"
        yield from _low_bits_errors(config, "train.optimizer=adamw8bit", "train.optimizer=adamw", excluded, why)
    if config.precision.name == "float8":
        checkpointing = "train.activation_checkpointing=selective"
        excluded = (
            *(("adapter=lora",) if config.adapter.freezes_model else ()),
            *((checkpointing,) if config.train.activation_checkpointing == "selective" else ()),
            *(("command=choose",) if config.command == Command.CHOOSE else ()),
        )
        why = "scales each tensor of a micro-batch by its largest value"
        yield from _low_bits_errors(config, "precision=float8", "precision=bf16", excluded, why)
        if config.cluster.device != "cuda":
            yield "precision=float8 needs a GPU, but this run is on cpu: choose precision=bf16 or fp32"


def _low_bits_errors(
    config: Config, typed: str, alone: str, excluded: Sequence[str], why_not_equal: str
) -> Iterator[str]:
    """Yield an error for each setting that excludes an option of torchao, with what to type in its place."""
    engine = config.engine.name
    if find_spec("torchao") is None:
        yield f"{typed} needs the library torchao: pip install 'distexp[lowbits]', or use {alone}"
    if engine != "native":
        yield f"{typed} is not supported by engine={engine}: use engine=native, or {alone}"
    elif not load_strategy(config).supports_low_bits:
        yield (
            f"{typed} is not supported by strategy={config.strategy.name}, which computes and keeps the states by "
            f"itself: use strategy=ddp or fsdp, or {alone}"
        )
    for text in excluded:
        yield f"{typed} is not supported with {text}: leave that out, or use {alone}"
    for text, instead in degrees(config):
        yield f"{typed} was not compared with one worker for {text}: use {instead}, or {alone}"
    if config.command == Command.VERIFY:
        yield (
            f"{typed} cannot be compared weight by weight, because it {why_not_equal}: add {alone} to verify the "
            f"strategy, and compare the losses of trainings with {typed}"
        )


def make_paths_absolute(config: Config) -> None:
    """Make all paths absolute; a value that may be a hub id only if the path exists."""
    kinds = {key: info_of(spec).path for key, spec in schema_fields()}
    if loads_from_source(config.model):
        kinds[f"model.{weights_source_key(config.model)}"] = "hub"
    for key, kind in kinds.items():
        value = get_value(config, key)
        if not kind or value is None or (kind == "hub" and value in ("auto", "byte")):
            continue
        path = os.path.abspath(os.path.expanduser(value))
        if kind != "hub" or is_local(path):
            set_value(config, key, path)


MAX_CPU_BYTES = 64 * 10**9
"""Decoded images that are kept in CPU memory without an explicit ``dataset.cache``."""


def estimate_image_bytes(dataset: DatasetConfig) -> int | None:
    """Return the bytes for ``dataset.cache``, by the size of the first image; None if the folder cannot be read."""
    generated = (500, 32)  # count, height and width of the images of ``dataset=tinyimagenet_sample``
    if dataset._target_ == IMAGE_FOLDER:
        return _folder_bytes(dataset)
    images = generated if dataset.root is None else _measure_folder(dataset.root)
    if images is None:
        return None
    count, edge = images
    if dataset.train_size is not None and dataset.eval_size is not None:
        count = dataset.train_size + dataset.eval_size
    return count * 3 * min(edge, dataset.image_size or edge) ** 2


def _folder_bytes(dataset: DatasetConfig) -> int | None:
    """Return the bytes of the decoded images of a folder; None if it cannot be read, or the images have own sizes."""
    try:
        sets = find_images(dataset)
    except ConfigError:
        return None
    pairs = ((sets.train, dataset.train_size), (sets.evaluation, dataset.eval_size))
    count = sum(len(images.names[:size]) for images, size in pairs)
    return None if dataset.image_size is None else count * 3 * dataset.image_size**2


@lru_cache(maxsize=8)
def _measure_folder(root: str) -> tuple[int, int] | None:
    """Count the images in a folder of TinyImageNet's layout, and measure the larger edge of one of them."""
    from PIL import Image

    try:
        folders = [Path(root, "val", "images"), *(Path(entry, "images") for entry in os.scandir(Path(root, "train")))]
        count = sum(len(os.listdir(folder)) for folder in folders)
        with Image.open(next(folders[0].iterdir())) as image:
            return count, max(image.size)
    except (OSError, StopIteration):
        return None


GPT, BLOOM = "distexp.models.gpt.build", "distexp.models.bloom.build"
"""Targets of the models whose architecture is known here."""

NORM_VECTORS = 2
"""Vectors of the hidden size in a layer norm: scale and bias."""


def parameter_count(model: ModelConfig, layers: int | None = None) -> int | None:
    """Return the number of parameters, on request with another number of layers; a shared weight counts once.

    It is None for an unknown architecture, or if the vocabulary is that of the tokenizer.
    """
    depth, hidden = layers or model.num_layers, model.hidden_size
    if model.vocab_size is None or hidden is None or depth is None or model.init != "random":
        return None
    if model._target_ == GPT and model.ff_dim and model.seq_length:
        tables = (1 if model.tie_embeddings else 2) * model.vocab_size + model.seq_length  # tokens and positions
        return (tables + NORM_VECTORS) * hidden + depth * _block_parameters(hidden, model.ff_dim)
    if model._target_ == BLOOM:  # It has a norm after the embedding too, and no table of positions.
        return (model.vocab_size + 2 * NORM_VECTORS) * hidden + depth * _block_parameters(hidden, 4 * hidden)
    return None


def ties_embeddings(model: ModelConfig) -> bool:
    """Return whether embedding and output head share one weight."""
    return bool(model.tie_embeddings) or model._target_ == BLOOM


def _block_parameters(hidden: int, inner: int) -> int:
    """Count the parameters of attention, MLP and two norms, with their biases."""
    attention = 4 * (hidden + 1) * hidden  # query, key, value, output
    mlp = (hidden + 1) * inner + (inner + 1) * hidden
    return attention + mlp + 2 * NORM_VECTORS * hidden
