"""Recording of a plain training script. ``distexp verify --recorded`` compares it with that of one process."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distexp.config import ConfigError
from distexp.runs.run_dir import PHASE_SETTINGS
from distexp.strategies.optimizer import innermost_optimizer
from distexp.system.files import write_json
from distexp.verify.comparison import TENSORS, rank_file
from distexp.verify.phases import RunSettings
from distexp.verify.recording import TensorReader, arithmetic_of, hash_rows

FORMULAS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
OPTIONS = ("nesterov", "maximize", "amsgrad", "dampening")
"""Optimizers whose update is computed again, if they have none of these options. With others, weights are compared."""


class Watch:
    """Recorder of a script: what the hooks of its model and of its optimizer see."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, precision: str) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"distexp.verify.watch: {type(optimizer).__name__} is not an optimizer of torch: "
                "give it the one that the script creates, or verify DeepSpeed by distexp verify zero_stage=2"
            )
        optimizer = innermost_optimizer(optimizer)  # without the wrapper of accelerate
        self.directory, self.precision = directory, precision
        self.device = next(model.parameters()).device
        self.reader = TensorReader(model, optimizer, self.device)
        self.rank, self.workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        has_options = any(group.get(option) for group in optimizer.param_groups for option in OPTIONS)
        self.has_formula = isinstance(optimizer, FORMULAS) and not has_options
        self.initial = self.reader.snapshot({}) | {"done": 0}
        self.steps: list[dict[str, Any]] = []
        self.seen: list[dict[str, Any]] = []
        self._batches: list[dict[str, Any]] = []
        self._gradients: tuple[dict[str, Tensor], float] = {}, 0.0
        self._hooks = [
            model.register_forward_pre_hook(self._record_inputs, with_kwargs=True),
            optimizer.register_step_pre_hook(self._record_gradients),
            optimizer.register_step_post_hook(self._record_update),
        ]

    def _record_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim()]
        if module.training:
            self._batches.append({"inputs": hash_rows(tensors), "labels": [], "targets": 0})

    def _record_gradients(self, *_: Any) -> None:
        self._gradients = self.reader.gradients()

    def _record_update(self, *_: Any) -> None:
        gradients, norm = self._gradients
        groups = [group | {"has_formula": self.has_formula} for group in self.reader.groups()]
        known = {"true_norm": norm, "norm": norm, "groups": groups, "parts": [], "loss": None}
        self.steps.append(self.reader.snapshot(gradients) | known)
        self.seen.append({"norm": None, "batches": self._batches})
        self._batches = []
        if self.rank:  # Only rank 0 writes tensors.
            self.steps[-1] = {}

    def end(self) -> None:
        """Write the recording. All ranks call it, after the last step."""
        for hook in self._hooks:
            hook.remove()
        if not self.seen:
            raise ConfigError("distexp.verify.watch: the optimizer made no step between watch() and end()")
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            kept = {rank_file(self.directory, rank) for rank in range(self.workers)}
            for file in {*self.directory.glob("seen*.json")} - kept:
                file.unlink()  # of an earlier recording with more workers
            last = self.steps[-1]
            content = {"initial": self.initial, "steps": self.steps, "exported": last["weights"] | last["buffers"]}
            arithmetic = [*arithmetic_of(self.device), f"watched in {self.precision}"]
            content |= {"evaluations": [], "records_clipped": False, "arithmetic": arithmetic}
            torch.save(content, self.directory / TENSORS)
            count = len(self.seen[0]["batches"])
            settings = RunSettings("script", "variant", self.workers, count, 0, 0, precision=self.precision)
            write_json(self.directory / PHASE_SETTINGS, vars(settings))
        write_json(rank_file(self.directory, self.rank), {"steps": self.seen})
        if self.workers > 1:
            dist.barrier()
