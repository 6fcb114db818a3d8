"""Configurations without a bug, which ``distexp verify`` must call equal.

``python -m tests.verify.clean [MINUTES [FIRST]]`` verifies them for some minutes, from a group on. Each group is one
command, whose variants share the references. It prints a line for each variant, and how many were not equal.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.runs import REPOSITORY, run_distexp
from tests.helpers.zoo import CAUSAL, TRUSTED, write_config

FOUR = ("cluster.workers_per_node=4",)
TWO_NODES = ("cluster.nodes=2", "cluster.workers_per_node=2")
DDP, FSDP, BF16, LORA = "strategy=ddp", "strategy=fsdp", "precision=bf16", "adapter=lora"
CHECKPOINTING, TRAINER, FAST = "train.activation_checkpointing=true", "engine=hf_trainer", "kernels=fast"

STRATEGIES: tuple[tuple[str, ...], ...] = (
    (DDP,), (DDP, "ddp.static_graph=true"), (DDP, "ddp.bucket_cap_mb=1"), (DDP, "ddp.gradient_as_bucket_view=false"),
    (DDP, "ddp.find_unused_parameters=true"), (DDP, CHECKPOINTING), (DDP, *FOUR), (DDP, *TWO_NODES),
    (FSDP,), (FSDP, "fsdp.blocks_per_unit=2"), (FSDP, CHECKPOINTING), (FSDP, "offload=true"), (FSDP, *FOUR),
    ("sharding=shard_grad_op",), ("sharding=shard_grad_op", *FOUR), ("sharding=hybrid_shard", *TWO_NODES),
    ("sharding=hybrid_shard", "fsdp.replicas=2", *FOUR), ("sharding=hybrid_shard", "fsdp.replicas=2"),
    ("sharding=no_shard",),
    ("zero_stage=0",), ("zero_stage=1",), ("zero_stage=2",), ("zero_stage=3",), ("zero_stage=2", *FOUR),
    ("zero_stage=3", *FOUR), ("zero_stage=3", CHECKPOINTING), ("zero_stage=1", "deepspeed.overlap_comm=true"),
    ("zero_stage=3", "deepspeed.stage3_param_persistence_threshold=1"), ("zero_stage=2", "offload=true"),
    ("zero_stage=3", "offload=true"), ("zero_stage=1", *TWO_NODES),
)  # fmt: skip
IN_16_BITS = ((DDP,), (FSDP,), ("sharding=shard_grad_op",), ("zero_stage=0",), ("zero_stage=1",), ("zero_stage=2",),
              ("zero_stage=3",), (DDP, FAST), (FSDP, FAST), (FSDP, "offload=true"))  # fmt: skip
OTHERS = ((DDP,), (FSDP,), ("zero_stage=1",), ("zero_stage=3",))
WITH_TRAINER = tuple((TRAINER, *cell) for cell in (*OTHERS, ("zero_stage=2",), ("zero_stage=0",)))
FAST_CELLS = tuple((FAST, *cell) for cell in ((DDP,), (FSDP,), ("zero_stage=2",)))


MODELS = 6  # models of the zoo that one command verifies


@dataclass(frozen=True)
class Group:
    """Variants that one command compares."""

    name: str
    overrides: tuple[str, ...]
    cells: Sequence[Sequence[str]]


def groups(configs: Path) -> Iterator[Group]:
    """Yield all groups, the most different ones first. The folder gets the configurations of the zoo."""
    yield Group("BLOOM, all phases", (), (*STRATEGIES, *WITH_TRAINER, *FAST_CELLS))
    yield Group("BLOOM in bf16, all phases", (BF16,), IN_16_BITS)
    for model in ("model=gpt_tiny", "model=resnet_tiny"):
        yield Group(model, (model, "--quick"), (*STRATEGIES, *WITH_TRAINER))
        yield Group(f"{model} in bf16", (model, BF16, "--quick"), IN_16_BITS)
    text = ("model=bloom_tiny", "model=gpt_tiny")
    for model in text:
        yield Group(f"{model} with SGD", (model, "train.optimizer=sgd", "--quick"), OTHERS)
        yield Group(f"{model} on three workers", (model, "cluster.workers_per_node=3", "--quick"), OTHERS)
    yield Group("GPT with dropout", ("model=gpt_tiny", "model.dropout=0.1", "--quick"), OTHERS)
    yield Group("adapters", ("model=bloom_tiny", LORA, "--quick"), (*OTHERS, (DDP, BF16), (FSDP, BF16), (DDP, FAST)))
    yield Group("synthetic data", ("dataset=synthetic", "--quick"), OTHERS)
    yield Group("targets only", ("train.logits=targets", "--quick"), OTHERS)
    zoo = {kind: write_config(configs, kind) for kind in CAUSAL}
    hugging_face = ("model=hf", "model.init=random", "model.tokenizer=byte", "model.name=PATH", "--quick")
    data = ("dataset=synthetic", "dataset._target_=zoo_ranks.load", "dataset.max_length=24", TRUSTED)
    strategies = ((DDP,), (FSDP,), ("zero_stage=2",), ("zero_stage=3",))
    for start in range(0, len(zoo), MODELS):
        names = list(zoo)[start : start + MODELS]
        cells = [(*strategy, f"model.name={zoo[name]}") for name in names for strategy in strategies]
        yield Group(f"{names[0]} to {names[-1]}", (*hugging_face, *data), cells)


def verify(group: Group, folder: Path) -> list[dict[str, Any]]:
    """Return the results of a group."""
    swept = f"sweep.cells={json.dumps(group.cells, separators=(',', ':'))}"
    path = f"{REPOSITORY}:{REPOSITORY / 'tests/helpers'}"
    arguments = ("verify", "--json", "--multirun", swept, *group.overrides, "cluster.device=cpu")
    done = run_distexp(*arguments, cwd=folder, env={"PYTHONPATH": path}, timeout=3600)
    shutil.rmtree(folder / "multirun_outputs", ignore_errors=True)
    if not done.stdout.startswith("["):
        return [{"label": group.name, "status": "failed", "reasons": [done.stderr[-500:]], "phases": []}]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def describe(result: dict[str, Any]) -> str:
    """Return a line about a result: its largest error relative to the bound, or why it is not equal."""
    if result["status"] == "equal":
        worst = [(kind, each) for phase in result["phases"] for kind, each in phase["worst"].items() if each["error"]]
        ratio, kind = max(((each["error"] / each["bound"], kind) for kind, each in worst), default=(0.0, "-"))
        return f"equal, {len(result['phases'])} phases, {ratio:.2f} of a bound ({kind})"
    cause = result.get("cause") or {}
    return f"{result['status']}: {cause.get('phase', '')} {cause.get('sentence', '')} {result['reasons'][:1]}"


def main() -> None:
    """Verify all groups until the time is over, and print the results."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0  # number of the first group
    started, counts = time.monotonic(), dict.fromkeys(("equal", "different", "not comparable", "failed"), 0)
    with tempfile.TemporaryDirectory() as name:
        for group in list(groups(Path(name)))[first:]:
            if time.monotonic() - started > 60 * minutes:
                print(f"left out: {group.name}")
                continue
            for result in verify(group, Path(name)):
                counts[result["status"]] += 1
                print(f"{group.name} | {result['label']} | {describe(result)}", flush=True)
    print(f"{counts} in {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
