"""Names of keys, options and values in other programs, with what to type instead."""

import re

from distexp.config.keys import config_groups, describe_values, options_of

OPTION_NAMES = {
    "precision": {
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "float32": "fp32",
        "full": "fp32",
        "fp8": "float8",
        "no": "fp32",
        **{"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"},
    },
    "offload": {
        **dict.fromkeys(("yes", "on", "1", "cpu"), "true"),
        **dict.fromkeys(("no", "off", "0", "none"), "false"),
    },
}
"""Names of options in other programs, with the options of distexp."""


ALIASES = {
    "lr": "train.learning_rate",
    **dict.fromkeys(("epochs", "epoch"), "train.num_epochs"),
    "batch_size": "train.micro_batch_size",
    "steps": "train.max_steps",
    **dict.fromkeys(("gpus", "num_gpus", "workers", "nproc_per_node", "num_processes"), "cluster.workers_per_node"),
    **dict.fromkeys(("nnodes", "num_nodes", "num_machines"), "cluster.nodes"),
    **dict.fromkeys(("sequence_length", "seq_len", "max_seq_length", "block_size"), "dataset.max_length"),
    **dict.fromkeys(("per_device_train_batch_size", "train_micro_batch_size_per_gpu"), "train.micro_batch_size"),
    **{"train_batch_size": "train.global_batch_size", "per_device_eval_batch_size": "train.eval_batch_size"},
    **{"num_train_epochs": "train.num_epochs", "train_iters": "train.max_steps", "adam_epsilon": "train.eps"},
    **dict.fromkeys(("max_grad_norm", "clip_grad"), "train.gradient_clipping"),
    **dict.fromkeys(("logging_steps", "log_interval"), "train.log_every"),
    **dict.fromkeys(("save_steps", "save_interval"), "train.checkpoint_every"),
    **{"lr_scheduler_type": "train.schedule", "dataloader_num_workers": "dataset.num_workers"},
    **{"resume_from_checkpoint": "train.resume", "output_dir": "hydra.sweep.dir", "run_name": "name"},
    **{"report_to": "tracker", "num_attention_heads": "model.num_heads", "attn_implementation": "model.attention"},
    **{"mixed_precision": "precision", "dataset_name": "dataset", "stage": "zero_stage"},
    **{
        f"{name}{ending}": f"parallel.{degree}"
        for degree in ("tensor", "pipeline", "expert", "context")
        for name in (f"{degree[0]}p", f"{degree}_parallel", f"{degree}_model_parallel")
        for ending in ("", "_size", "_degree")
    },
    **dict.fromkeys(("sp", "sequence_parallel", "sequence_parallel_size", "ulysses_degree"), "parallel.context"),
    **dict.fromkeys(("timeout", "time", "walltime"), "cluster.timeout_min"),
    **{"mem": "cluster.memory_gb", "devices": "cluster.workers_per_node", "optim": "train.optimizer"},
    **{"max_epochs": "train.num_epochs", "accumulate_grad_batches": "train.gradient_accumulation_steps"},
    **{"gradient_clip_val": "train.gradient_clipping"},
    **{"lr_decay_style": "train.schedule", "lr_warmup_iters": "train.warmup_steps"},
    **{"ffn_hidden_size": "model.ff_dim", "num_hidden_layers": "model.num_layers"},
    **{"ddp_bucket_cap_mb": "ddp.bucket_cap_mb", "ddp_find_unused_parameters": "ddp.find_unused_parameters"},
    **dict.fromkeys(("n_positions", "max_position_embeddings"), "model.seq_length"),
}  # fmt: skip
"""Names of keys in other programs, with the keys of distexp."""

