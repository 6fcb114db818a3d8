"""One rank of a run, from the process group to the result."""

import gc
import logging
import os
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
from torch import nn

from distexp.config import WHOLE_MODEL, Config, custom_code
from distexp.config.tasks import task_of
from distexp.data import image_cache
from distexp.data.base import TaskData
from distexp.data.tokenization import Tokenizer
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, join
from distexp.engines.base import load_trainer
from distexp.exceptions import text_of
from distexp.hardware.facts import peak_tflops
from distexp.measure.flops import training_flops
from distexp.models import blueprint, dropout, head, hf, transforms
from distexp.preflight.run import run_preflight, stored_ceiling
from distexp.runs import attempts, step_files, texts
from distexp.runs.events import Events
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord, RunSpec
from distexp.runs.record_sections import Built, Environment, make_environment
from distexp.runs.run_dir import PREDICTIONS
from distexp.strategies.base import EvaluableModel, load_strategy
from distexp.system import environment_variables, files, seeding, units
from distexp.system.torch_internals.compilation import read_activation_budget
from distexp.training import build, generation, watchers
from distexp.training.inputs import StepPlan, TrainingInputs
from distexp.training.metrics_logger import MetricsLogger
from distexp.worker import compile_cache, compile_trial, size_search

# Before the models are imported, and with them torchao 0.18, about one of whose classes torch 2.13 warns.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def run_rank(run_dir: Path, events: Events, started: float, *, launched: bool) -> None:
    """Train, and write the result on rank 0: for the launcher if there is one, otherwise as the record itself."""
    silence_libraries()
    spec = RunSpec.read(run_dir)
    spec, connection = compile_trial.choose_compile(spec, run_dir, events)
    spec, store = size_search.find_micro_batch(spec, run_dir, events, connection)
    torch.set_num_threads(spec.config.cluster.cpus_per_worker or 1)
    context = join(spec, run_dir, store, overhead_mib=load_strategy(spec.config).total_overhead_mib(spec.config))
    rank, address = f"rank {context.rank} of {context.world_size}", "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
    print(f"{rank}: {socket.gethostname()}, {context.device}, rendezvous {address}", flush=True)
    if not launched:
        attempts.register_manual_attempt(spec.run, run_dir)
    if spec.config.preflight.enabled:
        events.set_phase("preflight")
        run_preflight(spec.config.preflight, context, spec.config.precision.outside_products)
    if spec.config.is_preflight:  # The run only measures the communication.
        record = RunRecord("completed", spec.run, asdict(spec.config), environment=rank_environment(context.device))
    else:
        record = train(spec, context, events)
    record.run.started_at = datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
    record.run.duration_s = time.time() - started
    record.run.hosts = list(dict.fromkeys(gather_to_all(socket.gethostname())))
    if context.rank == 0:
        write_outcome(record, run_dir, launched=launched)
    texts.write_despite_full_disk(run_dir, lambda: events.set_phase("done"))
    # Objects may hold processes of loaders or CUDA graphs, which must end before the process group. Otherwise a
    # collection would only take time: up to a second after a short run.
    if spec.config.dataset.num_workers > 0 or spec.config.train.compiled != "none":
        gc.collect()
    dist.destroy_process_group()


def silence_libraries() -> None:
    """Hide warnings that concern no user of distexp."""
    # DeepSpeed and FSDP call deprecated functions of torch thousands of times a run.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # Gradients of convolutions are channels-last too, and DDP warns about the strides of axes of length 1.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    # Each cycle of the profiler is one step. In fp32 nothing is rounded to TF32, by design.
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime", on a CPU


def write_outcome(record: RunRecord, run_dir: Path, *, launched: bool) -> None:
    """Write the result for the launcher, or the record if there is no launcher."""
    if launched:
        texts.write_despite_full_disk(run_dir, lambda: record.write_result(run_dir))
    else:
        attempts.record_attempt_end(record)
        record.write(run_dir)


