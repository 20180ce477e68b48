"""Per-sample gradient sums, read out of backward passes."""
