"""Tests of the terminal table of runs, at any width."""

from __future__ import annotations

import pytest

from distexp.config import keys as key_info
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from tests.helpers.printed_tables import header, printed, unwrapped, zero_sweep
from tests.helpers.records import add_parts, invalid, record


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
    assert "Hidden columns" not in text, "they continue below"
    assert "speedup" in text
    many = [record(n, strategy="ddp", train__seed=n % 3, train__learning_rate=n / 100) for n in range(40)]
    assert ("Hidden columns (terminal too narrow)" in printed(many, width)) == (width == 60), "not of a long table"


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
    for padded, share in zip(records, shares, strict=True):
        padded.metrics.padding_share = share
    text = printed(records)
    assert ("ding %" in header(text)) == shown
    assert not shown or "30.5 ± " in text


def test_notes_below_the_table_explain_failures() -> None:
    pinned = "offload=pinned needs a GPU: choose offload=true"
    records = [
        record(0, strategy="ddp", peak=1000.0),
        record(1, strategy="fsdp", status="oom_gpu", peak=143000.0,
               error=RunError("OutOfMemoryError", "CUDA out of memory", "train", 1)),
        invalid(2, pinned, "zero_stage=9 is unknown", strategy="ddp"),
        invalid(3, pinned, strategy="fsdp"),
        record(4, strategy="single", status="failed", error=RunError("ValueError", "bad\nvalue", "setup", 0),
               cluster__device="cuda"),
    ]  # fmt: skip
    text = unwrapped(printed(records, 300))
    assert "run 1 oom_gpu: out of GPU memory in phase train, at a peak of 143,000 of 143,771 MiB on a GPU" in text
    records[1].memory["gpu"][0]["job_peak_mib"], records[1].memory["gpu"][1:] = 1500.0, []
    records[1].memory["torch"] = []
    shared = "at a peak of 143,000 of 143,771 MiB on a GPU, 1,500 of them by this run"
    assert shared in unwrapped(printed(records, 300))
    assert "runs 2, 3 invalid: offload=pinned needs a GPU: choose offload=true" in text
    assert "run 2 invalid: zero_stage=9 is unknown" in text
    assert "run 4 failed: ValueError in phase setup: bad" in text
    assert "4 of 5 runs did not complete: 1 oom_gpu, 2 invalid, 1 failed." in text
    assert "device" not in header(printed(records, 300))  # an invalid cell was never resolved


def test_average_and_mode_of_gpu_memory_are_those_of_the_training() -> None:
    runs = [record(0, peak=50_000.0), record(1, strategy="fsdp", peak=40_000.0)]
    for entry in runs[0].memory["gpu"]:
        entry |= {"mode_mib": 1177.0, "training_average_mib": 49_000.0, "training_mode_mib": 50_000.0}
    text = printed(runs, width=240)
    assert "1,177" not in text
    lines = [line.split() for line in text.splitlines() if "completed" in line]
    assert {"49,000", "50,000"} <= set(lines[0])
    assert {"20,000", "13,333"} <= set(lines[1])


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


@pytest.mark.parametrize(("stage", "is_explained"), [(0, False), (1, True), (3, True)])
def test_the_gradients_of_zero_are_explained(stage: int, is_explained: bool) -> None:
    run = add_parts(record(0, strategy="deepspeed", deepspeed__zero_stage=stage), parameters=0.1)
    assert run.built
    run.built.zero_stage = stage
    run.memory["cpu"] = [{"node": 0, "peak_mib": 900.0, "average_mib": 900.0, "mode_mib": 900.0}]
    text = unwrapped(printed([run], width=120))
    assert ("ZeRO frees the other gradients before the update, also with stage 1." in text) == is_explained


def test_many_settings_leave_room_for_the_parts_of_the_memory() -> None:
    varied = ("dataset__train_size", "dataset__eval_size", "train__measure_after_step", "train__log_every")
    runs = [add_parts(record(n, **dict.fromkeys(varied, 10 + n)), parameters=0.1) for n in range(2)]
    for run in runs:
        run.memory["cpu"] = [{"node": 0, "peak_mib": 900.0, "average_mib": 900.0, "mode_mib": 900.0}]
    text = printed(runs, width=100)
    text = text[text.index("by part") :]
    assert text.count("parameters") == text.count("activations") == text.count("run ") == 1
    assert "Hidden columns (terminal too narrow): measure_after_step, log_every." in unwrapped(text)


def test_a_custom_strategy_section_needs_no_edit_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options of the group ``strategy`` define the sections of strategies."""
    records = [record(n, strategy=name) for n, name in enumerate(("ddp", "mine"))]
    for custom, bucket in zip(records, (25, 7), strict=True):
        custom.config["mine"] = {"bucket_mb": bucket}
    assert "bucket" in header(printed(records))
    monkeypatch.setattr(key_info, "options_of", lambda group: ["ddp", "fsdp", "mine"])
    key_info.strategy_sections.cache_clear()
    try:
        assert "bucket" not in header(printed(records))
        records[1].run.overrides.append("mine.bucket_mb=7")
        assert "bucket" in header(printed(records))
    finally:
        key_info.strategy_sections.cache_clear()


def test_zero_has_no_sign() -> None:
    text = printed([record(0, loss=-0.00001), record(1, strategy="fsdp", loss=0.5)])
    assert "0.0000" in text
    assert "-0.0000" not in text


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
