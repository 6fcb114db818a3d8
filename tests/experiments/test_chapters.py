"""The chapters 6 to 10 of the workshop: their commands compose, and teach what the pages show."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from distexp.config.model_checks import SQUAD_SAMPLE_EVAL, SQUAD_SAMPLE_TRAIN
from distexp.data.squad_sample import generate
from distexp.experiments import main as list_experiments
from distexp.runs.record import RunRecord
from tests.experiments.test_presets import SHAPES
from tests.helpers.records import invalid, record, write
from tests.helpers.runs import REPOSITORY, TIMEOUT_S, resolve_cell, run_distexp, start_module

PAGES = sorted((REPOSITORY / "docs" / "workshop").glob("*.md"))
NOTEBOOKS = sorted((REPOSITORY / "examples" / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = {"experiments", "ls", "preflight", "report", "status"}
"""Commands of distexp that the pages have, apart from runs."""
DS_CONFIG, FIXED = "ds_config.json", "fixed.json"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    text = (REPOSITORY / "docs" / "workshop" / page).read_text()
    return [code for found, code in BLOCK.findall(text) if found == language]


def distexp_lines(page: str) -> list[list[str]]:
    """Return the arguments of each distexp command of a page, without ``plan`` and redirections."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("distexp ")]
    found = [shlex.split(line.split(" > ")[0])[1:] for line in lines]
    return [line[1:] if line[0] == "plan" else line for line in found]


RUNS = [(page.name, line) for page in PAGES for line in distexp_lines(page.name) if line[0] not in COMMANDS]


def write_files(folder: Path) -> None:
    """Write the ds_config.json of the page, and the one with 4 in place of the first "auto"."""
    text = blocks("deepspeed-config.md", "json")[0]
    (folder / DS_CONFIG).write_text(text)
    (folder / FIXED).write_text(text.replace('"auto"', "4", 1))


