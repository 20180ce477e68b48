"""Shadows: versions of the model that have not seen some rows, trained alongside it."""
