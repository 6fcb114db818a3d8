"""Sizes of what a distributed model sends and updates, for a forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distexp.models.blocks import find_units
from distexp.runs.step_model import Parameters
from distexp.strategies.optimizer import parameter_groups
from distexp.system.torch_internals.ddp import ddp_bucket_sizes
from distexp.system.torch_internals.fsdp import FSDPUnitSize, read_fsdp_unit_sizes


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model.

    Attributes:
        units: Parameters of each block, and of what is between the blocks, in the order of the model.
        fsdp: Sizes of FSDP's units by name. Empty: no FSDP.
        buckets: Elements of DDP's buckets. Empty: no DDP.
        groups: Elements of each parameter in each group of the optimizer.
        modules: Positions, in the parameters of all units, of those that each module itself has.
    """

    units: tuple[Parameters, ...] = ()
    fsdp: dict[str, FSDPUnitSize] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    modules: tuple[tuple[int, ...], ...] = ()


def read_model_sizes(module: nn.Module | None) -> ModelSizes:
    """Return the sizes of a distributed model; empty if it is unknown."""
    if module is None:
        return ModelSizes()
    bare = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "module", module)
    return ModelSizes(
        tuple(_units(bare)),
        {unit.name: unit for unit in read_fsdp_unit_sizes(module)},
        tuple(_bucket_elements(module)),
        tuple(tuple(map(_elements, group["params"])) for group in parameter_groups(bare, weight_decay=0.0)),
        tuple(_positions_by_module(bare)),
    )


def _units(model: nn.Module) -> Iterator[Parameters]:
    """Yield the trained parameters of each block, and of the modules before and after the blocks."""
    blocks = [name for name, _ in find_units(model)]

    def unit(name: str) -> str:
        return next((block for block in blocks if name.startswith(f"{block}.")), name.split(".", maxsplit=1)[0])

    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name, members in groupby(trained, key=lambda named: unit(named[0])):
        yield Parameters(name, tuple(_elements(parameter) for _, parameter in members))


def _elements(parameter: nn.Parameter) -> int:
    """Return the elements of a whole parameter. ZeRO-3 leaves an empty tensor, and keeps the number elsewhere."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _positions_by_module(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield the positions of the trained parameters of each module that has some. Modules may share a parameter."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    positions = {id(parameter): position for position, parameter in enumerate(trained)}
    for module in model.modules():
        own = tuple(
            positions[id(parameter)] for parameter in module.parameters(recurse=False) if parameter.requires_grad
        )
        if own:
            yield own


def _bucket_elements(module: nn.Module) -> list[int]:
    if not isinstance(module, DistributedDataParallel):
        return []
    width = next(parameter.element_size() for parameter in module.parameters() if parameter.requires_grad)
    return [size // width for size in ddp_bucket_sizes(module)]
