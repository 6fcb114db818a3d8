"""The phases of a verification: short trainings, each of which adds one thing that may be wrong.

A phase trains three times: the *reference* on one worker with ``strategy=single``; the *noise* run, which is the
reference with another order of summation; and the *variant*, the configuration to verify. This module needs no torch.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distexp.compose.composition import Cell, MakeCell
from distexp.config import Config
from distexp.config.keys import config_groups, speed_references, strategy_groups, strategy_sections
from distexp.config.model_checks import depends_on_micro_batch
from distexp.config.overrides import copyable_command, format_override, key_of, quote_choice, value_of
from distexp.plan.plan_table import replace_overrides
from distexp.resolve.run_id import run_id
from distexp.runs.record import RunSpec
from distexp.runs.record_sections import RunInfo
from distexp.runs.run_dir import CHECKPOINTS, PHASE_SETTINGS, PROOF, PROOF_PAGE
from distexp.strategies.single import REFERENCE
from distexp.strategies.zero.ds_config import copy_without_varied
from distexp.system.files import read_json, write_json

EQUAL, DIFFERENT, NOT_COMPARABLE = "equal", "different", "not comparable"
JOB = "job.json"
"""File of a verification: what the process that trains has to do."""

SGD = ("train.optimizer=sgd", "train.momentum=0", "train.weight_decay=0", "train.learning_rate=0.05")
UPDATES = ("train.weight_decay=0.1", "train.eps=1e-6")
SMALL_RATE = "train.learning_rate=0.005"
"""Learning rate of SGD with batch norms or router losses. With 0.05, a ResNet diverges, and so do its losses."""

SHARED_EPS = "train.eps=1e-4"
"""Epsilon if workers share layers: rounding errors of tiny gradients then exceed those of the noise run."""

ACTIVE_CLIPPING = "train.gradient_clipping=0.02"  # below the gradient norm of any model that is not trained yet
NO_CLIPPING = "train.gradient_clipping=null"


@dataclass(frozen=True)
class Phase:
    """A short training."""

    name: str
    adds: str  # what it has that earlier phases have not, for messages: "with clipping"
    overrides: tuple[str, ...]
    steps: int  # steps of an epoch
    epochs: int = 1
    accumulation: int = 1
    keeps_optimizer: bool = False  # whether it has the optimizer of the user, not SGD without momentum
    uneven: bool = False  # whether samples have different numbers of targets, and the last batch is incomplete
    frozen: bool = False  # whether a parameter is not trained
    resumes: bool = False  # whether the variant trains its last step again, from a checkpoint
    quick: bool = False  # whether it is one of the core phases


PHASES = (
    Phase("sgd", "with SGD without momentum", (*SGD, NO_CLIPPING), steps=3, quick=True),
    Phase(
        "uneven", "with uneven numbers of targets, an incomplete last batch and two epochs",
        (*SGD, NO_CLIPPING, "train.evaluate=true"), steps=3, epochs=2, uneven=True, quick=True,
    ),
    Phase(
        "accumulation", "with gradient accumulation", (*SGD, NO_CLIPPING),
        steps=2, accumulation=3, uneven=True, quick=True,
    ),
    Phase("clipping", "with active clipping", (*SGD, ACTIVE_CLIPPING), steps=3),
    Phase(
        "optimizer", "with the optimizer and weight decay", (*UPDATES, "train.gradient_clipping=1e6"),
        steps=3, keeps_optimizer=True,
    ),
    Phase(
        "frozen", "with a parameter that is not trained", (*UPDATES, NO_CLIPPING),
        steps=2, keeps_optimizer=True, frozen=True,
    ),
    Phase(
        "training", "with optimizer, clipping, accumulation and a learning rate schedule",
        (*UPDATES, ACTIVE_CLIPPING, "train.schedule=linear", "train.warmup_steps=2"),
        steps=5, accumulation=3, keeps_optimizer=True, uneven=True, quick=True,
    ),
    Phase(
        "resume", "after a checkpoint in the second epoch",
        (*UPDATES, ACTIVE_CLIPPING, "train.schedule=linear", "train.checkpoint_every=3"),
        steps=2, epochs=2, keeps_optimizer=True, resumes=True,
    ),
)  # fmt: skip
"""All phases, the simplest first. The first one that differs names the cause."""

TIED = Phase("tied", "with tied embeddings", (*SGD, NO_CLIPPING, "model.tie_embeddings=true"), steps=2)
"""Phase of a model whose embeddings may be tied and are not."""

COMMON = (
    *("train.global_batch_size=null", "train.schedule=constant", "train.warmup_steps=0"),
    *("train.log_every=1", "train.evaluate=false", "train.checkpoint_every=null", "train.resume=null"),
    *("train.save_model=false", "train.score_answers=false", "train.profile_steps=0", "train.eval_batch_size=null"),
    *("profile=false", "preflight.enabled=false", "measure.enabled=false", "dataset.num_workers=0"),
    *("tracker=none", "scaling=fixed", "scale.micro_batch_size=null", "scale.gradient_accumulation_steps=null"),
)
LEARNING_RATE = "train.learning_rate=0.01"
ALONE = (
    *("parallel.tensor=1", "parallel.context=1", "parallel.expert=1"),
    *("parallel.pipeline=1", "parallel.schedule=null"),
)
SINGLE = (*REFERENCE, *ALONE, "engine=native", "train.activation_checkpointing=false")


@dataclass(frozen=True)
class RunSettings:
    """What a run of a verification needs besides its configuration."""

    phase: str
    role: str  # reference, noise, variant or resumed
    world_size: int  # workers of the variant with their own rows
    accumulation: int  # micro-batches of each worker of the variant in a step
    micro_batch: int  # samples of a micro-batch of the variant
    samples: int  # samples of the training set that are used
    uneven: bool = False
    frozen: bool = False
    precision: str = "fp32"
    copies: int = 1  # ranks with the same samples, which share layers or rows
    epochs: int = 1
    clipping: float | None = None  # limit of the gradient norm
    exports_trained: bool = False  # whether exports leave out weights that are not trained
    clips_early: bool = False  # whether the trainer clips the gradients before they are recorded

    @classmethod
    def read(cls, directory: Path) -> RunSettings:
        """Read the settings of a run directory."""
        return cls(**read_json(directory / PHASE_SETTINGS))


@dataclass
class PlannedVariant:
    """A configuration to verify, with its phases."""

    label: str
    config: Config
    command: str  # that repeats it
    directory: Path
    phases: list[dict[str, Any]] = field(default_factory=list)  # name, what it adds, and run directories by role
    skipped: dict[str, str] = field(default_factory=dict)  # why a phase is left out, by its name

    def run_dirs(self, *roles: str) -> list[Path]:
        """Return the run directories of some roles."""
        found = (item for phase in self.phases for item in phase["directories"].items())
        return [Path(path) for role, path in found if role in roles]


def remove_proofs(sweep_dir: Path) -> None:
    """Remove what an earlier verification in a directory found, also of variants that are not compared again."""
    for name in (PROOF, PROOF_PAGE):
        for file in sweep_dir.glob(f"[0-9]*/{name}"):
            if file.parent.name.isdigit():
                file.unlink(missing_ok=True)


def plan_variant(cell: Cell, label: str, directory: Path, make: MakeCell, *, quick: bool) -> PlannedVariant:
    """Compose the runs of all phases of a cell, and write their directories."""
    assert cell.config is not None, "an invalid cell is not planned"
    variant = PlannedVariant(label, cell.config, command_of(cell, quick=quick), directory)
    for phase in phases_of(cell.config, quick=quick):
        _plan_phase(variant, phase, cell, make)
    return variant


def command_of(cell: Cell, *, quick: bool) -> str:
    """Return the command that verifies a cell."""
    options = [*(["--quick"] if quick else []), *cell.config_dir_options]
    typed = [text for text in cell.overrides if not text.startswith(("verify.", "name=verify", "command="))]
    return copyable_command([*options, *typed], command="distexp verify")


def phases_of(config: Config, *, quick: bool) -> list[Phase]:
    """Return the phases of a configuration."""
    phases = [phase for phase in PHASES if phase.quick or not quick]
    can_tie = "tie_embeddings" in config.model.keys and not config.model.tie_embeddings
    return [*phases, TIED] if can_tie and not quick else phases


def _plan_phase(variant: PlannedVariant, phase: Phase, cell: Cell, make: MakeCell) -> None:
    config = variant.config
    world, size = config.data_parallel, micro_batch_of(config)
    phase = replace(phase, accumulation=phase.accumulation * config.parallel.pipeline)  # enough for each schedule
    changed = [*phase_overrides(phase, config), *_batch(size, phase.accumulation)]
    own = replace_overrides(cell.overrides, [*changed, *copy_without_varied(config, variant.directory)])
    if not phase.keeps_optimizer:  # for AdamW only
        own = [text for text in own if key_of(text) != "train.fused_update"]
    single = [text for text in own if not _chooses_strategy(text)]
    single = replace_overrides(single, [quote_choice(text, config_groups()) for text in SINGLE])
    split = size if depends_on_micro_batch(config) else size * world
    parts = world * phase.accumulation * size // split
    exact = ["precision=fp32"] if config.precision.name != "fp32" else []
    overrides = {
        "variant": own,
        "reference": replace_overrides(single, _batch(size, world * phase.accumulation)),
        "noise": replace_overrides(single, [*_batch(split, parts), *exact]),
    }
    made = {role: make(tuple(texts)) for role, texts in overrides.items()}
    errors = [error for one in made.values() for error in one.errors]
    if errors:
        variant.skipped[phase.name] = errors[0]
        return
    global_batch = world * size * phase.accumulation
    samples = phase.steps * global_batch - (global_batch // 2 - 1 if phase.uneven else 0)
    settings = RunSettings(
        phase.name, "", world, phase.accumulation, size, samples, uneven=phase.uneven, frozen=phase.frozen
    )
    written = {role: _write_run(one, replace(settings, role=role), variant.directory) for role, one in made.items()}
    resumed = {"resumed": _add_resumed(written["variant"])} if phase.resumes else {}
    directories = {role: str(path) for role, path in (written | resumed).items()}
    variant.phases.append({"name": phase.name, "adds": phase.adds, "directories": directories})


def phase_overrides(phase: Phase, config: Config) -> list[str]:
    """Return the overrides of a phase, without its batch."""
    found = [*COMMON, f"train.max_steps={phase.steps * phase.epochs}", f"train.num_epochs={phase.epochs}"]
    if phase.keeps_optimizer:
        found += [LEARNING_RATE, *(["train.momentum=0.9"] if config.train.optimizer == "sgd" else [])]
    if "dropout" in config.model.keys:  # Each worker has other random numbers.
        found.append("model.dropout=0")
    if config.adapter.freezes_model:
        found.append("adapter.dropout=0")
    shared = [SHARED_EPS] if phase.keeps_optimizer and config.parallel.copies > 1 else []
    rate = [SMALL_RATE] if not phase.keeps_optimizer and depends_on_micro_batch(config) else []
    return replace_overrides(
        [quote_choice(text, config_groups()) for text in found], [*phase.overrides, *rate, *shared]
    )


def _chooses_strategy(override: str) -> bool:
    """Return whether an override is about the strategy, the trainer or the kernels of the variant."""
    own = {"strategy", "parallel", "engine", "offload", *strategy_groups(), *strategy_sections()}
    if (key_of(override), value_of(override)) == ("train.loss", "own"):  # an objective, not a kernel
        return False
    return (key := key_of(override)).partition(".")[0] in own or key in speed_references()


def micro_batch_of(config: Config) -> int:
    """Return the samples of a micro-batch: a small number, so that a phase is short."""
    size = config.train.micro_batch_size
    most = 4 if config.model.task == "image_classification" else 2
    return most if isinstance(size, str) else min(most, size)


def _batch(size: int, accumulation: int) -> list[str]:
    return [f"train.micro_batch_size={size}", f"train.gradient_accumulation_steps={accumulation}"]


def _write_run(cell: Cell, settings: RunSettings, directory: Path) -> Path:
    """Write the directory of a run. Runs on one worker are shared by all variants with equal ones."""
    assert cell.config is not None
    train = cell.config.train
    settings = replace(
        settings, copies=cell.config.parallel.copies, precision=cell.config.precision.name,
        epochs=train.num_epochs, clipping=train.gradient_clipping,
        exports_trained=cell.config.adapter.freezes_model,
        clips_early=cell.config.engine.name == "hf_trainer" and train.gradient_clipping is not None,
    )  # fmt: skip
    target = directory / settings.phase
    if settings.role != "variant":
        content = repr((run_id(cell.config), cell.config.train.micro_batch_size, sorted(asdict(settings).items())))
        digest = hashlib.sha256(content.encode()).hexdigest()[:10]
        target = directory.parent / "single" / f"{settings.phase}-{settings.role}-{digest}"
    _make_empty(target)
    info = RunInfo(id=cell.id, name=cell.config.name, number=0, overrides=cell.overrides)
    RunSpec(cell.config, info).write(target)
    write_json(target / PHASE_SETTINGS, asdict(settings))
    return target


def _make_empty(directory: Path) -> None:
    """Create the directory of a run. Remove that of an earlier command, whose checkpoint the run would resume from."""
    if (directory / PHASE_SETTINGS).is_file():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)


def _add_resumed(directory: Path) -> Path:
    """Return the directory of the run that resumes: its configuration and its checkpoints are those of the first."""
    target = directory.with_name(f"{directory.name}-resumed")
    _make_empty(target)
    RunSpec.read(directory).write(target)
    write_json(target / PHASE_SETTINGS, asdict(replace(RunSettings.read(directory), role="resumed")))
    (target / CHECKPOINTS).symlink_to(directory / CHECKPOINTS)
    return target


def labels_of(cells: Sequence[Cell]) -> list[str]:
    """Return a name for each cell: its strategy, and what differs between the cells."""
    from distexp.strategies.base import strategy_label

    found = []
    for cell in cells:
        name = strategy_label(cell.config) if cell.config is not None else "invalid"
        named = {key_of(text): text for text in cell.varied}  # the label of a strategy has neither trainer nor keys
        further = [text for key, text in named.items() if not _chooses_strategy(text) or "." in key or key == "engine"]
        found.append(" ".join([name, *(format_override(text).lstrip("+") for text in further)]))
    return found
