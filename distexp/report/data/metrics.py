"""All metrics of a run: how they are read from a record, name with unit, header in tables, and number format."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from distexp.runs.memory_trace import cpu_process_mib, ideal_states_mib, tensor_entries
from distexp.runs.record import RunRecord
from distexp.statistics.noise import step_noise
from distexp.system.typed_values import cpu_peak_mib, device_values, gpu_peaks_mib, mean_or_none

# A function that returns a metric of a run, or None if it was not measured. Some functions here return one.
ReadMetric = Callable[[RunRecord], float | None]
SPEED = "train_samples_per_second"
STEP_NOISE = "train_samples_per_second_step_noise_pct"
NOISE = "train_samples_per_second_noise_pct"
SPEEDUP = "speedup"
EFFICIENCY = "efficiency_pct"
ENERGY = "energy_j_per_sample"
COMMUNICATION = "communication_pct"
EXPOSED = "communication_exposed_pct"
COST = "worker_s_per_1000_samples"
CPU_PEAK = "cpu_peak_mib"
MEMORIES = {  # metrics of memory, by preference: a run is compared by the first that was measured
    "gpu_peak_mib": "peak GPU memory",
    "torch_peak_allocated_mib": "peak GPU memory allocated by torch",
    CPU_PEAK: "peak CPU memory",
}

TIMES = frozenset({"train_runtime_s", "step_ms", COST})  # a ratio of them is one of speeds
SPEEDS = frozenset(  # metrics in the tables that a disturbed run does not show
    {SPEED, STEP_NOISE, SPEEDUP, EFFICIENCY, "tokens_per_second", "mfu_pct", "mfu_of_ceiling_pct", "hfu_pct"}
)

PARTS_TOTAL = "parts_mib"
NOT_OFFLOADED = "parts_not_offloaded_mib"
_FILE_METRICS = (
    "train_samples_per_second_overall", "train_steps_per_second", "eval_samples_per_second",
    "steps_per_epoch", "total_steps", "data_wait_s", "tflops_per_device", "mfu",
    "executed_tflops_per_device", "model_tflops_per_sample", "executed_tflops_per_sample", "matrix_ceiling_tflops",
)  # fmt: skip
_FILE_ENERGIES = (
    "gpu_j", "gpu_j_by_power", "power_difference_pct", "cpu_j", "gpu_j_training", "cpu_j_training", "idle_w",
    "j_per_token",
)  # fmt: skip


def value_at(path: str, factor: float = 1.0) -> ReadMetric:
    """Return the reader of a number in the record, as ``metrics.energy.kwh``; factor 100 makes a fraction percent."""

    def read(record: RunRecord) -> float | None:
        value: Any = record
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else getattr(value, name)
            if value is None:
                return None
        return factor * float(value)

    return read


def last_percent(name: str) -> ReadMetric:
    """Return the reader of the last of a list of fractions, in percent."""

    def read(record: RunRecord) -> float | None:
        fractions = getattr(record.metrics, name)
        return 100 * float(fractions[-1]) if fractions else None

    return read


def largest_of_devices(kind: str, key: str) -> ReadMetric:
    """Return the reader of the largest value in ``record.memory`` over the devices or ranks of a kind."""
    return lambda record: max(device_values(record.memory.get(kind), key), default=None)


def gpu_peak(record: RunRecord) -> float | None:
    """Return the peak that NVML sampled, or what torch had reserved if that is more, as between two samples."""
    sampled = max(gpu_peaks_mib(record.memory), default=None)
    return None if sampled is None else max(sampled, largest_of_devices("torch", "peak_reserved_mib")(record) or 0.0)


def mean_utilization(kind: str) -> ReadMetric:
    """Return the reader of the mean utilization over the devices of a kind, in percent."""
    return lambda record: mean_or_none(device_values(record.utilization.get(kind), "average_pct"))


def largest_part(name: str) -> ReadMetric:
    """Return the reader of a part of the memory, on the worker where it is largest."""
    return lambda record: max(device_values(tensor_entries(record.memory), name), default=None)


def sum_of_parts(record: RunRecord, left_out: Collection[str] = ()) -> float | None:
    """Return the sum of the other parts on the worker with the most, in MiB."""
    kept = [name for name in PARTS if name not in left_out]
    sums = [sum(float(entry.get(name) or 0.0) for name in kept) for entry in tensor_entries(record.memory)]
    return max(sums, default=None)


def offloaded_parts(record: RunRecord) -> set[str]:
    """Return the parts that are in host memory. From stage 2 on, an offloaded optimizer takes its gradients along."""
    built = record.built
    offloaded = set(built.offload.split("+")) if built else set()
    if built and "optimizer" in offloaded and (built.zero_stage or 0) >= 2:
        offloaded.add("gradients")
    return {f"{'optimizer_states' if name == 'optimizer' else name}_mib" for name in offloaded}


def predicted_gpu_peak(record: RunRecord) -> float | None:
    """Return the predicted peak of torch's memory. On a CPU, torch has no memory that could be measured."""
    return None if record.config["cluster"]["device"] == "cpu" else value_at("predicted.peak_allocated_mib")(record)


