"""All metrics of a run: name with unit, header in tables, and number format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distexp.plan.predicted_memory import ideal_states_mib
from distexp.report.data.noise import step_noise
from distexp.runs.devices import cpu_peak_mib, device_values, mean_or_none
from distexp.runs.memory_parts import tensor_entries
from distexp.runs.record import RunRecord

ReadMetric = Callable[[RunRecord], float | None]


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
    read: ReadMetric
    title: str = ""
    number_format: str = "{:z,.1f}"
    factor: float = 1.0
    importance: int = 0
    hides_zero: bool = False

    def format_value(self, value: float, deviation: float | None = None) -> str:
        """Return a value in the unit of the tables, with its standard deviation if known."""
        text = self.number_format.format(value * self.factor)
        return text if deviation is None else f"{text} ± {self.number_format.format(deviation * self.factor)}"


def _metric(name: str) -> ReadMetric:
    return lambda record: _number(getattr(record.metrics, name))


def _last_percent(name: str) -> ReadMetric:
    def read(record: RunRecord) -> float | None:
        fractions = getattr(record.metrics, name)
        return 100 * float(fractions[-1]) if fractions else None

    return read


def _step_time(quantile: str) -> ReadMetric:
    return lambda record: _number((record.metrics.step_time_s or {}).get(quantile))


def _energy(name: str) -> ReadMetric:
    return lambda record: _number((record.metrics.energy or {}).get(name))


def _energy_per_sample(record: RunRecord) -> float | None:
    """Return the energy of a sample. Older records have that of the GPUs only, in another key."""
    energy = _energy("j_per_sample")(record)
    return _number(record.metrics.energy_j_per_sample) if energy is None else energy


def _communication_percent(name: str) -> ReadMetric:
    def read(record: RunRecord) -> float | None:
        fraction = _number((record.metrics.communication or {}).get(name))
        return None if fraction is None else 100 * fraction

    return read


def _step_noise_percent(record: RunRecord) -> float | None:
    noise = step_noise(record.metrics.speed_error)
    return None if noise is None else 100 * noise


def _padding_percent(record: RunRecord) -> float | None:
    share = _number(record.metrics.padding_share)
    return None if share is None else 100 * share


def _utilization_percent(name: str) -> ReadMetric:
    """Return the reader of a utilization. In older records the model FLOPs had padding, so they are left out."""

    def read(record: RunRecord) -> float | None:
        fraction = _number(getattr(record.metrics, name))
        return None if fraction is None or record.metrics.model_tflops_per_sample is None else 100 * fraction

    return read


def _largest(kind: str, key: str) -> ReadMetric:
    return lambda record: max(device_values(record.memory.get(kind), key), default=None)


def _over_training(kind: str, key: str) -> ReadMetric:
    """Return the reader of a value over the training steps. Older records have it over the whole run only."""

    def read(record: RunRecord) -> float | None:
        entries = record.memory.get(kind) or []
        return max((value for entry in entries if (value := training_value(entry, key)) is not None), default=None)

    return read


def training_value(entry: Mapping[str, Any], key: str) -> float | None:
    """Return a value of a device over the training steps; of an older record over the whole run."""
    return _number(entry.get(f"training_{key}", entry.get(key)))


def _gpu_peak(record: RunRecord) -> float | None:
    """Return the peak that NVML sampled, or what torch had reserved if that is more.

    A run may run out of memory between two samples.
    """
    sampled = _largest("gpu", "peak_mib")(record)
    return None if sampled is None else max(sampled, _largest("torch", "peak_reserved_mib")(record) or 0.0)


def _mean_utilization(kind: str) -> ReadMetric:
    return lambda record: mean_or_none(device_values(record.utilization.get(kind), "average_pct"))


def _part(name: str) -> ReadMetric:
    return lambda record: max(device_values(tensor_entries(record.memory), name), default=None)


def _sum_of_parts(record: RunRecord) -> float | None:
    return _largest_sum(record, PARTS)


def _sum_not_offloaded(record: RunRecord) -> float | None:
    return _largest_sum(record, [name for name in PARTS if name not in _offloaded_parts(record)])


def _largest_sum(record: RunRecord, names: Iterable[str]) -> float | None:
    """Return the sum of some parts on the worker where it is largest."""
    kept = list(names)
    sums = [sum(float(entry.get(name) or 0.0) for name in kept) for entry in tensor_entries(record.memory)]
    return max(sums, default=None)


def _offloaded_parts(record: RunRecord) -> set[str]:
    """Return the parts that are in host memory. From stage 2 on, an offloaded optimizer takes its gradients along."""
    built = record.built
    offloaded = set(built.offload.split("+")) if built else set()
    if built and "optimizer" in offloaded and (built.zero_stage or 0) >= 2:
        offloaded.add("gradients")
    return {f"{'optimizer_states' if name == 'optimizer' else name}_mib" for name in offloaded}


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _predicted(name: str) -> ReadMetric:
    return lambda record: _number(getattr(record.predicted, name)) if record.predicted else None


def _predicted_on_gpu(record: RunRecord) -> float | None:
    """Return the predicted peak of torch's memory. On a CPU, torch has no memory that could be measured."""
    return None if record.config["cluster"]["device"] == "cpu" else _predicted("peak_allocated_mib")(record)


