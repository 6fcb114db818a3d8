"""Batch norms whose weights are in 16 bits, and whose statistics are in fp32."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from distexp.models.transforms import use_fp32_batch_norms

OPTIONS: list[dict[str, Any]] = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]


def cast_weights(module: nn.Module) -> None:
    """Round the weights to bf16, but not the statistics."""
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_computes_as_torch_does_in_fp32(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    expected = nn.BatchNorm2d(6, **options)
    for parameter in expected.parameters():
        nn.init.uniform_(parameter)
        parameter.data = parameter.data.bfloat16().float()
    norm = deepcopy(expected)
    use_fp32_batch_norms(norm)
    cast_weights(norm)
    for _ in range(3):
        images = torch.randn(4, 6, 5, 5, requires_grad=True)
        copied = images.detach().requires_grad_()
        theirs, ours = expected(images), norm(copied)
        theirs.square().sum().backward()
        ours.square().sum().backward()
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(copied.grad, images.grad)
    for (name, mine), parameter in zip(norm.named_parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None, name
        assert mine.grad.dtype == torch.bfloat16, name
        torch.testing.assert_close(mine.grad.float(), parameter.grad, rtol=2e-2, atol=1e-2)
    for mine, buffer in zip(norm.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(mine, buffer)
    torch.testing.assert_close(norm.eval()(images), expected.eval()(images))


class Block(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normalized result."""
        normalized: torch.Tensor = self.norm(self.convolution(images))
        return normalized


def test_equal_blocks_share_one_compiled_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    for _ in range(3):
        block = Block()
        use_fp32_batch_norms(block)
        cast_weights(block)
        block.compile(backend=count, dynamic=False)
        assert block(torch.randn(2, 4, 6, 6).bfloat16()).dtype == torch.bfloat16
    assert len(graphs) == 1


def test_torch_refuses_such_weights_on_a_cpu() -> None:
    """If it does not any more, the module is needed less."""
    norm, images = nn.BatchNorm2d(6), torch.randn(4, 6, 5, 5).bfloat16()
    cast_weights(norm)
    with pytest.raises(RuntimeError, match="Float"):
        norm(images)
    use_fp32_batch_norms(norm)
    assert norm(images).dtype == torch.bfloat16
