"""The tensors of a distributed model on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a distributed model on this rank. Views of one storage count once.

    Attributes:
        buffers: tensors of the module that are not trained.
        communication: buffers of collectives.
        bucket_sizes: bytes of the buckets that only the library can reach.
        names: name of each parameter, by its id.
        vocabulary: size of the vocabulary; None for image models.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    optimizer_states: Sequence[Tensor]
    buffers: Sequence[Tensor] = ()
    communication: Sequence[Tensor] = ()
    bucket_sizes: Sequence[int] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    vocabulary: int | None = None


ReadTensors = Callable[[], ModelTensors]
