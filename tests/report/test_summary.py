"""Tests of the sentences below the table of runs."""

from __future__ import annotations

from pathlib import Path

from distexp.report.data.answer import build_tiles, describe_tradeoff, headline, recommended, repeat_command
from distexp.report.data.metrics import CPU_PEAK
from distexp.report.data.overview import Overview
from distexp.report.data.reasons import reasons
from distexp.report.data.rows import load_rows
from distexp.report.figures import build_figures, count_leading
from distexp.report.traces import load_traces
from tests.helpers.printed_tables import printed, unwrapped
from tests.helpers.records import record
from tests.helpers.report_sweeps import enrich, growing_sweep, with_traces


def test_memory_peaks_during_setup_and_few_measured_steps_are_reported() -> None:
    runs = [record(n, strategy=name, train__measure_after_step=5) for n, name in enumerate(("ddp", "deepspeed"))]
    for run, setup in zip(runs, (900.0, 4300.0), strict=True):
        run.memory["cpu"] = [
            {"node": 0, "peak_mib": setup, "phases": {"setup": setup, "train": 1400.0, "done": 4200.0}}
        ]
        run.metrics.total_steps = 30
    text = unwrapped(printed(runs))
    assert "Run 1 had its memory peak during setup. After setup its peak was 1,400 MiB. DeepSpeed compiles" in text
    assert "Run 0 had" not in text
    assert "Fewer than 5 steps" not in text
    runs[1].metrics.total_steps = 6
    assert "Fewer than 5 steps were measured in run 1." in unwrapped(printed(runs)), "a single step has no error"
    runs[0].metrics.speed_error = {"relative": 0.1, "blocks": 4.0}
    runs[1].metrics.speed_error = {"relative": 0.1, "blocks": 5.0}
    assert "Fewer than 5 steps were measured in run 0." in unwrapped(printed(runs)), (
        "steps of the profiler do not count"
    )


def test_a_speed_from_one_step_decides_nothing() -> None:
    runs = [record(n, strategy=name, speed=speed) for n, name, speed in ((0, "ddp", 10.0), (1, "fsdp", 40.0))]
    for run in runs:
        run.config["train"]["measure_after_step"] = 5
    for steps, is_decided in ((6, False), (30, True)):
        for run in runs:
            run.metrics.total_steps = steps
        sentence = next(iter(headline(Overview.from_records(runs))))
        assert sentence.startswith("Take fsdp") is is_decided, sentence
        assert sentence.startswith("Not decided") is not is_decided


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


def test_small_models_are_named_as_stand_ins() -> None:
    runs = [
        record(n, model__name="bloom_560m", scale__name="tiny", strategy=name) for n, name in enumerate(("ddp", "fsdp"))
    ]
    assert "Model: tiny stand-in for bloom_560m, 1,000 parameters." in unwrapped(printed(runs))
    assert "stand-in" not in printed([record(n, train__seed=n) for n in range(2)])
    assert "stand-in" not in printed([record(n, scale__name="tiny") for n in range(2)]), "bloom_tiny is tiny anyway"


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


def test_a_price_and_a_co2e_that_are_missing_have_a_reason() -> None:
    asked = {"cluster__price_per_gpu_hour": 2.5, "cluster__gco2_per_kwh": 380.0}
    text = unwrapped(printed([record(n, **asked, train__seed=n) for n in range(2)]))
    assert text.count("No price: cluster.price_per_gpu_hour is for GPUs, and the run used CPUs.") == 1
    unknown = "No CO2e: the energy of the CPUs (RAPL; on most systems only root can read it) is unknown."
    assert text.count(unknown) == 1
    unmeasured = unwrapped(printed([record(0, **asked, measure__enabled=False)]))
    assert "No CO2e: measure.enabled=false." in unmeasured
    assert "RAPL" not in unmeasured
    measured = record(0, **asked, peak=1000.0)
    measured.metrics.energy = {"kwh": 1.0, "co2e_g": 380.0, "price": 2.5}
    for run in (record(0), measured, record(0, status="invalid", **asked)):
        assert "No price" not in unwrapped(printed([run]))
        assert "No CO2e" not in unwrapped(printed([run]))


def test_the_train_loss_of_several_epochs_is_defined() -> None:
    runs = [record(0), record(1, strategy="fsdp")]
    assert "Train loss:" not in printed(runs)
    runs[0].metrics.train_losses = [3.0, 1.0]
    assert "Train loss: mean of all steps, as in the Hugging Face Trainer. Each row" in unwrapped(printed(runs))


def test_the_cards_of_the_page_name_no_best_trial_of_a_search() -> None:
    """A search compares its trials itself: the winner is in choose.json."""
    runs = [record(0, peak=9.0), record(1, strategy="fsdp", speed=400.0, peak=20.0)]
    assert {"fastest", "smallest: peak GPU memory"} <= {tile.name for tile in build_tiles(Overview.from_records(runs))}
    for run in runs:
        run.config["command"] = "choose"
    overview = Overview.from_records(runs)
    assert [*build_tiles(overview), *headline(overview)] == []


