"""Tests of ``benchmarks/presets.py``: its list of presets, the overrides, and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import presets
from benchmarks.presets import PRESETS, Preset, Row, accepts, overrides, parse, table
from distexp.config.keys import conf_dir


def test_every_preset_of_the_workshop_for_one_node_has_a_row() -> None:
    folder = conf_dir() / "experiment"
    found = {path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml")}
    several_nodes = {name for name in found if "multi_node" in name}
    others = {name for name in found if name.startswith(("cut/", "map/", "memory/", "time/"))}
    assert {preset.name for preset in PRESETS} == found - several_nodes - others
    assert len(PRESETS) == len({preset.name for preset in PRESETS})


def test_each_preset_gets_the_paths_of_its_data() -> None:
    images, text = Preset("ddp/baseline"), Preset("fsdp/baseline")
    given = ["dataset.train_path=T.json", "dataset.root=images", "scale=tiny"]
    assert [override for override in given if accepts(images, override)] == given[1:]
    assert [override for override in given if accepts(text, override)] == [given[0], given[2]]


def test_a_cell_runs_with_both_kernels_and_few_steps() -> None:
    chosen = overrides(Preset("ddp/multi_gpu", 2), parse(["--steps", "6", "--warmup", "2", "dataset.root=R"]))
    assert chosen[0] == "experiment=ddp/multi_gpu"
    assert {"cluster.workers_per_node=2", "kernels=reference,fast", "train.max_steps=8"} < set(chosen)
    assert {"train.measure_after_step=2", "dataset.train_size=8192", "dataset.root=R"} < set(chosen)


@pytest.mark.parametrize("arguments", [["--presets", "ddp/none"], ["tiny"], ["--gpus", "0"], ["--steps", "0"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_more_gpus_than_are_visible_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert parse(["--gpus", "1"]).gpus == 1
    with pytest.raises(SystemExit):
        parse(["--gpus", "2"])
    assert "--gpus=2, but CUDA_VISIBLE_DEVICES=3 has 1: lower it" in capsys.readouterr().err


def test_a_ratio_is_relative_to_the_reference_of_the_same_preset() -> None:
    rows = [
        Row("a", "reference", "completed", 10.0, 100.0, 2000.0, 1.5),
        Row("a", "fast", "completed", 25.0, 40.0, 1000.0, 1.5),
        Row("b", "reference", "oom_gpu"),
        Row("b", "fast", "completed", 5.0, 20.0, 4000.0, 2.0),
    ]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(rows).splitlines()[2:]]
    assert lines[1] == ["a", "fast", "25.0", "40.0", "2.50", "1,000", "0.50", "1.5000", "completed"]
    assert lines[2] == ["b", "reference", "-", "-", "-", "-", "-", "-", "oom_gpu"]
    assert lines[3][4] == "-"


def test_presets_that_need_more_gpus_do_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert presets.main(["--results", str(tmp_path), "--gpus", "1", "--presets", "ddp/multi_gpu"]) == []
    assert "ddp/multi_gpu: not run, needs --gpus 2" in capsys.readouterr().out
