"""Gradient shapes of real models, for fused lists of realistic tensors.

The shapes follow from the hyperparameters of the architectures, so that neither the models nor
their libraries are needed. A test compares the numbers of tensors and parameters with the
originals.
"""

from __future__ import annotations

from collections.abc import Sequence

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


_NORM: list[Shape] = [(768,), (768,)]
_SQUARE: list[Shape] = [(768, 768), (768,)]  # BERT's query, key, value, output, and pooler
_WIDER: list[Shape] = [(768, 3072), (3072,), (3072, 768), (768,)]
_BERT_WIDER: list[Shape] = [(3072, 768), (3072,), (768, 3072), (768,)]

# In the order of each model's parameters.
GRADIENT_SHAPES: dict[str, Sequence[Shape]] = {
    "resnet50": _resnet50(),
    # GPT-2 small (Radford et al. 2019), whose output is the embedding.
    "gpt2": [
        *[(50257, 768), (1024, 768)],
        *12 * [*_NORM, (768, 2304), (2304,), *_SQUARE, *_NORM, *_WIDER],
        *_NORM,
    ],
    # bert-base-uncased (Devlin et al. 2018) with its pooler.
    "bert": [
        *[(30522, 768), (512, 768), (2, 768), *_NORM],
        *12 * [*4 * _SQUARE, *_NORM, *_BERT_WIDER, *_NORM],
        *_SQUARE,
    ],
}
