"""Tests of the terminal table of runs, at any width."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from distexp.report.data import setting_names
from distexp.report.overview_table import build_overview_table
from distexp.runs.record import RunError, RunRecord
from tests.helpers.records import add_parts, invalid, record


def printed(records: list[RunRecord], width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(build_overview_table(records))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def header(text: str) -> str:
    return text.split("─", maxsplit=1)[0]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def zero_sweep() -> list[RunRecord]:
    cells = itertools.product((1, 2, 3), (True, False))
    return [
        record(
            number,
            strategy="deepspeed",
            deepspeed__zero_stage=stage,
            offload__enabled=offload,
            speed=100.0 * stage / (1 + offload),
            peak=30000.0 / stage,
            overrides=(f"zero_stage={stage}", f"offload={offload}".lower()),
        )
        for number, (stage, offload) in enumerate(cells)
    ]


def test_varying_settings_are_columns_and_constant_ones_are_not() -> None:
    text = printed(zero_sweep())
    assert "stage" in header(text)
    assert "offload" in header(text)
    for constant in ("strategy", "precision", "workers", "seed", "model", "overrides"):
        assert constant not in header(text)
    rows = [line.split()[:3] for line in text.splitlines() if "completed" in line]
    assert rows[:2] == [["0", "1", "true"], ["1", "1", "false"]]


def test_settings_that_follow_from_the_strategy_are_not_columns() -> None:
    names = ("single", "ddp", "fsdp", "deepspeed")
    records = [record(n, strategy=name, overrides=(f"strategy={name}",)) for n, name in enumerate(names)]
    text = printed(records)
    assert "strategy" in header(text)
    for name in ("sharding", "zero", "_target_", "fsdp"):
        assert name not in header(text)


def test_what_kernels_chooses_is_no_column_unless_it_is_overridden() -> None:
    def run(number: int, strategy: str, kernels: str, compiled: object, *overrides: str) -> RunRecord:
        return record(
            number, strategy=strategy, kernels__name=kernels, train__compile=compiled,
            overrides=(f"strategy={strategy}", f"kernels={kernels}", *overrides),
        )  # fmt: skip

    chosen = [run(0, "ddp", "reference", False), run(1, "ddp", "fast", "model"), run(2, "fsdp", "fast", "blocks")]
    assert "kernels" in header(printed(chosen))
    assert "compile" not in header(printed(chosen))
    typed = [*chosen, run(3, "ddp", "fast", "graphs", "train.compile=graphs")]
    assert "compile" in header(printed(typed))
    plain = [record(n, train__compile=value) for n, value in enumerate((False, True))]
    assert "compile" in header(printed(plain)), "without kernels=fast it is a setting as any other"


def test_an_overridden_setting_is_a_column_even_if_it_follows() -> None:
    records = [
        record(0, strategy="single"),
        record(1, strategy="fsdp", fsdp__sharding="no_shard", overrides=("sharding=no_shard",)),
    ]
    assert "sharding" in header(printed(records))


def test_the_model_replaces_its_architecture_keys() -> None:
    records = [
        record(0, model__name="bloom_tiny", model__hidden_size=64, overrides=("model=bloom_tiny",)),
        record(1, model__name="gpt_tiny", model__hidden_size=128, overrides=("model=gpt_tiny",)),
    ]
    assert "hidden_size" not in header(printed(records)).replace("\n", "")
    layers = [record(n, model__num_layers=n + 2) for n in range(2)]
    assert "layers" in header(printed(layers))


def test_submission_keys_are_not_settings() -> None:
    records = [record(0, cluster__name="local"), record(1, cluster__name="slurm", cluster__cpus_per_worker=7)]
    text = printed(records)
    assert "cluster" not in header(text)
    assert "0 +1" in text  # the same training twice


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_lines_fit_the_terminal_and_rows_do_not_wrap(width: int) -> None:
    text = printed(zero_sweep(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert sum("completed" in line and not line.startswith("Each") for line in text.splitlines()) == 6
    assert "samples/s" in header(text)
    has_hidden = "Hidden columns (terminal too narrow)" in text
    assert has_hidden == (width < 140)


def test_important_columns_are_shown_at_80_characters() -> None:
    text = header(printed(zero_sweep(), 80))
    for title in ("run", "stage", "offload", "status", "loss", "samples/s", "GPU peak"):
        assert title in text


def test_columns_without_values_are_not_shown() -> None:
    text = header(printed([record(0), record(1, precision__name="bf16")]))
    for title in ("GPU", "CPU", "EM", "F1", "tokens", "util", "sample "):
        assert title not in text


@pytest.mark.parametrize(("shares", "shown"), [((0.0, 0.0), False), ((0.0, 0.61), True), ((None, None), False)])
def test_padding_is_a_column_if_a_run_has_any(shares: tuple[float | None, ...], shown: bool) -> None:
    records = [record(number, train__seed=number, overrides=(f"train.seed={number}",)) for number in range(2)]
    for each, share in zip(records, shares, strict=True):
        each.metrics.padding_share = share
    text = printed(records)
    assert ("ding %" in header(text)) == shown
    assert not shown or "30.5 ± " in text


def test_notes_below_the_table_explain_failures() -> None:
    pinned = "offload=pinned needs a GPU: choose offload=true"
    records = [
        record(0, strategy="ddp", peak=1000.0),
        record(1, strategy="fsdp", status="oom_gpu", peak=143000.0,
               error=RunError("OutOfMemoryError", "CUDA out of memory", "train", 1)),
        invalid(2, f"{pinned} | zero_stage=9 is unknown", strategy="ddp"),
        invalid(3, pinned, strategy="fsdp"),
        record(4, strategy="single", status="failed", error=RunError("ValueError", "bad\nvalue", "setup", 0),
               cluster__device="cuda"),
    ]  # fmt: skip
    text = unwrapped(printed(records, 300))
    assert "run 1 oom_gpu: out of GPU memory in phase train, at a peak of 143,000 of 143,771 MiB on a GPU" in text
    assert "runs 2, 3 invalid: offload=pinned needs a GPU: choose offload=true" in text
    assert "run 2 invalid: zero_stage=9 is unknown" in text
    assert "run 4 failed: ValueError in phase setup: bad" in text
    assert "4 of 5 runs did not complete: 1 oom_gpu, 2 invalid, 1 failed." in text
    assert "device" not in header(printed(records, 300))  # an invalid cell was never resolved


def test_repeats_with_different_seeds_show_mean_and_deviation() -> None:
    records = [
        record(3 * cell + n, strategy=strategy, train__seed=n, speed=speed + n)
        for cell, (strategy, speed) in enumerate((("ddp", 100.0), ("fsdp", 100.5), ("single", 50.0)))
        for n in range(3)
    ]
    text = unwrapped(printed(records))
    assert "101.0 ± 1.0" in text
    assert "seed" not in header(printed(records))
    assert "Speeds on CPU vary with other programs: equal runs differed by ±1.4% here (standard deviation)." in text
    fsdp, ddp = "run 3 +2 (strategy=fsdp), 101.5 samples/s", "run 0 +2 (strategy=ddp), 101.0 samples/s"
    assert f"Fastest: {fsdp}, and {ddp}, are equal within the noise of ±2.8%." in text
    assert "1.00 ± 0.01~" in text
    assert "0.50 ± 0.01 " in text
    apart = [r for r in records if r.config["strategy"]["name"] != "fsdp"]
    single = "run 6 +2 (strategy=single), 51.0 samples/s"
    assert f"Fastest: {ddp}. The next is {single}, beyond the noise of ±2.8%." in unwrapped(printed(apart))


def test_speeds_of_single_runs_on_cpu_are_not_ranked() -> None:
    """Equal runs on two busy cores had 169.5 and 289.1 samples/s."""
    cells = zip(("ddp", "fsdp", "single", "deepspeed"), (289.1, 275.0, 169.5, 50.0), strict=True)
    text = unwrapped(printed([record(n, strategy=name, speed=speed) for n, (name, speed) in enumerate(cells)]))
    assert "compare only those that differ by more than 1.8x, or use repeats=3." in text
    assert "run 0 (strategy=ddp), 289.1 samples/s, and run 1 (strategy=fsdp), 275.0 samples/s, are equal" in text
    assert "Also equal within the noise: run 2." in text
    assert "0.95~" in text
    assert "0.17 " in text
    assert "~: equal to this run within the noise." in text


def test_noise_of_repeats_holds_for_runs_without_repeats() -> None:
    twice = [record(n, run_id="a", speed=speed) for n, speed in enumerate((169.5, 289.1))]
    text = unwrapped(printed([*twice, record(2, strategy="fsdp", speed=240.0)]))
    assert "equal runs differed by ±37% here" in text
    assert "are equal within the noise of more than ±100%" in text


def test_without_repeats_the_noise_on_gpus_is_that_of_the_steps() -> None:
    runs = [record(0, speed=100.0, peak=9.0), record(1, strategy="fsdp", speed=105.0, peak=9.0)]
    text = unwrapped(printed(runs))
    assert "noise of ±" not in text
    assert "Fastest: run 1" in text
    assert "Repeat with repeats=3 to measure the noise." in text
    assert "CPU" not in text
    for run, error in zip(runs, (0.001, 0.04), strict=True):
        run.metrics.speed_error = {"relative": error, "blocks": 10.0}
    assert "are equal within the noise of ±9%." in unwrapped(printed(runs))
    runs[1].metrics.speed_error = {"relative": 0.001, "blocks": 10.0}
    assert "Fastest: run 1 (strategy=fsdp), 105.0 samples/s. The next is run 0" in unwrapped(printed(runs))


def test_a_failed_repeat_is_not_in_the_mean() -> None:
    error = RunError("ValueError", "no", "train")
    records = [
        record(0, run_id="a"),
        record(1, run_id="a", status="failed", error=error),
        record(2, strategy="fsdp"),
    ]
    text = unwrapped(printed(records))
    assert "1 of 2 completed" in text
    assert "run 1 failed: ValueError" in text


def test_a_run_that_failed_without_recording_its_gpu_is_a_repeat() -> None:
    error = RunError("WorkerDied", "gone", "setup")
    failed = record(0, run_id="a", status="failed", error=error)
    records = [failed, record(1, run_id="a", peak=9.0), record(2, strategy="fsdp", peak=9.0)]
    text = printed(records)
    assert "gpu" not in header(text)
    assert "1 of 2 completed" in text
    records[2].environment.gpu_name = "Tesla V100"  # type: ignore[union-attr]
    assert "gpu" in header(printed(records))


def test_runs_with_different_environment_settings_are_not_repeats() -> None:
    """Their run.id is equal, but the environment may be why their metrics differ."""

    def sweep_of(key: str, *values: object) -> list[RunRecord]:
        section, name = key.split("__")
        overrides = [(f"{section}.{name}={value}",) for value in values]
        return [record(n, run_id="a", overrides=overrides[n], **{key: value}) for n, value in enumerate(values)]

    for key, values in {
        "cluster__cpus_per_worker": (1, 4),
        "cluster__srun": (["--cpu-bind=none"], []),
        "measure__enabled": (True, False),
        "train__checkpoint_every": (None, "epoch"),
    }.items():
        text = printed(sweep_of(key, *values))
        assert " ± " not in text, key
        assert text.count("completed") == 2, key
    assert "cpus_" in header(printed(sweep_of("cluster__cpus_per_worker", 1, 4)))
    assert " ± " in printed(sweep_of("cluster__timeout_min", 10.0, 20.0)), "a time limit changes no metric"
    unset = [record(n, run_id="a", cluster__cpus_per_worker=n) for n in (1, 2)]
    assert " ± " in printed(unset), "the default share of the cores is not a choice"


def test_invalid_cells_are_not_repeats_of_each_other() -> None:
    """Their settings may be equal, because they are never resolved."""
    cells = [invalid(n, "no", overrides=("strategy=ddp", f"zero_stage={n}")) for n in (1, 2)]
    assert printed([*cells, record(0)]).count(" invalid") == 4, "two rows, a note and a summary"
    seeds = [invalid(n, "no", overrides=("strategy=ddp", f"train.seed={n}")) for n in (1, 2)]
    assert "1 +1" in printed([*seeds, record(0)])


def test_a_failed_run_keeps_the_variables_of_its_configuration() -> None:
    error = RunError("WorkerDied", "gone", "setup")
    passive = {"cluster__environment": {"OMP_WAIT_POLICY": "passive"}, "run_id": "a"}
    runs = [
        record(0, run_id="a", cluster__environment={"OMP_WAIT_POLICY": "active"}),
        record(1, status="failed", error=error, **passive),
    ]
    rows = [line.split()[:3] for line in printed(runs).splitlines() if line.startswith(("  0", "  1"))]
    assert rows == [["0", "active", "completed"], ["1", "passive", "failed"]]


def test_memory_peaks_during_setup_and_few_measured_steps_are_reported() -> None:
    runs = [record(n, strategy=name, train__measure_after_step=5) for n, name in enumerate(("ddp", "deepspeed"))]
    for run, setup in zip(runs, (900.0, 4300.0), strict=True):
        run.memory["cpu"] = [{"node": 0, "peak_mib": setup, "phases": {"setup": setup, "train": 1400.0}}]
        run.metrics.total_steps = 30
    text = unwrapped(printed(runs))
    assert "Run 1 had its memory peak during setup. After setup its peak was 1,400 MiB. DeepSpeed compiles" in text
    assert "Run 0 had" not in text
    assert "Fewer than 5 steps" not in text
    runs[1].metrics.total_steps = 6
    assert "Fewer than 5 steps were measured in run 1." in unwrapped(printed(runs))


def test_average_and_mode_of_gpu_memory_are_those_of_the_training() -> None:
    runs = [record(0, peak=50_000.0), record(1, strategy="fsdp", peak=40_000.0)]
    for entry in runs[0].memory["gpu"]:
        entry |= {"mode_mib": 1177.0, "training_average_mib": 49_000.0, "training_mode_mib": 50_000.0}
    text = printed(runs, width=240)
    assert "1,177" not in text
    lines = [line.split() for line in text.splitlines() if "completed" in line]
    assert {"49,000", "50,000"} <= set(lines[0])
    assert {"20,000", "13,333"} <= set(lines[1]), "an older record has them over the whole run only"


def test_parts_of_the_memory_have_a_table_if_the_processes_hide_them() -> None:
    runs = [add_parts(record(n, strategy=name), parameters=0.1 / (1 + n)) for n, name in enumerate(("ddp", "fsdp"))]
    for run, peak in zip(runs, (900.0, 901.0), strict=True):
        run.memory["cpu"] = [{"node": 0, "peak_mib": peak, "average_mib": peak, "mode_mib": peak}]
    text = printed(runs, width=120)
    assert "Memory of one worker by part (MiB)" in text
    rows = [line.split() for line in text[text.index("by part") :].splitlines()]
    assert ["0", "ddp", "0.101", "0.101", "0.202", "2.000", "2.404", "900"] in rows
    assert ["1", "fsdp", "0.051", "0.051", "0.101", "2.000", "2.202", "901"] in rows
    large = [add_parts(record(n, peak=1000.0), parameters=200.0) for n in range(2)]
    assert "by part" not in printed(large), "the peak of a GPU shows them"


def test_many_settings_leave_room_for_the_parts_of_the_memory() -> None:
    varied = ("dataset__train_size", "dataset__eval_size", "train__measure_after_step", "train__log_every")
    runs = [add_parts(record(n, **dict.fromkeys(varied, 10 + n)), parameters=0.1) for n in range(2)]
    for run in runs:
        run.memory["cpu"] = [{"node": 0, "peak_mib": 900.0, "average_mib": 900.0, "mode_mib": 900.0}]
    text = printed(runs, width=100)
    text = text[text.index("by part") :]
    assert text.count("parameters") == text.count("activations") == text.count("run ") == 1
    assert "Hidden columns (terminal too narrow): measure_after_step, log_every." in unwrapped(text)


def test_the_summary_keeps_models_apart() -> None:
    runs = [
        record(2 * n + m, model__name=name, strategy=strategy, train__micro_batch_size=4 + 4 * m)
        for n, name in enumerate(("gpt_tiny", "bloom_tiny"))
        for m, strategy in enumerate(("ddp", "fsdp"))
    ]
    text = unwrapped(printed(runs))
    assert "Global batch sizes differ (gpt_tiny on squad_sample): " in text
    assert "Global batch sizes differ (bloom_tiny on squad_sample): " in text
    assert "Only runs of gpt_tiny on squad_sample have one." in text


def test_an_environment_variable_distinguishes_runs() -> None:
    records = [record(n, run_id="a", peak=9.0) for n in range(4)]
    for each in records[1:]:
        assert each.environment is not None
        each.environment.variables = {"NCCL_ALGO": "Ring", "NCCL_VERSION": f"2.{each.run.number}"}
    text = printed(records)
    assert "NCCL_" in header(text)
    rows = [line.split()[:4] for line in text.splitlines() if "completed" in line]
    assert rows == [["0", "1", "-", "completed"], ["1", "+2", "3", "Ring"]]


def test_variables_set_by_torchrun_do_not_distinguish_runs() -> None:
    records = [record(n, run_id="a", peak=9.0) for n in range(2)]
    set_by_torchrun = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCHELASTIC_RUN_ID": "none", "NCCL_DEBUG": "WARN"}
    assert records[1].environment is not None
    records[1].environment.variables = set_by_torchrun
    text = printed(records)
    assert "0 +1" in text
    assert "TORCH" not in text


def test_a_custom_strategy_section_needs_no_edit_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the group ``strategy`` define the sections of strategies."""
    records = [record(n, strategy=name) for n, name in enumerate(("ddp", "mine"))]
    for each, bucket in zip(records, (25, 7), strict=True):
        each.config["mine"] = {"bucket_mb": bucket}
    assert "bucket" in header(printed(records))
    monkeypatch.setattr(setting_names, "options_of", lambda group: ["ddp", "fsdp", "mine"])
    setting_names.strategy_sections.cache_clear()
    try:
        assert "bucket" not in header(printed(records))
        records[1].run.overrides.append("mine.bucket_mb=7")
        assert "bucket" in header(printed(records))
    finally:
        setting_names.strategy_sections.cache_clear()


