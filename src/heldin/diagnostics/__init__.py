"""Read-outs that help to decide whether the criterion can be trusted."""
