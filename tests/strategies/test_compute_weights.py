"""Training with copies of the weights that are refreshed once per step."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distexp.data.base import IGNORE, Batch
from distexp.distributed.context import Context
from distexp.models.objective import entropy_of
from distexp.strategies.base import load_strategy
from distexp.strategies.ddp_reduction import StepWeights, add_to_masters, set_reduction
from distexp.strategies.optimizer import read_model_tensors
from distexp.strategies.torch_model import Distribution, TorchModel, read_ddp_distribution
from tests.helpers.runs import resolve_cell
from tests.helpers.small_gpt import VOCABULARY, make_gpt

BF16_STEP = ("strategy=single", "cluster.device=cpu", "precision=bf16", "train.compute_weights=step")
pytestmark = pytest.mark.usefixtures("one_rank_group")


def make_model(
    module: nn.Module, folder: Path, *overrides: str, copies: torch.dtype | None = None, ddp: str | None = None,
    graphs: bool = False,
) -> TorchModel:  # fmt: skip
    """Wrap a module as a strategy does, with copies of any data type, in DDP if ``ddp`` is its communication."""
    config = resolve_cell("strategy=single", "cluster.device=cpu", *overrides)
    if graphs:  # refused on a CPU, where only the handling of the gradients can be tested
        config.train.compile = "graphs"
    context = Context(
        rank=0, world_size=1, local_rank=0, workers_per_node=1, nodes=1, device=torch.device("cpu"), run_dir=folder
    )
    weights = StepWeights(module, copies) if copies is not None else None
    distribution = Distribution(wrapper="none", mesh=[1, 1])
    wrapped = module
    if ddp is not None:
        wrapped = DistributedDataParallel(module, bucket_cap_mb=0.005, gradient_as_bucket_view=True)
        set_reduction(wrapped, ddp, weights)
    model = TorchModel(
        wrapped,
        config,
        context,
        sync_context=lambda last: wrapped.no_sync() if ddp and not last else nullcontext(),
        autocast=True,
        distribution=lambda: read_ddp_distribution(wrapped) if ddp else distribution,
        weights=weights,
    )
    model.entropy = entropy_of  # The compiled loss of graphs would round in another way.
    return model


def micro_batches(step: int) -> list[Batch]:
    """Return three micro-batches of different targets, with padding at the end of some samples."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for length in (11, 11, 7):
        ids = torch.randint(1, VOCABULARY, (3, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 3 :] = 0
        labels = ids.masked_fill(mask == 0, IGNORE)
        labels[2, :4] = IGNORE
        targets = int((labels[:, 1:] != IGNORE).sum())
        batches.append(Batch({"input_ids": ids, "attention_mask": mask}, labels, 3, targets, int(mask.sum())))
    return batches


def train(model: TorchModel, steps: int = 4) -> list[tuple[float, float]]:
    """Train with accumulation; return loss and gradient norm of each step."""
    history = []
    for step in range(steps):
        batches = micro_batches(step)
        normalizer = torch.tensor(sum(batch.num_targets for batch in batches))
        losses = [
            model.forward_backward(batch, normalizer=normalizer, last_micro=batch is batches[-1])[0]
            for batch in batches
        ]
        history.append((torch.stack(losses).sum().item(), model.step(0.01).item()))
    return history


@pytest.mark.parametrize(("ddp", "graphs"), [(None, False), ("fp32", False), (None, True), ("fp32", True)])
def test_copies_of_the_same_type_change_nothing(ddp: str | None, graphs: bool, tmp_path: Path) -> None:
    plain = make_model(make_gpt(), tmp_path)
    module = make_gpt()
    copied = make_model(module, tmp_path, copies=torch.float32, ddp=ddp, graphs=graphs)
    for theirs, ours in zip(train(plain), train(copied), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    trained = dict(plain.weights())
    for name, weight in copied.weights():
        torch.testing.assert_close(weight, trained[name], atol=1e-6, rtol=1e-5)
    assert module.head.weight is module.tokens.weight


@pytest.mark.parametrize("ddp", [None, "fp32"])
def test_gradients_that_stay_allocated_change_nothing(ddp: str | None, tmp_path: Path) -> None:
    """With CUDA graphs, autograd must add to gradients that are no part of a graph."""
    module = make_gpt()
    graphs = make_model(module, tmp_path, ddp=ddp, graphs=True)
    before = {id(p): p.grad for p in module.parameters()}
    assert train(graphs) == train(make_model(make_gpt(), tmp_path))
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())
    assert ddp is not None or all(p.grad is before[id(p)] for p in module.parameters())


@pytest.mark.parametrize("ddp", [None, "fp32", "bf16"])
def test_bf16_copies_train_within_the_bounds(ddp: str | None, tmp_path: Path) -> None:
    autocast = train(make_model(make_gpt(), tmp_path, "precision=bf16"))
    copied = make_model(make_gpt(), tmp_path, "precision=bf16", copies=torch.bfloat16, ddp=ddp)
    for (theirs, their_norm), (ours, our_norm) in zip(autocast, train(copied), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-2)
        assert our_norm == pytest.approx(their_norm, rel=5e-2)
    built = copied.describe()
    assert (built.compute_weights, built.compute_dtype, built.param_dtype) == ("step", "bfloat16", "float32")
    assert built.communication_dtype == {None: None, "fp32": "float32", "bf16": "bfloat16"}[ddp]


def test_micro_batches_are_accumulated_in_fp32() -> None:
    """In bf16, 256 plus 1 is 256."""
    layer = nn.Linear(1, 1, bias=False)
    weights = StepWeights(layer, torch.bfloat16)
    with weights.masters():
        master = layer.weight
    for value in (256.0, 1.0, 1.0):
        layer.weight.grad = torch.full((1, 1), value, dtype=torch.bfloat16)
        weights.collect_gradients()
    assert master.grad is not None
    assert master.grad.item() == 258
    assert layer.weight.grad is None


def test_a_bucket_keeps_the_layout_of_its_gradients() -> None:
    """DDP stores the gradients of convolutions in the order of their memory."""
    masters = [
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)),
    ]
    buffer = torch.arange(26, dtype=torch.bfloat16)
    gradients = [buffer[:2], buffer.as_strided((2, 3, 2, 2), (12, 1, 6, 3), 2)]
    masters[1].grad = torch.ones(2, 3, 2, 2)
    flat = add_to_masters(masters, gradients, buffer)
    assert flat.tolist() == [0, 1, *range(3, 27)]
    assert masters[1].grad is not None
    torch.testing.assert_close(masters[1].grad, gradients[1].float() + 1)


