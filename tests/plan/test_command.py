"""Tests of the output of ``distexp plan``, with estimates that follow a formula."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distexp.config import Config, ConfigError
from distexp.config.keys import conf_dir
from distexp.config.model_checks import with_micro_batch
from distexp.exceptions import SweepFailedError, SweepInterrupted
from distexp.plan.command import run_plan
from distexp.plan.estimate import Estimate, gpu_error_bound
from distexp.plan.fitting_change import ConfigChange, LargestMicroBatch, Search, candidate_overrides
from distexp.plan.plan_table import FULL_DATA, FullData, change_notes, micro_batch_line, replace_overrides
from distexp.plan.planner import Outcome, store_estimate
from distexp.plan.verdict import DOES_NOT_FIT, FITS, TOO_CLOSE, gpu_memory_mib, verdict_of
from tests.helpers.planning import FormulaPlanner, composed, linear_estimate
from tests.helpers.remembered_loader import remember_compositions
from tests.helpers.runs import REPOSITORY, resolve_cell, run_distexp


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    remember_compositions(monkeypatch)


PLAN = ("command=plan", "dataset=squad")


def printed(capsys: pytest.CaptureFixture[str], shared: tuple[str, ...], *cells: tuple[str, ...]) -> str:
    with composed([*PLAN, *shared], *cells) as (found, make):
        run_plan(found, make, FormulaPlanner())
    return capsys.readouterr().out


def test_one_configuration_shows_parts_and_largest_micro_batch(capsys: pytest.CaptureFixture[str]) -> None:
    # 4,000 + 500 + 1,000 per sample fit into 81,050 MiB less 5 %: 72 samples.
    text = printed(capsys, ("strategy=fsdp", "sharding=no_shard", "plan.gpu=a100-80gb", "plan.search=true"))
    assert "fits, 85 % free" in text
    assert "largest micro-batch that fits: 72\n" in text
    assert "Memory of one GPU by part, at the peak in the phase " in text
    assert "activations" in text
    assert "verdict: needs (error up to 5 %) is compared with the GPU memory of 79.2 GiB" in text


def test_memory_of_a_tiny_model_is_in_mib(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Estimate(peak_allocated_mib=12.34, step_mib=40.0, overhead_mib=20.0, parts={"parameters": 0.632})
    with composed([*PLAN, "strategy=single", "plan.gpu=a100-80gb"]) as (found, make):
        run_plan(found, make, FormulaPlanner(lambda config: tiny))
    text = capsys.readouterr().out
    assert "12.3 MiB" in text
    assert "0.632 MiB" in text
    assert "0.00 GiB" not in text


def test_the_largest_avoidable_part_and_what_avoids_it_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With one micro-batch per step, FSDP keeps no whole gradients: 40 GiB less, and 2 GiB of other buffers more."""

    def estimate(config: Config) -> Estimate:
        steps, loss = config.train.gradient_accumulation_steps, config.train.loss
        parts = {"gradients": 45_056.0 if steps > 1 else 4_096.0, "logits": 8_192.0 if loss == "full" else 0.0}
        needed = 22_528.0 + sum(parts.values()) + (2_048.0 if steps == 1 else 0.0)
        return Estimate(peak_allocated_mib=needed, step_mib=needed, parts={**parts, "activations": 22_528.0}, seconds=7)

    def run(*overrides: str) -> tuple[str, int]:
        shared = [*PLAN, "cluster.workers_per_node=8", "plan.gpu=h100-80gb", "train.micro_batch_size=4", *overrides]
        planner = FormulaPlanner(estimate)
        with composed(shared) as (found, make):
            run_plan(found, make, planner)
        return capsys.readouterr().out, planner.count

    text, count = run("sharding=full_shard", "train.gradient_accumulation_steps=4")
    assert (
        "44.00 GiB are gradients kept whole over 4 accumulation steps: train.gradient_accumulation_steps=1 needs "
        "36.00 GiB instead of 74.00 GiB, with a global batch of 32 samples instead of 128\n"
    ) in text
    assert "for the largest micro-batch that fits, add plan.search=true\n" in text
    assert count <= 3, "nothing is searched for a training that fits"
    text, _ = run("sharding=full_shard", "train.global_batch_size=128")
    assert "over 4 accumulation steps: train.micro_batch_size=16 needs 36.00 GiB instead of " in text
    text, _ = run("sharding=full_shard", "train.gradient_accumulation_steps=1", "train.activation_checkpointing=true")
    assert "8.00 GiB are logits of all tokens: train.loss=chunked needs 28.00 GiB instead of " in text
    text, _ = run("strategy=ddp", "train.loss=chunked", "train.activation_checkpointing=true")
    assert " are " not in text.split("part ")[1], "no change needs less"


