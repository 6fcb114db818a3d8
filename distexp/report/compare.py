"""Comparison of two sweeps: matching runs and regressions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distexp.report.data.failures import failure_reason
from distexp.report.data.metrics import MEMORIES, METRICS_BY_NAME, SPEED
from distexp.report.data.repeats import RunGroup, format_metric, group_by_settings, group_repeats, share_deviations
from distexp.report.data.rows import Row
from distexp.report.data.setting_names import SEED
from distexp.report.data.settings import format_setting, format_settings
from distexp.report.data.text import format_noise
from distexp.report.data.varying import varying_settings
from distexp.statistics.noise import Spread, difference_noise, is_within_noise

MIN_SPEED_RATIO = 0.95
MAX_MEMORY_RATIO = 1.05
MAX_LOSS_RATIO = 1.01  # without any change, two runs on GPUs differ by less
LOSSES = {"eval_loss": "eval loss", "train_loss": "train loss"}


@dataclass(frozen=True)
class Pair:
    """The same training in both sweeps."""

    before: RunGroup
    after: RunGroup

    def metric_pair(self, name: str) -> tuple[Spread, Spread] | None:
        """Return a metric before and after; None if one side lacks it or did not complete."""
        if not (self.before.completed and self.after.completed):
            return None
        before, after = self.before.metric(name), self.after.metric(name)
        return None if before is None or after is None else (before, after)

    def ratio(self, name: str) -> float | None:
        """Return after / before."""
        pair = self.metric_pair(name)
        return pair[1].mean / pair[0].mean if pair and pair[0].mean else None

    @property
    def disturbance(self) -> str:
        """Return what makes the ratio of the speeds uncertain; empty if nothing does.

        A disturbed A seems slower than it is. So a B that is slower still is slower in any case.
        """
        ratio = self.ratio(SPEED)
        is_slower = ratio is not None and ratio < 1
        sides = {"B": self.after.disturbance, "A": None if is_slower else self.before.disturbance}
        return "; ".join(f"{side} was disturbed: {reason}" for side, reason in sides.items() if reason)

    def is_noise(self, name: str) -> bool:
        """Return whether a difference is within run-to-run noise."""
        pair = self.metric_pair(name)
        return bool(pair and is_within_noise(*pair))

    def noise(self, name: str) -> float | None:
        """Return the noise of a difference, relative to the value before; None if unknown."""
        pair = self.metric_pair(name)
        noise = difference_noise(*pair) if pair else None
        return noise / abs(pair[0].mean) if pair and noise is not None and pair[0].mean else None

    def first_measured(self, names: Sequence[str]) -> str | None:
        """Return the first of some metrics that both sides have."""
        return next((name for name in names if self.metric_pair(name)), None)


@dataclass(frozen=True)
class Matching:
    """Pairs of equal trainings of two sweeps, and the trainings without a partner."""

    pairs: tuple[Pair, ...]
    only_before: tuple[RunGroup, ...]
    only_after: tuple[RunGroup, ...]


@dataclass(frozen=True)
class Comparison:
    """Sweep A (before) and sweep B (after).

    Attributes:
        pairs: Matched trainings.
        varied: Settings that vary within a sweep.
        changed: Settings with one value in A and another one in B, such as ``precision fp32 -> bf16``.
    """

    pairs: tuple[Pair, ...]
    only_before: tuple[RunGroup, ...]
    only_after: tuple[RunGroup, ...]
    varied: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def of(cls, before: Sequence[Row], after: Sequence[Row]) -> Comparison:
        """Match equal trainings first, then those with equal varying settings."""
        matching = _match_by_training(before, after)
        names = dict.fromkeys([*_varying(before), *_varying(after)])
        varied = tuple(name for name in names if name != SEED)
        for settings in (varied, _varying(before), _varying(after)):
            matching = _match_by_settings(matching, settings)
        return cls(
            pairs=tuple(_share_deviations(matching.pairs)),
            only_before=matching.only_before,
            only_after=matching.only_after,
            varied=varied,
            changed=tuple(_changed(before, after, varied)),
        )

    def regressions(self) -> Iterator[str]:
        """Yield a line for each regression."""
        for pair in self.pairs:
            for regression in _regressions(pair):
                yield f"{self.describe(pair.after)}: {regression}"

    def uncertain(self) -> Iterator[str]:
        """Yield a line for each lower speed and larger memory that is no regression, with the reason.

        The noise is as large, or something else slowed the run of B down.
        """
        for pair in self.pairs:
            memory = pair.first_measured(list(MEMORIES))
            if (ratio := pair.ratio(SPEED)) is not None and ratio < MIN_SPEED_RATIO:
                if pair.disturbance:
                    change = f"{_format_change(pair, SPEED)} samples/s ({ratio - 1:+.1%})"
                    yield f"{self.describe(pair.after)}: {change}, but {pair.disturbance}: repeat it"
                else:
                    yield from self._within_noise(pair, SPEED, "samples/s", ratio)
            if memory and (ratio := pair.ratio(memory)) is not None and ratio > MAX_MEMORY_RATIO:
                yield from self._within_noise(pair, memory, f"MiB of {MEMORIES[memory]}", ratio)

    def _within_noise(self, pair: Pair, name: str, unit: str, ratio: float) -> Iterator[str]:
        """Yield the line about a metric, if its difference is within the noise."""
        noise = pair.noise(name)
        if noise is not None and pair.is_noise(name):
            change = f"{_format_change(pair, name)} {unit} ({ratio - 1:+.1%})"
            yield f"{self.describe(pair.after)}: {change}, within the noise of {format_noise(noise, 1)}"

    def describe(self, group: RunGroup) -> str:
        """Return ``strategy=fsdp, offload=true``, or the label of the run."""
        return format_settings(group.settings, self.varied) or f"run {group.label}"


def _share_deviations(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Yield the pairs, whose groups know the noise between repeats of either sweep."""
    shared = iter(share_deviations([group for pair in pairs for group in (pair.before, pair.after)]))
    yield from (Pair(before, after) for before, after in zip(shared, shared, strict=True))


