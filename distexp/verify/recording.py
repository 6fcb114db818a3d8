"""What a run of a verification records: every number of a step, unsharded, and what each rank has seen."""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import hypot
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distexp.config import ConfigError
from distexp.data.base import IGNORE, Batch
from distexp.data.loader import StepData
from distexp.distributed.context import Context
from distexp.distributed.process_group import gather_to_all
from distexp.measure.watcher import Watcher
from distexp.models.dropout import dropout_rates
from distexp.runs.events import Events
from distexp.strategies.base import EvaluableModel
from distexp.strategies.optimizer import innermost_optimizer, parameter_groups, trained_parameters
from distexp.strategies.parallel.tensor import fused_rows, in_original_order
from distexp.strategies.torch_model import pipeline_cut, unsharded_weights
from distexp.strategies.zero import ds_initialization
from distexp.system.environment_variables import captured_environment, select_arithmetic
from distexp.system.files import write_json
from distexp.training.inputs import StepPlan
from distexp.training.metrics_logger import Evaluation, MetricsLogger
from distexp.verify.arithmetic import RepeatCheck, Tensors
from distexp.verify.comparison import FLOOR, TENSORS, rank_file
from distexp.verify.phases import RunSettings
from distexp.worker.rank import describe_arithmetic

T = TypeVar("T")

HYPERPARAMETERS = ("lr", "weight_decay", "betas", "eps", "momentum", "decoupled_weight_decay")
SAMPLED = 2**18
"""Most values of a tensor, about, that are recorded. Those of a larger one are spread evenly, to save memory."""

MICRO_STEPS = 2  # first steps of which the reference keeps the gradient of each micro-batch