def _prediction_error(record: RunRecord) -> float | None:
    """Return predicted minus measured peak, in percent of the measured one."""
    predicted = _predicted_on_gpu(record)
    measured = _largest("torch", "peak_allocated_mib")(record) if record.status == "completed" else None
    return 100 * (predicted / measured - 1) if predicted is not None and measured else None


def _ideal_states(record: RunRecord) -> float | None:
    """Return the ideal memory of model states, only if the real one was measured."""
    return ideal_states_mib(record) if device_values(record.memory["torch"], "states_mib") else None


def _from_other_runs(record: RunRecord) -> float | None:
    """Return None: a comparison with other runs fills in the value."""
    return None


SPEED = "train_samples_per_second"
STEP_NOISE = "train_samples_per_second_step_noise_pct"
NOISE = "train_samples_per_second_noise_pct"
SPEEDUP = "speedup"
EFFICIENCY = "efficiency_pct"
ENERGY = "energy_j_per_sample"
COMMUNICATION = "communication_pct"
EXPOSED = "communication_exposed_pct"
MEMORIES = {
    "gpu_peak_mib": "peak GPU memory",
    "torch_peak_allocated_mib": "peak GPU memory allocated by torch",
    "cpu_peak_mib": "peak CPU memory",
}
"""Metrics of memory, by preference: a run is compared by the first that was measured."""

PARTS = {
    "parameters_mib": "parameters",
    "gradients_mib": "gradients",
    "optimizer_states_mib": "optimizer states",
    "activations_mib": "activations",
}
"""Metrics of the parts of a worker's memory, with their titles."""
PARTS_TOTAL = "parts_mib"
NOT_OFFLOADED = "parts_not_offloaded_mib"

