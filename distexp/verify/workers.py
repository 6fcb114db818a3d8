"""The workers of a verification: ``python -m distexp.verify.workers DIR``.

This process imports the libraries once, and forks a group of ranks for the references and for each variant. A group
trains all of its runs one after the other. Then the runs are compared. ``DIR/job.json`` has what to do, and the result
of each variant is in its directory.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil
import torch
import torch.distributed as dist

from distexp.config import Config, ConfigError
from distexp.data.base import IGNORE, Batch, Sample, Samples, TaskData, TooFewSamplesError
from distexp.data.loader import BatchSharding, ShardedBatchSampler
from distexp.data.text import PackedSamples
from distexp.distributed.context import Context
from distexp.distributed.process_group import join
from distexp.engines.base import load_trainer
from distexp.models.blueprint import Blueprint
from distexp.runs.events import Events
from distexp.runs.record import RunSpec
from distexp.runs.run_dir import PROOF
from distexp.strategies.base import load_strategy
from distexp.system import environment_variables, files, seeding
from distexp.system.processes import die_with_parent, end_at_once
from distexp.system.units import MIB
from distexp.training import build, watchers
from distexp.training.inputs import StepPlan, TrainingInputs
from distexp.verify.arithmetic import make_smooth
from distexp.verify.comparison import Comparison, Recording, compare_resumed, error_share, rank_file
from distexp.verify.diagnosis import Finding, diagnose, first_finding
from distexp.verify.phases import DIFFERENT, EQUAL, JOB, NOT_COMPARABLE, RunSettings
from distexp.verify.recording import Recorder, RecordingLogger
from distexp.worker.__main__ import message_of, redirect_output
from distexp.worker.preload import preload
from distexp.worker.rank import silence_libraries

ERROR, LOG, FAILED = "error.json", "rank{rank}.log", "failed"
POLL_S = 0.02


def main() -> int:
    """Run the groups of a job, compare the runs, and write the results."""
    environment_variables.captured_environment()
    folder = Path(sys.argv[1])
    job = files.read_json(folder / JOB)
    for name, value in environment_variables.TORCHRUN_DEFAULTS.items():
        os.environ.setdefault(name, value)
    preload(job["modules"], job["device"])
    timeout_s = job["timeout_s"]
    references, *variants = [Group(timeout_s=timeout_s, **group) for group in job["groups"]]
    references.start()
    for group, variant in zip(variants, job["variants"], strict=True):
        result = compare_variant(variant, list(compare_phases(variant, group, references)))
        files.write_json(Path(variant["directory"]) / PROOF, files.nan_to_none(result))
    references.stop()
    return 0


@dataclass
class Group:
    """Ranks that train some runs one after the other. After an error they are started again for the next run."""

    environments: Sequence[dict[str, str]]  # changes of the environment of each rank
    runs: Sequence[str]  # run directories
    timeout_s: float  # longest time of a run
    _pids: dict[int, int] = field(default_factory=dict)  # rank by process id
    _done: int = 0  # runs that have ended
    _since: float = 0.0  # when the current run started

    def run_until(self, needed: Sequence[str]) -> None:
        """Train runs until some of this group have ended, or one that they are compared with has failed."""
        waiting = set(needed) & set(self.runs)
        self.start()
        while waiting - set(self.runs[: self._done]) and not self.poll():
            if any(Path(run, ERROR).exists() for run in needed if run not in waiting):
                return
            time.sleep(POLL_S)

    def start(self) -> None:
        """Fork the ranks for the runs that are left."""
        if self._pids or self._done == len(self.runs):
            return
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self._since, parent = time.monotonic(), os.getpid()
        for rank, environment in enumerate(self.environments):
            pid = os.fork()
            if pid == 0:
                os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                run_rank(self.runs[self._done :], rank, parent)
            self._pids[pid] = rank

    def poll(self) -> bool:
        """Return whether all runs have ended. If one failed or takes too long, start the next one."""
        while self._done < len(self.runs) and self._has_ended(self.runs[self._done]):
            self._done, self._since = self._done + 1, time.monotonic()
        failed = False
        for pid in list(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                rank = self._pids.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                failed |= code != 0
                if code < 0 and self._done < len(self.runs):
                    self._write_error(rank, f"the process of rank {rank} was ended by signal {-code}")
        if self._done < len(self.runs) and (failed or time.monotonic() - self._since > self.timeout_s):
            if not failed:
                self._write_error(-1, f"no end after {self.timeout_s:.0f} s: a rank may wait for another one")
            self.stop()
            self._done += 1
            self.start()
        return self._done == len(self.runs)

    def _has_ended(self, run: str) -> bool:
        return all(rank_file(Path(run), rank).exists() for rank in range(len(self.environments)))

    def _write_error(self, rank: int, message: str) -> None:
        path = Path(self.runs[self._done]) / ERROR
        if not path.exists():
            files.write_json(path, {"rank": rank, "error": message})

    def stop(self) -> None:
        """End all ranks."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._pids.clear()


