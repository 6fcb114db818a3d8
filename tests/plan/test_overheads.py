"""Memory outside of torch's allocator, compared with records of GPU runs."""

from __future__ import annotations

import statistics

from distexp.plan.host_memory import host_peak_mib, processes_mib, setup_mib
from distexp.plan.overheads import overhead_mib
from distexp.runs.record import RunRecord
from tests.helpers.gpu_records import gpu_records, recorded_config

TIED = {"bloom_560m": 250_880 * 1024}
"""Parameters of output heads that are tied."""


def on_gpu(record: RunRecord) -> float:
    return sum(overhead_mib(recorded_config(record)).values())


def test_nvml_is_the_reserved_memory_and_the_overhead() -> None:
    errors = []
    for path, record in gpu_records().items():
        shown = max(gpu["peak_mib"] for gpu in record.memory["gpu"])
        reserved = max(rank["peak_reserved_mib"] for rank in record.memory["torch"])
        errors.append((reserved + on_gpu(record)) / shown - 1)
        assert abs(errors[-1]) < 0.01, (path, shown, reserved, on_gpu(record))
    assert len(errors) >= 30
    assert statistics.median(map(abs, errors)) < 0.002


def test_host_peak_without_offload_is_near_the_records() -> None:
    errors = []
    for path, record in gpu_records().items():
        config = recorded_config(record)
        phases = record.memory["cpu"][0]["phases"]
        if config.offload.enabled or "profile" in phases:  # profiling keeps events
            continue
        assert record.built is not None
        parameters = record.built.parameters
        predicted = host_peak_mib(config, 0.0, parameters, TIED.get(config.model.name or "", 0))
        errors.append(predicted / record.memory["cpu"][0]["peak_mib"] - 1)
        assert abs(errors[-1]) < 0.10, (path, predicted, phases)
    assert len(errors) >= 10
    assert statistics.median(map(abs, errors)) < 0.05


def test_training_processes_are_near_the_records() -> None:
    for path, record in gpu_records().items():
        config = recorded_config(record)
        if config.offload.enabled:
            continue
        measured = record.memory["cpu"][0]["phases"]["train"]
        assert abs(sum(processes_mib(config).values()) / measured - 1) < 0.10, (path, measured)


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
