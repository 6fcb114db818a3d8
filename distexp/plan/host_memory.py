"""Host memory of the processes on one node, as the sampler measures it: the sum of their proportional set sizes.

``hardware/facts.yaml`` has the constants that do not depend on the strategy, with their sources.
``tests/plan/test_overheads.py`` compares them with the records.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.hardware.facts import facts
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB

WITHOUT_TRANSFORMERS = ("distexp.models.gpt.", "distexp.models.resnet.")


def processes_mib(config: Config) -> dict[str, float]:
    """Return the memory of the processes of the first node during training in MiB, without tensors."""
    workers = config.cluster.workers_per_node or 1
    return {
        "node": _node_mib(config),
        "workers": workers * _worker_mib(config),
        "loaders": workers * config.dataset.num_workers * _loader_mib(config),
    }


def _node_mib(config: Config) -> float:
    known = facts().processes
    return known.gpu_node_mib + (
        0.0 if config.model._target_.startswith(WITHOUT_TRANSFORMERS) else known.transformers_mib
    )


def _worker_mib(config: Config) -> float:
    known = facts().processes
    images = known.images_mib if config.model.task == "image_classification" else 0.0
    return load_strategy(config).host_worker_mib(config) + images + known.compile_mib[config.train.compiled]


def _loader_mib(config: Config) -> float:
    """Return the memory of one process of the data loader. Texts are small; an image has 3 bytes per pixel."""
    size = config.dataset.image_size or 0
    known = facts().processes
    return known.loader_mib + known.loader_batches * int(config.train.micro_batch_size) * 3 * size**2 / MIB


def setup_mib(config: Config, parameters: int, tied_parameters: int = 0) -> float:
    """Return the memory of the first node before the first step in MiB. Rank 0 has the whole model in fp32.

    Args:
        config: a resolved configuration.
        parameters: number of parameters of the model.
        tied_parameters: size of an output head that is tied to the embedding. transformers allocates it first.
    """
    workers = config.cluster.workers_per_node or 1
    return _node_mib(config) + facts().processes.setup_worker_mib * workers + 4 * (parameters + tied_parameters) / MIB


def host_peak_mib(config: Config, traced_mib: float, parameters: int, tied_parameters: int = 0) -> float:
    """Return the peak of the host memory on the first node in MiB.

    Args:
        config: a resolved configuration.
        traced_mib: peak of the host tensors of one worker in a step, for example of offloaded states.
        parameters: see ``setup_mib``.
        tied_parameters: see ``setup_mib``.
    """
    workers = config.cluster.workers_per_node or 1
    training = sum(processes_mib(config).values()) + workers * traced_mib
    saved = 4 * parameters / MIB if config.train.save_model else 0.0  # rank 0 collects the model
    return max(training + saved, setup_mib(config, parameters, tied_parameters))
