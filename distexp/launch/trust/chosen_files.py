"""The YAML files that a composed configuration is from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig


def source_folders(composed: DictConfig) -> list[Path]:
    """Return the folders of YAML files that Hydra searches."""
    return [Path(source.path) for source in composed.hydra.runtime.config_sources if source.schema == "file"]


def chosen_files(composed: DictConfig) -> Iterator[Path]:
    """Yield the YAML files of the chosen options, and the primary file."""
    choices = composed.hydra.runtime.choices.items()
    names = [f"{group}/{option}.yaml" for group, option in choices if isinstance(option, str)]
    for path in (folder / name for folder in source_folders(composed) for name in names):
        if path.is_file():
            yield path
    yield from (path for folder in source_folders(composed) if (path := _primary_file(folder, composed)).is_file())


def _primary_file(folder: Path, composed: DictConfig) -> Path:
    return folder / f"{composed.hydra.job.config_name}.yaml"
