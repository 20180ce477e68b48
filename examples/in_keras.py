"""Keras 3 on PyTorch: fit without validation data."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from heldin.keras import EarlyStopping

stream = np.random.default_rng(0)
x = stream.normal(size=(200, 20))
y = x[:, 0] + x[:, 1] + stream.normal(size=200) > 0
first, second = EarlyStopping("folds"), EarlyStopping("evidence")
for callback in (first, second):  # an estimated test loss; or evidence, which needs no second model
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.layers.Input((20,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=40, epochs=200, callbacks=[callback], verbose=0)
    print(f"stopped at {callback.stopping.reason}")
auto, evidence = first.stopping, second.stopping
print(f"expected test loss {first.estimates['loss']}")
