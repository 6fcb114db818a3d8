"""Rows of a report: one run each, read from the records on disk; and how sentences name runs and numbers."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import MISSING as UNKNOWN

from distexp.config import ClusterConfig, ParallelConfig
from distexp.config.fields import flatten, info_of
from distexp.config.keys import config_groups, schema_fields, speed_references, strategy_groups, strategy_sections
from distexp.config.overrides import join_first
from distexp.exceptions import printable
from distexp.report.data.metrics import SPEED, read_metrics
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.record import RunRecord, find_records
from distexp.runs.run_dir import RECORD
from distexp.system.typed_values import number_of


@dataclass(frozen=True)
class Row:
    """One run with its settings and metrics by name; ``path`` is the record, if it was read from disk."""

    label: str
    record: RunRecord
    settings: dict[str, Any]
    metrics: dict[str, float | None]
    path: Path | None = None

    @property
    def completed(self) -> bool:
        """Return whether the training finished."""
        return self.record.status == "completed"

    @property
    def disturbance(self) -> str | None:
        """Return what shows that something else slowed the completed run down; None if nothing does."""
        return describe_disturbance(self.record) if self.completed else None

    @property
    def measured_steps(self) -> int:
        """Return the number of steps that the speed is measured over, up to ten, each a block of its own."""
        total, speed = self.record.metrics.total_steps, self.metrics[SPEED]
        if total is None or speed is None:
            return 0
        blocks = number_of(self.record.metrics.speed_error or {}, "blocks")
        if blocks is not None:
            return int(blocks)
        left_out = (self.settings.get(name) or 0 for name in ("measure_after_step", "profile_steps"))
        return total - sum(map(int, left_out))


def row_from_record(record: RunRecord, label: str, path: Path | None = None) -> Row:
    """Return the row of a record. Raise KeyError, TypeError, ValueError or AttributeError if it has invalid content."""
    return Row(label, record, read_settings(record), read_metrics(record), path)


def rows_from_records(records: Sequence[RunRecord], sweep_dir: Path | None = None) -> list[Row]:
    """Return the rows of records in memory, labeled by run number; without a directory they have no path."""
    return [
        row_from_record(record, number := str(record.run.number), sweep_dir and sweep_dir / number / RECORD)
        for record in records
    ]


def load_rows(roots: Sequence[Path]) -> tuple[list[Row], list[str]]:
    """Return a row for each readable record below some directories, and a message for each other one."""
    rows: list[Row] = []
    skipped: list[str] = []
    paths = list(dict.fromkeys(Path(os.path.abspath(path)) for path in find_records(*roots)))
    for path, label in zip(paths, run_labels(paths), strict=True):
        try:
            rows.append(row_from_record(RunRecord.read(path), printable(label), path))
        except (KeyError, TypeError, AttributeError) as error:
            skipped.append(f"{path} is not a record of distexp: {type(error).__name__}: {error}")
        except OSError as error:
            skipped.append(f"{path} cannot be read: {error.strerror}")
        except ValueError as error:
            message = str(error)
            skipped.append(message if str(path) in message else f"{path}: {message}")
    return rows, [printable(message) for message in skipped]


def run_labels(paths: Sequence[Path]) -> list[str]:
    """Return labels such as ``3``, or ``01-35-43/3`` if there are several sweeps."""
    sweeps = [str(path.parent.parent) for path in paths]
    if len(set(sweeps)) < 2:
        return [path.parent.name for path in paths]
    # Each folder has the shortest end that is unique, without a common date.
    folders = sorted(set(sweeps))
    parts = [folder.split("/") for folder in folders]
    deepest = max(map(len, parts))
    count = next(n for n in range(1, deepest + 1) if len({tuple(names[-n:]) for names in parts}) == len(parts))
    ends = ["/".join(names[-count:]) for names in parts]
    same = takewhile(lambda pair: pair[0] == pair[1], zip(min(ends), max(ends), strict=False))
    cut = "".join(first for first, _ in same).rfind("_") + 1
    short = {folder: end[cut:] for folder, end in zip(folders, ends, strict=True)}
    return [f"{short[sweep]}/{path.parent.name}" for sweep, path in zip(sweeps, paths, strict=True)]


def name_runs(labels: Iterable[str], limit: int = 4) -> str:
    """Return ``run 3``, or ``runs 3, 5 and 2 more``."""
    known = list(labels)
    return f"run{'s' if len(known) > 1 else ''} {join_first(known, limit)}"


def format_change(after: float, before: float) -> str:
    """Return the relative change as a percentage with its sign, never ``-0.0%``."""
    return f"{round(100 * (after / before - 1), 1) + 0.0:+.1f}%"


def format_noise(noise: float, reference: float) -> str:
    """Return the noise of a value as ``±4%``; large ones are not exact."""
    percent = 100 * noise / abs(reference) if reference else 0.0
    return f"±{percent:.2g}%" if percent < 99.5 else "more than ±100%"


# Settings of one run by their short names, how they are written, and its hardware and environment.
#
# Hardware and environment settings do not define a training, but repeats must share them. Nothing here lists the
# strategies: the config groups in ``conf/`` and the sections of ``Config`` define them.


NOT_A_SETTING = (  # Sections that are left out here. `read_settings` adds what matters of `cluster` and `offload`.
    *("name", "command", "exercise", "scale", "sweep", "repeats", "profile", "plan", "choose", "forecast"),
    "trusted_packages",
    *("cluster", "offload"),
)

MAX_LENGTH = 24  # characters of a value in a table or in a list of settings
TRAINING_KEYS = frozenset({"nodes", "workers_per_node", "device"})
SUBMISSION_KEYS = frozenset(
    {"name", "_target_", "gpus_per_node", "timeout_min", "hang_timeout_min", "account", "qos", "reservation"}
    | {"signal_delay_s", "requeue", "array_parallelism", "wait", "dry_run"}
)
"""Keys of ``cluster`` that no metric depends on: how a job is submitted, and how long it may run."""

CLUSTER_KEYS = frozenset(field.name for field in fields(ClusterConfig)) - TRAINING_KEYS - SUBMISSION_KEYS
TRAIN_KEYS = frozenset({"checkpoint_every", "profile_steps", "micro_batch_search_s"})
SECTIONS = frozenset({"measure", "preflight", "tracker"})
GPU, ARITHMETIC = "gpu", "arithmetic"
IGNORED_VARIABLES = ("NCCL_VERSION", "NCCL_DEBUG")  # prefixes of environment variables that change nothing but the logs
SEED = "seed"
WORKERS = "workers"
RENAMED = {  # keys whose short name follows no rule
    "cluster.workers_per_node": WORKERS,
    "offload.enabled": "offload",
    "offload.pin_memory": "offload",
}


def run_label(number: str, settings: str = "") -> str:
    """Return the label of a run: ``run 3 (strategy=fsdp)``, or ``run 3`` without settings."""
    return f"run {number} ({settings})" if settings else f"run {number}"


def read_settings(record: RunRecord) -> dict[str, Any]:
    """Return the settings of a run by short name, then its environment settings.

    Options of another strategy are None, because they mean nothing in this run. A key that the record lacks, because
    it was added later, has its default. An earlier default that null replaced is None, unless it was typed, so that it
    is no difference to later runs. Raise KeyError if a section is missing.
    """
    typed = overridden_names([record])
    config = _with_defaults(record.config)
    foreign = strategy_sections() - {config["strategy"]["name"]}
    found: dict[str, Any] = {}
    for key, value in flatten(config):
        section, _, rest = key.partition(".")
        if section not in NOT_A_SETTING and rest not in ("_target_", "keys") and not is_environment_key(key):
            is_old_default = (
                value is not None and value == _replaced_defaults().get(key) and short_name(key) not in typed
            )
            found[short_name(key)] = None if section in foreign or is_old_default else value
    if record.strategy is not None and config["strategy"]["name"] not in strategy_sections():
        found["strategy"] = record.strategy.label  # The main options of the others have columns.
    offload, cluster = config["offload"], config["cluster"]
    found["offload"] = "pinned" if offload["pin_memory"] else offload["enabled"]
    found["device"], found["nodes"] = cluster["device"], cluster["nodes"]
    found[WORKERS] = world_size(record)
    found |= read_environment_settings(record)
    first = {name: found.pop(name) for name in usual_order() if name in found}
    return {**first, **found}


def _with_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    completed: dict[str, Any] = {"adapter": {}, **config}  # Earlier records have no such section.
    for section, defaults in _defaults().items():
        if isinstance(present := completed.get(section), Mapping):
            completed[section] = {**present, **{name: defaults[name] for name in defaults if name not in present}}
    return completed


@lru_cache(maxsize=1)
def _defaults() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for key, spec in schema_fields():
        section, _, name = key.rpartition(".")
        default = spec.default if spec.default_factory is MISSING else spec.default_factory()
        reference = info_of(spec).reference
        if default != UNKNOWN:
            found.setdefault(section, {})[name] = default if reference is None else reference
    return found


@lru_cache(maxsize=1)
def _replaced_defaults() -> dict[str, Any]:
    """Return the former defaults, as in the run id, of the keys whose default is null now."""
    return {key: old for key, spec in schema_fields() if (old := info_of(spec).id_of_null) is not None}


def world_size(record: RunRecord) -> int | None:
    """Return the number of workers on all nodes; None if an invalid cell left it open."""
    if record.built is not None:
        return record.built.world_size
    cluster = record.config["cluster"]
    per_node = cluster["workers_per_node"]
    return None if per_node is None else int(cluster["nodes"]) * int(per_node)


def task_name(settings: Mapping[str, Any]) -> str:
    """Return the model and its data set. Only runs of the same task can be compared."""
    return f"{settings.get('model')} on {settings.get('dataset')}"


def global_batch(settings: Mapping[str, Any]) -> int | None:
    """Return the samples of an optimizer step on all workers; None if unknown."""
    if settings.get("global_batch_size"):
        return int(settings["global_batch_size"])
    factors = [settings.get(name) for name in ("micro_batch_size", "gradient_accumulation_steps", WORKERS)]
    if not all(factors):
        return None
    degrees: dict[str, Any] = {spec.name: settings.get(f"parallel.{spec.name}") or 1 for spec in fields(ParallelConfig)}
    return math.prod(int(factor) for factor in factors if factor) // ParallelConfig(**degrees).copies


def training_key(settings: Mapping[str, Any]) -> str:
    """Return a key that ignores the seed and the environment settings."""
    kept = {name: value for name, value in settings.items() if name != SEED and not is_environment_setting(name)}
    return value_key(kept)


def value_key(value: Any) -> str:
    """Return a text that is equal for equal values of a setting."""
    if value is None or isinstance(value, (str, int, float)):
        return repr(value)  # the usual case, and a report has a million of them
    return json.dumps(value, sort_keys=True, default=str)


def format_setting(value: Any, limit: int | None = None) -> str:
    """Return a value as it is typed. If too long, it is cut on the left, because paths differ at their end."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json.dumps(value, default=str).replace('"', "")
    return text if limit is None or len(text) <= limit else "…" + text[-limit + 1 :]


