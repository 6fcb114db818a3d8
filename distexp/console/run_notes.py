"""Messages about energy, padding, operators, and other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config.model_checks import ATTENTIONS
from distexp.resolve.kernels import WHOLE_MODEL
from distexp.resolve.section_checks import UNPACKED_ATTENTION
from distexp.runs.disturbance import describe_disturbance, starved_share, threads_per_worker
from distexp.runs.record import RunRecord
from distexp.system.units import format_amount, format_kwh

LARGE_SHARE = 0.6  # Padding share from which options against padding are named. The default run has 53 %.
COMPILE_MIN = 3  # minutes that one of DeepSpeed's operators takes to compile, measured on two cores: 2 to 4


def busy_core_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about a run that something else slowed down; nothing for other runs."""
    share = starved_share(record)
    if share is not None:
        text = f"this run got {share:.0%} of the time of its CPU cores, probably because other programs use them"
        yield "busy cores", f"{text}. {_advice(record)}"
    elif disturbance := describe_disturbance(record):
        yield "uneven steps", f"{disturbance}, probably because of other programs. Repeat the run when they are done"


def _advice(record: RunRecord) -> str:
    """Return what to do. Threads wait for each other after each operator, so one busy core stops all of them."""
    threads = threads_per_worker(record)
    if threads == 1:
        return "Its speed is too low. Repeat it when they are done"
    return (
        f"The {threads} threads of a worker then wait for each other. Try cluster.cpus_per_worker=1 or "
        "cluster.environment={OMP_WAIT_POLICY:PASSIVE}. One thread sums in another order, so losses differ slightly"
    )


def energy_lines(energy: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines about energy and cost; only what was measured.

    For example: ``GPUs 12.3 kJ (11.0 kJ training), 1.23 J per sample, 3.43 Wh`` and ``0.500 GPU-hours, price 1.25``.
    """
    if used := ", ".join(_used(energy)):
        yield "energy", used
    if cost := ", ".join(_cost(energy)):
        yield "cost", cost


def _used(energy: Mapping[str, float | None]) -> Iterator[str]:
    gpu = energy.get("gpu_j")
    if gpu is None:
        gpu = energy.get("gpu_j_by_power")
    for name, joules, training in (
        ("GPUs", gpu, energy.get("gpu_j_training")),
        ("CPUs", energy.get("cpu_j"), energy.get("cpu_j_training")),
    ):
        if joules is not None:
            yield f"{name} {format_amount(joules / 1000)} kJ" + (
                "" if training is None else f" ({format_amount(training / 1000)} kJ training)"
            )
    for key, unit in (("j_per_sample", "sample"), ("j_per_token", "token")):
        if (value := energy.get(key)) is not None:
            yield f"{format_amount(value)} J per {unit}"
    if (kwh := energy.get("kwh")) is not None:
        yield format_kwh(kwh)
    if (idle := energy.get("idle_w")) is not None:
        yield f"GPUs idle at {idle:,.0f} W"


def _cost(energy: Mapping[str, float | None]) -> Iterator[str]:
    for key, text in (("gpu_hours", "{} GPU-hours"), ("co2e_g", "{} g CO2e"), ("price", "price {}")):
        if (value := energy.get(key)) is not None:
            yield text.format(f"{value:,.2f}" if key == "price" else format_amount(value))


def padding_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about padding, if its share is large.

    For example: ``91% of the tokens: try dataset.packing=true or dataset.padding=longest``.
    """
    share = record.metrics.padding_share
    if share is not None and share >= LARGE_SHARE and (options := list(_options(record, share))):
        yield "padding", f"{share:.0%} of the tokens: try {' or '.join(options)}"


def _options(record: RunRecord, share: float) -> Iterator[str]:
    """Yield the overrides with less padding that this run supports; none if it packs or sorts its samples."""
    config, model = record.config, record.config["model"]
    dataset, can_vary = config["dataset"], config["train"].get("compile") not in WHOLE_MODEL
    if dataset.get("packing") or dataset.get("bucketing"):
        return
    if "packing" in dataset["keys"] and model["_target_"] in ATTENTIONS and _fills_rows(record, share):
        # Packing requires an attention that keeps the samples of a row apart.
        is_unpacked = model["attention"] in UNPACKED_ATTENTION.get(model["_target_"], ())
        yield "model.attention=sdpa dataset.packing=true" if is_unpacked else "dataset.packing=true"
    elif "bucketing" in dataset["keys"] and can_vary:
        yield "dataset.bucketing=true"
    if "padding" in dataset["keys"] and can_vary and dataset["padding"] != "longest":
        yield "dataset.padding=longest"


def _fills_rows(record: RunRecord, share: float) -> bool:
    """Return whether packed samples fill a micro-batch of each worker. With fewer rows, packing is refused."""
    accumulation: int = record.config["train"]["gradient_accumulation_steps"]
    return (record.metrics.steps_per_epoch or 0) * accumulation * (1 - share) >= 1


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
    if "step" in entry:
        return f"compiling: step {entry['step']} of {entry['steps']}, {entry['elapsed_s']} s"
    return None
