"""Keras 3 with the PyTorch backend: one callback, no validation_split."""

# %% 200 digits
import os

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported

import keras
import numpy as np
from sklearn.datasets import load_digits

from heldin.keras import EarlyStopping

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(labels))  # the file is sorted by writer
pixels, labels = pixels[order] / 16, labels[order]
keras.utils.set_random_seed(0)
model = keras.Sequential(
    [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10, activation="softmax")]
)
loss = "sparse_categorical_crossentropy"
model.compile(keras.optimizers.Adam(0.005), loss, metrics=["accuracy"])

# %% Train on all of them
callback = EarlyStopping(rule="shadow")
model.fit(pixels[:200], labels[:200], 50, epochs=40, verbose=0, callbacks=[callback])
stopping = callback.stopping
print(f"best step {stopping.best_step}, estimated loss {stopping.estimate:.2f}")
loss, accuracy = model.evaluate(pixels[200:], labels[200:], verbose=0)
print(f"on 1,597 other digits: loss {loss:.2f}, accuracy {accuracy:.3f}")

# %% The curves
stopping.history.plot().figure.savefig("keras_digits.png")
