"""The private PyTorch APIs that distexp uses, in the installed release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from distexp.models.transforms import compile_forward
from distexp.system.torch_internals import pooling, tensors
from distexp.system.torch_internals.collectives import (
    FSDPPolicies,
    fake_process_group,
    has_several_groups,
    read_fsdp_policies,
)
from distexp.system.torch_internals.compilation import extension_build_dir
from distexp.system.torch_internals.tensors import TorchInternalsChangedError, scale_tensors, tensor_norms


@pytest.mark.usefixtures("one_rank_group")
@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp_policies_are_read_from_a_sharded_unit(reshards: bool) -> None:
    model = nn.Linear(4, 4)
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (1,)),
        reshard_after_forward=reshards,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    expected = FSDPPolicies(reshards_after_forward=reshards, offloads_to_cpu=True, param_dtype=torch.bfloat16)
    assert read_fsdp_policies([model]) == [expected]


def test_groups_with_other_ranks_are_several_groups() -> None:
    with fake_process_group(4):
        assert not has_several_groups()
        for ranks, expected in (([0, 1, 2, 3], False), ([0], False), ([0, 2], True)):
            dist.new_group(ranks)
            assert has_several_groups() == expected


def test_norms_and_scaling_of_several_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[5.0], [12.0]])]
    norms = tensor_norms(tensors, torch.float64)
    assert [norm.item() for norm in norms] == [5.0, 13.0]
    assert norms[0].dtype == torch.float64
    scale_tensors(tensors, torch.tensor(0.5))
    assert tensors[1].flatten().tolist() == [2.5, 6.0]


def test_build_folder_of_an_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert extension_build_dir("example").is_relative_to(tmp_path)


@pytest.mark.parametrize("name", ["default_pg_timeout", "default_pg_nccl_timeout"])
def test_torch_has_the_default_timeouts_that_distexp_sets(name: str) -> None:
    assert hasattr(distributed_c10d, name), f"adapt set_default_timeout to PyTorch {torch.__version__}"


def test_a_changed_api_is_reported_with_a_hint() -> None:
    with pytest.raises(TorchInternalsChangedError, match=r"_get_fsdp_state.* of PyTorch .*: install the version"):
        read_fsdp_policies([nn.Linear(1, 1)])


def model_of(seed: int) -> nn.Module:
    """Return a module with a large and a small weight, filled twice, and a row of zeros."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(1100, 1024), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        model[0].weight.data.normal_(1.0, 0.5)
        model[0].weight[3].zero_()
        model[1].weight.normal_()
    return model


def test_parallel_random_fills_have_the_values_of_the_seed_and_not_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    for cores in (1, 3):
        monkeypatch.setattr(tensors, "cpu_count", lambda cores=cores: cores)
        with tensors.parallel_random_fills():
            made.append(model_of(5))
    with tensors.parallel_random_fills():
        other = model_of(6)
    first, second = ([weight.detach() for weight in model.parameters()] for model in made)
    assert all(map(torch.equal, first, second))
    large = first[0]
    assert not torch.equal(large, next(other.parameters()))
    assert large[3].count_nonzero() == 0
    assert (large.mean().item(), large.std().item()) == pytest.approx((1.0, 0.5), abs=2e-3)
    pieces = large.flatten()[: tensors.PIECE], large.flatten()[tensors.PIECE :]
    assert not torch.equal(pieces[0][: len(pieces[1])], pieces[1])


def test_what_reads_a_weight_gets_its_values() -> None:
    torch.manual_seed(0)
    with tensors.parallel_random_fills():
        weight = torch.empty(1024, 1024).uniform_(2.0, 3.0)
        half, mean = weight.to(torch.bfloat16), weight.mean()
        weight.normal_()
    assert half.float().min() >= 2.0
    assert mean.item() == pytest.approx(2.5, abs=1e-2)
    assert weight.min() < 0.0


@pytest.mark.parametrize(
    "options", [([3, 3], [2, 2], [1, 1], False, True, None), ([3, 3], [2, 2], [1, 1], True, False, 5)]
)
def test_the_repaired_kernel_has_the_gradients_and_the_format_of_torch(options: tuple[Any, ...]) -> None:
    """The kernel of CUDA for channels-last images ignores the padding, so the repair computes contiguous ones."""
    images = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    pooled = functional.avg_pool2d(images, *options)
    gradient = torch.randn_like(pooled)
    (expected,) = torch.autograd.grad(pooled, images, gradient)
    found = pooling.backward_of_contiguous(gradient, images.detach(), *options)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride()
    assert pooling.has_right_kernel(torch.device("cpu"))


@pytest.mark.slow
def test_compiled_windows_over_the_edge_have_the_gradients_of_eager_code() -> None:
    def gradient(pool: Callable[[Tensor], Tensor]) -> Tensor:
        images = torch.ones(1, 1, 7, 7, requires_grad=True)
        return torch.autograd.grad(pool(images).sum(), images)[0]

    pool = nn.AvgPool2d(2, ceil_mode=True)
    assert torch.equal(gradient(compile_forward(pool.forward)), gradient(pool))
