"""One rank of a run, from the process group to the result."""

from __future__ import annotations

import gc
import logging
import socket
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from distexp.config import Config
from distexp.config.custom_code import check_returned
from distexp.data.base import TaskData
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, join, rendezvous_address
from distexp.engines.base import load_trainer
from distexp.models.export import save_model
from distexp.preflight.run import run_preflight
from distexp.runs import attempts
from distexp.runs.events import Events
from distexp.runs.full_disk import write_despite_full_disk
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built
from distexp.runs.spec import RunSpec
from distexp.strategies.base import EvaluableModel, load_strategy
from distexp.system.seeding import seed_everything
from distexp.training.inputs import TrainingInputs
from distexp.training.metrics_logger import MetricsLogger
from distexp.training.schedule import StepPlan
from distexp.training.watchers import build_watchers
from distexp.worker.build import build_model, load_data, make_loaders, model_factory
from distexp.worker.compile_cache import use_compile_cache
from distexp.worker.micro_batch.processes import ModelParts
from distexp.worker.micro_batch.search import find_micro_batch
from distexp.worker.training_record import add_answers, complete_built, make_record, rank_environment


def run_rank(run_dir: Path, events: Events, started: float, *, launched: bool) -> None:
    """Train, and write the result on rank 0.

    Args:
        run_dir: Directory of the run.
        events: Event log of this rank.
        started: Start of this process, in Unix seconds.
        launched: Whether a launcher completes the record. If not, the worker writes the record itself.
    """
    silence_libraries()
    spec = RunSpec.read(run_dir)
    spec, store = find_micro_batch(spec, run_dir, events, ModelParts(load_data, build_model))
    torch.set_num_threads(spec.config.cluster.cpus_per_worker or 1)
    context = join(spec, run_dir, store, overhead_mib=load_strategy(spec.config).total_overhead_mib(spec.config))
    place = f"{socket.gethostname()}, {context.device}, rendezvous {rendezvous_address()}"
    print(f"rank {context.rank} of {context.world_size}: {place}", flush=True)
    if not launched:
        attempts.register_manual_attempt(spec.run, run_dir)
    if spec.config.preflight.enabled:
        events.set_phase("preflight")
        run_preflight(spec.config.preflight, context, spec.config.precision.name)
    record = preflight_record(spec, context) if spec.config.is_preflight else train(spec, context, events)
    record.run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    record.run.duration_s = time.time() - started
    record.run.hosts = list(dict.fromkeys(gather_to_all(socket.gethostname())))
    if context.rank == 0:
        write_outcome(record, run_dir, launched=launched)
    write_despite_full_disk(run_dir, lambda: events.set_phase("done"))
    if holds_resources(spec.config):
        gc.collect()
    dist.destroy_process_group()


def silence_libraries() -> None:
    """Hide warnings that concern no user of distexp."""
    # DeepSpeed and FSDP call deprecated functions of torch thousands of times a run.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Gradients of convolutions are channels-last too, and DDP warns about the strides of axes of length 1.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime", on a CPU


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
        prepare_compilation(context)
    seed_everything(config.train.seed)
    data = load_data(config, context)
    inputs = make_inputs(spec, data, context, events)
    logger = inputs.logger
    model, built = run_trainer(config, data, context, inputs)
    complete_built(built, config, data, model.module)
    attempts.record_resume(spec.run, logger.resumed_at or None, logger.changes)
    is_finished = logger.stopped is None
    if config.train.save_model and is_finished:
        events.set_phase("save")
        save_model(model.weights(), model_factory(config, data), data, context.run_dir, context.rank)
    record = make_record(spec, built, data, context, logger)
    if config.train.score_answers and is_finished:
        add_answers(record, model, inputs.evaluation, data.tokenizer, logger=logger, context=context)
    return record


def prepare_compilation(context: Context) -> None:
    """Set the cache of ``torch.compile``; rank 0 prints where it is."""
    folder = use_compile_cache()
    if context.rank == 0:
        print(f"note: the first steps compile, which may take minutes; later runs use the cache {folder}", flush=True)


def make_inputs(spec: RunSpec, data: TaskData, context: Context, events: Events) -> TrainingInputs:
    """Return this rank's loaders, the plan of the steps, and the logger of the metrics."""
    training, evaluation = make_loaders(spec.config, data, context)
    training.on_batch = evaluation.on_batch = events.advance
    plan = StepPlan(spec.config.train, training.steps_per_epoch)
    logger = MetricsLogger(plan, context, events, build_watchers(plan, spec.config.measure, context))
    return TrainingInputs(training, evaluation, plan, logger, spec.run.id)


def run_trainer(
    config: Config, data: TaskData, context: Context, inputs: TrainingInputs
) -> tuple[EvaluableModel, Built]:
    """Train with the trainer of the engine; return the trained model and what was built.

    Raises:
        ConfigError: a custom trainer returned something else.
    """
    build = partial(build_model, config, data, context)
    try:
        returned = load_trainer(config).train(build, config, context, inputs)
    except BaseException:
        with suppress(Exception):  # A broken device must not hide the error.
            inputs.logger.watchers.stop()
        raise
    check_returned(returned, tuple, f"engine._target_={config.engine._target_}: train()")
    return returned
