"""Host memory of the processes on one node, as the sampler measures it: the sum of their proportional set sizes.

The constants come from ``docs/results/plan_measured.json`` and the records in that folder (torch 2.11, transformers
5.17, DeepSpeed 0.19.8). ``tests/plan/test_overheads.py`` compares them with both.
"""

from __future__ import annotations

from distexp.config import Config
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB

NODE_MIB = 340.0
"""Launcher and agent, with their shares of the libraries."""

TRANSFORMERS_MIB = 180.0
"""The library transformers, which the workers of a node share."""

WITHOUT_TRANSFORMERS = ("distexp.models.gpt.", "distexp.models.resnet.")

SETUP_WORKER_MIB = 630.0
"""One worker before the first step, when CUDA has loaded few kernels."""

IMAGES_MIB = 380.0
"""What a worker needs in addition for images: the libraries that decode and transform them."""

COMPILE_MIB = {"none": 0.0, "blocks": 550.0, "model": 1900.0, "graphs": 1900.0}
"""What a worker needs in addition for ``train.compile``: code, and the processes that compile. It differed between runs
of the same configuration by up to 1,800 MiB, depending on what was cached."""

LOADER_MIB, LOADER_BATCHES = 10.0, 6
"""One process of the data loader (``dataset.num_workers``), and its batches of images, from ``ddp_multi_gpu``.

It keeps the samples of a batch, their collated copy and two finished batches. The worker pins two more.
"""


def processes_mib(config: Config) -> dict[str, float]:
    """Return the memory of the processes of the first node during training in MiB, without tensors."""
    workers = config.cluster.workers_per_node or 1
    return {
        "node": _node_mib(config),
        "workers": workers * _worker_mib(config),
        "loaders": workers * config.dataset.num_workers * _loader_mib(config),
    }


def _node_mib(config: Config) -> float:
    return NODE_MIB + (0.0 if config.model._target_.startswith(WITHOUT_TRANSFORMERS) else TRANSFORMERS_MIB)


def _worker_mib(config: Config) -> float:
    images = IMAGES_MIB if config.model.task == "image_classification" else 0.0
    return load_strategy(config).host_worker_mib(config) + images + COMPILE_MIB[config.train.compiled]


def _loader_mib(config: Config) -> float:
    """Return the memory of one process of the data loader. Texts are small; an image has 3 bytes per pixel."""
    size = config.dataset.image_size or 0
    return LOADER_MIB + LOADER_BATCHES * int(config.train.micro_batch_size) * 3 * size**2 / MIB


def setup_mib(config: Config, parameters: int, tied_parameters: int = 0) -> float:
    """Return the memory of the first node before the first step in MiB. Rank 0 has the whole model in fp32.

    Args:
        config: a resolved configuration.
        parameters: number of parameters of the model.
        tied_parameters: size of an output head that is tied to the embedding. transformers allocates it first.
    """
    workers = config.cluster.workers_per_node or 1
    return _node_mib(config) + SETUP_WORKER_MIB * workers + 4 * (parameters + tied_parameters) / MIB


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