def prediction_error_percent(record: RunRecord) -> float | None:
    """Return predicted minus measured peak, in percent of the measured one."""
    predicted = predicted_gpu_peak(record)
    measured = largest_of_devices("torch", "peak_allocated_mib")(record) if record.status == "completed" else None
    return 100 * (predicted / measured - 1) if predicted is not None and measured else None


def ideal_model_states(record: RunRecord) -> float | None:
    """Return the ideal memory of model states, only if the real one was measured."""
    return ideal_states_mib(record) if device_values(record.memory["torch"], "states_mib") else None


def worker_seconds(record: RunRecord) -> float | None:
    """Return the time of all workers for 1,000 samples, which is what a cluster bills."""
    speed = record.metrics.train_samples_per_second
    return 1000 * record.built.world_size / speed if speed and record.built else None


def filled_in_later(record: RunRecord) -> float | None:
    """Return None: a comparison with other runs fills in the value."""
    return None


PARTS = {  # metrics of the parts of a worker's memory, with their titles
    "parameters_mib": "parameters",
    "gradients_mib": "gradients",
    "optimizer_states_mib": "optimizer states",
    "activations_mib": "activations",
}


@dataclass(frozen=True)
class Metric:
    """A number of a run."""

    name: str  # column in the result files, with the unit
    read: ReadMetric
    title: str = ""  # header in tables; without a title, a metric is in the result files only
    number_format: str = "{:z,.1f}"  # in tables; z avoids -0.0000
    factor: float = 1.0  # from the unit of the files to that of the tables
    importance: int = 0  # in a narrow terminal, columns of low importance are hidden first
    hides_zero: bool = False  # whether tables leave the metric out if no run has more than 0

    def format_value(self, value: float, deviation: float | None = None) -> str:
        """Return a value in the unit of the tables, with its standard deviation if known."""
        text = self.number_format.format(value * self.factor)
        return text if deviation is None else f"{text} ± {self.number_format.format(deviation * self.factor)}"


TABLE_METRICS = (
    Metric("train_loss", value_at("metrics.train_loss"), "train\nloss", "{:z.4f}", importance=60),
    Metric("eval_loss", value_at("metrics.eval_loss"), "eval\nloss", "{:z.4f}", importance=85),
    Metric("eval_accuracy_pct", last_percent("eval_accuracies"), "accu-\nracy %", importance=55),
    Metric("eval_top5_accuracy_pct", last_percent("eval_top5_accuracies"), "top-5\naccu. %", importance=53),
    Metric("exact_match_pct", value_at("metrics.exact_match"), "EM %", importance=50),
    Metric("f1_pct", value_at("metrics.f1"), "F1 %", importance=52),
    Metric(SPEED, value_at(f"metrics.{SPEED}"), "samples/s", importance=95),
    Metric("tokens_per_second", value_at("metrics.tokens_per_second"), "tokens/s", "{:z,.0f}", importance=40),
    Metric("padding_share_pct", value_at("metrics.padding_share", 100), "pad-\nding %", importance=18, hides_zero=True),
    Metric("mfu_pct", value_at("metrics.mfu", 100), "MFU %", importance=37),
    Metric("mfu_of_ceiling_pct", value_at("metrics.mfu_of_ceiling", 100), "MFU % of\nceiling", importance=19),
    Metric("hfu_pct", value_at("metrics.hfu", 100), "HFU %", importance=21),
    Metric("step_time_p50_s", value_at("metrics.step_time_s.p50"), "step\nms", factor=1000, importance=35),
    Metric(COMMUNICATION, value_at("metrics.communication.share", 100), "commu-\nnication %", "{:z.0f}", importance=65),
    Metric("gpu_peak_mib", gpu_peak, "GPU peak\nMiB", "{:z,.0f}", importance=90),
    Metric("gpu_training_average_mib", largest_of_devices("gpu", "training_average_mib"), "GPU avg\nMiB",
           "{:z,.0f}", importance=22),
    Metric("gpu_training_mode_mib", largest_of_devices("gpu", "training_mode_mib"), "GPU mode\nMiB", "{:z,.0f}",
           importance=20),
    Metric("torch_peak_allocated_mib", largest_of_devices("torch", "peak_allocated_mib"),
           "torch\npeak MiB", "{:z,.0f}", importance=45),
    Metric("predicted_peak_allocated_mib", predicted_gpu_peak, "predicted\npeak MiB", "{:z,.0f}",
           importance=46),
    Metric("prediction_error_pct", prediction_error_percent, "predict.\nerror %", "{:+z.1f}", importance=47),
    Metric("model_states_mib", largest_of_devices("torch", "states_mib"), "model\nst. MiB", "{:z,.0f}",
           importance=28),
    Metric("model_states_ideal_mib", ideal_model_states, "by arith-\nmetic MiB", "{:z,.0f}", importance=27),
    Metric(CPU_PEAK, lambda record: cpu_peak_mib(record.memory), "CPU peak\nMiB", "{:z,.0f}", importance=70),
    Metric("gpu_utilization_pct", mean_utilization("gpu"), "GPU\nutil %", "{:z.0f}", importance=38),
    Metric("cpu_utilization_pct", mean_utilization("cpu"), "CPU\nutil %", "{:z.0f}", importance=15),
    Metric("train_runtime_s", value_at("metrics.train_runtime"), "run-\ntime s", importance=48),
    Metric(ENERGY, value_at("metrics.energy.j_per_sample"), "J per\nsample", "{:z,.2f}", importance=30),
    Metric("energy_kwh", value_at("metrics.energy.kwh"), "kWh", "{:z,.4f}", importance=17),
    Metric("gpu_hours", value_at("metrics.energy.gpu_hours"), "GPU\nhours", "{:z,.3f}", importance=16),
    Metric("co2e_g", value_at("metrics.energy.co2e_g"), "CO2e g", "{:z,.1f}", importance=29),
    Metric("price", value_at("metrics.energy.price"), "price", "{:z,.2f}", importance=31),
    Metric(SPEEDUP, filled_in_later, "speedup", "{:z.2f}", importance=75),
    Metric(EFFICIENCY, filled_in_later, "effi-\nciency %", "{:z.0f}", importance=80),
)  # fmt: skip


