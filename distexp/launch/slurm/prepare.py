"""Files of a run that are written before its submission."""

from __future__ import annotations

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from distexp.launch.slurm.submission import PreparedRun
from distexp.launch.sweep import AssignedRun, write_invalid
from distexp.runs import attempts
from distexp.runs.record import RunRecord
from distexp.runs.run_dir import HYDRA
from distexp.runs.spec import RunSpec


def prepare_run(run: AssignedRun) -> PreparedRun | RunRecord:
    """Write the spec of a run and return what to submit; for an invalid run write its record and return that."""
    write_hydra_files(run.composed, run.directory)
    if run.cell.config is None:
        return write_invalid(run)
    run.info.attempts = attempts.read_attempts(run.directory)
    attempts.archive_previous(run.directory)
    spec = RunSpec(run.cell.config, run.info)
    spec.write(run.directory)
    run.cell.write_prediction(run.directory)
    return PreparedRun(spec, run.directory)


def write_hydra_files(composed: DictConfig, directory: Path) -> None:
    """Write ``.hydra/`` with the files that Hydra itself writes."""
    folder = directory / HYDRA
    folder.mkdir(parents=True, exist_ok=True)
    content = OmegaConf.to_container(composed, enum_to_str=True)
    assert isinstance(content, dict)
    hydra = content.pop("hydra")
    parts = {"overrides": hydra["overrides"]["task"], "hydra": {"hydra": hydra}, "config": content}
    for name, part in parts.items():
        # The same YAML as OmegaConf.save writes, ten times as fast: a sweep may have hundreds of runs.
        (folder / f"{name}.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper, sort_keys=False))
