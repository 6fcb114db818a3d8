"""Tests of the composition of many cells, against that of Hydra."""

from __future__ import annotations

import copy
import gc
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from distexp.compose import composition as parallel_composition
from distexp.compose.composition import CellComposer, CellRules, compose_cells
from distexp.config import ConfigError, register_schema
from distexp.config.keys import conf_dir
from distexp.exceptions import SweepInterrupted
from distexp.guard.config_files import CheckedConfigLoader
from distexp.system.processes import handle_signals

CELLS = [
    [],
    ["train.seed=3"],
    ["strategy=fsdp", "train.micro_batch_size=2", "dataset.train_size=null"],
    ["zero_stage='2'", "offload='true'", "deepspeed={overlap_comm: true}"],
    ["++cluster.environment.NCCL_DEBUG=INFO", "train.betas=[0.8,0.9]", "name=${model.name}_${now:%Y}"],
    ["~scale", "model=gpt_tiny", "+model.options.a=1"],
    ["model={name: mine}", "scale=tiny", "hydra.job.name=other"],
]
"""Cells with options, values, added and deleted keys, dicts, references and keys of Hydra."""

TraceFunction = Callable[[FrameType, str, Any], Any]

SEEDS = [["strategy=fsdp" if number % 3 else "strategy=ddp", f"train.seed={number}"] for number in range(40)]


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[HydraContext, DictConfig]]:
    """Load the primary configuration once for all tests."""
    register_schema()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = CheckedConfigLoader(GlobalHydra.instance().config_loader().get_search_path())
        overrides = ["cluster.device=cpu", "hydra.sweep.dir=somewhere"]
        master = loader.load_configuration("config", overrides, RunMode.MULTIRUN)
        str(master.hydra.sweep.dir)  # so that references such as ${now:} are cached, as in a command
        yield HydraContext(config_loader=loader, callbacks=Callbacks()), master


@pytest.fixture
def hydra(loaded: tuple[HydraContext, DictConfig]) -> tuple[HydraContext, DictConfig]:
    """Return what Hydra passes to a launcher."""
    context, master = loaded
    return context, copy.deepcopy(master)


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_a_cell_is_composed_as_by_hydra(cell: list[str], hydra: tuple[HydraContext, DictConfig]) -> None:
    context, master = hydra
    composer = CellComposer(context.config_loader, master)  # type: ignore[arg-type]
    composer.compose(["strategy=fsdp", "train.seed=9", "zero_stage='2'"])  # leaves no trace in other cells
    expected, found = context.config_loader.load_sweep_config(master, cell), composer.compose(cell)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    assert found == expected
    assert OmegaConf.get_type(found, "train") is OmegaConf.get_type(expected, "train")
    assert OmegaConf.is_struct(found)
    assert OmegaConf.get_cache(found) == OmegaConf.get_cache(expected)


@pytest.mark.parametrize(
    "cell", [["train.sed=1"], ["strategy=fspd"], ["train.seed=x"], ["+train.seed=1"], ["~train.seed"], ["a"]]
)
def test_a_wrong_cell_raises_the_error_of_hydra(cell: list[str], hydra: tuple[HydraContext, DictConfig]) -> None:
    context, master = hydra
    with pytest.raises(HydraException) as expected:
        context.config_loader.load_sweep_config(master, cell)
    with pytest.raises(HydraException) as found:
        CellComposer(context.config_loader, master).compose(cell)  # type: ignore[arg-type]
    assert (type(found.value), str(found.value)) == (type(expected.value), str(expected.value))


def test_ctrl_c_at_any_line_of_a_composition_is_an_interruption(hydra: tuple[HydraContext, DictConfig]) -> None:
    """Ctrl-C while OmegaConf fills a list makes its cleanup fail, which replaces the interruption by an error."""
    context, master = hydra
    composer = CellComposer(context.config_loader, master)  # type: ignore[arg-type]
    compose = partial(composer.compose, CELLS[2])
    compose()
    errors = [interrupt_at(line, compose) for line in range(1, 40_000, 150)]
    reached = [error for error in errors if error is not None]
    assert {type(error) for error in reached} == {KeyboardInterrupt}
    assert any(error.__context__ is not None for error in reached), "the cleanup failed at no line"


