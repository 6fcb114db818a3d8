"""The records of GPU runs in ``docs/results``, and their configurations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from distexp.config import Config
from distexp.config.tasks import task_of
from distexp.runs.record import RunRecord
from tests.helpers.runs import REPOSITORY

RESULTS = REPOSITORY / "docs" / "results"


def gpu_records() -> dict[str, RunRecord]:
    """Return the records of completed GPU runs, by the path of the run in ``docs/results``."""
    paths = sorted(RESULTS.glob("**/record.json"))
    return {str(path.parent.relative_to(RESULTS)): RunRecord.read(path) for path in paths}


def recorded_config(record: RunRecord) -> Config:
    """Return the configuration of a record. Keys that are newer than the record are missing."""
    config = _namespace({"adapter": {"base_dtype": None}, **record.config})
    assert record.built is not None
    config.cluster.world_size = record.built.world_size
    config.model.traits = task_of(config.model.task)
    config.train.compiled = "blocks" if config.train.compile else "none"
    return cast(Config, config)


def _namespace(content: Any) -> Any:
    if isinstance(content, dict):
        return SimpleNamespace(**{name: _namespace(value) for name, value in content.items()})
    return content
