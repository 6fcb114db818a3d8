"""The workshop's tables, exercise by exercise: its rows, its columns, and the figures that it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distexp.report.data.metrics import EFFICIENCY, SPEED
from distexp.report.data.repeats import RunGroup
from distexp.report.exercises.cells import (
    MIB_IN_GB,
    MIB_IN_GIB,
    Measure,
    figure,
    of_epoch,
    of_gpu_0,
    parameters,
    relative,
    setting,
)
from distexp.report.exercises.filling import Layout

OVERALL = "train_samples_per_second_overall"


def _workers(group: RunGroup) -> Any:
    return group.setting("workers")


def _nodes(group: RunGroup) -> Any:
    return group.setting("nodes")


def _one(group: RunGroup) -> str:
    return ""


def _stage(group: RunGroup) -> Any:
    """(stage, false | true | pinned)"""
    return group.setting("zero_stage"), group.setting("offload")


def _stage_label(key: Any) -> tuple[str, ...]:
    stage, offload = key
    return (f"ZeRO Stage {stage}{OFFLOADING.get(offload, '')}",)


OFFLOADING = {True: " + Offloading", "pinned": " + pinned Offloading"}


def _as_the_trainer(groups: Sequence[RunGroup]) -> str:
    """The Trainer's samples/s have evaluation in their time; ours do not."""
    overall = groups[0].metric(OVERALL)
    if overall is None or not groups[0].completed:
        return ""
    return f"The workshop's samples/s count the time of evaluation in; so counted, ours are {overall.mean:,.2f}."


def _weights(groups: Sequence[RunGroup]) -> str:
    if groups[0].rows[0].record.config["model"]["init"] == "pretrained":
        return ""
    return "The losses are those of random weights (model.init=pretrained begins with the published ones)."


def _both(groups: Sequence[RunGroup]) -> str:
    return " ".join(filter(None, [_as_the_trainer(groups), _weights(groups)]))


# The workshop's sheet of one run.
LOSSES = ("1.2965", "1.5810", "1.7790")
TRAINING, GPU, CPU = "Training Metrics", "GPU Memory", "CPU Memory"
SHEET = (
    figure("Final Train Loss", "train_loss", "{:.4f}", category=TRAINING),
    of_epoch("Eval Loss (Epoch 1)", "eval_losses", 1, category=TRAINING),
    of_epoch("Eval Loss (Epoch 2)", "eval_losses", 2, category=TRAINING),
    of_epoch("Eval Loss (Final)", "eval_losses", -1, category=TRAINING),
    figure("Train Samples/sec", SPEED, "{:,.2f}", category=TRAINING),
    figure("Eval Samples/sec", "eval_samples_per_second", "{:,.2f}", category=TRAINING),
    figure("Steps per Epoch", "steps_per_epoch", "{:,.0f}", category=TRAINING),
    figure("GPU Peak Usage (MiB)", "gpu_peak_mib", "{:,.0f}", category=GPU),
    figure("GPU Average Usage (MiB)", "gpu_average_mib", "{:,.2f}", category=GPU),
    figure("GPU Mode Usage (MiB)", "gpu_mode_mib", "{:,.0f}", category=GPU),
    figure("CPU Peak Usage (MB)", "cpu_peak_mib", "{:,.0f}", category=CPU),  # psrecord's MB are MiB
    figure("CPU Average Usage (MB)", "cpu_average_mib", "{:,.2f}", category=CPU),
    figure("CPU Mode Usage (MB)", "cpu_mode_mib", "{:,.0f}", category=CPU),
)
SHEET_PRINTED = dict(zip((measure.title for measure in SHEET), (
    "0.7039", *LOSSES, "11.26", "39.46", "31 (93 in 3 epochs)", "21,658", "18,683.53", "21,658", "3,892", "2,276.06",
    "2,145 and 2,177",
), strict=True))  # fmt: skip

