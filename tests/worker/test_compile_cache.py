"""The folder of compiled code."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.runtime import cache_dir_utils

from distexp.config import ConfigError
from distexp.models.objective import linear_cross_entropy
from distexp.system.torch_internals.compilation import CACHE_VARIABLE, compile_counters
from distexp.worker.compile_cache import use_compile_cache
from tests.helpers.forked_cli import SERVER


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


def compiled_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    return linear_cross_entropy(hidden.tanh(), weight, None, labels, chunk)


def count_compilations(cache: str, chunks: Sequence[int], found: Path) -> None:
    """Compile the loss with chunks of some tokens, check its gradients, and write what the compiler counted."""
    # Without a pool, no further interpreter imports torch. It would compile for Triton only.
    os.environ |= {"DISTEXP_CACHE": cache, CACHE_VARIABLE: "", "TORCH_WARM_POOL": "0"}
    use_compile_cache()
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    for chunk in chunks:
        eager, compiled = (
            torch.autograd.grad(function(hidden, weight, torch.arange(8), chunk), (hidden, weight))
            for function in (compiled_loss, torch.compile(compiled_loss, fullgraph=True, dynamic=False))
        )
        torch.testing.assert_close(compiled, eager)
    found.write_text(json.dumps({**compile_counters(), **counters["aot_autograd"]}))


@pytest.mark.slow
def test_a_second_process_traces_and_compiles_nothing_again(tmp_path: Path) -> None:
    """Inductor runs a C++ compiler, which takes long on a CPU. Chunks of another size are other code."""
    runs = []
    for chunks in ([8], [8, 4]):
        found = tmp_path / f"{len(chunks)}.json"
        process = SERVER.Process(target=count_compilations, args=(str(tmp_path / "cache"), chunks, found))
        process.start()
        process.join()
        assert process.exitcode == 0
        runs.append(Counter(json.loads(found.read_text())))
    first, second = runs
    assert (first["autograd_cache_miss"], first["autograd_cache_hit"]) == (1, 0)
    assert (second["autograd_cache_miss"], second["autograd_cache_hit"]) == (1, 1)
    assert first["cache_misses"] == second["cache_misses"] == 2


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
