"""The predicted peak of torch, compared with records of GPUs."""

from __future__ import annotations

import pytest

from distexp.config import Config
from distexp.plan.replay import replay
from distexp.plan.trace.tracing import trace_step
from distexp.system.units import MIB
from tests.helpers.gpu_records import gpu_records
from tests.helpers.runs import resolve_cell

SLOW = ("fsdp_sharding/2",)
RELEASE = (
    "ddp_multi_gpu/1",
    "deepspeed/baseline/0",  # one GPU, without a strategy
    "fsdp_multi_gpu/0",
    *(f"fsdp_sharding/{cell}" for cell in (3, 5, 7)),
    "fsdp_custom_multi_gpu/0",
)


def recorded(path: str) -> Config:
    """Return the configuration of a record with random data of the same shape. It resolves without a GPU."""
    settings = gpu_records()[path].config
    train, cluster, data = settings["train"], settings["cluster"], settings["dataset"]
    images = settings["model"]["task"] == "image_classification"
    shape = ("dataset.image_size=224",) if images else (f"dataset.max_length={data['max_length']}",)
    sharding = settings["fsdp"]["sharding"]
    config = resolve_cell(
        *(f"model={settings['model']['name']}", "dataset=synthetic", "dataset.train_size=4096", *shape),
        *((f"strategy={settings['strategy']['name']}",) if settings["strategy"]["name"] != "deepspeed" else ()),
        *((f"sharding={sharding}",) if settings["strategy"]["name"] == "fsdp" else ()),
        *(
            (f"zero_stage={settings['deepspeed']['zero_stage']}",)
            if settings["strategy"]["name"] == "deepspeed"
            else ()
        ),
        f"offload={str(settings['offload']['enabled']).lower()}",
        f"cluster.nodes={cluster['nodes']}",
        f"cluster.workers_per_node={cluster['workers_per_node']}",
        f"train.micro_batch_size={train['micro_batch_size']}",
        f"train.gradient_accumulation_steps={train['gradient_accumulation_steps']}",
        f"train.optimizer={train['optimizer']}",
        "precision=bf16",
    )
    config.precision.name = settings["precision"]["name"]  # fp16 is refused on CPUs
    return config


def errors_of(path: str) -> tuple[float, float]:
    """Return the relative errors of the predicted peaks of allocated and of reserved memory."""
    ranks = gpu_records()[path].memory["torch"]
    trace = trace_step(recorded(path))
    found = replay(trace.events, trace.history, trace.evaluation)
    peaks = found.peak_allocated / MIB, found.peak_reserved / MIB
    allocated, reserved = (
        peak / max(rank[key] for rank in ranks) - 1
        for peak, key in zip(peaks, ("peak_allocated_mib", "peak_reserved_mib"), strict=True)
    )
    return allocated, reserved


def test_the_peak_of_gpt_is_that_of_two_gpus() -> None:
    allocated, reserved = errors_of("fsdp_custom_multi_gpu/1")
    assert abs(allocated) < 0.005
    assert abs(reserved) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("path", [*SLOW, *(pytest.param(path, marks=pytest.mark.release) for path in RELEASE)])
def test_the_peak_is_that_of_gpus(path: str) -> None:
    allocated, reserved = errors_of(path)
    assert abs(allocated) < 0.01, path
    assert abs(reserved) < 0.03, path
