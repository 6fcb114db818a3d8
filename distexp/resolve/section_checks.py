"""Checks of settings in several sections: options, data and model, predictions, the tracker, and files."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from distexp.checkpoints.folder import candidates, suggest
from distexp.config import AdapterConfig, Config, ConfigError, DatasetConfig, model_checks
from distexp.config.custom_code import check_target
from distexp.config.fields import info_of
from distexp.config.keys import NAMED_MODELS, get_value, schema_fields
from distexp.config.tasks import AUTO, TASKS, task_of_architecture, tasks_of_dataset
from distexp.data.sources import formats, rows
from distexp.data.sources.image_folder import CHECKED_IMAGES, IMAGE_FOLDER, broken_images, find_images
from distexp.data.squad_json import find_small_file_error
from distexp.hardware.facts import planned_gpus
from distexp.resolve.resources import launcher_traits

KEYS_OF_VARIABLES = {"OMP_NUM_THREADS": "cluster.cpus_per_worker", "DS_ACCELERATOR": "cluster.device"}
"""Environment variables of the workers that distexp sets, with the keys that change them."""


def check_targets(config: Config) -> Iterator[str]:
    """Yield an error for each ``_target_`` in a package that the user does not trust."""
    sections = (config.model, config.dataset, config.strategy, config.engine, config.tracker, config.cluster)
    for target in filter(None, (*(section._target_ for section in sections), *config.measure.watchers)):
        error = check_target(target, config.trusted_packages)
        if error:
            yield error


def decide_task(config: Config) -> Iterator[str]:
    """Replace ``model.task=auto`` by the task of the model's architecture. Yield an error if it has no config.json."""
    model = config.model
    if model.task != AUTO:
        return
    source = model_checks.weights_source(model)
    if source is not None and model_checks.names_source(model):
        model.task = task_of_architecture(model_checks.read_architecture(source))
        return
    model.task = "causal_lm"  # so that the other checks can continue
    yield (
        f"model.task={AUTO} needs the config.json of a model, which model={model.name} has not: use one of "
        f"{', '.join(TASKS)}"
    )


def check_cluster_keys(config: Config) -> Iterator[str]:
    """Yield an error for each cluster key that the launcher ignores, or that contradicts another one."""
    cluster = config.cluster
    if check_target(cluster._target_, config.trusted_packages) is None:  # Else ``check_targets`` has an error.
        yield from launcher_traits(config).key_errors(config)
    for name in cluster.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            yield f"cluster.environment sets {name!r}, which is not a variable name: use letters, digits and _"
        elif name in KEYS_OF_VARIABLES:
            yield f"cluster.environment may not set {name}: set {KEYS_OF_VARIABLES[name]} instead"


UNPACKED_ATTENTION = {
    "distexp.models.bloom.build": ("auto", "eager"),
    "distexp.models.hf.build": ("flash",),
}
"""Values of ``model.attention`` that cannot keep the samples of a row apart."""

OWN_TEXTS = {
    "distexp.data.sources.documents.load_text": formats.text_format,
    "distexp.data.sources.documents.load_chat": formats.chat_format,
}
"""Targets of own texts, with their columns and checks."""


def check_task(config: Config) -> Iterator[str]:
    """Yield an error for each setting that belongs to another task than the model."""
    model, dataset = config.model, config.dataset
    if not same_task(config):
        models = f"choose model={TASKS[dataset.task].models}, or " if dataset.task in TASKS else "choose "
        tasks = ", ".join(tasks_of_dataset(dataset.task))
        yield (
            f"dataset={dataset.name} is for {tasks}, but model={model.name} is for {model.task}: "
            f"{models}dataset={TASKS[model.task].datasets}"
        )
    causal = ("train.logits=targets", "train.loss=chunked", "train.loss=own")
    for setting in (*causal, "dataset.targets=all", "dataset.chat_template=zephyr"):
        section, key, value = re.split("[.=]", setting)
        if getattr(getattr(config, section), key) == value and not TASKS[model.task].is_causal:
            yield f"{setting} is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    if config.train.score_answers and not TASKS[model.task].is_causal:
        yield f"train.score_answers=true is for causal_lm, but model={model.name} is for {model.task}: leave it out"
    elif config.train.score_answers and "answer_tokens" not in dataset.keys:
        yield (
            f"train.score_answers=true needs reference answers, but dataset={dataset.name} has none: "
            "choose dataset=squad or squad_sample, or leave it out"
        )


