"""Keras' fit on two replicas gives the history of one device; one line is new, the scope.

Start it by `KERAS_BACKEND=torch fastdist run -n 2 examples/asked/14_keras_fit.py`.
"""

import fastdist as fd
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(250, 8)).astype("float32")  # the last batch is uneven
y = x.sum(1, keepdims=True)


def fit(scope):
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.layers.Dense(16, "relu"), keras.layers.Dense(1)])
        model.compile("adam", "mse", metrics=["mae"])
    return model.fit(x, y, batch_size=64, epochs=2, validation_split=0.1, verbose=0).history


strategy = fd.MirroredStrategy()
assert strategy.num_replicas_in_sync == 2
one = fit(fd.OneDeviceStrategy("cpu").scope())
two = fit(strategy.scope())
for name in one:
    if strategy.is_chief:
        print(
            f"{name:8} one device {one[name]}, {strategy.num_replicas_in_sync} replicas {two[name]}"
        )
    np.testing.assert_allclose(two[name], one[name], rtol=1e-4)
