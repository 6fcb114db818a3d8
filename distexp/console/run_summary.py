"""The panel of a run, and its notes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distexp.config import ModelConfig, ParallelConfig
from distexp.config.keys import speed_references
from distexp.config.model_checks import ATTENTIONS
from distexp.config.overrides import format_count
from distexp.config.schema import WHOLE_MODEL
from distexp.report.data.overview import TOTALS
from distexp.resolve.section_checks import UNPACKED_ATTENTION
from distexp.runs import texts as run_texts
from distexp.runs.disturbance import describe_disturbance, starved_share, threads_per_worker
from distexp.runs.memory_trace import PEAK_PARTS, highest_peak, tensor_entries
from distexp.runs.metrics import Metrics
from distexp.runs.record import RunRecord, RunSpec
from distexp.strategies.base import strategy_label
from distexp.system.typed_values import cpu_peak_mib, device_values, gpu_peak_mib
from distexp.system.units import MIB, format_amount, format_memory, format_tflops

# Messages about energy, padding, operators, and other programs.


LARGE_SHARE = 0.6  # Padding share from which options against padding are named. The default run has 53 %.
COMPILE_MIN = 3  # minutes that one of DeepSpeed's operators takes to compile, measured on two cores: 2 to 4


def busy_core_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about a run that something else slowed down; nothing for other runs."""
    share, threads = starved_share(record), threads_per_worker(record)
    if share is not None:
        text = f"this run got {share:.0%} of the time of its CPU cores, probably because other programs use them"
        advice = "Its speed is too low. Repeat it when they are done"
        if threads != 1:  # They wait for each other after each operator, so one busy core stops all of them.
            advice = (
                f"The {threads} threads of a worker then wait for each other. Try cluster.cpus_per_worker=1 or cluster."
                "environment={OMP_WAIT_POLICY:PASSIVE}. One thread sums in another order, so losses differ slightly"
            )
        yield "busy cores", f"{text}. {advice}"
    elif disturbance := describe_disturbance(record):
        yield "uneven steps", f"{disturbance}, probably because of other programs. Repeat the run when they are done"


