"""Stopping rules."""
