"""Checkpoints of a training: writing them, and resuming from them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distexp.checkpoints import folder as disk
from distexp.checkpoints.folder import CheckpointMeta, Checksums
from distexp.config import Config, ConfigError, fields
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.models.blueprint import read_fingerprint
from distexp.runs.record_sections import Built, RunError
from distexp.strategies.base import DistributedModel
from distexp.system import restricted_loading, seeding
from distexp.training.inputs import TrainingInputs

MODEL = "engine"  # the subfolder of a checkpoint that DistributedModel.save writes


class CheckpointManager:
    """The checkpoints of one training; every public method is a collective."""

    def __init__(
        self, inputs: TrainingInputs, model: DistributedModel, built: Built, config: Config, context: Context
    ) -> None:
        self.model, self.built, self.train, self.context = model, built, config.train, context
        self.settings = training_settings(config)
        self.logger, self.run_id = inputs.logger, inputs.run_id
        # Rank 0 always has the weights before they are distributed.
        self.base = gather_to_all(read_fingerprint(model.module))[0] if config.adapter.freezes_model else None
        self.global_batch = inputs.training.sharding.global_batch
        self.newest: int | None = None  # step of the newest checkpoint in the run directory that is known to be valid

    def save_if_due(self) -> None:
        """Write a checkpoint if ``train.checkpoint_every`` requires one after this step."""
        every = self.train.checkpoint_every
        if every is None:
            return
        period = self.logger.plan.steps_per_epoch if every == "epoch" else int(every)
        if self.logger.steps % period == 0:
            self.save()
            self.logger.start_steps()

    def save(self) -> None:
        """Write a checkpoint of the current step, unless there is one."""
        step, run_dir = self.logger.steps, self.context.run_dir
        if step == self.newest:
            return
        self.logger.events.set_phase("save", step=step)
        unfinished = disk.tmp_dir(run_dir, step)
        if self.context.rank == 0:
            disk.remove_unfinished(run_dir)
            unfinished.mkdir(parents=True)
        dist.barrier()
        self.model.save(unfinished / MODEL)
        state = {"rng_state": seeding.rng_state(self.context.device), "metrics": self.logger.state()}
        # The errors of files that torch opens itself have no reason.
        with _rank_file(unfinished, self.context.rank).open("wb") as file:
            torch.save(state, file)
        dist.barrier()
        checksums = self._compute_checksums(unfinished)
        if self.context.rank == 0:
            disk.write_manifest(unfinished, self._meta(step), checksums, self.settings)
            disk.publish(run_dir, step)
        dist.barrier()
        self.newest = step

    def save_and_stop(self, reason: str) -> None:
        """Write a checkpoint of a training that ends early, and record the reason."""
        phase = self.logger.events.phase
        self.save()
        position = f"stopped after step {self.logger.steps} of {self.logger.plan.total_steps} ({reason})"
        message = f"{position}: the run can be resumed from the checkpoint of that step"
        self.logger.stopped = RunError("Preempted", message, phase)

    def resume(self) -> None:
        """Load the newest valid checkpoint of this run, or of ``train.resume``; raise ConfigError if that has none."""
        found = self._newest_valid(disk.list_checkpoints(self.context.run_dir), own=True)
        if found is None and self.train.resume is not None:
            found = self._newest_valid_of(Path(self.train.resume))
            if found is None:
                raise ConfigError(f"train.resume={self.train.resume} has no valid checkpoint: choose another folder")
            self._check_compatible(*found)
        if found is None:
            return
        folder, meta = found
        self._note(f"resuming from step {meta.step} of {folder}")
        with restricted_loading.weights_only_loading(folder), _deletion_explained(folder):
            self._restore(folder, meta)
        self.logger.changes = list(describe_changes(disk.read_settings(folder), self.settings))
        for change in self.logger.changes:
            self._note(change)
        if self.logger.changes:
            self.logger.events.emit(changes=self.logger.changes)
        self.newest = meta.step if folder == disk.checkpoint_dir(self.context.run_dir, meta.step) else None

    def _restore(self, folder: Path, meta: CheckpointMeta) -> None:
        self.model.load(folder / MODEL)
        self.logger.restore(_read_state(folder, 0)["metrics"])
        ranks = self.context.world_size
        if meta.world_size != ranks:
            self._note(f"the checkpoint has {meta.world_size} ranks, this run has {ranks}: the RNG state is reset")
            return
        seeding.restore_rng(_read_state(folder, self.context.rank)["rng_state"], self.context.device)

    def _newest_valid_of(self, folder: Path) -> tuple[Path, CheckpointMeta] | None:
        """Return the newest valid checkpoint of a folder. If a run trains there, the list may change: read it again."""
        known: list[Path] = []
        while (listed := gather_to_all(disk.candidates(folder))[0]) != known:
            known = listed
            if (found := self._newest_valid(known, own=False)) is not None:
                return found
        return None

    def _newest_valid(self, candidates: list[Path], *, own: bool) -> tuple[Path, CheckpointMeta] | None:
        """Return the first valid checkpoint and log the ones skipped. Each rank checks a part of the files."""
        for folder in gather_to_all(candidates)[0]:
            manifest = disk.read_manifest(folder)
            missing = "manifest.json is missing or invalid"
            problem = self._find_problem(folder, *manifest, own=own) if manifest else missing
            problems = [text for text in gather_to_all(problem) if text]
            if not problems and manifest is not None:
                return folder, manifest[0]
            self._note(f"skipping checkpoint {folder}: {problems[0]}")
        return None

    def _find_problem(self, folder: Path, meta: CheckpointMeta, checksums: Checksums, *, own: bool) -> str | None:
        if own and meta.run_id != self.run_id:
            return f"it belongs to run {meta.run_id}, not to {self.run_id}"
        mine = sorted(checksums)[self.context.rank :: self.context.world_size]
        return disk.find_damage(folder, {name: checksums[name] for name in mine})

    def _check_compatible(self, folder: Path, saved: CheckpointMeta) -> None:
        """Raise ConfigError if a checkpoint does not fit this training."""
        old, new = vars(saved), vars(self._meta(saved.step))
        names = ["checkpoint_format", "parameters", "global_batch", "steps_per_epoch"]
        wrong = [f"{name} is {old[name]} instead of {new[name]}" for name in names if old[name] != new[name]]
        optimizer = disk.read_settings(folder).get("train.optimizer", self.train.optimizer)
        if optimizer != self.train.optimizer:  # Its states are others.
            wrong.append(f"train.optimizer is {optimizer} instead of {self.train.optimizer}")
        if saved.base != self.base:
            wrong.append("it has adapters of other frozen weights")
        wrong += list(describe_changes(_adapter_of(disk.read_settings(folder)), _adapter_of(self.settings)))
        if wrong:
            raise ConfigError(
                f"train.resume={self.train.resume} is a checkpoint of a different training ({'; '.join(wrong)}): "
                "make them equal, or leave train.resume out"
            )
        if saved.step > self.logger.plan.total_steps:
            raise ConfigError(
                f"train.resume={self.train.resume} is at step {saved.step}, but this run ends at step "
                f"{self.logger.plan.total_steps}: increase train.num_epochs or train.max_steps"
            )

    def _meta(self, step: int) -> CheckpointMeta:
        return CheckpointMeta(
            run_id=self.run_id,
            step=step,
            steps_per_epoch=self.logger.plan.steps_per_epoch,
            global_batch=self.global_batch,
            parameters=self.built.parameters,
            checkpoint_format=self.model.checkpoint_format,
            world_size=self.context.world_size,
            base=self.base,
        )

    def _compute_checksums(self, folder: Path) -> Checksums:
        """Return the checksums of all files. Each is computed by one of the ranks that can see the file."""
        visible = gather_to_all(disk.list_files(folder))
        computed: Checksums = {}
        for position, name in enumerate(sorted(set(chain.from_iterable(visible)))):
            ranks = [rank for rank, names in enumerate(visible) if name in names]
            if ranks[position % len(ranks)] == self.context.rank:
                computed[name] = disk.checksum(folder / name, flush=True)
        return {name: checksum for part in gather_to_all(computed) for name, checksum in part.items()}

    def _note(self, text: str) -> None:
        if self.context.rank == 0:
            print(f"note: {text}", flush=True)


@contextmanager
def _deletion_explained(folder: Path) -> Iterator[None]:
    """Raise ConfigError for an error in the block, if files of the checkpoint have been deleted meanwhile."""
    try:
        yield
    except Exception as error:
        manifest = disk.read_manifest(folder)
        if manifest is not None and all((folder / name).exists() for name in manifest[1]):
            raise
        raise ConfigError(
            f"train.resume: {folder} was deleted while it was read, because a run still trains in that "
            "directory: wait for its end, or start again"
        ) from error


def _read_state(folder: Path, rank: int) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_rank_file(folder, rank), map_location="cpu", weights_only=True)
    return state


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pt"


SECTIONS = ("model", "adapter", "dataset", "precision", "train")
# Keys of these sections that do not change the training.
UNRELATED = (
    *("model.keys", "model.init", "model.path"),  # the weights are those of the checkpoint
    *("dataset.keys", "dataset.num_workers", "dataset.answer_tokens"),
    *("train.resume", "train.checkpoint_every", "train.save_model", "train.score_answers", "train.eval_batch_size"),
    *("train.measure_after_step", "train.profile_steps", "train.log_every", "train.on_nan"),
    *("train.global_batch_size", "train.micro_batch_search_s"),  # micro-batch and accumulation show a change
)


def training_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a training that its checkpoints contain, by their dotted keys."""
    content = asdict(config)
    pairs = fields.flatten({section: content[section] for section in SECTIONS})
    return {key: value for key, value in pairs if key not in UNRELATED}


def _adapter_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without which the adapters of a checkpoint have another meaning."""
    names = ("rank", "alpha", "targets", "modules_to_save")
    return {key: settings[key] for name in names if (key := f"adapter.{name}") in settings}


def describe_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each setting that differs, with the old and the new value."""
    for key, value in current.items():
        if key in saved and saved[key] != value:
            old, new = ("null" if one is None else repr(one) for one in (saved[key], value))
            yield f"{key} was {old} in the checkpoint and is {new} in this run"
