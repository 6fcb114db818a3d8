"""Which graphs torch compiles of a whole model, alone and in DDP."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import InductorError
from torch.nn.parallel import DistributedDataParallel

from distexp.config import ConfigError
from distexp.models import transforms
from tests.helpers.runs import resolve_cell

pytestmark = pytest.mark.usefixtures("one_rank_group")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each graph that is compiled."""
    found: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return graph.forward

    torch.compiler.reset()
    monkeypatch.setattr(transforms, "BACKEND", keep)
    return found


def make_model(layers: int = 6) -> nn.Module:
    """Return a model of layers with 1 MiB each."""
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))


def test_the_graphs_of_a_model_end_where_the_buckets_of_ddp_end(graphs: list[Any]) -> None:
    config = resolve_cell("strategy=ddp", "train.compile=model", "cluster.device=cpu")
    model = make_model()
    transforms.transform_blocks(model, config)
    assert transforms.read_compiled(model) == "model"
    inputs = torch.rand(2, 512)
    model(inputs)
    assert len(graphs) == 1
    torch.compiler.reset()
    graphs.clear()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=2)
    wrapped(inputs).sum().backward()
    assert len(graphs) == 4, "the first bucket has 1 MB, the others 2"
    assert transforms.read_compiled(wrapped) == "model"
    with wrapped.no_sync():
        wrapped(inputs).sum().backward()
    assert len(graphs) == 4, "a micro-batch without reduction is compiled again"


def test_each_block_is_one_graph_in_ddp_too(graphs: list[Any]) -> None:
    config = resolve_cell("strategy=ddp", "train.compile=blocks", "cluster.device=cpu", "ddp.bucket_cap_mb=0.5")
    model = nn.Sequential(make_model(3), make_model(3))
    transforms.transform_blocks(model, config)
    assert transforms.read_compiled(model) == "blocks"
    wrapped = DistributedDataParallel(model, bucket_cap_mb=config.ddp.bucket_cap_mb)
    wrapped(torch.rand(2, 512)).sum().backward()
    assert [sum(node.op == "call_function" for node in graph.graph.nodes) for graph in graphs] == [3, 3]


def test_a_model_that_is_no_graph_is_refused_with_a_hint(graphs: list[Any]) -> None:
    class Branching(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs * 2 if inputs.sum() > 0 else inputs

    model = Branching()
    transforms.transform_blocks(model, resolve_cell("strategy=single", "cluster.device=cpu", "train.compile=model"))
    message = r"train\.compile=model needs a model that torch compiles as one graph, but .* Use train\.compile=blocks"
    with pytest.raises(ConfigError, match=message), transforms.explained_compilation("model"):
        model(torch.ones(3))
    assert graphs == []


@pytest.mark.parametrize("chosen", [None, "/chosen/folder"])
def test_a_folder_of_compiled_code_without_room_is_named(
    chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks do compile, so train.compile=false is no advice."""
    monkeypatch.setenv("DISTEXP_CACHE", str(tmp_path))
    folder = chosen or f"{tmp_path}/compile-0"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
    variable = "TORCHINDUCTOR_CACHE_DIR" if chosen else "DISTEXP_CACHE"
    no_room = f"make room, or set the environment variable {variable} to a folder on another disk"
    quota = f"cannot write to the cache directory {folder} (Disk quota exceeded): {no_room}"
    with pytest.raises(ConfigError) as caught, transforms.explained_compilation("blocks"):
        raise InductorError(OSError(errno.EDQUOT, "Disk quota exceeded"), None)
    assert str(caught.value) == quota
    assert not isinstance(caught.value, transforms.CompilationError), "kernels=fast would store that nothing compiles"
    elsewhere = InductorError(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), None)
    with pytest.raises(InductorError), transforms.explained_compilation("blocks"):
        raise elsewhere


def test_a_compiled_block_is_found_inside_of_a_checkpoint(graphs: list[Any]) -> None:
    config = resolve_cell("model=gpt_tiny", "train.compile=true", "train.activation_checkpointing=true")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    assert transforms.read_compiled(model) == "none"
    transforms.transform_blocks(model, config)
    assert transforms.read_compiled(model) == "blocks"
