"""The forecast of the step time of a profiled run with other numbers of workers, its interval, and its calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

from distexp.forecast import communication as collectives
from distexp.forecast.communication import MEASURED, MODEL, SCALED, TO_MEASURE, Forecast, Target
from distexp.forecast.profiled_run import MeasuredStep, assign_waits, read_measured_step
from distexp.forecast.simulate import Scales, SimulatedStep, extrapolate, simulate
from distexp.hardware.facts import facts
from distexp.preflight.machine import MachineCurves, machine_of
from distexp.runs.step_files import Collective, Item
from distexp.statistics.noise import SINGLE_CPU_RUN
from distexp.strategies.parallel.checks import bubble_share
from distexp.system.typed_values import number_of

MAX_MICRO_BATCHES = 6  # Micro-batches that are simulated. Each further one takes as long as the last of these.


@dataclass(frozen=True)
class SimulatedTarget:
    """The simulated step of a target, with the sources of its collectives, and the kind and size of the longest one."""

    step: SimulatedStep
    sources: frozenset[str]
    largest: str


@dataclass(frozen=True)
class Forecaster:
    """Forecasts of one profiled run with the curves and links of one machine."""

    run: MeasuredStep
    machine: MachineCurves

    def simulate(self, target: Target, scales: Scales) -> SimulatedTarget:
        """Return the simulated step of a target."""
        count = target.micro_batches
        if count <= MAX_MICRO_BATCHES or self.run.communication.pipeline > 1:
            return self._simulate(target, scales)
        most = self._simulate(replace(target, micro_batches=MAX_MICRO_BATCHES), scales)
        fewer = self._simulate(replace(target, micro_batches=MAX_MICRO_BATCHES - 1), scales)
        return replace(most, step=extrapolate(fewer.step, most.step, count - MAX_MICRO_BATCHES))

    def _simulate(self, target: Target, scales: Scales) -> SimulatedTarget:
        items = self.items(target)
        times = [self._duration(item, target) for item in items]
        step = simulate(items, [seconds for seconds, _ in times], on_gpu=self.run.model.on_gpu, scales=scales)
        known = [(seconds, item) for (seconds, _), item in zip(times, items, strict=True) if seconds > 0]
        _, longest = max(known, key=itemgetter(0), default=(0.0, None))
        return SimulatedTarget(step, frozenset(source for seconds, source in times if seconds > 0), _name(longest))

    def items(self, target: Target) -> tuple[Item, ...]:
        """Return the segments and collectives of a step of a target."""
        model, count, communication = self.run.model, target.micro_batches, self.run.communication
        if communication.pipeline > 1:  # Its micro-batches overlap, so the formula of its schedule replaces them.
            ratio, count = communication.pass_ratio(model.micro_batches, count), model.micro_batches
            items = tuple(collectives.stretched(item, ratio) for item in model.items)
        else:
            items = collectives.with_micro_batches(model.items, model.micro_batches, count, communication)
        # The optimizer updates the share of a worker of the target.
        sizes = self.run.target, target
        shards = [communication.optimizer_shards(communication.copies(each.workers), each.nodes) for each in sizes]
        if model.group_elements and shards[0] != shards[1]:
            before, after = (collectives.update_share(model.group_elements, communication, number) for number in shards)
            items = collectives.shard_update(items, before, after, communication, on_gpu=model.on_gpu)
        if communication.copies(target.workers) == 1:
            return items
        if communication.copies(model.workers) == 1:
            items = collectives.plan_communication(items, model, communication, micro_batches=count)
        items = collectives.add_replication(items, communication, target)
        return assign_waits(items, communication, on_gpu=model.on_gpu)

    def _duration(self, item: Item, target: Target) -> tuple[float, str]:
        """Return the seconds of a collective and their source. An observed one is scaled by the ratio of both sizes."""
        if not isinstance(item, Collective):
            return 0.0, MEASURED
        targets = (self.run.target, target)
        here, there = (collectives.group_layout(self.run.communication, item.axis, each) for each in targets)
        if item.transfer_s is not None and there == here:
            return item.transfer_s, MEASURED
        size = new_size = item.bytes or 0
        if item.axis == "replicate" and item.transfer_s is not None:  # Replicas exchange the share of a worker.
            before, after = (collectives.group_layout(self.run.communication, "shard", each).ranks for each in targets)
            new_size = size * before // after
        new = collectives.collective_time(self.machine, item.kind, new_size, there)
        if item.transfer_s is None or here.ranks == 1:
            return new.seconds, new.source
        old = collectives.collective_time(self.machine, item.kind, size, here)
        return item.transfer_s * new.seconds / old.seconds, MODEL if new.source == MODEL else SCALED

    def forecast(self, target: Target, calibration: Calibration) -> Forecast:
        """Return the forecast of a target."""
        scales, run = calibration.scales, self.run
        found = self.simulate(target, scales)
        step, more = found.step, target.micro_batches / run.model.micro_batches
        if run.communication.pipeline > 1:
            more = run.communication.pass_ratio(run.model.micro_batches, target.micro_batches)
        parts = {
            "compute": step.compute_s,
            "exposed_communication": step.exposed_s,
            "launch": step.launch_s,
            "waiting": run.waiting_s(target.workers) * math.sqrt(more),
            "other": calibration.other_s * more,
        }
        seconds = max(sum(parts.values()), 1e-9)
        shorter_s = longer_s = 0.0
        if run.model.on_gpu:  # A slower or faster CPU. On CPUs, the noise of a run includes that of the launches.
            fast, slow = (replace(scales, host=scales.host * host) for host in (1 / HOST_SPREAD, HOST_SPREAD))
            shorter_s = step.step_s - self.simulate(target, fast).step.step_s
            longer_s = self.simulate(target, slow).step.step_s - step.step_s
        error = error_of(seconds, found, run, target)
        return Forecast(
            target,
            seconds,
            max(seconds - math.hypot(error, shorter_s), LEAST_SHARE * seconds),
            seconds + math.hypot(error, longer_s, HIDDEN_UNCERTAINTY * step.hidden_s),
            parts,
            step.hidden_s,
            beyond=describe_distance(run, target, found.sources),
            limit=describe_limit(parts, found.largest),
            notes=(
                *self._notes_on_collectives(found.sources, target),
                *self._notes_on_oversubscription(target),
                *self._notes_on_pipeline(target),
            ),
        )

    def _notes_on_collectives(self, sources: frozenset[str], target: Target) -> Iterator[str]:
        """Yield whether the times of collectives are those of a preflight, or which link was assumed."""
        across, machine = target.nodes > 1, self.machine
        kind = "between nodes" if across else "in a node"
        if MODEL not in sources:
            is_measured = bool(machine.points) and SCALED not in sources
            if is_measured and target.workers not in (1, self.run.target.workers):
                size = f"{target.nodes} x {target.workers_per_node}"
                yield f"collectives of {size} workers take the times that a preflight measured"
        elif any((point.nodes > 1) == across for point in machine.points):
            yield "no preflight measured collectives of this kind: their times are those of the links"
        elif across:
            network = machine.network.describe(target.workers_per_node)
            slurm = "cluster=slurm " if self.run.model.on_gpu else ""  # Local nodes are simulated on one machine.
            yield f"collectives {kind} are not measured. Assumed: {network}. {_measure(f'{slurm}cluster.nodes=2')}"
        else:
            workers = _measure(f"cluster.workers_per_node={target.workers_per_node}")
            yield f"collectives {kind} are not measured. Assumed: {machine.intra.name}. {workers}"

    def _notes_on_pipeline(self, target: Target) -> Iterator[str]:
        """Yield the bubble of a pipeline, which is in the time of its computation."""
        stages, schedule = self.run.communication.pipeline, self.run.communication.schedule
        if stages > 1:
            bubble = bubble_share(stages, schedule, target.micro_batches)
            yield (
                f"the bubble of parallel.schedule={schedule} is {bubble:.0%} of the passes if all stages take equally "
                f"long, with train.gradient_accumulation_steps={target.micro_batches}. It counts as computation"
            )

    def _notes_on_oversubscription(self, target: Target) -> Iterator[str]:
        """Yield why a set oversubscription does not change the forecast of several nodes."""
        network = self.machine.network
        if target.nodes > 1 and network.oversubscription > 1 and not network.uses_upper_level(target.nodes):
            yield (
                f"up to {facts().nodes_per_leaf} nodes, forecast.oversubscription={network.oversubscription:g} has no "
                "effect, because GPUs of the same index are taken to share a switch. If they do not, set "
                "forecast.rail_optimized=false"
            )


def forecast_steps(
    run_dir: Path, targets: Sequence[Target], machine: MachineCurves | None = None, trusted: Sequence[str] = ()
) -> list[Forecast]:
    """Return the forecast of the step time of each target. The profiled run's own size gives its own measured median.

    Without a machine, the curves and links are those that preflights stored for the type of device of the run.
    ``trusted`` are packages that may have the strategy of the run. Errors are those of ``read_measured_step``.
    """
    run = read_measured_step(run_dir, trusted)
    forecaster = Forecaster(run, machine or machine_of(run.record.environment))
    calibration = calibrate(
        lambda scales: forecaster.simulate(run.target, scales).step.step_s,
        run.median_s - run.own_waiting_s,
        on_gpu=run.model.on_gpu,
    )
    return [forecaster.forecast(target, calibration) for target in targets]


def _name(longest: Item | None) -> str:
    if not isinstance(longest, Collective):
        return ""
    if (size := longest.bytes) is None:
        return longest.kind
    text = f"{size:.0f} bytes" if size < 1e3 else f"{size / 1e3:.3g} kB" if size < 1e5 else f"{size / 1e6:,.1f} MB"
    return f"{longest.kind} of {text}"


def _measure(override: str) -> str:
    return f"{TO_MEASURE} distexp preflight {override}"


UNCERTAINTY = {MEASURED: 0.15, SCALED: 0.3, MODEL: 0.6}
"""Relative error of the exposed communication that the interval assumes, by the source of its duration."""
HIDDEN_UNCERTAINTY = 0.15
"""Fraction of the hidden communication by which a step may be longer: its kernels share the device with others."""
BASE_UNCERTAINTY = 0.03  # relative error of the interval at the profiled size, from run to run
DOUBLING_UNCERTAINTY = 0.01  # relative error that each doubling of the workers adds
HOST_SPREAD = 4 / 3
"""Factor by which launches on GPUs may be slower, or faster, in another run (docs/results/forecast.md)."""
LEAST_SHARE = 0.05  # smallest lower end of an interval, relative to the forecast: no step takes no time


def error_of(seconds: float, simulated: SimulatedTarget, run: MeasuredStep, target: Target) -> float:
    """Return the error of a forecast in seconds. Its parts are independent, so their squares are added."""
    worst = max((UNCERTAINTY[source] for source in simulated.sources), default=0.0)
    speed_error = number_of(run.record.metrics.speed_error or {}, "relative") or 0.0
    return math.hypot(
        BASE_UNCERTAINTY * seconds,
        DOUBLING_UNCERTAINTY * abs(math.log2(target.workers / run.model.workers)) * seconds,
        2 * speed_error * seconds,
        worst * simulated.step.exposed_s,
        (run.waiting_s(target.workers) - run.own_waiting_s) / 2,
        0.0 if run.model.on_gpu else SINGLE_CPU_RUN * seconds,  # As in the report: other programs share the cores.
    )


def describe_distance(run: MeasuredStep, target: Target, sources: Set[str]) -> str:
    """Return how far a target is outside of the measured range; empty if it is inside."""
    parts = []
    if target.workers > run.model.workers:
        parts.append(f"{target.workers / run.model.workers:g} x the workers of the profiled run ({run.model.workers})")
    if target.nodes > run.model.nodes:
        parts.append(f"{target.nodes} nodes instead of {run.model.nodes}")
    if MODEL in sources:
        parts.append("collectives from link speeds, not measured")
    elif SCALED in sources:
        parts.append("collectives scaled from another number of workers")
    return ", ".join(parts)


def describe_limit(parts: dict[str, float], largest: str) -> str:
    """Return what limits a step most, other than its kernels; empty if nothing takes a tenth of it."""
    names = {
        "exposed_communication": f"communication, mainly the {largest}" if largest else "communication",
        "launch": "the launches of the CPU",
        "waiting": "the wait for the slowest worker",
    }
    total = sum(parts.values())
    part = max(names, key=lambda name: parts[name])
    return names[part] if parts[part] >= 0.1 * total else ""


# Calibration: the profiled run's own size must give its own measured median.
#
# The profiler slows down the CPU and not the kernels, usually by TYPICAL_HOST. If the simulated step then is about as
# long as the median of the steps that were not profiled, all times are scaled by the same small factor. Otherwise the
# times of the CPU are scaled. If that is not enough, those of the kernels are scaled too, because the profiled step
# had more work. A rest that no part explains is added to each step.

TYPICAL_HOST = 0.6
"""Time of the CPU for a launch without the profiler, as a fraction of that with it: runs on H200s, torch 2.11."""
MIN_HOST_FACTOR = 0.3
"""Smallest factor of the CPU's times on a GPU: more than the profiler's overhead is work that the step did not have."""
CLOSE = 0.03  # relative difference up to which all times are scaled alike
EXACT = 1e-4  # Relative difference that a factor may leave. It becomes `other_s`.
ROUNDS = 30


@dataclass(frozen=True)
class Calibration:
    """Factors of the times of the profiled step, and the seconds of a step that they do not explain."""

    scales: Scales
    other_s: float = 0.0


StepTime = Callable[[Scales], float]
"""The simulated step of the profiled run's own size in seconds; it grows with the factors."""


