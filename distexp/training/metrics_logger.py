"""Training metrics: a line of ``metrics.jsonl`` every ``train.log_every`` steps, and the final summary."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Workload
from distexp.data.loader import StepData
from distexp.distributed.context import Context
from distexp.distributed.process_group import sum_over_ranks
from distexp.measure.clock import StepClock, quantiles, speed_error, synchronize
from distexp.measure.profiling.breakdown import have_other_sizes
from distexp.measure.profiling.intervals import WARMUP_STEPS, ProfileWindow
from distexp.measure.watcher import PROFILE, TRAIN, WARMUP, MeasuredSteps, Step, Watcher
from distexp.runs import record_sections, run_dir, run_state
from distexp.runs.events import Events
from distexp.runs.metrics import Metrics
from distexp.strategies.optimizer import innermost_optimizer, read_model_tensors
from distexp.system.files import append_line
from distexp.training import inputs
from distexp.training.watchers import Watchers


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation over the whole set, on all ranks together."""

    loss: float
    accuracies: tuple[float, float] | None  # top-1 and top-5, from 0 to 1; None for text
    samples: int
    seconds: float


class MetricsLogger:
    """The metrics of one training. Every method is a collective, because some reduce over the ranks.

    Losses, counts and run time include earlier attempts of the run. Speed is measured on the steps of this attempt.
    With fp16 (``scales_loss``), a step with an infinite gradient is skipped until the scale of the loss is right.
    """

    def __init__(
        self,
        plan: inputs.StepPlan,
        context: Context,
        events: Events,
        watchers: Sequence[Watcher],
        *,
        scales_loss: bool = False,
    ) -> None:
        self.plan, self.context, self.events, self.watchers = plan, context, events, Watchers(watchers)
        self.clock, self.counts = StepClock(context.device), StepCounts()
        self.history = LossHistory(allows_nan=plan.train.on_nan == "record", allows_infinite_gradients=scales_loss)
        self.heartbeat = run_state.Heartbeat(context.run_dir, enabled=context.rank == 0)
        self.metrics = Metrics(steps_per_epoch=plan.steps_per_epoch, total_steps=plan.total_steps)
        self.memory: dict[str, Any] = {}  # what the watchers add to that section of the record, after ``finish``
        self.measured_work = Workload()  # of all ranks, after ``finish``
        self.window: ProfileWindow | None = None  # the steps of the phase ``profile``
        self.steps = self.samples = 0
        self.started, self.runtime_s = time.perf_counter(), 0.0  # the latter of earlier attempts, up to the checkpoint
        self.data_wait_s = 0.0
        self.resumed_at = 0  # the step that this attempt resumed from
        self.changes: list[str] = []  # settings that differ from those of the checkpoint
        self.stopped: record_sections.RunError | None = None  # why the training ended before its last step
        self.logged = 0  # last step written to metrics.jsonl
        self.has_warned = False  # that a step had no gradient
        self.live_rate: float | None = None  # learning rate of the last update, if the optimizer reports it
        self.path = context.run_dir / run_dir.METRICS
        self._file = self.path.open("w") if context.rank == 0 else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain numbers and strings."""
        self.history.reduce()
        return {
            "steps": self.steps,
            "samples": self.samples,
            "losses": self.history.losses,
            "accuracies": self.history.accuracies,
            "router_losses": self.history.router_losses,
            "logged": self.logged,
            "data_wait_s": self.data_wait_s,
            "runtime_s": self._runtime(),
            "metrics": asdict(self.metrics),
            "lines": self.path.read_text() if self._file is not None else "",
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint; metrics.jsonl loses the lines of later steps."""
        self.steps = self.resumed_at = self.events.step = state["steps"]
        self.samples, self.logged = state["samples"], state["logged"]
        self.history.losses, self.history.accuracies = state["losses"], state["accuracies"]
        self.history.router_losses = state.get("router_losses", [])
        self.data_wait_s, self.runtime_s = state["data_wait_s"], state["runtime_s"]
        planned = {"steps_per_epoch": self.plan.steps_per_epoch, "total_steps": self.plan.total_steps}
        self.metrics = Metrics(**state["metrics"] | planned)
        self.events.emit(resumed_from_step=self.steps)
        if self._file is not None:
            self._file.write(state["lines"])
            self._file.flush()

    def follow(self, module: nn.Module, optimizer: Any) -> None:
        """Let the watchers measure a distributed model. Call it as soon as the model is built."""
        inner = innermost_optimizer(optimizer)
        if isinstance(inner, torch.optim.Optimizer):  # A trainer may change the rate again after the update.
            inner.register_step_pre_hook(self._keep_rate)
        self.watchers.follow(module, partial(read_model_tensors, module, optimizer))

    def _keep_rate(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.live_rate = float(optimizer.param_groups[0]["lr"])

    def start(self) -> None:
        """Start the run time; call it before the first step."""
        self.window = self.plan.profile_window(self.steps)
        self.started = time.perf_counter() - self.runtime_s
        self.watchers.start(self.steps)

    def start_steps(self) -> None:
        """Start the step clock; call it before steps that follow anything else."""
        phase = self._phase(self.steps)
        self._set_phase(phase)
        self.watchers.start_steps(phase)
        self.clock.restart()

    def record_step(self, data: StepData, contribution: Tensor, norm: Tensor, rate: float) -> None:
        """Record a finished step: this rank's part of ``partial_metrics``, and the norm before clipping."""
        phase, next_phase = self._phase(self.steps), self._phase(self.steps + 1)
        self.steps += 1
        ends_epoch = self.steps % self.plan.steps_per_epoch == 0 or self.steps >= self.plan.total_steps
        measured = phase == TRAIN
        step = Step(self.steps, measured, next_phase == TRAIN and not ends_epoch)  # an evaluation follows an epoch
        self.watchers.end_step(step)
        self.clock.mark()
        self.watchers.after_step(step)
        self.heartbeat.beat()
        self.counts.add(data, warmed_up=phase != WARMUP, measured=measured)
        self.events.advance(self.steps)
        self.samples += data.num_samples
        self.data_wait_s += data.wait_s
        self.history.add(contribution, data.normalizer, norm)
        if self.steps % self.plan.train.log_every == 0 or self.steps == self.plan.total_steps:
            self._write_line(norm, rate)
        if phase != next_phase == PROFILE:
            self.start_steps()
        elif phase == WARMUP != next_phase:
            self._set_phase(next_phase)

    def end_epoch(self, evaluation: Evaluation | None, *, has_accuracy: bool) -> None:
        """Record the training of an epoch, and the evaluation after it."""
        self.history.reduce()
        metrics = self.metrics
        starts_at = len(metrics.train_losses) * self.plan.steps_per_epoch
        losses, accuracies = self.history.losses[starts_at:], self.history.accuracies[starts_at:]
        metrics.train_losses.append(sum(losses) / len(losses))
        if has_accuracy:
            metrics.train_accuracies.append(sum(accuracies) / len(accuracies))
        if evaluation is None:
            self.events.emit(epoch=len(metrics.train_losses), train_loss=metrics.train_losses[-1])
            return
        self._record_evaluation(evaluation)

    def _record_evaluation(self, evaluation: Evaluation) -> None:
        metrics = self.metrics
        metrics.eval_losses.append(evaluation.loss)
        metrics.eval_loss = evaluation.loss
        metrics.eval_runtime = evaluation.seconds
        metrics.eval_samples_per_second = evaluation.samples / evaluation.seconds
        accuracy, top5_accuracy = evaluation.accuracies or (None, None)
        if accuracy is not None and top5_accuracy is not None:
            metrics.eval_accuracies.append(accuracy)
            metrics.eval_top5_accuracies.append(top5_accuracy)
        self.events.emit(
            epoch=len(metrics.train_losses),
            train_loss=metrics.train_losses[-1],
            eval_loss=evaluation.loss,
            eval_accuracy=accuracy,
            eval_top5_accuracy=top5_accuracy,
        )
        self.history.check_finite(evaluation.loss, f"the loss of the evaluation after step {self.steps}")

    def finish(self) -> Metrics:
        """Return the metrics of the whole training."""
        synchronize(self.context.device)
        metrics = self.metrics
        metrics.train_runtime = runtime = self._runtime()
        metrics.train_samples_per_second_overall = self.samples / runtime
        first = self.plan.train.measure_after_step
        durations = self.clock.durations()[first : first + self.counts.measured_steps]
        totals, sizes_differ = self.counts.total(self.context)
        # They belong to the energy of the measured steps.
        tokens = {"measured_tokens": totals.measured_tokens} if totals.measured_tokens else {}
        self.events.emit(measured_samples=self.counts.measured_samples, **tokens)
        self.measured_work = totals.measured_work
        self.history.reduce()
        metrics.train_loss = sum(self.history.losses) / len(self.history.losses)
        if router := self.history.router_losses:
            metrics.train_router_loss = sum(router) / len(router)
        metrics.data_wait_s = self.data_wait_s
        if totals.tokens and totals.positions:  # Images have none, and a custom collate function may count none.
            metrics.padding_share = 1 - totals.tokens / totals.positions
        self._add_speed(durations, totals)
        if self._file is not None:
            self._file.close()
        self.watchers.stop()
        if self.window is not None and self.steps >= self.window.steps_before:
            self.events.set_phase(PROFILE)  # What follows may need much memory.
        steps = MeasuredSteps(durations, self.counts.data_waits_s, sizes_differ)
        self.metrics = self.watchers.add_summaries(steps, metrics, self.memory)
        return self.metrics

    def _add_speed(self, durations: list[float], totals: StepCounts) -> None:
        metrics, seconds = self.metrics, sum(durations)
        metrics.step_time_s, metrics.speed_error = quantiles(durations), speed_error(durations)
        if durations:
            metrics.train_samples_per_second = self.counts.measured_samples / seconds
            metrics.train_steps_per_second = len(durations) / seconds
            metrics.tokens_per_second = totals.measured_tokens / seconds if totals.measured_tokens else None

    def _phase(self, done: int) -> str:
        """Return the phase of the step after so many steps. Only the steps of the phase ``train`` are measured."""
        if done - self.resumed_at < self.plan.train.measure_after_step:
            return WARMUP
        first = self.window.steps_before if self.window is not None else self.plan.total_steps
        profiled = self.window is not None and first <= done < first + WARMUP_STEPS + self.window.steps
        return PROFILE if profiled else TRAIN

    def _set_phase(self, phase: str) -> None:
        self.events.set_phase(phase, step=self.steps, total_steps=self.plan.total_steps)

    def _runtime(self) -> float:
        """Return the run time in seconds so far, without the overhead of the watchers."""
        return time.perf_counter() - self.started - sum(watcher.overhead_s for watcher in self.watchers.members)

    def _write_line(self, norm: Tensor, rate: float) -> None:
        self.history.reduce()
        losses, router = self.history.losses[self.logged :], self.history.router_losses[self.logged :]
        self.logged = self.steps
        if self._file is None:
            return
        # An earlier attempt may have done the first of these steps. They count for the loss, and have no duration here.
        recent = self.clock.durations(last=len(losses))
        seconds = sum(recent) / len(recent)
        samples = self.counts.samples[-len(recent) :]
        append_line(
            self._file,
            {
                "step": self.steps,
                "epoch": self.steps / self.plan.steps_per_epoch,
                "loss": sum(losses) / len(losses),
                **({"router_loss": sum(router) / len(router)} if router else {}),
                "grad_norm": self._checked_norm(norm, losses[-1]),
                "learning_rate": rate if self.live_rate is None else self.live_rate,
                "step_time_s": seconds,
                "samples_per_second": sum(samples) / len(samples) / seconds,
            },
        )

    def _checked_norm(self, norm: Tensor, loss: float) -> float:
        """Return a gradient norm; print a warning if it is zero for a loss that is not."""
        value = norm.item()
        if value == 0 and loss > 0 and not self.has_warned:
            self.has_warned = True
            print(
                f"warning: the gradient norm of step {self.steps} is 0 with a loss of {loss:.4g}, so the model learned "
                "nothing in this step. If the loss does not fall, compare it with kernels=reference (printed once)",
                flush=True,
            )
        return value


class DivergedError(RuntimeError):
    """The loss or the gradient norm is NaN or infinite."""


DIVERGED_HINT = "lower train.learning_rate"
FIRST_STEP_HINT = "no update was made yet, so check the weights and the data for NaN and very large values"


class LossHistory:
    """Loss and accuracy of each step, as means over all ranks.

    Each rank keeps its contributions on the device. ``reduce`` sums those of several steps in one collective. The
    gradient norms are checked then too, because the CPU would wait for the device if each step did it.
    """

    def __init__(self, *, allows_nan: bool, allows_infinite_gradients: bool) -> None:
        self.losses: list[float] = []  # loss of each reduced step
        self.accuracies: list[float] = []  # accuracy of each reduced step, from 0 to 1; 0 for text
        self.router_losses: list[float] = []  # router loss of each reduced step, if the model has one
        self._allows_nan, self._checks_norms = allows_nan, not (allows_nan or allows_infinite_gradients)
        self._contributions: list[Tensor] = []  # of this rank, since the last reduction
        self._targets: list[Tensor] = []  # of all ranks, for the same steps
        self._norms: list[Tensor] = []  # of the gradients of all ranks, for the same steps

    def add(self, contribution: Tensor, targets: Tensor, norm: Tensor) -> None:
        """Add this rank's part of a step, as in ``partial_metrics``; targets and norm are those of all ranks."""
        self._contributions.append(contribution)
        self._targets.append(targets)
        self._norms.append(norm.detach())

    def reduce(self) -> None:
        """Sum the latest contributions over the ranks; raise DivergedError, or ConfigError if a step has no target."""
        if not self._contributions:
            return
        losses, accuracies, *router = sum_over_ranks(torch.stack(self._contributions, dim=1)).tolist()
        norms = torch.stack(self._norms).tolist() if self._checks_norms else [0.0] * len(losses)
        targets = self._targets
        self._contributions, self._targets, self._norms = [], [], []
        first = len(self.losses) + 1
        self.losses += losses
        self.accuracies += accuracies
        self.router_losses += router[0] if router else []
        for step, (loss, norm, count) in enumerate(zip(losses, norms, targets, strict=True), start=first):
            if not self._allows_nan and not math.isfinite(loss):
                check_targets(count, f"step {step}", "raise train.micro_batch_size")
            hint = FIRST_STEP_HINT if step == 1 else DIVERGED_HINT
            self.check_finite(loss, f"the loss of step {step}", hint)
            self.check_finite(norm, f"the gradient norm of step {step}", hint)

    def check_finite(self, value: float, name: str, hint: str = DIVERGED_HINT) -> None:
        """Raise DivergedError if a value is NaN or infinite, unless this is allowed."""
        if not self._allows_nan and not math.isfinite(value):
            raise DivergedError(f"{name} is {value}: {hint}, or set train.on_nan=record to continue")


def check_targets(targets: float | Tensor, source: str, hint: str) -> None:
    """Raise ConfigError if no label of a source counts; the hint is what to set instead of correcting the data."""
    if not targets:
        raise ConfigError(
            f"{source} has no target: all its labels are {IGNORE}. Leave such samples out of the dataset, or {hint}"
        )


@dataclass
class StepCounts:
    """Counts of the steps of this attempt. *Measured* steps count for the speed."""

    samples: list[int] = field(default_factory=list)  # of each step and of all ranks; packed rows have different ones
    tokens: int = 0  # tokens of this rank, without padding
    positions: int = 0  # tokens of this rank, with padding
    measured_steps: int = 0  # number of measured steps
    measured_samples: int = 0  # their samples, of all ranks
    measured_tokens: int = 0  # their tokens on this rank, without padding
    measured_work: Workload = field(default_factory=Workload)  # sizes of their batches on this rank
    data_waits_s: list[float] = field(default_factory=list)  # time that this rank waited for data in each of them
    sizes: list[tuple[int, ...]] = field(default_factory=list)  # batch sizes of the measured and the profiled steps

    def add(self, step: StepData, *, warmed_up: bool, measured: bool) -> None:
        """Add a step. One after the warm-up that is profiled has a size, but does not count for the speed."""
        tokens = sum(batch.num_tokens for batch in step.micro_batches)
        self.samples.append(step.num_samples)
        self.tokens += tokens
        self.positions += sum(batch.num_positions for batch in step.micro_batches)
        if warmed_up:
            work = step.workload
            # The logits of a token cost at most about as much as the layers for it.
            self.sizes.append((work.rows, work.positions + work.head_tokens))
        if measured:
            self.measured_steps += 1
            self.measured_samples += step.num_samples
            self.measured_tokens += tokens
            self.measured_work += step.workload
            self.data_waits_s.append(step.wait_s)

    def total(self, context: Context) -> tuple[StepCounts, bool]:
        """Return the sums over the rows of all ranks, and whether some rank has batches of different sizes."""
        counts = [self.measured_tokens, self.tokens, self.positions, int(have_other_sizes(self.sizes))]
        sums = sum_over_ranks(torch.tensor([*counts, *astuple(self.measured_work)], device=context.device))
        measured_tokens, tokens, positions, ranks_that_differ, *work = (sums // context.copies).tolist()
        summed = {"measured_tokens": measured_tokens, "tokens": tokens, "positions": positions}
        return replace(self, **summed, measured_work=Workload(*work)), ranks_that_differ > 0
