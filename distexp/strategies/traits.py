"""What a strategy states about its options, step, memory and advice. Others ask it, and know no strategy by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from distexp.config import Config
from distexp.hardware.facts import facts
from distexp.runs.record_sections import Built
from distexp.strategies.communication import StepCommunication
from distexp.strategies.parallel.checks import CONTEXT, EXPERT, PIPELINE, SCHEDULE, TENSOR

Settings = Config | Mapping[str, Any]
"""A resolved configuration, or that of a record."""

CUSTOM_COMPLEXITY = 4
"""Complexity of a strategy that states none. Those of distexp have 0 to 3."""

GPU_ERROR_BOUND = 0.05
"""Largest error of the required GPU memory, if nothing else applies. The worst one of 28 such runs is 4 %."""

ADAMW_STATES = 20
"""Bytes per parameter of weights, gradients and AdamW's states, with 16-bit weights."""


def setting(config: Settings, key: str) -> Any:
    """Return a value such as ``fsdp.sharding`` of a configuration, or of that of a record; None if it lacks the key."""
    found: Any = config
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
    return found


def common_values(config: Settings) -> dict[str, Any]:
    """Return the values of a StepCommunication that gathers weights in the precision and reduces gradients in fp32."""
    half = setting(config, "precision.name") in ("bf16", "fp16", "float8")
    tensor, context, expert, pipeline = (int(setting(config, key) or 1) for key in (TENSOR, CONTEXT, EXPERT, PIPELINE))
    return {
        "weight_bytes": 2 if half else 4,
        "gradient_bytes": 4,
        "offloads": bool(setting(config, "offload.enabled")),
        "group": tensor * context * expert * pipeline,
        "cuts_weights": tensor * pipeline > 1,
        "pipeline": pipeline,
        "schedule": setting(config, SCHEDULE) or "1f1b",
    }


@dataclass(frozen=True)
class Option:
    """A value of the main option of a strategy, which a search tries by default."""

    value: str  # option of the config group
    lighter: str = ""  # override that chooses what needs less memory. If that does not fit, neither does this.
    offloads: bool = False  # whether it is tried with offloading too
    needs_nodes: bool = False  # whether it equals another option on a single node


@dataclass(frozen=True)
class CpuMemory:
    """Memory of a worker on CPUs."""

    worker_mib: float  # what each worker has of Python and the libraries for itself
    reserve: float  # factor for tensors that are allocated in each step: what the C library keeps, and buffers of Gloo


UNMEASURED_ON_CPUS = CpuMemory(60.0, reserve=2.3)
"""Memory of a worker whose strategy was not measured, with the largest reserve of the measured ones."""


class Advice(NamedTuple):
    """Overrides that would reduce a bottleneck, separated by spaces, and the reason."""

    overrides: str
    reason: str