def check_lengths(config: Config) -> Iterator[str]:
    """Yield an error for each setting about the lengths of texts that the model or another setting excludes."""
    dataset, model = config.dataset, config.model
    task = TASKS[model.task]
    supports = {"packing": task.is_causal, "bucketing": task.is_text}
    for key, tasks in {"packing": "causal_lm", "bucketing": "texts"}.items():
        if getattr(dataset, key) and not supports[key]:
            yield f"dataset.{key}=true is for {tasks}, but model={model.name} is for {model.task}: leave it out"
    if dataset.packing and dataset.bucketing:
        yield "dataset.bucketing=true has no effect on packed rows: set dataset.packing=false, or leave it out"
    if dataset.packing and model.attention in UNPACKED_ATTENTION.get(model._target_, ()):
        yield (
            f"dataset.packing=true is not supported by model={model.name} with model.attention={model.attention}: use "
            "model.attention=sdpa, or flex on a GPU"
        )


def set_adapter_defaults(config: Config) -> None:
    """Keep frozen weights in bf16 if the computation is in bf16. It would round them in each step anyway."""
    adapter = config.adapter
    if adapter.freezes_model and adapter.base_dtype is None:
        adapter.base_dtype = "bf16" if config.precision.name == "bf16" else "fp32"


NAMED_HEADS = ("distexp.models.hf.build", "distexp.models.task_models.build_timm")
"""Targets of models whose heads adapters find, to train them whole."""


def check_adapter(config: Config) -> Iterator[str]:
    """Yield an error for each setting that adapters exclude, or that has no effect without them."""
    adapter, default = config.adapter, AdapterConfig()
    if not adapter.freezes_model:
        for key, value in vars(adapter).items():
            if value != vars(default)[key]:
                yield f"adapter.{key}={value} has no effect with adapter=none: add adapter=lora, or leave it out"
        return
    for key, names in (("targets", adapter.targets), ("modules_to_save", adapter.modules_to_save)):
        if wrong := [name for name in names or () if set("*+?()[]{}|^$\\ ") & set(name)]:
            yield (
                f"adapter.{key} contains {wrong[0]}, but it takes ends of names and no regular expressions: write the "
                "last part of the names of modules, as in adapter.targets=[q_proj]"
            )
    width = config.model.hidden_size if config.model._target_ in model_checks.ATTENTIONS else None
    if width is not None and adapter.rank > width:
        yield f"adapter.rank={adapter.rank} is more than model.hidden_size={width}: use at most {width}"
    if find_spec("peft") is None:
        yield "adapter=lora needs the library peft: pip install 'distexp[adapters]', or choose adapter=none"
    if config.engine.name != "native":
        yield f"adapter=lora is not supported by engine={config.engine.name}: use engine=native"
    if adapter.base_dtype == "bf16" and config.precision.name != "bf16":
        yield (
            f"adapter.base_dtype=bf16 is for precision=bf16, but this run has precision={config.precision.name}: use "
            "precision=bf16 or adapter.base_dtype=fp32"
        )
    if config.train.save_model and config.model.init == "random":
        yield (
            "train.save_model=true saves only the adapters with adapter=lora, which are of no use without the weights "
            "of the model, and these are lost with model.init=random: use model.init=pretrained, or "
            "train.save_model=false"
        )
    names_head = config.model._target_ in NAMED_HEADS or adapter.targets or adapter.modules_to_save
    if config.model.traits.has_classes and not names_head:
        yield (
            f"adapter=lora freezes the head, but that of model={config.model.name} starts at random: name it, as in "
            "adapter.modules_to_save=[fc], or choose adapter=none"
        )


