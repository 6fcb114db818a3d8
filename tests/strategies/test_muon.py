"""Muon with every strategy that gives it whole matrices: losses, checkpoints, memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.models import gpt
from distexp.plan.estimate import make_estimate
from distexp.runs.record import RunRecord
from distexp.strategies.optimizer import add_missing_states, build_optimizer
from distexp.system.units import MIB
from tests.helpers.grid import read_lines, run_grid
from tests.helpers.runs import HELPERS, resolve_cell
from tests.strategies.test_adapters import allocated_peak, alone

MUON = ("model=gpt_tiny", "train.optimizer=muon")
COMMON = (*MUON, "model.ff_dim=90", "train.max_steps=6", "dataset.train_size=60", "dataset.eval_size=8")
"""Four workers have unequal shards of matrices with 90 rows."""
CELLS = {
    "ddp": ("strategy=ddp", "train.activation_checkpointing=true"),
    "full_shard": ("sharding=full_shard", "train.checkpoint_every=3"),
    "units": ("sharding=shard_grad_op", "fsdp.blocks_per_unit=2"),
    "hybrid_shard": ("sharding=hybrid_shard", "fsdp.replicas=2"),
    "adapters": ("sharding=full_shard", "adapter=lora"),
}
SCRIPT = HELPERS / "many_runs.py"


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
def test_losses_are_those_of_single_and_checkpoints_fit_other_workers(tmp_path: Path) -> None:
    four = run_grid(SCRIPT, tmp_path / "4", 4, {name: (*COMMON, *own) for name, own in CELLS.items()})
    resumed = ("strategy=single", f"train.resume={four / 'full_shard' / 'checkpoints' / 'step-00000003'}")
    single = {"single": ("strategy=single",), "resumed": resumed, "adapters": ("strategy=single", "adapter=lora")}
    one = run_grid(SCRIPT, tmp_path / "1", 1, {name: (*COMMON, *own) for name, own in single.items()})
    expected = losses_of(one / "single")
    assert expected[0] - expected[-1] > 0.1
    for name in CELLS:
        reference = losses_of(one / "adapters") if name == "adapters" else expected
        assert losses_of(four / name) == pytest.approx(reference, rel=0, abs=2e-5), name
        built = RunRecord.read(four / name / "record.json").built
        assert built is not None
        assert built.optimizer == "MuonAdamW"
    assert losses_of(one / "resumed")[-3:] == pytest.approx(expected[-3:], rel=0, abs=2e-5)


def test_muon_updates_the_matrices_of_blocks_and_adamw_the_others() -> None:
    config = resolve_cell(*MUON, "strategy=single", "train.weight_decay=0.1")
    model = gpt.build(config.model, 1024)
    optimizer = build_optimizer(model, config.train, fused=False)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    model.get_submodule("norm").weight.grad = None
    optimizer.step()
    add_missing_states(optimizer)
    for name, weight in model.named_parameters():
        state: Any = optimizer.state[weight]
        is_hidden = name.startswith("blocks.") and weight.dim() == 2
        assert set(state) == ({"momentum_buffer"} if is_hidden else {"step", "exp_avg", "exp_avg_sq"}), name
        if is_hidden:  # Each singular value of the update is that of entries as large as the learning rate.
            rate = float(optimizer.param_groups[0]["lr"])
            update = (1 - 0.1 * rate) * before[name] - weight.detach()
            singular = torch.linalg.svdvals(update) / (0.2 * rate * max(weight.shape) ** 0.5)
            assert 0.6 < singular.quantile(0.1) <= singular.max() < 1.3, name


def test_the_predicted_peak_is_that_of_the_allocator(tmp_path: Path) -> None:
    size = ("model.hidden_size=256", "model.ff_dim=1024", "dataset.max_length=64")
    config = resolve_cell(*MUON, "dataset=synthetic", "cluster.device=cpu", "strategy=single", *size)
    predicted = make_estimate(config).peak_allocated_mib
    assert predicted == pytest.approx(allocated_peak(config, alone(tmp_path)) / MIB, rel=0.02)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("zero_stage=1",),
            r"muon needs whole matrices, which the optimizer does not get from strategy=deepspeed",
        ),
        (("strategy=ddp", "engine=hf_trainer"), r"does not get from engine=hf_trainer: use engine=native, or train.op"),
        (("sharding=full_shard", "offload=true"), r"muon is not supported with offload=true, because its matrix prod"),
        (("strategy=ddp", "command=verify"), r"muon cannot be compared weight by weight.*: add train.optimizer=adamw"),
    ],
)
def test_what_cannot_use_muon_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*MUON, "cluster.device=cpu", *overrides)


def test_a_model_without_blocks_is_refused() -> None:
    config = resolve_cell(*MUON, "strategy=single")
    with pytest.raises(ConfigError, match=r"muon updates the matrices of repeated blocks, but Linear has none: use"):
        build_optimizer(nn.Linear(3, 2), config.train, fused=False)
