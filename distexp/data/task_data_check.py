"""Checks of the object that a dataset returns."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from distexp.config import ConfigError
from distexp.config.custom_code import PAGE, describe_type
from distexp.data.base import TaskData

SAMPLES = ("train", "evaluation")
"""Fields of TaskData that are datasets."""


def check_task_data(data: TaskData, task: str, source: str) -> None:
    """Check the fields of a TaskData.

    Args:
        data: the object.
        task: the task of the model.
        source: what returned the object, as in ``dataset._target_=my_package.load``.

    Raises:
        ConfigError: with one message for each wrong field.
    """
    wrong = [
        f"{name} is {describe_type(samples)} without __len__ or __getitem__"
        for name, samples in ((name, getattr(data, name)) for name in SAMPLES)
        if not (hasattr(type(samples), "__len__") and hasattr(type(samples), "__getitem__"))
    ]
    collate: Any = data.collate
    classes: Any = data.num_classes
    if not callable(collate):
        wrong.append(f"collate is {describe_type(collate)}, which cannot be called")
    if not isinstance(classes, Integral):
        wrong.append(f"num_classes is {describe_type(classes)} and not an int")
    if data.task != task:
        wrong.append(f"task is {data.task!r}, but the task of the model is {task!r}")
    if wrong:
        raise ConfigError([f"{source} returned a TaskData whose {text}: correct it, as in {PAGE}" for text in wrong])


def check_not_empty(data: TaskData, *, evaluates: bool) -> None:
    """Check that the sets of a run have samples.

    Args:
        data: the data, with notes about examples that were left out.
        evaluates: whether the run evaluates the model.

    Raises:
        ConfigError: the training set is empty, or the evaluation set of a run that evaluates.
    """
    left_out = f" ({'; '.join(data.notes)})" if data.notes else ""
    if not len(data.train):
        raise ConfigError(f"the training set has no sample{left_out}: correct the data, or choose other data")
    if evaluates and not len(data.evaluation):
        raise ConfigError(f"the evaluation set has no sample{left_out}: correct the data, or set train.evaluate=false")