def test_speedup_and_efficiency_name_their_baseline() -> None:
    records = [
        record(0, status="failed", error=RunError("ValueError", "no"), strategy="fsdp", cluster__device="cuda"),
        *(
            record(n, cluster__nodes=nodes, speed=speed, cluster__device="cuda")
            for n, nodes, speed in ((1, 1, 100.0), (2, 2, 180.0), (3, 4, 320.0))
        ),
    ]
    text = unwrapped(printed(records))
    assert "1.80 90" in text
    assert "3.20 80" in text
    assert "Speedup: samples/s relative to run 1 (" in text
    flat = unwrapped(printed([record(0, model__name="resnet_tiny"), record(1), record(2, strategy="fsdp")]))
    assert "Speedup: samples/s relative to run 1 (" in flat, "the first task that two runs share"
    flat = printed([record(0), record(1, strategy="fsdp")])
    assert "effi" not in header(flat)


def scaled(*threads: int, speeds: tuple[float, ...], cores: int = 2) -> list[RunRecord]:
    """Return runs on 1, 2, 4 ... workers with these threads per worker."""
    runs = [
        record(n, cluster__workers_per_node=2**n, cluster__cpus_per_worker=count, speed=speeds[n])
        for n, count in enumerate(threads)
    ]
    for run in runs:
        assert run.environment is not None
        run.environment.cpu_count = cores
    return runs


