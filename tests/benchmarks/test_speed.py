"""Tests of ``benchmarks/speed.py``: its tables, the reasons not to run, and a real run on a CPU."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import measurement, speed
from benchmarks.measurement import Measurement, reason_not_to_run
from benchmarks.peers.settings import Settings
from benchmarks.tables import all_rows, best, best_rows, efficiency, group, speed_ratio
from distexp.config import DatasetConfig


def settings(peer: str, micro_batch: int = 16, strategy: str = "single", workers: int = 1) -> Settings:
    return Settings(peer, "bloom_560m", "T.json", "E.json", strategy=strategy, workers=workers, micro_batch=micro_batch)


def measured(
    peer: str, *speeds: float, micro_batch: int = 16, strategy: str = "single", workers: int = 1, peak: float = 1000.0
) -> list[Measurement]:
    chosen = settings(peer, micro_batch, strategy, workers)
    return [
        Measurement(chosen, repeat, "completed", samples_per_second=one, peak_mib=peak)
        for repeat, one in enumerate(speeds, start=1)
    ]


def table_rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_a_ratio_is_the_median_of_the_ratios_of_each_repeat() -> None:
    ours, theirs = group([*measured("ours", 100, 200, 400), *measured("raw", 50, 200, 100)])

    assert speed_ratio(ours, theirs) == 2  # of 2, 1 and 4; the medians of the speeds would also give 2
    assert speed_ratio(theirs, ours) == 0.5


def test_a_ratio_needs_a_common_repeat() -> None:
    ours, theirs = group([*measured("ours", 100), *measured("raw", 50, 60)[1:]])

    assert speed_ratio(ours, theirs) is None


def test_the_efficiency_is_relative_to_one_worker_with_the_same_batch() -> None:
    rows = group(
        [
            *measured("ours", 100),
            *measured("ours", 300, micro_batch=64),
            *measured("ours", 190, strategy="ddp", workers=2),
            *measured("raw", 150, strategy="ddp", workers=2),
        ]
    )

    assert [efficiency(row, rows) for row in rows] == [None, None, 0.95, None]


def test_a_peer_that_failed_is_a_row_without_numbers() -> None:
    failed = Measurement(settings("raw", 64), 1, "out of memory", "CUDA out of memory | 4 GiB")

    rows = table_rows(all_rows([*measured("ours", 300, 320, micro_batch=64), failed]))

    assert rows[0] == [
        "single",
        "1",
        "ours",
        "64",
        "310.0",
        "300.0",
        "320.0",
        "1.00",
        "-",
        "1,000",
        "-",
        "-",
        "completed",
    ]
    assert rows[1] == ["single", "1", "raw", "64", *["-"] * 8, "out of memory: CUDA out of memory / 4 GiB"]


def test_the_best_table_compares_the_fastest_batches() -> None:
    all_measured = [
        *measured("ours", 300, micro_batch=16, peak=500),
        *measured("ours", 400, micro_batch=64, peak=2000),
        *measured("trainer", 160, micro_batch=16, peak=4000),
        Measurement(settings("trainer", 64), 1, "out of memory"),
    ]

    assert [(row.peer, row.key[3]) for row in best(group(all_measured))] == [("ours", 64), ("trainer", 16)]
    assert table_rows(best_rows(all_measured)) == [
        ["single", "1", "ours", "64", "400.0", "1.00", "2,000", "1.00"],
        ["single", "1", "trainer", "16", "160.0", "2.50", "4,000", "0.50"],
    ]


@pytest.mark.parametrize(
    ("peer", "strategy", "reason"),
    [
        ("ours", "zero2", None),
        ("raw", "ddp", None),
        ("raw", "fsdp", "it has no fsdp"),
        ("fsdp2", "single", "it has no single"),
    ],
)
def test_a_peer_without_a_strategy_is_not_run(peer: str, strategy: str, reason: str | None) -> None:
    assert reason_not_to_run(settings(peer, strategy=strategy)) == reason


def test_unknown_arguments_are_refused(
    squad_files: DatasetConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--train-path", str(squad_files.train_path), "--eval-path", str(squad_files.eval_path)]

    with pytest.raises(SystemExit):
        speed.main([*paths, "--peers", "ours,torchtitan", "--results", str(tmp_path / "new")])

    assert "--peers: torchtitan is unknown: use ours, reference, trainer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--steps", "--repeats", "--micro-batch", "--accumulation", "--gpus"])
def test_sizes_are_at_least_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speed.main([name, "0"])
    assert f"argument {name}: 0 is not at least 1" in capsys.readouterr().err


def test_a_command_continues_after_an_interruption(
    squad_files: DatasetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    def measure(chosen: Settings, repeat: int, folder: Path, timeout_s: float) -> Measurement:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append((chosen.peer, repeat))
        if chosen.peer == "raw":
            return Measurement(chosen, repeat, "out of memory")
        return Measurement(chosen, repeat, "completed", wall_s=1.0, samples_per_second=1.0)

    monkeypatch.setattr(speed, "measure", measure)
    arguments = ["--train-path", str(squad_files.train_path), "--eval-path", str(squad_files.eval_path)]
    arguments += ["--peers", "ours,raw,trainer", "--repeats", "2", "--results", str(tmp_path)]

    with pytest.raises(KeyboardInterrupt):
        speed.main(arguments)
    assert calls == [("ours", 1), ("raw", 1), ("trainer", 1)]

    calls.clear()
    assert len(speed.main([*arguments, "--budget-s", "0"])) == 3
    assert calls == []

    measurements = speed.main(arguments)
    assert calls == [("ours", 2), ("trainer", 2)]  # what failed is not repeated
    assert len(measurements) == 5
    assert len(table_rows(all_rows(measurements))) == 3


def test_a_measurement_replaces_the_files_of_an_interrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int:
        log.write_text("ValueError: no result")
        return 1

    monkeypatch.setattr(measurement, "run", fail)
    (tmp_path / "000_ours" / "run").mkdir(parents=True)
    found = measurement.measure(settings("ours"), 1, tmp_path / "000_ours", 1.0)
    assert found.status == "failed"
    assert not (tmp_path / "000_ours" / "run").exists()


@pytest.mark.release
def test_all_peers_train_the_same_samples_on_a_cpu(squad_files: DatasetConfig, tmp_path: Path) -> None:
    arguments = ["--train-path", str(squad_files.train_path), "--eval-path", str(squad_files.eval_path)]
    arguments += ["--device", "cpu", "--model", "bloom_tiny", "--no-compile", "--peers"]
    arguments += ["ours,trainer,trainer_grouped,accelerate,raw,workshop,fsdp2"]
    arguments += ["--strategies", "ddp,fsdp", "--gpus", "2"]
    arguments += ["--micro-batch", "2", "--max-length", "64", "--warmup", "1", "--steps", "3", "--repeats", "1"]
    arguments += ["--timeout-s", "3600", "--results", str(tmp_path / "results")]

    measurements = speed.main(arguments)

    found = {(one.settings.peer, one.settings.strategy): one for one in measurements}
    assert {name: one.status for name, one in found.items() if one.status == "failed"} == {}
    completed = {name for name, one in found.items() if one.status == "completed"}
    expected = {(peer, "ddp") for peer in ("ours", "trainer", "trainer_grouped", "accelerate", "raw")}
    assert completed == expected | {("ours", "fsdp"), ("fsdp2", "fsdp")}
    assert found["workshop", "ddp"].reason == "fp16 needs a GPU"
    # The Trainer reports no loss of all workers.
    losses = [one.loss for one in found.values() if one.loss is not None]
    assert losses == pytest.approx([math.log(1024)] * len(losses), rel=0.05)  # that of untrained weights
    written = json.loads((tmp_path / "results" / "results.json").read_text())
    assert len(written["measurements"]) == len(measurements)
    assert "| fsdp | 2 | fsdp2 | 2 |" in (tmp_path / "results" / "table.md").read_text()
