"""Texts about the energy and cost of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distexp.system.units import format_amount, format_kwh


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
