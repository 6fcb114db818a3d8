"""Cells of a sweep, and their composition by Hydra."""

import pickle
import signal
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from os import getpid
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from distexp.config import Command, Config, ConfigError, PlanConfig
from distexp.config.model_checks import searches_micro_batch
from distexp.config.overrides import format_count, format_override, key_of, parse, plain_value, value_of
from distexp.exceptions import SweepInterrupted, interruptions_kept
from distexp.guard.command_line import packages_trusted_by_user
from distexp.guard.config_files import CheckedConfigLoader, check_trust
from distexp.resolve import resolve
from distexp.resolve.resolution import foreign_options, shared_folders
from distexp.resolve.run_id import run_id
from distexp.runs.predictions import Curve, write_prediction
from distexp.runs.record import INVALID_ID
from distexp.runs.record_sections import Predicted
from distexp.system.cgroups import cpu_count
from distexp.system.processes import die_with_parent
from distexp.system.silence import set_step
from distexp.tables.columns import show_progress

# A cell of a sweep: its overrides, and what Hydra and ``resolve`` made of them.


@dataclass
class Cell:
    """The overrides of one run, and what Hydra and ``resolve`` made of them."""

    overrides: list[str]
    packed: bytes  # composed configuration, pickled and compressed. A sweep may have thousands of cells.
    config: Config | None = None  # resolved configuration; None for an invalid cell
    decided: Config | None = None  # of an invalid cell, with what was decided before its errors were found
    id: str = INVALID_ID  # ``run.id`` of the run
    errors: list[str] = field(default_factory=list)  # why the cell is invalid
    varied: list[str] = field(default_factory=list)  # overrides that not all cells share
    predicted: Predicted | None = None  # predicted memory; None if it is not predicted
    curve: Curve = field(default_factory=dict)  # predicted memory through a training step

    @property
    def composed(self) -> DictConfig:
        """Return a new copy of the composed configuration, with the hydra node."""
        return cast(DictConfig, pickle.loads(zlib.decompress(self.packed)))

    @property
    def config_dir_options(self) -> list[str]:
        """Return the option ``--config-dir FOLDER`` of the command; empty if it has none."""
        sources = self.composed.hydra.runtime.config_sources
        return [text for each in sources if each.provider == "command-line" for text in ("--config-dir", each.path)]

    def write_prediction(self, directory: Path) -> None:
        """Write the prediction into the directory of the cell's run. Without one, remove that of an earlier attempt."""
        write_prediction(directory, self.predicted, self.curve)

    def invalidate(self, error: str) -> None:
        """Make a resolved cell invalid."""
        self.errors, self.decided = [error], self.config
        self.config, self.id = None, INVALID_ID


MakeCell = Callable[[Sequence[str]], Cell]


