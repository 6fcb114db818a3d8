"""Output of ``distexp explain`` for users and, as JSON, for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from distexp.console.plain_text import print_plain
from distexp.console.terminal import make_console
from distexp.explain.notes import batch_line, comparison_notes, profile_notes, reason_lines, scaling_note, try_line
from distexp.explain.profile_comparison import ProfileComparison
from distexp.explain.profiled_runs import ProfiledRun
from distexp.explain.table import comparison_table, ranks_table
from distexp.runs.json_files import nan_to_none


def print_explanations(runs: Sequence[ProfiledRun], *, as_json: bool) -> None:
    """Print the profile and the explanation of each run."""
    if as_json:
        _print_json([run.to_json() for run in runs])
        return
    console = make_console()
    for position, run in enumerate(runs):
        if position:
            console.print()
        _print_run(run, console)


def _print_run(run: ProfiledRun, console: Console) -> None:
    print_plain(console, run.title)
    console.print()
    for part in ranks_table(run.profile, console.width):
        console.print(part)
    console.print()
    explanation = run.explanation
    larger = batch_line(explanation.larger_batch)
    for line in (explanation.sentence, try_line(explanation.alternatives), *reason_lines(explanation), larger):
        if line is not None:
            print_plain(console, line)
    for note in (*profile_notes(run.profile), *scaling_note(run.profile, has_percentages=True)):
        print_plain(console, note, style="dim")


def print_comparison(a: ProfiledRun, b: ProfiledRun, *, as_json: bool) -> None:
    """Print why run B is slower or faster than run A."""
    comparison = ProfileComparison(a.profile, b.profile)
    if as_json:
        runs = {"a": a.to_json(), "b": b.to_json()}
        _print_json({**runs, **comparison.to_json()})
        return
    console = make_console()
    print_plain(console, f"A: {a.title}")
    print_plain(console, f"B: {b.title}")
    is_undecided = comparison.is_noise or bool(comparison.disturbances)
    if is_undecided:  # The parts explain nothing then, so this comes before them.
        print_plain(console, f"\n{comparison.sentence()}")
    console.print()
    console.print(comparison_table(comparison, console.width))
    console.print()
    if not is_undecided:
        print_plain(console, comparison.sentence())
    for note in comparison_notes(comparison):
        print_plain(console, note, style="dim")


def _print_json(content: Any) -> None:
    print(json.dumps(nan_to_none(content), indent=2))