def _varying(rows: Sequence[Row]) -> list[str]:
    return varying_settings([row.record for row in rows], [row.settings for row in rows])


def _match_by_training(before: Sequence[Row], after: Sequence[Row]) -> Matching:
    """Match the groups of both sweeps that repeat the same training."""
    pairs, only_before, only_after = [], [], []
    ids_before = {id(row) for row in before}
    for group in group_repeats([*before, *after]):
        rows_before = tuple(row for row in group.rows if id(row) in ids_before)
        rows_after = tuple(row for row in group.rows if id(row) not in ids_before)
        if rows_before and rows_after:
            pairs.append(Pair(RunGroup(rows_before), RunGroup(rows_after)))
        elif rows_before:
            only_before.append(group)
        else:
            only_after.append(group)
    return Matching(tuple(pairs), tuple(only_before), tuple(only_after))


def _match_by_settings(matching: Matching, names: Sequence[str]) -> Matching:
    """Match further groups with equal settings, if no other group of their sweep has these settings."""
    before, after = (group_by_settings(side, names) for side in (matching.only_before, matching.only_after))
    shared = [key for key in before if len(before[key]) == 1 and len(after.get(key, ())) == 1]
    pairs = [Pair(before[key][0], after[key][0]) for key in shared]
    matched = {id(group) for pair in pairs for group in (pair.before, pair.after)}
    return Matching(
        pairs=(*matching.pairs, *pairs),
        only_before=tuple(group for group in matching.only_before if id(group) not in matched),
        only_after=tuple(group for group in matching.only_after if id(group) not in matched),
    )


def _changed(before: Sequence[Row], after: Sequence[Row], varied: Sequence[str]) -> Iterator[str]:
    for name in _varying([*before, *after]):
        values_before = {format_setting(row.settings.get(name)) for row in before}
        values_after = {format_setting(row.settings.get(name)) for row in after}
        if name not in varied and values_before != values_after and len(values_before) == len(values_after) == 1:
            yield f"{name} {values_before.pop()} -> {values_after.pop()}"


def _regressions(pair: Pair) -> Iterator[str]:
    failed = [row for row in pair.after.rows if not row.completed]
    if pair.before.status == "completed" and failed:
        yield f"completed -> {pair.after.status} ({failure_reason(failed[0])})"
    memory, loss = pair.first_measured(list(MEMORIES)), pair.first_measured(list(LOSSES))
    speed = None if pair.disturbance else _ratio_beyond_noise(pair, SPEED)
    if speed is not None and speed < MIN_SPEED_RATIO:
        yield f"slower, {_format_change(pair, SPEED)} samples/s ({speed - 1:+.1%})"
    if memory and (ratio := _ratio_beyond_noise(pair, memory)) is not None and ratio > MAX_MEMORY_RATIO:
        yield f"more {MEMORIES[memory]}, {_format_change(pair, memory)} MiB ({ratio - 1:+.1%})"
    if loss and (ratio := _ratio_beyond_noise(pair, loss)) is not None and ratio > MAX_LOSS_RATIO:
        yield f"higher {LOSSES[loss]}, {_format_change(pair, loss)} ({ratio - 1:+.1%})"


def _ratio_beyond_noise(pair: Pair, name: str) -> float | None:
    return None if pair.is_noise(name) else pair.ratio(name)


def _format_change(pair: Pair, name: str) -> str:
    before, after = (format_metric([group], METRICS_BY_NAME[name])[0] for group in (pair.before, pair.after))
    return f"{before} -> {after}"