class CellComposer:
    """Composition of cells with the result of Hydra's ``load_sweep_config``, but with one call for each choice.

    A call needs about 50 ms, mostly to read YAML files and to merge them. Cells that choose the same options differ
    only in values, which are set on a copy.
    """

    def __init__(self, loader: CheckedConfigLoader, master: DictConfig) -> None:
        """Create the composer of the cells of a command, with its own configuration."""
        self._loader, self._master = loader, master
        given = cast(list[str], OmegaConf.to_container(master.hydra.overrides.hydra))
        # The loader's own get_group_options makes this repository, with copies of all files, for each call.
        _, self._repository = loader._parse_overrides_and_create_caching_repo(master.hydra.job.config_name, given)
        self._parser = OverridesParser.create()
        self._is_group: dict[str, bool] = {}
        self._bases: dict[tuple[str, ...], bytes] = {}

    @interruptions_kept()
    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the composed configuration of a cell; ConfigError if a foreign file has values that could run code."""
        parsed = self._parser.parse_overrides(list(overrides))
        if any(override.is_hydra_override() for override in parsed):
            return self._loader.load_sweep_config(self._master, list(overrides))
        chosen = [override for override in parsed if self._chooses_option(override)]
        values = [override for override in parsed if not self._chooses_option(override)]
        key = tuple(map(_text, chosen))
        if key not in self._bases:
            self._bases[key] = pickle.dumps(self._loader.load_sweep_config(self._master, list(key)))
        composed = cast(DictConfig, pickle.loads(self._bases[key]))  # a copy
        self._loader._apply_overrides_to_config(values, composed)
        composed.hydra.overrides.task = list(map(_text, parsed))
        job = composed.hydra.job
        job.override_dirname = get_overrides_dirname(parsed, **job.config.override_dirname)
        self._loader.check(composed)  # The values may be those of a foreign file, too.
        return composed

    def _chooses_option(self, override: Override) -> bool:
        """Return whether an override chooses an option of a group, as Hydra decides it."""
        key = override.key_or_group
        if key not in self._is_group:
            self._is_group[key] = bool(self._repository.get_group_options(key, None))
        return self._is_group[key] and not isinstance(override.value(), dict)


def _text(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


Adjust = Callable[[DictConfig, Sequence[str]], None]
"""Function that changes the composed configuration of a cell before it is resolved. It may raise ConfigError."""


class CellRules(NamedTuple):
    """What a command accepts in its cells."""

    may_be_invalid: bool = False  # A command with one cell does not end if it is invalid.
    sizes_vary: bool = False  # the command varies the keys of ``train``, so it keeps none that was typed
    keeps_accumulation: bool = False  # A typed number of accumulation steps may be replaced by that of a stored run.


DEFAULT_SUBDIR = "${hydra.job.num}"
"""``hydra.sweep.subdir`` of ``conf/config.yaml``, which differs for each run."""


def compose_cells(
    context: HydraContext,
    master: DictConfig,
    overrides: Sequence[Sequence[str]],
    adjust: Adjust | None = None,
    rules: CellRules = CellRules(),  # noqa: B008
) -> list[Cell]:
    """Compose and resolve every cell, before any run starts. Return them in the given order.

    Raises:
        ConfigError: if there is one cell only, and it is invalid, or if a key of ``plan`` has no effect.
        HydraException: if Hydra cannot compose a cell.
        SweepInterrupted: on Ctrl-C.
    """
    cells = _compose_with_progress(cell_maker(context, master, adjust), overrides)
    shared = set.intersection(*(set(cell.overrides) for cell in cells))
    for cell in cells:
        cell.varied = [text for text in cell.overrides if text not in shared]
    # Keys that the command itself sets, without those of a preset. to_container() does not resolve ${...}.
    keys = map(key_of, cast(list[str], OmegaConf.to_container(master.hydra.overrides.task)))
    typed = {key for key in keys if not (rules.sizes_vary and key.startswith("train."))}
    resumes = master.sweep.resume
    errors = cells[0].errors if len(cells) == 1 and not rules.may_be_invalid else []
    errors = [*errors, *ignored_plan_keys((cell.overrides, cell.config) for cell in cells)]
    if not resumes:
        given = dict.fromkeys(text for cell in cells for text in cell.overrides if key_of(text) in typed)
        errors += foreign_options(given, [cell.config or cell.decided for cell in cells])
        if cast(dict[str, str], OmegaConf.to_container(master.hydra.sweep))["subdir"] != DEFAULT_SUBDIR:
            errors += shared_folders(cell.composed.hydra for cell in cells)
    if not resumes and not rules.keeps_accumulation:
        errors += dict.fromkeys(replaced_accumulation(cells, typed))
    if errors:
        raise ConfigError(errors)
    for warning in () if resumes else dict.fromkeys(lowered_values(cells, typed)):
        print(f"distexp: warning: {warning}", file=sys.stderr)
    return cells


def _compose_with_progress(make: MakeCell, overrides: Sequence[Sequence[str]]) -> list[Cell]:
    cells = []
    set_step(f"composing {format_count(len(overrides), 'run')}")
    try:
        with show_progress("composing", len(overrides)) as advance:
            for cell in compose_all(make, overrides):
                cells.append(cell)
                advance()
    except KeyboardInterrupt:
        raise SweepInterrupted("interrupted while composing the cells: no run was started") from None
    set_step("preparing")
    return cells


def cell_maker(context: HydraContext, master: DictConfig, adjust: Adjust | None = None) -> MakeCell:
    """Return the function that composes and resolves a cell of a command. It may raise HydraException."""
    composer = CellComposer(cast(CheckedConfigLoader, context.config_loader), master)
    trusted = packages_trusted_by_user(sys.argv[1:])

    def make(overrides: Sequence[str]) -> Cell:
        composed = composer.compose(overrides)
        cell = Cell(list(overrides), b"")
        try:
            check_trust(composed, trusted)
            if adjust is not None:
                adjust(composed, overrides)
            cell.config = resolve(composed, composed.hydra.runtime.choices)
            cell.id = run_id(cell.config)
        except ConfigError as error:
            cell.errors, cell.decided = error.errors, error.config
        cell.packed = zlib.compress(pickle.dumps(composed), 1)
        return cell

    return make


MAX_PROCESSES = 8  # a login node has many cores and many users
MIN_PARALLEL = 32  # number of cells from which processes are started
CHUNK = 8  # number of cells that a process composes at a time


def compose_all(make: MakeCell, overrides: Sequence[Sequence[str]]) -> Iterator[Cell]:
    """Yield all cells in order. If there are many, several processes make them; OSError if one was killed."""
    if not overrides:
        return
    # The processes inherit what the first cell has imported, read and composed.
    yield make(overrides[0])
    others = overrides[1:]
    processes = min(cpu_count(), MAX_PROCESSES, len(overrides) // CHUNK)
    if len(overrides) < MIN_PARALLEL or processes < 2:
        yield from map(make, others)
        return
    chunks = [others[start : start + CHUNK] for start in range(0, len(others), CHUNK)]
    for chunk, cells in zip(chunks, _compose_chunks(make, chunks, processes), strict=True):
        yield from cells
        # A process returns fewer cells if one raises. Here the same cell raises an error that has its cause.
        yield from map(make, chunk[len(cells) :])


def _compose_chunks(make: MakeCell, chunks: Sequence[Sequence[Sequence[str]]], processes: int) -> Iterator[list[Cell]]:
    """Yield the cells of each chunk, fewer if one of them raises an error."""

    def start() -> None:
        """Prepare a process that composes. On Ctrl-C the launcher ends it."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent=launcher)
        _inherited.update(make=make, chunks=chunks)

    launcher = getpid()
    pool = ProcessPoolExecutor(processes, get_context("fork"), start)
    try:
        yield from pool.map(_compose_chunk, range(len(chunks)))
    except BrokenProcessPool:
        raise OSError("a process that composed cells was killed, and no run was started: try again") from None
    finally:
        pool.shutdown(cancel_futures=True)


