"""The distributed models of the mutations. They import torch, so only workers import them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distexp.strategies import optimizer as optimizers
from distexp.strategies.torch_model import Distribution, TorchModel


class AllReduced(TorchModel):
    """A model with one all-reduce for each parameter, without a bug."""

    def __init__(self, model: nn.Module, config: Any, context: Any) -> None:
        @contextmanager
        def sync_context(last_micro: bool) -> Iterator[None]:
            yield
            if last_micro:
                self.reduce()

        self.config, self.rank, self.workers, self.updates = config, context.rank, context.world_size, 0
        self.prepare(model)
        super().__init__(
            model,
            config,
            context,
            sync_context=sync_context,
            autocast=True,
            distribution=lambda: Distribution("all-reduce", mesh=[context.world_size, 1]),
        )

    def prepare(self, model: nn.Module) -> None:
        """Change the model before the optimizer is built."""

    def reduce(self) -> None:
        """Average all gradients."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                self.reduce_one(name, parameter.grad)

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        """Average one gradient."""
        dist.all_reduce(gradient)
        gradient.div_(self.workers)

    def gradients(self) -> list[Tensor]:
        """Return all gradients."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]


class Summed(AllReduced):
    """Gradients are summed, not averaged."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        dist.all_reduce(gradient)


class AveragedTwice(AllReduced):
    """Gradients are averaged twice."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient)
        gradient.div_(self.workers)


class NotReduced(AllReduced):
    """Gradients are never synchronized."""

    def reduce(self) -> None:
        pass


class NormNotReduced(AllReduced):
    """The gradient of the weight of the last norm is not reduced."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        if not name.endswith("ln_f.weight"):
            super().reduce_one(name, gradient)


class EmbeddingNotReduced(AllReduced):
    """The gradient of the embedding, which is that of the head too, is not reduced."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        if not name.endswith("word_embeddings.weight"):
            super().reduce_one(name, gradient)


class LayerScaled(AllReduced):
    """The gradients of one layer are divided by the number of workers once more."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient)
        if ".h.1." in name:
            gradient.div_(self.workers)


