"""Commands and queries that others copy: the skill file for coding agents, and the SQL of ``how-to/report.md``."""

from __future__ import annotations

import re
import shlex
from itertools import product
from pathlib import Path

import pytest

from distexp.cli.main import COMMANDS
from tests.helpers.records import record, write
from tests.helpers.runs import REPOSITORY, resolve_cell, run_module

SKILL = (REPOSITORY / "examples" / "agents" / "SKILL.md").read_text()
REPORT = (REPOSITORY / "docs" / "how-to" / "report.md").read_text()
LINES = re.findall(r"^distexp (.*)$", "\n".join(re.findall(r"```bash\n(.*?)```", SKILL, re.DOTALL)), re.MULTILINE)
OF_A_RUN = {"plan", "choose", "verify"}
HYDRA = {"--multirun", "--cfg"}


def test_the_skill_file_has_each_kind_of_command() -> None:
    assert {line.split()[0] for line in LINES} >= {"doctor", "report", "status", "resume", "explain", *OF_A_RUN}


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_skill_file_parses(line: str, tmp_path: Path) -> None:
    given = shlex.split(line)
    name = given[0] if given[0] in COMMANDS else "run"
    flags = [text for text in given if text.startswith("--") and text not in HYDRA]
    if flags:
        usage = run_module("distexp", name, "--help", cwd=tmp_path).stdout
        assert [flag for flag in flags if flag not in usage] == []
    settings = [text for text in given if "=" in text and not text.startswith("hydra.")]
    assert settings or name not in OF_A_RUN
    keys = [setting.partition("=")[0] for setting in settings]
    for values in product(*(setting.partition("=")[2].split(",") for setting in settings)):
        assert resolve_cell(*(f"{key}={value}" for key, value in zip(keys, values, strict=True)))


def test_the_queries_find_the_fastest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.chdir(tmp_path)
    speeds = (("ddp", 100.0), ("fsdp", 300.0), ("ddp", 200.0))
    records = [record(n, strategy=name, speed=speed, peak=1000.0) for n, (name, speed) in enumerate(speeds)]
    write(tmp_path / "map", *records)
    listed, best = (duckdb.sql(query).fetchall() for query in re.findall(r"```sql\n(.*?)```", REPORT, re.DOTALL))
    assert [(row[0], row[1], row[3], row[-1]) for row in listed] == [
        (1, "fsdp", 300.0, "completed"), (2, "ddp", 200.0, "completed"), (0, "ddp", 100.0, "completed")
    ]  # fmt: skip
    assert best == [("fsdp", 1, 300.0, 1), ("ddp", 2, 200.0, 2)]
