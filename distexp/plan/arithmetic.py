"""Model states of a run that has not started, by arithmetic: for trainings that cannot be traced."""

from __future__ import annotations

from distexp.config import Config
from distexp.resolve.parameter_count import parameter_count
from distexp.runs.model_states import BYTES_PER_VALUE, MOMENTS, States, states_per_parameter
from distexp.runs.record_sections import Built
from distexp.strategies.base import load_strategy
from distexp.system.units import MIB


def expected_states_mib(config: Config, counted: int | None = None) -> States | None:
    """Return the model states of a run that has not started in MiB, by part; None if unknown.

    Args:
        config: a resolved configuration.
        counted: number of parameters, if the model was built.
    """
    moments, parameters = MOMENTS.get(config.train.optimizer), counted or parameter_count(config.model)
    if moments is None or parameters is None:
        return None
    strategy = load_strategy(config)
    expected = {"mesh": [1, 1], "offload": "none", **strategy.expected_build(config)}
    built = Built(
        strategy=config.strategy.name,
        engine=config.engine.name,
        wrapper="",
        world_size=config.cluster.world_size,
        mesh=expected["mesh"],
        sharded_units=1,
        zero_stage=expected.get("zero_stage"),
        offload=expected["offload"],
        param_dtype=strategy.weights_type(config),
        compute_dtype="",
        optimizer=config.train.optimizer,
        parameters=parameters,
        compute_weights=config.train.compute_weights,
    )
    states = states_per_parameter(built, BYTES_PER_VALUE * moments)
    names = {"optimizer": "optimizer_states"}
    return {names.get(name, name): size * parameters / MIB for name, size in states.items()}