class ReducedInBf16(AllReduced):
    """Gradients are reduced in bf16 although the training is in fp32."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        rounded = gradient.bfloat16()
        dist.all_reduce(rounded)
        gradient.copy_(rounded / self.workers)


class AccumulationSummed(AllReduced):
    """Gradients of the micro-batches are added and not rescaled."""

    def reduce(self) -> None:
        super().reduce()
        for gradient in self.gradients():
            gradient.mul_(self.config.train.gradient_accumulation_steps)


class LastMicroBatchOnly(AllReduced):
    """Each micro-batch clears the gradients of those before it."""

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        self.optimizer.zero_grad()
        return super().forward_backward(batch, normalizer=normalizer, last_micro=last_micro)


class LastReducedOnly(AllReduced):
    """Only the gradients of the last micro-batch are synchronized."""

    before: list[Tensor] = []  # noqa: RUF012

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        if last_micro:
            self.before = [gradient.clone() for gradient in self.gradients()]
        return super().forward_backward(batch, normalizer=normalizer, last_micro=last_micro)

    def reduce(self) -> None:
        before = self.before or [torch.zeros_like(gradient) for gradient in self.gradients()]
        for gradient, earlier in zip(self.gradients(), before, strict=True):
            gradient.sub_(earlier)
        super().reduce()
        for gradient, earlier in zip(self.gradients(), before, strict=True):
            gradient.add_(earlier)


class MeanPerMicroBatch(AllReduced):
    """The loss is the mean of each micro-batch, and then the mean over micro-batches and workers."""

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        parts = self.workers * self.config.train.gradient_accumulation_steps
        own = torch.as_tensor(max(1, batch.num_targets) * parts)
        return super().forward_backward(batch, normalizer=own, last_micro=last_micro)


class NotCleared(AllReduced):
    """The gradients are not cleared after the update."""

    def step(self, learning_rate: float) -> Tensor:
        kept = [gradient.clone() for gradient in self.gradients()]
        norm = super().step(learning_rate)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter, gradient in zip(trained, kept, strict=True):
            parameter.grad = gradient
        return norm


class DecayEverywhere(AllReduced):
    """Norms and biases have weight decay too."""

    def step(self, learning_rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.config.train.weight_decay
        return super().step(learning_rate)


class OtherBetas(AllReduced):
    """The optimizer has its default betas, not those of the configuration."""

    def step(self, learning_rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group.update({"betas": (0.9, 0.95)} if "betas" in group else {})
        return super().step(learning_rate)


class RateTimesWorkers(AllReduced):
    """The learning rate is multiplied by the number of workers."""

    def step(self, learning_rate: float) -> Tensor:
        return super().step(learning_rate * self.workers)


class StaleRate(AllReduced):
    """The optimizer keeps its first learning rate."""

    first: float | None = None

    def step(self, learning_rate: float) -> Tensor:
        self.first = learning_rate if self.first is None else self.first
        return super().step(self.first)


class LocalClipNorm(AllReduced):
    """Each rank clips by the norm of its own part of the gradients."""

    def _update(self) -> Tensor:
        gradients = self.gradients()
        part = gradients[self.rank :: self.workers]
        norm = optimizers.gradient_norm(part)
        if self.clipping is not None:
            for gradient in gradients:
                gradient.mul_(optimizers.clipping_scale(norm, self.clipping).float())
        self.optimizer.step()
        return norm.float()


class PartialNorm(AllReduced):
    """The norm leaves out the parameters of one layer, on all ranks."""

    def _update(self) -> Tensor:
        named = self.module.named_parameters()
        part = [each.grad for name, each in named if each.grad is not None and ".h.1." not in name]
        norm = optimizers.gradient_norm(part)
        if self.clipping is not None:
            for gradient in self.gradients():
                gradient.mul_(optimizers.clipping_scale(norm, self.clipping).float())
        self.optimizer.step()
        return norm.float()


class NormOfReplicas(AllReduced):
    """The reported norm adds the squares of all ranks, which are replicas."""

    def step(self, learning_rate: float) -> Tensor:
        return super().step(learning_rate) * self.workers**0.5


class ClippedBeforeReduction(AllReduced):
    """Each rank clips its own gradients before they are averaged."""

    def reduce(self) -> None:
        if self.clipping is not None:
            optimizers.clip_gradients(self.module.parameters(), self.clipping)
        super().reduce()


class ClippedOneByOne(AllReduced):
    """Each parameter is clipped by its own norm."""

    def _update(self) -> Tensor:
        norm = optimizers.gradient_norm(self.gradients()).float()
        if self.clipping is not None:
            for gradient in self.gradients():
                gradient.mul_(min(1.0, self.clipping / (float(gradient.norm()) + 1e-6)))
        self.optimizer.step()
        return norm


class NotClipped(AllReduced):
    """Gradients are not clipped."""

    def _update(self) -> Tensor:
        self.clipping = None
        return super()._update()


class UpdatedTwice(AllReduced):
    """The optimizer makes its step twice."""

    def _update(self) -> Tensor:
        norm = super()._update()
        self.optimizer.step()
        return norm


class SkippedOnOneRank(AllReduced):
    """The last rank skips its second update."""

    def _update(self) -> Tensor:
        self.updates += 1
        if self.updates == 2 and self.rank == self.workers - 1:
            return optimizers.clip_gradients(self.module.parameters(), self.clipping)
        return super()._update()


class OtherParameters(AllReduced):
    """The optimizer has copies of the parameters, so the model never changes."""

    def _update(self) -> Tensor:
        weights = [parameter.detach().clone() for parameter in self.module.parameters()]
        norm = super()._update()
        with torch.no_grad():
            for parameter, weight in zip(self.module.parameters(), weights, strict=True):
                parameter.copy_(weight)
        return norm


class OtherInitialWeights(AllReduced):
    """The ranks start with different weights."""

    def prepare(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3 * self.rank * torch.randn_like(parameter))


class WrongSeed(AllReduced):
    """All ranks start with equal weights, but not with those of the seed."""

    def prepare(self, model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)


class FrozenTrained(AllReduced):
    """A frozen parameter is trained, because wrapping forgets that it is frozen."""

    def prepare(self, model: nn.Module) -> None:
        model.requires_grad_(True)


class Untied(AllReduced):
    """The head has its own copy of the embedding, which is tied in the model."""

    def prepare(self, model: nn.Module) -> None:
        head: Any = model.get_submodule("lm_head")
        head.weight = nn.Parameter(head.weight.detach().clone())


class ResumedWithoutStates(AllReduced):
    """A checkpoint is loaded without the optimizer states."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        self.optimizer.state.clear()


