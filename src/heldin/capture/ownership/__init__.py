"""Owners of activations: the sample of a batch on which each element depends."""