def run_rank(runs: Sequence[str], rank: int, parent: int) -> None:
    """Train some runs as one rank, in a forked process; it never returns."""
    code, current = 1, Path(runs[0])
    try:
        die_with_parent(parent=parent)
        redirect_output(current.parent / LOG.format(rank=rank), "a")
        silence_libraries()
        first = RunSpec.read(current)
        torch.set_num_threads(first.config.cluster.cpus_per_worker or 1)
        torch.backends.cudnn.allow_tf32 = False  # Its rounding depends on the kernel, so on the batch size.
        context = join(first, current, overhead_mib=load_strategy(first.config).total_overhead_mib(first.config))
        gc.freeze()
        for run in runs:
            current = Path(run)
            record_run(RunSpec.read(current), RunSettings.read(current), replace(context, run_dir=current))
            torch.compiler.reset()
            forget_run()
        dist.destroy_process_group()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        message = f"{type(error).__name__}: {message_of(error)}"
        with suppress(FileExistsError), (current / ERROR).open("x") as file:
            text = str(error) if isinstance(error, ConfigError) else message
            json.dump({"rank": rank, "error": text.splitlines()[0]}, file)
    finally:
        end_at_once(code)


LARGE_MIB = 1024.0  # Memory of a process from which the objects of a run are freed at once.


def forget_run() -> None:
    """Exclude what exists from garbage collection, which takes longer than a short run; free large models first."""
    if psutil.Process().memory_info().rss > LARGE_MIB * MIB or torch.cuda.is_available():
        gc.collect()
    gc.freeze()


def record_run(spec: RunSpec, settings: RunSettings, context: Context) -> None:
    """Train one run with the trainer, the strategy and the loop of its configuration, and record it."""
    config = spec.config
    seeding.seed_everything(config.train.seed)
    data = prepare_data(load_data(config, context), config, settings)
    training, evaluation = build.make_loaders(config, data, context)
    plan, events = StepPlan(config.train, training.steps_per_epoch), Events(context.run_dir, enabled=context.rank == 0)
    recorder = Recorder(settings, context)
    further = [watchers.custom_watcher(target) for target in config.measure.watchers]
    logger = RecordingLogger(plan, events, recorder, further, scales_loss=config.precision.name == "fp16")
    inputs = TrainingInputs(training, evaluation, plan, logger, spec.run.id)
    make_model = partial(make_blueprint, config, data, context, settings)
    model, _ = load_trainer(config).train(make_model, config, context, inputs)
    recorder.write(model)


TRAIN_SIZE, EVAL_SIZE = 128, 11  # Samples. The latter is a prime number, so that no batch divides it.


def load_data(config: Config, context: Context) -> TaskData:
    """Load a few samples, or all of a smaller data set. The sizes in ``config`` become those that are loaded."""
    for key, size in (("train_size", TRAIN_SIZE), ("eval_size", EVAL_SIZE)):
        if key in config.dataset.keys:
            setattr(config.dataset, key, min(size, getattr(config.dataset, key) or size))
    while True:
        try:
            return build.load_data(config, context)
        except TooFewSamplesError as error:  # Only loading shows how many samples own data have.
            setattr(config.dataset, f"{error.key}_size", error.available)


