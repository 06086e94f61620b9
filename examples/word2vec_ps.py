"""Learns word vectors from the sources of Python's own standard library, on parameter servers.

A chief, four workers and two servers on this machine, with asynchronous or synchronous steps:

    fastdist run --workers 4 --ps 2 examples/word2vec_ps.py
    fastdist run --workers 4 --ps 2 examples/word2vec_ps.py --mode sync

One process, no servers:

    python examples/word2vec_ps.py --mode single

Needs torch, cloudpickle and safetensors. Skip-gram with negative sampling (Mikolov et al.,
NIPS 2013). The hash of a word is the id of its row in the tables, so workers need no list of all
words, and servers keep only the rows of words that have occurred. A worker pulls only the rows of
its batch.

All modes train on the same number of pairs of words, and are measured on the same held-out files.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import sysconfig
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

WINDOW, NEGATIVES, SHARED = 5, 5, 256
HELD_OUT, PARTS = 20, 10
OFTEN = 1e-3  # words with a larger share of the text are left out at random
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Ids = Callable[[list[str]], np.ndarray]
Train = Callable[[int], list[float]]


def read_words(index: int, count: int, limit: int, held_out: bool = False) -> list[str]:
    """Read part `index` of `count` of the library's words, at most limit / count.

    The result is the same in every run. One file in HELD_OUT is held out from training.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    chance = {name: zlib.crc32(str(name).encode()) for name in names}
    files = sorted(
        (name for name in names if left_out.isdisjoint(name.parts)), key=lambda name: chance[name]
    )
    words: list[str] = []
    for name in [name for name in files if (chance[name] % HELD_OUT == 0) == held_out][
        index::count
    ]:
        text = (root / name).read_text(encoding="utf-8", errors="replace")
        words += re.findall("[a-z]{2,}", text.lower())
        if len(words) > limit // count:
            break
    return words[: limit // count]


def hashes(words: list[str]) -> np.ndarray:
    """Hash each word to 64 bits, the id of its row, the same on every worker."""
    digests = b"".join(hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    return np.frombuffer(digests, np.int64).copy()


class Text:
    """A text as ids of words, from which batches are drawn.

    Args:
        words: the text.
        ids: maps distinct words to their ids.
        seed: the seed of all draws.
    """

    def __init__(self, words: list[str], ids: Ids, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        counts = Counter(words)
        place = {word: i for i, word in enumerate(counts)}
        self._ids = ids(list(counts))
        share = np.array([*counts.values()]) / len(words)
        noise = share**0.75
        self._noise = np.cumsum(noise / noise.sum())
        text = np.array([place[word] for word in words])
        keep = np.sqrt(OFTEN / share)[text] > self._random.random(len(text))
        self._text = text[keep]

    def batch(self, size: int) -> Batch:
        """Draw ids of words, of a neighbour of each, and of random words for all of them."""
        draw = self._random
        reach = draw.integers(1, WINDOW + 1, size)  # so near words are drawn more often
        step = draw.integers(1, reach + 1) * draw.choice((-1, 1), size)
        at = draw.integers(WINDOW, len(self._text) - WINDOW, size)
        negatives = np.searchsorted(self._noise, draw.random(SHARED))
        words = (self._text[at], self._text[at + step], negatives.clip(max=len(self._ids) - 1))
        centers, contexts, negatives = (torch.from_numpy(self._ids[w]) for w in words)
        return centers, contexts, negatives

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield batches without end."""
        while True:
            yield self.batch(size)


class SkipGram(nn.Module):
    """A vector for each word, and one for each word as a neighbour.

    Args:
        words: the number of words; None: any 64-bit ids, on parameter servers.
        dim: the elements of a vector.
    """

    def __init__(self, words: int | None, dim: int) -> None:
        super().__init__()
        half = 0.5 / dim
        self.centers = fd.nn.Embedding(words, dim, initializer=("uniform", -half, half))
        self.contexts = fd.nn.Embedding(words, dim, initializer=("constant", 0.0, 0.0))

    def forward(
        self, centers: torch.Tensor, contexts: torch.Tensor, negatives: torch.Tensor
    ) -> Any:
        """Compute the mean loss of the pairs, in natural logarithms."""
        vectors = self.centers(centers)
        near, far = self.contexts(torch.cat([contexts, negatives])).split([len(contexts), SHARED])
        attract = F.logsigmoid((vectors * near).sum(1)).mean()
        repel = F.logsigmoid(-vectors @ far.T).mean()
        return -attract - NEGATIVES * repel


def training_step(strategy: fd.Strategy, words: int | None, options: argparse.Namespace) -> Any:
    """Make a model in the scope of a strategy, and a function that trains it on the next batch."""
    with strategy.scope():
        model = SkipGram(words, options.dim)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=options.lr)

    def step(batches: Iterator[Batch]) -> float:
        optimizer.zero_grad()
        loss = model(*next(batches))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return model, step


def on_servers(options: argparse.Namespace) -> tuple[SkipGram, Ids, Train]:
    """Train by workers, each on its part of the text. Returns on the chief alone."""
    strategy = fd.ParameterServerStrategy(synchronous=options.mode == "sync")
    coordinator = fd.ClusterCoordinator(strategy)
    model, step = training_step(strategy, None, options)
    workers = len(strategy.worker_addresses)

    def make_batches() -> Iterator[Batch]:
        index = fd.get_worker_index()
        words = read_words(index, workers, options.words)
        return Text(words, hashes, options.seed + index).batches(options.batch_size)

    batches = iter(coordinator.create_per_worker_dataset(make_batches))

    def train(count: int) -> list[float]:
        losses = [coordinator.schedule(step, (batches,)) for _ in range(count)]
        coordinator.join()
        return coordinator.fetch(losses)

    return model, hashes, train


def in_one_process(options: argparse.Namespace) -> tuple[SkipGram, Ids, Train]:
    """Train without servers, which needs a list of all words."""
    words = read_words(0, 1, options.words)
    place: dict[str, int] = {}
    for word in words + read_words(0, 1, options.words // HELD_OUT, held_out=True):
        place.setdefault(word, len(place))

    def ids(words: list[str]) -> np.ndarray:
        return np.array([place[word] for word in words])

    model, step = training_step(fd.DefaultStrategy(), len(place), options)
    batches = Text(words, ids, options.seed).batches(options.batch_size)
    return model, ids, lambda count: [step(batches) for _ in range(count)]


def nearest(model: SkipGram, ids: Ids, words: list[str], common: list[str]) -> Iterator[str]:
    """Find the common words closest to each word, by the angle between their vectors."""
    vectors = F.normalize(model.centers(torch.from_numpy(ids(common))))
    for word in words:
        if word in common:
            closeness = vectors @ vectors[common.index(word)]
            best = [i for i in closeness.argsort(descending=True).tolist() if common[i] != word]
            yield f"{word:>8}: " + "  ".join(f"{common[i]} {closeness[i]:.2f}" for i in best[:6])


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    model, ids, train = (in_one_process if options.mode == "single" else on_servers)(options)
    words = read_words(0, 1, options.words // HELD_OUT, held_out=True)
    text = Text(words, ids, seed=1234)
    held_out = [text.batch(4096) for _ in range(20)]

    def held_out_loss() -> float:
        with torch.no_grad():
            return float(np.mean([model(*batch) for batch in held_out]))

    print(f"held-out loss before: {held_out_loss():.4f}", flush=True)
    for part in range(1, PARTS + 1):
        began = time.perf_counter()
        losses = train(options.steps // PARTS)
        rate = len(losses) * options.batch_size / (time.perf_counter() - began)
        end = "\r" if sys.stdout.isatty() and part < PARTS else "\n"
        done = f"{part * (options.steps // PARTS)}/{options.steps} steps"
        print(f"{done}  loss {np.mean(losses):.4f}  {rate:,.0f} pairs/s  ", end=end, flush=True)
    print(f"held-out loss after: {held_out_loss():.4f} ({options.mode})")
    common = [word for word, _ in Counter(words).most_common(3000)]
    with torch.no_grad():
        print("\n".join(nearest(model, ids, options.neighbours, common)))


def parse() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mode", choices=("async", "sync", "single"), default="async")
    parser.add_argument("--words", type=int, default=1_000_000, help="of text, of all workers")
    parser.add_argument("--steps", type=int, default=2000, help="batches, of all workers")
    parser.add_argument("--batch-size", type=int, default=2048, help="pairs of words")
    parser.add_argument("--dim", type=int, default=64, help="elements of a vector")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    words = ["list", "file", "import", "self", "error", "true", "bytes", "thread", "read", "http"]
    parser.add_argument("--neighbours", nargs="*", default=words, help="of which words to print")
    options = parser.parse_args()
    if options.words < 10_000 or min(options.steps, options.batch_size, options.dim) < 1:
        parser.error("--words must be at least 10000; --steps, --batch-size and --dim at least 1")
    return options


if __name__ == "__main__":
    main()
