"""Writing checkpoints while a training goes on, and going on from one; all ranks together."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from distexp.checkpoints import folder as disk
from distexp.checkpoints import rng
from distexp.checkpoints.folder import Meta, Sums
from distexp.config import ConfigError, TrainConfig
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.engines.base import TrainingInputs
from distexp.runs.record import Built, RunError
from distexp.strategies.base import DistributedModel

ENGINE = "engine"


class CheckpointManager:
    """The checkpoints of one training; every method is a collective."""

    def __init__(
        self, inputs: TrainingInputs, engine: DistributedModel, built: Built, train: TrainConfig, context: Context
    ) -> None:
        self.engine, self.built, self.train, self.context = engine, built, train, context
        self.logger, self.run_id = inputs.logger, inputs.run_id
        self.global_batch = inputs.training.sharding.global_batch
        self.newest: int | None = None  # the step of the newest checkpoint that is known to be whole

    def after_step(self) -> None:
        """Writes a checkpoint where one is due."""
        every = self.train.checkpoint_every
        if every is None:
            return
        period = self.logger.plan.steps_per_epoch if every == "epoch" else int(every)
        if self.logger.steps % period == 0:
            self.write()
            self.logger.begin_steps()

    def write(self) -> None:
        """Writes a checkpoint of the training as it is now, where there is none yet; returns when it is in place."""
        step, run_dir = self.logger.steps, self.context.run_dir
        if step == self.newest:
            return
        self.logger.events.set_phase("save", step=step)
        unfinished = disk.tmp_dir(run_dir, step)
        if self.context.rank == 0:
            disk.remove_unfinished(run_dir)
            unfinished.mkdir(parents=True)
        dist.barrier()
        self.engine.save(unfinished / ENGINE)
        own = {"chance": rng.state(self.context.device), "journal": self.logger.state()}
        torch.save(own, _rank_file(unfinished, self.context.rank))
        dist.barrier()
        sums = self._sums(unfinished)
        if self.context.rank == 0:
            disk.write_manifest(unfinished, self._meta(step), sums)
            disk.put_in_place(run_dir, step)
        dist.barrier()
        self.newest = step

    def stop(self, reason: str) -> None:
        """Writes a checkpoint of a training that has to end early; the logger then knows why it ended, and where."""
        phase = self.logger.events.phase
        self.write()
        where = f"stopped after step {self.logger.steps} of {self.logger.plan.total_steps} ({reason})"
        told = f"{where}: the run goes on from its checkpoint of that step"
        self.logger.stopped = RunError("Preempted", told, phase)

    def resume(self) -> int | None:
        """Takes up the newest whole checkpoint of this very run, else of ``train.resume``; its step, None of none.

        Raises:
            ConfigError: ``train.resume`` has no whole checkpoint, or only one of another training.
        """
        found = self._newest(disk.in_run(self.context.run_dir), own=True)
        if found is None and self.train.resume is not None:
            found = self._newest(disk.candidates(Path(self.train.resume)), own=False)
            if found is None:
                raise ConfigError(f"train.resume={self.train.resume} holds no whole checkpoint: name another folder")
            self._check_fitting(found[1])
        if found is None:
            return None
        folder, meta = found
        self._tell(f"goes on from step {meta.step}, by {folder}")
        self._restore(folder, meta)
        self.newest = meta.step if folder.parent == disk.checkpoints_root(self.context.run_dir) else None
        return meta.step

    def _restore(self, folder: Path, meta: Meta) -> None:
        self.engine.load(folder / ENGINE)
        saved = torch.load(_rank_file(folder, 0), map_location="cpu", weights_only=True)
        self.logger.restore(saved["journal"])
        if meta.world_size != self.context.world_size:
            self._tell(f"{meta.world_size} workers wrote it and {self.context.world_size} read it: chance begins anew")
            return
        own = torch.load(_rank_file(folder, self.context.rank), map_location="cpu", weights_only=True)
        rng.restore(own["chance"], self.context.device)

    def _newest(self, candidates: list[Path], *, own: bool) -> tuple[Path, Meta] | None:
        """The first whole one; what is passed over is said aloud. Ranks share out the files that they check."""
        for folder in gather_to_all(candidates)[0]:
            manifest = disk.read_manifest(folder)
            damage = self._find_damage(folder, *manifest, own=own) if manifest else "its manifest is missing or torn"
            errors = [text for text in gather_to_all(damage) if text]
            if not errors and manifest is not None:
                return folder, manifest[0]
            self._tell(f"{folder} is passed over: {errors[0]}")
        return None

    def _find_damage(self, folder: Path, meta: Meta, sums: Sums, *, own: bool) -> str | None:
        if own and meta.run_id != self.run_id:
            return f"it is of run {meta.run_id}, not of {self.run_id}"
        mine = sorted(sums)[self.context.rank :: self.context.world_size]
        return disk.find_damage(folder, {name: sums[name] for name in mine})

    def _check_fitting(self, theirs: Meta) -> None:
        """Raises ConfigError where another training's position, weights or optimizer mean nothing here."""
        ours = self._meta(theirs.step)
        wrong = [
            f"{name} {getattr(theirs, name)} where this run has {getattr(ours, name)}"
            for name in ("checkpoint_format", "parameters", "global_batch", "steps_per_epoch")
            if getattr(theirs, name) != getattr(ours, name)
        ]
        if wrong:
            raise ConfigError(
                f"train.resume={self.train.resume} is of another training: it has {'; '.join(wrong)}: "
                "make them equal, or start from weights alone by model.init=pretrained"
            )
        if theirs.step > self.logger.plan.total_steps:
            raise ConfigError(
                f"train.resume={self.train.resume} is at step {theirs.step}, and this run ends at step "
                f"{self.logger.plan.total_steps}: raise train.num_epochs or train.max_steps"
            )

    def _meta(self, step: int) -> Meta:
        return Meta(
            run_id=self.run_id,
            step=step,
            steps_per_epoch=self.logger.plan.steps_per_epoch,
            global_batch=self.global_batch,
            parameters=self.built.parameters,
            checkpoint_format=self.engine.checkpoint_format,
            world_size=self.context.world_size,
        )

    def _sums(self, folder: Path) -> Sums:
        """Sizes and checksums of all files, each taken by one of the ranks that see it already."""
        seen = gather_to_all(disk.files_in(folder))
        shares: Sums = {}
        for position, name in enumerate(sorted(set(chain.from_iterable(seen)))):
            there = [rank for rank, names in enumerate(seen) if name in names]
            if there[position % len(there)] == self.context.rank:
                shares[name] = disk.checksum(folder / name, flush=True)
        return {name: sums for share in gather_to_all(shares) for name, sums in share.items()}

    def _tell(self, text: str) -> None:
        if self.context.rank == 0:
            print(f"note: {text}", flush=True)


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.pt"
