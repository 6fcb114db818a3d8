"""Records of runs that never ran."""

from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from distexp.config import Config
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built, Environment, RunError, RunInfo, StrategyTraits
from distexp.strategies.base import recorded_strategy, shipped_strategies

GPU = "NVIDIA H200"


def config(**settings: Any) -> dict[str, Any]:
    """Return a resolved configuration.

    Args:
        settings: ``strategy`` by name, and keys such as ``train__seed`` for ``train.seed``.
    """
    content = asdict(Config())
    content["model"].update(name="bloom_tiny", task="causal_lm", _target_="distexp.models.bloom.build")
    content["dataset"].update(name="squad_sample", task="causal_lm", _target_="distexp.data.squad_sample.load")
    content["cluster"].update(device="cpu", workers_per_node=2, cpus_per_worker=1)
    settings.setdefault("strategy", "ddp")
    for key, value in settings.items():
        if key == "strategy":
            kind = shipped_strategies().get(value)
            target = f"{kind.__module__}.{kind.__qualname__}" if kind else f"distexp.strategies.{value}.X"
            content["strategy"].update(name=value, _target_=target)
        else:
            section, name = key.split("__")
            content[section][name] = value
    if settings["strategy"] == "fsdp":
        content["fsdp"]["sharding"] = content["fsdp"]["sharding"] or "full_shard"
    if settings["strategy"] == "deepspeed" and content["deepspeed"]["zero_stage"] is None:
        content["deepspeed"]["zero_stage"] = 2
    return content


def strategy_traits(content: dict[str, Any]) -> StrategyTraits | None:
    """Return what a run writes into its record about a strategy of distexp; None for another one."""
    strategy = recorded_strategy(content)
    sections = {name: SimpleNamespace(**content[name]) for name in ("strategy", "fsdp", "deepspeed")}
    return strategy and strategy.report_traits(cast(Config, SimpleNamespace(**sections)))


def record(
    number: int,
    *,
    status: str = "completed",
    speed: float | None = 100.0,
    loss: float | None = 2.0,
    peak: float | None = None,
    overrides: tuple[str, ...] = (),
    run_id: str | None = None,
    error: RunError | None = None,
    **settings: Any,
) -> RunRecord:
    """Return a record; ``speed`` is in samples/s, ``peak`` in MiB of GPU memory. A run with a peak is on GPUs."""
    if peak is not None:
        settings.setdefault("cluster__device", "cuda")
    chosen = config(**settings)
    world = chosen["cluster"]["nodes"] * (chosen["cluster"]["workers_per_node"] or 1)
    done = status == "completed"
    metrics = Metrics(train_loss=loss, eval_loss=loss, train_samples_per_second=speed, train_runtime=3.0)
    name = chosen["strategy"]["name"]
    types = ("float32", "float32", "AdamW", 1000)
    is_sharded = name in ("fsdp", "deepspeed")
    stage = chosen["deepspeed"]["zero_stage"] if name == "deepspeed" else None
    mesh = [1, world] if is_sharded else [world, 1]
    built = Built(name, "native", "X", world, mesh, int(is_sharded), stage, "none", *types)
    memory: dict[str, Any] = {"gpu": [], "torch": [], "cpu": []}
    if peak is not None:
        memory["gpu"] = [
            {
                "node": 0,
                "index": index,
                "peak_mib": peak - index,
                "average_mib": peak / 2,
                "mode_mib": peak / 3,
                "training_average_mib": peak / 2,
                "training_mode_mib": peak / 3,
            }
            for index in range(2)
        ]
    return RunRecord(
        status=status,
        run=RunInfo(run_id or f"id{number}-{sorted(settings.items())}", "distexp", number, list(overrides)),
        config=chosen,
        error=error,
        built=built if done else None,
        environment=Environment("3.11", gpu_name=GPU if peak else None, gpu_total_mib=143771 if peak else None),
        metrics=metrics if done else Metrics(),
        memory=memory,
        strategy=strategy_traits(chosen),
    )


def add_parts(run: RunRecord, *, parameters: float, activations: float | None = 2.0, ranks: int = 2) -> RunRecord:
    """Add the parts of a worker's memory, in MiB; rank 0 has 1 % more. Return the record."""
    run.memory["parts"] = [
        {
            "rank": rank, "phase": "train", "parameters_mib": parameters * scale, "gradients_mib": parameters * scale,
            "optimizer_states_mib": 2 * parameters * scale, "activations_mib": activations,
        }
        for rank, scale in enumerate([1.01, *[1.0] * (ranks - 1)])
    ]  # fmt: skip
    return run


def invalid(number: int, *messages: str, **settings: Any) -> RunRecord:
    """Return the record of an invalid cell, which was never resolved."""
    error = RunError("ConfigError", " | ".join(messages), errors=list(messages))
    refused = record(number, status="invalid", error=error, run_id="invalid", **settings)
    refused.config["cluster"].update(device="auto", workers_per_node=None, cpus_per_worker=None)
    return refused


def write(sweep: Path, *records: RunRecord) -> Path:
    """Write records as a sweep does. Return its directory."""
    for written in records:
        directory = sweep / str(written.run.number)
        directory.mkdir(parents=True)
        copy.deepcopy(written).write(directory)
    return sweep
