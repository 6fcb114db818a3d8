"""The folder of compiled code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime import cache_dir_utils

from distexp.config import ConfigError
from distexp.system.torch_internals.compilation import CACHE_VARIABLE
from distexp.worker.compile_cache import use_compile_cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(CACHE_VARIABLE, "")  # so that monkeypatch restores it
    return tmp_path / "cache"


def test_the_folder_is_private_and_named_after_the_versions(cache: Path) -> None:
    folder = use_compile_cache()
    assert os.environ[CACHE_VARIABLE] == str(folder)
    assert folder.parent == cache / f"compile-{os.getuid()}"
    assert torch.__version__ in folder.name
    assert folder.stat().st_mode & 0o077 == folder.parent.stat().st_mode & 0o077 == 0


def test_the_folder_is_used_again() -> None:
    first = use_compile_cache()
    (first / "compiled").touch()
    os.environ[CACHE_VARIABLE] = ""
    assert (use_compile_cache() / "compiled").exists()


def test_the_folder_of_the_user_is_left_as_it_is(cache: Path, tmp_path: Path) -> None:
    os.environ[CACHE_VARIABLE] = str(tmp_path / "own")
    assert use_compile_cache() == tmp_path / "own"
    assert not cache.exists()


def test_the_default_of_torch_is_no_choice_of_the_user(cache: Path) -> None:
    """Some imports set the variable, so it may be set before a worker asks."""
    os.environ.pop(CACHE_VARIABLE)
    assert cache_dir_utils.cache_dir() == os.environ[CACHE_VARIABLE], "torch no longer sets it"
    assert use_compile_cache().parent.parent == cache
    assert Path(cache_dir_utils.cache_dir()).is_relative_to(cache)


PROGRAM = """
import torch
from torch._inductor.runtime import cache_dir_utils
from distexp.system.torch_internals.compilation import compile_counters
from distexp.worker.compile_cache import use_compile_cache
use_compile_cache()
torch.compile(lambda x: torch.nn.functional.gelu(x).sum())(torch.ones(64))
print(compile_counters())
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing() -> None:
    """Inductor runs a C++ compiler, which takes long on a CPU."""
    os.environ.pop(CACHE_VARIABLE)
    runs = [subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True) for _ in "12"]
    first, second = (ast.literal_eval(run.stdout.splitlines()[-1]) for run in runs)
    assert (first["cache_hits"], first["cache_misses"]) == (0, 1)
    assert (second["cache_hits"], second["cache_misses"]) == (1, 0)


LOSS = """
import sys
import torch
from torch._dynamo.utils import counters
from distexp.models.objective import linear_cross_entropy
from distexp.worker.compile_cache import use_compile_cache
use_compile_cache()
torch.manual_seed(0)
hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
labels = torch.arange(8)
def loss(hidden, weight, bias, labels):
    return linear_cross_entropy(hidden.tanh(), weight, bias, labels, int(sys.argv[1]))
gradients = []
for function in (loss, torch.compile(loss, fullgraph=True, dynamic=False)):
    gradients.append(torch.autograd.grad(function(hidden, weight, None, labels), (hidden, weight)))
for eager, compiled in zip(*gradients):
    torch.testing.assert_close(eager, compiled)
print(dict(counters["aot_autograd"]))
"""


@pytest.mark.slow
def test_a_second_process_does_not_trace_the_gradients_of_the_loss_again() -> None:
    """Chunks of another size are other code, so they are not in the cache."""
    os.environ.pop(CACHE_VARIABLE)
    runs = [
        subprocess.run([sys.executable, "-c", LOSS, chunk], capture_output=True, text=True, check=True)
        for chunk in ("8", "8", "3")
    ]
    first, second, other = (ast.literal_eval(run.stdout.splitlines()[-1]) for run in runs)
    assert (first["autograd_cache_miss"], second["autograd_cache_hit"], other["autograd_cache_miss"]) == (1, 1, 1)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "my cache"))
    use_compile_cache().parent.chmod(0o777)
    os.environ[CACHE_VARIABLE] = ""
    with pytest.raises(ConfigError, match=r"other users can write to .*compile-\d+, .*chmod go-w '.*compile-\d+', or"):
        use_compile_cache()


def test_a_link_to_another_folder_is_refused(cache: Path, tmp_path: Path) -> None:
    cache.mkdir()
    (cache / f"compile-{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="must be a folder of this user"):
        use_compile_cache()


def test_an_unwritable_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"train\.compile needs a cache, .*DISTEXP_CACHE"):
        use_compile_cache()
