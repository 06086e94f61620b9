"""Gradient shapes of real models, for fused lists of realistic tensors.

The shapes follow from the hyperparameters of the architectures, so that neither the models nor
their libraries are needed. A test compares the numbers of tensors and parameters with the
originals.
"""

from __future__ import annotations

from collections.abc import Iterator

Shape = tuple[int, ...]


def _resnet50() -> Iterator[Shape]:
    """Yield the shapes of torchvision's resnet50 (He et al. 2015): bottlenecks with BatchNorm."""

    def convolution(outputs: int, inputs: int, kernel: int) -> Iterator[Shape]:
        yield outputs, inputs, kernel, kernel
        yield from ((outputs,), (outputs,))  # the normalization's weight and bias

    yield from convolution(64, 3, 7)
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        outputs = 4 * width
        for block in range(blocks):
            yield from convolution(width, inputs, 1)
            yield from convolution(width, width, 3)
            yield from convolution(outputs, width, 1)
            if block == 0:
                yield from convolution(outputs, inputs, 1)
            inputs = outputs
    yield from ((1000, inputs), (1000,))


def _gpt2() -> Iterator[Shape]:
    """Yield the shapes of GPT-2 small (Radford et al. 2019), whose output is the embedding."""
    width = 768
    yield from ((50257, width), (1024, width))
    for _ in range(12):
        yield from ((width,), (width,))
        yield from ((width, 3 * width), (3 * width,), (width, width), (width,))
        yield from ((width,), (width,))
        yield from ((width, 4 * width), (4 * width,), (4 * width, width), (width,))
    yield from ((width,), (width,))


def _bert() -> Iterator[Shape]:
    """Yield the shapes of bert-base-uncased (Devlin et al. 2018) with its pooler."""
    width = 768

    def dense(outputs: int, inputs: int) -> Iterator[Shape]:
        yield from ((outputs, inputs), (outputs,))

    yield from ((30522, width), (512, width), (2, width), (width,), (width,))
    for _ in range(12):
        for _ in ("query", "key", "value", "output"):
            yield from dense(width, width)
        yield from ((width,), (width,))
        yield from dense(4 * width, width)
        yield from dense(width, 4 * width)
        yield from ((width,), (width,))
    yield from dense(width, width)


_MODELS = {"resnet50": _resnet50, "gpt2": _gpt2, "bert": _bert}
MODEL_NAMES = tuple(_MODELS)


def gradient_shapes(model: str) -> tuple[Shape, ...]:
    """Return the shapes of a model's gradients, in the order of its parameters."""
    return tuple(_MODELS[model]())
