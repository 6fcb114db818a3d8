"""Texts about the energy and cost of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def energy_lines(energy: Mapping[str, float | None]) -> Iterator[tuple[str, str]]:
    """Yield name and text of the lines about energy and cost; only what was measured.

    For example: ``GPUs 12.3 kJ (11.0 kJ training), 1.23 J per sample, idle 140 W`` and ``0.500 GPU-hours, price 1.25``.
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
            yield f"{name} {joules / 1000:,.1f} kJ" + (
                "" if training is None else f" ({training / 1000:,.1f} training)"
            )
    for key, text in (
        ("j_per_sample", "{:,.3g} J per sample"),
        ("j_per_token", "{:,.3g} J per token"),
        ("kwh", "{:.4f} kWh"),
        ("idle_w", "GPUs idle at {:,.0f} W"),
    ):
        if (value := energy.get(key)) is not None:
            yield text.format(value)


def _cost(energy: Mapping[str, float | None]) -> Iterator[str]:
    for key, text in (("gpu_hours", "{:,.3f} GPU-hours"), ("co2e_g", "{:,.1f} g CO2e"), ("price", "price {:,.2f}")):
        if (value := energy.get(key)) is not None:
            yield text.format(value)
