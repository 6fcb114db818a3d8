"""Time of ``python -m distexp --cfg job`` relative to a minimal Hydra program.

Usage: ``python benchmarks/cli_startup.py``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.timing import paired_ratios, print_ratios

HELLO = """
import hydra

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config)

main()
"""


def run_seconds(*command: str, cwd: Path) -> float:
    """Run a Python program with ``--cfg job`` and return its time in seconds."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *command, "--cfg", "job"], cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print the ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "hello.py").write_text(HELLO)
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text("greeting: hello\n")

        def ours() -> float:
            return run_seconds("-m", "distexp", cwd=folder)

        def hello() -> float:
            return run_seconds("hello.py", cwd=folder)

        ours(), hello()
        print_ratios("distexp relative to a minimal Hydra program", paired_ratios(ours, hello, repeats=5))


if __name__ == "__main__":
    main()
