"""What is kept of a run: histories, states that are checked when loaded, checkpoints."""
