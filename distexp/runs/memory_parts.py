"""Entries of ``memory.parts`` in a record: the tensors of each rank, and the peaks of a step by phase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TENSORS = "train"
"""Phase of the entries with the tensors that a rank keeps. The other phases are those of a recorded step."""

PEAK_PARTS = (
    *("parameters_mib", "gradients_mib", "optimizer_states_mib", "activations_mib", "logits_mib"),
    *("communication_mib", "temporaries_mib", "other_mib"),
)
"""Keys whose sum is ``allocated_mib``. Activations contain the logits if ``logits_mib`` is None."""

Entry = Mapping[str, Any]


def tensor_entries(memory: Mapping[str, Any]) -> list[Entry]:
    """Return the entries with the tensors of each rank."""
    return [entry for entry in memory.get("parts") or () if entry.get("phase") == TENSORS]


def peak_entries(memory: Mapping[str, Any]) -> list[Entry]:
    """Return the entries with the peaks of a recorded step, one for each rank and phase."""
    return [entry for entry in memory.get("parts") or () if entry.get("phase") != TENSORS]


def highest_peak(memory: Mapping[str, Any]) -> Entry | None:
    """Return the entry of the phase and rank with the most allocated memory; None if no step was recorded."""
    return max(peak_entries(memory), key=lambda entry: float(entry.get("allocated_mib") or 0.0), default=None)
