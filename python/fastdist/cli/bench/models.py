"""Gradient shapes of real models, for fused lists of realistic tensors.

The shapes follow from the hyperparameters of the architectures, so that neither the models nor
their libraries are needed. A test compares the numbers of tensors and parameters with the
originals.
"""

from __future__ import annotations

Shape = tuple[int, ...]


def _resnet50() -> list[Shape]:
    """Return the shapes of torchvision's resnet50 (He et al. 2015): bottlenecks with BatchNorm."""
    shapes: list[Shape] = []

    def convolution(outputs: int, inputs: int, kernel: int) -> None:
        shapes.extend([(outputs, inputs, kernel, kernel), (outputs,), (outputs,)])  # and the norm

    convolution(64, 3, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outputs = 4 * width
        for block in range(blocks):
            convolution(width, inputs, 1)
            convolution(width, width, 3)
            convolution(outputs, width, 1)
            if block == 0:
                convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def _gpt2() -> list[Shape]:
    """Return the shapes of GPT-2 small (Radford et al. 2019), whose output is the embedding."""
    w = 768
    norm: list[Shape] = [(w,), (w,)]
    attention: list[Shape] = [(w, 3 * w), (3 * w,), (w, w), (w,)]
    dense: list[Shape] = [(w, 4 * w), (4 * w,), (4 * w, w), (w,)]
    return [(50257, w), (1024, w), *12 * (norm + attention + norm + dense), *norm]


def _bert() -> list[Shape]:
    """Return the shapes of bert-base-uncased (Devlin et al. 2018) with its pooler."""
    w = 768
    norm: list[Shape] = [(w,), (w,)]
    square: list[Shape] = [(w, w), (w,)]  # query, key, value, output; the pooler
    dense: list[Shape] = [(4 * w, w), (4 * w,), (w, 4 * w), (w,)]
    embeddings: list[Shape] = [(30522, w), (512, w), (2, w)]
    return [*embeddings, *norm, *12 * (4 * square + norm + dense + norm), *square]


_MODELS = {"resnet50": _resnet50, "gpt2": _gpt2, "bert": _bert}
MODEL_NAMES = tuple(_MODELS)


def gradient_shapes(model: str) -> tuple[Shape, ...]:
    """Return the shapes of a model's gradients, in the order of its parameters."""
    return tuple(_MODELS[model]())