def test_a_requested_search_without_a_verdict_is_not_left_out_silently(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = Estimate(peak_allocated_mib=12.34, step_mib=40.0, error_bound=None)
    for search in ("true", "false"):
        with composed([*PLAN, "strategy=single", "plan.gpu=a100-80gb", f"plan.search={search}"]) as (found, make):
            run_plan(found, make, FormulaPlanner(lambda config: unknown))
        text = capsys.readouterr().out
        assert ("no search for what fits, because there is no verdict\n" in text) is (search == "true")
    text = printed(capsys, ("plan.gpu=a100-80gb", "plan.search=true"), ("strategy=ddp",), ("strategy=fsdp",))
    assert "no search for what fits, because there are several configurations\n" in text


def test_too_large_configuration_shows_what_makes_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ("strategy=single", "train.micro_batch_size=100", "plan.gpu_memory_gb=80"))
    assert "does not fit by 22.1 GiB" in text
    assert "largest micro-batch that fits: 73\n" in text
    assert "smallest change that makes it fit: train.logits=targets\n" in text
    assert "train.micro_batch_size=50 train.gradient_accumulation_steps=2: needs 53.22 GiB, fits" in text


def test_search_shows_its_progress_and_can_be_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = FormulaPlanner()
    estimate = planner.estimate

    def interrupted_at_4(configs: Sequence[Config], advance: Callable[[], None] = lambda: None) -> list[Outcome]:
        outcomes = estimate(configs)
        for _ in configs:
            advance()
        if planner.count >= 4:
            raise KeyboardInterrupt
        return outcomes

    monkeypatch.setattr(planner, "estimate", interrupted_at_4)
    shared = [*PLAN, "strategy=single", "plan.gpu_memory_gb=80", "plan.search=true"]
    message = "the search for what fits was interrupted; the prediction is complete"
    with composed(shared) as (cells, make), pytest.raises(SweepInterrupted, match=message):
        run_plan(cells, make, planner)
    printed = capsys.readouterr()
    assert " % free" in printed.out
    start, first, *_ = printed.err.splitlines()
    assert start == "distexp: searching for the largest micro-batch (about 7 s a variant; Ctrl-C skips the search)"
    assert first == "distexp: 1 of at most 11 variants predicted"


def test_sweep_shows_every_cell_and_the_reason_of_an_invalid_one(capsys: pytest.CaptureFixture[str]) -> None:
    cells = (("strategy=ddp", "train.micro_batch_size=70"), ("zero_stage=3",), ("strategy=single", "offload=true"))
    text = printed(capsys, ("cluster.nodes=2", "cluster.workers_per_node=8", "plan.gpu_memory_gb=75"), *cells)
    ddp, zero = (next(line for line in text.splitlines() if f" {name} " in line) for name in ("ddp", "ZeRO-3"))
    assert "72.75 GiB  not certain: may need 76.4 GiB of 75.0 GiB" in ddp
    assert ddp.split()[1:6] == ["micro_batch_size=70", "ddp", "16", "70", "72.27"]
    assert "fits, 89 % free" in zero
    assert "invalid: " in text
    assert "offload=true" in text


def test_the_same_error_of_many_cells_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    refused = [("strategy=single", "offload=true", f"train.seed={seed}") for seed in range(5)]
    text = printed(capsys, ("plan.gpu_memory_gb=75",), ("zero_stage=3",), *refused)
    (line,) = [line for line in text.splitlines() if "invalid: " in line]
    assert line.startswith("5 cells (strategy=single offload=true train.seed=0, ")
    assert "train.seed=2 and 2 more): invalid: offload=true" in line
    with pytest.raises(SweepFailedError):
        printed(capsys, ("strategy=single", "offload=true"), ("train.seed=1",), ("train.seed=2",))
    assert capsys.readouterr().out.startswith("all 2 cells: invalid: offload=true")


