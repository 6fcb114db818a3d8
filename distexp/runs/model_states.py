"""Memory of model states by arithmetic, as in the ZeRO paper.

See arXiv:1910.02054, section 5.

With Adam a parameter costs 16 bytes. In fp32 these are 4 of weight, 4 of gradient and 8 of moments. Autocast keeps no
other copy. With 16-bit weights, ZeRO keeps a master copy in fp32: 2 of weight, 2 of gradient and 12 of states.
Sharded states are divided by the number of workers that share them. Activations and buffers are not included.

Everything is read from the ``built`` of a record, never from the name of a strategy, so that custom
strategies are treated alike.
"""

from __future__ import annotations

from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Built
from distexp.system.units import MIB

BYTES_PER_VALUE = 4.0
MOMENTS = {"adamw": 2, "sgd": 1}
"""Values in fp32 that an optimizer keeps for each parameter; the one of sgd is its momentum."""

States = dict[str, float]
"""Bytes of ``parameters``, ``gradients`` and ``optimizer`` states for each parameter."""


def ideal_states_mib(record: RunRecord) -> float | None:
    """Return the model states on the device of one worker in MiB; None if unknown."""
    per_parameter = bytes_per_parameter(record)
    if per_parameter is None or record.built is None or not record.built.parameters:
        return None
    return per_parameter * record.built.parameters / MIB


def bytes_per_parameter(record: RunRecord) -> float | None:
    """Return the bytes on one worker's device for each parameter of the whole model.

    Returns:
        None if ``built`` does not show how the states are stored. A custom strategy may shard in another way.
    """
    built = record.built
    moments = MOMENTS.get(record.config["train"]["optimizer"])
    if built is None or moments is None or len(built.mesh) != 2:
        return None
    is_unknown = built.param_dtype != "float32" or (built.mesh[1] > 1 and not built.sharded_units)
    if built.zero_stage is None and is_unknown:
        return None
    return sum(states_per_parameter(built, BYTES_PER_VALUE * moments).values())


def states_per_parameter(built: Built, moments: float) -> States:
    """Return the states of a worker: those of a ZeRO stage, if there is one, or with equal shares of all of them."""
    return (
        _sharded_states(built, moments) if built.zero_stage is None else _zero_states(built, built.zero_stage, moments)
    )


def _sharded_states(built: Built, moments: float) -> States:
    """Return the states if all of them are sharded over the second axis of the mesh."""
    copies = BYTES_PER_VALUE / 2 if built.compute_weights == "step" else 0.0
    parts = {"parameters": BYTES_PER_VALUE + copies, "gradients": BYTES_PER_VALUE, "optimizer": moments}
    on_cpu = built.offload.split("+")
    return {name: 0.0 if name in on_cpu else size / built.mesh[1] for name, size in parts.items()}


def _zero_states(built: Built, stage: int, moments: float) -> States:
    """Return the states of a ZeRO stage.

    From stage 2 on, an offloaded optimizer takes its gradients along.
    """
    shards, on_cpu = built.mesh[1], built.offload.split("+")
    half = built.param_dtype in ("bfloat16", "float16")
    value, states = (BYTES_PER_VALUE / 2, BYTES_PER_VALUE + moments) if half else (BYTES_PER_VALUE, moments)
    parts = {
        "parameters": value / shards if stage >= 3 else value,
        "gradients": value / shards if stage >= 2 else value,
        "optimizer": states / shards if stage >= 1 else states,
    }
    if "optimizer" in on_cpu:
        parts["optimizer"] = 0.0
        parts["gradients"] = 0.0 if stage >= 2 else parts["gradients"]
    if "parameters" in on_cpu:
        parts["parameters"] = 0.0
    return parts
