"""The record of a finished training."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from distexp.config import Config
from distexp.data.base import TaskData
from distexp.data.image_cache import describe_cache
from distexp.data.loader import ShardedLoader
from distexp.data.tokenization import Tokenizer
from distexp.distributed.context import Context
from distexp.models.dropout import largest_dropout
from distexp.models.head import describe_head
from distexp.models.introspection import read_attention
from distexp.models.memory_format import read_memory_format
from distexp.models.transforms import MODEL_SCOPES, read_compiled
from distexp.runs.environment import make_environment
from distexp.runs.json_files import write_json
from distexp.runs.metrics import Metrics
from distexp.runs.micro_batch import add_search
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built, Environment
from distexp.runs.run_dir import PREDICTIONS
from distexp.runs.spec import RunSpec
from distexp.strategies.base import EvaluableModel, load_strategy
from distexp.system.environment_variables import captured_environment
from distexp.system.torch_internals.compilation import read_activation_budget
from distexp.system.units import MIB
from distexp.training.metrics_logger import MetricsLogger
from distexp.worker.generation import score_answers
from distexp.worker.utilization import add_flops


def complete_built(built: Built, config: Config, data: TaskData, module: nn.Module) -> None:
    """Add the fields that follow from model and data. The strategy has filled in its own."""
    built.tokenizer, built.attention = data.tokenizer_name, read_attention(module)
    built.dropout = largest_dropout(module)
    if data.task == "causal_lm":
        built.logits, built.loss = describe_head(module)
    built.channels_last, built.compiled = read_memory_format(module), read_compiled(module)
    built.image_cache = describe_cache(data)
    if config.train.activation_budget is not None:
        built.activation_budget = read_activation_budget()


def make_record(spec: RunSpec, built: Built, data: TaskData, context: Context, logger: MetricsLogger) -> RunRecord:
    """Return the record of a training that has ended. All ranks must call it, and only that of rank 0 is complete."""
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
    add_search(record, context.run_dir)
    if config.train.compiled == "graphs" and context.rank == 0:
        print_graph_skips(record.metrics)
    record.memory |= logger.memory
    if context.rank == 0:
        add_flops(record, config, data, logger)
    return record


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
