"""``python -m distexp.experiments [PATTERN ...] [KEY=VALUE ...]``: the exercises, listed or all run.

Without a KEY=VALUE it lists the presets that match, with what each teaches. With one it runs each of them by a
command of its own, one after the other, as in ``python -m distexp.experiments scale=tiny``: an experiment
decides how its sweep runs, so a sweep over experiments would not be one sweep.

Exit codes: 0; 1 where a run failed; 2 where a command was refused, or no preset matches; 128 + n after a signal.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatch

from distexp.cli.overrides import is_override
from distexp.config.paths import conf_dir, options_of
from distexp.exceptions import run_until_pipe_closes

INDENT = 4 * " "


def main(arguments: Sequence[str] | None = None) -> int:
    """Lists or runs, and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    patterns = [word for word in words if not is_override(word)]
    overrides = [word for word in words if is_override(word)]
    if any(pattern.startswith("-") for pattern in patterns):
        print(__doc__)
        return 0 if patterns in (["-h"], ["--help"]) else 2
    chosen = [name for name in options_of("experiment") if not patterns or any(fnmatch(name, p) for p in patterns)]
    if not chosen:
        print(
            f"distexp: no experiment matches {' '.join(patterns)}: choose from {', '.join(options_of('experiment'))}",
            file=sys.stderr,
        )
        return 2
    if not overrides:
        for name in chosen:
            print(f"experiment={name}\n{_indented(lesson(name))}")
        return 0
    return _run_all(chosen, overrides)


def lesson(name: str) -> str:
    """The first sentence of a preset's comment: what it teaches."""
    lines = (conf_dir() / "experiment" / f"{name}.yaml").read_text().splitlines()
    comment = [line.removeprefix("# ") for line in lines if line.startswith("# ") and "@package" not in line]
    return " ".join(comment).split(". ")[0].rstrip(".") + "."


def _indented(text: str) -> str:
    """A paragraph as wide as the terminal, or as COLUMNS says."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, max(columns, 40), initial_indent=INDENT, subsequent_indent=INDENT)


def _run_all(names: Sequence[str], overrides: Sequence[str]) -> int:
    worst = 0
    for position, name in enumerate(names, 1):
        command = [sys.executable, "-m", "distexp", f"experiment={name}", *overrides]
        print(f"\n[{position}/{len(names)}] python -m distexp {' '.join(command[3:])}", flush=True)
        code = subprocess.run(command, check=False).returncode
        worst = max(worst, code)
        if code < 0 or code > 128:  # a signal is meant for all of them
            return 128 - code if code < 0 else code
    return worst


if __name__ == "__main__":
    try:
        sys.exit(run_until_pipe_closes(main))
    except KeyboardInterrupt:
        sys.exit(130)
