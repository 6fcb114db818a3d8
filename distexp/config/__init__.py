"""Typed configuration: the schema, its metadata, and checks of single sections."""

from distexp.config.cluster_section import ClusterConfig
from distexp.config.forecast_section import ForecastConfig
from distexp.config.schema import (
    Config,
    ConfigError,
    DatasetConfig,
    EngineConfig,
    KernelsConfig,
    MeasureConfig,
    ModelConfig,
    OffloadConfig,
    PrecisionConfig,
    PreflightConfig,
    ScaleConfig,
    ScalingConfig,
    StrategyConfig,
    SweepConfig,
    TrackerConfig,
    TrainConfig,
    register_schema,
)
from distexp.config.strategy_sections import DDPConfig, DeepSpeedConfig, FSDPConfig

__all__ = [
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DDPConfig",
    "DatasetConfig",
    "DeepSpeedConfig",
    "EngineConfig",
    "FSDPConfig",
    "ForecastConfig",
    "KernelsConfig",
    "MeasureConfig",
    "ModelConfig",
    "OffloadConfig",
    "PrecisionConfig",
    "PreflightConfig",
    "ScaleConfig",
    "ScalingConfig",
    "StrategyConfig",
    "SweepConfig",
    "TrackerConfig",
    "TrainConfig",
    "register_schema",
]
