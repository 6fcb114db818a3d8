"""All metrics of a run: name with unit, header in tables, and number format."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.report.data import metric_readers as read
from distexp.runs.device_entries import cpu_peak_mib
from distexp.runs.record import RunRecord


@dataclass(frozen=True)
class Metric:
    """A number of a run.

    Attributes:
        name: Column in the result files, with the unit.
        read: Returns the value of a record, or None if it was not measured.
        title: Header in tables. A metric without a title is in the result files only.
        number_format: Format of the value in tables; ``z`` avoids ``-0.0000``.
        factor: Converts from the unit of the files to that of the tables.
        importance: In a narrow terminal, columns of low importance are hidden first.
        hides_zero: Whether tables leave the metric out if no run has more than 0.
    """

    name: str
    read: read.ReadMetric
    title: str = ""
    number_format: str = "{:z,.1f}"
    factor: float = 1.0
    importance: int = 0
    hides_zero: bool = False

    def format_value(self, value: float, deviation: float | None = None) -> str:
        """Return a value in the unit of the tables, with its standard deviation if known."""
        text = self.number_format.format(value * self.factor)
        return text if deviation is None else f"{text} ± {self.number_format.format(deviation * self.factor)}"


SPEED = "train_samples_per_second"
STEP_NOISE = "train_samples_per_second_step_noise_pct"
NOISE = "train_samples_per_second_noise_pct"
SPEEDUP = "speedup"
EFFICIENCY = "efficiency_pct"
ENERGY = "energy_j_per_sample"
COMMUNICATION = "communication_pct"
EXPOSED = "communication_exposed_pct"
CPU_PEAK = "cpu_peak_mib"
MEMORIES = {
    "gpu_peak_mib": "peak GPU memory",
    "torch_peak_allocated_mib": "peak GPU memory allocated by torch",
    CPU_PEAK: "peak CPU memory",
}
"""Metrics of memory, by preference: a run is compared by the first that was measured."""

SPEEDS = frozenset(
    {SPEED, STEP_NOISE, SPEEDUP, EFFICIENCY, "tokens_per_second", "mfu_pct", "mfu_of_ceiling_pct", "hfu_pct"}
)
"""Metrics in the tables that a disturbed run does not show."""

PARTS_TOTAL = "parts_mib"
NOT_OFFLOADED = "parts_not_offloaded_mib"

TABLE_METRICS = (
    Metric("train_loss", read.metrics_field("train_loss"), "train\nloss", "{:z.4f}", importance=60),
    Metric("eval_loss", read.metrics_field("eval_loss"), "eval\nloss", "{:z.4f}", importance=85),
    Metric("eval_accuracy_pct", read.last_percent("eval_accuracies"), "accu-\nracy %", importance=55),
    Metric("eval_top5_accuracy_pct", read.last_percent("eval_top5_accuracies"), "top-5\naccu. %", importance=53),
    Metric("exact_match_pct", read.metrics_field("exact_match"), "EM %", importance=50),
    Metric("f1_pct", read.metrics_field("f1"), "F1 %", importance=52),
    Metric(SPEED, read.metrics_field(SPEED), "samples/s", importance=95),
    Metric("tokens_per_second", read.metrics_field("tokens_per_second"), "tokens/s", "{:z,.0f}", importance=40),
    Metric("padding_share_pct", read.padding_percent, "pad-\nding %", importance=18, hides_zero=True),
    Metric("mfu_pct", read.flops_utilization_percent("mfu"), "MFU %", importance=37),
    Metric("mfu_of_ceiling_pct", read.flops_utilization_percent("mfu_of_ceiling"), "MFU % of\nceiling", importance=19),
    Metric("hfu_pct", read.flops_utilization_percent("hfu"), "HFU %", importance=21),
    Metric("step_time_p50_s", read.step_time("p50"), "step\nms", factor=1000, importance=35),
    Metric(COMMUNICATION, read.communication_percent("share"), "commu-\nnication %", "{:z.0f}", importance=65),
    Metric("gpu_peak_mib", read.gpu_peak, "GPU peak\nMiB", "{:z,.0f}", importance=90),
    Metric("gpu_training_average_mib", read.largest_of_devices("gpu", "training_average_mib"), "GPU avg\nMiB",
           "{:z,.0f}", importance=22),
    Metric("gpu_training_mode_mib", read.largest_of_devices("gpu", "training_mode_mib"), "GPU mode\nMiB", "{:z,.0f}",
           importance=20),
    Metric("torch_peak_allocated_mib", read.largest_of_devices("torch", "peak_allocated_mib"),
           "torch\npeak MiB", "{:z,.0f}", importance=45),
    Metric("predicted_peak_allocated_mib", read.predicted_gpu_peak, "predicted\npeak MiB", "{:z,.0f}",
           importance=46),
    Metric("prediction_error_pct", read.prediction_error_percent, "predict.\nerror %", "{:+z.1f}", importance=47),
    Metric("model_states_mib", read.largest_of_devices("torch", "states_mib"), "model\nst. MiB", "{:z,.0f}",
           importance=28),
    Metric("model_states_ideal_mib", read.ideal_model_states, "by arith-\nmetic MiB", "{:z,.0f}", importance=27),
    Metric(CPU_PEAK, lambda record: cpu_peak_mib(record.memory), "CPU peak\nMiB", "{:z,.0f}", importance=70),
    Metric("gpu_utilization_pct", read.mean_utilization("gpu"), "GPU\nutil %", "{:z.0f}", importance=38),
    Metric("cpu_utilization_pct", read.mean_utilization("cpu"), "CPU\nutil %", "{:z.0f}", importance=15),
    Metric("train_runtime_s", read.metrics_field("train_runtime"), "run-\ntime s", importance=48),
    Metric(ENERGY, read.energy_value("j_per_sample"), "J per\nsample", "{:z,.2f}", importance=30),
    Metric("energy_kwh", read.energy_value("kwh"), "kWh", "{:z,.4f}", importance=17),
    Metric("gpu_hours", read.energy_value("gpu_hours"), "GPU\nhours", "{:z,.3f}", importance=16),
    Metric("co2e_g", read.energy_value("co2e_g"), "CO2e g", "{:z,.1f}", importance=29),
    Metric("price", read.energy_value("price"), "price", "{:z,.2f}", importance=31),
    Metric(SPEEDUP, read.filled_in_later, "speedup", "{:z.2f}", importance=75),
    Metric(EFFICIENCY, read.filled_in_later, "effi-\nciency %", "{:z.0f}", importance=80),
)  # fmt: skip

_FILE_METRICS = (
    "train_samples_per_second_overall", "train_steps_per_second", "eval_samples_per_second",
    "steps_per_epoch", "total_steps", "data_wait_s", "tflops_per_device", "mfu",
    "executed_tflops_per_device", "model_tflops_per_sample", "executed_tflops_per_sample", "matrix_ceiling_tflops",
)  # fmt: skip
_FILE_ENERGIES = (
    "gpu_j", "gpu_j_by_power", "power_difference_pct", "cpu_j", "gpu_j_training", "cpu_j_training", "idle_w",
    "j_per_token",
)  # fmt: skip

METRICS = (
    *TABLE_METRICS,
    *(Metric(name, read.metrics_field(name)) for name in _FILE_METRICS),
    Metric("hfu_of_ceiling_pct", read.flops_utilization_percent("hfu_of_ceiling")),
    Metric(STEP_NOISE, read.step_noise_percent),
    Metric(NOISE, read.filled_in_later),
    Metric(EXPOSED, read.communication_percent("exposed_share")),
    *(Metric(f"energy_{name}", read.energy_value(name)) for name in _FILE_ENERGIES),
    Metric("eval_runtime_s", read.metrics_field("eval_runtime")),
    Metric("step_time_p90_s", read.step_time("p90")),
    Metric("step_time_max_s", read.step_time("max")),
    Metric("torch_average_allocated_mib", read.largest_of_devices("torch", "average_allocated_mib")),
    Metric("torch_peak_reserved_mib", read.largest_of_devices("torch", "peak_reserved_mib")),
    Metric("torch_alloc_retries", read.largest_of_devices("torch", "alloc_retries")),
    Metric("predicted_peak_reserved_mib", read.prediction("peak_reserved_mib"), number_format="{:z,.0f}"),
    Metric("predicted_nvidia_smi_mib", read.prediction("nvidia_smi_mib"), number_format="{:z,.0f}"),
    Metric("predicted_host_peak_mib", read.prediction("host_peak_mib"), number_format="{:z,.0f}"),
    Metric("gpu_average_mib", read.largest_of_devices("gpu", "average_mib")),
    Metric("gpu_mode_mib", read.largest_of_devices("gpu", "mode_mib")),
    Metric("cpu_training_average_mib", read.largest_of_devices("cpu", "training_average_mib")),
    Metric("cpu_training_mode_mib", read.largest_of_devices("cpu", "training_mode_mib")),
    Metric("cpu_average_mib", read.largest_of_devices("cpu", "average_mib")),
    Metric("cpu_mode_mib", read.largest_of_devices("cpu", "mode_mib")),
    *(Metric(name, read.largest_part(name), number_format="{:z,.3f}") for name in read.PARTS),
    Metric(PARTS_TOTAL, read.sum_of_parts, number_format="{:z,.3f}"),
    Metric(NOT_OFFLOADED, read.sum_not_offloaded, number_format="{:z,.3f}"),
    Metric("duration_s", lambda record: read.number_or_none(record.run.duration_s)),
)
"""Memory is that of the GPU, rank or node that uses most; utilization is the mean over them."""

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def read_metrics(record: RunRecord) -> dict[str, float | None]:
    """Return all metrics of a record by name.

    Raises:
        TypeError, ValueError: if a value is not a number.
    """
    return {metric.name: metric.read(record) for metric in METRICS}