def format_settings(settings: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return ``strategy=fsdp, offload=true`` without the settings that are None."""
    known = ((name, settings.get(name)) for name in names)
    return ", ".join(f"{name}={format_setting(value, MAX_LENGTH)}" for name, value in known if value is not None)


def is_environment_key(key: str) -> bool:
    """Return whether a dotted key of the configuration is an environment setting."""
    section, _, rest = key.partition(".")
    keys = {"cluster": CLUSTER_KEYS, "train": TRAIN_KEYS}.get(section)
    return section in SECTIONS if keys is None else rest.partition(".")[0] in keys


def is_environment_setting(name: str) -> bool:
    """Return whether a short name is that of an environment setting."""
    head = name.partition(".")[0]
    return is_hardware(name) or head in CLUSTER_KEYS or head in TRAIN_KEYS or head in SECTIONS


def is_hardware(name: str) -> bool:
    """Return whether a setting is of the machine. A run that failed early may not know its GPU and its arithmetic."""
    return name in (GPU, ARITHMETIC) or name.isupper()


def read_environment_settings(record: RunRecord) -> dict[str, Any]:
    """Return the environment settings of a run by short name."""
    environment = record.environment
    found = {short_name(key): value for key, value in flatten(record.config) if is_environment_key(key)}
    variables = environment.variables if environment else {}
    found |= {name: value for name, value in variables.items() if not name.startswith(IGNORED_VARIABLES)}
    if environment and environment.arithmetic:
        found[ARITHMETIC] = environment.arithmetic
    return {GPU: environment.gpu_name if environment else None, **found}


def knows_hardware(record: RunRecord, name: str, value: Any) -> bool:
    """Return whether a run got far enough to record a setting of its machine.

    Its workers record the arithmetic and the variables. The command may know the GPU of a run without workers.
    """
    found = record.environment
    seen = found and (found.gpu_name if name == GPU else found.arithmetic)
    return value is not None or (name != ARITHMETIC and (record.status == "completed" or bool(seen)))


@lru_cache(maxsize=4096)
def short_name(key: str) -> str:
    """Return the name under which people type a key.

    ``model.name`` is set by the config group ``model``, and ``fsdp.sharding`` by the group ``sharding``, so they
    have the names of these groups. ``train.seed`` is ``seed``. ``model.num_layers`` has no shorter name.
    """
    if key in RENAMED:
        return RENAMED[key]
    section, _, leaf = key.partition(".")
    if leaf == "name" and section in config_groups() and section != "cluster":
        return section
    if leaf in config_groups():
        return leaf
    prefix = next((prefix for prefix in ("cluster.environment.", "cluster.", "train.") if key.startswith(prefix)), "")
    return key.removeprefix(prefix)


def overridden_names(records: Sequence[RunRecord]) -> set[str]:
    """Return the short names of the keys that the overrides of some runs set."""
    keys = {text.split("=", 1)[0].lstrip("+~") for record in records for text in record.run.overrides}
    return {short_name(key) for key in keys}


@lru_cache(maxsize=1)
def kernel_options() -> frozenset[str]:
    """Return the short names of the keys that ``kernels=fast`` sets."""
    return frozenset(map(short_name, (*speed_references(), "model.attention")))


def is_strategy_option(name: str) -> bool:
    """Return whether a name is an option of one strategy, as ``fsdp.wrap``."""
    return name in strategy_groups() or name.partition(".")[0] in strategy_sections()


@lru_cache(maxsize=1)
def usual_order() -> tuple[str, ...]:
    """Return the settings that come first in tables, in their order."""
    return (
        *("model", "adapter", "dataset", "engine", "strategy", *strategy_groups(), "offload", "precision", "kernels"),
        *("scaling", "device", "gpu", "nodes", WORKERS),
    )
