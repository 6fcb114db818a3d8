"""What one rank does, from the process group to the record."""

from __future__ import annotations

import gc
import logging
import platform
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from distexp.config import Config, ConfigError
from distexp.config.size_checks import check_samples_per_rank
from distexp.config.targets import locate
from distexp.data.base import TaskData
from distexp.data.shards import BatchSharding, ShardedLoader
from distexp.data.text import TargetLogits
from distexp.data.tokenization import Tokenizer
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, head_address, join
from distexp.engines.base import load_trainer
from distexp.measure.flops import peak_tflops, training_flops
from distexp.models.blueprint import Blueprint
from distexp.models.export import check_exportable, save_model
from distexp.models.introspection import check_supports_logits_to_keep
from distexp.models.transforms import transform
from distexp.preflight.run import run_preflight
from distexp.runs import attempts
from distexp.runs.events import Events
from distexp.runs.record import PREDICTIONS, Environment, RunRecord, write_json
from distexp.runs.spec import RunSpec
from distexp.strategies.base import EvaluableModel
from distexp.system.environment_variables import captured_environment
from distexp.system.hardware import cpu_count
from distexp.system.seeding import seed_everything
from distexp.training.inputs import TrainingInputs
from distexp.training.metrics_logger import MetricsLogger
from distexp.training.schedule import StepPlan
from distexp.worker.generation import check_answerable, score_answers


def run(run_dir: Path, events: Events, started: float) -> None:
    """Joins, builds, trains and, on rank 0, writes the record; ``started`` is the process' start."""
    # DeepSpeed and FSDP call what torch will rename one day, thousands of times a run.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Gradients of convolutions lie as images do, channels last, and DDP tells the axes of length 1 apart.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime", on a CPU
    spec = RunSpec.read(run_dir)
    torch.set_num_threads(spec.config.cluster.cpus_per_worker or 1)
    context = join(spec, run_dir)
    print(f"rank {context.rank}: {socket.gethostname()}, {context.device}, head {head_address()}", flush=True)
    by_hand = attempts.register_manual_attempt(spec.run, run_dir)
    if spec.config.preflight.enabled:
        events.set_phase("preflight")
        run_preflight(spec.config.preflight, context)
    record = measured_only(spec, context) if spec.config.preflight.only else train(spec, context, events)
    record.run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    record.run.duration_s = time.time() - started
    record.run.hosts = list(dict.fromkeys(gather_to_all(socket.gethostname())))
    if by_hand:
        attempts.finalize(record)  # of any other run whoever settles it does, when the agents have told all
    if context.rank == 0:
        record.write(run_dir)
    events.set_phase("done")
    gc.collect()  # the processes of a loader end with it
    dist.destroy_process_group()


def measured_only(spec: RunSpec, context: Context) -> RunRecord:
    """The record of a run that trains nothing."""
    return RunRecord("completed", spec.run, asdict(spec.config), environment=environment(context.device))


def train(spec: RunSpec, context: Context, events: Events) -> RunRecord:
    """One training in a process group that stands; several may follow each other in one process."""
    config = spec.config
    seed_everything(config.train.seed)
    data = load_data(config, context)
    training, evaluation = loaders(config, data, context)
    plan = StepPlan(config.train, training.steps_per_epoch)
    logger = MetricsLogger(plan, context, events)
    inputs = TrainingInputs(training, evaluation, plan, logger, spec.run.id)
    build = partial(build_model, config, data, context)
    model, built = load_trainer(config).train(build, config, context, inputs)
    built.tokenizer = data.tokenizer_name
    attempts.record_resume_step(spec.run, logger.resumed_at or None)
    if config.train.save_model and logger.stopped is None:
        events.set_phase("save")
        save_model(model.weights(), builder(config, data), data, context.run_dir, context.rank)
    record = RunRecord(
        status="preempted" if logger.stopped else "completed",
        error=logger.stopped,
        run=spec.run,
        config=asdict(config),
        built=built,
        environment=environment(context.device),
        metrics=logger.finish(),
    )
    watched = gather_to_all(logger.allocator.summary())
    record.memory["torch"] = [entry for entry in watched if entry is not None]
    add_arithmetic(record, training_flops(config, data), context.world_size)
    if config.train.score_answers and logger.stopped is None:
        add_answers(record, model, evaluation, data.tokenizer, logger=logger, context=context)
    return record