def calibrate(step_s: StepTime, median_s: float, *, on_gpu: bool) -> Calibration:
    """Return the factors with which the simulation gives the measured median."""
    if not on_gpu:
        return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, (0.0, 10.0))
    if abs(step_s(Scales(TYPICAL_HOST, 1.0)) - median_s) <= CLOSE * median_s:
        return _fit(lambda factor: Scales(TYPICAL_HOST * factor, factor), step_s, median_s, (0.9, 1.1))
    if step_s(Scales(MIN_HOST_FACTOR, 1.0)) > median_s:
        return _fit(lambda factor: Scales(TYPICAL_HOST * factor, factor), step_s, median_s, (0.0, 1.0))
    return _fit(lambda factor: Scales(factor, 1.0), step_s, median_s, (MIN_HOST_FACTOR, 1.0))


def _fit(
    scales: Callable[[float], Scales], step_s: StepTime, median_s: float, limits: tuple[float, float]
) -> Calibration:
    """Return the factor between two limits with which the step is as long as the median."""
    low, high = limits
    factor, rest = high, median_s - step_s(scales(high))
    for _ in range(ROUNDS):
        if (rest >= 0 and factor == limits[1]) or abs(rest) <= EXACT * median_s:
            break
        factor = (low + high) / 2
        rest = median_s - step_s(scales(factor))
        low, high = (factor, high) if rest > 0 else (low, factor)
    return Calibration(scales(factor), rest)
