"""Values of foreign YAML files that are dangerous without a ``_target_``: shell lines, variables, and servers.

A cluster file needs shell lines and variables. So they are accepted from the cluster file that the user chooses with
``cluster=``. The server of a tracker gets the results and the user's credentials. It is accepted from the file that the
user chooses with ``tracker=``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distexp.launch.trust.hydra_values import UnsafeValue

TRACKER_URI = "tracker.uri"
CLUSTER_KEYS = ("environment", "sbatch", "srun", "modules", "setup", "python")
HYDRA_KEYS = ("job.env_set", "launcher.setup", "launcher.additional_parameters")

HARMLESS_VARIABLE = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|UCX|FI|PYTORCH|CUDA|CUBLAS|OMP|MKL|OPENBLAS|TOKENIZERS|HF|TRANSFORMERS)_\w+"
)
LOADS_FILES = re.compile(r"PLUGIN|PATH|LIB|DIR|FILE|HOME|MODULE|PROVIDER|CACHE|PRELOAD|INJECTION|ROOT|ENDPOINT")


def unsafe_commands(composed: DictConfig, typed: Container[str], folders: Sequence[Path]) -> Iterator[UnsafeValue]:
    """Yield the values that neither the command line nor the chosen file has.

    Args:
        composed: the composed configuration, with the hydra node.
        typed: the keys of the overrides on the command line.
        folders: folders of YAML files.
    """
    cluster, tracker = (_chosen_option(composed, typed, folders, group) for group in ("cluster", "tracker"))
    for key in CLUSTER_KEYS:
        yield from _compare(f"cluster.{key}", _raw(composed.cluster, key), cluster.get(key), typed)
    yield from _compare(TRACKER_URI, _raw(composed.tracker, "uri"), tracker.get("uri"), typed)
    for key in HYDRA_KEYS:
        yield from _compare(f"hydra.{key}", _raw(composed.hydra, key), None, typed)


def is_harmless_variable(key: str) -> bool:
    """Return whether a key is an environment variable of communication, memory or threads that loads no file."""
    section, _, name = key.rpartition(".")
    is_variable = section in ("cluster.environment", "hydra.job.env_set")
    return is_variable and bool(HARMLESS_VARIABLE.fullmatch(name)) and not LOADS_FILES.search(name)


def _compare(key: str, value: Any, allowed: Any, typed: Container[str]) -> Iterator[UnsafeValue]:
    if not value or value == allowed or key in typed:
        return
    if not isinstance(value, dict):
        yield UnsafeValue(key, _as_override(value))
        return
    for name, item in value.items():
        known = isinstance(allowed, Mapping) and allowed.get(name) == item
        if not known and f"{key}.{name}" not in typed and not is_harmless_variable(f"{key}.{name}"):
            yield UnsafeValue(f"{key}.{name}", _as_override(item))


def _raw(section: Any, key: str) -> Any:
    """Return a value with its interpolations; None if there is none."""
    for name in key.split("."):
        section = OmegaConf.to_container(section, resolve=False) if OmegaConf.is_config(section) else section
        section = section.get(name) if isinstance(section, dict) else None
    return section


def _as_override(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def _chosen_option(composed: DictConfig, typed: Container[str], folders: Sequence[Path], group: str) -> dict[str, Any]:
    """Return the content of the option that the command line chooses in a group; empty if it chooses none."""
    return _read_option(folders, group, str(composed.hydra.runtime.choices[group])) if group in typed else {}


def _read_option(folders: Sequence[Path], group: str, name: str) -> dict[str, Any]:
    """Return the content of an option, together with the options of its group in its ``defaults``."""
    path = next((path for folder in folders if (path := folder / group / f"{name}.yaml").is_file()), None)
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False) if path else {}
    if not isinstance(content, dict):
        return {}
    merged: dict[str, Any] = {}
    for default in content.get("defaults", []):
        if isinstance(default, str) and default not in ("_self_", name):
            merged |= _read_option(folders, group, default)
    for key, value in content.items():
        known = merged.get(key)
        merged[key] = known | value if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
