"""What is known of a search so far: the document for programs, and the text and tables at its end."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from distexp.choose import result_texts as texts
from distexp.choose.candidate import INVALID, Candidate, Objective, format_worker_time, label, row_label
from distexp.choose.loss_check import LossCheck
from distexp.choose.ranking import PlannedTrial, SearchResult, equal_candidates, mean_metrics, ranked, simplest
from distexp.choose.search import NOT_TRIED
from distexp.choose.space import Settings
from distexp.choose.trials import SearchState
from distexp.config.overrides import format_count, format_override, suggest_command
from distexp.system.units import MIB_PER_GIB, format_amount
from distexp.tables.columns import cell, print_plain


@dataclass
class Outcome:
    """What is known of a search so far."""

    settings: Settings  # settings of the search
    candidates: Sequence[Candidate]  # all candidates
    result: SearchResult | None = None  # result of the search; None before its end
    winner: Candidate | None = None  # the winner, whose losses were checked; None before the end, or if there is none
    check: LossCheck | None = None  # check of the winner's losses
    rejected: list[tuple[Candidate, LossCheck]] = field(default_factory=list)  # better ones whose losses differ
    finished: bool = False  # whether the losses were checked, too

    def to_json(self) -> dict[str, Any]:
        """Return the document, without the costs and trials that the state of the search adds."""
        return {
            "winner": self._winner_json(),
            "sentence": self.sentence,
            "statement": self.statement,
            "equal": list(map(typed_overrides, self.equal)),
            "simplest": None if self.winner is None else typed_overrides(simplest([self.winner, *self.equal])),
            "finished": self.finished,
            "objective": str(self.settings.objective),
            "losses": self.check.to_json() if self.check else None,
            "rejected": [
                {"overrides": typed_overrides(candidate), **check.to_json()} for candidate, check in self.rejected
            ],
            "candidates": [candidate_json(candidate) for candidate in self.candidates],
        }

    def _winner_json(self) -> dict[str, Any] | None:
        if self.winner is None:
            return None
        values = mean_metrics(self.winner)
        return {
            "overrides": typed_overrides(self.winner),
            "samples_per_second": values.samples_per_second,
            "peak_allocated_mib": values.peak_allocated_mib,
            "command": texts.command_line(self.settings, self.winner),
            "all_overrides": texts.training_overrides(self.settings.command, self.winner),
        }

    @property
    def statement(self) -> str:
        """Return why there is no winner, or why the search ended early; empty if neither is so."""
        if self.result is None:
            return ""
        if self.winner is None and self.rejected:
            best, _ = self.rejected[0]
            assert best.config is not None
            verify = texts.command_line(self.settings, best).replace("distexp", "distexp verify", 1)
            hint = f". A batch norm may amplify rounding. To compare the gradients: {verify}"
            text = f"no winner: the losses of the {len(self.rejected)} best configurations differ from the reference"
            return f"{text}{hint if best.config.model.traits.is_image else ''}"
        return self.result.statement or self.result.stopped

    @property
    def sentence(self) -> str:
        """Return the winner with its evidence; empty if there is none."""
        if self.winner is None or self.result is None:
            return ""
        return texts.winner_sentence(self.usable, self.winner, self.settings.objective)

    @property
    def equal(self) -> list[Candidate]:
        """Return the other candidates that are as good as the winner within the noise; empty without a winner."""
        if self.winner is None:
            return []
        return equal_candidates(self.usable, self.winner, self.settings.objective)

    @property
    def usable(self) -> list[Candidate]:
        """Return the candidates that were tried, without the families of those whose losses differ."""
        rejected = [candidate.family for candidate, _ in self.rejected]
        return [each for each in self.candidates if each.is_tried and each.family not in rejected]


def typed_overrides(candidate: Candidate) -> list[str]:
    """Return the overrides of a candidate as a user would type them."""
    return list(map(format_override, candidate.overrides))


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate for programs."""
    return {
        "overrides": typed_overrides(candidate),
        "status": str(candidate.status),
        "reason": candidate.reason or None,
        "predicted": None if candidate.predicted is None else asdict(candidate.predicted),
        "expected_mib": candidate.expected_mib,
        "forecast_s": candidate.forecast_s,
        "measured": measured_json(candidate),
    }


