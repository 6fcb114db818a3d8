"""The loss equals torch's cross entropy, summed over the targets of a batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Batch, LabelsForHead, Sample
from distexp.data.images import collate_images
from distexp.data.loader import StepData
from distexp.data.text import TextCollate
from distexp.engines.hf_loop import DistexpTrainer
from distexp.models import transforms
from distexp.models.objective import LOSS_SUM, count_correct, entropy_of, evaluation_sums, loss_sum
from tests.helpers.runs import resolve_cell

VOCABULARY = 13
COLLATE = TextCollate(pad_id=0, length=10)
LOGITS = torch.zeros(3, 10, VOCABULARY)


def text_samples() -> list[Sample]:
    """Return three samples of different lengths; the last one is a padding sample."""
    samples: list[Sample] = []
    for length, prompt in ((6, 3), (9, 0), (4, 4)):
        ids = torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
        labels = ids.clone()
        labels[:prompt] = IGNORE
        samples.append({"input_ids": ids, "labels": labels})
    return samples


def text_batch() -> Batch:
    return COLLATE(text_samples())


def image_batch() -> Batch:
    labels = [torch.tensor(label) for label in (2, IGNORE, 0, 7)]
    return collate_images([{"images": torch.zeros(3, 4, 4, dtype=torch.uint8), "labels": label} for label in labels])


def logits_for(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))


def test_language_loss_predicts_the_next_token() -> None:
    batch = text_batch()
    logits = logits_for(3, 10, VOCABULARY)
    expected, hits, counted = 0.0, 0, 0
    for row in range(3):
        for position in range(1, 10):
            label = int(batch.labels[row, position])
            if label != IGNORE:
                scores = logits[row, position - 1]
                expected -= float(functional.log_softmax(scores, dim=-1)[label])
                hits += int(scores.argmax()) == label
                counted += 1
    assert batch.num_targets == counted == 3 + 8
    assert (batch.num_samples, batch.num_tokens) == (2, 15)
    for outputs in (logits, SimpleNamespace(logits=logits)):
        assert float(loss_sum("causal_lm", outputs, batch)) == pytest.approx(expected, rel=1e-6)
        assert int(count_correct("causal_lm", outputs, batch)) == hits


def test_image_loss_is_the_cross_entropy() -> None:
    batch = image_batch()
    logits = logits_for(4, 8)
    expected = functional.cross_entropy(logits[[0, 2, 3]], torch.tensor([2, 0, 7]), reduction="sum")
    assert batch.num_targets == batch.num_samples == 3
    assert loss_sum("image_classification", logits, batch).equal(expected)
    assert (
        int(count_correct("image_classification", functional.one_hot(torch.tensor([2, 1, 0, 3]), 8).float(), batch))
        == 2
    )


def test_top_k_hits_are_counted() -> None:
    batch = image_batch()  # labels 2, none, 0 and 7
    ranks = torch.tensor([[5, 4, 3, 2, 1, 0, -1, -2], [0] * 8, [-9, 8, 7, 6, 5, 4, 3, 2], [7, 6, 5, 4, 3, 2, 1, 9]])
    counts = [
        int(count_correct("image_classification", ranks.float(), batch, choices=choices))
        for choices in (1, 3, 5, 8, 100)
    ]
    assert counts == [1, 2, 2, 3, 3]
    loss, targets, first, among_five = evaluation_sums("image_classification", ranks.float(), batch).tolist()
    assert loss == pytest.approx(float(loss_sum("image_classification", ranks.float(), batch)))
    assert (targets, first, among_five) == (3, 1, 2)


def test_text_is_evaluated_without_accuracy() -> None:
    batch, logits = text_batch(), logits_for(3, 10, VOCABULARY)
    sums = evaluation_sums("causal_lm", logits, batch).tolist()
    assert sums == [pytest.approx(float(loss_sum("causal_lm", logits, batch))), 11, 0, 0]


def test_losses_of_parts_add_up_to_the_loss_of_the_batch() -> None:
    batch, logits = image_batch(), logits_for(4, 8)
    parts = [
        loss_sum("image_classification", logits[row : row + 1], Batch({}, batch.labels[row : row + 1], 1, 1, 0))
        for row in range(4)
    ]
    whole = loss_sum("image_classification", logits, batch)
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_the_sum_is_in_fp32() -> None:
    logits = logits_for(4, 8).bfloat16().requires_grad_()
    loss = loss_sum("image_classification", logits, image_batch())
    assert loss.dtype == torch.float32
    expected = loss_sum("image_classification", logits.detach().float(), image_batch())
    assert loss.equal(expected)


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    batch = image_batch()
    empty = Batch(batch.inputs, torch.full_like(batch.labels, IGNORE), 0, 0, 0)
    logits = logits_for(4, 8).requires_grad_()
    loss = loss_sum("image_classification", logits, empty)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


@pytest.mark.parametrize("outputs", [LOGITS, SimpleNamespace(loss=LOGITS.sum(), logits=LOGITS), {LOSS_SUM: 1.0}])
def test_an_own_loss_that_is_not_returned_as_a_sum_is_refused(outputs: Any) -> None:
    batch = LabelsForHead(COLLATE)(text_samples())
    expected = r"train.loss=own: .* returned .*: return \{\"loss_sum\": loss\} with a scalar tensor"
    with pytest.raises(ConfigError, match=expected):
        loss_sum("causal_lm", outputs, batch)
    trainer: Any = SimpleNamespace(task="causal_lm", step=StepData([batch], torch.tensor(1.0), 2), contributions=[])
    with pytest.raises(ConfigError, match=expected):
        DistexpTrainer._loss(trainer, outputs, batch.labels, torch.tensor(1.0))


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="task=other must be one of causal_lm, seq2seq_lm"):
        loss_sum("other", logits_for(4, 8), image_batch())


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_compiled_loss_has_the_gradients_of_the_plain_one(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "BACKEND", "aot_eager")
    config = resolve_cell("model=bloom_tiny", f"train.compile={'blocks' if is_compiled else 'false'}")
    entropy = transforms.training_entropy(config)
    assert (entropy is entropy_of) is not is_compiled
    for rows in (6, 9, 4):  # with a shape that was compiled before, and with others
        labels = torch.randint(0, 11, (rows,))
        labels[1] = IGNORE
        logits = [torch.randn(rows, 11, dtype=torch.bfloat16).requires_grad_()]
        logits.append(logits[0].detach().clone().requires_grad_())
        losses = entropy(logits[0], labels), entropy_of(logits[1], labels)
        (losses[0] / 3).backward()
        (losses[1] / 3).backward()
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(logits[0].grad, logits[1].grad)