FSDP_SHEET = (
    figure("Train Loss (Final)", "train_loss", "{:.4f}"),
    *(of_epoch(f"Eval Loss (Epoch {epoch})", "eval_losses", epoch) for epoch in (1, 2, 3)),
    figure("Training Speed (samples/sec)", SPEED, "{:,.2f}"),
    figure("Evaluation Speed (samples/sec)", "eval_samples_per_second", "{:,.2f}"),
    figure("Steps per Epoch", "steps_per_epoch", "{:,.0f}"),
    figure("Memory Allocated (MB)", "torch_average_allocated_mib", "{:,.0f}", MIB_IN_GB * 1000),
    figure("GPU Utilization (%)", "gpu_utilization_pct", "{:.0f}"),
)
FSDP_PRINTED = dict(
    zip((measure.title for measure in FSDP_SHEET), ("0.7039", *LOSSES, "11.971", "39.41", "31"), strict=False)
)


def _other_batch(groups: Sequence[RunGroup]) -> str:
    return "What the workshop prints here was measured with batch 4 x 4 and 3 epochs. " + _both(groups)


# Comparisons of stages.
STAGES = (
    figure("Peak GPU Memory Used (MiB)", "gpu_peak_mib", "{:,.0f}"),
    figure("Average GPU Memory Used (MiB)", "gpu_average_mib", "{:,.0f}"),
    figure("Peak CPU Memory Used (MiB)", "cpu_peak_mib", "{:,.0f}"),
    figure("Average CPU Memory Used (MiB)", "cpu_average_mib", "{:,.0f}"),
    figure("Train Samples/Second", SPEED),
)
LOSS, SAMPLES = figure("Train Loss", "train_loss", "{:.4f}"), figure("Train Samples/sec", SPEED)
GPU_MIB = (
    figure("Peak GPU Memory (MiB)", "gpu_peak_mib", "{:,.0f}"),
    figure("Average GPU Memory (MiB)", "gpu_average_mib", "{:,.0f}"),
    figure("Mode for GPU Memory (MiB)", "gpu_mode_mib", "{:,.0f}"),
)
CPU_MIB = (
    figure("Peak CPU Memory (MiB)", "cpu_peak_mib", "{:,.0f}"),
    figure("Average CPU Memory (MiB)", "cpu_average_mib", "{:,.0f}"),
    figure("Mode for CPU Memory (MiB)", "cpu_mode_mib", "{:,.0f}"),
)
GPU_GIB = (
    figure("Peak GPU Memory (GiB)", "gpu_peak_mib", "{:,.2f}", MIB_IN_GIB),
    figure("Average GPU Memory (GiB)", "gpu_average_mib", "{:,.2f}", MIB_IN_GIB),
    GPU_MIB[2],
)


def _stages(title: str, *lines: tuple[int, Any]) -> Layout:
    return Layout(title, ("DeepSpeed Config",), _stage, lines, _stage_label, STAGES)


def _quiz_of_sizes(groups: Sequence[RunGroup]) -> str:
    """Which ZeRO stage gave the lowest peak GPU memory usage on each bloom variation?"""
    best: dict[str, tuple[float, Any]] = {}
    for group in groups:
        peak = group.metric("gpu_peak_mib")
        model = str(group.setting("model"))
        if group.completed and peak and (model not in best or peak.mean < best[model][0]):
            best[model] = peak.mean, group.setting("zero_stage")
    told = [f"stage {stage} on {model} ({peak:,.0f} MiB)" for model, (peak, stage) in best.items()]
    return f"Lowest peak GPU memory: {', '.join(told)}." if told else ""


SIZES = ("bloom_560m", "bloom_1b1", "bloom_1b7", "bloom_3b")

# DDP's table.
DDP_SPEED, DDP_AVERAGE = figure("Throughput (img/s)", SPEED), of_gpu_0("GPU 0 Avg (MiB)", "average_mib")


