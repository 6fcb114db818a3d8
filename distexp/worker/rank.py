"""One rank of a run, from the process group to the result."""

from __future__ import annotations

import gc
import json
import logging
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from distexp.config import Config, ConfigError, ModelConfig
from distexp.config.custom_code import PAGE, check_returned
from distexp.config.size_checks import check_samples_per_rank
from distexp.config.targets import locate
from distexp.data.base import MODEL_INPUTS, TaskData
from distexp.data.checks import check_task_data
from distexp.data.image_cache import cache_images, describe_cache
from distexp.data.packing import pack_training_set
from distexp.data.shards import BatchSharding, ShardedLoader
from distexp.data.targets import LabelsForHead, TargetTokens
from distexp.data.text import RightPadding, TextCollate, pad_to_batch, sample_lengths, sequence_length
from distexp.data.tokenization import Tokenizer
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, join, rendezvous_address
from distexp.engines.base import load_trainer
from distexp.explain.explanation import explain
from distexp.measure.memory.oom import watch_out_of_memory
from distexp.models.blueprint import Blueprint
from distexp.models.export import check_exportable, save_model
from distexp.models.head import adapt_head, describe_head
from distexp.models.introspection import check_forward_arguments, read_attention
from distexp.models.packing import check_packing
from distexp.models.transforms import MODEL_SCOPES, read_compiled, read_memory_format, transform_blocks
from distexp.preflight.run import run_preflight
from distexp.runs import attempts
from distexp.runs.environment import make_environment
from distexp.runs.events import Events
from distexp.runs.files import write_json
from distexp.runs.full_disk import print_despite_full_disk, write_despite_full_disk
from distexp.runs.metrics import Metrics
from distexp.runs.micro_batch import add_search
from distexp.runs.record import Environment, RunRecord
from distexp.runs.run_dir import PREDICTIONS
from distexp.runs.spec import RunSpec
from distexp.strategies.base import EvaluableModel
from distexp.system.environment_variables import captured_environment
from distexp.system.seeding import seed_everything
from distexp.system.torch_internals.compilation import read_activation_budget
from distexp.system.units import MIB
from distexp.training.inputs import TrainingInputs
from distexp.training.metrics_logger import MetricsLogger
from distexp.training.schedule import StepPlan
from distexp.worker.compile_cache import use_compile_cache
from distexp.worker.generation import check_has_references, score_answers
from distexp.worker.micro_batch.processes import ModelParts
from distexp.worker.micro_batch.search import find_micro_batch
from distexp.worker.utilization import add_flops


def run_rank(run_dir: Path, events: Events, started: float, *, launched: bool) -> None:
    """Train, and write the result on rank 0.

    Args:
        run_dir: Directory of the run.
        events: Event log of this rank.
        started: Start of this process, in Unix seconds.
        launched: Whether a launcher completes the record. If not, the worker writes the record itself.
    """
    # DeepSpeed and FSDP call deprecated functions of torch thousands of times a run.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Gradients of convolutions are channels-last too, and DDP warns about the strides of axes of length 1.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime", on a CPU
    spec = RunSpec.read(run_dir)
    spec, store = find_micro_batch(spec, run_dir, events, ModelParts(load_data, build_model))
    torch.set_num_threads(spec.config.cluster.cpus_per_worker or 1)
    context = join(spec, run_dir, store)
    place = f"{socket.gethostname()}, {context.device}, rendezvous {rendezvous_address()}"
    print(f"rank {context.rank} of {context.world_size}: {place}", flush=True)
    if not launched:
        attempts.register_manual_attempt(spec.run, run_dir)
    if spec.config.preflight.enabled:
        events.set_phase("preflight")
        run_preflight(spec.config.preflight, context, spec.config.precision.name)
    record = preflight_record(spec, context) if spec.config.preflight.only else train(spec, context, events)
    record.run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    record.run.duration_s = time.time() - started
    record.run.hosts = list(dict.fromkeys(gather_to_all(socket.gethostname())))
    if context.rank == 0:
        write_outcome(record, run_dir, launched=launched)
    write_despite_full_disk(run_dir, lambda: events.set_phase("done"))
    if holds_resources(spec.config):
        gc.collect()
    dist.destroy_process_group()


def holds_resources(config: Config) -> bool:
    """Return whether objects hold processes of loaders or CUDA graphs, which must end before the process group.

    Otherwise a collection would only take time: up to a second after a short run.
    """
    return config.dataset.num_workers > 0 or config.train.compiled != "none"


