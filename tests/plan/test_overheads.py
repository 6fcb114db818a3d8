"""Memory outside of torch's allocator, compared with records of GPU runs."""

from __future__ import annotations

import json
import statistics

from distexp.plan.estimate import host_peak_mib, processes_mib, setup_mib
from distexp.runs.record import RunRecord
from distexp.strategies.base import load_strategy
from tests.helpers.gpu_records import RESULTS, gpu_records, recorded_config
from tests.helpers.runs import resolve_cell

TIED = {"bloom_560m": 250_880 * 1024}
"""Parameters of output heads that are tied."""


PARAMETERS = {
    "bloom_560m": (559_214_592, 250_880 * 1024),
    "bloom_1b1": (1_065_314_304, 250_880 * 1536),
    "bloom_1b7": (1_722_408_960, 250_880 * 2048),
    "gpt": (356_927_488, 0),
    "hf": (852_035_584, 0),
}
"""Parameters of a model, and of its output head if that is tied."""


def measured_cells() -> dict[str, dict[str, float]]:
    cells: dict[str, dict[str, float]] = json.loads((RESULTS / "plan_measured.json").read_text())["cells"]
    return cells


def shares_weights(path: str, record: RunRecord) -> bool:
    """Return whether a run took the weights of 8 billion parameters that another one had built. Both map them."""
    return path in ("cut_lora/1", "cut_lora/2") or (path.startswith("cut/") and record.run.number > 0)


def has_no_usual_host_memory(path: str) -> bool:
    """Return whether a run trained for seconds, its machine ran two sweeps, or its weights were made in fp32 first."""
    return path.startswith(("course/", "two_h200/")) or path == "cut_lora/0"


def on_gpu(record: RunRecord) -> float:
    config = recorded_config(record)
    return load_strategy(config).total_overhead_mib(config)


def test_nvml_is_the_reserved_memory_and_the_overhead() -> None:
    errors = []
    for path, record in gpu_records().items():
        shown = max(gpu["peak_mib"] for gpu in record.memory["gpu"])
        reserved = max(rank["peak_reserved_mib"] for rank in record.memory["torch"])
        errors.append((reserved + on_gpu(record)) / shown - 1)
        # Not counted are the buffers of NCCL for an all-to-all, 400 MiB of two groups of two workers, and 104 MiB of a
        # group that shares matrices.
        bound = 0.04 if path in ("cut/context/1", "cut/context/2", "cut/mesh_fp32/1") else 0.01
        bound = 0.02 if path == "two_h200/map_strategies/12" else bound
        assert abs(errors[-1]) < bound, (path, shown, reserved, on_gpu(record))
    assert len(errors) >= 20
    assert statistics.median(map(abs, errors)) < 0.002


def test_host_peak_without_offload_is_near_the_records() -> None:
    """The first run of a sweep needs what is predicted. Later ones share its imports and weights, and need less."""
    errors = []
    for path, record in gpu_records().items():
        config = recorded_config(record)
        phases = record.memory["cpu"][0]["phases"]
        if config.offload.enabled or "profile" in phases or shares_weights(path, record):  # profiling keeps events
            continue
        if has_no_usual_host_memory(path):
            continue
        assert record.built is not None
        parameters = record.built.parameters
        predicted = host_peak_mib(config, 0.0, parameters, TIED.get(config.model.name or "", 0))
        errors.append(predicted / record.memory["cpu"][0]["peak_mib"] - 1)
        assert errors[-1] > -0.15, (path, predicted, phases)
        assert record.run.number > 0 or errors[-1] < 0.15, (path, predicted, phases)
    assert len(errors) >= 4


def test_host_peak_is_near_the_latest_measurements() -> None:
    errors = []
    for text, measured in measured_cells().items():
        given = text.replace("fp16", "bf16").split()[1:]  # fp16 is refused on CPUs
        overrides = dict(override.split("=") for override in given)
        model = overrides["model"]
        if model == "resnet50" or "offload" in overrides:  # The batches of images, and the states, are traced.
            continue
        config = resolve_cell(*(override for override in given if "=hf" not in override and "LLAMA" not in override))
        config.model._target_ = f"distexp.models.{model.split('_')[0]}.build"
        predicted = host_peak_mib(config, 0.0, *PARAMETERS[model])
        errors.append(predicted / measured["host_peak_mib"] - 1)
        assert abs(errors[-1]) < 0.10, (text, predicted)
    assert len(errors) >= 20
    assert statistics.median(map(abs, errors)) < 0.05


def test_training_processes_are_near_the_records() -> None:
    for path, record in gpu_records().items():
        config = recorded_config(record)
        if config.offload.enabled or shares_weights(path, record) or has_no_usual_host_memory(path):
            continue
        measured = record.memory["cpu"][0]["phases"]["train"]
        bound = 0.20 if record.run.number == 0 else 0.40  # later runs of a sweep share imports and weights
        bound = 0.25 if path == "cut/tensor/0" else bound  # DDP has no DTensors otherwise
        # 500 MiB more on each worker of Mixtral; why was not measured. The peak is that of the setup.
        bound = 0.26 if path in ("cut/expert/0", "cut/mixtral/0") else bound
        assert abs(sum(processes_mib(config).values()) / measured - 1) < bound, (path, measured)


def test_host_peak_counts_the_tensors_of_each_worker() -> None:
    record = gpu_records()["deepspeed/two_gpu_stages/0"]
    config = recorded_config(record)
    assert host_peak_mib(config, 5000.0, 1000) - host_peak_mib(config, 4000.0, 1000) == 2 * 1000.0
    config.train.save_model = True
    saved = host_peak_mib(config, 4000.0, 2**20) - 8000.0 - sum(processes_mib(config).values())
    assert saved == 4.0
    assert setup_mib(config, 2**20, 2**20) - setup_mib(config, 0) == 8.0


def test_processes_of_the_data_loader_grow_with_their_batches() -> None:
    # 3,682 MiB were measured with 2 workers, 2 processes each, and batches of 128 images (2 H200s).
    config = recorded_config(gpu_records()["ddp_multi_gpu/1"])
    config.train.micro_batch_size, config.dataset.num_workers = 128, 2
    assert abs(sum(processes_mib(config).values()) / 3682 - 1) < 0.10
