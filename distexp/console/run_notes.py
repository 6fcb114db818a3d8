"""Messages about energy, padding, operators, and other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config.model_checks import ATTENTIONS
from distexp.config.schema import WHOLE_MODEL
from distexp.report.data.remarks import TOTALS
from distexp.resolve.section_checks import UNPACKED_ATTENTION
from distexp.runs.disturbance import describe_disturbance, starved_share, threads_per_worker
from distexp.runs.record import RunRecord
from distexp.system.units import format_amount

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
    dataset, can_vary = config["dataset"], config["train"].get("compile") not in WHOLE_MODEL
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
