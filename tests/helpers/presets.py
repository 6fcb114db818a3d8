"""Cells of presets, as the sweeper expands them, and records of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

from distexp.config import Config
from distexp.config.keys import conf_dir, config_groups
from distexp.config.overrides import quote_choice
from distexp.resolve.resources import parameter_count
from distexp.resolve.run_id import run_id
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built, Environment, Predicted, RunInfo
from distexp.strategies.base import load_strategy
from tests.helpers.runs import register_schema_once

AVERAGES = {"average_mib": 18000.0, "mode_mib": 20000.0}


@cache
def cells_of(preset: str, *overrides: str) -> list[list[str]]:
    """Return the overrides of each run that a command line with a preset starts."""
    register_schema_once()
    given = [f"experiment={preset}", *(quote_choice(text, config_groups()) for text in overrides)]
    fixed = [text for text in given if "," not in text]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        composed = compose("config", fixed, return_hydra_config=True)
    # Hydra imports its plugins again while it composes.
    from hydra_plugins.distexp_plugin.sweeper import DistexpSweeper

    sweeper = DistexpSweeper(max_batch_size=None, params=composed.hydra.sweeper.params)
    sweeper.config, sweeper.parser = composed, OverridesParser.create()
    return sweeper.expand(given)


def finished(config: Config, number: int, overrides: Sequence[str] = ()) -> RunRecord:
    """Return the record of a completed run, whose speed grows slightly less than its workers."""
    world = config.cluster.world_size
    parameters = parameter_count(config.model) or 1000
    full = config.fsdp.sharding in ("full_shard", "shard_grad_op")
    mesh = [1, world] if config.strategy.name == "fsdp" and full else [world, 1]
    types = (config.precision.name, config.precision.name, "AdamW", parameters)
    built = Built(config.strategy.name, "native", "X", world, mesh, 0, config.deepspeed.zero_stage, "none", *types)
    metrics = Metrics(
        train_loss=2.5, train_losses=[3.0, 2.5, 2.0], eval_losses=[3.1, 2.6, 2.1], eval_loss=2.1,
        train_accuracies=[0.01, 0.02, 0.03], train_samples_per_second=10.0 * world**0.9 * 1e9 / parameters,
        train_samples_per_second_overall=9.0 * world**0.9, train_runtime=100.0 / world**0.9,
        eval_samples_per_second=40.0, steps_per_epoch=31, total_steps=93,
        step_time_s={"p50": 0.25, "p90": 0.3, "max": 0.4}, communication={"share": 0.2} if config.profile else None,
    )  # fmt: skip
    averages = {f"{steps}{name}": mib for steps in ("", "training_") for name, mib in AVERAGES.items()}
    peaks = {"peak_mib": 20000.0 + number, **averages}
    return RunRecord(
        status="completed",
        run=RunInfo(run_id(config), config.name, number, list(overrides)),
        config=asdict(config),
        built=built,
        environment=Environment("3.11", gpu_name="NVIDIA H200", gpu_total_mib=143771),
        metrics=metrics,
        memory={
            "gpu": [{"node": 0, "index": 0, **peaks}],
            "torch": [{"rank": 0, "peak_allocated_mib": 15000.0, "average_allocated_mib": 12000.0}],
            "cpu": [{"node": 0, **peaks}],
        },
        predicted=Predicted(peak_allocated_mib=14900.0),
        strategy=load_strategy(config).report_traits(config),
        utilization={"gpu": [{"node": 0, "index": 0, "average_pct": 90.0}], "cpu": []},
    )
