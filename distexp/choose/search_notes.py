"""What a search prints before it starts: what differs from what a user may expect."""

from __future__ import annotations

from distexp.choose.axes import read_axes
from distexp.choose.settings import Settings
from distexp.choose.space import base_config, kept_micro_batch
from distexp.config import Config
from distexp.launch.cell import MakeCell
from distexp.plan.verdict import memory_to_fit_mib
from distexp.resolve.resources import launcher_traits
from distexp.system.hardware import visible_gpus

HOW_TO_NAME_MEMORY = {
    "cuda": "name the GPU, as in plan.gpu=a100-80gb, or its memory, as in plan.gpu_memory_gb=80",
    "cpu": "name that of a node, as in cluster.memory_gb=128",
}
"""What to type if the memory of the machine is unknown, by device."""


def search_notes(make: MakeCell, settings: Settings) -> list[str]:
    """Return the lines about the device, its memory, and the micro-batch."""
    config = base_config(make, settings.command)
    return [*_device_notes(config, settings), *_memory_notes(config), *_micro_batch_notes(config, settings)]


def _memory_notes(config: Config) -> list[str]:
    """Return that nothing is left out because it does not fit, if the memory is unknown."""
    if memory_to_fit_mib(config) is not None:
        return []
    device = config.cluster.device
    memory = "memory of the GPUs" if device == "cuda" else "memory of the nodes"
    return [
        f"the {memory} is unknown, so trials may run out of it: {HOW_TO_NAME_MEMORY[device]}. Then configurations that "
        "do not fit are left out"
    ]


def _device_notes(config: Config, settings: Settings) -> list[str]:
    """Return that the trials run on CPUs, unless the command requests it."""
    cluster = config.cluster
    requested = any("cluster.device=" in text for text in settings.command)
    if not launcher_traits(config).runs_here or cluster.device != "cpu" or requested or visible_gpus():
        return []
    return ["this machine has no GPU that can be used: the trials run on its CPUs"]


def _micro_batch_notes(config: Config, settings: Settings) -> list[str]:
    """Return why the micro-batch does not vary, and how to vary it."""
    axes = read_axes(settings.section.space, settings.command)
    kept = kept_micro_batch(config, settings.section.gpus, axes)
    if kept is None:
        return []
    return [
        f"all configurations have train.micro_batch_size={kept}. A batch norm uses the statistics of a micro-batch, so "
        "another size is another training. To vary it too, add train.micro_batch_size=auto"
    ]
