"""Processes that train a model jointly: what they pool, and what they must agree on."""
