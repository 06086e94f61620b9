"""Small models of well-known architectures; `forward(x, y)` returns the mean loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fastdist as fd
import torch
import torch.nn.functional as F
from torch import nn

Make = Callable[[], nn.Module]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class RealModel:
    """A model, its optimizer, and the kind of its data.

    Attributes:
        make: makes the model.
        optimizer: makes the optimizer of parameters.
        x: the shape of an example; integers below 20 if `is_text`.
        is_text: True if examples are integers.
    """

    make: Make
    optimizer: Callable[..., torch.optim.Optimizer]
    x: Shape = (6,)
    is_text: bool = False


MODELS: dict[str, RealModel] = {}
IMAGE, TEXT = (3, 8, 8), (7,)
CLASSES = 5


def real(name: str, optimizer: Any, x: Shape = (6,), **settings: Any) -> Callable[[Make], Make]:
    def note(make: Make) -> Make:
        MODELS[name] = RealModel(make, partial(optimizer, **settings), x, x is TEXT)
        return make

    return note


class Classifier(nn.Module):
    """Layers in a row before a cross entropy."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.layers(x), y)


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def norm(width: int) -> nn.Module:
    return fd.nn.SyncBatchNorm(width)


def pooled(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


@real("multilayer perceptron", torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
def multilayer_perceptron() -> nn.Module:
    return Classifier(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, CLASSES))


@real("LeNet", torch.optim.Adadelta, IMAGE)
def lenet() -> nn.Module:
    conv = nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)
    return Classifier(*conv, nn.Flatten(), nn.Linear(96, 16), nn.Tanh(), nn.Linear(16, CLASSES))


@real("AlexNet", torch.optim.RMSprop, IMAGE, lr=1e-3, momentum=0.9)
def alexnet() -> nn.Module:
    conv = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(2)
    return Classifier(*conv, nn.Flatten(), nn.Linear(72, CLASSES))


@real("VGG with BatchNorm", torch.optim.SGD, IMAGE, lr=0.05, weight_decay=1e-3)
def vgg() -> nn.Module:
    blocks: list[nn.Module] = []
    for before, after in ((3, 8), (8, 8)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), norm(after), nn.ReLU(), nn.MaxPool2d(2)]
    return Classifier(*blocks, *pooled(8))


@real("ResNet", torch.optim.SGD, IMAGE, lr=0.1, momentum=0.9)
def resnet() -> nn.Module:
    def block() -> nn.Module:
        conv = partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False)
        return Residual(conv(), norm(8), nn.ReLU(), conv(), norm(8))

    return Classifier(nn.Conv2d(3, 8, 3), block(), nn.ReLU(), block(), *pooled(8))


@real("MobileNet", torch.optim.RMSprop, IMAGE, lr=1e-3)
def mobilenet() -> nn.Module:
    depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False)
    inverted = nn.Conv2d(6, 12, 1, bias=False), norm(12), nn.ReLU6(), depthwise, norm(12)
    block = Residual(*inverted, nn.Hardswish(), nn.Conv2d(12, 6, 1, bias=False), norm(6))
    return Classifier(nn.Conv2d(3, 6, 3, stride=2), block, *pooled(6))


@real("ConvNeXt", torch.optim.AdamW, IMAGE, lr=1e-3, amsgrad=True)
def convnext() -> nn.Module:
    wide = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(1, 8), nn.Conv2d(8, 32, 1)
    return Classifier(
        nn.Conv2d(3, 8, 2, 2), Residual(*wide, nn.GELU(), nn.Conv2d(32, 8, 1)), *pooled(8)
    )


@real("DenseNet", torch.optim.Adagrad, IMAGE, lr=0.01)
class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3))
        self.last = nn.Sequential(nn.InstanceNorm2d(15), nn.ELU(), *pooled(15))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.elu(layer(x))], 1)
        return F.cross_entropy(self.last(x), y)


@real("squeeze and excitation", torch.optim.Adamax, IMAGE)
class SqueezeExcitation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.gate = nn.Sequential(nn.Linear(8, 2), nn.SiLU(), nn.Linear(2, 8), nn.Sigmoid())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return F.cross_entropy(
            self.head((x * self.gate(x.mean((2, 3)))[..., None, None]).mean((2, 3))), y
        )


