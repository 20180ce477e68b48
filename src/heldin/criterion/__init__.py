"""From sums to the criterion: pure functions, and what smooths it."""
