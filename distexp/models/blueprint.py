"""Deferred initialization: a model on the meta device, and its weights.

Only rank 0 has the whole model, in CPU memory. Every strategy materializes it module by module. So a
sharded model is never whole on a device, and all strategies start from the same weights.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakTensorKeyDictionary

from distexp.config import ConfigError
from distexp.config.custom_code import code_place
from distexp.data.base import LOGITS_TO_KEEP
from distexp.distributed.context import Context
from distexp.distributed.process_group import broadcast_from_rank_0
from distexp.models import shared_weights
from distexp.models.transforms import NamedModules, embedding_of
from distexp.system.torch_internals.tensors import parallel_random_fills

HASHED_VALUES = 64
"""About how many values of a weight are hashed. Two trainings of one architecture differ nearly everywhere."""


class Blueprint:
    """A model on the meta device whose modules can be materialized one at a time.

    Rank 0 sends its weights to the others. Without ``broadcast``, every rank builds the whole model in its CPU memory.
    ``weights_key`` is what random weights depend on, except names, shapes and random numbers. Runs with a common start-
    up make weights with the same key only once. None: each run makes them. ``check`` gets the model with its weights.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        context: Context,
        *,
        broadcast: bool = True,
        weights_key: str | None = None,
        check: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self._context, self._check = context, check
        self._broadcast = context.world_size > 1 and broadcast
        self.model, note = build_empty(build, context.device)
        for text in filter(None, (note, unify_types(self.model))):
            if context.rank == 0:
                print(f"note: {text}", flush=True)
        _check_weights(self.model, context.world_size)
        tensors = _named_tensors(self.model)
        shapes = " ".join(f"{name}{tuple(tensor.shape)}{tensor.dtype}" for name, tensor in tensors)
        self._weights_key = weights_key and f"{weights_key} {shapes}"
        self._weights = self._initial_weights(build)
        if self._weights and (missing := [name for name, _ in tensors if name not in self._weights]):
            raise ConfigError(
                f"{type(self.model).__name__} has {', '.join(missing[:3])} only if it is built without values: its "
                "constructor must make and share the same weights on every device"
            )
        self._names = {id(tensor): name for name, tensor in tensors}
        # Modules and attributes that have a tensor; tied weights have several.
        self._owners: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for module in self.model.modules():
            for attribute, tensor in _direct_tensors(module):
                self._owners[id(tensor)].append((module, attribute))
        self.model.frozen_fingerprint = self._hash_frozen()  # type: ignore[assignment]

    def _initial_weights(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        """Return the whole parameters and buffers by name, on the ranks that have them."""
        if self._broadcast and self._context.rank != 0:
            return {}
        return shared_weights.make_or_read(self._weights_key, lambda: self._make_weights(build))

    def _make_weights(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        # Own modules may read weights in a way that the parallel fills cannot see.
        with parallel_random_fills() if self._weights_key else nullcontext():
            model = build()
        self._check(model)
        return {name: tensor.detach() for name, tensor in _named_tensors(model)}

    def _hash_frozen(self) -> str | None:
        """Return a hash of some values of each weight that is not trained; None on ranks without weights."""
        frozen = [name for name, parameter in self.model.named_parameters() if not parameter.requires_grad]
        if not frozen or not self._weights:
            return None
        digest = hashlib.sha256()
        for name in frozen:
            values = self._weights[name].flatten()
            digest.update(name.encode())
            digest.update(values[:: max(1, len(values) // HASHED_VALUES)].float().numpy().tobytes())
        return digest.hexdigest()[:16]

    def materialize(self, module: nn.Module, *, recurse: bool = True) -> None:
        """Give a module its parameters and buffers, in fp32 on this worker's device.

        Tensors that are already materialized stay. Modules may come in any order, but the order must be
        the same on all ranks, because each tensor is a collective.
        """
        for part in module.modules() if recurse else [module]:
            for _, tensor in _direct_tensors(part):
                if tensor.is_meta:
                    self._replace(tensor)

    def get_tensor(self, name: str, like: Tensor) -> Tensor:
        """Return a whole parameter or buffer on this worker's device, with shape and type of ``like``; a collective.

        A tied weight has the first of its names.
        """
        device = self._context.device
        if name in self._weights:
            # Copy even if the device is the CPU, because training changes the result.
            tensor = self._weights[name].to(device, like.dtype, copy=True).contiguous()
        else:
            tensor = torch.empty_like(like, device=device, memory_format=torch.contiguous_format)
        if self._broadcast:
            broadcast_from_rank_0(tensor)
        return tensor

    def _replace(self, meta_tensor: Tensor) -> None:
        """Replace a meta tensor by a real one in all modules that have it."""
        tensor = self.get_tensor(self._names[id(meta_tensor)], meta_tensor.detach())
        if isinstance(meta_tensor, nn.Parameter):
            tensor = _like(meta_tensor, tensor)
        for module, attribute in self._owners[id(meta_tensor)]:
            # The name is registered, so setattr replaces the parameter or buffer.
            setattr(module, attribute, tensor)


class BlueprintOfZeros(Blueprint):
    """A blueprint whose weights are zero, for trials and traces. Random ones take seconds per billion."""

    def _initial_weights(self, build: Callable[[], nn.Module]) -> dict[str, Tensor]:
        return {}

    def get_tensor(self, name: str, like: Tensor) -> Tensor:
        """Return zeros with shape and type of ``like``; no other rank takes part."""
        return torch.zeros(like.shape, dtype=like.dtype, device=self._context.device)


def build_empty(build: Callable[[], nn.Module], device: torch.device) -> tuple[nn.Module, str]:
    """Build a model whose parameters and buffers are on the meta device, and its other tensors on ``device``.

    A model that reads values in its constructor, or holds tensors that are neither parameters nor buffers, is built on
    the CPU, where each parameter is freed as soon as it is registered, unless the constructor reads parameters too.
    Then return why, else an empty text. Parameters without elements, which nothing can train or shard, become buffers.
    """
    reason = ""
    try:
        with torch.device("meta"):
            model = build()
        if lost := _plain_meta_tensors(model):
            reason = f"{', '.join(lost[:3])} is neither a parameter nor a buffer (use register_buffer)"
    except (NotImplementedError, RuntimeError) as error:  # Tensor.item() and others cannot be called on meta tensors.
        reason = f"its constructor reads values of tensors ({code_place(error)})"
    if reason:
        way, state = "parameter by parameter", torch.get_rng_state()
        with torch.random.fork_rng(devices=[]):
            try:
                with _parameters_on_meta():
                    model = build()
                if lost := _plain_meta_tensors(model):
                    reason = f"{', '.join(lost[:3])} is computed from parameters, and neither a parameter nor a buffer"
            except (NotImplementedError, RuntimeError) as error:
                lost, reason = [""], f"its constructor reads values of parameters ({code_place(error)})"
            if lost:
                torch.set_rng_state(state)  # Values that are computed from weights must be those of the same weights.
                way, model = "at once", build()
        reason = f"{type(model).__name__} is built on the CPU, {way}, because {reason}"
    emptied = _empty_tensors(model)

    def place(_: str, tensor: Tensor) -> Tensor:
        # A copy of a parameter would not be trained, so its use has to fail.
        return emptied[tensor] if isinstance(tensor, nn.Parameter) and tensor in emptied else tensor.to(device)

    _change_plain_tensors(model, place)
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None and not isinstance(weight, UninitializedParameter) and not weight.numel():
                del module._parameters[name]
                module.register_buffer(name, weight.detach())
    return model, reason


def _plain_meta_tensors(model: nn.Module) -> list[str]:
    """Return the names of tensors without values that are neither parameters nor buffers."""
    found: dict[str, Tensor] = {}
    _change_plain_tensors(model, found.setdefault)
    return [name for name, tensor in found.items() if tensor.is_meta]


def unify_types(model: nn.Module) -> str:
    """Cast the trained weights of a model without weights to fp32 if they have several types; return a note then.

    Strategies keep all weights of a unit in one buffer, and other types would train in other ways.
    """
    trained = [weight for weight in model.parameters() if weight.requires_grad and weight.is_floating_point()]
    types = sorted({str(weight.dtype).removeprefix("torch.") for weight in trained})
    if len(types) < 2:
        return ""
    for weight in trained:
        weight.data = weight.data.float()
    model.cast_from = "+".join(types)  # type: ignore[assignment]  # read by ``read_cast``
    return f"the weights of {type(model).__name__} have the types {', '.join(types)}, so they are cast to float32"


def read_cast(model: nn.Module) -> str | None:
    """Return the types from which ``unify_types`` has cast the weights of a model, which may be wrapped."""
    return getattr(getattr(model, "module", model), "cast_from", None)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Replace each parameter by one on the meta device when a module registers it, during the block."""
    register = nn.Module.register_parameter
    known: Any = WeakTensorKeyDictionary()  # A parameter that several modules share has one replacement.

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta and not isinstance(parameter, UninitializedParameter):
            if parameter not in known:
                known[parameter] = _like(parameter, parameter.detach().to("meta"))
            parameter = known[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _like(parameter: nn.Parameter, tensor: Tensor) -> nn.Parameter:
    """Return a tensor as a parameter with the attributes and hooks of another one."""
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(made, hooks, getattr(parameter, hooks, None))
    return made


def _check_weights(model: nn.Module, workers: int) -> None:
    """Raise ConfigError if a model has weights, or changes them, in a way that training or sharding would lose."""
    problems = []
    for name, weight in model.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            # A hook often holds a tensor without values, such as a mask.
            way = "change the gradient in forward, as in w * mask + (w * (1 - mask)).detach()"
            problems.append(f"a gradient hook on {name}: {way}")
        elif weight.is_complex():
            problems.append(f"the complex weight {name}: keep a real one, and use torch.view_as_complex in forward")
        elif isinstance(weight, UninitializedParameter):
            problems.append(f"no shape for {name}: give the sizes in its constructor, in place of a lazy module")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse:
            problems.append(f"sparse gradients in {name}: leave sparse=True out")
        if module.max_norm is not None and workers > 1:
            changes = "which changes other rows on each worker: use one worker"
            problems.append(f"max_norm={module.max_norm:g} in {name}, {changes}")
    if problems:
        raise ConfigError([f"{type(model).__name__} has {problem}" for problem in problems])


def _empty_tensors(model: nn.Module) -> Any:
    """Move tensors to meta that the constructor made elsewhere, and return the new ones by the old ones."""
    emptied: Any = WeakTensorKeyDictionary()  # A tensor that several modules share has one replacement.
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in [(name, tensor) for name, tensor in tensors.items() if tensor is not None]:
                if not tensor.is_meta and tensor not in emptied and not isinstance(tensor, UninitializedParameter):
                    empty = tensor.detach().to("meta")
                    emptied[tensor] = _like(tensor, empty) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = emptied.get(tensor, tensor)
    return emptied


def _change_plain_tensors(model: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each tensor that is an attribute of a module, but no parameter or buffer, by ``change(name, tensor)``.

    Those in lists, tuples, dicts and other objects count too.
    """
    own = vars(nn.Module()).keys()
    seen = {id(tensor) for _, tensor in _named_tensors(model)}

    def visit(value: Any, name: str, depth: int) -> Any:
        if id(value) in seen or isinstance(value, nn.Module | type) or depth > MAX_DEPTH:
            return value
        if isinstance(value, Tensor):
            return change(name, value)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(visit(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value))
        seen.add(id(value))
        content = value if isinstance(value, list | dict) else getattr(value, "__dict__", {})
        for key, item in list(enumerate(content) if isinstance(content, list) else content.items()):
            label = f"{name}[{key!r}]" if content is value else f"{name}.{key}"
            if (changed := visit(item, label, depth + 1)) is not item:
                content[key] = changed
        return value

    for prefix, module in model.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in own:
                name = f"{prefix}.{attribute}" if prefix else attribute
                if (changed := visit(value, name, 0)) is not value:
                    vars(module)[attribute] = changed


MAX_DEPTH = 3
"""Containers inside of each other in which tensors of a module are looked for."""


def read_fingerprint(module: nn.Module) -> str | None:
    """Return the hash of the weights that are not trained; None without any, and on ranks that never had them."""
    found: str | None = getattr(getattr(module, "module", module), "frozen_fingerprint", None)
    return found


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are not trained; a shared one has all of its names."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """List the parameters and buffers of a module itself, without its children."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in tensors if tensor is not None]


def check_dimensions(model: nn.Module, needed_for: str) -> None:
    """Raise ConfigError if a parameter has no dimensions, which torch and DeepSpeed cannot shard or send."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ConfigError(
                f"{name} of {type(model).__name__} is a parameter without dimensions, which {needed_for} does not "
                f"support: make it one element long, as in nn.Parameter(torch.zeros(1)), or use strategy=ddp"
            )


def find_embeddings(model: nn.Module) -> NamedModules:
    """Find the token embedding and the output head; empty for image models."""
    modules = (embedding_of(model, side) for side in ("input", "output"))
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(module)], module) for module in modules if module is not None and hasattr(module, "weight")]


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each buffer that belongs to a saved model, as running statistics do."""
    saved = model.state_dict(keep_vars=True).keys()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def has_tied_embeddings(model: nn.Module) -> bool:
    """Return whether the token embedding and the output head share one weight."""
    weights = [module.weight for _, module in find_embeddings(model)]
    return len(weights) == 2 and weights[0] is weights[1]


def max_positions(model: nn.Module) -> int | None:
    """Return the maximum sequence length in tokens; None if unlimited (ALiBi)."""
    bare = getattr(model, "module", model)
    positions = getattr(bare, "positions", None)
    if isinstance(positions, nn.Embedding):
        return positions.num_embeddings
    config = _text_config(bare)
    limit = getattr(config, "max_position_embeddings", getattr(config, "max_seq_len", None))  # the latter: MPT
    return None if limit is None else int(limit)


def learned_positions(model: nn.Module) -> int | None:
    """Return the number of learned positions, which no sequence can exceed; None if the model has none."""
    limit, tokens = max_positions(model), find_embeddings(getattr(model, "module", model))
    others = (module for module in model.modules() if all(module is not other for _, other in tokens))
    sizes = () if limit is None else (limit, limit + 2)
    tables = [table for table in others if isinstance(table, nn.Embedding) and table.num_embeddings in sizes]
    # OPT and BART have two more rows. RoBERTa, with a plain table, counts from the row after that of the padding.
    starts = [table.padding_idx for table in tables if type(table) is nn.Embedding]
    return limit - max(0 if start is None else start + 1 for start in (*starts, None)) if limit and tables else None


def read_attention(model: nn.Module) -> str | None:
    """Return the implementation of the attention, for example ``sdpa``; None if the model does not declare it."""
    bare = getattr(model, "module", model)
    declared = getattr(bare, "attention_implementation", None)
    if declared is None:
        declared = getattr(_text_config(bare), "_attn_implementation", None)
    return None if declared is None else str(declared)


def _text_config(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers; None for others, whose ``config`` may be anything."""
    read = getattr(getattr(model, "config", None), "get_text_config", None)
    return None if read is None else read()


def supports_logits_to_keep(model: nn.Module) -> bool:
    """Return whether a model can compute a part of its logits."""
    return LOGITS_TO_KEEP in signature(getattr(model, "module", model).forward).parameters


def check_forward_arguments(model: nn.Module, inputs: Iterable[str]) -> None:
    """Raise ConfigError if the ``forward`` of a model cannot be called with these keyword arguments."""
    names = list(inputs)
    arguments = signature(model.forward)
    try:
        arguments.bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"{type(model).__name__}.forward({', '.join(arguments.parameters)}) cannot take the inputs of the dataset "
            f"({error}): its arguments must be {', '.join(names)}"
        ) from error
