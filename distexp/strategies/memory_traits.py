"""What a strategy states about its memory, and its advice: predictions, searches, explanations and reports ask it.

``Strategy`` inherits all of it. The defaults are for a custom strategy that states nothing: its step is traced as it
is, its memory was not measured, and it has no advice.

The constants of the strategies are from the same records as those in ``hardware/facts.yaml``.
``tests/plan/test_overheads.py`` compares them with these records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from distexp.config import Config
from distexp.hardware.facts import facts

GPU_ERROR_BOUND = 0.05
"""Largest error of the required GPU memory, if nothing else applies. The worst one of 28 such runs is 4 %."""

ADAMW_STATES = 20
"""Bytes per parameter of weights, gradients and AdamW's states, with 16-bit weights."""


@dataclass(frozen=True)
class CpuMemory:
    """Memory of a worker on CPUs.

    Attributes:
        worker_mib: What each worker has of Python and the libraries for itself.
        reserve: Factor for tensors that are allocated in each step: what the C library keeps, and buffers of Gloo.
    """

    worker_mib: float
    reserve: float


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


class MemoryTraits:
    """What predictions, searches, explanations and reports ask a strategy.

    Attributes:
        tracer: Dotted name of a class that runs the training step on fake tensors, as TracedDeepSpeed does. None: what
            ``setup`` returns is traced.
        cpu_memory: Measured memory of a worker on CPUs. None: not measured, so there is no verdict.
        accumulates_whole_gradients: Whether each worker keeps gradients of the whole model between micro-batches,
            although it keeps a share of them after the last one.
        operator_problem: What is not possible if no C++ compiler works.
        setup_note: Sentence of the report if the CPU memory had its peak during setup.
    """

    tracer: ClassVar[str | None] = None
    cpu_memory: ClassVar[CpuMemory | None] = None
    accumulates_whole_gradients: ClassVar[bool] = False
    operator_problem: ClassVar[str] = ""
    setup_note: ClassVar[str] = ""

    def overhead_mib(self, config: Config) -> dict[str, float]:
        """Return the MiB per GPU that NVML reports beyond torch's reserved memory, by part."""
        known, uses_images = facts().processes, config.model.task == "image_classification"
        return {
            "context": known.cuda_context_mib + (known.cudnn_mib if uses_images else 0.0),
            "communicators": self.communicators_mib(config),
        }

    def total_overhead_mib(self, config: Config) -> float:
        """Return the sum of ``overhead_mib``."""
        return sum(self.overhead_mib(config).values())

    def communicators_mib(self, config: Config) -> float:
        """Return the MiB per GPU of the communicators of NCCL."""
        return facts().processes.communicator_mib if config.cluster.world_size > 1 else 0.0

    def host_worker_mib(self, config: Config) -> float:
        """Return the CPU memory of a worker on a GPU: Python, torch, the host side of CUDA, and the libraries."""
        return 1270.0

    def gpu_memory_error(self, config: Config) -> float:
        """Return the largest error of the predicted GPU memory, as a share of it."""
        return GPU_ERROR_BOUND

    def unmeasured_on_cpus(self, config: Config) -> str:
        """Return why the error of a prediction on CPUs is not known; empty if it is."""
        return "" if self.cpu_memory else f"the memory of strategy={config.strategy.name} was not measured on CPUs"

    def weights_type(self, config: Config) -> str:
        """Return the data type of the weights that a worker keeps. With 16 bits there is a master copy in fp32."""
        return "float32"

    def smaller_states(self, config: Config, *, workers: int) -> tuple[str, ...]:
        """Return overrides with which each of some workers keeps less of the model states; empty if there are none."""
        return ("sharding=full_shard",) if workers > 1 else ()

    def supports_offload(self, config: Config) -> bool:
        """Return whether ``offload=true`` is possible with the other options."""
        return False

    def offload_overrides(self, config: Config) -> tuple[str, ...]:
        """Return the overrides that offload states, with another strategy if this one cannot."""
        return ("offload=true",) if self.supports_offload(config) else ("zero_stage=2", "offload=true")

    def compiles(self, step: ProfiledStep) -> bool:
        """Return whether ``kernels=fast`` compiles the model on a GPU."""
        return False

    def advice(self, bottleneck: str, step: ProfiledStep) -> Iterator[Advice]:
        """Yield options of this strategy that would reduce a bottleneck.

        Args:
            bottleneck: ``launch_idle``, ``exposed_communication``, ``data_wait``, ``optimizer``, ``host`` or
                ``compute``.
            step: The profiled step.
        """
        yield from ()

    def memory_note(self, config: Config) -> str:
        """Return the sentences that explain the measured parts of the memory in the report; empty if not needed."""
        return ""
