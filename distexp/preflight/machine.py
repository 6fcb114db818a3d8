"""What is known about the communication of a machine: measured curves, and links.

The preflight stores its curves in the cache directory: one file per type of device, with the latest of each layout.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from distexp.config import ConfigError, overrides, sections
from distexp.hardware.facts import Latency, Link, facts, intra_node_link
from distexp.runs.record import RunRecord
from distexp.runs.record_sections import Environment
from distexp.runs.run_dir import PREFLIGHT, RECORD
from distexp.system.cache_dir import cache_dir, file_name
from distexp.system.files import read_json, write_json
from distexp.system.typed_values import parse_dataclass


@dataclass(frozen=True)
class CurvePoint:
    """A measured collective."""

    kind: str  # as of a collective of the step model
    ranks: int  # number of workers that took part
    nodes: int  # number of nodes on which they are
    bytes: int  # size as in nccl-tests
    seconds: float  # duration on the slowest rank


@dataclass(frozen=True)
class Network:
    """The network between nodes. If rail-optimized, its upper level matters only with more than ``nodes_per_leaf``."""

    name: str = field(default_factory=lambda: facts().usual_networks["gpu"])  # a key of ``networks`` in facts.yaml
    rail_optimized: bool = True
    oversubscription: float = 1.0  # by how much the upper level of the network is slower than the lower one
    latency: Latency = field(default_factory=lambda: facts().links["network"].latency)  # latency of a hop

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is unknown or impossible."""
        if self.name not in facts().networks:
            raise ConfigError(f"forecast.network={self.name} is unknown: use one of {', '.join(facts().networks)}")
        if self.oversubscription < 1:
            raise ConfigError(f"forecast.oversubscription={self.oversubscription:g} is impossible: use at least 1")

    def link(self, nodes: int, workers_per_node: int) -> Link:
        """Return the link of each worker to other nodes, if all workers use it at the same time."""
        card = facts().link("network", facts().networks[self.name].gb_per_s)
        bandwidth = card.bandwidth * self._cards_of(workers_per_node) / workers_per_node
        factor = self.oversubscription if self.uses_upper_level(nodes) else 1.0
        return Link(self.name, bandwidth / factor, self.latency)

    def _cards_of(self, workers: int) -> int:
        """Return the network cards of a node that so many workers use."""
        cards = facts().networks[self.name].cards or workers
        if self.name.startswith("efa"):
            return min(cards, math.ceil(workers * cards / facts().gpus_of_efa_node))
        return cards

    def describe(self, workers_per_node: int) -> str:
        """Return the network as an option, with the cards that so many workers use."""
        cards = f"{overrides.format_count(self._cards_of(workers_per_node), 'card')} per node"
        is_known = facts().networks[self.name].cards is not None
        return f"forecast.network={self.name}, {cards if is_known else 'one card per worker'}"

    def uses_upper_level(self, nodes: int) -> bool:
        """Return whether collectives over so many nodes go through the upper level of the network."""
        return not self.rail_optimized or nodes > facts().nodes_per_leaf


@dataclass(frozen=True)
class MachineCurves:
    """Communication of a machine."""

    points: tuple[CurvePoint, ...]  # measured collectives; empty: none
    intra: Link  # link between workers of a node
    network: Network  # network between nodes

    def curve(self, kind: str, ranks: int, nodes: int) -> list[CurvePoint]:
        """Return the points of a kind and a layout, by size."""
        found = (point for point in self.points if (point.kind, point.ranks, point.nodes) == (kind, ranks, nodes))
        return sorted(found, key=lambda point: point.bytes)

    def layouts(self, kind: str) -> list[tuple[int, int]]:
        """Return the measured layouts of a kind: workers and nodes."""
        return sorted({(point.ranks, point.nodes) for point in self.points if point.kind == kind})


