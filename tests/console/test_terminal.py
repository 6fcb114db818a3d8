"""Tests of commands on a terminal: what they show while they run, and what is left of it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.runs import REPOSITORY
from tests.helpers.terminal import Terminal, shown_lines

SILENT = """
import sys, time
from distexp.system.silence import announced, set_step
with announced("preparing", silent_s=0.2):
    time.sleep(1)
    print("a line")
    set_step("composing")
    time.sleep(1)
    print("a question? ", end="", flush=True)
    time.sleep(1)
    print("yes")
    time.sleep(0.5)
print(f"the end {sys.stdout is sys.__stdout__}")
"""


def environment(**changed: str) -> dict[str, str]:
    """Return the environment of a command in another folder."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "TERM")}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changed}


def test_a_silent_command_shows_what_it_does_and_removes_that_before_its_next_line(tmp_path: Path) -> None:
    command = Terminal([sys.executable, "-c", SILENT], tmp_path, 80, environment())
    assert command.wait() == 0
    shown = re.findall(r"\r\x1b\[2K(\w+), \d+ s", command.output)
    assert sorted(set(shown)) == ["composing", "preparing"]
    assert shown_lines(command.output) == ["a line", "a question? yes", "the end True", ""]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_silent_command_on_a_plain_terminal_adds_nothing(tmp_path: Path, name: str, value: str) -> None:
    command = Terminal([sys.executable, "-c", SILENT], tmp_path, 80, environment(**{name: value}))
    assert command.wait() == 0
    assert command.output.splitlines() == ["a line", "a question? yes", "the end True"]


@pytest.mark.slow
def test_a_sweep_on_a_terminal_that_gets_narrow_and_is_interrupted(tmp_path: Path) -> None:
    overrides = ["scale=tiny", "model=gpt_tiny", "cluster.device=cpu", "cluster.workers_per_node=1", "strategy=single"]
    command = Terminal(
        [sys.executable, "-m", "distexp", "--multirun", *overrides, "train.seed=1,2", "train.max_steps=4000",
         "hydra.sweep.dir=sweep", "train.num_epochs=1000"], tmp_path, 100, environment(),
    )  # fmt: skip
    command.read_until("imports")
    command.read_until("the training starts after")
    command.read_until("GiB")
    command.resize(40)
    command.read_until("loss")
    command.read_until("sweep")
    narrow = len(command.output)
    command.read_until("loss")
    command.press("\x03")
    assert command.wait() == 130
    bars = [line for line in shown_lines(command.output) if "━" in line and "run 0" not in line]
    assert bars == []
    lines = [line for line in re.split(r"[\r\n]+", command.output[narrow:]) if "━" in line]
    plain = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).removesuffix("^C") for line in lines]
    assert plain
    assert max(map(len, plain)) <= 40
    assert command.output.rindex("\x1b[?25h") > command.output.rindex("\x1b[?25l"), "the cursor is visible again"
    assert "to continue: distexp resume sweep" in command.output