class ResumedWithoutWeights(AllReduced):
    """A checkpoint is loaded with rounded weights."""

    def load(self, folder: Path) -> None:
        super().load(folder)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(parameter.bfloat16())


class StaleEvaluation(AllReduced):
    """The evaluation uses the weights before the training."""

    def prepare(self, model: nn.Module) -> None:
        self.old = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def forward(self, batch: Any) -> Any:
        new = [parameter.detach().clone() for parameter in self.module.parameters()]
        for parameter, weight in zip(self.module.parameters(), self.old, strict=True):
            parameter.copy_(weight)
        outputs = super().forward(batch)
        for parameter, weight in zip(self.module.parameters(), new, strict=True):
            parameter.copy_(weight)
        return outputs


class TrainingModeInEvaluation(AllReduced):
    """The evaluation runs in training mode, so batch norms use the statistics of the batch."""

    @torch.no_grad()
    def forward(self, batch: Any) -> Any:
        self.module.train()
        return super().forward(batch)


class LoggedLossOfOneRank(AllReduced):
    """The logged loss is that of rank 0 alone. The training is right."""

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        found = super().forward_backward(batch, normalizer=normalizer, last_micro=last_micro)
        return found * self.workers if self.rank == 0 else found * 0


class OneStepLate(AllReduced):
    """Each update uses the gradients of the step before, because it does not wait for the reduction."""

    earlier: list[Tensor] = []  # noqa: RUF012

    def reduce(self) -> None:
        super().reduce()
        new = [gradient.clone() for gradient in self.gradients()]
        for gradient, old in zip(self.gradients(), self.earlier or new, strict=True):
            gradient.copy_(old)
        self.earlier = new


class AdamInsteadOfAdamW(AllReduced):
    """The weight decay is added to the gradients."""

    def _build_optimizer(self, config: Any) -> torch.optim.Optimizer:
        built = super()._build_optimizer(config)
        for group in built.param_groups if config.train.optimizer == "adamw" else ():
            group["decoupled_weight_decay"] = False
        return built


class GatheredInBf16(AllReduced):
    """The updated weights are sent in bf16."""

    def _update(self) -> Tensor:
        norm = super()._update()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(parameter.bfloat16())
        return norm


class HalfGathered(AllReduced):
    """The updated part of the last rank is not gathered."""

    def _update(self) -> Tensor:
        weights = [parameter.detach().clone() for parameter in self.module.parameters()]
        norm = super()._update()
        with torch.no_grad():
            for parameter, weight in zip(self.module.parameters(), weights, strict=True):
                end = parameter.numel() // self.workers * (self.workers - 1)
                parameter.view(-1)[end:] = weight.view(-1)[end:]
        return norm


class StaleClipNorm(AllReduced):
    """The gradients are clipped by the norm of the step before."""

    earlier: Tensor | None = None

    def _update(self) -> Tensor:
        norm = optimizers.gradient_norm(self.gradients())
        used, self.earlier = norm if self.earlier is None else self.earlier, norm
        if self.clipping is not None:
            for gradient in self.gradients():
                gradient.mul_(optimizers.clipping_scale(used, self.clipping).float())
        self.optimizer.step()
        return norm.float()


class StatesCleared(AllReduced):
    """The optimizer loses its states before each second update."""

    def _update(self) -> Tensor:
        self.updates += 1
        if self.updates % 2 == 0:
            self.optimizer.state.clear()
        return super()._update()


class RowLost(AllReduced):
    """The gradient of one token's embedding is lost."""

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient)
        if name.endswith("word_embeddings.weight"):
            gradient[gradient.abs().sum(dim=1).argmax()] = 0


class AccumulatedInBf16(AllReduced):
    """Each micro-batch rounds the gradients, and the average of the ranks has more bits again."""

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        found = super().forward_backward(batch, normalizer=normalizer, last_micro=False)
        for gradient in self.gradients():
            gradient.copy_(gradient.bfloat16())
        if last_micro:
            self.reduce()
        return found