class TensorReader:
    """Reader of the unsharded tensors of a distributed model. All methods with a tensor are collectives."""

    def __init__(self, module: nn.Module, optimizer: Any, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        is_engine = hasattr(module, "zero_optimization_stage")
        self.engine = cast(Any, module) if is_engine else None
        wraps = self.engine is not None or isinstance(module, DistributedDataParallel)
        self.wrapper, self.module = module, module.get_submodule("module") if wraps else module
        self.stage: int = 0
        if self.engine is not None:
            self.stage = self.engine.zero_optimization_stage()
        self.parameters = {plain_name(name): parameter for name, parameter in self.module.named_parameters()}
        self.masters, self.orders = self._masters(), fused_rows(self.module)
        self.cut = pipeline_cut(self.module)
        self.names = [*self._of_all_stages(self.parameters)]

    def _masters(self) -> dict[str, nn.Parameter]:
        """Return the fp32 weights by name, if the module computes with copies of them in 16 bits."""
        if self.engine is not None or not isinstance(self.optimizer, torch.optim.Optimizer):
            return {}
        updated = trained_parameters(self.optimizer)
        if {id(each) for each in updated} <= {id(each) for each in self.parameters.values()}:
            return {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        # The groups of the copies are in the order of those of the masters.
        copies = [copy for group in parameter_groups(self.module, 0.0) for copy in group["params"]]
        return {names[id(copy)]: master for copy, master in zip(copies, updated, strict=True)}

    def _of_all_stages(self, named: Mapping[str, T]) -> Mapping[str, T]:
        """Return what the workers of a pipeline have by the names of parameters; without one, that of this worker."""
        return named if self.cut is None else self.cut.merge(named)

    def weights(self) -> Tensors:
        """Return the fp32 weights and the persistent buffers."""
        if self.engine is not None:
            found = ds_initialization.unpartitioned_weights(self.engine)
        else:
            found = unsharded_weights(self.wrapper, self.device)
        named = {plain_name(name): copied(tensor) for name, tensor in found}
        return named | {name: copied(master) for name, master in self.masters.items()}

    def gradients(self) -> tuple[Tensors, float]:
        """Return the gradients and the 2-norm of all. Parameters without a gradient are left out."""
        if self.stage:
            from deepspeed.utils import safe_get_full_grad

            read: Callable[[nn.Parameter], Any] = safe_get_full_grad
        else:
            read = attrgetter("grad")
        trained = {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}
        pairs = ((name, read(self.masters.get(name, parameter))) for name, parameter in trained.items())
        found = {}
        for name, gradient in pairs:
            if gradient is not None:
                whole = self._full(gradient, name)
                found[name] = (copied(whole), float(torch.linalg.vector_norm(whole, dtype=torch.float64)))
        everywhere = self._of_all_stages(found)
        return {name: each for name, (each, _) in everywhere.items()}, hypot(0.0, *(n for _, n in everywhere.values()))

    def states(self) -> dict[str, Tensors]:
        """Return the optimizer states of each parameter, by the name of the state."""
        states = getattr(innermost_optimizer(self.optimizer), "state", {})
        if self.stage:
            return self._partitioned_states(states)
        own: dict[str, Tensors] = {}
        for name, parameter in self.parameters.items():
            state = states.get(self.masters.get(name, parameter), {})
            own[name] = {k: copied(self._full(value, name)) for k, value in state.items() if isinstance(value, Tensor)}
        found: dict[str, Tensors] = {}
        for name, tensors in self._of_all_stages(own).items():
            for key, value in tensors.items():
                found.setdefault(key, {})[name] = value
        return found

    def _partitioned_states(self, states: Mapping[Any, Mapping[str, Any]]) -> dict[str, Tensors]:
        from deepspeed.utils import safe_get_full_optimizer_state

        some = next((state for state in states.values() if state), {})
        if some and hasattr(self.optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed 0.19 links the states after the update of the first group, when the others have none yet.
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()
        keys = sorted(key for key, value in some.items() if isinstance(value, Tensor) and value.dim())
        trained = [(name, each) for name, each in self.parameters.items() if each.requires_grad]
        pairs = {key: [(name, safe_get_full_optimizer_state(each, key)) for name, each in trained] for key in keys}
        found = {key: {name: copied(each) for name, each in named if each is not None} for key, named in pairs.items()}
        if "step" in some:
            found["step"] = {name: copied(torch.as_tensor(some["step"]).reshape(())) for name, _ in trained}
        return found

    def copies(self) -> Mapping[str, Tensor]:
        """Return the whole weights that this rank, or the workers of its pipeline, compute with."""
        whole = {
            name: copied(parameter)
            for name, parameter in self.parameters.items()
            if not isinstance(parameter, DTensor) and not hasattr(parameter, "ds_tensor")
        }
        return self._of_all_stages(whole)

    def buffers(self) -> Tensors:
        """Return the buffers of this rank, also those that are not persistent."""
        return {name: copied(each) for name, each in self.module.named_buffers() if each.is_floating_point()}

    def snapshot(self, gradients: Tensors) -> dict[str, Any]:
        """Return gradients, weights, buffers, states, and what differs between the ranks; a collective."""
        weights, states, device = self.weights(), self.states(), self.device
        flat = {f"{name}: {key}": value for key, named in states.items() for name, value in named.items()}
        trained = {name: weights[name] for name in self.names if name in weights}
        differing = {
            "weights": differing_ranks(trained, device) or differing_ranks(self.copies(), device),
            "states": differing_ranks(flat, device),
            "gradients": differing_ranks(gradients, device),
            # Running statistics differ from the first step to an evaluation, and stages have other buffers.
            "buffers": {} if gradients or self.cut is not None else differing_ranks(self.buffers(), device),
        }
        buffers = {name: value for name, value in weights.items() if name not in trained}
        found = {"weights": trained, "buffers": buffers, "states": states, "gradients": gradients}
        return found | {"differing": differing}

    def groups(self) -> list[dict[str, Any]]:
        """Return the live hyperparameters of each group of the optimizer, with the names of its parameters."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        names |= {id(master): name for name, master in self.masters.items()}
        groups = getattr(self.optimizer, "param_groups", [])
        # DeepSpeed's optimizers replace the parameters of their groups by flat partitions.
        partitioned = getattr(self.optimizer, "bit16_groups", None) or getattr(self.optimizer, "fp16_groups", None)
        members = partitioned if self.engine is not None and partitioned else [group["params"] for group in groups]
        found = [
            {key: _plain(group[key]) for key in HYPERPARAMETERS if key in group}
            | {"names": [names[id(each)] for each in owned if id(each) in names]}
            for group, owned in zip(groups, members, strict=False)
        ]
        return found if self.cut is None else self.cut.merge_groups(found, "names")

    def _full(self, tensor: Tensor, name: str) -> Tensor:
        local: Any = tensor.to(self.device) if isinstance(tensor, DTensor) else None
        whole: Tensor = tensor if local is None else local.full_tensor()
        return in_original_order(whole, self.orders.get(name))


def plain_name(name: str) -> str:
    """Return the name of a tensor before its model was wrapped or compiled."""
    return name.removeprefix("module.").replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def copied(tensor: Tensor) -> Tensor:
    """Return a copy in fp32 on the CPU: of all values, or of SAMPLED ones of a large tensor."""
    tensor = tensor.detach()
    if tensor.numel() > SAMPLED:
        tensor = tensor.flatten()[:: tensor.numel() // SAMPLED | 1]  # an odd distance visits all columns
    return tensor.to("cpu", torch.float32, copy=True)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [float(each) for each in value]
    return float(value) if isinstance(value, Tensor | float | int) else value


def differing_ranks(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, list[float]]:
    """Return the tensors that differ between the ranks, with the largest difference of each rank to rank 0.

    A collective. The differences are relative to the largest value of the tensor. All ranks must have the same names.
    """
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    if not dist.is_initialized() or dist.get_world_size() == 1 or not tensors:
        return {}
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()]).to(device)
    first, sizes = flat.clone(), [tensor.numel() for tensor in tensors.values()]
    dist.broadcast(first, src=0)
    parts = zip(torch.split((flat - first).abs(), sizes), torch.split(first.abs(), sizes), strict=True)
    own = torch.stack([gap.max() / whole.max().clamp(min=1e-30) for gap, whole in parts]).tolist()
    everywhere = zip(tensors, zip(*gather_to_all(own), strict=True), strict=True)
    return {name: list(values) for name, values in everywhere if any(values)}


class Recorder(Watcher):
    """Watcher that records a run."""

    reader: TensorReader  # since ``attach``

    def __init__(self, settings: RunSettings, context: Context) -> None:
        self.settings, self.context = settings, context
        self.is_reference = settings.role in ("reference", "noise")
        self.initial: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []  # tensors of each step, on rank 0
        self.seen: list[dict[str, Any]] = []  # what this rank has seen in each step
        self.evaluations: list[dict[str, Any]] = []
        self._gradients: Tensors = {}
        self._true_norm = 0.0  # of all gradients, computed here
        self._parts: list[Tensors] = []  # gradients of each micro-batch, summed up to it
        self._buffers: Tensors = {}
        self._micro = 0  # micro-batches of this step so far
        self._rates: list[Any] = []  # learning rates of the last update

    def attach(self, module: nn.Module, optimizer: Any) -> None:
        """Prepare for a distributed model, which has just been built."""
        self.reader = TensorReader(module, optimizer, self.context.device)
        if rates := dropout_rates(self.reader.module, configured=False):
            name, rate = next(iter(rates.items()))
            kind = type(self.reader.module).__name__
            raise ConfigError(f"{kind} has {name}={rate:g}, and each worker draws other random numbers: set it to 0")
        if self.settings.role == "reference":
            RepeatCheck(self.reader.module, FLOOR[self.settings.precision], self.context.device)
        inner = innermost_optimizer(optimizer)
        if isinstance(inner, torch.optim.Optimizer):  # The Trainer of transformers resets the rate after the update.
            inner.register_step_pre_hook(self._keep_rates)

    def _keep_rates(self, *_: Any) -> None:
        self._rates = [group.get("lr") for group in self.reader.optimizer.param_groups]

    def _groups(self) -> list[dict[str, Any]]:
        """Return the hyperparameters of the last update."""
        groups = self.reader.groups()
        for position, group in enumerate(groups if self._rates else ()):
            # DeepSpeed updates one group at a time, and shows the optimizer only that one.
            group["lr"] = float(self._rates[min(position, len(self._rates) - 1)])
        return groups

    def start(self, done: int) -> None:
        """Record the weights and states before the first step of this attempt."""
        self.initial = self.reader.snapshot({}) | {"done": done}

    def start_forward(self) -> None:
        """Record the gradients so far. Give the buffers of the reference the values that rank 0 would have."""
        if self.is_reference:
            self._end_micro()
            self._micro += 1

    def _end_micro(self) -> None:
        if self._micro and len(self.steps) < MICRO_STEPS:
            self._parts.append(self.reader.gradients()[0])
        buffers = dict(self.reader.module.named_buffers())
        if self._micro and (self._micro - 1) % self.settings.world_size:
            # Each rank has its own running statistics, and rank 0's are evaluated and saved.
            for name, buffer in buffers.items():
                buffer.copy_(self._buffers[name])
        self._buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    def before_update(self) -> None:
        """Record the gradients of the step."""
        if self.is_reference:
            self._end_micro()
            self._micro = 0
        self._gradients, self._true_norm = self.reader.gradients()

    def end_of_step(self, data: StepData, contribution: Tensor, norm: Tensor, planned_rate: float) -> None:
        """Record a step after its update."""
        snapshot = self.reader.snapshot(self._gradients)
        total = contribution.detach().clone()
        dist.all_reduce(total)
        self.steps.append(
            snapshot
            | {"true_norm": self._true_norm, "parts": self._parts}
            | {"loss": float(total[0]), "norm": float(norm)}
            | {"groups": self._groups(), "planned_rate": planned_rate, "targets": int(data.normalizer)}
        )
        self._gradients, self._parts = {}, []
        self.seen.append({"norm": float(norm), "batches": [rows_of(batch) for batch in data.micro_batches]})
        if self.context.rank:  # Only rank 0 writes tensors.
            self.steps[-1] = {}

    def end_evaluation(self, evaluation: Evaluation | None) -> None:
        """Record the result of an evaluation, and the buffers that it used."""
        if evaluation is None:
            return
        buffers = self.reader.buffers()
        self.evaluations.append(
            {
                "step": len(self.seen),
                "loss": evaluation.loss,
                "accuracies": evaluation.accuracies,
                "samples": evaluation.samples,
                "in_training_mode": self.reader.module.training,
                "differing": differing_ranks(buffers, self.context.device),
                "buffers": buffers,
            }
        )

    def write(self, model: EvaluableModel) -> None:
        """Write everything, with the weights that an export of the model would save; a collective."""
        exported = {plain_name(name): copied(tensor) for name, tensor in model.weights()}
        directory, rank = self.context.run_dir, self.context.rank
        if rank == 0:
            content = {
                "initial": self.initial,
                "steps": self.steps,
                "evaluations": self.evaluations,
                "exported": exported,
                "arithmetic": arithmetic_of(self.context.device),
                # DeepSpeed clips in its update.
                "records_clipped": self.settings.clips_early and self.reader.engine is None,
            }
            torch.save(content, directory / TENSORS)
        write_json(rank_file(directory, rank), {"steps": self.seen})


def arithmetic_of(device: torch.device) -> list[str]:
    """Return how this process computes: flags of torch, and variables that change the arithmetic."""
    return [*describe_arithmetic(on_gpu=device.type == "cuda").split(", "), *select_arithmetic(captured_environment())]


class RecordingLogger(MetricsLogger):
    """A logger whose only watcher is a recorder, which also gets what the loop logs."""

    def __init__(
        self,
        plan: StepPlan,
        events: Events,
        recorder: Recorder,
        further: Sequence[Watcher] = (),
        *,
        scales_loss: bool = False,
    ) -> None:
        super().__init__(plan, recorder.context, events, [recorder, *further], scales_loss=scales_loss)
        self.recorder = recorder

    def follow(self, module: nn.Module, optimizer: Any) -> None:
        """Let the watchers and the recorder follow a model."""
        self.recorder.attach(module, optimizer)
        super().follow(module, optimizer)

    def record_step(self, data: StepData, contribution: Tensor, norm: Tensor, rate: float) -> None:
        """Record a step, and log it."""
        self.recorder.end_of_step(data, contribution, norm, rate)
        super().record_step(data, contribution, norm, rate)

    def end_epoch(self, evaluation: Evaluation | None, *, has_accuracy: bool) -> None:
        """Record an evaluation, and log it."""
        self.recorder.end_evaluation(evaluation)
        super().end_epoch(evaluation, has_accuracy=has_accuracy)


def rows_of(batch: Batch) -> dict[str, Any]:
    """Return hashes of the inputs and of the labels of each sample of a batch, and the targets of the batch.

    A batch that keeps the targets only (``train.logits=targets``) has no labels of each sample.
    """
    main = [batch.inputs[name] for name in ("input_ids", "images") if name in batch.inputs]
    whole = main or list(batch.inputs.values())
    size, labels = len(whole[0]), batch.labels
    return {
        "inputs": hash_rows(whole),
        "labels": [_hash([row.flatten()]) for row in labels] if len(labels) == size else [],
        # The first token of a text is predicted by none.
        "targets": int(((labels if labels.dim() == 1 else labels[:, 1:]) != IGNORE).sum()),
    }


def hash_rows(tensors: Sequence[Tensor]) -> list[str]:
    """Return the hash of each sample of a batch; its number is the first dimension of the first tensor."""
    size = len(tensors[0]) if tensors else 0
    return [_hash([each[row].flatten() for each in tensors if len(each) == size]) for row in range(size)]


def _hash(tensors: Iterable[Tensor]) -> str:
    digest = 0
    for tensor in tensors:
        digest = zlib.crc32(tensor.detach().cpu().contiguous().numpy().tobytes(), digest)
    return f"{digest:08x}"
