"""Host memory of the processes on one node: tensors (those of a run on CPUs are all there), Python and the libraries.

The memory is the sum of proportional set sizes, as the sampler measures it. So it is less next to programs that map the
same libraries. ``docs/results/plan.md`` compares the predictions with measured runs. ``hardware/facts.yaml`` has the
constants that do not depend on the strategy, with their sources. Those of a strategy are from the same runs.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.hardware.facts import facts
from distexp.resolve.resources import launcher_traits
from distexp.strategies.base import load_strategy
from distexp.strategies.traits import UNMEASURED_ON_CPUS, CpuMemory
from distexp.system.units import MIB

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


def error_bound(config: Config, node_mib: float) -> float | None:
    """Return the largest relative error of the predicted peak of a node; None if it is not known."""
    return None if reason_not_measured(config) else max(CPU_ERROR_BOUND, round(BASE_ERROR_MIB / node_mib, 2))


def simulated_nodes(config: Config) -> int:
    """Return how many nodes of a run share the memory of one machine."""
    return config.cluster.nodes if launcher_traits(config).runs_here else 1


def reason_not_measured(config: Config) -> str:
    """Return why the error of a prediction on CPUs is not known; empty if it is."""
    if reason := load_strategy(config).unmeasured_on_cpus(config):
        return reason
    if config.train.compiled != "none":
        return f"train.compile={config.train.compile} was not measured on CPUs"
    if config.engine.name != "native":
        return f"engine={config.engine.name} was not measured on CPUs"
    return ""


# Host memory of the processes on one node of a run on GPUs. ``tests/plan/test_overheads.py`` compares it with records.

WITHOUT_TRANSFORMERS = ("distexp.models.gpt.", "distexp.models.resnet.")


def processes_mib(config: Config) -> dict[str, float]:
    """Return the memory of the processes of the first node during training in MiB, without tensors."""
    workers, known = config.cluster.workers_per_node or 1, facts().processes
    images = known.images_mib if config.model.task == "image_classification" else 0.0
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
    return known.gpu_node_mib + (
        0.0 if config.model._target_.startswith(WITHOUT_TRANSFORMERS) else known.transformers_mib
    )


def setup_mib(config: Config, parameters: int, tied_parameters: int = 0) -> float:
    """Return the memory of the first node before the first step in MiB. Rank 0 has the whole model in fp32."""
    workers = config.cluster.workers_per_node or 1
    return _node_mib(config) + facts().processes.setup_worker_mib * workers + 4 * (parameters + tied_parameters) / MIB


def host_peak_mib(config: Config, traced_mib: float, parameters: int, tied_parameters: int = 0) -> float:
    """Return the peak of the host memory on the first node in MiB. ``traced_mib`` is that of a worker's tensors."""
    workers = config.cluster.workers_per_node or 1
    training = sum(processes_mib(config).values()) + workers * traced_mib
    saved = 4 * parameters / MIB if config.train.save_model else 0.0  # rank 0 collects the model
    return max(training + saved, setup_mib(config, parameters, tied_parameters))
