"""The command ``distexp explain [DIR] [DIR]``: what the time of a profiled step goes to."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from distexp.cli.main import CommandParser
from distexp.config import Command, ConfigError
from distexp.config.overrides import format_count, format_runs
from distexp.exceptions import print_error, run_until_pipe_closes
from distexp.explain import explanation
from distexp.explain.step_profile import StepProfile
from distexp.runs.disturbance import describe_disturbance
from distexp.runs.metrics import HIDDEN, PARTS
from distexp.runs.record import choose_newest_sweep
from distexp.runs.step_files import RankStep
from distexp.system.files import nan_to_none
from distexp.tables.columns import ALWAYS, Column, build_table, cell, fit_columns, make_console, print_plain

DESCRIPTION = """Show what the steps of a profiled run spend their time on, and what would
make them faster. With two runs: why B is slower than A, part by part.
Profile a run, or all runs of a sweep, with profile=true.
A number chooses a run of the newest sweep: distexp explain 0 1"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the explanation of a run, of each run of a sweep, or of the difference of two runs; return 0 or 2."""
    parser = CommandParser(
        prog="distexp explain", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "directory of a run or a sweep (default: the newest sweep below multirun_outputs)"
    parser.add_argument("directories", metavar="DIR", nargs="*", type=Path, help=help_text)
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    options = parser.parse_args(arguments)
    try:
        if len(options.directories) > 2:
            raise ConfigError(f"{len(options.directories)} directories: give one, or two to compare")
        directories = choose_directories(options.directories)
        if len(directories) == 2:
            print_comparison(*map(explanation.read_profiled_run, directories), as_json=options.json)
        else:
            print_explanations(explanation.read_profiled_runs(directories[0]), as_json=options.json)
    except ConfigError as error:
        for message in error.errors:
            print_error(message)
        return 2
    return 0


def choose_directories(given: Sequence[Path]) -> list[Path]:
    """Return the directories, or the newest sweep if none is given. A number is a run of the newest sweep.

    Raise ConfigError if there is no sweep, or if it has no run with the number.
    """
    numbers = {path for path in given if str(path).isdecimal() and not path.is_dir()}
    if given and not numbers:
        return list(given)
    newest = choose_newest_sweep(leave_out=(Command.PREFLIGHT, Command.CHOOSE))
    for number in sorted(numbers):
        if not (newest / number).is_dir():
            runs = [int(path.name) for path in newest.iterdir() if path.is_dir() and path.name.isdecimal()]
            known = f"it has {format_runs(runs)}" if runs else "it has no run with a number"
            raise ConfigError(f"the newest sweep, {newest}, has no run {number}: {known}")
    return [newest / path if path in numbers else path for path in given] or [newest]


def print_explanations(runs: Sequence[explanation.ProfiledRun], *, as_json: bool) -> None:
    """Print the profile and the explanation of each run."""
    if as_json:
        print(json.dumps(nan_to_none([run.to_json() for run in runs]), indent=2))
        return
    console = make_console()
    for position, run in enumerate(runs):
        if position:
            console.print()
        print_plain(console, run.title)
        console.print()
        for part in ranks_table(run.profile, console.width):
            console.print(part)
        console.print()
        for line in explanation_lines(run.explanation):
            print_plain(console, line)
        percentages = " The percentages are those of the profiled step."
        for note in (*profile_notes(run.profile), *scaling_note(run.profile, percentages)):
            print_plain(console, note, style="dim")


def print_comparison(a: explanation.ProfiledRun, b: explanation.ProfiledRun, *, as_json: bool) -> None:
    """Print why run B is slower or faster than run A."""
    comparison = ProfileComparison(a.profile, b.profile)
    if as_json:
        content = {"a": a.to_json(), "b": b.to_json(), **comparison.to_json()}
        print(json.dumps(nan_to_none(content), indent=2))
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


LARGE_DIFFERENCE = 0.05  # relative difference of the profiled step from the median one that is worth a note


def explanation_lines(found: explanation.Explanation) -> Iterator[str]:
    """Yield the bottleneck, the overrides to try, and why each of them would help."""
    yield found.sentence
    if found.alternatives:
        yield f"try: {'  or  '.join(found.alternatives)}"
    for overrides in found.alternatives:
        if reason := found.reasons.get(overrides):
            yield f"  {overrides.split()[0]}: {reason}"
    if found.larger_batch:
        yield f"A larger global batch changes the training: {', '.join(found.larger_batch)}."


def profile_notes(profile: StepProfile) -> Iterator[str]:
    """Yield what limits the meaning of a profile."""
    if profile.on_gpu and profile.overhead_ms > LARGE_DIFFERENCE * profile.step_ms:
        yield (
            f"The profiler made the step {profile.overhead_ms / profile.step_ms:.0%} longer. This is left out of "
            "slow launches, host work, waiting and idle time of the optimizer, in proportion to their size, and then "
            "of the data wait."
        )
    if profile.includes_overhead and profile.on_gpu:
        yield "The parts include the overhead of the profiler, because the batches have different sizes."
    median = profile.median_ms
    if median is not None and abs(profile.step_ms - median) > LARGE_DIFFERENCE * median:
        yield (
            f"The parts add up to {profile.step_ms:,.1f} ms. The median of the steps that were not profiled is "
            f"{median:,.1f} ms."
        )
    if not profile.on_gpu:
        yield "Without a GPU, operators of PyTorch count as kernels, and slow launches are unknown."


def scaling_note(profile: StepProfile, percentages: str = "") -> Iterator[str]:
    """Yield that the times of a profile on CPUs are scaled, if this changes them much."""
    difference = profile.overhead_ms / profile.step_ms
    if profile.on_gpu or abs(difference) <= LARGE_DIFFERENCE:
        return
    yield (
        f"The profiled step took {profile.profiled_ms:,.1f} ms, {abs(difference):.0%} "
        f"{'more' if difference > 0 else 'less'} than the median of the other steps.{percentages} The times are scaled "
        "to that median."
    )


def comparison_notes(comparison: ProfileComparison) -> Iterator[str]:
    """Yield what limits the meaning of two profiles: of both, then of one of them, then what both have."""
    # The explanation of a run has the wait for CPU cores in its sentence. Here it is a note.
    of_a, of_b = (
        [note for note in (explanation.describe_missing_cores(one), *profile_notes(one), *scaling_note(one)) if note]
        for one in (comparison.a, comparison.b)
    )
    a, b = comparison.a.global_batch, comparison.b.global_batch
    if a != b:
        unit = "row" if comparison.a.setting("dataset.packing") else "sample"
        yield f"A step has {format_count(a, unit)} in A and {b:,} in B, so these are different trainings."
    yield from (f"A: {note}" for note in of_a if note not in of_b)
    yield from (f"B: {note}" for note in of_b if note not in of_a)
    yield from (note for note in of_a if note in of_b)


ReadTime = Callable[[RankStep], float | None]  # reads a time of a rank in milliseconds


def ranks_table(profile: StepProfile, width: int) -> Iterator[Table | Text]:
    """Yield the table with a row per part and a column per rank, and how many ranks it hides."""
    shown = _measured_parts(profile.ranks)
    means_ms = [profile.mean_ms(name) for name in shown]
    largest = max(means_ms, default=0.0) or 1.0
    # These are not in the sum: the wait for cores is inside the parts.
    others: dict[str, ReadTime] = {"hidden communication": lambda rank: rank.parts[HIDDEN]}
    if profile.without_core_share is not None:
        others["waiting for a CPU core"] = lambda rank: rank.without_core_ms
    percents = [""] * len(others)
    if (predicted := explanation.scheduled_bubble(profile)) is not None:
        others["bubble by the schedule"] = lambda rank: predicted * rank.step_ms
        percents.append(f"{100 * predicted:.1f}")
    empty = [""] * len(others)
    columns = [
        Column("part", (*(PARTS[name] for name in shown), "sum", *others), ALWAYS, right=False),
        Column(
            "mean\n%" if len(profile.ranks) > 1 else "%",
            (*(f"{100 * mean / profile.step_ms:.1f}" for mean in means_ms), "100.0", *percents),
            ALWAYS,
        ),
        Column("", (*(_bar(mean / largest) for mean in means_ms), "", *empty), 90, right=False),
        *(_rank_column(rank, shown, others.values()) for rank in profile.ranks),
    ]
    kept, hidden = fit_columns(columns, width)
    yield build_table(kept)
    if hidden:
        count = sum(column.title.startswith("rank") for column in hidden)
        yield Text(f"{count} more ranks: use --json, or a wider terminal. The % are means over all ranks.", style="dim")


def _rank_column(rank: RankStep, shown: Sequence[str], others: Iterable[ReadTime]) -> Column:
    """Return the times of a rank: its parts, their sum, and others. In a narrow terminal, rank 0 stays longest."""
    times = (*(rank.parts[name] for name in shown), rank.step_ms, *(read(rank) for read in others))
    return Column(f"rank {rank.rank}\nms", tuple(cell(time, ",.2f") for time in times), 80 if rank.rank else 95)


def comparison_table(comparison: ProfileComparison, width: int) -> Table:
    """Return the table with a row per part, and both runs per sample."""
    shown = _measured_parts((*comparison.a.ranks, *comparison.b.ranks))
    parts = [comparison.per_sample(name) for name in shown]
    rows = [*parts, comparison.totals]
    largest = max((abs(part.change) for part in parts), default=0.0) or 1.0
    columns = [
        Column("part", (*(PARTS[name] for name in shown), "sum"), ALWAYS, right=False),
        Column("A\nms/sample", tuple(f"{row.a:,.3f}" for row in rows), ALWAYS),
        Column("B\nms/sample", tuple(f"{row.b:,.3f}" for row in rows), ALWAYS),
        Column("difference", tuple(f"{row.change:+,.3f}" for row in rows), ALWAYS),
        Column("", (*(_bar(abs(part.change) / largest) for part in parts), ""), 50, right=False),
    ]
    return build_table(fit_columns(columns, width)[0])


def _measured_parts(ranks: Sequence[RankStep]) -> list[str]:
    return [name for name in PARTS if any(rank.parts[name] is not None for rank in ranks)]


def _bar(fraction: float) -> str:
    halves = round(2 * 24 * fraction)  # The longest bar has 24 characters.
    return "█" * (halves // 2) + "▌" * (halves % 2)


SAME = 0.02  # smaller relative differences are no difference
MIN_SHARE = 0.15  # smallest share of all changes that the sentence names


@dataclass(frozen=True)
class PerSample:
    """A time of the runs A and B, in milliseconds per sample."""

    a: float
    b: float

    @property
    def change(self) -> float:
        """Return how much longer B takes."""
        return self.b - self.a


@dataclass(frozen=True)
class ProfileComparison:
    """The profiled runs A and B."""

    a: StepProfile
    b: StepProfile

    def per_sample(self, name: str) -> PerSample:
        """Return the time of a part."""
        return self._per_sample(self.a.mean_ms(name), self.b.mean_ms(name))

    @property
    def totals(self) -> PerSample:
        """Return the time of a sample: the sum of the parts."""
        return self._per_sample(self.a.step_ms, self.b.step_ms)

    @property
    def medians(self) -> PerSample:
        """Return the time of a sample without the profiler; ``totals`` if one is unknown."""
        a_ms, b_ms = self.a.median_ms, self.b.median_ms
        return self.totals if a_ms is None or b_ms is None else self._per_sample(a_ms, b_ms)

    def _per_sample(self, a_ms: float, b_ms: float) -> PerSample:
        return PerSample(a_ms / self.a.samples_per_step, b_ms / self.b.samples_per_step)

    @property
    def noise(self) -> float | None:
        """Return the noise of the difference of both speeds, relative to the higher speed; None if it is unknown."""
        (a, a_noise), (b, b_noise) = (self.medians.a, self.a.speed_noise), (self.medians.b, self.b.speed_noise)
        if a_noise is None or b_noise is None:
            return None
        return math.hypot(a_noise * min(a, b) / a, b_noise * min(a, b) / b)

    @property
    def is_noise(self) -> bool:
        """Return whether the difference of the speeds is within the noise. The report has the same test."""
        times = self.medians.a, self.medians.b
        return self.noise is not None and 1 - min(times) / max(times) <= self.noise

    @property
    def disturbances(self) -> list[str]:
        """Return what shows that something else slowed a run down."""
        reasons = ((name, describe_disturbance(profile.record)) for name, profile in (("A", self.a), ("B", self.b)))
        return [f"{name} was disturbed: {reason}" for name, reason in reasons if reason]

    def sentence(self) -> str:
        """Return why B is slower or faster than A. The parts may include the profiler, so the medians decide."""
        a, b = self.medians.a, self.medians.b
        times = f"A needs {a:,.3f} ms per sample, and B {b:,.3f} ms"
        if self.disturbances:
            reasons = f"{'. '.join(self.disturbances)}. Repeat this when no other program needs the machine."
            return f"It is not decided which run is faster: {times}. {reasons}"
        if self.is_noise:
            hint = "For a smaller noise, repeat both runs, and compare them with distexp report."
            noise = f"A and B are equal within the noise (±{self.noise:.0%} of the higher speed): {times}."
            return f"{noise} The parts below may differ only by noise, too. {hint}"
        if abs(b - a) <= SAME * a:
            return f"A and B are equally fast: {times}."
        ratio = f"{b / a:.2f} times slower" if b > a else f"{a / b:.2f} times faster"
        if (self.totals.change > 0) != (b > a):
            profiled = f"{self.totals.b:,.3f} ms instead of {self.totals.a:,.3f} ms per sample"
            hint = "Profile more steps, for example with train.profile_steps=10."
            return f"B is {ratio} than A: {times}. The profiled steps do not show this: they take {profiled}. {hint}"
        changes = [(self.per_sample(name).change, title) for name, title in PARTS.items()]
        changes.sort(key=lambda change: -abs(change[0]))
        least = MIN_SHARE * sum(abs(ms) for ms, _ in changes)
        largest = [f"{title} {ms:+,.3f} ms" for ms, title in changes if abs(ms) >= least]
        return f"B is {ratio} than A: {times}. Largest changes: {', '.join(largest)}."

    def to_json(self) -> dict[str, Any]:
        """Return the comparison for programs."""
        return {
            "ms_per_sample": asdict(self.totals),
            "median_ms_per_sample": asdict(self.medians),
            "noise": self.noise,
            "equal_within_noise": self.is_noise,
            "disturbances": self.disturbances,
            "parts_ms_per_sample": {name: asdict(self.per_sample(name)) for name in PARTS},
            "sentence": self.sentence(),
        }


if __name__ == "__main__":
    sys.exit(run_until_pipe_closes(main))