def write_outcome(record: RunRecord, run_dir: Path, *, launched: bool) -> None:
    """Write the result for the launcher, or the record if there is no launcher."""
    if launched:
        write_despite_full_disk(run_dir, lambda: record.write_result(run_dir))
    else:
        attempts.finalize(record)
        record.write(run_dir)


def preflight_record(spec: RunSpec, context: Context) -> RunRecord:
    """Return the record of a run that only measures the communication."""
    return RunRecord("completed", spec.run, asdict(spec.config), environment=rank_environment(context.device))


def train(spec: RunSpec, context: Context, events: Events) -> RunRecord:
    """Train in the current process group and return the record. One process may train several times."""
    config = spec.config
    if config.train.compile:
        folder = use_compile_cache()
        if context.rank == 0:
            print(
                f"note: the first steps compile, which may take minutes; later runs use the cache {folder}", flush=True
            )
    seed_everything(config.train.seed)
    data = load_data(config, context)
    training, evaluation = make_loaders(config, data, context)
    training.on_batch = evaluation.on_batch = events.advance
    plan = StepPlan(config.train, training.steps_per_epoch)
    logger = MetricsLogger(plan, context, events, watch_slow_ranks=config.measure.slow_ranks)
    watch_out_of_memory(context.device, logger.parts.read_tensors)
    inputs = TrainingInputs(training, evaluation, plan, logger, spec.run.id)
    build = partial(build_model, config, data, context)
    returned = load_trainer(config).train(build, config, context, inputs)
    check_returned(returned, tuple, f"engine._target_={config.engine._target_}: train()")
    model, built = returned
    built.tokenizer, built.attention = data.tokenizer_name, read_attention(model.module)
    if data.task == "causal_lm":
        built.logits, built.loss = describe_head(model.module)
    built.channels_last = read_memory_format(model.module)
    built.compiled, built.image_cache = read_compiled(model.module), describe_cache(data)
    if config.train.activation_budget is not None:
        built.activation_budget = read_activation_budget()
    attempts.record_resume(spec.run, logger.resumed_at or None, logger.changes)
    if config.train.save_model and logger.stopped is None:
        events.set_phase("save")
        save_model(model.weights(), model_factory(config, data), data, context.run_dir, context.rank)
    record = RunRecord(
        status="preempted" if logger.stopped else "completed",
        error=logger.stopped,
        run=spec.run,
        config=asdict(config),
        built=built,
        environment=rank_environment(context.device),
        metrics=logger.finish(),
    )
    add_search(record, context.run_dir)
    if config.train.compiled == "graphs" and context.rank == 0:
        print_graph_skips(record.metrics)
    watched = gather_to_all(logger.allocator.summary())
    record.memory["torch"] = [entry for entry in watched if entry is not None]
    parts = gather_to_all(logger.parts.summary())
    record.memory["parts"] = [entry for entries in parts for entry in entries]
    if context.rank == 0:
        add_flops(record, config, data, logger)
        add_explanation(record)
    if config.train.score_answers and logger.stopped is None:
        add_answers(record, model, evaluation, data.tokenizer, logger=logger, context=context)
    return record


def add_explanation(record: RunRecord) -> None:
    """Add the largest loss of the profiled step, if there is one."""
    try:
        found = explain(record)
    except Exception as error:  # any: the training is finished, and its record matters more
        print_despite_full_disk(f"note: the profiled step has no explanation: {type(error).__name__}: {error}")
        return
    record.metrics.explanation = None if found is None else found.to_json()


def print_graph_skips(metrics: Metrics) -> None:
    """Print how many graphs torch runs without a CUDA graph, which it does without an error."""
    skips = (metrics.compile or {}).get("cuda_graph_skips", 0)
    if skips:
        print(
            f"note: torch recorded no CUDA graph {skips} times, so these launches are not faster. For the reasons set "
            "TORCH_LOGS=cudagraphs in cluster.environment, or use train.compile=model",
            flush=True,
        )


def add_answers(
    record: RunRecord,
    model: EvaluableModel,
    evaluation: ShardedLoader,
    tokenizer: Tokenizer,
    *,
    logger: MetricsLogger,
    context: Context,
) -> None:
    """Add exact match and F1 to the record, and write the answers in the format of SQuAD's script.

    It runs after everything that is timed.
    """
    logger.events.set_phase("eval")
    max_new_tokens = record.config["dataset"]["answer_tokens"]
    # Texts grow by a token at a time, and a compiled model would be compiled again for each length.
    eager = record.config["train"]["compile"] in MODEL_SCOPES
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        found, answers = score_answers(model, evaluation, tokenizer, max_new_tokens, logger.heartbeat.beat)
    record.metrics.exact_match, record.metrics.f1 = found.exact_match, found.f1
    logger.events.emit(exact_match=found.exact_match, f1=found.f1)
    if context.rank == 0:
        write_json(context.run_dir / PREDICTIONS, answers)


