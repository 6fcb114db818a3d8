"""How long a person waits for the command line, against the least that Hydra takes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.paired_timing import assert_ratio, paired_ratios

HELLO = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config)

main()
"""


def seconds(*command: str, cwd: Path) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command, "--cfg", "job"], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def test_showing_the_config_costs_little_more_than_hydra_itself(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("greeting: hello\n")

    def ours() -> float:
        return seconds("-m", "distexp", cwd=tmp_path)

    def hello() -> float:
        return seconds("hello.py", cwd=tmp_path)

    ours(), hello()
    assert_ratio(lambda: paired_ratios(ours, hello, repeats=5), at_most=1.5)