class NotNormalized(AllReduced):
    """The gradients are not divided by the targets of the step. The logged loss is right."""

    normalizer: Tensor

    def forward_backward(self, batch: Any, *, normalizer: Tensor, last_micro: bool) -> Tensor:
        self.normalizer = normalizer
        return super().forward_backward(batch, normalizer=normalizer, last_micro=last_micro)

    def reduce_one(self, name: str, gradient: Tensor) -> None:
        super().reduce_one(name, gradient)
        gradient.mul_(self.normalizer)


class ReplicasInNorm(AllReduced):
    """The norm counts norms and biases once for each rank, and the other parameters once."""

    def _update(self) -> Tensor:
        squares = [each.square().sum() * (self.workers if each.dim() == 1 else 1) for each in self.gradients()]
        super()._update()
        return torch.stack(squares).sum().sqrt()


class PaddedVocabulary(AllReduced):
    """The softmax of a training counts logits of padding, which are 0."""

    def _call(self, module: nn.Module, batch: Any) -> Any:
        outputs = super()._call(module, batch)
        outputs.logits = nn.functional.pad(outputs.logits, (0, 8))
        return outputs


class UninitializedBuffer(AllReduced):
    """A buffer that is not persistent has other values on each rank, because only saved ones are broadcast."""

    def prepare(self, model: nn.Module) -> None:
        model.register_buffer("frequencies", torch.full((4,), float(self.rank)), persistent=False)


class Fails(AllReduced):
    """The second update fails on the last rank, and the others wait for it."""

    def _update(self) -> Tensor:
        self.updates += 1
        if self.updates == 2 and self.rank == self.workers - 1:
            raise RuntimeError("the second update is broken")
        return super()._update()


MODELS: dict[str, type[AllReduced]] = {
    "summed": Summed,
    "averaged_twice": AveragedTwice,
    "not_reduced": NotReduced,
    "norm_not_reduced": NormNotReduced,
    "embedding_not_reduced": EmbeddingNotReduced,
    "layer_scaled": LayerScaled,
    "reduced_in_bf16": ReducedInBf16,
    "accumulation_summed": AccumulationSummed,
    "last_micro_batch_only": LastMicroBatchOnly,
    "last_reduced_only": LastReducedOnly,
    "mean_per_micro_batch": MeanPerMicroBatch,
    "not_cleared": NotCleared,
    "decay_everywhere": DecayEverywhere,
    "other_betas": OtherBetas,
    "rate_times_workers": RateTimesWorkers,
    "stale_rate": StaleRate,
    "local_clip_norm": LocalClipNorm,
    "partial_norm": PartialNorm,
    "norm_of_replicas": NormOfReplicas,
    "clipped_before_reduction": ClippedBeforeReduction,
    "clipped_one_by_one": ClippedOneByOne,
    "not_clipped": NotClipped,
    "updated_twice": UpdatedTwice,
    "skipped_on_one_rank": SkippedOnOneRank,
    "other_parameters": OtherParameters,
    "other_initial_weights": OtherInitialWeights,
    "wrong_seed": WrongSeed,
    "frozen_trained": FrozenTrained,
    "untied": Untied,
    "resumed_without_states": ResumedWithoutStates,
    "resumed_without_weights": ResumedWithoutWeights,
    "stale_evaluation": StaleEvaluation,
    "training_mode_in_evaluation": TrainingModeInEvaluation,
    "logged_loss_of_one_rank": LoggedLossOfOneRank,
    "one_step_late": OneStepLate,
    "adam_instead_of_adamw": AdamInsteadOfAdamW,
    "gathered_in_bf16": GatheredInBf16,
    "half_gathered": HalfGathered,
    "stale_clip_norm": StaleClipNorm,
    "states_cleared": StatesCleared,
    "row_lost": RowLost,
    "accumulated_in_bf16": AccumulatedInBf16,
    "not_normalized": NotNormalized,
    "replicas_in_norm": ReplicasInNorm,
    "padded_vocabulary": PaddedVocabulary,
    "uninitialized_buffer": UninitializedBuffer,
    "fails": Fails,
}