def test_an_efficiency_above_ideal_means_a_slow_baseline() -> None:
    runs = scaled(2, 2, speeds=(10.0, 91.8), cores=4)
    text = unwrapped(printed(runs))
    assert "Efficiency 459% is above 100%: do not trust the baseline, run 0." in text
    assert "Likely reason: its 2 threads per worker wait on busy cores. Set cluster.cpus_per_worker=1." in text
    runs = scaled(1, 1, speeds=(10.0, 91.8))
    assert "Likely reason: other programs used its cores. Repeat with repeats=3." in unwrapped(printed(runs))
    for run in runs:
        run.config["cluster"]["device"] = "cuda"
        run.memory["torch"] = [{"rank": 0, "alloc_retries": 3}]
    assert "Likely reason: its GPU memory was nearly full." in unwrapped(printed(runs))
    assert "do not trust" not in printed(scaled(1, 1, speeds=(100.0, 208.0)))


def test_baselines_have_the_same_threads_per_worker() -> None:
    text = unwrapped(printed(scaled(2, 1, speeds=(10.0, 91.8))))
    assert "effi-" not in text
    assert "No efficiency for runs 0, 1: their threads per worker differ (1, 2)." in text
    assert "set cluster.cpus_per_worker=1 for all runs." in text
    text = unwrapped(printed(scaled(2, 1, 1, speeds=(10.0, 100.0, 180.0), cores=4)))
    assert "No efficiency for run 0:" in text
    assert " 90 " in text, "run 2 relative to run 1"
    on_gpus = [record(n, cluster__workers_per_node=n, cluster__cpus_per_worker=8 // n, peak=9.0) for n in (1, 2)]
    assert "effi-" in printed(on_gpus), "threads of the CPU hardly matter on GPUs"


def test_more_workers_than_cores_are_reported() -> None:
    text = unwrapped(printed(scaled(1, 1, 1, speeds=(100.0, 190.0, 200.0))))
    assert "More workers than CPU cores in run 2 (for example 4 on 2)." in text
    assert "More workers" not in printed(scaled(1, 1, speeds=(100.0, 190.0)))


def test_small_models_are_named_as_stand_ins() -> None:
    runs = [
        record(n, model__name="bloom_560m", scale__name="tiny", strategy=name) for n, name in enumerate(("ddp", "fsdp"))
    ]
    assert "Model: tiny stand-in for bloom_560m, 1,000 parameters." in unwrapped(printed(runs))
    assert "stand-in" not in printed([record(n, train__seed=n) for n in range(2)])
    assert "stand-in" not in printed([record(n, scale__name="tiny") for n in range(2)]), "bloom_tiny is tiny anyway"


def test_zero_has_no_sign() -> None:
    text = printed([record(0, loss=-0.00001), record(1, strategy="fsdp", loss=0.5)])
    assert "0.0000" in text
    assert "-0.0000" not in text


def test_the_summary_follows_the_metrics() -> None:
    def summary(first: float, second: float) -> str:
        return unwrapped(
            printed([record(0, peak=first, speed=first), record(1, strategy="fsdp", peak=second, speed=second)])
        )

    assert "Fastest: run 1 (strategy=fsdp), 2,000.0 samples/s." in summary(1000, 2000)
    assert "Lowest peak GPU memory: run 0 (strategy=ddp), 1,000 MiB." in summary(1000, 2000)
    assert "Fastest: run 0 (strategy=ddp)" in summary(2000, 1000)
    assert "Lowest peak GPU memory: run 1 (strategy=fsdp), 1,000 MiB." in summary(2000, 1000)


def test_different_tasks_are_ranked_separately() -> None:
    records = [record(0, speed=10), record(1, strategy="fsdp", speed=20)]
    records += [record(2, model__name="gpt", speed=900), record(3, model__name="gpt", strategy="fsdp", speed=300)]
    text = unwrapped(printed(records))
    assert "Fastest (bloom_tiny on squad_sample): run 1 (" in text
    assert "Fastest (gpt on squad_sample): run 2 (" in text
    assert "90.00" not in text, "a speedup is relative to a run of the same task"


def test_nearly_equal_metrics_are_called_equal() -> None:
    text = unwrapped(printed([record(0, speed=100.0, peak=1000), record(1, strategy="fsdp", speed=100.2, peak=1003)]))
    assert "100.2 samples/s. Equal within 0.5%: run 0 (strategy=ddp), 100.0 samples/s." in text
    assert "run 0 (strategy=ddp), 1,000 MiB. Equal within 0.5%: run 1 (strategy=fsdp), 1,003 MiB." in text


def test_different_global_batches_are_reported() -> None:
    records = [record(0, strategy="single", train__micro_batch_size=8), record(1, train__micro_batch_size=16)]
    text = unwrapped(printed(records))
    assert "Global batch sizes differ: 16 in run 0, 32 in run 1. Their losses are not comparable." in text
    assert "Global batch" not in printed([record(0), record(1, strategy="fsdp")])


def test_a_narrow_terminal_prefers_metrics_to_minor_settings() -> None:
    keys = ("seed", "micro_batch_size", "num_epochs", "warmup_steps", "learning_rate", "log_every", "max_steps")
    records = [record(n, model__name=f"model_{n}", **{f"train__{key}": n + 1 for key in keys}) for n in range(3)]
    first = header(printed(records, 80))
    assert "samples/s" in first
    assert "status" in first
    assert "warmup" not in first


def test_markup_in_messages_is_printed_as_text() -> None:
    failed = record(0, status="failed", error=RunError("ValueError", "use [bold]x[/bold] and [/nothing]"))
    assert "use [bold]x[/bold] and [/nothing]" in printed([failed])


def test_no_run_and_a_single_run_can_be_printed() -> None:
    assert "completed" in printed([record(0)])
    assert printed([]) is not None


def scaling_exercise(exercise: str, *sizes: int) -> list[RunRecord]:
    """Return the records of an exercise; the last run is invalid."""
    runs = [record(n, cluster__workers_per_node=n, strategy="fsdp", speed=1234.5 * n, peak=23456.0) for n in sizes[:-1]]
    runs.append(invalid(sizes[-1], f"cluster.workers_per_node={sizes[-1]} is too many", strategy="fsdp"))
    runs[-1].config["cluster"]["workers_per_node"] = sizes[-1]
    for one in runs:
        one.config["exercise"] = exercise
    return runs


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("exercise", "words"),
    {
        "fsdp/custom_multi_gpu": ("Total", "Samples/s", "(Callback)", "Utilization", "Runtime", "4,938.0", "24.60"),
        "ddp/multi_gpu": ("Throughput", "Scaling", "(img/s)", "invalid", "23,456", "(baseline)", "22,458.63"),
        "deepspeed/multi_gpu_weak_scaling": ("Samples/sec", "Average", "GPUs", "23,456"),
        "fsdp/custom_weak_scaling": ("Utilization", "Efficiency", "Runtime"),
    }.items(),
)
def test_exercise_tables_break_no_word_and_drop_no_column(exercise: str, words: tuple[str, ...], width: int) -> None:
    _, _, table = printed(scaling_exercise(exercise, 1, 2, 4, 8), width).partition(f"({exercise})")
    assert max(map(len, table.splitlines())) <= width
    assert set(words) <= set(table.split())
    assert unwrapped(table).count("[1] cluster.workers_per_node=8 is too many") == 1


@pytest.mark.parametrize("width", [40, 60, 80])
def test_columns_that_a_quiz_asks_for_are_never_hidden(width: int) -> None:
    runs = scaling_exercise("ddp/multi_gpu", 1, 2, 4, 8)
    for run in runs[:-1]:
        run.metrics.communication = {"share": 0.25}
        run.metrics.eval_accuracies = [0.5]
    text, _, _ = printed(runs, width).partition("(ddp/multi_gpu)")
    table, _, hidden = text.partition("Hidden columns")
    for title in ("workers", "loss", "samples/s", "nication %", "speedup"):
        assert title in table, title
    assert "runtime s" in hidden
    assert max(map(len, table.splitlines())) <= width
