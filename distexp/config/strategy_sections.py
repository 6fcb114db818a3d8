"""The sections of the schema with the options of one strategy each."""

from __future__ import annotations

from dataclasses import dataclass

from distexp.config.field_info import key


@dataclass
class DDPConfig:
    """Options of `strategy=ddp`, as in `DistributedDataParallel`."""

    bucket_cap_mb: float | None = key(None, "Size of a gradient bucket.", unit="MB", above=0, reference=25.0)
    static_graph: bool = key(False, "Whether every step uses the same autograd graph.")
    find_unused_parameters: bool = key(False, "Whether to search for parameters without a gradient.")
    gradient_as_bucket_view: bool = key(
        True, "Keep gradients in the buckets, without a second copy.", id_if_changed=True
    )
    communication: str = key(
        "fp32", "Data type in which gradients are sent.", choices=("fp32", "bf16"), id_if_changed=True
    )


@dataclass
class FSDPConfig:
    """Options of `strategy=fsdp`, that is, FSDP2 (`fully_shard`)."""

    sharding: str | None = key(
        None,
        "What is sharded. `sharding=` sets this key and the strategy.",
        choices=("full_shard", "shard_grad_op", "hybrid_shard", "no_shard"),
        null="full_shard",
    )
    replicas: int | None = key(None, "Replicas of a hybrid mesh.", null="one per node")
    wrap: str = key("auto", "`auto`: each block is a unit. Else class names of the units, separated by commas.")
    forward_prefetch: int = key(0, "Blocks to all-gather ahead in the forward pass.", at_least=0)
    backward_prefetch: int = key(1, "Blocks to all-gather ahead in the backward pass.", at_least=0)
    blocks_per_unit: int | str | None = key(
        None, "Blocks that are sharded and gathered together. `auto`: units of at least 30M parameters.",
        choices=("auto",), at_least=1, reference=1, id_if_changed=True,
    )  # fmt: skip
    sync_module_states: bool = key(True, "Broadcast the initial weights of rank 0.")


@dataclass
class DeepSpeedConfig:
    """Options of `strategy=deepspeed`. Null keys keep the defaults of DeepSpeed."""

    zero_stage: int | None = key(
        None,
        "ZeRO stage. `zero_stage=` sets this key and the strategy.",
        choices=(0, 1, 2, 3),
        null="the stage of `config_file`, or 2",
    )
    config_file: str | None = key(
        None, 'A `ds_config.json`. "auto" values are filled in. Conflicts are errors.', path="file"
    )
    reduce_bucket_size: int | None = key(None, "Bucket of the gradient reduction.", unit="elements", at_least=1)
    allgather_bucket_size: int | None = key(None, "Bucket of the parameter all-gather.", unit="elements", at_least=1)
    stage3_prefetch_bucket_size: int | None = key(None, "Parameters to prefetch.", unit="elements", at_least=1)
    stage3_param_persistence_threshold: int | None = key(
        None, "Smaller parameters are not partitioned.", unit="elements", at_least=1
    )
    stage3_max_live_parameters: int | None = key(None, "Most parameters gathered at once.", unit="elements", at_least=1)
    overlap_comm: bool = key(False, "Overlap the gradient reduction with the backward pass.")
    check_overflow: bool | None = key(
        None, "Skip steps with infinite gradients. bf16 needs no such check.", reference=True, id_if_changed=True
    )
    async_update: bool | None = key(
        None,
        "Clip and update without waiting for the GPU: with bf16 at stages 1, 2, native trainer, no offload.",
        reference=False,
        id_if_changed=True,
    )
    cpu_optimizer: str = key(
        "auto",
        "Optimizer of offloaded states. DeepSpeed compiles its own. `auto`: deepspeed on GPUs, else torch.",
        choices=("auto", "torch", "deepspeed"),
    )
