"""The private PyTorch APIs that distexp uses, in the installed release."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

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
