"""Name of a model in tables and messages. It shows that a run used a small stand-in."""

from __future__ import annotations

from pathlib import Path

from distexp.runs.record import RunRecord

STAND_IN = "stand-in for"


def model_label(name: str, scale: str) -> str:
    """Return a model's name; ``tiny stand-in for bloom_560m`` if its sizes were made small.

    A local folder is shown by its last part.
    """
    short = Path(name).name if Path(name).is_absolute() else name
    return short if scale == "full" or short.endswith(f"_{scale}") else f"{scale} {STAND_IN} {short}"


def record_model_label(record: RunRecord) -> str:
    """Return the label of a record's model; see ``model_label``."""
    scale = (record.config.get("scale") or {}).get("name") or "full"
    return model_label(str(record.config["model"]["name"]), scale)