def same_task(config: Config) -> bool:
    """Return whether the dataset fits the task of the model."""
    return config.model.task in tasks_of_dataset(config.dataset.task)


def check_sizes(config: Config) -> Iterator[str]:
    """Yield an error for texts or micro-batches that are too long or too large."""
    samples = config.dataset.train_size
    if samples is None and not (config.is_prediction or config.is_preflight):  # A prediction needs no samples.
        samples = model_checks.GENERATED_TRAIN_SIZES.get(config.dataset._target_)
    if error := model_checks.check_sequence_length(config.dataset, config.model):
        yield error
    smallest = 1 if model_checks.searches_micro_batch(config) else config.train.micro_batch
    if samples is not None:
        workers, batch = config.data_parallel, config.train.global_batch_size
        if error := model_checks.check_samples_per_rank(samples, workers, smallest, global_batch=batch):
            yield error


def check_plan(config: Config) -> Iterator[str]:
    """Yield an error for an unknown GPU model, for two memories, and for a micro-batch that is not known yet."""
    plan = config.plan
    if model_checks.searches_micro_batch(config) and (config.is_prediction or plan.name == "check"):
        hint = (
            "type train.micro_batch_size=1 plan.search=true, and the output has the largest size that fits"
            if config.is_prediction
            else "type a number, or leave plan=check out, because the search finds a size that fits"
        )
        yield f"a prediction of memory needs a number of samples, but train.micro_batch_size=auto: {hint}"
    if config.is_prediction or plan.name == "check":
        yield from _check_kind_of_memory(config)
    if plan.gpu is not None and plan.gpu not in planned_gpus():
        near = get_close_matches(plan.gpu.lower(), planned_gpus(), n=3, cutoff=0.4) or list(planned_gpus())
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


TRACKER_LIBRARIES = frozenset({"tensorboard", "wandb", "mlflow", "trackio"})
"""Trackers whose name is that of an optional library."""


def check_tracker(config: Config) -> Iterator[str]:
    """Yield an error for a missing library, and for each key of another tracker."""
    tracker = config.tracker
    if tracker._target_ is not None and tracker.name in TRACKER_LIBRARIES and find_spec(tracker.name) is None:
        yield f"tracker={tracker.name} needs its library: pip install {tracker.name}, or choose tracker=none"
    for key, owner in {"online": "wandb", "uri": "mlflow"}.items():
        value = getattr(tracker, key)
        if value and tracker.name in {*TRACKER_LIBRARIES, "none"} - {owner}:
            yield (
                f"tracker.{key}={value} is for tracker={owner}, but this run has tracker={tracker.name}: leave it out"
            )


DATASET = "dataset."  # start of the keys of the data
EXISTS = {"file": os.path.isfile, "folder": os.path.isdir}
"""Checks by the kind of path that a key has in the schema."""


def check_files(config: Config) -> Iterator[str]:
    """Yield an error for each path that does not exist. A dry run accepts data that only the cluster has."""
    missing = find_missing_paths(config)
    yield from (error for key, error in missing if not (config.cluster.dry_run and key.startswith(DATASET)))


def find_missing_data(config: Config) -> list[str]:
    """Return a message for each file and folder of the dataset that is not on this machine."""
    return [error for key, error in find_missing_paths(config) if key.startswith(DATASET)]