def train(spec: RunSpec, context: Context, events: Events) -> RunRecord:
    """Train in the current process group and return the record. One process may train several times."""
    config = spec.config
    if config.train.compile or (config.train.optimizer == "adamw8bit" and context.device.type == "cuda"):
        folder = compile_cache.use_compile_cache()
        if context.rank == 0:
            note = "the first steps compile, which may take minutes; later runs use the cache"
            print(f"note: {note} {folder}", flush=True)
    if config.precision.name == "float8" and config.train.compiled == "none" and context.rank == 0:
        print(
            "note: precision=float8 is slow without compilation: add kernels=fast, or train.compile=blocks", flush=True
        )
    seeding.seed_everything(config.train.seed)
    events.emit(preparing="data")
    data = build.load_data(config, context)
    inputs = make_inputs(spec, data, context, events)
    logger = inputs.logger
    events.emit(preparing="model")
    model, built = run_trainer(config, data, inputs)
    complete_built(built, config, data, model.module)
    attempts.record_resume(spec.run, logger.resumed_at or None, logger.changes)
    is_finished = logger.stopped is None
    if config.train.save_model and is_finished:
        events.set_phase("save")
        hf.save_model(model.weights(), build.model_factory(config, data), data, context.run_dir, context.rank)
    record = make_record(spec, built, data, context, logger)
    if config.train.score_answers and is_finished:
        add_answers(record, model, inputs, data.tokenizer)
    return record


def make_inputs(spec: RunSpec, data: TaskData, context: Context, events: Events) -> TrainingInputs:
    """Return this rank's loaders, the plan of the steps, and the logger of the metrics."""
    training, evaluation = build.make_loaders(spec.config, data, context)
    training.on_batch = evaluation.on_batch = events.advance
    plan = StepPlan(spec.config.train, training.steps_per_epoch)
    built = watchers.build_watchers(plan, spec.config.measure, context)
    logger = MetricsLogger(plan, context, events, built, scales_loss=spec.config.precision.name == "fp16")
    return TrainingInputs(training, evaluation, plan, logger, spec.run.id)


def run_trainer(config: Config, data: TaskData, inputs: TrainingInputs) -> tuple[EvaluableModel, Built]:
    """Train; return the model and what was built. Raises ConfigError if a custom trainer returned something else."""
    context = inputs.logger.context
    make_model = partial(build.build_model, config, data, context)
    try:
        with transforms.explained_compilation(config.train.compiled):
            returned = load_trainer(config).train(make_model, config, context, inputs)
    except BaseException as error:
        with suppress(Exception):  # A broken device must not hide the error.
            inputs.logger.watchers.stop()
        if isinstance(error, transforms.CompilationError) and config.kernels.compile is not None:
            raise compile_trial.later_failure(config, error) from error
        raise
    custom_code.check_returned(returned, tuple, f"engine._target_={config.engine._target_}: train()")
    return returned


def complete_built(built: Built, config: Config, data: TaskData, module: nn.Module) -> None:
    """Add the fields that follow from model and data. The strategy has filled in its own."""
    built.tokenizer, built.attention = data.tokenizer_name, blueprint.read_attention(module)
    built.dropout, built.cast_from = dropout.largest_dropout(module), blueprint.read_cast(module)
    if task_of(data.task).is_causal:
        built.logits, built.loss = head.describe_head(module)
        built.loss = "own" if config.train.loss == "own" else built.loss
    built.channels_last, built.compiled = transforms.read_memory_format(module), transforms.read_compiled(module)
    built.image_cache = image_cache.describe_cache(data)
    if config.train.activation_budget is not None:
        built.activation_budget = read_activation_budget()


def make_record(spec: RunSpec, built: Built, data: TaskData, context: Context, logger: MetricsLogger) -> RunRecord:
    """Return the record of a training that has ended; a collective. Only that of rank 0 is complete."""
    config = spec.config
    record = RunRecord(
        status="preempted" if logger.stopped else "completed",
        error=logger.stopped,
        run=spec.run,
        config=asdict(config),
        built=built,
        environment=rank_environment(context.device),
        metrics=logger.finish(),
        strategy=load_strategy(config).report_traits(config),
    )
    step_files.add_search(record, context.run_dir)
    if config.train.compiled == "graphs" and context.rank == 0:
        print_graph_skips(record.metrics)
    record.memory |= logger.memory
    if context.rank == 0:
        add_flops(record, config, data, logger)
    return record