def _ddp(base: str) -> tuple[Measure, ...]:
    return (
        of_epoch("Train Loss (Epoch 3)", "train_losses", 3, form="{:.3f}"),
        of_epoch("Train Acc (Epoch 3)", "train_accuracies", 3, form="{:.2f}%", factor=100),
        DDP_SPEED,
        of_gpu_0("GPU 0 Peak (MiB)", "peak_mib"),
        DDP_AVERAGE,
        of_gpu_0("GPU 0 Mode (MiB)", "mode_mib"),
        relative(f"Throughput Scaling vs {base}", DDP_SPEED),
        relative(f"Memory Avg Scaling vs {base}", DDP_AVERAGE),
    )


DDP_PRINTED = dict(zip((measure.title for measure in _ddp("1G")), (
    "5.149", "2.16%", "704.9", "26,532", "22,458.63", "26,532",
), strict=False))  # fmt: skip
DDP_MULTI_GPU = Layout(
    "Multi-GPU Scaling (1 Node)", ("Config",), _workers, (1, 2, 4, 8),
    lambda key: ("1 GPU, 1 Node (baseline)" if key == 1 else f"{key} GPUs, 1 Node",), _ddp("1G"),
    printed={1: DDP_PRINTED},
    note=lambda groups: "The workshop prints one line as an example, and does not say of how many GPUs.",
)  # fmt: skip

# FSDP's tables.
RUNTIME, GB = figure("Runtime (s)", "train_runtime_s"), "{:,.2f}"
FSDP_SPEED = figure("Samples/s", SPEED)
FSDP = (
    FSDP_SPEED,
    relative("Samples/s Scale Factor", FSDP_SPEED),
    RUNTIME,
    relative("Runtime Scale Factor", RUNTIME, inverse=True),
    figure("Loss", "train_loss", "{:.4f}"),
    figure("GPU Memory Allocated (GB)", "gpu_peak_mib", GB, MIB_IN_GB),
)
CUSTOM = (
    figure("Samples/s (Default)", OVERALL),
    figure("Samples/s (Callback)", SPEED),
    figure("GPU Memory (GB, Default)", "gpu_peak_mib", GB, MIB_IN_GB),
    figure("GPU Memory (GB, Callback)", "torch_average_allocated_mib", GB, MIB_IN_GB),
    figure("GPU Utilization (%)", "gpu_utilization_pct", "{:.0f}"),
    figure("Loss", "train_loss", "{:.4f}"),
    RUNTIME,
)
SCALE_NOTE = "A scale factor is that against the first row; of the runtime it is how many times shorter it is."
LOGGERS_NOTE = (
    "Default is what the Trainer and wandb log by themselves: samples/s with evaluation in their time, and the memory "
    "in use on a GPU at its peak. Callback is training alone, and what torch had allocated on average."
)


def _setup(key: Any) -> tuple[str, ...]:
    return ("Single Node, Single GPU" if key == 1 else f"Single Node, {key} GPUs", str(key))


def _fsdp(measures: tuple[Measure, ...], note: str) -> Layout:
    corner = ("Setup", "Total GPUs")
    return Layout("FSDP on one node", corner, _workers, (1, 2, 4, 8), _setup, measures, note=lambda groups: note)


def _across_nodes(layout: Layout, first: str) -> Layout:
    """The same with nodes of one GPU each."""

    def label(key: Any) -> tuple[str, ...]:
        return (first if key == 1 else f"{key} Node", str(key))

    return replace(layout, title="FSDP across nodes", key=_nodes, label=label)


SHARDINGS = ("no_shard", "shard_grad_op", "hybrid_shard", "full_shard")
ON_ONE_NODE = _fsdp(FSDP, SCALE_NOTE)
CUSTOM_ON_ONE_NODE = _fsdp(CUSTOM, LOGGERS_NOTE)

