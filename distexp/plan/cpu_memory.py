"""Memory of the processes on one node of a run on CPUs: tensors, Python and the libraries.

The memory is the sum of proportional set sizes, as the sampler measures it. So it is less next to programs that map the
same libraries. ``docs/results/plan.md`` compares the predictions with measured runs. The constants by strategy are from
the same runs as those in ``hardware/facts.yaml``.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.hardware.facts import facts
from distexp.system.units import MIB

CPU_ERROR_BOUND = 0.15
"""Largest relative error of a predicted peak of the processes of a run on CPUs, if its tensors are large."""

BASE_ERROR_MIB = 200.0
"""Error of the memory of Python and the libraries, which is most of the memory of a tiny model."""

WORKER_MIB = {"single": 65.0, "ddp": 50.0, "fsdp": 60.0, "deepspeed": 65.0}
"""What each worker has of Python and the libraries for itself, by strategy."""

RESERVE = {"single": 1.2, "ddp": 1.2, "fsdp": 2.3, "deepspeed": 1.2}
"""Factor for tensors that are allocated in each step: what the C library keeps of them, and buffers of Gloo."""


def node_peak_mib(
    config: Config, states_mib: float, step_mib: float, parameters: int, tied_parameters: int = 0
) -> float:
    """Return the peak of the memory on the first node in MiB.

    Args:
        config: a resolved configuration.
        states_mib: parameters, gradients and optimizer states of one worker at the peak of its tensors.
        step_mib: other tensors of the worker at the peak.
        parameters: number of parameters of the model.
        tied_parameters: size of an output head that is tied to the embedding. transformers allocates it first.
    """
    workers = config.cluster.workers_per_node or 1
    known = facts().processes
    worker_mib = WORKER_MIB[_known_strategy(config)] + config.dataset.num_workers * known.cpu_loader_mib
    base = known.cpu_node_mib + workers * worker_mib
    saved = 4 * parameters / MIB if config.train.save_model else 0.0  # rank 0 collects the model
    whole = 4 * (parameters + tied_parameters) / MIB  # rank 0 builds the model before it is sharded
    return round(base + max(workers * (states_mib + step_reserve(config) * step_mib) + saved, whole), 1)


def step_reserve(config: Config) -> float:
    """Return the factor for tensors that are allocated in each step."""
    return RESERVE[_known_strategy(config)]


def _known_strategy(config: Config) -> str:
    """Return the strategy, or for a custom one that with the largest reserve."""
    return config.strategy.name if config.strategy.name in WORKER_MIB else "fsdp"


def error_bound(config: Config, node_mib: float) -> float | None:
    """Return the largest relative error of the predicted peak of a node; None if it is not known."""
    return None if reason_not_measured(config) else max(CPU_ERROR_BOUND, round(BASE_ERROR_MIB / node_mib, 2))


def simulated_nodes(config: Config) -> int:
    """Return how many nodes of a run share the memory of one machine."""
    return config.cluster.nodes if config.cluster.launcher == "local" else 1


def reason_not_measured(config: Config) -> str:
    """Return why the error of a prediction on CPUs is not known; empty if it is."""
    if config.strategy.name not in WORKER_MIB:
        return f"the memory of strategy={config.strategy.name} was not measured on CPUs"
    if config.deepspeed.zero_stage == 3 and config.strategy.name == "deepspeed":
        return "zero_stage=3 needed 53 % more than predicted on CPUs"
    if config.train.compiled != "none":
        return f"train.compile={config.train.compile} was not measured on CPUs"
    if config.engine.name != "native":
        return f"engine={config.engine.name} was not measured on CPUs"
    return ""
