"""Typed configuration: the schema, its metadata, and checks of single sections."""

from distexp.config.schema import (
    WHOLE_MODEL,
    Command,
    Config,
    KernelsConfig,
    MeasureConfig,
    PreflightConfig,
    ScaleConfig,
    StrategyConfig,
    TrackerConfig,
    TrainConfig,
    register_schema,
)
from distexp.config.sections import (
    AdapterConfig,
    ClusterConfig,
    DatasetConfig,
    ForecastConfig,
    ModelConfig,
    ParallelConfig,
    PlanConfig,
)
from distexp.exceptions import ConfigError

__all__ = [
    "WHOLE_MODEL", "AdapterConfig", "ClusterConfig", "Command", "Config", "ConfigError", "DatasetConfig",
    "ForecastConfig", "KernelsConfig", "MeasureConfig", "ModelConfig", "ParallelConfig", "PlanConfig",
    "PreflightConfig", "ScaleConfig", "StrategyConfig", "TrackerConfig", "TrainConfig", "register_schema",
]  # fmt: skip
