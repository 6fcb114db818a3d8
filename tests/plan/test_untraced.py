"""The line of a model that cannot be traced."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from distexp.plan.trace.traced_run import describe_failure, without_layer_drop
from distexp.system.files import PACKAGE
from distexp.system.torch_internals.tensors import make_fake_mode

TORCH = Path(torch.__file__).parent / "nn" / "modules" / "linear.py"
PYTHON = Path(sysconfig.get_path("stdlib"))


def failure(*paths: Path) -> Exception:
    """Return an error of functions in these files; each one calls the next."""
    called = None
    for path in reversed(paths):
        namespace = {"called": called}
        body = "called()" if called else "raise ValueError('no')"
        exec(compile(f"def function():\n    {body}\n", str(path), "exec"), namespace)
        called = namespace["function"]
    assert called is not None
    with pytest.raises(ValueError, match="no") as caught:
        called()
    return caught.value


@pytest.mark.parametrize("folder", ["distexp/my_models", "torch/my_models", "triton", "models"])
@pytest.mark.parametrize("inner", [TORCH, PACKAGE / "models" / "bloom.py", PYTHON / "functools.py"])
def test_line_of_a_model_in_a_folder_with_the_name_of_a_library(folder: str, inner: Path, tmp_path: Path) -> None:
    net = tmp_path / folder / "net.py"
    assert f" at {net.parent.name}/net.py:2: " in describe_failure(failure(net, inner))


def test_line_of_an_installed_package() -> None:
    path = PYTHON / "site-packages" / "timm" / "layers.py"
    assert " at timm/layers.py:2: " in describe_failure(failure(path, TORCH))


def test_layer_drop_is_traced_without_a_dropped_layer() -> None:
    original = torch.rand
    with make_fake_mode(), without_layer_drop():
        kept = [not torch.rand([]) < 0.9, not torch.rand(()) < 0.9]
        assert torch.rand(2, 3).shape == (2, 3)
    assert kept == [True, True]
    assert torch.rand is original
