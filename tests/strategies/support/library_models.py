"""A program that trains a model of torchvision, timm or transformers on two replicas and on one.

Run as `python library_models.py NAME`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import fastdist as fd
import torch
import torch.nn.functional as F
from digits_training import require_close
from torch import nn


def of_torchvision(name: str, **settings: Any) -> nn.Module:
    from torchvision import models

    return models.get_model(name, num_classes=5, **settings)


def of_timm(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, in_chans=3, **settings)


def of_transformers(kind: str, **settings: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, num_labels=5, pad_token_id=0, **settings
    )
    return getattr(transformers, f"{kind}ForSequenceClassification")(config)


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 16}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": lambda: of_torchvision("resnet18"),
    "torchvision mobilenet_v3_small": lambda: of_torchvision("mobilenet_v3_small", dropout=0.0),
    "timm vit_tiny_patch16_224": lambda: of_timm(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2
    ),
    "timm convnext_atto": lambda: of_timm("convnext_atto"),
    "transformers Bert": lambda: of_transformers("Bert", **SMALL, **UNDROPPED),
    "transformers GPT2": lambda: of_transformers("GPT2", **GPT),
}


def train(strategy: fd.Strategy, name: str) -> list[torch.Tensor]:
    """Return the losses, parameters and buffers after three steps, the last on fewer examples."""
    torch.manual_seed(0)
    with strategy.scope():
        model = fd.nn.SyncBatchNorm.convert(MODELS[name]())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-2)
    is_text = name.startswith("transformers")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=y).loss if is_text else F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(11, 3, 32, 32, generator=generator)
    if is_text:
        x = torch.randint(50, (11, 8), generator=generator)
    y = torch.randint(5, (11,), generator=generator)
    losses = [
        strategy.reduce("mean", strategy.run(step, batch))
        for batch in strategy.distribute_dataset((x, y), global_batch_size=4)
    ]
    strategy.check_in_sync()
    return [*losses, *(value.detach().clone() for value in model.state_dict().values())]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    chosen = sys.argv[1]
    two = train(fd.MirroredStrategy(["cpu:0", "cpu:1"]), chosen)
    one = train(fd.OneDeviceStrategy("cpu"), chosen)
    require_close(two, one, 1e-9)
    print("equal", len(two))