FOREIGN = {
    "deepspeed": "strategy=deepspeed deepspeed.config_file={}",
    "deepspeed_config": "strategy=deepspeed deepspeed.config_file={}",
    "fsdp": "sharding={}",
    "model_name_or_path": "model=hf model.name={}",
    **dict.fromkeys(("lora_r", "lora_rank", "adapter.r", "adapter.lora_r"), "adapter=lora adapter.rank={}"),
    **dict.fromkeys(("lora_alpha", "adapter.lora_alpha"), "adapter=lora adapter.alpha={}"),
    **dict.fromkeys(("lora_dropout", "adapter.lora_dropout"), "adapter=lora adapter.dropout={}"),
    **dict.fromkeys(("target_modules", "adapter.target_modules"), "adapter=lora adapter.targets={}"),
    **{f"{start}{name}": f"precision={name}" for start in ("", "precision.") for name in ("fp16", "bf16", "float8")},
    **dict.fromkeys(("fp8", "precision.fp8", "fp8_hybrid", "fp8_format"), "precision=float8"),
    **{"torch_compile": "train.compile=true", "group_by_length": "dataset.bucketing=true"},
    **dict.fromkeys(
        ("gradient_checkpointing", "recompute_activations", "fsdp_activation_checkpointing"),
        "train.activation_checkpointing=true",
    ),
    "recompute_granularity": "train.activation_checkpointing={}",
    **{"optim": "train.optimizer={}", "lr_scheduler_type": "train.schedule={}"},
    "fsdp_sharding_strategy": "sharding={}",
    "fsdp_transformer_layer_cls_to_wrap": "strategy=fsdp fsdp.wrap={}",
    "fsdp_offload_params": "sharding=full_shard offload=true",
    "use_distributed_optimizer": "zero_stage=1",
    "save_strategy": "train.checkpoint_every=100",
    **dict.fromkeys(
        ("virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage"),
        "parallel.schedule=interleaved",
    ),
    **dict.fromkeys(("use_cpu", "no_cuda"), "cluster.device=cpu"),
    **dict.fromkeys(("dp", "data_parallel", "data_parallel_size"), "strategy=ddp cluster.workers_per_node={}"),
}
"""Names in other programs, with the overrides to type for them. A text without ``{}`` is for a switch that is on."""

FOREIGN_VALUES = {
    "recompute_granularity": {"full": "true"},
    "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "optim": {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw8bit"),
    },
    "fsdp_sharding_strategy": {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"},
}
"""Values of such names, in lower case, with those of distexp."""

SET_BY_DISTEXP = {
    *("standalone", "master_addr", "master_port", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("do_train", "do_eval", "overwrite_output_dir", "machine_rank", "main_process_ip", "main_process_port"),
}
"""Options of other programs that need no override."""


def translate(name: str, value: str) -> str:
    """Return what to type for a name in another program, as the end of a message; empty if it is unknown."""
    if name in SET_BY_DISTEXP:
        return ": leave it out, because distexp sets it itself"
    if name == "sequence_parallel" and not value.isdecimal():
        return ": leave it out, because it is a part of parallel.tensor"
    text = FOREIGN.get(name, "")
    value = FOREIGN_VALUES.get(name, {}).get(value.lower(), value)
    if text and value.lower() in ("false", "no", "off", "0", "null", "none", "~"):
        return ": leave it out"
    if name in FOREIGN_VALUES:
        key, value = text.partition("=")[0], value.lower()
        accepted = ", ".join(options_of(key)) if key in config_groups() else describe_values(key) or ""
        accepted = accepted.removeprefix("one of ")
        if value not in re.findall(r"\w+", accepted):
            return f": write {key}=VALUE, with one of {accepted}"
    if text.startswith("sharding=") and "offload" in value.split():
        text += " offload=true"
    if not value:  # The first override chooses what the value is for.
        text = text.partition(" ")[0]
    return f": write {text.format(value.partition(' ')[0] or 'VALUE')}" if text else ""


OPTION_ALIASES = {f"zero{separator}{stage}": f"zero_stage={stage}" for separator in ("", "-") for stage in range(4)}
"""Usual names of options, with the overrides that choose them."""
