"""Estimate of the memory of a training: all that is known before a GPU is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distexp.config import Config
from distexp.config.model_checks import names_source
from distexp.hardware.facts import facts
from distexp.measure.memory.step_parts import PARTS
from distexp.plan.replay import PlanError, Point, Replay, StepTrace, host_peak, replay
from distexp.resolve.resources import launcher_traits, parameter_count, ties_embeddings
from distexp.runs.memory_trace import BYTES_PER_VALUE, STATE_VALUES, States, states_per_parameter
from distexp.runs.record_sections import Built
from distexp.strategies.base import load_strategy
from distexp.strategies.communication import sharding_of
from distexp.strategies.parallel.checks import STAGES_PER_WORKER, schedule_of, shares_weights, units_of_stages
from distexp.strategies.traits import GPU_ERROR_BOUND, UNMEASURED_ON_CPUS, CpuMemory
from distexp.system.units import MIB

ALLOCATED_ERROR = 0.02  # largest error of the allocated peak on a GPU, if it is too high


@dataclass(frozen=True)
class Estimate:
    """Memory of one worker in MiB. None means that the training could not be traced."""

    peak_allocated_mib: float | None = None
    peak_reserved_mib: float | None = None
    step_mib: float | None = None  # in which a step runs: reserved, or on CPUs that of all processes on a machine
    overhead_mib: float = 0.0  # GPU memory outside of torch's allocator
    host_mib: float | None = None  # peak of the CPU memory on a node
    phase: str | None = None
    parts: dict[str, float] = field(default_factory=dict)  # what the peak is made of
    curve: dict[str, list[Any]] = field(default_factory=dict)  # the phase and the parts at some points of the step
    seconds: float = 0.0  # of the prediction
    error_bound: float | None = GPU_ERROR_BOUND  # largest relative error of ``required_mib``; None if it is not known
    on_cpu: bool = False  # whether the run is on CPUs
    notes: list[str] = field(default_factory=list)  # what was assumed, or why the training could not be traced
    flops: float | None = None  # floating point operations of a step of one worker; None if they were not counted
    operations: int | None = None  # kernels that a worker launches in a step
    optimizer_operations: int | None = None  # those of them that do not depend on the number of micro-batches
    trained_share: float = 1.0  # share of the parameters that is trained
    written_mib: float | None = None  # all tensors that a worker allocates in a step
    exchanged_mib: float = 0.0  # sent and received in a step, by workers that share a model (section ``parallel``)

    @property
    def traced(self) -> bool:
        """Return whether the peak is known, and not only the model states."""
        return self.peak_allocated_mib is not None

    @property
    def required_mib(self) -> float | None:
        """Return the smallest memory in which the training runs."""
        return None if self.step_mib is None else self.step_mib + self.overhead_mib

    @property
    def most_mib(self) -> float | None:
        """Return the most memory that the training may need; None if it is not known."""
        required, bound = self.required_mib, self.error_bound
        return None if required is None or bound is None else required * (1 + bound)

    @property
    def least_mib(self) -> float | None:
        """Return the memory that the training needs at least; None if it is not known."""
        if self.required_mib is None or self.error_bound is None:
            return None
        reserved = self.required_mib * (1 - self.error_bound)
        if self.on_cpu or self.peak_allocated_mib is None:
            return reserved
        return max(reserved, self.peak_allocated_mib * (1 - ALLOCATED_ERROR) + self.overhead_mib)


def make_estimate(config: Config) -> Estimate:
    """Trace a step of a training and return its estimate. It takes seconds to minutes, and imports torch."""
    from distexp.plan.trace.traced_run import count_parameters
    from distexp.plan.trace.tracing import trace_step

    try:
        trace = trace_step(config, on_gpu=config.cluster.device != "cpu")
    except PlanError as error:
        return arithmetic_estimate(config, str(error), *count_parameters(config))
    found = _cpu_estimate(config, trace) if config.cluster.device == "cpu" else _gpu_estimate(config, trace)
    work = trace.work
    if work is None:
        return found
    found = replace(found, operations=work.operations, optimizer_operations=work.optimizer_operations)
    written, exchanged = _mib(work.written), _mib(work.exchanged)
    return replace(found, flops=work.flops, written_mib=written, exchanged_mib=exchanged)


def unknown_error(config: Config, *, on_gpu: bool) -> str:
    """Return why the error of a prediction is not known; empty if it is.

    ``docs/results/plan.md`` and ``docs/results/model-parallel.md`` have the compared runs.
    """
    shares, what = config.parallel, ""
    on_one_gpu = on_gpu and config.cluster.world_size == 1
    several = " with several workers" if on_gpu else ""
    if config.precision.name == "float8":
        return "predictions of precision=float8 are those of precision=bf16, and a run needed 17 % less"
    if on_gpu and shares.pipeline > 1 and STAGES_PER_WORKER[schedule_of(config)] > 1:
        return f"parallel.schedule={schedule_of(config)} reserved up to 16 % more memory than predicted on GPUs"
    if on_gpu and shares.pipeline > 1 and (units := units_of_stages(config)):
        return f"predictions of parallel.pipeline with {units[0]} were not compared with runs on GPUs"
    if shares.expert > 1:
        more = ", and runs on GPUs reserved up to 10 % more" if on_gpu else ""
        return f"predictions of parallel.expert assume that all experts get equally many tokens{more}"
    if shares.copies > 1 and not on_gpu:
        what = "workers with the same rows (section parallel)"
    elif config.train.activation_checkpointing == "selective" and not on_gpu:
        what = "train.activation_checkpointing=selective"
    elif config.train.activation_checkpointing == "offload" and not on_one_gpu:
        what = f"train.activation_checkpointing=offload{several}"
    elif config.train.optimizer == "adamw8bit" and not on_one_gpu:
        what = f"train.optimizer=adamw8bit{several}"
    elif config.adapter.freezes_model and shares.tensor > 1:
        what = "adapter=lora with parallel.tensor"
    elif shares.tensor > 1 and not sharding_of(config).shards_over_all_workers:
        what = f"sharding={config.fsdp.sharding} with parallel.tensor"
    elif shares.tensor > 1 and shares.context > 1:
        what = "parallel.context with parallel.tensor"
    return f"predictions of {what} were not compared with runs on {'GPUs' if on_gpu else 'CPUs'}" if what else ""


def _gpu_estimate(config: Config, trace: StepTrace) -> Estimate:
    host_mib = host_peak_mib(config, _mib(host_peak(trace.events)), *model_size(config, trace))
    if config.engine.name != "native":  # whose steps are traced
        note = (
            f"engine={config.engine.name}: this is an estimate of engine=native with the same options; the two were "
            "compared on a GPU for strategy=single in bf16 only, where they need the same"
        )
        trace = replace(trace, notes=(*trace.notes, note))
    if reason := unknown_error(config, on_gpu=True):
        trace = replace(trace, notes=(*trace.notes, f"no verdict: {reason}"))
    found = estimate_of(trace, load_strategy(config).overhead_mib(config), host_mib)
    return replace(found, error_bound=gpu_error_bound(config))


def _cpu_estimate(config: Config, trace: StepTrace) -> Estimate:
    """Return the estimate of a traced step on the CPU, where all tensors are in the memory of the node."""
    events, evaluation = (
        # There are no workspaces of cuBLAS, whose numbers are reserved.
        [replace(event, device="gpu", stream="") for event in found if event.block >= 0]
        for found in (trace.events, trace.evaluation)
    )
    found = replay(events, evaluation=evaluation)
    parts = _shown(found.peak)
    states = sum(parts[name] for name in ("parameters", "gradients", "optimizer_states"))
    host_mib = node_peak_mib(config, states, sum(parts.values()) - states, *model_size(config, trace))
    reason = reason_not_measured(config)
    return replace(
        _replayed(trace, found),
        step_mib=host_mib * simulated_nodes(config),
        host_mib=host_mib,
        notes=[*trace.notes, *([f"no verdict: {reason}"] if reason else [])],
        error_bound=None if reason else max(CPU_ERROR_BOUND, round(BASE_ERROR_MIB / host_mib, 2)),
        on_cpu=True,
    )


def _replayed(trace: StepTrace, found: Replay) -> Estimate:
    shown = [_shown(point) for point in found.curve]
    return Estimate(
        peak_allocated_mib=_mib(found.peak_allocated),
        phase=found.peak.phase,
        parts=_shown(found.peak),
        curve={
            "phase": [point.phase for point in found.curve],
            **{part: [values[part] for values in shown] for part in PARTS},
        },
        seconds=round(trace.seconds, 1),
        trained_share=trace.trained_share,
        notes=list(trace.notes),
    )


def model_size(config: Config, trace: StepTrace) -> tuple[int, int]:
    """Return the number of parameters of the whole model, and of its output head if that is tied to the embedding."""
    model = config.model
    tied = (model.vocab_size or 0) * (model.hidden_size or 0) if ties_embeddings(model) else 0
    if names_source(model) and model.init == "random":  # Pretrained weights are read into an empty model.
        tied = trace.tied_parameters
    return parameter_count(model) or trace.parameters, tied


def estimate_of(trace: StepTrace, overheads: Mapping[str, float], host_mib: float | None) -> Estimate:
    """Return the estimate of a traced step. Overheads in MiB whose names start with ``host_`` are not on the GPU."""
    found = replay(trace.events, trace.history, trace.evaluation)
    return replace(
        _replayed(trace, found),
        peak_reserved_mib=_mib(found.peak_reserved),
        step_mib=_mib(found.required),
        overhead_mib=sum(mib for name, mib in overheads.items() if not name.startswith("host_")),
        host_mib=host_mib,
    )


def arithmetic_estimate(
    config: Config, reason: str, parameters: int | None = None, trained: int | None = None
) -> Estimate:
    """Return the model states by arithmetic, for a training that cannot be traced."""
    states = _expected_states_mib(config, parameters, trained)
    note = "estimate by arithmetic: only the model states, without activations and buffers"
    notes = [f"not traced: {reason}", note if states else "the number of parameters is not known either"]
    parts = {name: round(mib, 1) for name, mib in (states or {}).items()}
    return Estimate(parts=parts, notes=notes, on_cpu=config.cluster.device == "cpu", error_bound=None)


def _mib(size: float) -> float:
    return round(size / MIB, 1)


def _shown(point: Point) -> dict[str, float]:
    """Return the parts in MiB; the batch counts as temporary."""
    merged = {**point.parts, "temporaries": point.parts["temporaries"] + point.parts["batch"]}
    return {part: _mib(merged[part]) for part in PARTS}


def _expected_states_mib(config: Config, counted: int | None, trained: int | None) -> States | None:
    """Return the model states by arithmetic in MiB, by part; None if unknown. If the model was built, use its size."""
    moments, parameters = STATE_VALUES.get(config.train.optimizer), counted or parameter_count(config.model)
    is_cut = shares_weights(config) or config.parallel.pipeline > 1
    if moments is None or parameters is None or is_cut:  # Not all weights are cut.
        return None
    strategy = load_strategy(config)
    expected = {"mesh": [1, 1], "offload": "none", **strategy.expected_build(config)}
    built = Built(
        strategy=config.strategy.name,
        engine=config.engine.name,
        wrapper="",
        world_size=config.cluster.world_size,
        mesh=expected["mesh"],
        sharded_units=1,
        zero_stage=expected.get("zero_stage"),
        offload=expected["offload"],
        param_dtype="bfloat16" if config.adapter.base_dtype == "bf16" else strategy.weights_type(config),
        compute_dtype="",
        optimizer=config.train.optimizer,
        parameters=parameters,
        trained_parameters=trained,
        compute_weights=config.train.compute_weights,
    )
    states = states_per_parameter(built, BYTES_PER_VALUE * moments)
    names = {"optimizer": "optimizer_states"}
    return {names.get(name, name): size * parameters / MIB for name, size in states.items()}


COMPILED = 0.08  # ``train.compile``: the prediction was up to 7 % less than the measured memory


def gpu_error_bound(config: Config) -> float | None:
    """Return the largest relative error of the required GPU memory, from ``docs/results/plan.md``; None if unknown."""
    if unknown_error(config, on_gpu=True):
        return None
    # The replay of the order of allocations is not exact in some cases. The allocated peak always is.
    return COMPILED if config.train.compiled != "none" else load_strategy(config).gpu_memory_error(config)


# Host memory of the processes on one node: tensors (those of a run on CPUs are all there), Python and the libraries.
#
# The memory is the sum of proportional set sizes, as the sampler measures it. So it is less next to programs that map
# the same libraries. ``docs/results/plan.md`` compares the predictions with measured runs. ``hardware/facts.yaml``
# has the constants that do not depend on the strategy, with their sources. Those of a strategy are from the same
# runs.

CPU_ERROR_BOUND = 0.15
"""Largest relative error of a predicted peak of the processes of a run on CPUs, if its tensors are large."""

BASE_ERROR_MIB = 200.0  # error of the memory of Python and the libraries, which is most of the memory of a tiny model


def node_peak_mib(
    config: Config, states_mib: float, step_mib: float, parameters: int, tied_parameters: int = 0
) -> float:
    """Return the peak of the memory on the first node in MiB.

    ``states_mib`` are the model states of one worker at the peak of its tensors, and ``step_mib`` its other tensors.
    transformers first allocates an output head that is tied to the embedding, the ``tied_parameters``.
    """
    workers = config.cluster.workers_per_node or 1
    known = facts().processes
    worker_mib = _cpu_memory(config).worker_mib + config.dataset.num_workers * known.cpu_loader_mib
    base = known.cpu_node_mib + workers * worker_mib
    saved = 4 * parameters / MIB if config.train.save_model else 0.0  # rank 0 collects the model
    whole = 4 * (parameters + tied_parameters) / MIB  # rank 0 builds the model before it is sharded
    return round(base + max(workers * (states_mib + step_reserve(config) * step_mib) + saved, whole), 1)


def step_reserve(config: Config) -> float:
    """Return the factor for tensors that are allocated in each step."""
    return _cpu_memory(config).reserve


def _cpu_memory(config: Config) -> CpuMemory:
    return load_strategy(config).cpu_memory or UNMEASURED_ON_CPUS


def simulated_nodes(config: Config) -> int:
    """Return how many nodes of a run share the memory of one machine."""
    return config.cluster.nodes if launcher_traits(config).runs_here else 1


def reason_not_measured(config: Config) -> str:
    """Return why the error of a prediction on CPUs is not known; empty if it is."""
    if reason := unknown_error(config, on_gpu=False):
        return reason
    if reason := load_strategy(config).unmeasured_on_cpus(config):
        return reason
    if config.train.compiled != "none":
        return f"train.compile={config.train.compile} was not measured on CPUs"
    if config.engine.name != "native":
        return f"engine={config.engine.name} was not measured on CPUs"
    return ""


# Host memory of the processes on one node of a run on GPUs. ``tests/plan/test_overheads.py`` compares it with records.


def processes_mib(config: Config) -> dict[str, float]:
    """Return the memory of the processes of the first node during training in MiB, without tensors."""
    workers, known = config.cluster.workers_per_node or 1, facts().processes
    images = known.images_mib if config.model.traits.is_image else 0.0
    worker = load_strategy(config).host_worker_mib(config) + images + known.compile_mib[config.train.compiled]
    # Texts are small. An image has 3 bytes per pixel.
    pixels = (config.dataset.image_size or 0) ** 2
    loader = known.loader_mib + known.loader_batches * int(config.train.micro_batch_size) * 3 * pixels / MIB
    return {
        "node": _node_mib(config),
        "workers": workers * worker,
        "loaders": workers * config.dataset.num_workers * loader,
    }


def _node_mib(config: Config) -> float:
    known = facts().processes
    needs_no_transformers = config.model._target_.startswith(("distexp.models.gpt.", "distexp.models.resnet."))
    return known.gpu_node_mib + (0.0 if needs_no_transformers else known.transformers_mib)


def setup_mib(config: Config, parameters: int, tied_parameters: int = 0) -> float:
    """Return the memory of the first node before the first step in MiB. Rank 0 has the whole model, mostly in fp32."""
    workers, model = config.cluster.workers_per_node or 1, config.model
    # Random weights that are frozen get their values one after the other, and each is in bf16 before the next.
    is_random = model.init == "random" and model._target_.startswith("distexp.")
    size = 2 if is_random and config.adapter.base_dtype == "bf16" else 4
    weights = size * (parameters + tied_parameters) / MIB
    return _node_mib(config) + facts().processes.setup_worker_mib * workers + weights


def host_peak_mib(config: Config, traced_mib: float, parameters: int, tied_parameters: int = 0) -> float:
    """Return the peak of the host memory on the first node in MiB. ``traced_mib`` is that of a worker's tensors."""
    workers = config.cluster.workers_per_node or 1
    training = sum(processes_mib(config).values()) + workers * traced_mib
    saved = 4 * parameters / MIB if config.train.save_model else 0.0  # rank 0 collects the model
    return max(training + saved, setup_mib(config, parameters, tied_parameters))