def interrupt_at(number: int, call: Callable[[], object]) -> BaseException | None:
    """Send SIGINT to this process at a line of a call. Return its error, or None if it has fewer lines."""
    lines, error = 0, None

    def press(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal lines
        lines += event == "line"
        if lines == number and event == "line":
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return press

    before = sys.gettrace()
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell ignores it in what ends with &.
    gc.disable()  # Python ignores what is raised while it collects garbage.
    sys.settrace(press)
    try:
        call()
    except BaseException as raised:
        error = raised
    finally:
        sys.settrace(before)
        gc.enable()
        signal.signal(signal.SIGINT, ignored)
    return error


def test_processes_return_the_cells_in_order(
    hydra: tuple[HydraContext, DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_composition, "cpu_count", lambda: 1)
    serial = compose_cells(*hydra, SEEDS)
    monkeypatch.setattr(parallel_composition, "cpu_count", lambda: 2)
    parallel = compose_cells(*hydra, SEEDS, lambda composed, _: setattr(composed, "name", f"made_by_{os.getpid()}"))
    made_by = {int(cell.composed.name.removeprefix("made_by_")) for cell in parallel[1:]}
    assert os.getpid() not in made_by
    assert [cell.overrides for cell in parallel] == SEEDS
    assert [(cell.id, cell.varied) for cell in parallel] == [(cell.id, cell.varied) for cell in serial]
    assert len({cell.id for cell in parallel}) == 40
    assert [cell.config and cell.config.train.seed for cell in parallel] == list(range(40))


MICRO, TRAIN = "train.micro_batch_size", "dataset.train_size"


@pytest.mark.parametrize(
    ("command", "cells", "warnings"),
    [
        (
            [MICRO],
            [[f"{MICRO}={size}", "scale=tiny"] for size in (2, 4, 8, 8)],
            [f"scale=tiny lowers {MICRO}=8 to 4: to keep 8, add scale.micro_batch_size=null"],
        ),
        (
            ["train.global_batch_size"],
            [["train.global_batch_size=64", "scale=tiny", "strategy=ddp", "cluster.workers_per_node=2"]],
            [
                "scale=tiny lowers train.global_batch_size=64 to 16: to keep 64, "
                "add scale.micro_batch_size=null scale.gradient_accumulation_steps=null"
            ],
        ),
        (
            ["train.global_batch_size"],
            [["train.global_batch_size=64", "scale=tiny", "scale.micro_batch_size=null", "strategy=single"]],
            [
                "scale=tiny lowers train.global_batch_size=64 to 16: to keep 64, "
                "add scale.gradient_accumulation_steps=null"
            ],
        ),
        ([TRAIN], [[f"{TRAIN}=500", "scale=tiny", "scale.train_size=null"]], []),
        ([TRAIN], [[f"{TRAIN}=500"]], []),
        ([], [[f"{TRAIN}=500", "scale=tiny"]], []),
    ],
    ids=["micro-batch", "global batch", "one limit removed", "limit removed", "full scale", "value of a preset"],
)
def test_a_value_that_the_scale_lowers_gets_one_warning(
    command: list[str], cells: list[list[str]], warnings: list[str],
    hydra: tuple[HydraContext, DictConfig], capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    context, master = hydra
    master.hydra.overrides.task = [f"{key}=1" for key in command]
    compose_cells(context, master, cells)
    assert capsys.readouterr().err.splitlines() == [f"distexp: warning: {text}" for text in warnings]


def test_a_resumed_sweep_does_not_repeat_the_warnings(
    hydra: tuple[HydraContext, DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    context, master = hydra
    master.hydra.overrides.task, master.sweep.resume = [f"{TRAIN}=500"], True
    compose_cells(context, master, [[f"{TRAIN}=500", "scale=tiny"]])
    assert not capsys.readouterr().err


STEPS = "train.gradient_accumulation_steps"


@pytest.mark.parametrize(("steps", "error"), [(4, ""), (8, f"{STEPS}=8 has no effect: train.global_batch_size=32")])
def test_an_accumulation_that_the_global_batch_replaces_is_an_error(
    steps: int, error: str, hydra: tuple[HydraContext, DictConfig]
) -> None:
    context, master = hydra
    cells = [["strategy=single", f"{STEPS}={steps}", "train.global_batch_size=32"]]
    compose_cells(context, master, cells)  # A preset has the value.
    master.hydra.overrides.task = [f"{STEPS}={steps}"]
    if not error:
        compose_cells(context, master, cells)
        return
    with pytest.raises(ConfigError, match=f"{error} sets the accumulation to 4. Leave one of the two out"):
        compose_cells(context, master, cells)


def test_a_search_keeps_the_global_batch(
    hydra: tuple[HydraContext, DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    context, master = hydra
    master.hydra.overrides.task = ["train.global_batch_size=64"]
    cells = [["train.global_batch_size=64", "scale=tiny", "command=choose"]]
    compose_cells(context, master, cells, rules=CellRules(may_be_invalid=True, sizes_vary=True))
    assert capsys.readouterr().err == "", "its candidates are not limited by the scale"


def test_an_error_in_a_process_keeps_its_cause(
    hydra: tuple[HydraContext, DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_composition, "cpu_count", lambda: 2)
    with pytest.raises(HydraException, match=r"Error merging override train.seed=x") as found:
        compose_cells(*hydra, [*SEEDS[:30], ["train.seed=x"], *SEEDS[30:]])
    assert found.value.__cause__ is not None, "the message is made from the cause"


def test_ctrl_c_while_composing_starts_nothing(
    hydra: tuple[HydraContext, DictConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = os.getpid()

    def press_ctrl_c(_: DictConfig, overrides: object) -> None:
        if overrides == SEEDS[30]:
            os.kill(launcher, signal.SIGINT)

    monkeypatch.setattr(parallel_composition, "cpu_count", lambda: 2)
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children())
    # A shell starts background processes with SIGINT ignored, and the tests may run in the background.
    with (
        handle_signals(signal.default_int_handler, signal.SIGINT),
        pytest.raises(SweepInterrupted, match="no run was started"),
    ):
        compose_cells(*hydra, SEEDS, press_ctrl_c)
    assert set(psutil.Process().children()) <= before
    assert list(tmp_path.iterdir()) == []


def test_a_cell_takes_less_cpu_time_than_one_composition_by_hydra(hydra: tuple[HydraContext, DictConfig]) -> None:
    """About a quarter is usual. The bound is generous."""
    context, master = hydra
    compose_cells(*hydra, SEEDS[:2])  # imports
    by_hydra = [cpu_time(partial(context.config_loader.load_sweep_config, master, cell)) for cell in SEEDS[:5]]
    # Each is composed in this process, because they are few.
    ours = [cpu_time(partial(compose_cells, *hydra, SEEDS[:9])) for _ in range(3)]
    assert min(ours) / 9 < 0.7 * statistics.median(by_hydra)


def cpu_time(work: Callable[[], object]) -> float:
    """Return the CPU seconds that this process takes for some work."""
    before = time.process_time()
    work()
    return time.process_time() - before
