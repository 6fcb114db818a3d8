"""Tests of the durations of steps, and of the error of a speed that is computed from them."""

from __future__ import annotations

import math

import pytest
import torch

from distexp.measure.clock import StepClock, speed_error


def test_the_time_between_two_series_of_steps_is_not_counted() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.series = [[0.0, 1.0, 3.0], [10.0], [20.0, 24.0]]
    assert clock.durations() == [1.0, 2.0, 4.0]
    assert clock.durations(last=2) == [2.0, 4.0]
    assert clock.durations(last=9) == [1.0, 2.0, 4.0]


def test_slow_phases_make_a_larger_error_than_the_same_steps_mixed() -> None:
    mixed, phases = speed_error([1.0, 1.2] * 50), speed_error([1.0] * 50 + [1.2] * 50)
    assert mixed is not None
    assert phases is not None
    assert mixed["relative"] == pytest.approx(0.0, abs=1e-12)
    assert phases["blocks"] == 10
    # Ten block means, five of 1.0 and five of 1.2: the standard deviation is 0.1 * sqrt(10 / 9).
    assert phases["relative"] == pytest.approx(0.1 * math.sqrt(10 / 9) / math.sqrt(10) / 1.1)


def test_few_steps_are_blocks_of_one_step() -> None:
    error = speed_error([1.0, 3.0])
    assert error == {"relative": pytest.approx(0.5), "blocks": 2.0}
    assert speed_error([1.0]) is None
    assert speed_error([]) is None
