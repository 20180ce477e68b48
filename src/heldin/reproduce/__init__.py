"""The paper's experiments, figures and claims, in one command: `heldin reproduce`."""
