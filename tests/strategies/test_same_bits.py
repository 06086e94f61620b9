"""Training ends with the same bits on whichever machines the replicas run.

FASTDIST_TEST_REPLICAS is their number: 8, or 5 if it is not set.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from held_ports import free_port
from machines import Network, network_of_eight

__all__ = ["network_of_eight"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYOUTS = {
    "5": [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3], [4]], [[0, 2, 4], [1, 3]]],
    "8": [
        [[0, 1, 2, 3, 4, 5, 6, 7]],
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0], [1], [2], [3], [4], [5], [6], [7]],
        [[0, 1, 2], [3, 4, 5], [6, 7]],
        [[0, 2, 4, 6], [1, 3, 5, 7]],
    ],
}
PROGRAM = """
    import hashlib, sys
    import fastdist as fd
    options = fd.CommunicationOptions(bucket_bytes=int(sys.argv[1]), overlap=sys.argv[2] == "True")
    strategy = fd.MultiWorkerMirroredStrategy(options=options)
    import keras, numpy as np, torch, torch.nn.functional as F
    from torch import nn

    def perceptron():
        model = nn.Sequential(nn.Linear(30, 200), nn.ReLU(), nn.Linear(200, 10))
        return model, lambda x: model(x[:, 0, :30])

    def convolutions():
        inner = nn.Sequential(nn.Conv2d(1, 8, 3), fd.nn.SyncBatchNorm(8), nn.ReLU())
        model = nn.Sequential(inner, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10))
        return model, lambda x: model(x.unsqueeze(1))

    def transformer():
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                              nn.Flatten(), nn.Linear(8 * 32, 10))
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x).float()
        return model, call

    def digest(arrays):
        found = hashlib.sha256()
        for array in arrays:
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(240, 8, 32, generator=generator)
    y = torch.randint(10, (240,), generator=generator)
    for make in (perceptron, convolutions, transformer):
        torch.manual_seed(0)
        with strategy.scope():
            model, call = make()
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        def step(batch):
            x, y = batch
            optimizer.zero_grad()
            loss = F.cross_entropy(call(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()
        steps = 0
        losses = []
        for epoch in range(10):
            for batch in strategy.distribute_dataset((x, y), global_batch_size=45):
                losses.append(strategy.reduce("mean", strategy.run(step, args=(batch,))))
        moments = [each[name] for each in optimizer.state.values() for name in sorted(each)]
        state = [*model.state_dict().values(), *moments, *losses]
        print(make.__name__, digest([each.detach().numpy() for each in state]), flush=True)

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([
            keras.layers.Flatten(), keras.layers.Dense(64, "relu"),
            keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                      metrics=["accuracy"])
    history = model.fit(x.numpy(), y.numpy(), batch_size=45, epochs=9, verbose=0).history
    values = [keras.ops.convert_to_numpy(v) for v in [*model.variables, *model.optimizer.variables]]
    print("keras", digest([*values, *map(np.array, history.values())]), flush=True)
"""


def digests(
    network: Network, folder: Path, machines: list[list[int]], *arguments: object
) -> list[str]:
    """Train on ranks of these numbers; return the digests of the states."""
    program = folder / "train.py"
    program.write_text(textwrap.dedent(PROGRAM))
    place = {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(free_port())}
    world = sum(map(len, machines))
    processes = [
        subprocess.Popen(
            network.command(machine, sys.executable, str(program), *map(str, arguments)),
            env=os.environ
            | place
            | {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            | {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(len(ranks))},
            stdout=subprocess.PIPE,
            text=True,
        )
        for machine, ranks in enumerate(machines)
        for local, rank in enumerate(ranks)
    ]
    try:
        found = {process.communicate(timeout=300)[0] for process in processes}
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes)
    (said,) = found  # all replicas have the same state
    return said.splitlines()


def test_wherever_replicas_run(network_of_eight: Network, tmp_path: Path) -> None:
    layouts = LAYOUTS[os.environ.get("FASTDIST_TEST_REPLICAS", "5")]
    found = [
        digests(network_of_eight, tmp_path, machines, 1 << (10 + 3 * i), i % 2 == 0)
        for i, machines in enumerate(layouts)
    ]
    assert [line.split()[0] for line in found[0]] == [
        *("perceptron", "convolutions", "transformer", "keras")
    ]
    for machines, lines in zip(layouts, found, strict=True):
        assert lines == found[0], machines