LAYOUTS: dict[str, Layout] = {
    "ddp/baseline": replace(DDP_MULTI_GPU, title="ResNet-50 on one GPU", lines=(1,)),
    "ddp/multi_gpu": DDP_MULTI_GPU,
    "ddp/multi_node": Layout(
        "Multi-Node Scaling (Fixed GPUs per Node)", ("Config",), _nodes, (1, 2, 4, 8),
        lambda key: ("1 Node (baseline)" if key == 1 else f"{key} Nodes",), _ddp("1N"),
    ),
    "deepspeed/baseline": Layout(
        "Baseline without DeepSpeed", ("",), _one, ("",), lambda key: ("Your Value",), SHEET, across=False,
        printed={"": SHEET_PRINTED}, note=_both,
    ),
    "deepspeed/zero_offload_single_gpu": _stages("ZeRO Stage Comparison", (1, True), (2, True), (3, True)),
    "deepspeed/pin_memory": _stages("Stage 2 with and without pin_memory", (2, True), (2, "pinned")),
    "deepspeed/zero_stages": _stages(
        "ZeRO stages with and without offloading", *((n, offload) for n in range(4) for offload in (False, True))
    ),
    "deepspeed/multi_gpu_weak_scaling": Layout(
        "Weak scaling on one node", ("",), _workers, (2, 4, 8), lambda key: (f"{key} GPUs",), (SAMPLES, LOSS, *GPU_MIB),
        across=False,
    ),
    "deepspeed/two_gpu_stages": Layout(
        "2-GPU ZeRO Stage Comparison", ("",), _stage,
        tuple((n, offload) for n in (1, 2, 3) for offload in (False, True)),
        lambda key: (_stage_label(key)[0].removeprefix("ZeRO "),), (SAMPLES, LOSS, *GPU_MIB, *CPU_MIB), across=False,
    ),
    "deepspeed/multi_node_weak_scaling": Layout(
        "Weak Scaling Across Nodes", ("",), _nodes, (2, 4, 8), lambda key: (f"{key} nodes",), (SAMPLES, LOSS, *GPU_GIB),
        across=False,
    ),
    "deepspeed/model_sizes": Layout(
        "ZeRO stages on each BLOOM", ("Model", "DeepSpeed Config"),
        lambda group: (group.setting("model"), *_stage(group)),
        tuple((size, stage, True) for size in SIZES for stage in (1, 2, 3)),
        lambda key: (key[0], *_stage_label(key[1:])), STAGES, note=_quiz_of_sizes,
    ),
    "fsdp/baseline": Layout(
        "Baseline without FSDP", ("",), _one, ("",), lambda key: ("Your Value",), FSDP_SHEET, across=False,
        printed={"": FSDP_PRINTED}, note=_other_batch,
    ),
    "fsdp/multi_gpu": ON_ONE_NODE,
    "fsdp/multi_node": _across_nodes(ON_ONE_NODE, "Single Node"),
    "fsdp/sharding": Layout(
        "Sharding strategies and offloading", ("Sharding",),
        lambda group: (group.setting("sharding"), group.setting("offload")),
        tuple((name, offload) for name in SHARDINGS for offload in (False, True)),
        lambda key: (key[0].upper() + OFFLOADING.get(key[1], "").replace("Offloading", "CPU off-load"),),
        (FSDP_SPEED, RUNTIME, figure("Loss", "train_loss", "{:.4f}"), *GPU_MIB[:2], *CPU_MIB[:1]),
    ),
    "fsdp/custom_single": Layout(
        "Custom GPT on one GPU", ("",), _one, ("",), lambda key: ("Your Value",), FSDP_SHEET, across=False,
    ),
    "fsdp/custom_multi_gpu": CUSTOM_ON_ONE_NODE,
    "fsdp/custom_multi_node": _across_nodes(CUSTOM_ON_ONE_NODE, "Single Node, Single GPU"),
    "fsdp/custom_weak_scaling": Layout(
        "Weak scaling by model", ("GPUs",), _workers, (2, 4, 8, 16), lambda key: (str(key),),
        (
            setting("Num Layers", "model.num_layers"), setting("Per-GPU Batch", "micro_batch_size"),
            parameters("Total Params"), replace(FSDP_SPEED, title="Samples/s (Callback)"), CUSTOM[3],
            CUSTOM[4], CUSTOM[5], RUNTIME, figure("Efficiency (%)", EFFICIENCY),
        ),
        note=lambda groups: "Efficiency is ideal time over real time, against the first row.",
    ),
}  # fmt: skip
