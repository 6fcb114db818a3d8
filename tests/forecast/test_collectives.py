"""Tests of the duration of collectives: measured curves, and the model of rings and trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from distexp.config import ConfigError
from distexp.forecast.communication import (
    MEASURED,
    MODEL,
    SCALED,
    GroupLayout,
    NcclProtocol,
    collective_time,
    interpolate,
    model_time,
    ring_time,
    tree_time,
)
from distexp.hardware.facts import facts, intra_node_link
from distexp.preflight.machine import (
    CurvePoint,
    MachineCurves,
    Network,
    points_of_preflight,
    store_points,
    stored_points,
    usual_network,
)

H200 = intra_node_link("NVIDIA H200")
MB = 1_000_000


def curve(*points: tuple[int, float], kind: str = "all_reduce", ranks: int = 2, nodes: int = 1) -> list[CurvePoint]:
    return [CurvePoint(kind, ranks, nodes, size, seconds) for size, seconds in points]


def machine(*points: CurvePoint, network: Network | None = None) -> MachineCurves:
    return MachineCurves(points, H200, network or Network("infiniband-ndr-400g"))


def test_a_curve_is_a_line_in_logarithms_between_its_points() -> None:
    measured = curve((100, 1e-5), (10_000, 1e-3))
    assert interpolate(measured, 1_000) == pytest.approx(1e-4)
    assert interpolate(measured, 10) == 1e-5  # the latency
    assert interpolate(measured, 100_000) == pytest.approx(1e-2)  # the bandwidth of the largest


def test_a_ring_takes_2_n_minus_2_steps_of_an_nth() -> None:
    protocol = NcclProtocol(bandwidth=100e9, near=1e-6, far=10e-6, base=5e-6)
    assert ring_time("all_reduce", 800 * MB, GroupLayout(8, 1, 8), protocol) == pytest.approx(5e-6 + 14e-6 + 0.014)
    assert ring_time("all_gather", 800 * MB, GroupLayout(8, 1, 8), protocol) == pytest.approx(5e-6 + 7e-6 + 0.007)
    # two nodes: 14 of 30 steps in each node, and 2 between the nodes
    assert ring_time("all_reduce", 0, GroupLayout(16, 2, 8), protocol) == pytest.approx(5e-6 + 28e-6 + 20e-6)


def test_a_tree_goes_up_and_down_once() -> None:
    protocol = NcclProtocol(bandwidth=100e9, near=1e-6, far=10e-6, base=5e-6)
    assert tree_time(100 * MB, GroupLayout(64, 8, 8), protocol) == pytest.approx(5e-6 + 2 * (7e-6 + 30e-6) + 0.002)


def test_a_small_all_reduce_over_many_nodes_uses_a_tree_and_a_large_one_a_ring() -> None:
    layout = GroupLayout(1024, 128, 8)
    ring = ring_time("all_reduce", 4, layout, NcclProtocol(1e9, H200.latency.fast, 2.7e-6, 3.6e-6))
    assert model_time(machine(), "all_reduce", 4, layout) < ring / 5
    bandwidth = min(H200.bandwidth, machine().network.link(128, 8).bandwidth * 8)
    large = 40_000 * MB
    assert model_time(machine(), "all_reduce", large, layout) == pytest.approx(2 * large / bandwidth, rel=0.15)


def test_a_measured_layout_is_used_and_another_one_is_scaled_by_the_model() -> None:
    known = machine(*curve((MB, 0.001), (100 * MB, 0.01)))
    assert collective_time(known, "all_reduce", 100 * MB, GroupLayout(2, 1, 8)).seconds == 0.01
    found = collective_time(known, "all_reduce", 100 * MB, GroupLayout(8, 1, 8))
    ratio = model_time(known, "all_reduce", 100 * MB, GroupLayout(8, 1, 8))
    ratio /= model_time(known, "all_reduce", 100 * MB, GroupLayout(2, 1, 2))
    assert (found.seconds, found.source) == (pytest.approx(0.01 * ratio), SCALED)
    assert ratio == pytest.approx(14 / 8, rel=0.2)  # 2 (n - 1) / n: 14 / 8 instead of 1


def test_curves_of_one_node_do_not_scale_a_collective_of_several_nodes() -> None:
    known = machine(*curve((MB, 0.001), (100 * MB, 0.01)))
    assert collective_time(known, "all_reduce", MB, GroupLayout(16, 2, 8)).source == MODEL
    assert collective_time(known, "all_reduce", MB, GroupLayout(1, 1, 8)).seconds == 0


SLOW_LINKS = curve((1_000, 2e-5), (100 * MB, 0.008))
"""Two GPUs that exchange 12.5 GB/s, as without peer-to-peer access, and not the 364 GB/s of NVLink."""


@pytest.mark.parametrize("measured", [SLOW_LINKS, [*SLOW_LINKS, *curve((100 * MB, 0.001), nodes=2)]])
@pytest.mark.parametrize("size", [1_000, 100 * MB])
def test_several_nodes_are_not_faster_than_one_of_them(measured: list[CurvePoint], size: int) -> None:
    known = machine(*measured)
    layouts = [GroupLayout(8 * nodes, nodes, 8) for nodes in (1, 2, 8, 64)]
    times = [collective_time(known, "all_reduce", size, layout).seconds for layout in layouts]
    assert times == sorted(times)


def test_slow_links_in_a_node_limit_a_ring_over_several_nodes() -> None:
    known = machine(*SLOW_LINKS)
    found = collective_time(known, "all_reduce", 100 * MB, GroupLayout(128, 64, 2)).seconds
    assert found == pytest.approx(2 * 0.008, rel=0.15)  # 2 (n - 1) / n: 2 instead of 1


def test_links_in_a_node_as_fast_as_in_the_model_change_nothing_between_nodes() -> None:
    inside = GroupLayout(8, 1, 8)
    points = ((size, model_time(machine(), "all_reduce", size, inside)) for size in (MB, 100 * MB))
    known, layout = machine(*curve(*points, ranks=8)), GroupLayout(64, 8, 8)
    expected = model_time(machine(), "all_reduce", 100 * MB, layout)
    assert collective_time(known, "all_reduce", 100 * MB, layout).seconds == pytest.approx(expected)


def test_a_reduce_uses_the_curve_of_reduce_scatter() -> None:
    known = machine(*curve((MB, 0.001), kind="reduce_scatter"))
    found = collective_time(known, "reduce", MB, GroupLayout(2, 1, 2))
    assert (found.seconds, found.source) == (0.001, MEASURED)


def test_a_slower_upper_level_of_the_network_matters_beyond_a_leaf() -> None:
    layout_small, layout_large = (
        GroupLayout(64, 8, 8),
        GroupLayout(8 * 2 * facts().nodes_per_leaf, 2 * facts().nodes_per_leaf, 8),
    )
    fast = machine()
    rails = machine(network=Network("infiniband-ndr-400g", oversubscription=4))
    mixed = machine(network=Network("infiniband-ndr-400g", rail_optimized=False, oversubscription=4))
    size = 1_000 * MB

    def time(one: MachineCurves, layout: GroupLayout) -> float:
        return model_time(one, "all_gather", size, layout)

    assert time(rails, layout_small) == time(fast, layout_small) < time(mixed, layout_small) / 3
    assert time(rails, layout_large) == time(mixed, layout_large) > 2.5 * time(fast, layout_large)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("NVIDIA H200", 450),
        ("NVIDIA H100 80GB HBM3", 450),
        ("NVIDIA A100-SXM4-80GB", 300),
        ("Tesla V100-SXM2-32GB", 150),
        ("NVIDIA B200", 900),
        ("NVIDIA H20", 450),
    ],
)
def test_links_of_known_gpus(name: str, gigabytes: float) -> None:
    assert 0.7 * gigabytes * 1e9 < intra_node_link(name).bandwidth < gigabytes * 1e9


@pytest.mark.parametrize("name", ["NVIDIA A100-PCIE-40GB", "NVIDIA L40S", "Tesla T4", "unknown"])
def test_gpus_without_nvlink_use_pcie(name: str) -> None:
    assert intra_node_link(name).name.startswith("PCIe")


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("NVIDIA RTX A6000", 4), ("NVIDIA GeForce RTX 4090", 4), ("NVIDIA GeForce RTX 3090", 4),
        ("NVIDIA RTX 6000 Ada Generation", 4), ("NVIDIA GeForce RTX 5090", 5), ("NVIDIA GeForce RTX 2080 Ti", 3),
        ("Quadro RTX 4000", 3),
    ],
)  # fmt: skip
def test_pcie_generations_of_workstation_gpus(name: str, generation: int) -> None:
    assert intra_node_link(name).name == f"PCIe {generation}"


def test_network_cards_are_shared_by_the_workers_of_a_node() -> None:
    assert usual_network("NVIDIA H200").name == "infiniband-hdr-200g"
    on_cpus = usual_network(None)
    assert (on_cpus.name, on_cpus.link(2, 1).latency) == ("ethernet-10g", intra_node_link(None).latency)
    one_card_per_worker = Network("infiniband-hdr-200g").link(2, 4).bandwidth
    assert one_card_per_worker == Network("infiniband-hdr-200g").link(2, 8).bandwidth == pytest.approx(0.9 * 25e9)
    one_card_per_node = Network("ethernet-100g").link(2, 8).bandwidth
    assert one_card_per_node == Network("ethernet-100g").link(2, 1).bandwidth / 8 == pytest.approx(0.9 * 12.5e9 / 8)


@pytest.mark.parametrize(
    ("name", "workers", "cards"),
    [("efa-p5", 8, 32), ("efa-p5", 2, 8), ("efa-p5", 1, 4), ("efa-p4d", 8, 4), ("efa-p4d", 2, 1), ("efa-p4d", 1, 1)],
)
def test_a_worker_uses_only_the_cards_of_its_gpu(name: str, workers: int, cards: int) -> None:
    assert workers * Network(name).link(2, workers).bandwidth == pytest.approx(cards * 0.9 * 12.5e9)


def test_a_network_is_printed_with_its_cards() -> None:
    networks = (("infiniband-hdr-200g", 2), ("efa-p5", 2), ("efa-p5", 8), ("ethernet-10g", 2))
    assert [Network(name).describe(workers) for name, workers in networks] == [
        "forecast.network=infiniband-hdr-200g, one card per worker",
        "forecast.network=efa-p5, 8 cards per node",
        "forecast.network=efa-p5, 32 cards per node",
        "forecast.network=ethernet-10g, 1 card per node",
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "token-ring"}, r"forecast.network=token-ring is unknown: use one of .*infiniband-ndr-400g"),
        ({"oversubscription": 0.5}, r"oversubscription=0.5 is impossible: use at least 1"),
    ],
)
def test_an_impossible_network_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Network(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "hosts", "layouts"),
    [("nccl", 2, [(2, 1), (4, 2)]), ("nccl", 1, [(2, 1)]), ("gloo", 1, [(2, 1), (4, 2)])],
)
def test_times_between_gpus_of_one_machine_are_not_those_of_a_network(
    backend: str, hosts: int, layouts: list[tuple[int, int]]
) -> None:
    one = {"operation": "all_reduce", "bytes": 8, "seconds": 0.5, "correct": True}
    entries = [{**one, "group": "node 0", "ranks": 2}, {**one, "group": "all", "ranks": 4}]
    points = points_of_preflight({"backend": backend, "nodes": 2, "hosts": hosts, "measurements": entries})
    assert [(point.ranks, point.nodes) for point in points] == layouts


def test_curves_of_a_preflight_are_stored_by_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    one = {"operation": "send_receive", "ranks": 4, "bytes": 8, "seconds": 0.5, "correct": True}
    groups = ("all", "node 0", "node 1", "across nodes")
    ranks = (4, 2, 2, 2)
    entries = [{**one, "group": group, "ranks": count} for group, count in zip(groups, ranks, strict=True)]
    wrong = {**one, "group": "all", "correct": False}
    points = points_of_preflight({"backend": "gloo", "nodes": 2, "hosts": 2, "measurements": [*entries, wrong]})
    assert [(p.kind, p.ranks, p.nodes) for p in points] == [
        ("send_recv", 4, 2),
        ("send_recv", 2, 1),
        ("send_recv", 2, 2),
    ]
    store_points(points, "NVIDIA H200", "a")
    slower = [CurvePoint("send_recv", 4, 2, 8, 0.75)]
    store_points(slower, "NVIDIA H200", "b")  # the same type of device
    assert sorted(p.seconds for p in stored_points("NVIDIA H200", None)) == [0.5, 0.5, 0.75]
    assert list(stored_points(None, "a")) == []