def test_checkpoints_and_exports_have_the_fp32_weights(tmp_path: Path) -> None:
    module = make_gpt()
    model = make_model(module, tmp_path, *BF16_STEP, copies=torch.bfloat16)
    train(model)
    saved = {name: weight.clone() for name, weight in model.weights()}
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    assert any((weight != weight.bfloat16()).any() for weight in saved.values()), "the weights are rounded"
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    model.save(tmp_path / "checkpoint")
    expected = train(model)

    other = make_gpt()
    resumed = make_model(other, tmp_path, *BF16_STEP, copies=torch.bfloat16)
    resumed.load(tmp_path / "checkpoint")
    assert all(torch.equal(weight, saved[name]) for name, weight in resumed.weights())
    assert torch.equal(other.tokens.weight, saved["tokens.weight"].bfloat16())
    assert train(resumed) == expected
    plain = make_model(make_gpt(), tmp_path)
    plain.load(tmp_path / "checkpoint")
    assert all(torch.equal(weight, saved[name]) for name, weight in plain.weights())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("overrides", [(), ("train.optimizer=sgd", "train.momentum=0.9")])
def test_a_resumed_training_has_the_state_of_the_optimizer(
    graphs: bool, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """CUDA graphs need gradients from the start, and torch loads no state of an optimizer that has gradients."""
    model = make_model(make_gpt(), tmp_path, *overrides, graphs=graphs)
    train(model)
    model.save(tmp_path / "checkpoint")
    expected = train(model)
    resumed = make_model(make_gpt(), tmp_path, *overrides, graphs=graphs)
    resumed.load(tmp_path / "checkpoint")
    assert train(resumed) == expected


def test_memory_of_the_copies_is_counted(tmp_path: Path) -> None:
    module = make_gpt()
    model = make_model(module, tmp_path, *BF16_STEP, copies=torch.bfloat16)
    train(model, steps=1)
    tensors = read_model_tensors(model.module, model.optimizer)
    values = sum(parameter.numel() for parameter in module.parameters())
    assert sum(parameter.numel() * parameter.element_size() for parameter in tensors.parameters) == 2 * values
    states = {id(state): state.numel() for state in tensors.optimizer_states if state.numel() > 1}
    assert sum(states.values()) == 3 * values, "two moments and the fp32 weights"


def test_batch_norms_keep_their_fp32_weights() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    plain = copy.deepcopy(module)
    weights = StepWeights(module, torch.bfloat16)
    assert [p.dtype for p in module.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    images = torch.rand(2, 3, 9, 9)
    outputs: Tensor = module(images.to(torch.bfloat16))
    torch.testing.assert_close(outputs.float(), plain(images), atol=0.02, rtol=0.05)
    outputs.float().sum().backward()
    weights.collect_gradients()
    with weights.masters():
        assert {p.grad.dtype for p in module.parameters() if p.grad is not None} == {torch.float32}
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(
    ("overrides", "casts"),
    [
        (("strategy=ddp", "precision=bf16"), False),
        (("strategy=fsdp", "precision=bf16"), True),
        (("strategy=fsdp", "precision=fp32"), False),
        (("zero_stage=0", "precision=bf16"), False),
        (("zero_stage=1", "precision=bf16"), True),
    ],
)
def test_each_strategy_states_whether_its_wrapper_casts_the_weights(overrides: tuple[str, ...], casts: bool) -> None:
    config = resolve_cell("model=gpt_tiny", "dataset=synthetic", "cluster.device=cpu", *overrides)
    assert load_strategy(config).casts_weights(config) is casts