def save_architecture(folder: Path) -> None:
    """Write the ``base/model`` of chapter 7, which an earlier command of the page trains, without weights."""
    model = folder / "base" / "model"
    model.mkdir(parents=True)
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 1024, "n_layer": 2}
    (model / "config.json").write_text(json.dumps(gpt2))
    (model / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(("page", "line"), RUNS, ids=[f"{page}-{n}" for n, (page, _) in enumerate(RUNS)])
def test_a_run_of_a_page_composes(page: str, line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    save_architecture(tmp_path)
    options = [re.sub(r"^cluster\.environment", "++cluster.environment", text) for text in line]  # as the command does
    options = [text for text in options if not text.startswith(("--", "hydra."))]
    swept = [text for text in options if "," in text]
    for value in swept[0].partition("=")[2].split(",") if swept else [""]:
        cell = [f"{text.partition('=')[0]}={value}" if text in swept else text for text in options]
        if any(FIXED in text for text in cell) and "train.micro_batch_size=4" not in cell:
            with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu=4, but this run has 8"):
                resolve_cell(*cell)
        else:
            assert resolve_cell(*cell)


def test_the_pages_name_commands_and_presets_that_exist() -> None:
    assert {line[0] for page in PAGES for line in distexp_lines(page.name)} >= COMMANDS
    (day,) = (line for line in distexp_lines("whole-day.md") if "cluster.partition=gpu" in line)
    assert sum(map(len, SHAPES.values())) == 133
    assert resolve_cell("experiment=fsdp/baseline", *day[1:])


def test_the_patterns_of_the_page_match_four_exercises(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_experiments(["*/baseline", "fsdp/custom_multi_gpu"]) == 0
    assert capsys.readouterr().out.count("experiment=") == 4


def test_what_auto_becomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distexp.strategies.zero.ds_config import effective_config, fit_buckets

    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    (line,) = (each for each in distexp_lines("deepspeed-config.md") if "hydra.run.dir=from_file" in each)
    effective = effective_config(resolve_cell(*[text for text in line if not text.startswith("hydra.")]), 2)
    fit_buckets(effective, parameters=165_760, largest=65_536)
    assert effective == json.loads(blocks("deepspeed-config.md", "json")[1])


def run_lines(page: str, folder: Path, chosen: str) -> str:
    """Run the commands of a page that contain a text, one after another, and return what they print."""
    printed = ""
    for line in distexp_lines(page):
        if any(chosen in text for text in line):
            done = start_module("distexp", *line, cwd=folder)
            assert done.returncode == 0, done.stdout + done.stderr
            printed += done.stdout
    return printed


def test_the_texts_of_the_evaluation_are_new() -> None:
    training, evaluation = (
        [paragraph["context"] for article in generate(*split)["data"] for paragraph in article["paragraphs"]]
        for split in (("train", SQUAD_SAMPLE_TRAIN), ("dev", SQUAD_SAMPLE_EVAL))
    )
    people = {" ".join(text.split()[:2]) for text in training}
    assert len(evaluation) == 32
    assert not set(training) & set(evaluation)
    assert sum(" ".join(text.split()[:2]) in people for text in evaluation) == 20
    assert "Ada Berg" not in people


@pytest.mark.release
def test_fine_tuning_answers_the_questions_and_the_trainer_agrees(tmp_path: Path) -> None:
    run_lines("fine-tuning.md", tmp_path, "strategy=single")
    folders = ("tuned/0", "tuned/1", "trainer")
    before, after, trainer = (RunRecord.read(tmp_path / name / "record.json").metrics for name in folders)
    assert before.exact_match is not None
    assert after.exact_match is not None
    assert before.exact_match < 40
    assert after.exact_match > 90
    assert trainer.eval_losses == pytest.approx(after.eval_losses, rel=1e-3)
    assert list((tmp_path / "trainer" / "tensorboard").iterdir())
    (look,) = blocks("fine-tuning.md", "python")
    (tmp_path / "look.py").write_text(look.replace("base/model", "trainer/model"))
    done = subprocess.run([sys.executable, "look.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("answer:  Lima</s>\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_processes_find_each_other_by_variables(tmp_path: Path) -> None:
    script = str(REPOSITORY / "examples" / "workshop" / "ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"rank \d of 2: .* sum of all ranks 1", done.stdout)) == [
        f"rank {rank} of 2: gloo on cpu, sum of all ranks 1" for rank in (0, 1)
    ], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    run_cells(*("".join(cell["source"]) for cell in cells))


def run_cells(*cells: str) -> str:
    """Run cells of a notebook in this process, which has imported torch. Return what they print."""
    start = subprocess.run

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        if list(command[1:3]) == ["-m", "distexp"]:
            return run_distexp(*command[3:], cwd=options["cwd"])
        return start(command, **options)

    with patch("subprocess.run", run), redirect_stdout(StringIO()) as printed:
        exec("\n\n".join(cells), {"__name__": "__main__"})
    return printed.getvalue()


def test_the_notebook_has_a_table_of_any_records(tmp_path: Path) -> None:
    (notebook,) = (path for path in NOTEBOOKS if path.stem == "read_results")
    cells = ["".join(cell["source"]) for cell in json.loads(notebook.read_text())["cells"]]
    (imports,), (table,) = ([cell for cell in cells if text in cell] for text in ("import pandas", "json_normalize(r"))
    write(tmp_path / "cpus", record(0), invalid(1, "wrong"))
    write(tmp_path / "gpus" / "sweep", record(0, peak=100.0), invalid(1, "wrong"))
    for name, run in (("cpus", "0"), ("gpus", "sweep/0")):
        chosen = f"results = Path({str(tmp_path / name)!r})"
        printed = run_cells(imports, chosen, table, "print(table.to_json(orient='index'))")
        assert json.loads(printed)[run]["samples/s"] == record(0).metrics.train_samples_per_second


def test_notebooks_are_small_and_have_no_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        assert path.stat().st_size < 100_000
        assert not any(cell.get("outputs") for cell in json.loads(path.read_text())["cells"])