def load_data(config: Config, context: Context) -> TaskData:
    """Load the data set. One rank per node builds the cached parts; rank 0 prints the notes."""
    target = config.dataset._target_
    data: TaskData = locate(target)(config.dataset, config.model, config.train.seed)
    check_returned(data, TaskData, f"dataset._target_={target}")
    check_task_data(data, config.model.task, f"dataset._target_={target}")
    if config.dataset.cache in ("cpu", "gpu"):
        data = cache_images(data, config.dataset.cache, context.device)
    if config.dataset.packing:
        data = pack_training_set(data, sequence_length(config.dataset, config.model), config.train.seed)
    if config.dataset.bucketing:
        data = pad_to_batch(data, sequence_length(config.dataset, config.model))
    if config.model.attention in ("sdpa", "flex") and not isinstance(data.collate, TextCollate):
        data = replace(data, collate=RightPadding(data.collate))
    if config.train.logits == "targets":
        data = replace(data, collate=TargetTokens(data.collate, compiled=bool(config.train.compile)))
    if config.train.loss == "chunked":
        data = replace(data, collate=LabelsForHead(data.collate))
    if config.train.score_answers:
        check_has_references(data)
    if context.rank == 0:
        for note in data.notes:
            print(f"note: {note}", flush=True)
    return data


def model_factory(config: Config, data: TaskData) -> Callable[[], nn.Module]:
    """Return a function that makes the configured model on torch's default device."""
    target = config.model._target_
    build = locate(target)

    def build_checked() -> nn.Module:
        model: nn.Module = build(config.model, data.num_classes)
        check_returned(model, nn.Module, f"model._target_={target}")
        if type(model).forward is nn.Module.forward and "forward" not in vars(model):
            raise ConfigError(f"model._target_={target} returned a module without forward(): add it, as in {PAGE}")
        return model

    return build_checked


def build_model(
    config: Config, data: TaskData, context: Context, blueprint_class: type[Blueprint] = Blueprint
) -> Blueprint:
    """Return the model, not distributed, without memory for its weights."""
    blueprint = blueprint_class(
        model_factory(config, data),
        context,
        broadcast=config.fsdp.sync_module_states,
        weights_key=weights_key(config.model, data),
    )
    if config.dataset._target_.startswith("distexp."):
        check_forward_arguments(blueprint.model, MODEL_INPUTS[config.model.task])
    if config.dataset.packing:
        check_packing(blueprint.model)
    if config.train.save_model:
        check_exportable(blueprint.model)
    adapt_head(blueprint.model, config.train)
    transform_blocks(blueprint.model, config)
    return blueprint


def weights_key(model: ModelConfig, data: TaskData) -> str | None:
    """Return what random weights depend on; None: the weights are read, or made by custom code.

    The attention has no weights of its own, so ``kernels=fast`` shares them with ``kernels=reference``.
    """
    if model.init != "random" or not model._target_.startswith("distexp."):
        return None
    return json.dumps([asdict(replace(model, attention="auto")), data.num_classes], sort_keys=True)


def make_loaders(config: Config, data: TaskData, context: Context) -> tuple[ShardedLoader, ShardedLoader]:
    """Return this rank's loaders of the training and the evaluation set."""
    train, place = config.train, (context.rank, context.world_size)
    unit = "rows" if config.dataset.packing else "samples"
    if error := check_samples_per_rank(len(data.train), context.world_size, train.micro_batch, unit=unit):
        raise ConfigError(error)
    shardings = (
        BatchSharding(*place, train.micro_batch, train.gradient_accumulation_steps),
        BatchSharding(*place, train.eval_batch_size or train.micro_batch),
    )
    training, evaluation = (
        ShardedLoader(
            samples,
            data,
            sharding,
            context.device,
            seed=train.seed,
            shuffle=samples is data.train,
            num_workers=config.dataset.num_workers,
            lengths=sample_lengths(samples) if config.dataset.bucketing and samples is data.train else None,
        )
        for samples, sharding in zip((data.train, data.evaluation), shardings, strict=True)
    )
    return training, evaluation


def rank_environment(device: torch.device) -> Environment:
    """Return the environment of this rank, with what only torch knows."""
    on_gpu = device.type == "cuda"
    environment = make_environment(on_gpu=on_gpu, variables=captured_environment())
    if on_gpu:
        gpu = torch.cuda.get_device_properties(device)
        environment.nccl = _nccl_version()
        environment.gpu_name, environment.gpu_total_mib = gpu.name, gpu.total_memory / MIB
    return environment


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))
