"""FLOPs and their fraction of what the device can do, for the record of a run."""

from __future__ import annotations

from distexp.config import Config
from distexp.data.base import TaskData
from distexp.hardware.facts import peak_tflops
from distexp.measure.flops import training_flops
from distexp.preflight.matrix_ceiling import stored_ceiling
from distexp.runs.record import RunRecord
from distexp.training.metrics_logger import MetricsLogger

TERA = 1e12


def add_flops(record: RunRecord, config: Config, data: TaskData, logger: MetricsLogger) -> None:
    """Add FLOPs and utilization to the record of a finished training. Only rank 0 needs them.

    A custom model may not run without memory. Then the reason is printed, and the metrics are None.
    """
    metrics, speed = record.metrics, record.metrics.train_samples_per_second
    if speed is None:
        return
    try:
        flops = training_flops(config, data, logger.measured_work, logger.context.device)
    except Exception as error:  # any: the code of the model raises it, and the training is finished
        print(f"note: the FLOPs of the model are not counted: {type(error).__name__}: {error}", flush=True)
        return
    per_sample, world_size = TERA * logger.counts.measured_samples, logger.context.world_size
    metrics.model_tflops_per_sample = flops.model / per_sample
    metrics.executed_tflops_per_sample = flops.executed / per_sample
    metrics.tflops_per_device = metrics.model_tflops_per_sample * speed / world_size
    metrics.executed_tflops_per_device = metrics.executed_tflops_per_sample * speed / world_size
    metrics.matrix_ceiling_tflops = stored_ceiling(logger.context.device, config.precision.name)
    gpu_name = record.environment.gpu_name if record.environment else None
    if peak := peak_tflops(gpu_name, config.precision.name):
        metrics.mfu = metrics.tflops_per_device / peak
        metrics.hfu = metrics.executed_tflops_per_device / peak
    if ceiling := metrics.matrix_ceiling_tflops:
        metrics.mfu_of_ceiling = metrics.tflops_per_device / ceiling
        metrics.hfu_of_ceiling = metrics.executed_tflops_per_device / ceiling