def measured_json(candidate: Candidate) -> dict[str, Any] | None:
    """Return what the trials of a candidate measured; None if it was not tried."""
    if not candidate.trials:
        return None
    return {
        **asdict(mean_metrics(candidate)),
        "gpu_seconds": round(sum(trial.gpu_seconds for trial in candidate.trials), 1),
        "trials": [
            {
                "steps": trial.steps,
                "status": trial.status,
                "directory": None if trial.directory is None else str(trial.directory),
                "samples_per_second": trial.samples_per_second,
                "disturbed": trial.disturbed,
            }
            for trial in candidate.trials
        ],
    }


def print_outcome(outcome: Outcome, state: SearchState, folder: Path, console: Console) -> None:
    """Print the table, the winner, and what was given up for what."""
    line = partial(print_plain, console)
    objective, result = outcome.settings.objective, outcome.result
    line("")
    for part in result_table(outcome.candidates, objective, outcome.winner, outcome.equal):
        console.print(part)
    line("")
    if result is not None and result.stopped:
        line(f"{result.stopped}: there may be a better one. For more trials, raise choose.budget_min")
    for candidate, check in outcome.rejected:
        line(f"not chosen: {label(candidate)}: {texts.loss_sentence(check)}", "red")
    if outcome.winner is None:
        line(outcome.statement or "no candidate completed a trial")
    else:
        line(f"best {objective}: {outcome.sentence}", "bold")
        if outcome.equal:
            line(texts.equals_sentence(outcome.winner, outcome.equal))
        if outcome.check is not None:
            line(texts.loss_sentence(outcome.check))
        for text in list(texts.trade_offs(outcome.usable, outcome.winner))[:5]:
            line(f"or: {text}")
        is_for_speed = objective is Objective.THROUGHPUT and texts.may_add_single(outcome.settings)
        faster = is_for_speed and texts.faster_reference(outcome.check, outcome.winner, outcome.candidates)
        if hint := faster or texts.other_sizes_hint(outcome.candidates, outcome.settings):
            line(hint)
    line(describe_cost(state, outcome.candidates), "dim")
    if state.trials:
        line(f"trials: {folder}; to look at them: {suggest_command('report', folder)}", "dim")
    if outcome.winner is not None:
        line("\nto train with it:")
        line(f"  {texts.command_line(outcome.settings, outcome.winner)}")
        simple = simplest([outcome.winner, *outcome.equal])
        if simple is not outcome.winner:
            line("\nor with the simplest of the equal configurations:")
            line(f"  {texts.command_line(outcome.settings, simple)}")


def describe_cost(state: SearchState, candidates: Iterable[Candidate]) -> str:
    """Return the cost of all trials, with the part that was start-up, and that of the check of the losses."""
    total, startup = state.gpu_seconds, state.startup_gpu_seconds
    trials = format_count(len(state.trials), "trial")
    cost = f"cost of {trials}: {format_worker_time(total, candidates)}, of which {startup:,.0f} for starting them"
    checks = sum(trial.compares_losses for trial in state.trials)
    if not checks:
        return cost
    return f"{cost}, and {state.check_gpu_seconds:,.0f} for {format_count(checks, 'trial')} that compared the losses"


MAX_LISTED = 6  # Most candidates without a trial that a table lists. More are counted by their reason.
NUMBER = re.compile(r"(?<![\w=-])\d+(?:[.,]\d+)*")  # a number, but not that of a name such as ZeRO-2 or zero_stage=2
DETAILS = re.compile(r" \([^)]*\)")  # an explanation in parentheses
BATCH_LEGEND = "8x2: micro-batch 8, 2 micro-batches per step."
RESULT_LEGEND = f"{BATCH_LEGEND} peak GiB: measured memory. predicted: before the trials. steps: of each trial."
CPU_LEGEND = " On CPUs a longer run may need more: a short trial has few memory samples."
ORDER_LEGEND = " Repeated ones come first: the best of many single trials may only be lucky."
DISTURBED_LEGEND = " (5): not counted, because the repeat was far faster."
PLAN_LEGEND = f"{BATCH_LEGEND} steps: measured steps. s/step: forecast. Cost: of all workers, with the start-up."


