"""Metrics of a training, as in ``metrics`` of ``record.json``."""

from __future__ import annotations  # distexp.reference prints them as they are written

from dataclasses import dataclass
from typing import Any

from distexp.config.fields import key

PARTS = {
    "matmul": "matrix kernels",
    "other_kernels": "other kernels",
    "exposed_communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "launch_idle": "GPU idle: slow launches",
    "data_wait": "data wait",
    "optimizer": "optimizer",
    "host": "host work",
    "bubble": "pipeline bubble",
}
"""Titles of the parts by name. ``metrics.step_breakdown`` has each one in milliseconds, as ``matmul_ms``."""

HIDDEN = "hidden_communication"
"""Communication at the same time as kernels. It is not part of the sum."""


@dataclass
class Metrics:
    """Metrics of the training. Speed excludes the warmup steps unless noted otherwise."""

    train_loss: float | None = key(None, "Mean loss of all steps, as in the Hugging Face Trainer.")
    train_router_loss: float | None = key(
        None, "Part of `train_loss` that is the router loss of a mixture of experts. Null: the model has none."
    )
    train_losses: list[float] = key([], "Mean training loss of each epoch.")
    eval_loss: float | None = key(None, "Loss of the last evaluation.")
    eval_losses: list[float] = key([], "Loss of each evaluation.")
    eval_runtime: float | None = key(None, "Duration of the last evaluation.", unit="seconds")
    train_runtime: float | None = key(
        None, "Duration of the training with evaluation and saving, as in the Trainer.", unit="seconds"
    )
    train_samples_per_second: float | None = key(
        None, "Training speed without evaluation, after `train.measure_after_step`.", unit="samples/s"
    )
    train_samples_per_second_overall: float | None = key(
        None, "Training speed with evaluation, as in the Trainer.", unit="samples/s"
    )
    train_steps_per_second: float | None = key(None, "Optimizer steps per second.", unit="steps/s")
    eval_samples_per_second: float | None = key(None, "Speed of the last evaluation.", unit="samples/s")
    steps_per_epoch: int | None = key(None, "Optimizer steps per epoch.")
    total_steps: int | None = key(None, "Optimizer steps of the training.")
    tokens_per_second: float | None = key(None, "Training speed in tokens without padding.", unit="tokens/s")
    padding_share: float | None = key(
        None,
        "Fraction of the positions of the training batches that is padding. Padding samples count as padding. "
        "null if a custom collate function counts no tokens.",
    )
    step_time_s: dict[str, float] | None = key(
        None,
        "Duration of a step.",
        unit="seconds",
        parts={".p50": "Median.", ".p90": "90th percentile.", ".max": "Longest step."},
    )
    speed_error: dict[str, float] | None = key(
        None,
        "Standard error of the training speed, from the means of blocks of consecutive steps.",
        parts={".relative": "Error divided by the speed.", ".blocks": "Number of blocks."},
    )
    expert_load: float | None = key(
        None,
        "Largest share of the tokens of a layer that one expert got in the steps of this attempt, with "
        "`parallel.expert`. If all got equally many, it is 1 / experts.",
    )
    communication: dict[str, Any] | None = key(
        None,
        "Communication in the steps of `train.profile_steps`, as means over the ranks. These steps "
        "include the overhead of the profiler.",
        parts={
            ".share": "Fraction of the step time in collectives, with hidden ones and with waiting for other ranks.",
            ".exposed_share": "The part of `share` that no computation hides, also with waiting for other ranks.",
            ".profiled_steps": "Number of profiled steps.",
            ".first_step": "First step of the profiler, its warm-up, counted from 1. The profiled steps follow.",
            ".step_s": "Duration of a profiled step, in seconds.",
            ".by_collective": "Seconds of a step for each kind of collective.",
            ".ranks[]": "`rank`, `share` and `exposed_share` of each rank.",
            ".note": "Why values are null.",
        },
    )
    step_breakdown: list[dict[str, Any]] | None = key(
        None,
        "Where the median profiled step goes, for each rank. All parts but the hidden communication add up to it.",
        parts={
            "[].rank": "Rank.",
            "[].step_ms": "Duration of the step, in ms.",
            "[].matmul_ms": "Matrix products, convolutions and attention, in ms.",
            "[].other_kernels_ms": "Other kernels and copies, in ms.",
            "[].exposed_communication_ms": "Collectives that no computation hides, in ms.",
            "[].waiting_ms": "Collectives that wait for the slowest rank, in ms. 0 if unknown: several groups of gloo.",
            "[].launch_idle_ms": "GPU without work because the CPU launches kernels too slowly, in ms. Null: no GPU.",
            "[].data_wait_ms": "Waiting for data, in ms.",
            "[].optimizer_ms": "Clipping and update of the weights, in ms.",
            "[].optimizer_idle_ms": "Part of it without work for the GPU, in ms. Null: no GPU.",
            "[].host_ms": "Other work of the CPU, in ms.",
            "[].bubble_ms": "Waiting for another stage of a pipeline, with the transfer, in ms. Null: no pipeline.",
            "[].hidden_communication_ms": "Collectives behind computation, in ms. It is not part of the sum.",
            "[].profiled_step_ms": "Duration with the overhead of the profiler, in ms.",
            "[].includes_overhead": "Whether the parts include the overhead of the profiler.",
            "[].launches": "Calls that launch kernels in the step. Null: no GPU.",
            "[].cpu_busy_ms": "Time in the profiled step without waits of the CPU for the GPU, in ms. Null: no GPU.",
            "[].without_core_ms": "Time inside the parts in which the training thread of a CPU was ready to run, and "
            "had no core, in ms. Null: a GPU, or not counted by the kernel.",
        },
    )
    explanation: dict[str, Any] | None = key(
        None,
        "Bottleneck of the profiled step.",
        parts={
            ".loss": "Part of the step that is the bottleneck, or `compute`.",
            ".share": "Fraction of the step.",
            ".sentence": "What the profile shows.",
            ".try": "Overrides that may reduce it.",
            ".larger_global_batch": "Those of them that make the global batch larger, and so change the training.",
            ".reasons": "Why each of them may help, by the overrides.",
        },
    )
    step_times_by_rank: list[dict[str, Any]] | None = key(
        None,
        "Duration of a step on each rank.",
        parts={
            "[].rank": "Rank.",
            "[].p50_s": "Median, in seconds.",
            "[].p90_s": "90th percentile, in seconds.",
            "[].max_s": "Longest step, in seconds.",
            "[].watched_p50_s": "Median of the ordinary steps that were watched for slow ranks, in seconds. Ordinary "
            "steps follow another measured step directly. `step_times/` has all. Null: none.",
            "[].unwatched_p50_s": "Median of the other ordinary steps, in seconds. Null: none.",
            "[].own_ms": "Median time without waiting for other ranks, in ms. On a GPU without a profile it does not "
            "contain the work of the CPU, and may be too short. Null: unknown.",
        },
    )
    slow_rank_watch: str | None = key(
        None, "Whether steps were watched for slow ranks: `on`, `off` (`measure.slow_ranks=false`), or `one worker`."
    )
    stragglers: list[dict[str, Any]] | None = key(
        None,
        "Ranks that are slower than the others, and GPUs with a problem. Null: not checked.",
        parts={
            "[].rank": "Rank.",
            "[].gpu": "Index of its GPU in NVML.",
            "[].host": "Its host.",
            "[].slower_by_pct": "Percent by which its own time is longer than that of the others. Null: unknown.",
            "[].is_upper_bound": "Whether the percentage may be too large, because the work of the CPUs is unknown.",
            "[].evidence": "What shows the cause.",
        },
    )
    energy: dict[str, float | None] | None = key(
        None,
        "Energy and cost of the latest attempt. Training means the steps that count for the speed.",
        parts={
            ".gpu_j": "Joules of the run's own GPUs, by NVML's energy counter. Null: a GPU has none, or uses MIG.",
            ".gpu_j_by_power": "The same, by the integral of the sampled power, as a check.",
            ".power_difference_pct": "Difference of the two, in percent of `gpu_j`.",
            ".cpu_j": "The run's part of the energy of the CPU packages, by RAPL. Null: not readable.",
            ".gpu_j_training": "Joules of the GPUs in the training alone.",
            ".cpu_j_training": "Joules of the CPUs in the training alone.",
            ".idle_w": "Power of the GPUs before the workers used them, in watts.",
            ".j_per_sample": "Joules of the training per sample: of the GPUs, or of the CPUs in a run on CPUs.",
            ".j_per_token": "The same per token without padding.",
            ".kwh": "Energy of GPUs and, if known, CPUs over the whole run, in kWh.",
            ".gpu_hours": "Number of GPUs times the duration of the run, in hours.",
            ".co2e_g": "`kwh` times `cluster.gco2_per_kwh`, in grams.",
            ".price": "`gpu_hours` times `cluster.price_per_gpu_hour`.",
        },
    )
    compile: dict[str, Any] | None = key(
        None,
        "Compilations of `train.compile` on rank 0. The first steps contain their time.",
        parts={
            ".seconds": "Time in the compiler, in seconds.",
            ".graphs": "Compiled graphs.",
            ".recompilations": "Compilations of code that was compiled before, for example for another shape.",
            ".cache_hits": "Graphs from the cache of an earlier run.",
            ".cache_misses": "Graphs that were not in the cache.",
            ".cuda_graph_skips": "Graphs for which torch did not record a CUDA graph.",
        },
    )
    watchers: dict[str, Any] | None = key(None, "Summaries of `measure.watchers`, by the name of the class.")
    micro_batch_search: dict[str, Any] | None = key(
        None,
        "Search of `train.micro_batch_size=auto`, before the training.",
        parts={
            ".chosen": "Chosen micro-batch size. Null: none fits.",
            ".candidates[]": "`micro_batch_size`, `outcome` (`fits`, `too_large`, `oom`), `samples_per_second` of a "
            "step, `peak_mib`, `base_mib` before the last forward pass, `usable_mib`.",
            ".seconds": "Duration of the search, in seconds.",
            ".stored_in": "File of the earlier search that gave the result. Null: the run searched.",
            ".skipped": "Smallest size that was not tried because it needs more memory than there is.",
            ".complete": "Whether no time limit ended the search.",
        },
    )
    data_wait_s: float | None = key(
        None, "Time that rank 0 waits for its data, over all steps. Waiting for the GPU does not count.", unit="seconds"
    )
    model_tflops_per_sample: float | None = key(
        None,
        "FLOPs of a sample without padding, forward and backward pass. They do not depend on strategy or kernels.",
        unit="TFLOP",
    )
    executed_tflops_per_sample: float | None = key(
        None, "FLOPs that run for a sample: with padding and recomputation, without skipped blocks.", unit="TFLOP"
    )
    tflops_per_device: float | None = key(None, "Achieved model FLOPs per worker.", unit="TFLOP/s")
    executed_tflops_per_device: float | None = key(None, "Achieved executed FLOPs per worker.", unit="TFLOP/s")
    matrix_ceiling_tflops: float | None = key(
        None, "The fastest large matrix product that a `distexp preflight` measured on such a device.", unit="TFLOP/s"
    )
    mfu: float | None = key(None, "Model FLOPs utilization: fraction of the datasheet's peak, from 0 to 1.")
    mfu_of_ceiling: float | None = key(None, "Model FLOPs as a fraction of `matrix_ceiling_tflops`.")
    hfu: float | None = key(None, "Executed FLOPs as a fraction of the datasheet's peak.")
    hfu_of_ceiling: float | None = key(None, "Executed FLOPs as a fraction of `matrix_ceiling_tflops`.")
    exact_match: float | None = key(
        None,
        "Exact match of SQuAD, with `train.score_answers`. A question that is too long for `dataset.max_length` counts "
        "as wrong.",
        unit="percent",
    )
    f1: float | None = key(None, "F1 of SQuAD, with `train.score_answers`.", unit="percent")
    train_accuracies: list[float] = key([], "Training accuracy of each epoch, from 0 to 1.")
    eval_accuracies: list[float] = key([], "Accuracy of each evaluation, from 0 to 1.")
    eval_top5_accuracies: list[float] = key([], "Top-5 accuracy of each evaluation. With fewer than 5 classes it is 1.")
