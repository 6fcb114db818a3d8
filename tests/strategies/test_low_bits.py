"""AdamW with states of 8 bits, and activations on the CPU: losses, checkpoints, memory, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distexp.config import ConfigError
from distexp.plan.estimate import make_estimate
from distexp.plan.replay import host_peak
from distexp.plan.trace.tracing import trace_step
from distexp.runs.memory_trace import tensor_entries
from distexp.runs.record import RunRecord
from distexp.strategies import low_bits
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB
from distexp.training.build import build_model, load_data, make_loaders
from distexp.training.loop import train_step
from tests.helpers.grid import read_lines, run_grid
from tests.helpers.runs import HELPERS, resolve_cell
from tests.strategies.test_adapters import allocated_peak, alone

GPT = ("model=gpt_tiny", "train.max_steps=6", "dataset.train_size=60", "dataset.eval_size=8")
WIDE = (*GPT, "model.hidden_size=128")  # A quarter of each matrix has at least 4,096 values.
EIGHT_BITS = "train.optimizer=adamw8bit"
OFFLOAD = "train.activation_checkpointing=offload"
FLOAT8 = "precision=float8"
CELLS = {
    "ddp": ("strategy=ddp", EIGHT_BITS, OFFLOAD),
    "full_shard": ("sharding=full_shard", EIGHT_BITS, "train.checkpoint_every=3"),
    "hybrid_shard": ("sharding=hybrid_shard", "fsdp.replicas=2", EIGHT_BITS, OFFLOAD),
    "adapters": ("sharding=full_shard", "adapter=lora", EIGHT_BITS),
    "offloaded": ("sharding=full_shard", OFFLOAD),
}
SINGLE = {
    "ddp": ("strategy=single", EIGHT_BITS),
    "adapters": ("strategy=single", "adapter=lora", EIGHT_BITS),
    "offloaded": ("strategy=single",),
}
REFERENCES = {"full_shard": "ddp", "hybrid_shard": "ddp"}
SCRIPT = HELPERS / "many_runs.py"


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]


def optimizer_states_mib(folder: Path) -> float:
    record = RunRecord.read(folder / "record.json")
    assert record.metrics is not None
    return float(tensor_entries(record.memory)[0]["optimizer_states_mib"])


@pytest.mark.slow
def test_losses_are_those_of_single_and_a_checkpoint_continues(tmp_path: Path) -> None:
    four = run_grid(SCRIPT, tmp_path / "4", 4, {name: (*WIDE, *own) for name, own in CELLS.items()})
    checkpoint = four / "full_shard" / "checkpoints" / "step-00000003"
    resumed = {"resumed": (*WIDE, *CELLS["full_shard"], f"train.resume={checkpoint}")}
    resumed_in = run_grid(SCRIPT, tmp_path / "resumed", 4, resumed) / "resumed"
    one = run_grid(SCRIPT, tmp_path / "1", 1, {name: (*WIDE, *own) for name, own in SINGLE.items()})
    for name in CELLS:
        expected = losses_of(one / REFERENCES.get(name, name))
        # Each shard has whole blocks of 256 values, so that its states are rounded as those of one worker.
        assert losses_of(four / name) == pytest.approx(expected, rel=0, abs=1e-5), name
    assert losses_of(one / "ddp") != pytest.approx(losses_of(one / "offloaded"), rel=0, abs=1e-5)
    assert losses_of(resumed_in)[-3:] == losses_of(four / "full_shard")[-3:]
    # Two bytes for a weight in place of eight. Small tensors have more.
    assert optimizer_states_mib(one / "ddp") < 0.3 * optimizer_states_mib(one / "offloaded")


def test_the_predicted_peak_is_that_of_the_allocator(tmp_path: Path) -> None:
    size = ("model.hidden_size=256", "model.ff_dim=1024", "dataset.max_length=64")
    config = resolve_cell(*GPT, EIGHT_BITS, "dataset=synthetic", "cluster.device=cpu", "strategy=single", *size)
    predicted = make_estimate(config).peak_allocated_mib
    assert predicted == pytest.approx(allocated_peak(config, alone(tmp_path)) / MIB, rel=0.02)


def test_a_gpu_keeps_two_bytes_per_weight_and_the_host_the_inputs_of_blocks() -> None:
    size = ("model.hidden_size=256", "model.num_layers=6", "dataset.max_length=96", "train.micro_batch_size=8")
    base = (*GPT, "dataset=synthetic", "cluster.device=cuda", "command=plan", "strategy=single", *size)
    plain, small = (make_estimate(resolve_cell(*base, *own)) for own in ((), (EIGHT_BITS,)))
    assert small.parts["optimizer_states"] == pytest.approx(0.26 * plain.parts["optimizer_states"], rel=0.03)
    assert resolve_cell(*base, OFFLOAD, "kernels=fast").train.compile == "blocks"  # and not the whole model
    moved = trace_step(resolve_cell(*base, OFFLOAD))
    # Pages of the host are locked in powers of two: a block has 8 rows of 96 tokens of 1,024 bytes.
    assert host_peak(moved.events) == 6 * MIB


def test_linear_layers_of_blocks_multiply_in_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is emulated: the products are rounded as in float8."""
    losses = {}
    for precision in ("bf16", "float8"):
        config = resolve_cell(*GPT, "dataset=synthetic", "cluster.device=cpu", "strategy=single", "precision=bf16")
        config.precision.name = precision
        monkeypatch.setattr(low_bits, "EMULATE", True)
        context = alone(tmp_path / precision)
        data = load_data(config, context)
        model: Any = load_strategy(config).setup(build_model(config, data, context), config, context)
        step = next(iter(make_loaders(config, data, context)[0].iter_steps(0)))
        losses[precision] = []
        for _ in range(8):
            losses[precision].append(float(train_step(model, step)[0]))
            model.step(5e-3)
        kinds = {
            name: type(part).__name__ for name, part in model.module.named_modules() if isinstance(part, nn.Linear)
        }
        quantized = {name for name, kind in kinds.items() if kind == "Float8Linear"}
        assert quantized == ({name for name in kinds if name.startswith("blocks.")} if precision == "float8" else set())
        assert {weight.dtype for weight in model.module.parameters()} == {torch.float32}
    assert losses["float8"] != losses["bf16"]
    assert losses["float8"] == pytest.approx(losses["bf16"], rel=0.05)
    assert losses["float8"][-1] < 0.9 * losses["float8"][0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((EIGHT_BITS, "zero_stage=1"), r"not supported by strategy=deepspeed, which computes .*: use strategy=ddp"),
        ((EIGHT_BITS, "strategy=ddp", "engine=hf_trainer"), r"adamw8bit is not supported by engine=hf_trainer: use"),
        ((EIGHT_BITS, "sharding=full_shard", "offload=true"), r"is not supported with offload=true: leave that out"),
        ((EIGHT_BITS, "strategy=ddp", "command=verify"), r"cannot be compared weight by weight.*: add train.optim"),
        (
            (EIGHT_BITS, "strategy=ddp", "parallel.tensor=2", "cluster.workers_per_node=2"),
            r"was not compared with one worker for parallel.tensor=2: use parallel.tensor=1",
        ),
        ((FLOAT8, "strategy=ddp"), r"precision=float8 needs a GPU, but this run is on cpu: choose precision=bf16"),
        ((FLOAT8, "strategy=ddp", "adapter=lora"), r"precision=float8 is not supported with adapter=lora: leave"),
        ((FLOAT8, "zero_stage=2"), r"precision=float8 is not supported by strategy=deepspeed"),
        ((FLOAT8, "strategy=ddp", "command=verify"), r"float8 cannot be compared weight by weight, because it scales"),
        (
            (OFFLOAD, "train.compile=model", "strategy=single"),
            r"offload moves the inputs of blocks, which train.compile=model has in one graph: use train.compile=blocks",
        ),
    ],
)  # fmt: skip
def test_what_cannot_use_fewer_bits_or_the_cpu_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_cell(*GPT, "cluster.device=cpu", *overrides)
