"""A list of gradients for the bench on virtual GPUs, which take minutes for a whole model."""

from __future__ import annotations

from fastdist.cli.bench import cases

NAME = "small resnet50"


def add_small_list() -> None:
    """Let the bench know ResNet-50 with an eighth of each dimension, under `NAME`."""
    shapes = cases.GRADIENT_SHAPES["resnet50"]
    cases.GRADIENT_SHAPES[NAME] = [tuple(-(-n // 8) for n in shape) for shape in shapes]
