"""Observe the user's training loop: model, optimiser and loaders."""
