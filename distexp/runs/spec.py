"""One run, fully decided: what the launcher writes to ``spec.json`` and a worker reads back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from distexp.config import Config
from distexp.runs.record import SPEC, RunInfo, write_json


@dataclass(frozen=True)
class RunSpec:
    """A resolved configuration, and which run of which sweep it is."""

    config: Config
    run: RunInfo

    @property
    def nodes(self) -> int:
        """Nodes, simulated ones included."""
        return self.config.cluster.nodes

    @property
    def workers_per_node(self) -> int:
        """Workers on each node, one to a GPU."""
        workers = self.config.cluster.workers_per_node
        assert workers is not None, "resolve() decides the number of workers"
        return workers

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.config.cluster.world_size

    def write(self, directory: Path) -> None:
        """Writes ``directory/spec.json`` atomically."""
        write_json(directory / SPEC, {"config": asdict(self.config), "run": asdict(self.run)})

    @classmethod
    def read(cls, directory: Path) -> RunSpec:
        """Reads the ``spec.json`` of a run directory."""
        raw = json.loads((directory / SPEC).read_text())
        return cls(config=typed_config(raw["config"]), run=RunInfo(**raw["run"]))


def typed_config(values: Any) -> Config:
    """Values merged into the schema, as dataclasses; OmegaConf's errors name what does not fit."""
    return cast(Config, OmegaConf.to_object(OmegaConf.merge(_schema(), values)))


@lru_cache(maxsize=1)
def _schema() -> DictConfig:
    """The schema, read off the dataclasses once: that takes as long as composing a cell."""
    return cast(DictConfig, OmegaConf.structured(Config))
