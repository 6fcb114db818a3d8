"""Training metrics: the per-step log and the final summary.

Rank 0 writes one line to ``metrics.jsonl`` every ``train.log_every`` steps.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from distexp.data.loader import StepData
from distexp.data.workload import Workload
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all, sum_over_ranks
from distexp.measure.clock import StepClock, quantiles, speed_error, synchronize
from distexp.measure.compilation import CompileWatch
from distexp.measure.memory.allocator import AllocatorWatch
from distexp.measure.memory.oom import FirstStepStacks
from distexp.measure.memory.parts import PartsWatch
from distexp.measure.memory.step_recording import StepRecording, has_history
from distexp.measure.ordinary_steps import OrdinarySteps, median_duration_s, save_step_times
from distexp.measure.profiling.overhead import remove_overhead
from distexp.measure.profiling.profile_window import ProfileWindow
from distexp.measure.profiling.profiler import StepProfiler
from distexp.measure.slow_rank_watch import SlowRankWatch
from distexp.measure.stragglers import RankTimes, find_stragglers, include_cpu_work, step_times
from distexp.runs.events import Events
from distexp.runs.heartbeat import Heartbeat
from distexp.runs.jsonl import append_line
from distexp.runs.metrics import Metrics
from distexp.runs.record_sections import RunError
from distexp.runs.run_dir import METRICS
from distexp.training.loss_history import LossHistory
from distexp.training.schedule import StepPlan
from distexp.training.step_counts import StepCounts, TotalCounts


@dataclass(frozen=True)
class Evaluation:
    """The result of one evaluation over the whole set, on all ranks together."""

    loss: float
    accuracies: tuple[float, float] | None  # top-1 and top-5, from 0 to 1; None for text
    samples: int
    seconds: float


class MetricsLogger:
    """The metrics of one training.

    All ranks must call every method, because some methods reduce over the ranks.

    Losses, counts and run time include earlier attempts of the run. Speed is measured on the steps of this attempt.
    """

    def __init__(self, plan: StepPlan, context: Context, events: Events, *, watch_slow_ranks: bool = True) -> None:
        self.plan, self.device, self.events = plan, context.device, events
        self.rank, self.world_size = context.rank, context.world_size
        self.clock = StepClock(context.device)
        self.steps = self.samples = 0
        self.counts = StepCounts()
        self.measured_work = Workload()  # of all ranks, after ``finish``
        self.stopped: RunError | None = None  # why the training ended before its last step
        self.resumed_at = 0  # the step that this attempt resumed from
        self.changes: list[str] = []  # settings that differ from those of the checkpoint
        self.logged = 0  # last step written to metrics.jsonl
        self.has_warned = False  # that a step had no gradient
        self.runtime_s = 0.0  # of earlier attempts, up to the checkpoint
        self.data_wait_s = 0.0
        self.history = LossHistory(allows_nan=plan.train.on_nan == "record")
        self.metrics = Metrics(steps_per_epoch=plan.steps_per_epoch, total_steps=plan.total_steps)
        self.started = time.perf_counter()
        self.allocator = AllocatorWatch(context.device, context.rank)
        # On a GPU, counting would keep the parameters that ZeRO-3 and FSDP gather until the backward pass.
        eager_on_cpu = context.device.type == "cpu" and not plan.train.compile
        self.parts = PartsWatch(context.rank, counts_activations=eager_on_cpu)
        self.waits = SlowRankWatch(context, enabled=watch_slow_ranks)
        self.ordinary_steps = OrdinarySteps()
        self.compilation = CompileWatch(enabled=bool(plan.train.compile))
        self.heartbeat = Heartbeat(context.run_dir, enabled=context.rank == 0)
        cuda_graphs = plan.train.compiled == "graphs"
        self.profiler = StepProfiler(context, plan.train.profile_steps, cuda_graphs=cuda_graphs)
        self.profiler.micro_batches = plan.train.gradient_accumulation_steps
        unmeasured = plan.train.profile_steps > 0 and plan.train.measure_after_step > 1
        self.first_stacks = FirstStepStacks(context.device, enabled=unmeasured)
        self.run_dir = context.run_dir
        self.path = self.run_dir / METRICS
        self._file = self.path.open("w") if context.rank == 0 else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain numbers and strings."""
        self.history.reduce()
        return {
            "steps": self.steps,
            "samples": self.samples,
            "losses": self.history.losses,
            "accuracies": self.history.accuracies,
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
        self.data_wait_s, self.runtime_s = state["data_wait_s"], state["runtime_s"]
        planned = {"steps_per_epoch": self.plan.steps_per_epoch, "total_steps": self.plan.total_steps}
        self.metrics = Metrics(**state["metrics"] | planned)
        self.events.emit(resumed_from_step=self.steps)
        if self._file is not None:
            self._file.write(state["lines"])
            self._file.flush()

    def record_changes(self, changes: list[str]) -> None:
        """Record the settings that differ from those of the checkpoint."""
        self.changes = changes
        if changes:
            self.events.emit(changes=changes)

    def start(self) -> None:
        """Start the run time; call it before the first step."""
        total, per_epoch = self.plan.total_steps, self.plan.steps_per_epoch
        self.profiler.window = ProfileWindow.of(self.plan.train, total=total, per_epoch=per_epoch, done=self.steps)
        self.started = time.perf_counter() - self.runtime_s
        self.compilation.start()
        self.first_stacks.start()

    def start_steps(self) -> None:
        """Start the step clock; call it before steps that follow anything else."""
        self.clock.restart()
        self.ordinary_steps.restart()
        self.profiler.mark_interrupted("a checkpoint was written")
        self._set_phase("profile" if self.profiler.running else "train" if self._warmed_up() else "warmup")
        self.waits.start_step(measured=self._is_measured())

    def before_update(self) -> None:
        """Measure the memory between the backward pass and the update."""
        self.allocator.before_update()
        self.parts.before_update()

    def record_step(self, step: StepData, contribution: Tensor, norm: Tensor, rate: float) -> None:
        """Record a finished step.

        Args:
            step: the data of the step.
            contribution: this rank's contribution to mean loss and accuracy, shape (2,).
            norm: the global gradient norm before clipping.
            rate: the learning rate.
        """
        self.first_stacks.stop()
        measured, watched = self._is_measured(), self.waits.watching
        self.waits.end_step(measured=measured)
        self.clock.mark()
        self.waits.start_step(measured=self._is_measured(1) and not self._ends_epoch(1))
        if self.parts.after_update(timed=measured):
            # Ranks that read their recording longer would make the others wait in the first profiled step.
            sum_over_ranks(torch.zeros(1, device=self.device)).item()
        self.profiler.step()
        self.heartbeat.beat()
        self.allocator.sample()
        if measured:
            self.ordinary_steps.end_step(self.counts.measured_steps, watched=watched)
        self.counts.add(step, warmed_up=self._warmed_up(), measured=measured)
        self.steps += 1
        self.events.advance(self.steps)
        self.samples += step.num_samples
        self.data_wait_s += step.wait_s
        self.history.add(contribution, step.normalizer)
        if self.steps % self.plan.train.log_every == 0 or self.steps == self.plan.total_steps:
            self._write_line(norm, rate)
        if self.profiler.window is not None and self.steps == self.profiler.window.steps_before:
            self._start_profile()
        elif self.steps - self.resumed_at == self.plan.train.measure_after_step:
            self._set_phase("train")

    def _start_profile(self) -> None:
        """Start the profiler. Its warm-up counts in no metric."""
        self._set_phase("profile")
        self.profiler.start()
        if has_history(self.device):
            self.parts.record_step(StepRecording(self.device, self.allocator.keep_peaks))
        self.clock.restart()
        self.waits.start_step(measured=False)

    def end_epoch(self, evaluation: Evaluation | None, *, has_accuracy: bool) -> None:
        """Record the training of an epoch, and the evaluation after it.

        Args:
            evaluation: The evaluation; None if there was none.
            has_accuracy: Whether the task has an accuracy, as image classification has.
        """
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
        """Record the evaluation after an epoch."""
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
        self.history.check_finite(evaluation.loss, f"the evaluation after step {self.steps}")

    def finish(self) -> Metrics:
        """Return the metrics of the whole training."""
        synchronize(self.device)
        metrics = self.metrics
        metrics.train_runtime = runtime = self._runtime()
        metrics.train_samples_per_second_overall = self.samples / runtime
        durations = self._measured_durations()
        totals = self.counts.total(self.device)
        self._emit_counts(totals)
        self.measured_work = totals.measured_work
        self.history.reduce()
        metrics.train_loss = sum(self.history.losses) / len(self.history.losses)
        metrics.data_wait_s, metrics.padding_share = self.data_wait_s, totals.padding_share
        self._add_speed(durations, totals)
        ranks = self._rank_times(durations) if durations else []
        if self._file is not None:
            self._file.close()
        self.parts.cancel()
        ranks = self._add_profile(ranks, sizes_differ=totals.sizes_differ)
        metrics.slow_rank_watch = self.waits.state
        if ranks:
            metrics.step_times_by_rank, metrics.stragglers = step_times(ranks), find_stragglers(ranks)
        metrics.compile = self.compilation.summary()
        return metrics

    def _measured_durations(self) -> list[float]:
        """Return the seconds of the measured steps."""
        first = self.plan.train.measure_after_step
        return self.clock.durations()[first : first + self.counts.measured_steps]

    def _emit_counts(self, totals: TotalCounts) -> None:
        """Write the counts that belong to the energy of the measured steps."""
        self.events.emit(measured_samples=self.counts.measured_samples)
        if totals.measured_tokens:
            self.events.emit(measured_tokens=totals.measured_tokens)

    def _add_speed(self, durations: list[float], totals: TotalCounts) -> None:
        """Add step times and throughput.

        Args:
            durations: Seconds of the measured steps.
            totals: Counts of all ranks.
        """
        metrics, seconds = self.metrics, sum(durations)
        metrics.step_time_s, metrics.speed_error = quantiles(durations), speed_error(durations)
        if durations:
            metrics.train_samples_per_second = self.counts.measured_samples / seconds
            metrics.train_steps_per_second = len(durations) / seconds
            metrics.tokens_per_second = totals.measured_tokens / seconds if totals.measured_tokens else None

    def _add_profile(self, ranks: list[RankTimes], *, sizes_differ: bool) -> list[RankTimes]:
        """Add the parts of the profiled step, if there is one.

        Args:
            ranks: Step times of the ranks; empty if no step was measured.
            sizes_differ: Whether the batches of some rank have different sizes.

        Returns:
            The step times, with what the profile adds to them.
        """
        if self.profiler.has_started:
            self.events.set_phase("profile")
        profiled = self.profiler.finish()
        if not profiled:
            return ranks
        metrics = self.metrics
        metrics.communication, metrics.step_breakdown = profiled.communication, profiled.breakdown
        if not ranks or not profiled.breakdown:
            return ranks
        median_s = (metrics.step_time_s or {})["p50"]
        metrics.step_breakdown = [
            remove_overhead(entry, median_s, data_wait_s=times.median_data_wait_s, sizes_differ=sizes_differ)
            for entry, times in zip(profiled.breakdown, ranks, strict=True)
        ]
        return [include_cpu_work(*pair) for pair in zip(ranks, profiled.breakdown, strict=True)]

    def _is_measured(self, ahead: int = 0) -> bool:
        """Return whether the current step, or one ahead of it, counts for the speed."""
        return self._warmed_up(ahead) and not self.profiler.running

    def _ends_epoch(self, ahead: int) -> bool:
        """Return whether an evaluation follows the step that is so many ahead."""
        step = self.steps + ahead
        return step % self.plan.steps_per_epoch == 0 or step >= self.plan.total_steps

    def _rank_times(self, durations: list[float]) -> list[RankTimes]:
        """Return the step times of all ranks, and write those of this rank. A collective."""
        waits = {step: wait_s for step, wait_s in self.waits.waits_s().items() if step < len(durations)}
        own = [durations[step] - wait_s for step, wait_s in waits.items()]
        ordinary = self.ordinary_steps.times(durations)
        if self.waits.enabled:
            save_step_times(self.run_dir, self.rank, ordinary)
        data_waits = [self.counts.data_waits_s[step] for step in waits]
        without_core = [self.waits.without_core_s(step) for step in waits]
        times = RankTimes(
            self.rank,
            quantiles(durations) or {},
            own_s=own,
            durations_s=[durations[step] for step in waits],
            data_wait_s=data_waits,
            without_core_s=without_core,
            watched_p50_s=median_duration_s(ordinary, watched=True),
            unwatched_p50_s=median_duration_s(ordinary, watched=False),
            median_data_wait_s=statistics.median(self.counts.data_waits_s),
            on_cpu=self.device.type == "cpu",
            includes_cpu_work=self.device.type == "cpu",
        )
        return gather_to_all(times) if self.world_size > 1 else [times]

    def _warmed_up(self, ahead: int = 0) -> bool:
        return self.steps + ahead - self.resumed_at >= self.plan.train.measure_after_step

    def _set_phase(self, phase: str) -> None:
        self.events.set_phase(phase, step=self.steps, total_steps=self.plan.total_steps)

    def _runtime(self) -> float:
        """Return the run time in seconds so far, without the overhead of the profiler."""
        return time.perf_counter() - self.started - self.profiler.overhead_s

    def _write_line(self, norm: Tensor, rate: float) -> None:
        self.history.reduce()
        losses = self.history.losses[self.logged :]
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
                "grad_norm": self._checked_norm(norm, losses[-1]),
                "learning_rate": rate,
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