def energy_lines(energy: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    """Yield the lines ``energy`` and ``cost``, only with what was measured: ``GPUs 12.3 kJ``, ``price 1.25``."""
    if used := ", ".join(_used(energy)):
        yield "energy", used
    costs = [(TOTALS[key], energy.get(key)) for key in ("gpu_hours", "co2e_g", "price")]
    if known := [text(value) for text, value in costs if value is not None]:
        yield "cost", ", ".join(known)


def _used(energy: Mapping[str, float | None]) -> Iterator[str]:
    gpu = energy.get("gpu_j")
    for name, joules, training in (
        ("GPUs", energy.get("gpu_j_by_power") if gpu is None else gpu, energy.get("gpu_j_training")),
        ("CPUs", energy.get("cpu_j"), energy.get("cpu_j_training")),
    ):
        if joules is not None:
            of_it = "" if training is None else f" ({format_amount(training / 1000)} kJ training)"
            yield f"{name} {format_amount(joules / 1000)} kJ{of_it}"
    for key, unit in (("j_per_sample", "sample"), ("j_per_token", "token")):
        if (value := energy.get(key)) is not None:
            yield f"{format_amount(value)} J per {unit}"
    if (kwh := energy.get("kwh")) is not None:
        yield TOTALS["kwh"](kwh)
    if (idle := energy.get("idle_w")) is not None:
        yield f"GPUs idle at {idle:,.0f} W"


def padding_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the line ``padding``, if its share is large: ``91% of the tokens: try dataset.packing=true``."""
    share = record.metrics.padding_share
    if share is not None and share >= LARGE_SHARE and (options := list(_options(record, share))):
        yield "padding", f"{share:.0%} of the tokens: try {' or '.join(options)}"


def _options(record: RunRecord, share: float) -> Iterator[str]:
    """Yield the overrides with less padding that this run supports; none if it packs or sorts its samples."""
    config, model = record.config, record.config["model"]
    has_whole_rows = config.get("parallel", {}).get("context", 1) == 1  # Slices of rows have equal lengths.
    dataset, can_vary = config["dataset"], config["train"].get("compile") not in WHOLE_MODEL and has_whole_rows
    if dataset.get("packing") or dataset.get("bucketing"):
        return
    # Packed samples must fill a micro-batch of each worker. With fewer rows, packing is refused.
    rows = (record.metrics.steps_per_epoch or 0) * config["train"]["gradient_accumulation_steps"] * (1 - share)
    if "packing" in dataset["keys"] and model["_target_"] in ATTENTIONS and rows >= 1:
        # Packing requires an attention that keeps the samples of a row apart.
        is_unpacked = model["attention"] in UNPACKED_ATTENTION.get(model["_target_"], ())
        yield "model.attention=sdpa dataset.packing=true" if is_unpacked else "dataset.packing=true"
    elif "bucketing" in dataset["keys"] and can_vary:
        yield "dataset.bucketing=true"
    if "padding" in dataset["keys"] and can_vary and dataset["padding"] != "longest":
        yield "dataset.padding=longest"


def build_message(entry: dict[str, Any]) -> str | None:
    """Return the line for a line of ``operators.jsonl``; None for the passing of time."""
    if "compiling" in entry:
        return f"compiling DeepSpeed's operator {entry['compiling']}, once, about {COMPILE_MIN} minutes"
    if "waiting" in entry:
        return f"DeepSpeed's operators: waiting for {entry['waiting']}"
    if "compiled_s" in entry:
        return f"DeepSpeed's operators were compiled in {entry['compiled_s']} s"
    if "waited_s" in entry:
        waited = f"this run waited {entry['waited_s']} s for another run that compiled them"
        return f"DeepSpeed's operators are ready: {waited}"
    return f"compiling: step {entry['step']} of {entry['steps']}, {entry['elapsed_s']} s" if "step" in entry else None


MAX_EPOCHS, MAX_STRAGGLERS = 6, 3  # epochs and slow ranks that are shown in a panel
AUTO = ModelConfig().attention  # the attention that a model has by default


def status_color(status: str) -> str:
    """Return the color of a status on a terminal."""
    return {"completed": "green", "invalid": "yellow", "oom_gpu": "magenta", "oom_host": "magenta"}.get(status, "red")


def run_title(spec: RunSpec) -> str:
    """Describe a run: ``bloom_tiny on squad_sample, fsdp full_shard, fp32, 2 cpu workers``."""
    config = spec.config
    workers = format_count(spec.world_size, f"{config.cluster.device} worker")
    nodes = f" on {spec.nodes} nodes" if spec.nodes > 1 else ""
    if config.is_preflight:
        return f"preflight with {workers}{nodes}"
    engine = "" if config.engine.name == "native" else f", {config.engine.name}"
    model = run_texts.model_label(config.model.name, config.scale.name)
    ways = "".join(f", {text}" for text in _ways(asdict(config)))
    return (
        f"{model} on {config.dataset.name}, {strategy_label(config)}{engine}{ways}, {config.precision.name}, "
        f"{workers}{nodes}"
    )


def _ways(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield how workers share the model, and how activations are stored, if this is not the default."""
    defaults = vars(ParallelConfig())
    yield from (
        f"parallel.{key}={value}" for key, value in config.get("parallel", {}).items() if value != defaults.get(key)
    )
    stored = config.get("train", {}).get("activation_checkpointing")
    yield from (
        ("activation checkpointing" if stored is True else f"{stored} activation checkpointing",) if stored else ()
    )


IMPORTANT = (
    *("error", "GPU memory", "would fit", "largest", "interconnect", "matrix ceiling"),
    *("throughput", "peak memory", "eval loss", "train loss", "answers", "eval accuracy", "runtime", "not measured"),
    *("slow ranks", "busy cores", "uneven steps", "padding", "model FLOPs", "step time", "prediction", "communication"),
)
"""Names of the lines that come first at the end of a run, in their order."""


def most_important_first(lines: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the lines of a panel in the order in which they are kept if there are too many."""
    order = {name: n for n, name in enumerate(IMPORTANT)}
    return sorted(lines, key=lambda line: order.get(line[0], len(order)))


def summary_lines(record: RunRecord, waited_s: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield name and text of each line of a run's panel. ``waited_s`` is the time that the user has waited for it."""
    metrics = record.metrics
    yield from _error(record)
    yield from _preflight(record.preflight) if record.preflight is not None else ()
    yield from _built(record)
    yield from _quality(record)
    yield from _speed(record)
    yield from busy_core_lines(record)
    yield from padding_lines(record)
    yield from _memory(record)
    yield from _prediction(record)
    if metrics.stragglers:
        yield "slow ranks", ". ".join(map(run_texts.describe_straggler, metrics.stragglers[:MAX_STRAGGLERS]))
    yield from energy_lines(metrics.energy or {})
    if missing := "; ".join(run_texts.missing_costs(record)):
        yield "not measured", missing
    if metrics.train_runtime is not None:
        attempts = record.run.attempts
        is_resumed = bool(attempts) and attempts[-1].get("resumed_from_step") is not None
        where = "workers of the latest attempt" if is_resumed else "workers"
        parts = [
            f"{metrics.train_runtime:.1f} s training and evaluation",
            f"{record.run.duration_s:.1f} s in the {where}",
        ]
        yield "runtime", ", ".join([*parts, *([f"{waited_s:.1f} s with imports and start"] if waited_s else [])])


def _error(record: RunRecord) -> Iterator[tuple[str, str]]:
    if record.error is None:
        return
    text, rank = run_texts.failure_text(record), f"rank {record.error.rank}"
    yield "error", text if record.error.rank is None or rank in text else f"{text} ({rank})"
    yield from run_texts.memory_lines(record.error.memory) if record.error.memory else ()


def _preflight(preflight: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the bus bandwidth of the largest all-reduce over all ranks, and the fastest matrix product."""
    reduces = [one for one in preflight["measurements"] if (one["group"], one["operation"]) == ("all", "all_reduce")]
    interconnect = "not measured: single worker"
    if largest := max(reduces, key=lambda one: int(one["bytes"]), default=None):
        size = f"{format_memory(largest['bytes'] / MIB)} over {preflight['backend']}"
        interconnect = f"{largest['busbw_gbps']:.2f} GB/s bus bandwidth, all_reduce of {size}"
    yield "interconnect", interconnect
    if products := preflight.get("matrix_products"):
        fastest = max(products, key=lambda product: float(product["tflops"]))
        yield "matrix ceiling", f"{format_tflops(fastest['tflops'])} in {fastest['precision']}"


def _built(record: RunRecord) -> Iterator[tuple[str, str]]:
    if (built := record.built) is not None:
        label, wrapper = (
            run_texts.record_model_label(record),
            "no wrapper" if built.wrapper == "none" else built.wrapper,
        )
        stand_in = f" ({label})" if run_texts.STAND_IN in label else ""
        trained = built.trained_parameters
        frozen = "" if trained in (None, built.parameters) else f", {trained:,} of them trained"
        model = f"{built.parameters:,} parameters{stand_in}{frozen}, {built.optimizer}"
        shared = f", layers shared by {built.tensor} workers" if built.tensor > 1 else ""
        shared += f", rows shared by {built.context} workers" if built.context > 1 else ""
        shared += f", {built.pipeline} workers in a {built.schedule} pipeline" if built.pipeline > 1 else ""
        shared += "".join(f", {text}" for text in _ways(record.config) if "=" not in text)
        yield "built", f"{wrapper}{_replicas_and_shards(built.mesh)}{shared}, {model}"
    if kernels := describe_kernels(record.config):
        yield "kernels", kernels


def _memory(record: RunRecord) -> Iterator[tuple[str, str]]:
    peaks = [(f"GPU {entry['index']} of node {entry['node']}", gpu_peak_mib(entry)) for entry in record.memory["gpu"]]
    peaks += [(f"CPU of node {entry['node']}", entry.get("peak_mib")) for entry in record.memory["cpu"]]
    if measured := [f"{device} {_mib(mib)}" for device, mib in peaks if mib is not None]:
        yield "peak memory", ", ".join(measured)
    if parts := tensor_entries(record.memory):
        yield "memory parts", _largest_parts(parts)
    if peak := highest_peak(record.memory):
        texts = [f"{_part_title(name)} {peak[name]:,.0f}" for name in PEAK_PARTS if round(peak.get(name) or 0.0)]
        yield "memory peak", f"{_mib(peak.get('allocated_mib'))} in the {peak.get('phase')} phase: {', '.join(texts)}"


def _prediction(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the predicted peak next to the measured one: of torch's memory or, on CPUs, of the processes."""
    if record.predicted is None:
        return
    if record.config["cluster"]["device"] == "cpu":
        predicted, what = record.predicted.host_peak_mib, "CPU memory"
        measured = cpu_peak_mib(record.memory)
    else:
        predicted, what = record.predicted.peak_allocated_mib, "allocated by torch"
        measured = max(device_values(record.memory.get("torch"), "peak_allocated_mib"), default=None)
    if predicted is not None:
        error = ""
        if measured and record.status == "completed":
            error = f", measured {_mib(measured)} ({100 * (predicted / measured - 1):+.1f} %)"
        yield "prediction", f"{_mib(predicted)} {what}{error}"


def describe_kernels(config: Mapping[str, Any]) -> str:
    """Return the options of speed that differ from the reference: ``fast (train.compile=model)``; or nothing."""
    changed = []
    for key, reference in speed_references().items():
        section, _, name = key.rpartition(".")
        value = config.get(section, {}).get(name)
        if value not in (None, reference):
            changed.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    attention = config.get("model", {}).get("attention", AUTO)
    listed = ", ".join([*changed, *([f"model.attention={attention}"] if attention != AUTO else [])])
    if config.get("kernels", {}).get("name") == "fast":
        return f"fast ({listed or 'no faster option for this model and device'})"
    return listed


def _replicas_and_shards(mesh: Sequence[int]) -> str:
    """Return how the workers hold the model: ``, 2 replicas of 4 shards``; empty for one worker."""
    replicas, shards = (*mesh, 1, 1)[:2]
    parts = [format_count(number, noun) for number, noun in ((replicas, "replica"), (shards, "shard")) if number > 1]
    return f", {' of '.join(parts)}" if parts else ""


def format_loss(value: float | None) -> str:
    """Format a loss. None is a loss that is not finite, because JSON has no number for it."""
    return "nan" if value is None else f"{value:.4f}"


def format_answer_scores(exact_match: float, f1: float) -> str:
    """Format the scores of generated answers, in percent."""
    return f"exact match {exact_match:.1f}%, F1 {f1:.1f}%"


def _quality(record: RunRecord) -> Iterator[tuple[str, str]]:
    metrics = record.metrics
    by_epoch = {
        "train loss": [format_loss(value) for value in metrics.train_losses],
        "eval loss": [format_loss(value) for value in metrics.eval_losses],
        "eval accuracy": [f"{value:.1%}" for value in metrics.eval_accuracies],
        "eval top-5": [f"{value:.1%}" for value in metrics.eval_top5_accuracies],
    }
    for name, epochs in by_epoch.items():
        if epochs:  # of many only the first two and the last three
            yield name, " -> ".join(epochs if len(epochs) <= MAX_EPOCHS else [*epochs[:2], "...", *epochs[-3:]])
    if metrics.exact_match is not None and metrics.f1 is not None:
        yield "answers", format_answer_scores(metrics.exact_match, metrics.f1)


def _speed(record: RunRecord) -> Iterator[tuple[str, str]]:
    metrics = record.metrics
    if metrics.train_samples_per_second is not None:
        yield "throughput", f"{metrics.train_samples_per_second:,.1f} samples/s"
    elif record.built is not None:
        first = (record.config.get("train") or {}).get("measure_after_step")
        warmup = (
            f"the first {first} steps and their speeds do not count (train.measure_after_step), and " if first else ""
        )
        yield "throughput", f"not measured: {warmup}no {'later ' if first else ''}step was timed"
    if metrics.step_time_s is not None:
        yield "step time", f"{metrics.step_time_s['p50'] * 1000:.1f} ms median"
    if metrics.tflops_per_device and metrics.executed_tflops_per_device and (metrics.mfu or metrics.mfu_of_ceiling):
        yield "model FLOPs", _utilization(metrics.tflops_per_device, metrics.mfu, metrics, "MFU")
        yield "executed FLOPs", _utilization(metrics.executed_tflops_per_device, metrics.hfu, metrics, "HFU")
    if metrics.compile:
        text = f"{metrics.compile.get('seconds', 0.0):.1f} s, {format_count(metrics.compile.get('graphs', 0), 'graph')}"
        yield "compilation", f"{text}, with the cache of earlier runs" if metrics.compile.get("cache_hits") else text
    if metrics.communication is not None:
        yield "communication", _communication(metrics.communication)


def _utilization(tflops: float, fraction: float | None, metrics: Metrics, name: str) -> str:
    """Return a rate with its known fractions of the datasheet's peak and of the matrix ceiling."""
    ceiling, of_ceiling = metrics.matrix_ceiling_tflops, ""
    if ceiling and tflops <= ceiling:
        of_ceiling = f"{tflops / ceiling:.1%} of the matrix ceiling ({format_tflops(ceiling)})"
    elif ceiling:
        cause = "so the ceiling was probably measured on a busy machine: type distexp preflight again"
        of_ceiling = f"more than the matrix ceiling ({format_tflops(ceiling)}), {cause}"
    elif fraction is not None:
        of_ceiling = "matrix ceiling not measured: type distexp preflight once"
    of_peak = "" if fraction is None else f"{name} {fraction:.1%}"
    return ", ".join(filter(None, [f"{format_tflops(tflops)} per worker", of_peak, of_ceiling]))


def _communication(measured: dict[str, Any]) -> str:
    """Return the fraction of the profiled steps in which a collective transfers data or waits for other ranks.

    For example: ``9% of the time of 3 profiled steps, including waiting for other ranks (profile/rank0.json.gz)``.
    It is more than the exposed communication of ``distexp explain``, which has the waiting as another part.
    """
    if measured["share"] is None:
        return f"not measured: {measured['note']}"
    exposed = measured["exposed_share"]
    overlap = "" if exposed is None else f" ({exposed:.0%} not overlapped with compute)"
    steps = format_count(measured["profiled_steps"], "profiled step")
    share = f"{measured['share']:.0%} of the time of {steps}, including waiting for other ranks"
    return f"{share}{overlap} (profile/rank0.json.gz)"


def _largest_parts(entries: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in entries[0] if name.endswith("_mib")]
    entry = max(entries, key=lambda entry: sum(entry.get(name) or 0.0 for name in names))
    texts = [f"{_part_title(name)} {entry[name]:,.3f}" for name in names if entry[name] is not None]
    return f"{', '.join(texts)} MiB on one worker"


def _part_title(name: str) -> str:
    return name.removesuffix("_mib").replace("_", " ")


def _mib(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f} MiB"
