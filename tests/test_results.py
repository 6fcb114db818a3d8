"""The numbers of the README and of ``docs/results``, computed again from the committed records and measurements."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.choose import read_cells, replay
from benchmarks.forecast import read_rows
from benchmarks.speed import read_results
from benchmarks.tables import Row, efficiency, group
from tests.helpers.gpu_records import RESULTS, gpu_records
from tests.helpers.printed_tables import unwrapped
from tests.helpers.runs import REPOSITORY

README = unwrapped((REPOSITORY / "README.md").read_text())
SPEED = "speed_h100.json"


def numbers(pattern: str) -> list[float]:
    """Return the numbers in the only place of the README that matches a pattern."""
    (found,) = re.findall(pattern, README)
    return [float(text.replace(",", "")) for text in ([found] if isinstance(found, str) else found)]


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_page_has_the_tables_of_its_records(page: str) -> None:
    text, tables = (RESULTS / page).read_text(), pages.tables(page)
    assert tables
    missing = [title for title, table in tables.items() if table not in text]
    assert not missing, f"python -m benchmarks.pages prints the tables of {page}"


def test_the_records_are_of_clean_commits_and_the_right_files() -> None:
    for path, record in gpu_records().items():
        assert record.run.git_dirty is False, path
        data = record.config["dataset"]
        if data["name"] == "squad":
            assert (data["train_path"], data["eval_path"]) == ("train-v1.1.json", "dev-v1.1.json"), path


@pytest.mark.parametrize("page", ["exercises.md", "explain.md", "forecast.md", "speed.md"])
def test_a_page_has_no_table_without_records(page: str) -> None:
    found = re.findall(r"(?:^\|.*\n)+", (RESULTS / page).read_text(), re.MULTILINE)
    known = pages.tables(page) if page in pages.PAGES else {}
    assert [table for table in found if table not in known.values()] == []


def test_every_committed_file_is_without_folders_of_a_machine() -> None:
    for path in RESULTS.glob("**/*.json"):
        assert not re.search(r'"/|=/(?!data)', path.read_text()), path


@pytest.fixture(scope="module")
def speeds() -> list[Row]:
    return group(read_results(RESULTS / SPEED))


def row_of(rows: list[Row], strategy: str, peer: str) -> Row:
    (found,) = [row for row in rows if row.key[0] == strategy and row.peer == peer]
    return found


def test_the_speeds_of_the_readme_are_measured(speeds: list[Row]) -> None:
    ours, trainer = (row_of(speeds, "single", peer) for peer in ("ours", "trainer"))
    batches = [ours.key[3], trainer.key[3]]
    assert numbers(r"trained BLOOM-560m at ([\d,]+) samples/s, with ([\d,]+) samples per micro-batch") == [
        round(ours.speed or 0),
        batches[0],
    ]
    assert numbers(r"had ([\d,]+) samples/s, with ([\d,]+) samples per micro-batch and all logits") == [
        round(trainer.speed or 0),
        batches[1],
    ]
    guide = (REPOSITORY / "docs/how-to/run.md").read_text()
    assert f"BLOOM-560m had [{round(ours.speed or 0)} samples/s]" in guide
    shares = [100 * (row.largest("padding_share") or 0) for row in (ours, trainer)]
    assert numbers(r"In both, about (\d+) % of the positions are padding") == [round(shares[0])]
    assert shares == pytest.approx([shares[0]] * 2, abs=1)


def test_the_factor_of_the_page_is_measured(speeds: list[Row]) -> None:
    ours, trainer = (row_of(speeds, "single", peer).speed or 0 for peer in ("ours", "trainer"))
    found = re.search(r"distexp trains ([\d.]+) times as fast as the Trainer", (RESULTS / "speed.md").read_text())
    assert found is not None
    assert float(found[1]) == round(ours / trainer, 1)


def test_the_share_of_the_logits_is_that_of_the_architecture() -> None:
    vocabulary, hidden, layers, length = 250_880, 1024, 24, 512
    head, blocks = 2 * vocabulary * hidden, layers * 24 * hidden**2  # FLOPs of a token
    attention = layers * 4 * length * hidden
    share = round(100 * head / (head + blocks + attention))
    assert numbers(r"these logits are (\d+) % of the FLOPs") == [share]
    assert f"is {share} % of BLOOM-560m's FLOPs" in unwrapped((RESULTS / "speed.md").read_text())


def test_the_efficiencies_of_the_readme_are_measured(speeds: list[Row]) -> None:
    found = [100 * (efficiency(row_of(speeds, strategy, "ours"), speeds) or 0) for strategy in ("ddp", "fsdp", "zero2")]
    assert numbers(r"DDP, FSDP and ZeRO-2 have an efficiency of (\d+) to (\d+) %") == [
        round(min(found)),
        round(max(found)),
    ]


def test_the_accuracy_of_plan_in_the_readme_is_measured() -> None:
    predicted, measured = (cells(f"plan_{name}.json") for name in ("predicted_first", "measured"))
    worst = max(abs(predicted[run]["peak_allocated_mib"] / measured[run]["peak_allocated_mib"] - 1) for run in measured)
    assert numbers(
        r"In (\d+) runs on H200s, the peak was predicted before the run. The error was at most ([\d.]+) %"
    ) == [
        len(measured),
        round(100 * worst, 1),
    ]
    others, found = (cells(f"plan_{name}_models.json") for name in ("predicted", "measured"))
    models = {text.split("model.name=")[1].split()[0] for text in found}
    worst = max(abs(others[run]["peak_allocated_mib"] / found[run]["peak_allocated_mib"] - 1) for run in found)
    assert (len(found), len(models)) == (24, 9)
    assert worst < 0.001
    others, found = (cells(f"plan_{name}_cut.json") for name in ("predicted", "measured"))
    assert len(found) == 12
    assert all(abs(others[run]["peak_allocated_mib"] / found[run]["peak_allocated_mib"] - 1) < 0.001 for run in found)
    others, found = (cells(f"plan_{name}_architectures.json") for name in ("predicted", "measured"))
    errors = [abs(others[run]["peak_allocated_mib"] / found[run]["peak_allocated_mib"] - 1) for run in found]
    assert numbers(r"In (\d+) runs of 17 further architectures it was at most ([\d.]+) %, after") == [
        len(found),
        round(100 * max(errors), 1),
    ]
    assert "In 24 runs of nine other models on one or two GPUs, and 12 of Llama's 8B shape on two or four, " in README
    assert "it was below 0.1 %" in README
    errors = errors_of_sweeps()
    assert numbers(r"infer micro-batches, it was up to (\d+) %") == [round(100 * max(errors))]
    text = unwrapped((RESULTS / "choose.md").read_text())
    (counts,) = re.findall(
        r"Over all (\d+) runs of these pages it is at most 2 % in (\d+) % of the runs, and at most (\d+) %", text
    )
    small = sum(error <= 0.02 for error in errors) / len(errors)
    assert [int(number) for number in counts] == [len(errors), round(100 * small), round(100 * max(errors))]


def errors_of_sweeps() -> list[float]:
    """Return the relative errors of the predicted peaks in the sweeps of ``benchmarks/choose.py`` on GPUs."""
    return [
        abs(one.expected_mib / one.peak_mib - 1)
        for path in RESULTS.glob("choose_*.json")
        for cell in read_cells(path)
        for one in cell.candidates
        if not cell.on_cpus and one.status == "completed" and one.expected_mib and one.peak_mib
    ]


def test_the_searches_of_the_readme_are_replayed() -> None:
    blind = ("choose_new_models.json", "choose_opt_gemma.json")
    new = [replay(cell, limit) for name in blind for cell in read_cells(RESULTS / name) for limit in (24.0, 40.0, 80.0)]
    best = [found for found in new if found is not None and found.regret == 0]
    assert numbers(r"found the fastest configuration in (\d+) of (\d+) cases") == [len(best), len(new)]
    names = ("choose_h200.json", "choose_two_h200.json", *blind)
    sizes = [len(cell.candidates) for name in names for cell in read_cells(RESULTS / name)]
    assert numbers(r"measured sweeps of (\d+) to (\d+) configurations") == [min(sizes), max(sizes)]


def cells(name: str) -> dict[str, dict[str, Any]]:
    """Return the runs of a file of ``plan.py``."""
    found: dict[str, dict[str, Any]] = json.loads(Path(RESULTS / name).read_text())["cells"]
    return found


def test_the_table_of_failures_is_that_of_the_results() -> None:
    rows = json.loads((RESULTS / "failures.json").read_text())
    page = (RESULTS / "failures.md").read_text()
    assert f"The {len(rows)} results" in page
    for problem in {row["problem"] for row in rows}:
        named = [row["named"] for row in rows if row["problem"] == problem]
        assert re.search(rf"^\| {re.escape(problem)} \| .* \| {sum(named)} of {len(named)} \| ", page, re.MULTILINE)


def test_the_readme_has_the_errors_of_the_recorded_forecasts() -> None:
    errors = [100 * abs(row.error) for row in read_rows(RESULTS / "forecast_two_h200.json")]
    found = numbers(
        r"records of (\d+) runs on two GPUs only: a median error of ([\d.]+) %, and a largest one of ([\d.]+) %"
    )
    assert found == [len(errors), round(median(errors), 1), round(max(errors), 1)]
