"""What a model's states must take on each device: the arithmetic of the ZeRO paper (arXiv:1910.02054, section 5).

With Adam and a master copy in fp32, a parameter costs 16 bytes: 4 of weight, 4 of gradient and 8 of moments
in fp32 (autocast keeps no other copy), or 2 + 2 + 12 where the weights are in 16 bits. What is sharded is
divided by the number of workers that share it. Activations and buffers are not in it.
"""

from __future__ import annotations

from distexp.runs.record import RunRecord

MIB = 2**20
MOMENTS = {"adamw": 2, "sgd": 1}
"""Numbers of four bytes that an optimizer keeps for each parameter; sgd's is its momentum."""


def ideal_states_mib(record: RunRecord) -> float | None:
    """Parameters, gradients and optimizer states of one worker, on its own device, in MiB; None if unknown."""
    built = record.built
    if built is None or not built.parameters:
        return None
    return bytes_per_parameter(record) * built.parameters / MIB


def bytes_per_parameter(record: RunRecord) -> float:
    """The bytes of one worker's device for each parameter of the whole model."""
    built = record.built
    assert built is not None
    moments = 4.0 * MOMENTS[record.config["train"]["optimizer"]]
    shards = built.mesh[1]
    if built.strategy == "fsdp":
        return 0.0 if built.offload != "none" else (8 + moments) / shards
    half = built.param_dtype in ("bfloat16", "float16")
    weight, gradient, states = (2.0, 2.0, 4 + moments) if half else (4.0, 4.0, moments)
    stage = built.zero_stage or 0
    if stage == 0:
        return weight + gradient + states
    # From stage 2 on an offloaded optimizer takes its share of the gradients along.
    on_device = {"weight": weight, "gradient": gradient, "states": states / shards}
    if stage >= 2:
        on_device["gradient"] = gradient / shards
    if stage == 3:
        on_device["weight"] = weight / shards
    if "optimizer" in built.offload:
        on_device["states"] = 0.0
        on_device["gradient"] = gradient if stage == 1 else 0.0
    if "parameters" in built.offload:
        on_device["weight"] = 0.0
    return sum(on_device.values())