def result_table(
    candidates: Sequence[Candidate], objective: Objective, winner: Candidate | None, equal: Sequence[Candidate] = ()
) -> Iterator[RenderableType]:
    """Yield the table of the candidates that were tried, the best first, and what happened to the others."""
    tried = [candidate for candidate in candidates if candidate.trials]
    best = ranked(tried, objective)
    order = [*best, *(candidate for candidate in tried if candidate not in best)]
    if order:
        yield _measured_table(order, winner, equal)
        order_legend = ORDER_LEGEND if len({candidate.longest_steps for candidate in best}) > 1 else ""
        marks = f"{'*: the winner. ' if winner in order else ''}{'=: equal within the noise. ' if equal else ''}"
        disturbed = DISTURBED_LEGEND if any(trial.disturbed for each in order for trial in each.trials) else ""
        cpu_legend = CPU_LEGEND if any(candidate.on_cpus for candidate in best) else ""
        yield Text(f"{marks}{RESULT_LEGEND}{cpu_legend}{order_legend}{disturbed}", style="dim")
    yield from others_table([candidate for candidate in candidates if not candidate.trials])


def _measured_table(candidates: Sequence[Candidate], winner: Candidate | None, equal: Sequence[Candidate]) -> Table:
    values = [mean_metrics(candidate) for candidate in candidates]
    energy, price = any(metrics.j_per_sample for metrics in values), any(metrics.price_per_sample for metrics in values)
    further = [title for title, shown in (("J/sample", energy), ("price/10⁶", price)) if shown]
    table = _table("candidate", "workers", "samples/s", "peak GiB", "predicted", *further, "steps")
    for candidate, found in zip(candidates, values, strict=True):
        price_of_many = None if found.price_per_sample is None else 1e6 * found.price_per_sample
        cells = [
            f"{'*' if candidate is winner else '=' if candidate in equal else ' '} {row_label(candidate)}",
            str(candidate.workers),
            _failure(candidate) or cell(found.samples_per_second, ",.1f"),
            _gb(found.peak_allocated_mib),
            _gb(candidate.expected_mib),
            *([cell(found.j_per_sample, format_amount)] if energy else []),
            *([cell(price_of_many, format_amount)] if price else []),
            "+".join(f"({trial.steps})" if trial.disturbed else str(trial.steps) for trial in candidate.trials),
        ]
        table.add_row(*map(Text, cells), style="bold" if candidate is winner else "")
    return table


def others_table(candidates: Sequence[Candidate]) -> Iterator[RenderableType]:
    """Yield the candidates without a trial: a table if there are few, else a line for each reason."""
    if not candidates:
        return
    yield Text(f"\nNot tried: {format_count(len(candidates), 'configuration')}", style="dim")
    if len(candidates) > MAX_LISTED:
        for reason, count in count_reasons(candidates).items():
            yield Text(f"{count:6}  {reason}", style="dim")
        return
    table = _table("not tried", "predicted GiB")
    table.add_column("reason")
    for candidate in candidates:
        table.add_row(*map(Text, (row_label(candidate), _gb(candidate.expected_mib), _reason(candidate))))
    yield table


def count_reasons(candidates: Sequence[Candidate]) -> dict[str, int]:
    """Return how many candidates have each reason, the most frequent first. Numbers that differ are shown as N."""
    groups: dict[str, list[str]] = {}
    for candidate in candidates:
        found = _reason(candidate)
        short = DETAILS.sub("", found.removeprefix(INVALID).partition(":")[0])
        short = short if found.startswith(INVALID) else short.partition(" by ")[0]
        groups.setdefault(NUMBER.sub("N", short), []).append(short)
    by_frequency = sorted(groups.items(), key=lambda group: -len(group[1]))
    return {found[0] if len(set(found)) == 1 else general: len(found) for general, found in by_frequency}


def _reason(candidate: Candidate) -> str:
    return candidate.reason.removeprefix(f"{NOT_TRIED}: ") or str(candidate.status)


def planned_table(planned: Sequence[PlannedTrial], costs: Sequence[float]) -> Table:
    """Return the table of planned trials."""
    table = _table("planned trial", "workers", "steps", "predicted GiB", "s/step", "cost (s)")
    for trial, cost in zip(planned, costs, strict=True):
        candidate = trial.candidate
        cells = (row_label(candidate), str(candidate.workers), str(trial.steps), _gb(candidate.expected_mib))
        table.add_row(*map(Text, cells), Text(cell(candidate.forecast_s, format_amount)), Text(f"{cost:,.0f}"))
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for title in numbers:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _failure(candidate: Candidate) -> str:
    """Return the status of the trial that failed; empty if all completed, perhaps without the objective's metric."""
    if not candidate.has_failed:
        return ""
    return next((trial.status for trial in reversed(candidate.trials) if trial.status != "completed"), "")


def _gb(mib: float | None) -> str:
    return cell(None if mib is None else mib / MIB_PER_GIB, ",.2f")
