"""What the time of the profiled steps went to. Each rank reads its own trace, and sends only durations and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.memory.step_recording import count_elements
from distexp.measure.profiling import intervals, phases
from distexp.measure.profiling.chrome_trace import Trace, combine_shares
from distexp.measure.profiling.step_segments import MedianStep, ProfiledStep, RankSummary, items_of, lanes_of
from distexp.models.transforms import find_units
from distexp.runs.step_files import Parameters, StepModel, write_profile_summary, write_step_model
from distexp.runs.texts import print_despite_full_disk
from distexp.strategies.optimizer import parameter_groups
from distexp.system.torch_internals.collectives import FSDPUnitSize, ddp_bucket_sizes, read_fsdp_unit_sizes

T = TypeVar("T")


@dataclass(frozen=True)
class ProfileResult:
    """Results of the profiled steps, the same on all ranks."""

    communication: dict[str, Any]  # ``metrics.communication`` of the record
    breakdown: list[dict[str, Any]] | None  # ``metrics.step_breakdown``; None if a rank has no usable trace


@dataclass(frozen=True)
class StepAnalysis:
    """Analysis of the profiled steps of one rank."""

    context: Context
    window: intervals.ProfileWindow | None  # the profiled steps; None if no step could be profiled
    module: nn.Module | None  # the distributed model, whose sizes a forecast needs
    micro_batches: int  # micro-batches of a step
    core_waits: phases.CoreWaits  # time without a core in each profiled step

    def run(self, trace: Trace | str) -> ProfileResult:
        """Return the results of all ranks; a collective. Rank 0 writes the lanes of all ranks and its own step."""
        ranks = gather_to_all(trace if isinstance(trace, str) else result_or_error(lambda: RankSummary.of(trace)))
        communication = combine_shares([rank if isinstance(rank, str) else rank.shares for rank in ranks], self.window)
        known = [summary for summary in ranks if isinstance(summary, RankSummary)]
        if isinstance(trace, str) or len(known) < len(ranks):
            return ProfileResult(communication, None)
        return ProfileResult(communication, self._break_down(trace, known))

    def _break_down(self, trace: Trace, ranks: Sequence[RankSummary]) -> list[dict[str, Any]] | None:
        """Return the parts of the median step of each rank; None if a rank has none. A collective."""
        median = result_or_error(lambda: MedianStep.of(trace, ranks))
        own = median if isinstance(median, str) else result_or_error(lambda: self._own_parts(trace, median))
        found = gather_to_all(own)
        errors = list(dict.fromkeys(result for result in found if isinstance(result, str)))
        known = [result for result in found if not isinstance(result, str)]
        if self.context.rank == 0:
            if errors or isinstance(median, str):
                print_despite_full_disk(f"note: the parts of the profiled step are unknown: {'; '.join(errors)}")
            else:
                self._write(trace, median, ranks, [lanes for _, lanes in known])
        return None if errors else [entry for entry, _ in known]

    def _own_parts(self, trace: Trace, median: MedianStep) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the parts of the median step of this rank, and its lanes."""
        rank = self.context.rank
        entry = {
            **median.parts.to_json(rank, on_gpu=trace.on_gpu),
            "cpu_busy_ms": phases.cpu_busy_ms(trace, median.position),
            "without_core_ms": self.core_waits.milliseconds(median.position),
        }
        return entry, lanes_of(trace, median.parts, median.transfers, rank)

    def _write(
        self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary], lanes: Sequence[dict[str, Any]]
    ) -> None:
        """Write the own step and the lanes of all ranks. The training is finished, so an error is only printed."""
        folder = self.context.run_dir
        error = result_or_error(lambda: write_step_model(folder, self._step_model(trace, median, ranks)))
        if error is not None:
            print_despite_full_disk(f"note: no forecast is possible from this run: {error}")
        error = result_or_error(lambda: write_profile_summary(folder, lanes, len(trace.steps)))
        if error is not None:
            print_despite_full_disk(f"note: the report has no timeline of this run, which cannot be written: {error}")

    def _step_model(self, trace: Trace, median: MedianStep, ranks: Sequence[RankSummary]) -> StepModel:
        sizes, context = read_model_sizes(self.module), self.context
        step = ProfiledStep(trace, median, context.world_size, self.micro_batches, sizes.fsdp)
        return StepModel(
            on_gpu=trace.on_gpu,
            workers=context.world_size,
            nodes=context.nodes,
            micro_batches=self.micro_batches,
            step_s=median.parts.duration,
            step_s_by_rank=tuple(tuple(rank.step_s) for rank in ranks),
            items=items_of(step),
            units=sizes.units,
            bucket_elements=sizes.buckets,
            group_elements=sizes.groups,
            modules=sizes.modules,
        )


def result_or_error(measure: Callable[[], T]) -> T | str:
    """Return a result, or the error as text: an exception would leave the other ranks in the next collective."""
    try:
        return measure()
    except Exception as error:
        return str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of what a distributed model sends and updates, for a forecast."""

    units: tuple[Parameters, ...] = ()  # parameters of each block, and between the blocks, in the order of the model
    fsdp: dict[str, FSDPUnitSize] = field(default_factory=dict)  # Sizes of FSDP's units by name. Empty: no FSDP.
    buckets: tuple[int, ...] = ()  # Elements of DDP's buckets. Empty: no DDP.
    groups: tuple[tuple[int, ...], ...] = ()  # elements of each parameter in each group of the optimizer
    modules: tuple[tuple[int, ...], ...] = ()  # positions, in the parameters of all units, of those of each module


def read_model_sizes(module: nn.Module | None) -> ModelSizes:
    """Return the sizes of a distributed model; empty if it is unknown."""
    if module is None:
        return ModelSizes()
    bare = getattr(module, "module", module)
    buckets: tuple[int, ...] = ()
    if isinstance(module, nn.parallel.DistributedDataParallel):
        width = next(parameter.element_size() for parameter in module.parameters() if parameter.requires_grad)
        buckets = tuple(size // width for size in ddp_bucket_sizes(module))
    return ModelSizes(
        tuple(_units(bare)),
        {unit.name: unit for unit in read_fsdp_unit_sizes(module)},
        buckets,
        tuple(tuple(map(count_elements, group["params"])) for group in parameter_groups(bare, weight_decay=0.0)),
        tuple(_positions_by_module(bare)),
    )


def _units(model: nn.Module) -> Iterator[Parameters]:
    """Yield the trained parameters of each block, and of the modules before and after the blocks."""
    blocks = [name for name, _ in find_units(model)]

    def unit(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), name.split(".", maxsplit=1)[0])

    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, members in groupby(trained, key=lambda named: unit(named[0])):
        yield Parameters(name, tuple(count_elements(parameter) for _, parameter in members))


def _positions_by_module(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the positions of the trained parameters of each module that has some. Modules may share a parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    positions = {id(parameter): position for position, parameter in enumerate(trained)}
    for module in model.modules():
        own = module.parameters(recurse=False)
        if found := tuple(positions[id(parameter)] for parameter in own if parameter.requires_grad):
            yield found