def test_a_narrow_terminal_shows_which_cell_a_row_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    sizes = ("micro_batch_size=2", "micro_batch_size=3")
    text = printed(capsys, ("strategy=single", "plan.gpu_memory_gb=75"), *((f"train.{size}",) for size in sizes))
    assert [line.split()[0] for line in text.splitlines() if " % free" in line] == list(sizes)
    assert "Hidden columns" not in text, "they continue below"
    assert "nvidia-smi" in text


@pytest.mark.parametrize("width", [40, 60])
def test_a_very_narrow_terminal_shows_what_decides_in_whole_lines(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = [("strategy=ddp", f"train.micro_batch_size={size}") for size in (2, 3)]
    text = printed(capsys, ("plan.gpu_memory_gb=75",), *cells)
    table = text[text.index("\ncell") : text.rindex("% free")]
    assert max(map(len, table.splitlines())) <= width
    assert {"cell", "needs", "verdict"} <= set(table.split())
    for size in (2, 3):
        assert [line for line in table.splitlines() if line.startswith(f"micro_batch_size={size}")]


def test_without_a_gpu_the_known_gpus_that_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ("strategy=single", "train.micro_batch_size=20"))
    assert "fits on rtx5090-32gb and larger" in text
    assert "set cluster.device=cpu to predict that" in text
    assert "hint: set plan.gpu=a100-80gb or plan.gpu_memory_gb=80" in text


@pytest.mark.parametrize(
    ("device", "hint"),
    [("cuda", "hint: set plan.gpu=a100-80gb or"), ("cpu", "hint: set cluster.memory_gb or plan.host_memory_gb")],
)
@pytest.mark.parametrize("traced", [True, False])
def test_an_unknown_memory_has_a_hint(
    capsys: pytest.CaptureFixture[str], device: str, hint: str, *, traced: bool
) -> None:
    states = Estimate(parts={"parameters": 90_000.0}, notes=["not traced: a reason"])
    planner = FormulaPlanner(linear_estimate if traced else lambda config: states)
    with composed([*PLAN, "cluster=slurm", f"cluster.device={device}"]) as (cells, make):
        run_plan(cells, make, planner)
    hints = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: ")]
    assert [text.startswith(hint) for text in hints] == [True]


def test_json_has_the_fields_of_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    cells = (("train.micro_batch_size=2",), ("strategy=single", "offload=true"))
    text = printed(capsys, ("plan.output=json", "plan.gpu=v100-16gb"), *cells)
    first, second = json.loads(text)
    assert list(first) == [
        "overrides", "peak_allocated_mib", "peak_reserved_mib", "nvidia_smi_mib", "host_peak_mib", "phase", "parts",
        "verdict", "seconds", "required_mib", "gpu_memory_mib", "host_memory_mib", "error_bound",
        "most_mib", "notes",
    ]  # fmt: skip
    assert first["overrides"] == ["dataset=squad", "plan.gpu=v100-16gb", "train.micro_batch_size=2"]
    assert (first["peak_allocated_mib"], first["nvidia_smi_mib"], first["verdict"]) == (
        6_000,
        pytest.approx(7_100),
        "fits",
    )
    assert second["verdict"] is None
    assert "offload" in second["error"]


def test_command_prints_one_json_document_and_writes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    config = resolve_cell("command=plan", "strategy=single", "plan.gpu=a100-80gb")
    store_estimate(config, linear_estimate(config))
    (tmp_path / "here").mkdir()
    done = run_distexp("plan", "--json", "strategy=single", "plan.gpu=a100-80gb", cwd=tmp_path / "here")
    assert (done.returncode, done.stderr) == (0, "")
    (cell,) = json.loads(done.stdout)
    assert cell["overrides"] == ["strategy=single", "plan.gpu=a100-80gb"]
    assert (cell["peak_allocated_mib"], cell["verdict"]) == (12_000, "fits")
    assert list((tmp_path / "here").iterdir()) == []