_inherited: dict[str, Any] = {}  # What a forked process needs. It is not pickled for each chunk.


def _compose_chunk(index: int) -> list[Cell]:
    """Return the cells of a chunk up to the first that raises an error."""
    cells: list[Cell] = []
    for overrides in _inherited["chunks"][index]:
        try:
            cells.append(_inherited["make"](overrides))
        except Exception:  # The launcher makes this cell again, and raises the error.
            break
    return cells


# Keys of the section ``plan`` that a command would ignore: each with the reason, and what to type instead.

MODE, SEARCH = ("name",), ("search_timeout_s",)
TIMES = ("timeout_s", *SEARCH)
MEMORIES = ("gpu", "gpu_memory_gb", "host_memory_gb")
LEAVE_OUT = "leave it out"


class Rule(NamedTuple):
    """Keys without effect in one situation."""

    keys: Sequence[str]  # names in the section; ``name`` is the group ``plan`` itself
    reason: str  # which situation, and why it does not use the keys
    hint: str = LEAVE_OUT  # what to type instead


RULES = {
    "distexp plan": (
        Rule(MODE, "in distexp plan, which starts no run"),
        Rule(SEARCH, "in distexp plan, which predicts every change"),
    ),
    "distexp choose": (
        Rule(MODE, "in distexp choose, which always predicts"),
        Rule(SEARCH, "in distexp choose, which tries its candidates", f"set choose.budget_min, or {LEAVE_OUT}"),
    ),
    "distexp forecast": (Rule((*MODE, *SEARCH), "in distexp forecast, which starts no run"),),
    "forecast.memory=cached": (
        Rule((*MODE, *TIMES), "with forecast.memory=cached, which only uses predictions in the cache"),
    ),
    "forecast.memory=off": (Rule((*MODE, *TIMES, *MEMORIES), "with forecast.memory=off"),),
    "distexp preflight": (Rule((*MODE, *TIMES, *MEMORIES), "in distexp preflight, which trains nothing"),),
    "distexp verify": (Rule((*MODE, *TIMES, *MEMORIES), "in distexp verify, which predicts nothing"),),
    "auto": (
        Rule(
            (*TIMES, *MEMORIES),
            "with train.micro_batch_size=auto, whose size is found by trials",
            f"set a number of samples, or {LEAVE_OUT}",
        ),
    ),
    "plan=check": (),
    "plan=warn": (
        Rule(TIMES, "with plan=warn, which only uses predictions in the cache", f"add plan=check, or {LEAVE_OUT}"),
    ),
    "plan=off": (
        Rule(TIMES, "with plan=off", f"use plan=check, or {LEAVE_OUT}"),
        Rule(MEMORIES, "with plan=off", f"use plan=warn or plan=check, or {LEAVE_OUT}"),
    ),
}
"""Rules by situation."""