class ProfiledStep(Protocol):
    """The profiled step of a run, for advice. It is read from a record, so any setting may be missing."""

    @property
    def on_gpu(self) -> bool:
        """Return whether the run used GPUs."""

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a key such as ``fsdp.sharding``; the default if it is missing or null."""

    def collective_shares(self) -> Mapping[str, float]:
        """Return the share of each kind of collective, as ``all_gather``; empty if unknown."""

    def fits_unsharded(self, bytes_per_parameter: int) -> bool:
        """Return whether tensors of the whole model, in place of a shard, would fit into the memory of the GPU."""

    def larger_micro_batch(self, needed: float) -> Iterator[Advice]:
        """Yield a micro-batch that is larger by a factor, if it fits."""

    def more_accumulation(self) -> Iterator[Advice]:
        """Yield twice the global batch, with the same micro-batch."""


class Traits:
    """What a strategy states. The defaults are those of a custom strategy of which nothing is known.

    The numbers of the strategies are from the same records as those in ``hardware/facts.yaml``.
    ``tests/plan/test_overheads.py`` compares them with these records.

    Attributes:
        tracer: Dotted name of a class that runs the training step on fake tensors, as TracedDeepSpeed does. None: what
            ``setup`` returns is traced.
        accumulates_whole_gradients: Whether each worker keeps gradients of the whole model between micro-batches,
            although it keeps a share of them after the last one.
    """

    is_reference: ClassVar[bool] = False  # whether the losses of the others are compared with those of this strategy
    equals_reference: ClassVar[bool] = False  # whether one worker does what the reference does, without offloading
    complexity: ClassVar[int] = CUSTOM_COMPLEXITY  # smaller for a simpler strategy, preferred among equal ones
    max_workers: ClassVar[int | None] = None  # most workers; None for any number
    section: ClassVar[str] = ""  # section of the schema with its options
    option_group: ClassVar[str] = ""  # config group of its main option, which chooses the strategy too
    option_key: ClassVar[str] = ""  # key that this group sets
    options: ClassVar[tuple[Option, ...]] = ()  # values of the main option to try
    lighter: ClassVar[str] = ""  # without such a group: override that needs less memory, as in Option
    smallest_states: ClassVar[str] = ""  # override for which several workers keep least of the states, if it has one
    offload_with: ClassVar[str] = ""  # override with which other strategies can offload, if it is the best for that
    shares_layers: ClassVar[bool] = False  # whether the section ``parallel`` is supported
    is_compilable: ClassVar[bool] = False  # whether ``kernels=fast`` compiles the model on a GPU with all options
    tracer: ClassVar[str | None] = None
    cpu_memory: ClassVar[CpuMemory | None] = None  # of a worker on CPUs. None: not measured, so there is no verdict
    # Measured CPU memory of a worker on a GPU, without offloading: Python, torch, the host side of CUDA, and the
    # libraries. The default is that of FSDP, which needs most of the strategies of torch.
    host_mib: ClassVar[float] = 1270.0
    accumulates_whole_gradients: ClassVar[bool] = False
    operator_problem: ClassVar[str] = ""  # what is not possible if no C++ compiler works
    setup_note: ClassVar[str] = ""  # sentence of the report if the CPU memory had its peak during setup

    @classmethod
    def own_complexity(cls) -> int:
        """Return ``complexity`` if this class itself sets it. A subclass is less simple than its base class."""
        return int(vars(cls).get("complexity", CUSTOM_COMPLEXITY))

    @classmethod
    def lighter_overrides(cls, name: str) -> dict[str, str]:
        """Return the override that needs less memory, by each override that chooses an option of this strategy."""
        found = {f"{cls.option_group}={option.value}": option.lighter for option in cls.options}
        return {text: lighter for text, lighter in {f"strategy={name}": cls.lighter, **found}.items() if lighter}

    def option_complexity(self, config: Config) -> int:
        """Return a number that is smaller for a simpler value of the main option."""
        return 0

    def launch_factor(self, config: Config) -> float:
        """Return how much longer than the reference the CPU needs to launch an operation."""
        return 1.0

    def overlaps_communication(self, config: Config) -> bool:
        """Return whether collectives run at the same time as the computation."""
        return True

    def communication(self, config: Settings) -> StepCommunication:
        """Return the collectives of a step and the share of the update, for one or more workers."""
        return StepCommunication(**common_values(config))

    def keeps_states_whole(self, config: Settings) -> bool | None:
        """Return whether each worker has all optimizer states, so that it updates all weights; None if unknown."""
        shards = self.communication(config).shards_optimizer
        return None if shards is None else not shards

    def run_communication(self, config: Settings, built: Built | None, run_dir: Path) -> StepCommunication:
        """Return those of a run that has ended, with what it built. Raise ConfigError if a file is missing."""
        return self.communication(config)

    def overhead_mib(self, config: Config) -> dict[str, float]:
        """Return the MiB per GPU that NVML reports beyond torch's reserved memory, by part."""
        known, uses_images = facts().processes, config.model.traits.is_image
        return {
            "context": known.cuda_context_mib + (known.cudnn_mib if uses_images else 0.0),
            "communicators": self.communicators_mib(config),
        }

    def total_overhead_mib(self, config: Config) -> float:
        """Return the sum of ``overhead_mib``."""
        return sum(self.overhead_mib(config).values())

    def communicators_mib(self, config: Config) -> float:
        """Return the MiB per GPU of the communicators of NCCL."""
        known = facts().processes.communicator_mib
        workers, degree = config.cluster.world_size, setting(config, "parallel.tensor") or 1
        # With two axes, the mesh has two more communicators. That they need as much as the first is an assumption.
        stages = setting(config, "parallel.pipeline") or 1
        axes = (degree > 1) + (degree * stages > 1 and workers > degree * stages)
        axes += (setting(config, "parallel.context") or 1) > 1
        # Stages have a group, and messages: 850 MiB in docs/results/pipeline_h200.json.
        axes += 3 * (stages > 1)
        if (degree := setting(config, "parallel.expert") or 1) > 1:  # the tokens, and the gradients of the experts
            axes += 1 + (workers > degree)
        return known * (1 + axes) if workers > 1 else 0.0

    def host_worker_mib(self, config: Config) -> float:
        """Return the CPU memory of a worker on a GPU."""
        return self.host_mib

    def gpu_memory_error(self, config: Config) -> float:
        """Return the largest error of the predicted GPU memory, as a share of it."""
        return GPU_ERROR_BOUND

    def unmeasured_on_cpus(self, config: Config) -> str:
        """Return why the error of a prediction on CPUs is not known; empty if it is."""
        return "" if self.cpu_memory else f"the memory of strategy={config.strategy.name} was not measured on CPUs"

    def weights_type(self, config: Config) -> str:
        """Return the data type of the weights that a worker keeps. With 16 bits there is a master copy in fp32."""
        return "float32"

    def supports_offload(self, config: Config) -> bool:
        """Return whether ``offload=true`` is possible with the other options."""
        return False

    def compiles(self, step: ProfiledStep) -> bool:
        """Return whether ``kernels=fast`` compiles the model on a GPU."""
        return self.is_compilable

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield options against launch_idle, exposed_communication, data_wait, optimizer, host, bubble or compute."""
        yield from ()

    @staticmethod
    def fewer_shared_layers(step: ProfiledStep) -> Iterator[Advice]:
        """Yield a smaller degree of the section ``parallel`` against communication, if workers share layers."""
        exchanged = {
            "tensor": "with the same rows exchange the hidden states of each attention and MLP",
            "context": "with the same rows exchange the heads of each attention",
            "expert": "that share experts exchange the hidden states of each token and expert",
        }
        for name, what in exchanged.items():
            if (degree := int(step.setting(f"parallel.{name}", 1))) > 1:
                yield Advice(f"parallel.{name}={degree // 2}", f"workers {what}, in both passes")

    @staticmethod
    def smaller_bubble(step: ProfiledStep) -> Iterator[Advice]:
        """Yield more and smaller micro-batches for a pipeline, with the same global batch."""
        size, steps = step.setting("train.micro_batch_size", 1), step.setting("train.gradient_accumulation_steps", 1)
        if step.setting("parallel.pipeline", 1) > 1 and isinstance(size, int) and size > 1 and size % 2 == 0:
            batch = f"train.micro_batch_size={size // 2}"
            if step.setting("train.global_batch_size") is None:
                batch += f" train.gradient_accumulation_steps={2 * steps}"
            yield Advice(batch, "with more micro-batches the bubble of the pipeline is a smaller part of the step")

    @staticmethod
    def shares_weights(step: ProfiledStep) -> bool:
        """Return whether some weights of a layer were on other workers, also without a sharding strategy."""
        return any(step.setting(f"parallel.{name}", 1) > 1 for name in ("tensor", "expert"))

    def memory_note(self, config: Config) -> str:
        """Return the sentences that explain the measured parts of the memory in the report; empty if not needed."""
        return ""
