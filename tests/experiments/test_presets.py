"""Tests of the presets: their runs, hyperparameters and tables."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from distexp import experiments
from distexp.cli.main import main
from distexp.compose.composition import MakeCell
from distexp.config import Config
from distexp.config.keys import config_groups, options_of
from distexp.config.overrides import quote_choice
from distexp.report.data.metrics import METRICS_BY_NAME
from distexp.report.data.overview import Overview
from distexp.report.data.rows import read_settings
from distexp.report.exercises import PRINTED, exercise_tables
from distexp.report.exercises.columns import load_layouts
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import RunError
from tests.helpers.planning import composed
from tests.helpers.presets import cells_of, finished
from tests.helpers.records import add_parts
from tests.helpers.remembered_loader import remember_compositions
from tests.helpers.runs import IMAGE_FOLDER, resolve_cell, run_module

ONE = [(1, 1)]
GPUS_1_TO_8 = [(1, 1), (1, 2), (1, 4), (1, 8)]
NODES_1_TO_8 = [(1, 1), (2, 1), (4, 1), (8, 1)]
SHAPES = {
    "ddp/baseline": ONE,
    "ddp/multi_gpu": GPUS_1_TO_8,
    "ddp/multi_node": [(1, 2), (2, 2), (4, 2), (8, 2)],
    "deepspeed/baseline": ONE,
    "deepspeed/zero_offload_single_gpu": 3 * ONE,
    "deepspeed/pin_memory": 2 * ONE,
    "deepspeed/zero_stages": 8 * ONE,
    "deepspeed/multi_gpu_weak_scaling": [(1, 2), (1, 4), (1, 8)],
    "deepspeed/two_gpu_stages": 6 * [(1, 2)],
    "deepspeed/multi_node_weak_scaling": [(2, 2), (4, 2), (8, 2)],
    "deepspeed/model_sizes": 12 * ONE,
    "fsdp/baseline": ONE,
    "fsdp/multi_gpu": GPUS_1_TO_8,
    "fsdp/multi_node": NODES_1_TO_8,
    "fsdp/sharding": 8 * [(2, 2)],
    "fsdp/custom_single": ONE,
    "fsdp/custom_multi_gpu": GPUS_1_TO_8,
    "fsdp/custom_multi_node": NODES_1_TO_8,
    "fsdp/custom_weak_scaling": [(1, 2), (1, 4), (1, 8), (2, 8)],
    "cut/lora": GPUS_1_TO_8,
    "cut/tensor": [(1, 2), (1, 4), (1, 8)],
    "cut/mesh": 3 * [(1, 4)],
    "cut/context": 3 * [(1, 4)],
    "cut/recompute": 3 * [(1, 2)],
    "cut/mixtral": [(1, 2), (1, 4), (1, 8)],
    "cut/expert": 3 * [(1, 4)],
    "cut/pipeline": 2 * [(1, 2)],
    "map/strategies": 24 * [(1, 2)],
    "memory/parts": 4 * ONE,
    "time/step": 4 * [(1, 2)],
}
"""(nodes, workers on each) of every run, as the workshop has them."""


FREQUENT = (
    *("ddp/multi_node", "deepspeed/baseline", "deepspeed/zero_stages", "deepspeed/multi_gpu_weak_scaling"),
    *("fsdp/sharding", "fsdp/custom_weak_scaling", "map/strategies", "memory/parts", "time/step"),
    *("cut/tensor", "cut/context", "cut/expert", "cut/lora", "cut/pipeline"),
)
"""Presets of each kind."""

PRESETS = [pytest.param(name, marks=() if name in FREQUENT else pytest.mark.release) for name in SHAPES]

SLURM = ("cluster=slurm", "cluster.dry_run=true")


@cache
def cell_maker() -> MakeCell:
    """Return the function that composes a cell as a sweep does, which is faster than one command for each cell."""
    with pytest.MonkeyPatch.context() as patch:
        remember_compositions(patch)
        with composed([]) as (_, make):
            return make


def resolve_or_error(cell: list[str], *overrides: str) -> Config | str:
    """Return the resolved configuration of a cell, or its first error."""
    root = (
        [f"dataset.root={IMAGE_FOLDER}"]
        if any("=ddp/" in text for text in cell) and "scale=tiny" not in overrides
        else []
    )
    texts = (*cell, *overrides, *(() if "scale=tiny" in overrides else SLURM), *root)
    made = cell_maker()([quote_choice(text, config_groups()) for text in texts])
    return made.config or made.errors[0]


@pytest.mark.parametrize(
    "command",
    [
        "experiment=memory/parts train.logits=all plan.gpu=a100-40gb",
        "experiment=time/step strategy=ddp",
        "experiment=deepspeed/multi_gpu_weak_scaling cluster.workers_per_node=8",
        "zero_stage=2 cluster.workers_per_node=8 model=bloom_1b7 dataset.max_length=512 precision=bf16",
    ],
)
def test_without_internet_the_workshop_reads_generated_questions(command: str) -> None:
    config = resolve_cell(*command.split(), *SLURM, "dataset=squad_sample")
    assert (config.dataset.name, config.dataset.max_length) == ("squad_sample", 512)


def test_the_columns_of_quizzes_exist() -> None:
    record = finished(resolve_cell("scale=tiny"), 0)
    known = read_settings(record).keys() | METRICS_BY_NAME.keys()
    for preset, layout in load_layouts().items():
        assert known.issuperset(layout.quiz), preset


def test_every_preset_of_the_workshop_exists() -> None:
    assert set(options_of("experiment")) == set(SHAPES) == set(load_layouts())


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_its_runs_and_fills_its_table(preset: str) -> None:
    cells = cells_of(preset)
    configs = [resolve_or_error(cell) for cell in cells]
    records = [finished(config, n, cells[n]) for n, config in enumerate(configs) if isinstance(config, Config)]
    if preset == "deepspeed/zero_stages":
        assert isinstance(configs[1], str)
        assert "offload" in configs[1], "stage 0 has nothing to offload"
    else:
        assert len(records) == len(cells)
    worlds = [(record.config["cluster"]["nodes"], record.config["cluster"]["workers_per_node"]) for record in records]
    assert sorted(worlds) == sorted(SHAPES[preset][: len(worlds)])
    assert len(cells) == len(SHAPES[preset])
    for record in records:
        check_workshop_hyperparameters(preset, record)
    (table,) = exercise_tables(Overview.from_records(records))
    assert preset in table.title
    texts = [cell for row in table.rows for cell in row if row[0] != PRINTED]
    missing = [text for text in texts if text in ("not run", "not measured", "no GPU")]
    assert missing == (["not run"] if preset == "deepspeed/zero_stages" else [])
    assert {len(row) for row in table.rows} == {len(table.header)}


def check_workshop_hyperparameters(preset: str, record: RunRecord) -> None:
    config, train = record.config, record.config["train"]
    assert config["exercise"] == preset
    if preset.startswith("map/"):
        assert (train["global_batch_size"], train["max_steps"], config["plan"]["name"]) == (32, 20, "check")
        return
    if preset.startswith("cut/"):  # the values of NeMo's recipes in the workshop
        assert (config["precision"]["name"], train["micro_batch_size"], train["learning_rate"]) == ("bf16", 1, 1e-4)
        if preset != "cut/context":
            assert (train["global_batch_size"], config["dataset"]["max_length"]) == (8, 2048)
            assert config["dataset"]["train_size"] == 250 * 8
        return
    assert config["precision"]["name"] == "fp16"
    if preset.startswith("ddp/"):
        assert (train["optimizer"], train["schedule"], train["micro_batch_size"]) == ("sgd", "step", 512)
        assert (train["learning_rate"], train["num_epochs"], config["dataset"]["image_size"]) == (0.001, 3, 224)
        return
    assert (train["learning_rate"], train["weight_decay"], config["dataset"]["max_length"]) == (5e-5, 0.01, 512)
    assert train["gradient_accumulation_steps"] == 4
    workers = config["cluster"]["nodes"] * config["cluster"]["workers_per_node"]
    if preset.startswith("memory/"):
        assert (train["micro_batch_size"], config["plan"]["name"]) == (4, "check")
    elif preset.startswith("time/"):
        assert (config["dataset"]["train_size"], train["num_epochs"], train["profile_steps"]) == (1000, 3, 3)
    elif preset.startswith("deepspeed/"):
        assert (train["micro_batch_size"], train["num_epochs"]) == (4, 3)
        assert config["dataset"]["train_size"] == (250 * workers if "weak" in preset else 500)
    else:
        assert (config["dataset"]["train_size"], config["dataset"]["eval_size"], train["num_epochs"]) == (500, 100, 5)
        assert train["micro_batch_size"] == (16 // workers if "weak" in preset else 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_scale_tiny_shrinks_every_preset(preset: str) -> None:
    cells = cells_of(preset)
    first = resolve_or_error(cells[0], "scale=tiny")
    assert isinstance(first, Config), first
    assert first.dataset.name in ("squad_sample", "tinyimagenet_sample", "synthetic")
    assert (first.cluster.device, first.precision.name) == ("cpu", "fp32")
    assert (first.dataset.train_size or 0) <= 64 * 4
    assert max(first.model.hidden_size or 0, first.model.width or 0) <= 128
    if SHAPES[preset][-1][0] * SHAPES[preset][-1][1] == 8:
        assert "makes 8 workers, but scale=tiny allows 4: raise scale.workers" in str(
            resolve_or_error(cells[-1], "scale=tiny")
        )


@pytest.mark.parametrize(
    ("words", "shapes"),
    [
        (("deepspeed/multi_gpu_weak_scaling", "cluster.workers_per_node=2,4,6,8"), [(1, 2), (1, 4), (1, 6), (1, 8)]),
        (("ddp/multi_node", "cluster.nodes=1,3,6"), [(1, 2), (3, 2), (6, 2)]),
        (("fsdp/custom_weak_scaling", "cluster.workers_per_node=4"), [(1, 4), (2, 4)]),
        (("fsdp/custom_weak_scaling", "cluster.workers_per_node=2,4"), [(1, 2), (1, 4), (2, 2), (2, 4)]),
    ],
)
def test_command_line_replaces_the_sweep_of_a_preset(words: tuple[str, ...], shapes: list[tuple[int, int]]) -> None:
    configs = [resolve_or_error(cell) for cell in cells_of(*words)]
    assert [(c.cluster.nodes, c.cluster.workers_per_node) for c in configs if isinstance(c, Config)] == shapes


def test_table_of_the_profiled_preset() -> None:
    cells = cells_of("time/step")
    configs = [resolve_or_error(cell) for cell in cells]
    records = [finished(config, n, cells[n]) for n, config in enumerate(configs) if isinstance(config, Config)]
    (table,) = exercise_tables(Overview.from_records(records))
    assert [row[:2] for row in table.rows] == [("ddp", "1"), ("ddp", "4"), ("fsdp", "1"), ("fsdp", "4")]
    assert {row[3:] for row in table.rows} == {("250.0", "20")}


def weak_scaling(*words: str) -> list[RunRecord]:
    cells = cells_of("fsdp/custom_weak_scaling", *words)
    configs = [resolve_or_error(cell) for cell in cells]
    return [finished(config, n, cells[n]) for n, config in enumerate(configs) if isinstance(config, Config)]


def test_efficiency_is_ideal_time_divided_by_real_time() -> None:
    overview = Overview.from_records(weak_scaling())
    (table,) = exercise_tables(overview)
    assert table.header[:4] == ("GPUs", "Num Layers", "Per-GPU Batch", "Total Params")
    assert [row[:3] for row in table.rows] == [("2", "3", "8"), ("4", "8", "4"), ("8", "18", "2"), ("16", "38", "1")]
    shown = [float(row[-1]) for row in table.rows]
    assert shown == [pytest.approx(100 * (workers / 2) ** -0.1, abs=0.06) for workers in (2, 4, 8, 16)]
    assert [series.kind for series in overview.series] == ["weak"]
    overview = Overview.from_records(weak_scaling("scaling=weak_model_workshop", "model.tie_embeddings=false"))
    (table,) = exercise_tables(overview)
    assert [row[1] for row in table.rows] == ["3", "6", "12", "24"]
    assert [series.kind for series in overview.series] == ["mixed"]


def test_out_of_memory_run_is_shown_in_its_cells() -> None:
    records = weak_scaling()
    records[1].status, records[1].error = "oom_gpu", RunError("OutOfMemoryError", "too much", "train")
    records[1].memory["gpu"][0]["peak_mib"] = 143000.0
    (table,) = exercise_tables(Overview.from_records(records[:3]))
    assert table.rows[1][1] == "oom_gpu [1]"
    assert table.rows[1][4] == "-"
    assert table.reasons == ("[1] out of GPU memory in phase train, at a peak of 143,000 of 143,771 MiB on a GPU",)
    assert table.rows[3][0:2] == ("16", "not run")


def test_table_has_the_figures_of_the_workshop() -> None:
    config = resolve_or_error(cells_of("deepspeed/baseline")[0])
    assert isinstance(config, Config)
    (table,) = exercise_tables(Overview.from_records([finished(config, 0)]))
    assert table.header == ("Category", "Metric", "Your Value", PRINTED)
    rows = {row[1]: row[2:] for row in table.rows}
    assert rows["GPU Peak Usage (MiB)"] == ("20,000", "21,658")
    assert rows["Final Train Loss"] == ("2.5000", "0.7039")
    assert rows["Train Samples/sec"][1] == "11.26"
    assert "With it, this run has 9.00 samples/s." in table.note
    assert "random weights" in table.note
    assert "The train loss is the mean over all steps" in table.note


def test_note_names_the_lowest_peak_of_each_size() -> None:
    configs = [resolve_or_error(cell) for cell in cells_of("deepspeed/model_sizes")]
    records = [finished(config, n) for n, config in enumerate(configs) if isinstance(config, Config)]
    records[1].memory["gpu"][0]["peak_mib"] = 10.0
    (table,) = exercise_tables(Overview.from_records(records))
    assert "stage 2 on bloom_560m (10 MiB), stage 1 on bloom_1b1 (20,003 MiB)" in table.note


def test_note_names_the_lowest_parts_of_each_size_without_a_gpu() -> None:
    configs = [resolve_or_error(cell) for cell in cells_of("deepspeed/model_sizes")]
    records = [finished(config, n) for n, config in enumerate(configs) if isinstance(config, Config)]
    for record in records:
        record.memory["gpu"] = []
        add_parts(record, parameters=1.0, ranks=1)
    add_parts(records[2], parameters=0.1, ranks=1)
    (table,) = exercise_tables(Overview.from_records(records))
    assert "Lowest memory that a GPU would hold: stage 3 on bloom_560m (" in table.note


def test_experiments_lists_presets_with_their_first_sentence(tmp_path: Path) -> None:
    done = run_module("distexp.experiments", "fsdp/*", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("experiment=fsdp/") == 8
    assert "Memory and speed of each sharding" in done.stdout
    none = run_module("distexp.experiments", "nothing/*", cwd=tmp_path)
    assert none.returncode == 2
    assert none.stderr == "distexp: no preset matches nothing/*: distexp experiments lists them\n"
    near = run_module("distexp.experiments", "zero_stages", cwd=tmp_path)
    assert near.stderr == "distexp: no preset matches zero_stages. Did you mean deepspeed/zero_stages?\n"
    folder = run_module("distexp.experiments", "fsdp", cwd=tmp_path)
    assert set(re.findall(r"experiment=(\w+)/", folder.stdout)) == {"fsdp"}


def test_each_pattern_of_experiments_must_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert experiments.main(["fsdp", "mem0ry"]) == 2
    assert capsys.readouterr() == ("", "distexp: no preset matches mem0ry: distexp experiments lists them\n")
    assert experiments.main(["time", "memory/*"]) == 0
    assert set(re.findall(r"experiment=(\w+)/", capsys.readouterr().out)) == {"time", "memory"}


def test_experiments_lists_and_runs_presets_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    preset = tmp_path / "my, conf" / "experiment" / "my" / "zs.yaml"
    preset.parent.mkdir(parents=True)
    preset.write_text("# @package _global_\n# Stages of ZeRO. They need DeepSpeed.\ntrain: {seed: 7}\n")
    assert main(["experiments", "--config-dir", "my, conf", "my", "map"]) == 0
    assert "experiment=map/strategies\n" in (listed := capsys.readouterr().out)
    assert listed.endswith("experiment=my/zs\n    Stages of ZeRO.\n")
    started: list[list[str]] = []
    monkeypatch.setattr(experiments, "_run", lambda command: started.append(command[3:]) or 0)
    assert main(["experiments", "my", "--config-dir=my, conf", "train.seed=8"]) == 0
    assert started == [["experiment=my/zs", "train.seed=8", "--config-dir=my, conf"]]
    preset.rename(preset.with_name("it's, 1.yaml"))
    assert main(["experiments", "my", "--config-dir=my, conf", "train.seed=8"]) == 0
    assert started[1:] == [["experiment='my/it\\'s, 1'", "train.seed=8", "--config-dir=my, conf"]]
    for arguments, message in (
        (("--config-dir", "none"), "none is no folder: give an existing one to --config-dir"),
        (("-m", "ddp", "scale=tiny"), "-m is not an option: see distexp experiments --help"),
        (("--config-di", "x"), "--config-di is not an option: write --config-dir"),
    ):
        assert main(["experiments", *arguments]) == 2
        assert capsys.readouterr().err == f"distexp: {message}\n"


def test_experiments_report_a_misspelled_override_once(tmp_path: Path) -> None:
    done = run_module("distexp.experiments", "ddp", "scale=tiny", "strategy=foo", "zero_stage=1,2", cwd=tmp_path)
    assert done.returncode == 2
    error = "distexp: strategy=foo is not an option. Options: ddp, deepspeed, fsdp, single. "
    assert done.stderr == f"{error}A custom option, in FOLDER/strategy/foo.yaml, needs --config-dir FOLDER\n"
    assert done.stdout == ""


@pytest.mark.parametrize("columns", [50, 120])
def test_list_of_presets_is_as_wide_as_the_terminal(columns: int, tmp_path: Path) -> None:
    listed = run_module("distexp.experiments", cwd=tmp_path, env={"COLUMNS": str(columns)}).stdout.splitlines()
    assert columns - 15 < max(map(len, listed)) <= columns


def test_preset_requests_the_resources_of_its_cells(tmp_path: Path) -> None:
    done = run_module("distexp", "experiment=fsdp/custom_weak_scaling", *SLURM, "hydra.sweep.dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("#SBATCH --nodes=1") == 3
    assert done.stdout.count("#SBATCH --nodes=2") == 1
    assert re.findall(r"#SBATCH --gpus-per-node=(\d+)", done.stdout) == ["2", "4", "8", "8"]