def _device_metrics(kind: str, *keys: str) -> list[Metric]:
    return [Metric(f"{kind}_{key}", largest_of_devices(kind, key)) for key in keys]


METRICS = (  # memory is that of the GPU, rank or node that uses most; utilization is the mean over them
    *TABLE_METRICS,
    *(Metric(name, value_at(f"metrics.{name}")) for name in _FILE_METRICS),
    Metric("hfu_of_ceiling_pct", value_at("metrics.hfu_of_ceiling", 100)),
    Metric(STEP_NOISE, lambda record: (noise := step_noise(record.metrics.speed_error)) and 100 * noise),
    Metric(NOISE, filled_in_later),
    Metric(COST, worker_seconds, number_format="{:z,.4g}"),
    Metric(EXPOSED, value_at("metrics.communication.exposed_share", 100)),
    *(Metric(f"energy_{name}", value_at(f"metrics.energy.{name}")) for name in _FILE_ENERGIES),
    Metric("eval_runtime_s", value_at("metrics.eval_runtime")),
    Metric("step_time_p90_s", value_at("metrics.step_time_s.p90")),
    Metric("step_time_max_s", value_at("metrics.step_time_s.max")),
    *_device_metrics("torch", "average_allocated_mib", "peak_reserved_mib", "alloc_retries"),
    Metric("predicted_peak_reserved_mib", value_at("predicted.peak_reserved_mib"), number_format="{:z,.0f}"),
    Metric("predicted_nvidia_smi_mib", value_at("predicted.nvidia_smi_mib"), number_format="{:z,.0f}"),
    Metric("predicted_host_peak_mib", value_at("predicted.host_peak_mib"), number_format="{:z,.0f}"),
    *_device_metrics("gpu", "average_mib", "mode_mib"),
    *_device_metrics("cpu", "training_average_mib", "training_mode_mib", "average_mib", "mode_mib"),
    *(Metric(name, largest_part(name), number_format="{:z,.3f}") for name in PARTS),
    Metric("cpu_process_mib", cpu_process_mib),
    Metric(PARTS_TOTAL, sum_of_parts, number_format="{:z,.3f}"),
    Metric(NOT_OFFLOADED, lambda record: sum_of_parts(record, offloaded_parts(record)), number_format="{:z,.3f}"),
    Metric("duration_s", value_at("run.duration_s")),
)

METRICS_BY_NAME = {metric.name: metric for metric in METRICS}


def read_metrics(record: RunRecord) -> dict[str, float | None]:
    """Return all metrics of a record by name; raise TypeError or ValueError if a value is not a number."""
    return {metric.name: metric.read(record) for metric in METRICS}
