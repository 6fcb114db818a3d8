"""Typed configuration: the schema, its metadata, and checks of single sections."""

from distexp.config.cluster_section import ClusterConfig
from distexp.config.data_sections import DatasetConfig, ModelConfig
from distexp.config.forecast_section import ForecastConfig
from distexp.config.measure_sections import MeasureConfig, PreflightConfig, TrackerConfig
from distexp.config.plan_section import PlanConfig
from distexp.config.scale_sections import ScaleConfig, ScalingConfig
from distexp.config.schema import (
    Command,
    Config,
    ConfigError,
    EngineConfig,
    KernelsConfig,
    OffloadConfig,
    PrecisionConfig,
    StrategyConfig,
    SweepConfig,
    TrainConfig,
    register_schema,
)
from distexp.config.strategy_sections import DDPConfig, DeepSpeedConfig, FSDPConfig

__all__ = [
    "ClusterConfig",
    "Command",
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
    "PlanConfig",
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
