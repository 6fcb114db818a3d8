"""Tests of the palettes: colors differ also for color-blind readers, and are visible on their background."""

from __future__ import annotations

import itertools
import math

import pytest

from distexp.report.figures.base import MAX_COLORS
from distexp.report.files import DARK, LIGHT

NORMAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881))
TRITANOPIA = ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039))
"""Matrices of linear RGB colors: Machado et al., A Physiologically-based Model for Simulation of Color Vision
Deficiency, 2009, at full severity."""

XYZ = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1094, 0.8729))  # relative to white
MIN_DISTANCE = 12.0  # CIE 1976 color difference; 2.3 is just noticeable
MIN_CONTRAST = 3.0  # of graphics in WCAG 2.2, criterion 1.4.11
Vector = tuple[float, ...]


def linear(color: str) -> Vector:
    values = [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    return tuple(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)


def times(matrix: tuple[Vector, ...], vector: Vector) -> Vector:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def lab(rgb: Vector) -> Vector:
    x, y, z = (
        max(value, 0.0) ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in times(XYZ, rgb)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, matrix: tuple[Vector, ...]) -> float:
    seen = (lab(tuple(min(1.0, max(0.0, part)) for part in times(matrix, linear(color)))) for color in (one, other))
    return math.dist(*seen)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(times(XYZ, linear(color))[1] for color in (one, other))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("matrix", [NORMAL, PROTANOPIA, DEUTERANOPIA, TRITANOPIA])
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_all_colors_of_a_legend_differ(palette: dict[str, str], matrix: tuple[Vector, ...]) -> None:
    colors = [palette[f"c{n + 1}"] for n in range(MAX_COLORS)]
    close = [pair for pair in itertools.combinations(colors, 2) if distance(*pair, matrix) < MIN_DISTANCE]
    assert close == []
    assert distance("#3366cc", "#7a5bd6", DEUTERANOPIA) < MIN_DISTANCE, "blue and violet of equal lightness"


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colors_and_texts_are_visible_on_their_background(palette: dict[str, str]) -> None:
    marks = {
        name: contrast(palette[name], palette["card"]) for name in palette if name[0] == "c" and name[1:].isdigit()
    }
    assert {name: ratio for name, ratio in marks.items() if ratio < MIN_CONTRAST} == {}
    texts = ("ink", "muted", "accent", "bad", "warn", "good")
    assert {
        name: contrast(palette[name], palette["card"])
        for name in texts
        if contrast(palette[name], palette["card"]) < 4.5
    } == {}