def make_blueprint(config: Config, data: TaskData, context: Context, settings: RunSettings) -> Blueprint:
    """Return the model of a run, with smooth functions. In the phase of frozen parameters, one is not trained."""
    blueprint = build.build_model(config, data, context)
    make_smooth(blueprint.model)
    if settings.frozen:
        parameters = list(blueprint.model.parameters())
        parameters[len(parameters) // 2].requires_grad_(False)
    return blueprint


def prepare_data(data: TaskData, config: Config, settings: RunSettings) -> TaskData:
    """Return the data of a run: as many samples as its steps need, on request with uneven numbers of targets."""
    collate = partial(collate_reversed, data.collate) if settings.role == "noise" else data.collate
    if isinstance(data.train, PackedSamples):  # The rows stay as they are.
        return replace(data, collate=collate)
    length = min(settings.samples, len(data.train))
    shares = uneven_shares(length, config, settings) if settings.uneven else {}
    return replace(data, train=PartialSamples(data.train, length, shares), collate=collate)


def uneven_shares(length: int, config: Config, settings: RunSettings) -> dict[int, float]:
    """Return the share of the targets that a sample keeps, by its index.

    The second micro-batch of the second step has no target, if that is not the only one of a step. The first step
    shows how targets are weighted.
    """
    sharding = BatchSharding(0, settings.world_size, settings.micro_batch, settings.accumulation)
    order = ShardedBatchSampler(length, sharding, seed=config.train.seed, shuffle=True).global_batches(0).flatten()
    first = sharding.global_batch + settings.micro_batch
    # A step of few samples may have only one, which needs a target.
    kept = (1.0, 0.3, 0.7, 0.15, 0.5) if length == settings.samples else (1.0, 0.3, 0.7, 0.5)
    shares = {}
    for position, index in enumerate(order.tolist()):
        is_second = first <= position < first + settings.micro_batch and index < length  # not padding of few samples
        is_empty = is_second and sharding.global_batch > settings.micro_batch
        shares[index % length] = 0.0 if is_empty else kept[position % len(kept)]
    return shares


class PartialSamples:
    """The first samples of a data set, of which some have fewer targets. Other attributes are those of the data set."""

    def __init__(self, samples: Samples, length: int, shares: dict[int, float]) -> None:
        self.samples, self.length, self.shares = samples, length, shares

    def __getattr__(self, name: str) -> Any:
        if name in ("samples", "length", "shares"):  # while it is unpickled
            raise AttributeError(name)
        found = getattr(self.samples, name)
        return found[: self.length] if name in ("lengths", "prompt_lengths") else found

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index >= self.length:
            raise IndexError(index)
        sample = dict(self.samples[index])
        labels = sample["labels"].clone()
        (targets,) = (labels.flatten() != IGNORE).nonzero(as_tuple=True)
        share = self.shares.get(index, 1.0)
        kept = round(share * len(targets)) or int(share >= 0.3)
        labels.view(-1)[targets[kept:]] = IGNORE
        return sample | {"labels": labels}


def collate_reversed(collate: Callable[[list[Sample]], Batch], samples: Sequence[Sample]) -> Batch:
    """Collate the samples of a micro-batch in the reverse order, so that sums have another order."""
    return collate(list(reversed(samples)))


def compare_phases(variant: dict[str, Any], group: Group, references: Group) -> Iterator[dict[str, Any]]:
    """Yield the result of each phase up to the first that differs. What follows it would only be its consequence."""
    for phase in variant["phases"]:
        needed = list(phase["directories"].values())
        for each in (group, references):
            each.run_until(needed)
        result = compare_in_fork(phase)
        yield result
        if result["status"] in (DIFFERENT, NOT_COMPARABLE):
            break
    group.stop()


def compare_variant(variant: dict[str, Any], phases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a variant: its status, the cause of the first difference, and the phases."""
    different = [phase for phase in phases if phase["status"] == DIFFERENT]
    failed = [phase for phase in phases if "error" in phase]
    status = DIFFERENT if different else NOT_COMPARABLE if failed or not phases else EQUAL
    cause = different[0]["cause"] if different else None
    reasons = [f"phase {phase['phase']}: {phase['error']}" for phase in failed]
    if not phases:
        reasons += [f"phase {name}: {error}" for name, error in variant["skipped"].items()]
    return {
        **variant["header"],
        "arithmetic": phases[0].get("arithmetic") if phases else None,
        "status": status,
        "cause": cause,
        "reasons": reasons,
        "skipped": variant["skipped"],
        "phases": phases,
        "not_run": [phase["name"] for phase in variant["phases"][len(phases) :]],
    }


def compare_in_fork(phase: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a phase, of which another process compares the runs.

    This process forks further groups. If it computed with several threads itself, those of the groups would wait for
    threads of OpenMP that a fork does not copy.
    """
    entry = {"phase": phase["name"], "adds": phase["adds"], "status": FAILED}
    with TemporaryFile("w+") as file:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(parent=parent)
                try:
                    text = json.dumps(compare_phase(phase))
                except Exception as error:  # any: a run may have recorded anything
                    traceback.print_exc()
                    reason = f"the runs cannot be compared: {type(error).__name__}: {error}"
                    text = json.dumps(entry | {"error": reason})
                file.write(text)
                file.flush()
                code = 0
            finally:
                end_at_once(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        file.seek(0)
        found: dict[str, Any] = json.load(file) if code == 0 else {}
    return found or entry | {"error": f"the runs cannot be compared: the process ended with {code}"}


def compare_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a phase."""
    directories = {role: Path(path) for role, path in phase["directories"].items()}
    entry: dict[str, Any] = {"phase": phase["name"], "adds": phase["adds"]}
    for role, path in directories.items():
        if (path / ERROR).exists():
            found = files.read_json(path / ERROR)
            where = f"the {role} run failed on rank {found['rank']}" if found["rank"] >= 0 else f"the {role} run hangs"
            return entry | {"status": FAILED, "error": f"{where}: {found['error']}"}
    runs = {role: Recording.read(path) for role, path in directories.items()}
    entry["arithmetic"] = runs["variant"].arithmetic
    if error := environment_variables.explain_arithmetic(runs["reference"].arithmetic, runs["variant"].arithmetic):
        return entry | {"status": NOT_COMPARABLE, "error": error}
    compared = Comparison(phase["name"], runs["reference"], runs["noise"], runs["variant"])
    compared.compare()
    if "resumed" in runs:
        compare_resumed(compared, runs["resumed"])
    cause, settings, findings = None, runs["variant"].settings, compared.findings
    worst = {kind: max(errors.values(), key=error_share) for kind, errors in compared.errors.items() if errors}
    if findings:
        found = diagnose(findings, settings.world_size, settings.accumulation, settings.precision)
        first = first_finding(findings)
        place = {"phase": phase["name"], "adds": phase["adds"], "step": first.step, "kind": first.kind}
        cause = asdict(found) | place | {"name": first.worst, "error": first.error, "bound": first.bound}
    return entry | {
        "status": DIFFERENT if findings else EQUAL,
        "steps": len(runs["reference"].steps),
        "cause": cause,
        "worst": {kind: {"error": error, "bound": bound, "step": step} for kind, (error, bound, step) in worst.items()},
        "errors": compared.errors,
        "findings": [describe_finding(finding) for finding in findings[:MAX_FINDINGS]],
    }


MAX_FINDINGS = 40  # Findings of a phase that the proof lists.


def describe_finding(finding: Finding) -> dict[str, Any]:
    """Return a finding for the proof, with at most ten names."""
    shortened = {name: value for name, value in finding.detail.items() if name not in ("order", "scales")}
    return asdict(replace(finding, names=finding.names[:10], detail=shortened))


if __name__ == "__main__":
    end_at_once(main())
