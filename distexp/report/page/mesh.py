"""The device meshes of a page: which ranks share what, for runs whose workers share a model."""

from collections.abc import Iterable, Iterator
from itertools import islice, product
from math import prod
from typing import Any

from distexp.report.data.rows import Row, name_runs
from distexp.runs.record_sections import Built

SHARED = {"tensor": "each layer", "context": "the tokens of rows", "expert": "the experts", "pipeline": "the blocks"}
MAX_MESHES, MAX_SIDE = 4, 8  # meshes of a page; columns and rows of a mesh that are readable on a phone

Degrees = tuple[tuple[str, int], ...]
"""The names and sizes of axes, the outer ones first."""


def device_meshes(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Yield the device meshes that were built if workers share a model: the ranks by their coordinates."""
    labels: dict[tuple[Degrees, Degrees], list[str]] = {}
    for row in rows:
        if (built := row.record.built) is not None and (axes := model_axes(built)):
            labels.setdefault((data_axes(built, axes), axes), []).append(row.label)
    for (data, axes), runs in list(labels.items())[:MAX_MESHES]:
        yield {"title": f"{name_runs(runs)}: {title(data, axes)}", **drawing(data, axes)}


def model_axes(built: Built) -> Degrees:
    """Return the axes along which workers share a model. Ranks that share layers are consecutive."""
    drawn = [axis for axis in reversed(SHARED) if axis != "expert" or built.tensor == 1]  # Experts cross rows.
    axes = tuple((axis, size) for axis in drawn if (size := getattr(built, axis)) > 1)
    return axes if prod(size for _, size in axes) <= built.world_size else ()  # A foreign record may have any sizes.


def data_axes(built: Built, axes: Degrees) -> Degrees:
    """Return the axes along which workers have other data: one, or replicas and the shards of each."""
    groups = built.world_size // prod(size for _, size in axes)
    is_split = len(built.mesh) == 2 and min(built.mesh) > 1 and prod(built.mesh) == groups
    return tuple(zip(("replica", "shard"), built.mesh, strict=True)) if is_split else (("data", groups),)


def title(data: Degrees, axes: Degrees) -> str:
    """Return the sizes and the names of all axes, as in ``2 x 2 workers (data x tensor)``."""
    names, sizes = zip(*data, *axes, strict=True)
    return f"{' x '.join(map(str, sizes))} workers ({' x '.join(names)})"


def drawing(data: Degrees, axes: Degrees) -> dict[str, Any]:
    """Return the rows of a picture with their ranks, and what they mean."""
    *outer, (axis, degree) = axes
    rows = prod(size for _, size in (*data, *outer))  # A foreign record may have billions.
    names = [", ".join(f"{name} {n}" for name, n in place) for place in places((*data, *outer), MAX_SIDE)]
    groups = [(name, range(n * degree, (n + 1) * degree)) for n, name in enumerate(names)]
    number = " and ".join(name for name, _ in data)
    notes = [f"The workers of a row of the picture share {SHARED[axis]} ({axis})."]
    notes += [f"Rows with the same {number} number share {SHARED[name]} ({name})." for name, _ in outer]
    notes += ["The shards of a replica share parameters, gradients and optimizer states."] if len(data) > 1 else []
    notes.append("Each worker has its own data." if axis == "expert" else f"Another {number} number means other data.")
    return {
        "note": " ".join(notes),
        "text": "; ".join(f"{name}: ranks {ranks[0]} to {ranks[-1]}" for name, ranks in groups),
        "axis": axis,
        "left": max(46, 7 * len(names[-1])),
        "rows": [(name, ranks[:MAX_SIDE]) for name, ranks in groups],
        "is_cut": max(degree, rows) > MAX_SIDE,
    }


def places(axes: Degrees, most: int) -> list[tuple[tuple[str, int], ...]]:
    """Return the coordinates of the first rows. The last axis changes first."""
    return list(islice(product(*([(name, n) for n in range(min(size, most))] for name, size in axes)), most))
