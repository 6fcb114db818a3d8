"""Text about the padding of a run, if it is most of the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from distexp.config.model_checks import ATTENTIONS
from distexp.resolve.data_checks import UNPACKED_ATTENTION
from distexp.resolve.speed_checks import WHOLE_MODEL
from distexp.runs.record import RunRecord

LARGE_SHARE = 0.6
"""Padding share from which options against padding are named. The default run has 53 %."""


def padding_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield name and text of the line about padding, if its share is large.

    For example: ``91% of the tokens: try dataset.packing=true or dataset.padding=longest``.
    """
    share = record.metrics.padding_share
    if share is not None and share >= LARGE_SHARE and (options := list(_options(record, share))):
        yield "padding", f"{share:.0%} of the tokens: try {' or '.join(options)}"


def _options(record: RunRecord, share: float) -> Iterator[str]:
    """Yield the overrides with less padding that this run supports; none if it packs or sorts its samples."""
    config = record.config
    dataset, can_vary = config["dataset"], config["train"].get("compile") not in WHOLE_MODEL
    if dataset.get("packing") or dataset.get("bucketing"):
        return
    if "packing" in dataset["keys"] and config["model"]["_target_"] in ATTENTIONS and _fills_rows(record, share):
        yield _packing(config["model"])
    elif "bucketing" in dataset["keys"] and can_vary:
        yield "dataset.bucketing=true"
    if "padding" in dataset["keys"] and can_vary and dataset["padding"] != "longest":
        yield "dataset.padding=longest"


def _fills_rows(record: RunRecord, share: float) -> bool:
    """Return whether packed samples fill a micro-batch of each worker. With fewer rows, packing is refused."""
    accumulation: int = record.config["train"]["gradient_accumulation_steps"]
    return (record.metrics.steps_per_epoch or 0) * accumulation * (1 - share) >= 1


def _packing(model: Mapping[str, Any]) -> str:
    """Return the overrides for packing, with an attention that keeps the samples of a row apart."""
    if model["attention"] in UNPACKED_ATTENTION.get(model["_target_"], ()):
        return "model.attention=sdpa dataset.packing=true"
    return "dataset.packing=true"