def load_machine(run_dir: Path, options: sections.ForecastConfig) -> MachineCurves:
    """Return what is known about the machine of a run; raise ConfigError if something cannot be read.

    The curves are those of ``forecast.preflight``, else of the run's own preflight, else those that preflights stored
    on this machine.
    """
    try:
        record = RunRecord.read(run_dir / RECORD)
    except ValueError as error:
        raise ConfigError(f"{error}: name the directory of a finished run") from error
    known = usual_network(record.environment.gpu_name if record.environment else None)
    network = Network(
        known.name if options.network is None else options.network,
        rail_optimized=known.rail_optimized if options.rail_optimized is None else options.rail_optimized,
        oversubscription=options.oversubscription,
        latency=known.latency,
    )
    machine = machine_of(record.environment, network)
    points: Sequence[CurvePoint] = ()
    if options.preflight is not None:
        path = Path(options.preflight) / PREFLIGHT
        try:
            points = points_of_preflight(read_json(path))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = f"{path.parent} has no readable {PREFLIGHT} ({error})"
            raise ConfigError(f"{reason}: name the run directory of distexp preflight") from error
    elif record.preflight is not None:
        points = points_of_preflight(record.preflight)
    return replace(machine, points=tuple(points)) if points else machine


def machine_of(environment: Environment | None, network: Network | None = None) -> MachineCurves:
    """Return what is known about the machine of a run, with the curves that preflights stored on this machine."""
    gpu_name, hostname = (environment.gpu_name, environment.hostname) if environment else (None, None)
    points = tuple(stored_points(gpu_name, hostname))
    return MachineCurves(points, intra_node_link(gpu_name), network or usual_network(gpu_name))


def points_of_preflight(result: Mapping[str, Any]) -> list[CurvePoint]:
    """Return the curves in the content of a ``preflight.json``. Those between simulated nodes of GPUs are left out."""
    points, nodes = [], int(result["nodes"])
    for one in result["measurements"]:
        group = str(one["group"])
        across = nodes if group == "all" else one["ranks"] if group == "across nodes" else 1
        if across > 1 and simulates_nodes(result):
            continue
        kind = {"send_receive": "send_recv"}.get(one["operation"], one["operation"])
        if one["correct"] and one["seconds"] > 0 and (group == "node 0" or not group.startswith("node ")):
            points.append(CurvePoint(kind, one["ranks"], across, one["bytes"], one["seconds"]))
    return points


def simulates_nodes(result: Mapping[str, Any]) -> bool:
    """Return whether the GPUs of several nodes of a preflight are those of fewer machines. NVLink connects them."""
    return bool(result["backend"] == "nccl" and int(result["hosts"]) < int(result["nodes"]))


def store_points(points: Sequence[CurvePoint], gpu_name: str | None, hostname: str | None) -> None:
    """Store curves for later forecasts. Points of other layouts are kept.

    Raises ConfigError if this user has no cache directory, and OSError if the file cannot be written.
    """
    new = {(point.kind, point.ranks, point.nodes) for point in points}
    kept = [point for point in stored_points(gpu_name, hostname) if (point.kind, point.ranks, point.nodes) not in new]
    path = _path(gpu_name, hostname)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"points": [asdict(point) for point in (*kept, *points)]})


def stored_points(gpu_name: str | None, hostname: str | None) -> Iterable[CurvePoint]:
    """Return the curves that preflights stored for this type of device; empty if there are none."""
    try:
        return [parse_dataclass(CurvePoint, entry) for entry in read_json(_path(gpu_name, hostname))["points"]]
    except (ConfigError, OSError, ValueError, KeyError, TypeError):
        return []


def _path(gpu_name: str | None, hostname: str | None) -> Path:
    name = gpu_name or f"cpu of {hostname}"
    return cache_dir() / "collective-curves" / f"{file_name(name)}.json"


def usual_network(gpu_name: str | None) -> Network:
    """Return the network that is assumed between nodes with this GPU; None: CPUs, whose gloo uses TCP."""
    if gpu_name is None:
        return Network(facts().usual_networks["cpu"], latency=facts().links["loopback"].latency)
    return Network()
