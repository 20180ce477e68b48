"""Keras 3 on PyTorch: fit without validation data."""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

from heldin.keras import EvidenceStopping

keras.utils.set_random_seed(0)
stream = np.random.default_rng(0)
x = stream.normal(size=(200, 20))
y = x[:, 0] + x[:, 1] + stream.normal(size=200) > 0
model = keras.Sequential(
    [
        keras.layers.Input((20,)),
        keras.layers.Dense(32, activation="relu"),
        keras.layers.Dense(2, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy")
callback = EvidenceStopping(verbose=1)
model.fit(x, y, batch_size=40, epochs=200, callbacks=[callback], verbose=0)
stopping = callback.stopping
print(f"stopped at {stopping.reason}")
