"""Specification of a run: ``spec.json``, which the launcher writes and the workers read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distexp.config import Config
from distexp.runs.json_files import write_json
from distexp.runs.record_sections import RunInfo
from distexp.runs.regular_files import open_file
from distexp.runs.run_dir import SPEC
from distexp.runs.typed_values import parse_dataclass


@dataclass(frozen=True)
class RunSpec:
    """The resolved configuration of a run, and its identity."""

    config: Config
    run: RunInfo

    @property
    def nodes(self) -> int:
        """Number of nodes, including simulated ones."""
        return self.config.cluster.nodes

    @property
    def workers_per_node(self) -> int:
        """Number of workers on each node, one per GPU."""
        workers = self.config.cluster.workers_per_node
        assert workers is not None, "resolve() decides the number of workers"
        return workers

    @property
    def world_size(self) -> int:
        """Number of workers on all nodes."""
        return self.config.cluster.world_size

    def write(self, directory: Path) -> None:
        """Write ``directory/spec.json`` atomically."""
        write_json(directory / SPEC, {"config": asdict(self.config), "run": asdict(self.run)})

    @classmethod
    def read(cls, directory: Path) -> RunSpec:
        """Read the ``spec.json`` of a run directory.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not the specification of a run.
        """
        try:
            with open_file(directory / SPEC) as file:
                raw = json.load(file)
            return cls(config=parse_config(raw["config"]), run=parse_dataclass(RunInfo, raw["run"]))
        except (KeyError, TypeError, ValueError, OmegaConfBaseException) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise ValueError(f"{directory / SPEC} is damaged ({reason})") from error


def parse_config(values: Any) -> Config:
    """Return the configuration with some values, as dataclasses.

    Raises:
        OmegaConfBaseException: if a key or a type does not match the schema.
    """
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), values)))


@lru_cache(maxsize=1)
def _schema() -> DictConfig:
    """Return the schema. It is cached, because making it takes as long as composing a cell."""
    return cast(DictConfig, OmegaConf.structured(Config))