def print_graph_skips(metrics: Metrics) -> None:
    """Print how many graphs torch runs without a CUDA graph, which it does without an error."""
    if skips := (metrics.compile or {}).get("cuda_graph_skips", 0):
        print(
            f"note: torch recorded no CUDA graph {skips} times, so these launches are not faster. For the reasons set "
            "TORCH_LOGS=cudagraphs in cluster.environment, or use train.compile=model",
            flush=True,
        )


def add_answers(record: RunRecord, model: EvaluableModel, inputs: TrainingInputs, tokenizer: Tokenizer) -> None:
    """Add exact match and F1, and write the answers in SQuAD's format. Call it after everything that is timed."""
    logger = inputs.logger
    logger.events.set_phase("eval")
    longest = record.config["dataset"]["answer_tokens"]
    # Texts grow by a token at a time, and a compiled model would be compiled again for each length.
    eager = record.config["train"]["compile"] in WHOLE_MODEL
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        found, answers = generation.score_answers(model, inputs.evaluation, tokenizer, longest, logger.heartbeat.beat)
    record.metrics.exact_match, record.metrics.f1 = found.exact_match, found.f1
    logger.events.emit(exact_match=found.exact_match, f1=found.f1)
    if logger.context.rank == 0:
        files.write_json(logger.context.run_dir / PREDICTIONS, answers)


def rank_environment(device: torch.device) -> Environment:
    """Return the environment of this rank, with what only torch knows."""
    on_gpu = device.type == "cuda"
    environment = make_environment(on_gpu=on_gpu, variables=environment_variables.captured_environment())
    environment.arithmetic = describe_arithmetic(on_gpu=on_gpu)
    if on_gpu:
        gpu = torch.cuda.get_device_properties(device)
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        environment.nccl = ".".join(map(str, version))
        environment.gpu_name, environment.gpu_total_mib = gpu.name, gpu.total_memory / units.MIB
    return environment


def describe_arithmetic(*, on_gpu: bool) -> str:
    """Return how torch computes here. A variable, a library or custom code may have set it."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # Only that of one library is set, by the newer flags of torch.
        precision = (torch.backends.cuda if on_gpu else torch.backends.mkldnn).matmul.fp32_precision
    convolutions = torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]
    found = [
        f"fp32 {precision}",
        environment_variables.TF32_CONVOLUTIONS if on_gpu and convolutions == "tf32" else "",
        "fp16 sums" if on_gpu and torch.backends.cuda.matmul.allow_fp16_accumulation else "",
        "" if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "deterministic" if torch.are_deterministic_algorithms_enabled() else "",
        "det. cuDNN" if on_gpu and torch.backends.cudnn.deterministic else "",
    ]
    return ", ".join(filter(None, found))


def add_flops(record: RunRecord, config: Config, data: TaskData, logger: MetricsLogger) -> None:
    """Add FLOPs and utilization on rank 0, unless a custom model cannot run without memory; then print why."""
    metrics, speed = record.metrics, record.metrics.train_samples_per_second
    if speed is None:
        return
    try:
        flops = training_flops(config, data, logger.measured_work, logger.context.device)
    except Exception as error:  # any: the code of the model raises it, and the training is finished
        print(f"note: the FLOPs of the model are not counted: {type(error).__name__}: {text_of(error)}", flush=True)
        return
    precision = config.precision.outside_products  # There is no ceiling of float8: its utilization is that of bf16.
    per_sample, world_size = 1e12 * logger.counts.measured_samples, logger.context.world_size
    metrics.model_tflops_per_sample = flops.model / per_sample
    metrics.executed_tflops_per_sample = flops.executed / per_sample
    metrics.tflops_per_device = metrics.model_tflops_per_sample * speed / world_size
    metrics.executed_tflops_per_device = metrics.executed_tflops_per_sample * speed / world_size
    metrics.matrix_ceiling_tflops = stored_ceiling(logger.context.device, precision)
    gpu_name = record.environment.gpu_name if record.environment else None
    if peak := peak_tflops(gpu_name, precision):
        metrics.mfu = metrics.tflops_per_device / peak
        metrics.hfu = metrics.executed_tflops_per_device / peak
    if ceiling := metrics.matrix_ceiling_tflops:
        metrics.mfu_of_ceiling = metrics.tflops_per_device / ceiling
        metrics.hfu_of_ceiling = metrics.executed_tflops_per_device / ceiling