def add_answers(
    record: RunRecord,
    model: EvaluableModel,
    evaluation: ShardedLoader,
    tokenizer: Tokenizer,
    *,
    logger: MetricsLogger,
    context: Context,
) -> None:
    """Exact match and F1, after all that is timed; the answers go to a file that SQuAD's own script reads."""
    logger.events.set_phase("eval")
    most_tokens = record.config["dataset"]["answer_tokens"]
    found, answers = score_answers(model, evaluation, tokenizer, most_tokens, logger.heartbeat.beat)
    record.metrics.exact_match, record.metrics.f1 = found.exact_match, found.f1
    logger.events.emit(exact_match=found.exact_match, f1=found.f1)
    if context.rank == 0:
        write_json(context.run_dir / PREDICTIONS, answers)


def add_arithmetic(record: RunRecord, flops_per_sample: float | None, world_size: int) -> None:
    """TFLOP/s of each device, and that as a share of what it could do (MFU)."""
    metrics, environment = record.metrics, record.environment
    if flops_per_sample is None or metrics.train_samples_per_second is None or environment is None:
        return
    metrics.tflops_per_device = flops_per_sample * metrics.train_samples_per_second / world_size / 1e12
    peak = peak_tflops(environment.gpu_name, record.config["precision"]["name"])
    metrics.mfu = metrics.tflops_per_device / peak if peak else None


def load_data(config: Config, context: Context) -> TaskData:
    """Reads the data set; one rank a node prepares what is cached, and tells what there is to tell."""
    data: TaskData = locate(config.dataset._target_)(config.dataset, config.model, config.train.seed)
    if config.train.logits == "targets":
        data = replace(data, collate=TargetLogits(data.collate))
    if config.train.score_answers:
        check_answerable(data)
    if context.rank == 0:
        for note in data.notes:
            print(f"note: {note}", flush=True)
    return data


def builder(config: Config, data: TaskData) -> Callable[[], nn.Module]:
    """Makes the configured model, on whatever device is torch's default."""
    return partial(locate(config.model._target_), config.model, data.num_classes)


def build_model(config: Config, data: TaskData, context: Context) -> Blueprint:
    """The model, not distributed yet and taking no memory."""
    blueprint = Blueprint(builder(config, data), context, broadcast=config.fsdp.sync_module_states)
    if config.train.save_model:
        check_exportable(blueprint.model)
    if config.train.logits == "targets":
        check_supports_logits_to_keep(blueprint.model)
    transform(blueprint.model, config)
    return blueprint


def loaders(config: Config, data: TaskData, context: Context) -> tuple[ShardedLoader, ShardedLoader]:
    """This rank's shares of the training and the evaluation set."""
    train, place = config.train, (context.rank, context.world_size)
    if error := check_samples_per_rank(len(data.train), context.world_size, train.micro_batch_size):
        raise ConfigError(error)
    shardings = (
        BatchSharding(*place, train.micro_batch_size, train.gradient_accumulation_steps),
        BatchSharding(*place, train.eval_batch_size or train.micro_batch_size),
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
        )
        for samples, sharding in zip((data.train, data.evaluation), shardings, strict=True)
    )
    return training, evaluation


def environment(device: torch.device) -> Environment:
    """The software and the machine of this rank."""
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_properties(device) if on_gpu else None
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        nccl=_nccl_version() if on_gpu else None,
        transformers=_version("transformers"),
        deepspeed=_version("deepspeed"),
        accelerate=_version("accelerate"),
        gpu_name=gpu.name if gpu else None,
        gpu_total_mib=gpu.total_memory / 2**20 if gpu else None,
        cpu_count=cpu_count(),
        hostname=socket.gethostname(),
        variables=captured_environment(),
    )


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
