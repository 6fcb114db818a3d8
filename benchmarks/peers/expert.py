"""The loop that an expert writes for a causal LM of transformers: SDPA, ``torch.compile``, fused AdamW, bf16.

On one GPU and with DDP, autocast casts fp32 weights. With ``fsdp``, blocks are compiled and sharded as in torchtitan.
With ``tensor``, its plan for a Llama cuts them before: sequence parallelism, vocabulary and loss in parallel.
Usage: ``python -m benchmarks.peers.expert ARGUMENTS.json RESULT.json``, for several GPUs by torchrun.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.peers.settings import CLIPPING, LEARNING_RATE, WEIGHT_DECAY
from distexp.measure.clock import StepClock
from distexp.system.processes import end_at_once
from distexp.system.units import MIB


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the longest list of layers."""
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)


def cut(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model of the Llama kind. The first block splits the tokens, so that the positions are those of a row."""
    tokens, whole = Shard(1), Replicate()
    in_block = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(whole,)),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    }
    layers = model.model.layers
    for block in layers:
        parallelize_module(block, mesh, in_block)
    split = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(tokens,), use_local_output=True)
    parallelize_module(layers[0], mesh, split)
    outside = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, outside)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def shard(model: nn.Module, config: Any, options: dict[str, Any], device: torch.device) -> None:
    """Shard the blocks of a model on the meta device, compiled and with random weights."""
    degree = options.get("tensor", 1)
    mesh = init_device_mesh(device.type, (options["workers"] // degree, degree), mesh_dim_names=("data", "tensor"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if degree > 1:
        cut(model, mesh["tensor"])
    blocks, data = blocks_of(model), mesh["data"]
    for index, plain in enumerate(blocks):
        block = blocks[index] = checkpoint_wrapper(plain) if options["checkpointing"] else plain
        if options.get("compile", True):
            block.compile()
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=data, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)
            else:
                nn.init.constant_(weight, 0.0 if name.endswith("bias") else 1.0)
    for part in model.modules():  # The frequencies of rotary embeddings, which to_empty left undefined.
        if hasattr(part, "inv_freq"):
            fresh = type(part)(config=config)
            part.inv_freq = fresh.inv_freq.to(device)
            part.original_inv_freq = part.inv_freq


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a batch."""
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train on random tokens, and return speed, memory and loss."""
    rank, degree = int(os.environ.get("LOCAL_RANK", "0")), options.get("tensor", 1)
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if options["workers"] > 1:
        dist.init_process_group("nccl" if has_gpu else "gloo", device_id=device if has_gpu else None)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options["model"])
    config.use_cache = False
    fsdp = options["strategy"] == "fsdp"
    with torch.device("meta") if fsdp else device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    loss_of = next_token_loss if degree > 1 else torch.compile(next_token_loss)
    compiled: Any = model
    if fsdp:
        shard(model, config, options, device)
    else:
        if options["checkpointing"]:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if options["workers"] > 1:
            compiled = DistributedDataParallel(model, [device], gradient_as_bucket_view=True)
        compiled = torch.compile(compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    generator = torch.Generator().manual_seed(1 + rank // degree)
    shape = (options["micro_batch"], options["length"])
    clock, losses, started = StepClock(device), [], time.perf_counter()
    clock.restart()
    first_step_s = 0.0
    for _ in range(options["warmup"] + options["steps"]):
        rows = torch.randint(config.vocab_size, shape, generator=generator)
        rows = (rows.pin_memory() if has_gpu else rows).to(device, non_blocking=True)
        with loss_parallel() if degree > 1 else nullcontext():
            with torch.autocast("cuda", torch.bfloat16, enabled=not fsdp):
                loss = loss_of(compiled(input_ids=rows, use_cache=False).logits, rows)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        clock.mark()
        losses.append(loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach())
        if not first_step_s:
            losses[0].item()
            first_step_s = time.perf_counter() - started
    durations = clock.durations()[options["warmup"] :]
    return {
        "samples_per_second": options["workers"] // degree * options["micro_batch"] * len(durations) / sum(durations),
        "step_ms": 1000 * median(durations),
        "peak_mib": torch.cuda.max_memory_allocated() / MIB,
        "loss": torch.stack(losses).mean().item(),
        "first_step_s": first_step_s,
        "gpu": torch.cuda.get_device_name() if has_gpu else "CPU",
    }


if __name__ == "__main__":
    found = train(json.loads(Path(sys.argv[1]).read_text()))
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[2]).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()
        end_at_once(0)  # Threads of gloo may abort an orderly exit.
