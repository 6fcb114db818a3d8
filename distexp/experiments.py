"""``distexp experiments [PATTERN ...] [KEY=VALUE ...]``: list the presets, or with an override run those that match.

One sweep over all presets is impossible, because a preset decides how its sweep runs.
"""

import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

from distexp.cli.errors import suggest
from distexp.cli.help_topics import first_sentence
from distexp.cli.main import CommandParser
from distexp.config.keys import options_of
from distexp.config.overrides import copyable_overrides, is_override, override_of
from distexp.exceptions import ConfigError, print_error, print_text, run_until_pipe_closes
from distexp.launch.local.launcher import continue_after_hangup
from distexp.runs.run_dir import OUTPUTS
from distexp.system.processes import handle_signals

USAGE = """usage: distexp experiments [--config-dir FOLDER] [PATTERN ...] [KEY=VALUE ...]

List the presets, or those that match a PATTERN, as in fsdp or '*/baseline'.
With an override, as in scale=tiny, run them one after another. Each preset is
a sweep of its own.

  --config-dir FOLDER    also the presets in FOLDER/experiment

exit codes:
  0      success
  1      a run failed
  2      an override is wrong, or no preset matches
  128+n  signal n"""

INDENT = 4 * " "


def main(arguments: Sequence[str] | None = None) -> int:
    """List or run the presets and return the exit code."""
    parser = CommandParser(prog="distexp experiments", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="FOLDER")
    parser.add_argument("texts", nargs="*")
    given = parser.parse_intermixed_args(arguments)
    if given.help:
        print(USAGE)
        return 0
    patterns = [text for text in given.texts if not is_override(text)]
    folder, overrides = given.config_dir, [text for text in given.texts if is_override(text)]
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give an existing one to --config-dir")
    shipped = options_of("experiment")
    names = sorted({*shipped, *(options_of("experiment", folder) if folder else ())})
    found = {pattern: [name for name in names if _matches(name, pattern)] for pattern in patterns or "*"}
    if unmatched := [pattern for pattern, matching in found.items() if not matching]:
        near = suggest(unmatched[0], names) or ": distexp experiments lists them"
        print_error(f"no preset matches {' '.join(unmatched)}{near}")
        return 2
    chosen = sorted({name for matching in found.values() for name in matching})
    if overrides:
        overrides += [f"--config-dir={folder}"] if folder else []
        if code := _check(chosen[0], overrides):
            return code
        with continue_after_hangup(Path(OUTPUTS)):
            return _run_all(chosen, overrides)
    columns = max(shutil.get_terminal_size().columns, 40)
    for name in chosen:
        text = first_sentence("experiment", name, None if name in shipped else folder)
        lines = textwrap.wrap(text, columns, initial_indent=INDENT, subsequent_indent=INDENT) if text != "." else []
        for line in (copyable_overrides(override_of("experiment", name)), *lines):
            print_text(line)
    return 0


def _matches(name: str, pattern: str) -> bool:
    """Return whether a preset has a name, or is in a folder, that matches a pattern."""
    return any(fnmatch(name, each) for each in (pattern, f"{pattern.rstrip('/')}/*"))


def _check(name: str, overrides: Sequence[str]) -> int:
    """Compose one preset, so that a misspelled override is reported once and not for each preset.

    Sweeps are left out, because ``--cfg`` prints one run.
    """
    single = [text for text in overrides if "," not in text or text.startswith("--")]
    command = [sys.executable, "-m", "distexp", "--cfg", "job", override_of("experiment", name), *single]
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


def _run_all(names: Sequence[str], overrides: Sequence[str]) -> int:
    """Run presets one after another and return the largest exit code; stop at a signal."""
    worst = 0
    for position, name in enumerate(names, 1):
        options = [override_of("experiment", name), *overrides]
        print(f"\n[{position}/{len(names)}] {shlex.join(['distexp', *options])}", flush=True)
        code = _run([sys.executable, "-m", "distexp", *options])
        worst = max(worst, code)
        if code < 0 or code > 128:
            return 128 - code if code < 0 else code
    return worst


def _run(command: Sequence[str]) -> int:
    """Run a command and return its exit code. It gets SIGTERM too: it ends its runs, and writes their records."""
    with subprocess.Popen(command) as child:

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        with handle_signals(forward, signal.SIGTERM):
            return child.wait()


if __name__ == "__main__":
    try:
        sys.exit(run_until_pipe_closes(main))
    except KeyboardInterrupt:
        sys.exit(130)