@real("U-Net", torch.optim.Adam, IMAGE, lr=1e-3)
class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), norm(6), nn.LeakyReLU())
        self.up = nn.ConvTranspose2d(6, 3, 2, stride=2)
        self.last = nn.Conv2d(6, CLASSES, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.last(torch.cat([x, self.up(self.down(x))], 1))
        return F.cross_entropy(logits, y[:, None, None].expand(-1, 8, 8))


@real("autoencoder", torch.optim.NAdam, IMAGE, lr=1e-3)
class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Softplus())
        self.decode = nn.Linear(8, 192)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.huber_loss(self.decode(self.encode(x)), x.flatten(1))


@real("variational autoencoder", torch.optim.RAdam, (10,), lr=1e-3)
class VariationalAutoencoder(nn.Module):
    """Its noise is part of the example, so that it does not depend on the replica."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 8)
        self.decode = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, noise = x[:, :6], x[:, 6:]
        mean, log_variance = self.encode(x).chunk(2, 1)
        divergence = (mean.square() + log_variance.exp() - log_variance - 1).sum(1) / 2
        decoded = self.decode(mean + noise * (log_variance / 2).exp())
        return (F.mse_loss(decoded, x, reduction="none").sum(1) + divergence).mean()


@real("LSTM", torch.optim.Adam, TEXT, lr=1e-2)
class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM, **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.recurrent = kind(6, 8, batch_first=True, **settings)
        self.head = nn.Linear(16 if settings.get("bidirectional") else 8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.recurrent(self.embed(x))[0][:, -1]), y)


@real("GRU in both directions", torch.optim.Rprop, TEXT, lr=1e-3)
def gru() -> nn.Module:
    return Recurrent(nn.GRU, bidirectional=True, num_layers=2)


@real("sequence to sequence with attention", torch.optim.Adam, TEXT)
class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.encode = nn.GRU(8, 8, batch_first=True)
        self.decode = nn.GRU(8, 8, batch_first=True)
        self.attend = nn.Bilinear(8, 8, 1)
        self.head = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        encoded, state = self.encode(self.embed(x))
        decoded, _ = self.decode(self.embed(x.flip(1)), state)
        pairs = [
            side.expand(-1, 7, 7, -1).contiguous()
            for side in (decoded[:, :, None], encoded[:, None])
        ]
        weights = self.attend(*pairs).squeeze(-1).softmax(-1)
        logits = self.head(torch.cat([decoded, weights @ encoded], -1))
        return F.cross_entropy(logits.transpose(1, 2), x.flip(1))


@real("GPT with tied embeddings", torch.optim.AdamW, TEXT, lr=1e-3, betas=(0.9, 0.95))
class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.places = nn.Parameter(torch.randn(7, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        logits = self.head(self.block(self.embed(x) + self.places, mask, is_causal=True))
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), x[:, 1:])


@real("BERT", torch.optim.AdamW, TEXT, lr=1e-3)
class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.gelu, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        padding = (x == 0) & (torch.arange(7) > 0)
        encoded = self.encode(self.embed(x), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(encoded[:, 0]), y)


@real("Transformer", torch.optim.Adam, TEXT, lr=1e-3, betas=(0.9, 0.98))
class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.both = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        decoded = self.both(self.embed(x), self.embed(x.roll(1, 1)))
        return F.cross_entropy(self.head(decoded).transpose(1, 2), x, label_smoothing=0.1)


@real("vision transformer", torch.optim.Adafactor, IMAGE)
class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 8))
        self.encode = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)
        encoded = self.encode(torch.cat([self.first.expand(len(x), -1, -1), patches], 1))
        return F.cross_entropy(self.head(encoded[:, 0]), y)


@real("MLP-Mixer", torch.optim.AdamW, (4, 6))
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.tokens = nn.Linear(4, 4)
        self.channels = nn.Sequential(
            nn.LayerNorm(6), nn.Linear(6, 12), nn.Mish(), nn.Linear(12, 6)
        )
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head((x + self.channels(x)).mean(1)), y)


@real("Perceiver", torch.optim.NAdam, (9, 6))
class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(3, 8))
        self.attend = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.head = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        latent = self.latent.expand(len(x), -1, -1)
        return F.cross_entropy(self.head(self.attend(latent, x, x)[0].mean(1)), y)


@real("WaveNet", torch.optim.Adam, (1, 16), weight_decay=1e-4)
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 1)
        conv = (nn.Conv1d(4, 8, 2, dilation=2**i) for i in range(3))
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(each) for each in conv)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for i, layer in enumerate(self.layers):
            filtered, gate = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + filtered.tanh() * gate.sigmoid()
        return F.cross_entropy(self.head(x.mean(2)), y)


@real("speech with CTC", torch.optim.SGD, (12, 6), lr=0.05)
class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.RNN(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES + 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.recurrent(x)[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), 12), torch.full((len(x),), 2)
        targets = torch.stack([y, (y + 1) % CLASSES], 1) + 1
        return F.ctc_loss(logits, targets, *lengths, reduction="none").mean()


@real("wide and deep", torch.optim.Adagrad, TEXT)
class WideAndDeep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.EmbeddingBag(20, CLASSES, mode="sum")
        self.deep = nn.Sequential(nn.EmbeddingBag(20, 8), nn.ReLU(), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.wide(x) + self.deep(x), y)


@real("sparse embeddings", torch.optim.SGD, TEXT, lr=0.5)
class SparseEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(x).mean(1)), y)


@real("factorization machine", torch.optim.ASGD, TEXT, lr=0.05)
class FactorizationMachine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors = nn.Embedding(20, 1), nn.Embedding(20, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        factors = self.factors(x)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2
        return F.binary_cross_entropy_with_logits(
            self.linear(x).sum((1, 2)) + pairs, (y > 2).to(pairs)
        )


@real("graph convolution", torch.optim.Adam, (5, 6))
class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("edges", torch.ones(5, 5) / 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            (self.edges @ self.second(F.relu(self.edges @ self.first(x)))).mean(1), y
        )


@real("mixture of experts", torch.optim.Adam, lr=1e-2)
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen, weights = self.gate(x).argmax(1), self.gate(x).softmax(1)
        logits = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).nonzero().squeeze(1)
            if len(own):  # a replica, or all replicas, may not use an expert
                logits = logits.index_add(0, own, expert(x[own]) * weights[own, i, None])
        return F.cross_entropy(logits, y)


@real("SIREN", torch.optim.LBFGS, lr=0.1, max_iter=3)
class Siren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.second(torch.sin(3 * self.first(x))).squeeze(1), y.to(x))


@real("neural differential equation", torch.optim.RMSprop, lr=1e-3, centered=True)
class DifferentialEquation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x + self.slope(x) / 4
        return F.cross_entropy(self.head(x), y)


@real("Q-network with a target", torch.optim.Adam, (12,), lr=1e-2)
class QNetwork(nn.Module):
    """The target network follows the other; its parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)
        self.target.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        now, then = x.chunk(2, 1)
        with torch.no_grad():
            for follower, leader in zip(
                self.target.parameters(), self.online.parameters(), strict=True
            ):
                follower.lerp_(leader, 0.1)
            wanted = 1 + 0.9 * self.target(then).max(1).values
        return F.smooth_l1_loss(self.online(now).gather(1, y[:, None]).squeeze(1), wanted)


@real("siamese network with triplets", torch.optim.Adadelta, (18,))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.triplet_margin_loss(*(self.embed(part) for part in x.chunk(3, 1)))


@real("CLIP", torch.optim.AdamW, (12,), lr=1e-2)
class Clip(nn.Module):
    """Compares every example with all examples of the global batch."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        image, text = x.chunk(2, 1)
        image, text = F.normalize(self.image(image)), F.normalize(self.text(text))
        image, text = fd.get_replica_context().all_gather((image, text))
        logits, wanted = self.scale.exp() * image @ text.T, torch.arange(len(image))
        return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2