def test_training_that_cannot_be_traced_shows_the_model_states(capsys: pytest.CaptureFixture[str]) -> None:
    planner = FormulaPlanner(lambda config: Estimate(parts={"parameters": 90_000.0}, notes=["not traced: a reason"]))
    with composed([*PLAN, "plan.gpu=a100-80gb"]) as (cells, make):
        run_plan(cells, make, planner)
    text = capsys.readouterr().out
    assert "does not fit: the model states alone exceed it by 8.7 GiB" in text
    assert "over 87.89" in text
    assert "not traced: a reason" in text
    with composed([*PLAN, "plan.output=json"]) as (cells, make):
        run_plan(cells, make, planner)
    (cell,) = json.loads(capsys.readouterr().out)
    assert (cell["peak_allocated_mib"], cell["notes"]) == (None, ["not traced: a reason"])


def bounded(*overrides: str, **mib: float) -> Estimate:
    """Return an estimate with the errors of a configuration."""
    config = resolve_cell("command=plan", *overrides)
    return Estimate(error_bound=gpu_error_bound(config), **mib)


@pytest.mark.parametrize(
    ("strategy", "allocated", "overhead", "needed", "verdicts"),
    [
        ("strategy=single", 37_328, 1_309, 43_491, {46_765: FITS, 40_646: DOES_NOT_FIT}),
        ("strategy=single", 17_711, 1_309, 21_103, {22_691: FITS, 19_722: DOES_NOT_FIT}),
        ("strategy=single", 8_522, 1_331, 9_918, {10_664: FITS, 9_269: DOES_NOT_FIT}),
        ("zero_stage=2", 30_050, 1_697, 35_257, {37_911: FITS, 32_951: DOES_NOT_FIT}),
    ],
)
def test_verdicts_near_the_edge_are_those_of_the_docs(
    strategy: str, allocated: float, overhead: float, needed: float, verdicts: dict[float, str]
) -> None:
    found = bounded(
        strategy, "precision=bf16", peak_allocated_mib=allocated, overhead_mib=overhead, step_mib=needed - overhead
    )
    assert {limit: verdict_of(found, limit) for limit in verdicts} == verdicts


@pytest.mark.parametrize(
    ("overrides", "allocated", "predicted", "measured"),
    [
        (("strategy=single", "train.activation_checkpointing=true"), 31_339, 32_510, 32_502),
        (("strategy=single",), 10_860, 12_242, 12_741),
        (("strategy=single", "train.gradient_accumulation_steps=2"), 26_839, 27_840, 28_683),
        (("zero_stage=3", "cluster.workers_per_node=2"), 30_070, 37_246, 38_036),
        (("zero_stage=2",), 11_144, 13_696, 13_690),
    ],
)
def test_no_verdict_contradicts_a_measured_run(
    overrides: tuple[str, ...], allocated: float, predicted: float, measured: float
) -> None:
    """The rows of the docs with large errors: a GPU that is just large enough, and one that is just too small."""
    found = bounded(*overrides, peak_allocated_mib=allocated, step_mib=predicted, overhead_mib=1_700)
    assert verdict_of(found, measured + 1_700) == TOO_CLOSE
    assert verdict_of(found, 1.25 * max(predicted, measured) + 1_700) == FITS
    assert verdict_of(found, 0.97 * allocated + 1_700) == DOES_NOT_FIT


@pytest.mark.parametrize(("memory", "verdict"), [(10_600, FITS), (10_000, TOO_CLOSE), (9_400, DOES_NOT_FIT)])
def test_verdict_leaves_room_for_the_error(memory: float, verdict: str) -> None:
    assert verdict_of(Estimate(peak_allocated_mib=9_000, step_mib=9_500, overhead_mib=500), memory) == verdict


def test_search_stops_at_a_micro_batch_that_is_invalid() -> None:
    config = resolve_cell("command=plan", "strategy=single", "train.micro_batch_size=4")

    def compose(overrides: Sequence[str]) -> Config | str:
        size = int(overrides[0].partition("=")[2])
        return resolve_cell("command=plan", "strategy=single", *overrides) if size <= 24 else "too few samples"

    planner = FormulaPlanner()
    found = Search(config, compose, planner.estimate, 1e6).largest_micro_batch(linear_estimate(config))
    assert (found, planner.count <= 8) == (LargestMicroBatch(24, invalid="too few samples"), True)


