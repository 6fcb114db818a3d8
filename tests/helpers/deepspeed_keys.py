"""The keys of a ds_config that the installed DeepSpeed reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime import config as runtime
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig

READ_BY_LAUNCHER = "autotuning"
"""Key that DeepSpeed's own launcher reads, so that files may have it."""


class AskedKeys(dict[str, Any]):
    """A ds_config that remembers which keys DeepSpeed asks for."""

    def __init__(self, **values: Any) -> None:
        """Create a ds_config with these values."""
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and remember its key."""
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        """Return whether there is a key, and remember it."""
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        """Return the dictionary itself, for ``key in settings.keys()``."""
        return self


def fields_of(model: type[DeepSpeedConfigModel]) -> set[str]:
    """Return the names and aliases of the fields of a section."""
    return {name for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def installed_keys() -> Mapping[str, set[str]]:
    """Return the keys of each section that refuses other ones, by its path; those of the top level as ``top_level``."""
    asked = AskedKeys(train_batch_size=1)
    made = runtime.DeepSpeedConfig(asked)
    monitors = made.monitor_config
    sections: dict[str, Any] = {
        "zero_optimization": made.zero_config,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "bf16": made.bfloat16_config,
        "fp16": made.float16_config,
        "compile": made.compile_config,
        "comms_logger": CommsLoggerConfig,
        "hybrid_engine": made.hybrid_engine,
        "tensor_parallel": made.tensor_parallel_config,
        "timers.throughput": made.timers_config,
        **{name: getattr(monitors, name) for name in ("tensorboard", "comet", "wandb", "csv_monitor")},
    }
    kinds = {name: made if isinstance(made, type) else type(made) for name, made in sections.items()}
    return {"top_level": asked.asked | {READ_BY_LAUNCHER}, **{name: fields_of(kind) for name, kind in kinds.items()}}
