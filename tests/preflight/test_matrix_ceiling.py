"""The matrix ceiling: its measurement, and the file that later runs read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distexp.preflight.run import measure_matrix_ceiling, store_ceiling, stored_ceiling

CPU = torch.device("cpu")


def test_the_measurement_leaves_the_rng_state() -> None:
    before = torch.get_rng_state()
    assert 0 < measure_matrix_ceiling(CPU, "fp32") < 100
    assert torch.equal(torch.get_rng_state(), before)


def test_a_ceiling_is_stored_for_a_device_and_a_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    assert stored_ceiling(CPU, "fp32") is None
    for measured, highest in ((0.25, 0.25), (0.5, 0.5), (0.4, 0.5)):
        path = store_ceiling(measured, CPU, "fp32")
        assert stored_ceiling(CPU, "fp32") == highest
    assert stored_ceiling(CPU, "bf16") is None
    assert f"torch-{torch.__version__}" in path.name
    for damaged in ("{", "[]", '{"tflops": null}', '{"tflops": -1}'):
        path.write_text(damaged)
        assert stored_ceiling(CPU, "fp32") is None, damaged
    store_ceiling(0.25, CPU, "fp32")
    assert stored_ceiling(CPU, "fp32") == 0.25, "a damaged file is replaced"