@pytest.mark.parametrize(("memory_mib", "largest"), [(11_000, 4), (19_000, 12), (30_000, 24), (5_300, None)])
def test_sizes_keep_the_global_batch(memory_mib: float, largest: int | None) -> None:
    fixed = ("command=plan", "strategy=single", "train.global_batch_size=24")

    def several_cost_more(config: Config) -> Estimate:
        return replace(linear_estimate(config), overhead_mib=500.0 if config.train.micro_batch == 24 else 2_000.0)

    def compose(overrides: Sequence[str]) -> Config:
        return resolve_cell(*fixed, *overrides)

    planner = FormulaPlanner(several_cost_more)
    config = compose(["train.micro_batch_size=2"])
    found = Search(config, compose, planner.estimate, memory_mib).largest_micro_batch(several_cost_more(config))
    assert (found.size, found.is_exact, planner.count <= 6) == (largest, True, True)
    assert ("train.micro_batch_size=1",) in list(candidate_overrides(config))


@pytest.mark.parametrize(("first", "memory_mib", "largest"), [(120, 21_000, 15), (240, 21_000, 15), (120, 90_000, 80)])
def test_search_starts_far_above_what_fits(first: int, memory_mib: float, largest: int) -> None:
    """A step of a single micro-batch needs less than one of 120 samples."""
    shared = resolve_cell("command=plan", "strategy=single", "train.global_batch_size=240")

    def whole_needs_less(config: Config) -> Estimate:
        estimate = linear_estimate(config)
        return replace(estimate, step_mib=100_000.0) if config.train.micro_batch == 240 else estimate

    def compose(overrides: Sequence[str]) -> Config:
        return with_micro_batch(shared, int(overrides[0].partition("=")[2]))

    config, planner = compose([f"train.micro_batch_size={first}"]), FormulaPlanner(whole_needs_less)
    found = Search(config, compose, planner.estimate, memory_mib).largest_micro_batch(whole_needs_less(config))
    assert (found.size, found.is_exact, planner.count <= 7) == (largest, True, True)


def test_the_line_names_a_micro_batch_of_1_only_if_it_was_tried() -> None:
    assert micro_batch_line(LargestMicroBatch(None)) == "not even a micro-batch of 1 fits"
    assert micro_batch_line(LargestMicroBatch(None, is_exact=False)) == "no micro-batch found that fits"
    reason = "sizes between it and one that does not fit are not known"
    assert micro_batch_line(LargestMicroBatch(92, is_exact=False)).endswith(f"fits: at least 92 ({reason})")


