"""The peak rates of the datasheets."""

from __future__ import annotations

import pytest

from distexp.system.gpu_models import LARGE_WORKSPACE, SMALL_WORKSPACE, cublas_workspace, peak_tflops


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
        ("NVIDIA H100 80GB HBM3", LARGE_WORKSPACE),
        ("NVIDIA RTX PRO 4500 Blackwell", LARGE_WORKSPACE),
        ("NVIDIA GeForce RTX 5060 Ti", LARGE_WORKSPACE),
        ("NVIDIA GeForce RTX 5050", LARGE_WORKSPACE),
        ("NVIDIA GeForce RTX 4090", SMALL_WORKSPACE),
        ("NVIDIA A100-SXM4-80GB", SMALL_WORKSPACE),
        (None, LARGE_WORKSPACE),
    ],
)
def test_gpus_since_hopper_have_a_larger_workspace(name: str | None, workspace: int) -> None:
    assert cublas_workspace(name) == workspace
