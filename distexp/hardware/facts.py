"""Typed facts of ``facts.yaml``, and the GPU of a name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from distexp.system.units import MIB

TABLE = Path(__file__).with_name("facts.yaml")


@dataclass(frozen=True)
class Latency:
    """Seconds per hop of NCCL's two kinds of protocols."""

    fast: float  # LL, which sends flags with the data at a quarter of the bandwidth
    simple: float  # Simple, which has the full bandwidth; in a ring
    simple_tree: float  # Simple in a tree, whose chunks are larger


@dataclass(frozen=True)
class Link:
    """A link between workers."""

    name: str  # for notes
    bandwidth: float  # what a collective reaches, in bytes per second, worker and direction
    latency: Latency  # of a hop


@dataclass(frozen=True)
class Gpu:
    """Facts of a GPU, with the keys of ``facts.yaml``. None: unknown. ``gpu_facts`` fills defaults in."""

    names: tuple[str, ...]
    memory_mib: Mapping[str, float]
    tensor_tflops: float | None
    fp32_tflops: float | None
    has_bf16: bool
    memory_gb_per_s: float
    multiprocessors: int
    workspace_mib: float
    link: Mapping[str, Any]

    def match(self, parts: set[str]) -> int:
        """Return how many characters of a name's parts this entry describes; 0 if it is another GPU."""
        found = [0]
        for name in self.names:
            if all(any(fnmatchcase(part, pattern) for part in parts) for pattern in name.split()):
                found.append(sum(character.isalnum() for character in name))
        return max(found)

    def peak_tflops(self, precision: str) -> float | None:
        """Return the peak for fp32, bf16 or fp16; None if it is unknown, or the GPU has no bf16."""
        if precision == "fp32":
            return self.fp32_tflops
        return None if precision == "bf16" and not self.has_bf16 else self.tensor_tflops


@dataclass(frozen=True)
class LinkKind:
    """Efficiency and latency of a kind of link, with the keys of ``facts.yaml``."""

    efficiency: float
    step_gb_per_s: float
    latency: Latency


@dataclass(frozen=True)
class NetworkCards:
    """GB/s of a network card, and the cards of a node; None: one per worker."""

    gb_per_s: float
    cards: int | None


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of processes, with the keys of ``facts.yaml``."""

    started_node_mib: float
    started_worker_mib: float
    gpu_node_mib: float
    transformers_mib: float
    setup_worker_mib: float
    images_mib: float
    cpu_adam_mib: float
    compile_mib: Mapping[str, float]
    loader_mib: float
    loader_batches: int
    cpu_node_mib: float
    cpu_loader_mib: float
    cuda_context_mib: float
    cudnn_mib: float
    communicator_mib: float


@dataclass(frozen=True)
class Facts:
    """All facts of ``facts.yaml``, with its keys."""

    gpus: tuple[Gpu, ...]
    usable_share: float
    unknown_gpu: Mapping[str, Any]
    links: Mapping[str, LinkKind]
    loopback_gb_per_s: float
    gpu_to_cpu_gb_per_s: float
    networks: Mapping[str, NetworkCards]
    usual_networks: Mapping[str, str]
    gpus_of_efa_node: int
    nodes_per_leaf: int
    cpu_tflops_per_core: float
    cpu_memory_gb_per_s: float
    cpu_adam_gb_per_s: float
    processes: ProcessMemory

    def link(self, name: str, gb_per_s: float) -> Link:
        """Return a link, such as ``NVLink 4``, by the bandwidth of its datasheet."""
        kind = self.link_kind(name)
        return Link(name, kind.efficiency * gb_per_s * 1e9, kind.latency)

    def link_kind(self, name: str) -> LinkKind:
        """Return the kind of a link, such as ``NVLink`` of ``NVLink 4``."""
        return self.links[name.split(maxsplit=1)[0]]


@cache
def facts() -> Facts:
    """Return the facts. Raise TypeError if an entry lacks a key, or has an unknown one."""
    # The loader in C takes 3 ms, and that in Python 20 ms.
    content = yaml.load(TABLE.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Facts(
        **content
        | {
            "gpus": tuple(Gpu(**entry) for entry in content["gpus"]),
            "links": {
                name: LinkKind(**kind | {"latency": Latency(**kind["latency"])})
                for name, kind in content["links"].items()
            },
            "networks": {name: NetworkCards(**cards) for name, cards in content["networks"].items()},
            "processes": ProcessMemory(**content["processes"]),
        }
    )


def gpu_facts(name: str | None) -> Gpu:
    """Return the facts of a GPU by ``plan.gpu``, or by its name in torch or NVML; defaults for unknown ones."""
    parts, gpus, defaults = name_parts(name), facts().gpus, facts().unknown_gpu
    # A name may match several entries. The longest match is the most specific one.
    best = next((gpu for gpu in gpus if name in gpu.memory_mib), None) or max(gpus, key=lambda gpu: gpu.match(parts))
    if name not in best.memory_mib and not best.match(parts):
        return Gpu((), {}, None, None, **defaults)
    return replace(best, **{key: value for key, value in defaults.items() if getattr(best, key) is None})


def name_parts(name: str | None) -> set[str]:
    """Return the parts of a GPU's name in upper case."""
    return set(re.split(r"[^A-Z0-9]+", (name or "").upper())) - {""}


def planned_gpus() -> Mapping[str, float]:
    """Return ``total_memory`` of torch in MiB by the values of ``plan.gpu``, smallest first."""
    memory = {name: mib for gpu in facts().gpus for name, mib in gpu.memory_mib.items()}
    return dict(sorted(memory.items(), key=lambda item: item[1]))


def gpus_with(mib: float) -> list[str]:
    """Return the values of ``plan.gpu`` with at least this memory, smallest first."""
    return [name for name, memory in planned_gpus().items() if memory >= mib]


def peak_tflops(name: str | None, precision: str) -> float | None:
    """Return the peak of a GPU in TFLOP/s; None if it is unknown, as that of a MIG instance: a part of a GPU."""
    return None if "MIG" in name_parts(name) else gpu_facts(name).peak_tflops(precision)


def cublas_workspace(name: str | None) -> int:
    """Return the bytes that each handle of cuBLAS keeps on a GPU. For one without a name it is the larger size."""
    largest = max(gpu.workspace_mib for gpu in facts().gpus)
    return int(MIB * (largest if name is None else gpu_facts(name).workspace_mib))


def intra_node_link(name: str | None) -> Link:
    """Return the link between the workers of a node, by the name of the GPU; None: CPUs."""
    if name is None:
        return replace(facts().link("loopback", facts().loopback_gb_per_s), name="gloo on one machine")
    return facts().link(**gpu_facts(name).link)
