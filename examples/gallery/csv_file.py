"""A CSV file without code: two commands, `heldin fit` and `heldin predict`."""

# %% A file as people have it: 203 cars, with gaps and text
import subprocess

import numpy as np
import pandas as pd

random = np.random.default_rng(0)
n = 203
cars = pd.DataFrame({"age": random.integers(0, 15, n), "km": random.integers(1, 200, n) * 1000})
cars["fuel"] = random.choice(["petrol", "diesel", "electric"], n)
value = 30 * 0.9 ** cars["age"] - cars["km"] / 20000 + 3 * (cars["fuel"] == "electric")
cars["price"] = (value + 1.5 * random.standard_normal(n)).round(1)
cars.loc[random.random(n) < 0.1, "km"] = np.nan
cars[:200].to_csv("cars.csv", index=False)
cars[200:203].drop(columns="price").to_csv("new.csv", index=False)

# %% In a terminal: heldin fit cars.csv --target price --out model
for command in [
    "heldin fit cars.csv --target price --out model --seed 0",
    "heldin predict model new.csv",
]:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    print(f"$ {command}")
    print(done.stdout, end="")
