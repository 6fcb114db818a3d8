"""Medians, ratios and Markdown tables of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.measurement import Measurement

MISSING = "-"


@dataclass(frozen=True)
class Row:
    """All repeats of one peer with one configuration."""

    repeats: tuple[Measurement, ...]

    @property
    def key(self) -> tuple[str, int, str, int, int]:
        """Strategy, workers, peer, micro-batch and accumulation."""
        return _key(self.repeats[0])

    @property
    def batch(self) -> tuple[str, int, int, int]:
        """What must be the same in a ratio: strategy, workers, micro-batch and accumulation."""
        strategy, workers, _, micro_batch, accumulation = self.key
        return strategy, workers, micro_batch, accumulation

    @property
    def peer(self) -> str:
        """Name of the peer."""
        return self.repeats[0].settings.peer

    @property
    def status(self) -> str:
        """Status of the last repeat, with the reason."""
        last = self.repeats[-1]
        return f"{last.status}: {last.reason}" if last.reason else last.status

    @property
    def speeds(self) -> dict[int, float]:
        """Samples per second by repeat."""
        return {one.repeat: one.samples_per_second for one in self.repeats if one.samples_per_second is not None}

    @property
    def speed(self) -> float | None:
        """Median of the samples per second."""
        return median(self.speeds.values()) if self.speeds else None

    def largest(self, name: str) -> float | None:
        """Return the largest value of an attribute of the repeats."""
        return max((value for one in self.repeats if (value := getattr(one, name)) is not None), default=None)


def group(measurements: Iterable[Measurement]) -> list[Row]:
    """Return one row for each peer and configuration, in the order of their first measurement."""
    groups: dict[tuple[str, int, str, int, int], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault(_key(one), []).append(one)
    return [Row(tuple(repeats)) for repeats in groups.values()]


def speed_ratio(ours: Row | None, theirs: Row) -> float | None:
    """Return the median over the repeats of our speed divided by theirs; None without a common repeat."""
    if ours is None:
        return None
    common = ours.speeds.keys() & theirs.speeds.keys()
    return median(ours.speeds[repeat] / theirs.speeds[repeat] for repeat in common) if common else None


def efficiency(row: Row, rows: Iterable[Row]) -> float | None:
    """Return the speed relative to as many single workers of the same peer and micro-batch; None if not measured."""
    _, workers, *rest = row.key
    single = next((other for other in rows if other.key == ("single", 1, *rest)), None)
    if workers == 1 or single is None or row.speed is None or single.speed is None:
        return None
    return row.speed / (workers * single.speed)


def best(rows: Iterable[Row]) -> list[Row]:
    """Return the fastest row of each strategy and peer."""
    fastest: dict[tuple[str, int, str], Row] = {}
    for row in rows:
        found = fastest.get(row.key[:3])
        if row.speed is not None and (found is None or row.speed > (found.speed or 0)):
            fastest[row.key[:3]] = row
    return list(fastest.values())


def all_rows(measurements: Iterable[Measurement]) -> str:
    """Return a table of all configurations; ``ours / it`` compares the same micro-batch."""
    rows = group(measurements)
    ours = {row.batch: row for row in rows if row.peer == "ours"}
    header = "strategy | workers | peer | micro-batch | samples/s | lowest | highest | ours / it | efficiency | "
    header += "peak MiB | padding | loss | status"
    cells = [
        [
            *_names(row),
            _number(row.speed),
            _number(min(row.speeds.values(), default=None)),
            _number(max(row.speeds.values(), default=None)),
            _number(speed_ratio(ours.get(row.batch), row), "{:.2f}"),
            _number(efficiency(row, rows), "{:.1%}"),
            _number(row.largest("peak_mib"), "{:,.0f}"),
            _number(row.largest("padding_share"), "{:.1%}"),
            _number(row.largest("loss"), "{:.4f}"),
            row.status,
        ]
        for row in rows
    ]
    return markdown(header.split(" | "), cells, text=(0, 2, 12))


def best_rows(measurements: Iterable[Measurement]) -> str:
    """Return a table of the fastest micro-batch of each peer, relative to ours."""
    rows = best(group(measurements))
    ours = {row.key[:2]: row for row in rows if row.peer == "ours"}
    header = ["strategy", "workers", "peer", "micro-batch", "samples/s", "ours / it", "peak MiB", "our memory / its"]
    cells = []
    for row in rows:
        own = ours.get(row.key[:2])
        cells.append(
            [
                *_names(row),
                _number(row.speed),
                _number(_divide(own and own.speed, row.speed), "{:.2f}"),
                _number(row.largest("peak_mib"), "{:,.0f}"),
                _number(_divide(own and own.largest("peak_mib"), row.largest("peak_mib")), "{:.2f}"),
            ]
        )
    return markdown(header, cells, text=(0, 2))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int]) -> str:
    """Return a Markdown table; the columns in ``text`` are aligned left, others right."""
    rule = ["---" if column in text else "---:" for column in range(len(header))]
    escaped = [[cell.replace("|", "/") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, rule, *escaped))


def _key(one: Measurement) -> tuple[str, int, str, int, int]:
    settings = one.settings
    return settings.strategy, settings.workers, settings.peer, settings.micro_batch, settings.accumulation


def _names(row: Row) -> list[str]:
    strategy, workers, peer, micro_batch, accumulation = row.key
    batch = f"{micro_batch} x {accumulation}" if accumulation > 1 else str(micro_batch)
    return [strategy, str(workers), peer, batch]


def _number(value: float | None, form: str = "{:,.1f}") -> str:
    return MISSING if value is None else form.format(value)


def _divide(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None