DEVICE_RULES = {
    "cpu": Rule(("gpu", "gpu_memory_gb"), "in a run on cpu", f"set plan.host_memory_gb, or {LEAVE_OUT}"),
    "cuda": Rule(("host_memory_gb",), "in a run on GPUs", "set plan.gpu_memory_gb, or cluster.device=cpu"),
}
"""Rules by device, in any situation."""

LARGEST = Rule(("search",), "outside of distexp plan")


def ignored_plan_keys(cells: Iterable[tuple[Sequence[str], Config | None]]) -> list[str]:
    """Return an error for each override of ``plan`` without an effect in any valid cell, unless it is the default."""
    errors: dict[str, str | None] = {}
    for overrides, config in cells:
        for text in overrides:
            if text.lstrip("+").startswith("plan") and errors.get(text, "") is not None:
                rule = None if config is None else _broken_rule(text, config)
                errors[text] = rule and f"{format_override(text)} has no effect {rule.reason}: {rule.hint}"
    return [error for error in errors.values() if error]


def _situation(config: Config) -> str:
    memory = config.forecast.memory
    situations = {
        f"forecast.memory={memory}": config.command == Command.FORECAST and memory != "predict",
        f"distexp {config.command}": config.command != Command.TRAIN,
        "auto": searches_micro_batch(config),
    }
    return next((name for name, holds in situations.items() if holds), f"plan={config.plan.name}")


def _broken_rule(text: str, config: Config) -> Rule | None:
    """Return the first rule by which an override has no effect; None if it has one."""
    override = parse([text])[0]
    section, _, name = str(override.key_or_group).partition(".")
    name = name or "name"
    if section != "plan" or plain_value(override.value()) == vars(PlanConfig()).get(name):
        return None
    others = (LARGEST,) if config.command != Command.PLAN else ()
    rules = (*RULES[_situation(config)], DEVICE_RULES[config.cluster.device], *others)
    return next((rule for rule in rules if name in rule.keys), None)


LIMITS = {
    "train.micro_batch_size": ("micro_batch_size",),
    "train.gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "train.global_batch_size": ("micro_batch_size", "gradient_accumulation_steps"),
    "dataset.train_size": ("train_size",),
    "dataset.eval_size": ("eval_size",),
    "dataset.max_length": ("max_length",),
    "dataset.image_size": ("image_size",),
    "model.num_layers": ("layers",),
    "model.num_heads": ("heads",),
    "model.vocab_size": ("vocab_size",),
    "model.seq_length": ("max_length",),
}
"""Keys of ``scale`` that limit a key."""


def lowered_values(cells: Iterable[Cell], given: Container[str]) -> Iterator[str]:
    """Yield a warning for each value of the given keys that the scale lowers.

    They are the keys of the command itself. A preset of the workshop expects that its own values are lowered.
    """
    for cell in cells:
        config = cell.config
        if config is None or config.scale.name == "full":
            continue
        for override in cell.overrides:
            key, value = key_of(override), value_of(override)
            if key not in LIMITS or key not in given or not value.isdecimal():
                continue
            section, name = key.split(".")
            used = getattr(getattr(config, section), name)
            if used is not None and used < int(value):
                limits = [f"scale.{limit}=null" for limit in LIMITS[key] if getattr(config.scale, limit) is not None]
                hint = f": to keep {value}, add {' '.join(limits)}" if limits else ""
                yield f"scale={config.scale.name} lowers {key}={value} to {used}{hint}"


def replaced_accumulation(cells: Iterable[Cell], given: Container[str]) -> Iterator[str]:
    """Yield an error for each accumulation of the command that the global batch of a cell would replace.

    A global batch on the command line may replace the accumulation of a preset, which is none of the given keys.
    """
    key = "train.gradient_accumulation_steps"
    for cell in cells if key in given else ():
        config = cell.config
        if config is None or config.train.global_batch_size is None or config.scale.name != "full":
            continue
        total, steps = config.train.global_batch_size, config.train.gradient_accumulation_steps
        for text in cell.overrides:
            if key_of(text) == key and value_of(text) != str(steps):
                hint = f"train.global_batch_size={total} sets the accumulation to {steps}. Leave one of the two out"
                yield f"{text} has no effect: {hint}"
