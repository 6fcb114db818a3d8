"""Tests of the facts of GPUs, and that an entry in the table is all that a new GPU needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from distexp.choose.predictions.rough_forecast import read_machine_speeds
from distexp.hardware import facts as table
from distexp.hardware.facts import cublas_workspace, facts, gpu_facts, intra_node_link, peak_tflops
from distexp.plan.planner import cache_path
from distexp.plan.verdict import gpu_memory_mib
from distexp.preflight.machine import machine_of
from distexp.system.units import MIB
from tests.helpers.profiled_records import COMPUTE_BOUND, GPU, explanation, profiled
from tests.helpers.runs import resolve_cell

LARGE, SMALL = 32 * MIB, 8 * MIB + MIB // 8
"""Workspaces of cuBLAS on GPUs since Hopper, and on older ones."""


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA H200", 989.5, 67.0),
        ("NVIDIA H200 NVL", 835.5, 60.0),
        ("NVIDIA H100 80GB HBM3", 989.5, 67.0),
        ("NVIDIA H100 PCIe", 756.5, 51.0),
        ("NVIDIA H100 NVL", 835.5, 60.0),
        ("NVIDIA GH200 480GB", 989.5, 67.0),
        ("NVIDIA B200", 2250.0, 75.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA A100-PCIE-40GB", 312.0, 19.5),
        ("NVIDIA L40S", 362.0, 91.6),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("Tesla V100-PCIE-16GB", None, 14.0),
        ("Tesla V100S-PCIE-32GB", None, 16.4),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None, None),
        ("NVIDIA L40", None, None),
        ("NVIDIA A10G", None, None),
        (None, None, None),
    ],
)
def test_each_form_factor_has_its_peak(name: str | None, bf16: float | None, fp32: float | None) -> None:
    assert (peak_tflops(name, "bf16"), peak_tflops(name, "fp32")) == (bf16, fp32)


def test_a_v100_has_tensor_cores_for_fp16_only() -> None:
    assert peak_tflops("Tesla V100-SXM2-32GB", "fp16") == 125.0


@pytest.mark.parametrize(
    ("name", "workspace"),
    [
        ("NVIDIA H100 80GB HBM3", LARGE),
        ("NVIDIA RTX PRO 4500 Blackwell", LARGE),
        ("NVIDIA GeForce RTX 5060 Ti", LARGE),
        ("NVIDIA GeForce RTX 5050", LARGE),
        ("NVIDIA GeForce RTX 4090", SMALL),
        ("NVIDIA A100-SXM4-80GB", SMALL),
        (None, LARGE),
    ],
)
def test_gpus_since_hopper_have_a_larger_workspace(name: str | None, workspace: int) -> None:
    assert cublas_workspace(name) == workspace


@pytest.mark.parametrize(
    ("name", "has_bf16"),
    [
        ("Tesla V100-SXM2-32GB", False),
        ("NVIDIA GeForce RTX 2080 Ti", False),
        ("Quadro RTX 6000", False),
        ("NVIDIA TITAN RTX", False),
        ("NVIDIA RTX 2000 Ada Generation", True),
        ("NVIDIA A100-SXM4-80GB", True),
        ("unknown", True),
    ],
)
def test_gpus_older_than_ampere_have_no_bf16(name: str, has_bf16: bool) -> None:
    assert gpu_facts(name).has_bf16 == has_bf16


def test_each_gpu_is_found_by_its_names() -> None:
    """An entry that lacks a fact cannot be read, so each has all facts or an explicit null."""
    for gpu in facts().gpus:
        for name in (*gpu.names, *gpu.memory_mib):
            found = gpu_facts(name.replace("*", "80"))
            assert found.names == gpu.names, name
            assert None not in (found.has_bf16, found.memory_gb_per_s, found.multiprocessors, found.workspace_mib)
            assert intra_node_link(name).bandwidth > 0


TOY = """gpus:
  - names: [TOY9]
    memory_mib: {toy9-123gb: 123000}
    tensor_tflops: 4000
    fp32_tflops: 40
    has_bf16: false
    memory_gb_per_s: 7777
    multiprocessors: 77
    workspace_mib: 64
    link: {name: NVLink 9, gb_per_s: 1000}
"""


@pytest.fixture
def toy_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a GPU to a copy of the table."""
    copy = tmp_path / "facts.yaml"
    copy.write_text(table.TABLE.read_text().replace("gpus:\n", TOY, 1))
    monkeypatch.setattr(table, "TABLE", copy)
    facts.cache_clear()
    yield
    facts.cache_clear()


@pytest.mark.usefixtures("toy_table")
def test_an_entry_in_the_table_is_all_that_a_gpu_needs() -> None:
    reported = "ACME Toy9 123GB"
    config = resolve_cell("command=plan", "plan.gpu=toy9-123gb", "precision=fp16", "strategy=single")
    # plan
    assert gpu_memory_mib(config) == 123_000
    other = resolve_cell("command=plan", "plan.gpu=h100-80gb", "precision=fp16", "strategy=single")
    assert cache_path(config) != cache_path(other), "the kernels of both GPUs need other buffers"
    # choose
    speeds = read_machine_speeds(config)
    assert (speeds.tflops, speeds.memory_gb_per_s, speeds.link_gb_per_s) == (0.6 * 4000, 7777, 200)
    # forecast
    run = profiled(COMPUTE_BOUND, precision__name="fp32", **GPU)
    assert run.environment is not None
    run.environment.gpu_name = reported
    machine = machine_of(run.environment)
    assert (machine.intra.name, machine.intra.bandwidth) == ("NVLink 9", pytest.approx(810e9))
    # explain
    assert "precision=bf16" not in explanation(run).alternatives
    # MFU
    assert (peak_tflops(reported, "fp16"), peak_tflops(reported, "bf16")) == (4000, None)