def find_missing_paths(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key of each path that does not exist, or is needed and not set, and what is wrong with it."""
    for key, spec in schema_fields():
        value, kind = get_value(config, key), info_of(spec).path
        exists = (
            rows.is_local if (key, reads_own_data(config.dataset)) == ("dataset.eval_path", True) else EXISTS.get(kind)
        )
        if value is not None and exists is not None and not exists(value):
            yield key, f"{key}={value} is not a {kind}: correct the path"
    for key, source in (("dataset.path", config.dataset.path), ("model.tokenizer", config.model.tokenizer)):
        if source is not None and looks_like_path(source) and not rows.is_local(source):
            yield key, f"{key}={source} does not exist: correct the path, or use a hub id"
    dataset = config.dataset
    yield from (("dataset.path", error) for error in _own_path_errors(dataset) if same_task(config))
    # A dataset of another task is an error already, and the user will probably replace it.
    if dataset.root is None and "root" in dataset.keys and same_task(config):
        yield (
            "dataset.root",
            f"dataset={dataset.name} needs a folder: set dataset.root to one in the official layout of TinyImageNet",
        )


def reads_own_data(dataset: DatasetConfig) -> bool:
    """Return whether a dataset reads files or folders of any name."""
    return dataset._target_ in (*OWN_TEXTS, IMAGE_FOLDER)


def _own_path_errors(dataset: DatasetConfig) -> Iterator[str]:
    """Yield an error if the path of own data is not set, or cannot be a hub id and does not exist."""
    if not reads_own_data(dataset):
        return
    path, images = dataset.path, dataset._target_ == IMAGE_FOLDER
    if path is None:
        kinds = "a folder with a folder for each class" if images else "a file, a folder, a pattern or a hub id"
        yield f"dataset={dataset.name} needs data: set dataset.path to {kinds}"
    elif (
        not rows.is_local(path) and not looks_like_path(path) and (images or formats.kind_of(Path(path)) or "*" in path)
    ):
        yield f"dataset.path={path} does not exist: correct the path"


def check_own_data(config: Config) -> Iterator[str]:
    """Yield an error for contradicting keys of own data, and for what its files and first rows show."""
    dataset = config.dataset
    if not reads_own_data(dataset) or not same_task(config):
        return
    for key in ("eval_path", "eval_split"):
        if getattr(dataset, key) is not None and dataset.eval_share is not None:
            yield f"dataset.{key} and dataset.eval_share both choose the evaluation set: leave one out"
    if dataset._target_ != IMAGE_FOLDER:
        yield from rows.find_errors(dataset, partial(OWN_TEXTS[dataset._target_], task=config.model.task))
    elif dataset.path is not None and rows.is_local(dataset.path):
        try:
            train = find_images(dataset).train
            if error := broken_images(train.root, train.names[:CHECKED_IMAGES]):
                yield error
        except ConfigError as error:
            yield from error.errors


def check_dataset_files(config: Config) -> Iterator[str]:
    """Yield an error for an incomplete folder, a missing file of a pair, and a small file in another format."""
    dataset = config.dataset
    reads_folder = dataset._target_.startswith("distexp.data.tinyimagenet.")
    if reads_folder and dataset.root is not None and os.path.isdir(dataset.root):
        needed = ("wnids.txt", "train", "val/val_annotations.txt")
        if missing_files := [name for name in needed if not os.path.exists(os.path.join(dataset.root, name))]:
            yield (
                f"dataset.root={dataset.root} contains no {', '.join(missing_files)}: set it to the top folder of the "
                "official archive of TinyImageNet"
            )
    pair = {"dataset.train_path": dataset.train_path, "dataset.eval_path": dataset.eval_path}
    given = [key for key, path in pair.items() if path is not None and not reads_own_data(dataset)]
    if len(given) == 1:
        (missing,) = set(pair) - set(given)
        yield f"{given[0]}={pair[given[0]]} is set but {missing} is not: set both or neither"
    if dataset._target_ == "distexp.data.squad.load":
        for split, size in (("train", dataset.train_size), ("eval", dataset.eval_size)):
            path = pair[key := f"dataset.{split}_path"]
            if path is not None and os.path.isfile(path) and (error := find_small_file_error(path, split, size)):
                yield f"{key}={error}"  # an error starts with the path


def check_checkpoint(config: Config) -> Iterator[str]:
    """Yield an error if the folder to resume from contains no checkpoint."""
    resume = config.train.resume
    if resume is not None and not candidates(Path(resume)):
        near = ", ".join(map(str, suggest(Path(resume))))
        hint = near or "the folder of a checkpoint, or of a run that wrote one"
        yield f"train.resume={resume} contains no checkpoint: use {hint}"


def check_model_files(config: Config) -> Iterator[str]:
    """Yield an error if the weights source is a folder without a model. Hub ids are checked when loaded."""
    model = config.model
    source, key = model_checks.weights_source(model), f"model.{model_checks.weights_source_key(model)}"
    if model._target_.endswith("build_timm") and find_spec("timm") is None:
        yield model_checks.TIMM_MISSING
    if model._target_.startswith(NAMED_MODELS) and model.init == "pretrained":
        if source is not None and not os.path.isfile(source):
            yield f"{key}={source} is not a file: set it to the .safetensors or .pth file with the weights"
        return
    if source is None or not model_checks.loads_from_source(model):
        return
    if os.path.exists(source):
        if not os.path.isfile(os.path.join(source, "config.json")):
            yield f"{key}={source} contains no config.json: use a folder written by save_pretrained, or a hub id"
        elif error := model_checks.config_error(Path(source, "config.json")):
            yield f"{key}={source} has a config.json that {error}: use a folder written by save_pretrained"
    elif looks_like_path(source):
        yield f"{key}={source} does not exist: correct the path, or use a hub id"
    if model._target_ == "distexp.models.hf.build":
        yield from model_checks.architecture_errors(model)
    is_causal_lm = model._target_ == "distexp.models.hf.build" and model.task == "causal_lm"
    if is_causal_lm and (error := model_checks.causality_error(model, model_checks.read_architecture(source))):
        yield error


def check_tokenizer_files(config: Config) -> Iterator[str]:
    """Yield an error if text data has no tokenizer. Hub ids are checked when loaded."""
    model = config.model
    target = config.dataset._target_
    if not (target.startswith("distexp.data.squad") or target in OWN_TEXTS) or not same_task(config):
        return
    if model.tokenizer is None:
        yield f"model.tokenizer is null, but dataset={config.dataset.name} needs one: set byte, a hub id or a folder"
        return
    source = model.tokenizer
    if source == "auto":
        source = (model_checks.weights_source(model) if model_checks.loads_from_source(model) else None) or "byte"
    yield from _chat_template_errors(config.dataset, source)
    folder = Path(source)
    patterns = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.tiktoken")
    if folder.is_absolute() and folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in patterns):
        yield (
            f"model.tokenizer={model.tokenizer} needs a tokenizer in {source}, which contains none: "
            "set it to byte, a hub id, or a folder with a tokenizer"
        )


def _chat_template_errors(dataset: DatasetConfig, tokenizer: str) -> Iterator[str]:
    """Yield an error if there are conversations, and the tokenizer is known to have no chat template."""
    if OWN_TEXTS.get(dataset._target_) is not formats.chat_format or dataset.chat_template != "tokenizer":
        return
    with suppress(ConfigError):  # ``check_own_data`` reports it.
        columns = rows.first_columns(dataset.path) if dataset.path else ()
        if tokenizer == "byte" and dataset.messages_column in columns:
            yield (
                f"{dataset.path} has messages, but the tokenizer byte has no chat template: set "
                "dataset.chat_template=zephyr, or model.tokenizer to a tokenizer with a template"
            )


def looks_like_path(text: str) -> bool:
    """Return whether a text can only be a path; a hub id is ``name`` or ``owner/name``."""
    return text.startswith(("/", "~", "./", "../")) or text in (".", "..") or text.count("/") > 1
