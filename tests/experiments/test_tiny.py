"""Real training of every preset with ``scale=tiny``, and the tables of the records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distexp.report.data.overview import Overview
from distexp.report.data.rows import load_rows
from distexp.report.exercises import exercise_tables
from distexp.runs.record import RunRecord
from distexp.tables.columns import TextTable
from tests.experiments.test_presets import PRESETS
from tests.helpers.presets import cells_of
from tests.helpers.runs import HELPERS, make_spec, run_distexp, run_ranks

WITHOUT_GPU_COLUMNS = ("time/step",)
SHEETS = ("deepspeed/baseline", "fsdp/baseline", "fsdp/custom_single")
MANY_RUNS = HELPERS / "many_runs.py"


SHORT = ("scale.train_size=16", "scale.eval_size=4", "train.max_steps=2", "train.measure_after_step=1")


CUT = {"cut/recompute": "tensor", "cut/tensor": "tensor", "cut/pipeline": "pipeline"}
"""What the workers of a preset share. Such runs need other process groups."""


def group_of(preset: str) -> tuple[int, str]:
    """Return the number of workers, and what they share."""
    return (1 if runs_on_one_worker(preset) else 2), CUT.get(preset, "")


def runs_on_one_worker(preset: str) -> bool:
    return preset.endswith(("baseline", "single", "single_gpu", "pin_memory", "zero_stages", "model_sizes", "parts"))


@pytest.fixture(scope="module")
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTable]:
    """Return the table of each tested preset after one run; runs with equal workers share their processes."""
    found: dict[str, TextTable] = {}
    tests = (item for item in request.session.items if "tables" in getattr(item, "fixturenames", ()))
    tested = {item.callspec.params["preset"] for item in tests if isinstance(item, pytest.Function)}
    for workers, shared in ((1, ""), (2, ""), (2, "tensor"), (2, "pipeline")):
        folder = tmp_path_factory.mktemp("tiny") / "deepspeed"
        place = ("cluster.nodes=1", f"cluster.workers_per_node={workers}")
        for preset in sorted(tested):
            if group_of(preset) == (workers, shared):
                position = 0 if preset.startswith("cut/") else -1  # later cells are cut for more workers
                words = [word.replace("'", "") for word in cells_of(preset, *place)[position]]
                if preset == "deepspeed/pin_memory":
                    words.append("offload=true")
                spec = make_spec(*words, *place, "scale=tiny", *SHORT)
                directory = folder / preset.replace("/", "_")
                directory.mkdir(parents=True)
                spec.write(directory)
        if not folder.exists():  # No preset of this group is tested.
            continue
        run_ranks(workers, MANY_RUNS, str(folder))
        rows, skipped = load_rows([folder])
        assert skipped == []
        for row in rows:
            (found[row.record.config["exercise"]],) = exercise_tables(Overview.from_rows([row]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_tiny_run_fills_a_row_of_its_table(preset: str, tables: dict[str, TextTable]) -> None:
    table = tables[preset]
    assert "scale=tiny" in table.note
    cells = {cell for row in table.rows for cell in row}
    assert ("no GPU" in cells) == (preset not in WITHOUT_GPU_COLUMNS)
    measured = [cell for cell in cells if re.fullmatch(r"[\d,]+\.\d+(x| M)?", cell)]
    assert measured, table
    assert ("not run" in cells) == (preset not in ("ddp/baseline", "map/strategies", *SHEETS))


def test_sweep_too_large_for_scale_tiny_reports_it_and_writes_the_table(tmp_path: Path) -> None:
    words = ("experiment=deepspeed/multi_node_weak_scaling", "scale=tiny", "cluster.nodes=8,16")
    done = run_distexp(*words, "hydra.sweep.dir=out", cwd=tmp_path, env={"COLUMNS": "300"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 workers, but scale=tiny allows 4" in done.stdout
    title = "Weak Scaling Across Nodes (deepspeed/multi_node_weak_scaling)"
    assert title not in done.stdout, "a table of nothing but the reasons above it"
    rows, skipped = load_rows([tmp_path / "out"])
    assert skipped == []
    (table,) = exercise_tables(Overview.from_rows(rows))
    assert table.title == title
    assert table.header[1:4] == ("2 nodes", "4 nodes", "8 nodes")
    first = table.rows[0]
    assert first[1:3] == ("not run", "not run")
    assert first[3:] == ("invalid [1]", "invalid [2]")
    assert table.reasons[0].startswith("[1] cluster.nodes=8 x cluster.workers_per_node=1 makes 8 workers")
    assert table.reasons[1].startswith("[2] cluster.nodes=16")


@pytest.mark.slow
def test_command_prints_the_table_of_its_exercise(tmp_path: Path) -> None:
    done = run_distexp("experiment=deepspeed/pin_memory", "scale=tiny", "hydra.sweep.dir=out", cwd=tmp_path,
                       env={"COLUMNS": "300"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = [RunRecord.read(path).status for path in sorted(tmp_path.glob("out/*/record.json"))]
    assert statuses == ["completed", "invalid"]
    _, _, table = done.stdout.partition("Stage 2 with and without pin_memory (deepspeed/pin_memory)")
    offloaded, pinned = (line for line in table.splitlines() if line.startswith("ZeRO Stage 2"))
    assert offloaded.split()[5:9] == ["no", "GPU", "no", "GPU"]
    assert float(offloaded.split()[-1].replace(",", "")) > 0, "samples/s"
    assert "invalid [1]" in pinned
    assert "[1] offload=pinned needs a GPU" in " ".join(table.split())
