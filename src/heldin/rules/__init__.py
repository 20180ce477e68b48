"""Stopping rules: objects with `step()`, `should_stop` and a history."""