def test_a_micro_batch_of_1_that_may_fit_is_not_ruled_out(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample needs 5,000 MiB of 4,966. That is within the error."""
    text = printed(capsys, ("strategy=single", "train.logits=targets", "plan.gpu_memory_gb=4.85"))
    assert "largest micro-batch that fits: not certain for 1\n" in text
    assert "\n  train.micro_batch_size=1 train.gradient_accumulation_steps=8: needs 4.88 GiB, not certain" in text


def test_changes_that_may_fit_are_not_ruled_out(capsys: pytest.CaptureFixture[str]) -> None:
    smallest = ("train.micro_batch_size=1", "train.logits=targets", "train.activation_checkpointing=true")
    text = printed(capsys, (*smallest, "strategy=single", "plan.gpu_memory_gb=4.5"))
    assert "\nno change is certain to make it fit: use more GPUs" in text


def test_changes_whose_error_is_unknown_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def large(config: Config) -> Estimate:
        is_sharded = config.deepspeed.zero_stage == 3
        needed, bound = (5_000.0, None) if is_sharded else (20_000.0, 0.15)
        return Estimate(peak_allocated_mib=needed, step_mib=needed, host_mib=needed, on_cpu=True, error_bound=bound)

    arguments = ("zero_stage=2", "cluster.device=cpu", "cluster.workers_per_node=2", "plan.host_memory_gb=10")
    with composed([*PLAN, *arguments]) as (found, make):
        run_plan(found, make, FormulaPlanner(large))
    text = capsys.readouterr().out
    assert "no change is certain to make it fit" in text
    assert "  zero_stage=3: needs 4.88 GiB" in text


def test_if_nothing_fits_on_cpus_no_gpus_are_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ("strategy=single", "cluster.device=cpu", "plan.host_memory_gb=1"))
    assert "\nno change makes it fit: use fewer workers, or a machine with more memory\n" in text


def test_the_number_that_decides_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    """A step may need more than its peak: 70 GiB and 74.5 GiB, of 72 GiB."""

    def fragmented(config: Config) -> Estimate:
        return Estimate(peak_allocated_mib=70 * 1024.0, step_mib=74 * 1024.0, overhead_mib=512.0)

    with composed([*PLAN, "strategy=single", "plan.gpu_memory_gb=70"]) as (found, make):
        run_plan(found, make, FormulaPlanner(fragmented))
    header, row = (line for line in capsys.readouterr().out.splitlines() if line.startswith(("strategy ", "single ")))
    assert header.split()[-2:] == ["needs", "verdict"]
    assert row.endswith("74.50 GiB  does not fit by 4.5 GiB")


def test_on_cpus_the_memory_of_all_processes_decides(capsys: pytest.CaptureFixture[str]) -> None:
    """The tensors of a worker are 8 MiB, and the processes of both simulated nodes need 8 GiB."""
    tensors = Estimate(peak_allocated_mib=8.0, step_mib=8 * 1024.0, host_mib=4 * 1024.0, on_cpu=True, error_bound=0.15)
    shared = ["command=plan", "cluster.device=cpu", "cluster.nodes=2", "strategy=ddp", "plan.host_memory_gb=16"]
    with composed(shared) as (found, make):
        run_plan(found, make, FormulaPlanner(lambda config: tensors))
    text = capsys.readouterr().out
    titles, row = (line for line in text.splitlines() if line.startswith(("strategy ", "ddp ")))
    assert titles.split() == ["strategy", "workers", "batch", "a", "worker", "host", "needs", "verdict"]
    assert row.endswith(" 8 MiB  4.00 GiB  8.00 GiB  fits, 50 % free")
    assert "verdict: needs (all processes, error up to 15 %) is compared with the memory of 16.0 GiB" in text


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (("zero_stage=2", "cluster.workers_per_node=1"), True),
        (("sharding=full_shard", "cluster.workers_per_node=1"), True),
        (("zero_stage=2", "cluster.workers_per_node=2"), False),
        (("zero_stage=0", "cluster.workers_per_node=1"), False),
        (("sharding=no_shard", "cluster.workers_per_node=1"), False),
        (("strategy=ddp", "cluster.workers_per_node=1"), False),
    ],
)
def test_one_worker_shards_nothing_which_is_noted(
    words: tuple[str, ...], noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, (*words, "plan.gpu_memory_gb=80"))
    assert ("note: with one worker nothing is sharded: type, for example, cluster.workers_per_node=4" in text) == noted


def test_the_first_line_has_the_model_the_data_and_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    shared = ("strategy=single", "plan.gpu_memory_gb=80")
    text = printed(capsys, (*shared, "model=bloom_3b", "dataset=squad_sample"))
    assert text.startswith("bloom_3b on squad_sample: 64 tokens, fp32, micro-batch 4 x 4 accumulation\n")
    images = printed(capsys, (*shared, "model=resnet50", "dataset=tinyimagenet_sample", "train.micro_batch_size=8"))
    assert images.startswith("resnet50 on tinyimagenet_sample: images of 32 x 32, fp32, micro-batch 8\n")
    sizes = (("train.micro_batch_size=2",), ("train.micro_batch_size=3",))
    sweep = printed(capsys, (*shared, "model=gpt", "dataset.padding=longest"), *sizes)
    assert sweep.startswith("gpt on squad: up to 512 tokens, fp32\n")


@pytest.mark.parametrize(
    ("overrides", "peak_mib", "hint"),
    [
        (("dataset=squad_sample",), 1_100.0, "so it needs less memory than squad: type dataset.max_length=512"),
        (("dataset=squad_sample",), 900.0, None),
        (("dataset=squad_sample", "dataset.max_length=512"), 1_100.0, None),
        (("dataset=squad_sample", "dataset.max_length=64"), 1_100.0, None),
        (("dataset=squad",), 1_100.0, None),
        (("model=resnet50", "dataset=tinyimagenet_sample"), 1_100.0, "than tinyimagenet: type dataset.image_size=64"),
    ],
)
def test_a_large_training_on_sample_data_has_a_note(
    capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], peak_mib: float, hint: str | None
) -> None:
    estimate = Estimate(peak_allocated_mib=peak_mib, step_mib=peak_mib)
    with composed(["command=plan", "strategy=single", "plan.gpu=a100-80gb", *overrides]) as (found, make):
        run_plan(found, make, FormulaPlanner(lambda config: estimate))
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert [note.endswith(str(hint)) for note in notes] == [True] * (hint is not None)


@pytest.mark.parametrize(("sample", "full"), FULL_DATA.items())
def test_sizes_of_the_full_data_are_those_of_the_configuration(sample: str, full: FullData) -> None:
    folder = conf_dir() / "dataset"
    small, real = (OmegaConf.load(folder / f"{name}.yaml") for name in (sample, full.name))
    assert small[full.key] < real[full.key] == full.size


def test_changes_start_with_the_smallest_and_keep_the_global_batch() -> None:
    config = resolve_cell(
        "command=plan", "zero_stage=1", "cluster.workers_per_node=4", "train.micro_batch_size=8",
        "train.gradient_accumulation_steps=2",
    )  # fmt: skip
    assert list(candidate_overrides(config)) == [
        ("train.logits=targets",),
        ("train.micro_batch_size=4", "train.gradient_accumulation_steps=4"),
        ("train.micro_batch_size=1", "train.gradient_accumulation_steps=16"),
        ("train.activation_checkpointing=true",),
        ("train.logits=targets", "train.activation_checkpointing=true"),
        ("zero_stage=3",),
        ("offload=true",),
        (
            "train.logits=targets", "train.micro_batch_size=1", "train.gradient_accumulation_steps=16",
            "train.activation_checkpointing=true", "zero_stage=3",
        ),
    ]  # fmt: skip


def test_another_micro_batch_of_a_model_with_batch_norms_comes_last() -> None:
    config = resolve_cell(
        "command=plan", "model=resnet_tiny", "strategy=ddp", "cluster.workers_per_node=2", "train.micro_batch_size=8"
    )
    changes = list(candidate_overrides(config))
    sizes = [any(text.startswith("train.micro_batch_size=") for text in change) for change in changes]
    assert sizes == [False] * (len(changes) - 2) + [True, True]
    assert len(changes) > 4


def test_what_a_change_replaces_must_be_removed_from_the_command() -> None:
    config = resolve_cell("command=plan", "strategy=ddp", "cluster.workers_per_node=2")
    changes = [ConfigChange(("train.micro_batch_size=1",), Estimate()), ConfigChange(("zero_stage=3",), Estimate())]
    command = ["train.micro_batch_size=2", "strategy=ddp", "deepspeed.zero_stage=1"]
    assert list(change_notes(command, changes, config)) == [
        "Some changes replace strategy=ddp deepspeed.zero_stage=1: remove that from the command."
    ]
    assert list(change_notes(command, changes[:1], config)) == []


def test_all_changes_of_fsdp_together_have_the_smallest_micro_batch() -> None:
    config = resolve_cell(
        "command=plan", "strategy=fsdp", "train.micro_batch_size=4", "train.gradient_accumulation_steps=2"
    )
    changes = list(candidate_overrides(config))
    assert changes[1] == ("train.micro_batch_size=8", "train.gradient_accumulation_steps=1")
    assert {"train.micro_batch_size=1", "train.gradient_accumulation_steps=8"} < {*changes[-1]}


@pytest.mark.parametrize(
    ("strategy", "batch", "largest", "sizes"),
    [
        ("single", (32, 4), 10, [8]),  # 1 x 128 fits too, but is slower
        ("single", (4, 3), 3, [3]),
        ("single", (32, 4), None, [1]),
        ("single", (32, 1), 10, [8, 1]),  # the first accumulation needs memory for gradients
        ("fsdp", (32, 4), 10, [128, 8]),
    ],
)
def test_the_largest_micro_batch_that_fits_and_keeps_the_global_batch_is_a_change(
    strategy: str, batch: tuple[int, int], largest: int | None, sizes: list[int]
) -> None:
    size, steps = batch
    config = resolve_cell(
        "command=plan", f"strategy={strategy}", f"train.micro_batch_size={size}",
        f"train.gradient_accumulation_steps={steps}",
    )  # fmt: skip
    changes = candidate_overrides(config, LargestMicroBatch(largest))
    found = [change for change in changes if len(change) == 2 and change[0].startswith("train.micro_batch_size=")]
    assert found == [
        (f"train.micro_batch_size={each}", f"train.gradient_accumulation_steps={size * steps // each}")
        for each in sizes
    ]


def test_two_changes_at_the_same_micro_batch_may_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, ("strategy=single", "train.micro_batch_size=7", "plan.gpu_memory_gb=5.6"))
    assert "smallest change that makes it fit: train.logits=targets train.activation_checkpointing=true\n" in text


@pytest.mark.parametrize(
    ("typed", "change"),
    [
        ("deepspeed.zero_stage=1", "zero_stage=3"),
        ("fsdp.sharding=shard_grad_op", "sharding=full_shard"),
        ("offload.enabled=false", "offload=true"),
    ],
)
def test_change_replaces_a_key_that_was_typed(typed: str, change: str) -> None:
    assert replace_overrides(["model=gpt", typed], [change]) == ["model=gpt", change]


def test_a_prediction_of_a_searched_micro_batch_has_the_command_that_shows_the_largest_one() -> None:
    with pytest.raises(ConfigError, match=r"type train.micro_batch_size=1 plan.search=true, and the output has the"):
        resolve_cell("command=plan", "train.micro_batch_size=auto", "train.global_batch_size=8", "strategy=single")


def test_plans_are_for_gpus_that_this_machine_lacks() -> None:
    config = resolve_cell("command=plan", "strategy=fsdp", "cluster.nodes=4", "cluster.workers_per_node=8",
                          "precision=fp16", "plan.gpu=h200-141gb")  # fmt: skip
    assert (config.cluster.device, config.cluster.world_size) == ("cuda", 32)
    assert gpu_memory_mib(config) == 143_073


@pytest.mark.parametrize("gpu", ["plan.gpu=h100-80gb", "plan.gpu_memory_gb=80", "plan.gpu=null"])
@pytest.mark.parametrize(("limit_gb", "mib"), [(5, 5 * 1024), (79.0, 79 * 1024)])
def test_a_limit_of_the_memory_counts_for_each_gpu(gpu: str, limit_gb: float, mib: float) -> None:
    limited = ("command=plan", "strategy=single", gpu, f"cluster.gpu_memory_limit_gb={limit_gb}", "cluster=slurm")
    assert gpu_memory_mib(resolve_cell(*limited)) == mib
    more = resolve_cell("command=plan", "strategy=single", "plan.gpu=v100-16gb", "cluster.gpu_memory_limit_gb=40")
    assert gpu_memory_mib(more) == 16_148, "the limit is more than the GPU has"


def test_unknown_gpu_is_an_error_with_near_matches() -> None:
    done = run_distexp("plan", "plan.gpu=a100-80", cwd=REPOSITORY)
    assert done.returncode == 2
    assert "plan.gpu=a100-80 is not a known GPU: use a100-80gb, " in done.stderr
    with pytest.raises(ConfigError, match="leave one out"):
        resolve_cell("command=plan", "plan.gpu=a100-80gb", "plan.gpu_memory_gb=80")


def test_json_has_the_errors_of_a_single_configuration() -> None:
    done = run_distexp("plan", "--json", "strategy=single", "offload=true", cwd=REPOSITORY)
    assert done.returncode == 1, "nothing was predicted"
    (cell,) = json.loads(done.stdout)
    assert "offload=true is not supported by strategy=single" in cell["error"]


def test_memory_of_a_gpu_is_refused_on_cpus() -> None:
    message = "plan.gpu=a100-80gb is for GPUs, but this run is on cpu: set plan.host_memory_gb"
    with pytest.raises(ConfigError, match=message):
        resolve_cell("command=plan", "cluster.device=cpu", "plan.gpu=a100-80gb")
    with pytest.raises(ConfigError, match=r"plan\.host_memory_gb=8 is for runs on CPUs, but this run is on GPUs"):
        resolve_cell("command=plan", "plan.host_memory_gb=8")
