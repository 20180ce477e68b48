"""The command line of the laboratory."""