TABLE_METRICS = (
    Metric("train_loss", _metric("train_loss"), "train\nloss", "{:z.4f}", importance=60),
    Metric("eval_loss", _metric("eval_loss"), "eval\nloss", "{:z.4f}", importance=85),
    Metric("eval_accuracy_pct", _last_percent("eval_accuracies"), "accu-\nracy %", importance=55),
    Metric("eval_top5_accuracy_pct", _last_percent("eval_top5_accuracies"), "top-5\naccu. %", importance=53),
    Metric("exact_match_pct", _metric("exact_match"), "EM %", importance=50),
    Metric("f1_pct", _metric("f1"), "F1 %", importance=52),
    Metric(SPEED, _metric(SPEED), "samples/s", importance=95),
    Metric("tokens_per_second", _metric("tokens_per_second"), "tokens/s", "{:z,.0f}", importance=40),
    Metric("padding_share_pct", _padding_percent, "pad-\nding %", importance=18, hides_zero=True),
    Metric("mfu_pct", _utilization_percent("mfu"), "MFU %", importance=37),
    Metric("mfu_of_ceiling_pct", _utilization_percent("mfu_of_ceiling"), "MFU % of\nceiling", importance=19),
    Metric("hfu_pct", _utilization_percent("hfu"), "HFU %", importance=21),
    Metric("step_time_p50_s", _step_time("p50"), "step\nms", factor=1000, importance=35),
    Metric(COMMUNICATION, _communication_percent("share"), "commu-\nnication %", "{:z.0f}", importance=65),
    Metric("gpu_peak_mib", _gpu_peak, "GPU peak\nMiB", "{:z,.0f}", importance=90),
    Metric("gpu_training_average_mib", _over_training("gpu", "average_mib"), "GPU avg\nMiB", "{:z,.0f}", importance=22),
    Metric("gpu_training_mode_mib", _over_training("gpu", "mode_mib"), "GPU mode\nMiB", "{:z,.0f}", importance=20),
    Metric("torch_peak_allocated_mib", _largest("torch", "peak_allocated_mib"), "torch\npeak MiB", "{:z,.0f}",
           importance=45),
    Metric("predicted_peak_allocated_mib", _predicted_on_gpu, "predicted\npeak MiB", "{:z,.0f}",
           importance=46),
    Metric("prediction_error_pct", _prediction_error, "predict.\nerror %", "{:+z.1f}", importance=47),
    Metric("model_states_mib", _largest("torch", "states_mib"), "model\nst. MiB", "{:z,.0f}", importance=28),
    Metric("model_states_ideal_mib", _ideal_states, "by arith-\nmetic MiB", "{:z,.0f}", importance=27),
    Metric("cpu_peak_mib", lambda record: cpu_peak_mib(record.memory), "CPU peak\nMiB", "{:z,.0f}", importance=70),
    Metric("gpu_utilization_pct", _mean_utilization("gpu"), "GPU\nutil %", "{:z.0f}", importance=38),
    Metric("cpu_utilization_pct", _mean_utilization("cpu"), "CPU\nutil %", "{:z.0f}", importance=15),
    Metric("train_runtime_s", _metric("train_runtime"), "run-\ntime s", importance=48),
    Metric(ENERGY, _energy_per_sample, "J per\nsample", "{:z,.2f}", importance=30),
    Metric("energy_kwh", _energy("kwh"), "kWh", "{:z,.4f}", importance=17),
    Metric("gpu_hours", _energy("gpu_hours"), "GPU\nhours", "{:z,.3f}", importance=16),
    Metric("co2e_g", _energy("co2e_g"), "CO2e g", "{:z,.1f}", importance=29),
    Metric("price", _energy("price"), "price", "{:z,.2f}", importance=31),
    Metric(SPEEDUP, _from_other_runs, "speedup", "{:z.2f}", importance=75),
    Metric(EFFICIENCY, _from_other_runs, "effi-\nciency %", "{:z.0f}", importance=80),
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
    *(Metric(name, _metric(name)) for name in _FILE_METRICS),
    Metric("hfu_of_ceiling_pct", _utilization_percent("hfu_of_ceiling")),
    Metric(STEP_NOISE, _step_noise_percent),
    Metric(NOISE, _from_other_runs),
    Metric(EXPOSED, _communication_percent("exposed_share")),
    *(Metric(f"energy_{name}", _energy(name)) for name in _FILE_ENERGIES),
    Metric("eval_runtime_s", _metric("eval_runtime")),
    Metric("step_time_p90_s", _step_time("p90")),
    Metric("step_time_max_s", _step_time("max")),
    Metric("torch_average_allocated_mib", _largest("torch", "average_allocated_mib")),
    Metric("torch_peak_reserved_mib", _largest("torch", "peak_reserved_mib")),
    Metric("torch_alloc_retries", _largest("torch", "alloc_retries")),
    Metric("predicted_peak_reserved_mib", _predicted("peak_reserved_mib"), number_format="{:z,.0f}"),
    Metric("predicted_nvidia_smi_mib", _predicted("nvidia_smi_mib"), number_format="{:z,.0f}"),
    Metric("predicted_host_peak_mib", _predicted("host_peak_mib"), number_format="{:z,.0f}"),
    Metric("gpu_average_mib", _largest("gpu", "average_mib")),
    Metric("gpu_mode_mib", _largest("gpu", "mode_mib")),
    Metric("cpu_training_average_mib", _over_training("cpu", "average_mib")),
    Metric("cpu_training_mode_mib", _over_training("cpu", "mode_mib")),
    Metric("cpu_average_mib", _largest("cpu", "average_mib")),
    Metric("cpu_mode_mib", _largest("cpu", "mode_mib")),
    *(Metric(name, _part(name), number_format="{:z,.3f}") for name in PARTS),
    Metric(PARTS_TOTAL, _sum_of_parts, number_format="{:z,.3f}"),
    Metric(NOT_OFFLOADED, _sum_not_offloaded, number_format="{:z,.3f}"),
    Metric("duration_s", lambda record: _number(record.run.duration_s)),
)
"""Memory is that of the GPU, rank or node that uses most; utilization is the mean over them."""

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def read_metrics(record: RunRecord) -> dict[str, float | None]:
    """Return all metrics of a record by name.

    Raises:
        TypeError, ValueError: if a value is not a number.
    """
    return {metric.name: metric.read(record) for metric in METRICS}