def test_the_answer_of_one_training_on_several_sizes_is_its_scaling(tmp_path: Path) -> None:
    overview = Overview.from_rows(load_rows([growing_sweep(tmp_path)])[0])
    assert list(headline(overview)) == ["8 workers are 5.20x as fast as 1, which is 65% of the ideal."]
    assert repeat_command(overview) == "distexp cluster.nodes=4 cluster.workers_per_node=2"
    (tmp_path / "command.json").write_text('{"words": ["--config-dir", "conf"]}')
    assert repeat_command(overview) == "distexp cluster.nodes=4 cluster.workers_per_node=2 --config-dir conf"
    figures = build_figures(overview, load_traces(overview))
    assert (figures[0].name, figures[0].finding) == ("scaling", next(headline(overview)).rstrip("."))
    assert count_leading(overview, figures) == 1
    noisy = [row.record for row in overview.rows]
    for run in noisy:
        run.metrics.speed_error = {"relative": 0.5, "blocks": 10.0}
    overview = Overview.from_records(noisy)
    assert list(headline(overview)) == []
    assert build_figures(overview, [])[0].finding == ""


def test_the_answer_of_a_run_is_where_its_memory_goes(tmp_path: Path) -> None:
    overview = Overview.from_rows(load_rows([with_traces(tmp_path, [enrich(record(0, peak=30000.0))])])[0])
    assert list(headline(overview)) == ["ddp on 2 workers: 100.0 samples/s and 30,000 MiB peak GPU memory."]
    figures = build_figures(overview, load_traces(overview))
    assert [figure.name for figure in figures[: count_leading(overview, figures)]] == ["gpu_memory", "cpu_memory"]
    assert figures[0].finding == "GPU memory peaks in the train phase at 30,000 MiB"
    assert [tile.value for tile in build_tiles(overview)] == ["100.0 samples/s", "30,000 MiB", "20 s"]


def test_the_answer_of_a_map_names_settings_and_states_whether_and_why_a_run_is_the_fastest() -> None:
    """Four settings vary, of which one follows from another, and another one is 1 or false in most runs."""
    cells = {
        ("ddp", 16, 1, False): (170.0, 58000.0), ("ddp", 4, 1, False): (90.0, 19000.0),
        ("ddp", 1, 1, False): (25.0, 17000.0), ("fsdp", 16, 1, False): (130.0, 48000.0),
        ("fsdp", 16, 2, False): (45.0, 22000.0), ("fsdp", 16, 1, True): (110.0, 34000.0),
    }  # fmt: skip
    runs = []
    for n, ((strategy, size, tensor, checkpoints), (speed, peak)) in enumerate(cells.items()):
        run = record(n, strategy=strategy, speed=speed, peak=peak)
        run.config["train"] |= {"micro_batch_size": size, "activation_checkpointing": checkpoints}
        run.config["train"] |= {"global_batch_size": 32, "gradient_accumulation_steps": 16 * tensor // size}
        run.config["parallel"] |= {"tensor": tensor}
        run.metrics.speed_error = {"relative": 0.01, "blocks": 10.0}
        runs.append(run)
    overview = Overview.from_records(runs)
    assert list(headline(overview)) == [
        "Take ddp, micro_batch_size=16: it is 1.31x as fast as the next, fsdp full_shard, micro_batch_size=16, and "
        "needs 1.21x as much memory."
    ]
    sure, why = reasons(overview)
    assert sure.startswith("The difference is more than the noise between the steps of a run, ±")
    assert sure.endswith("%. Each is one run: repeats=3 shows how much equal runs differ.")
    effects = "micro_batch_size=16 is 6.80x as fast as 1; ddp is 1.31x as fast as fsdp full_shard"
    assert why == f"What makes it fast, with the other settings equal: {effects}."
    (figure,) = (one for one in build_figures(overview, []) if one.name == "memory_throughput")
    assert (
        figure.finding
        == "ddp, micro_batch_size=4 needs 67% less memory than ddp, micro_batch_size=16 and loses 47% of the speed"
    )
    for run in runs:
        run.metrics.speed_error = None
    assert [text[:4] for text in reasons(Overview.from_records(runs))] == ["What"]
    for run in runs[1:3]:
        run.config["ddp"] |= {"bucket_cap_mb": 1}
    assert list(reasons(Overview.from_records(runs))) == [], "an option of the strategy differs too"


def test_runs_that_differ_in_the_optimization_are_compared_by_their_loss() -> None:
    losses = {0.0: 1.1095, 0.003: 0.0214, 0.01: 0.5}
    runs = [
        record(n, train__learning_rate=rate, cluster__device="cuda", speed=100.0 - n) for n, rate in enumerate(losses)
    ]
    for run, loss in zip(runs, losses.values(), strict=True):
        run.metrics.eval_loss = loss
    overview = Overview.from_records(runs)
    assert list(headline(overview)) == [
        "Take learning_rate=0.003: it has the lowest evaluation loss, 0.0214. The next, learning_rate=0.01, has 0.5000."
    ]
    assert [group.label for group in recommended(overview)] == ["1"]
    assert [(tile.name, tile.value) for tile in build_tiles(overview)] == [("lowest evaluation loss", "0.0214")]
    assert describe_tradeoff(overview, CPU_PEAK, "memory") == ""
    runs[2].metrics.eval_loss = 0.02141
    overview = Overview.from_records(runs)
    assert next(headline(overview)).startswith("Not decided: learning_rate=0.003 has the lowest evaluation loss")
    assert not list(recommended(overview))
    runs[0].config["train"]["micro_batch_size"] = 8
    assert "loss" not in next(headline(Overview.from_records(runs))), "the speed depends on it, too"
