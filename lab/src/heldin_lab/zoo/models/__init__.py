"""The models of the zoo, by family."""

from . import densities, graphs, sequences, tables, transformers_other, transformers_text, vision

__all__ = ["ENTRIES"]

ENTRIES = [
    *transformers_text.ENTRIES,
    *transformers_other.ENTRIES,
    *vision.ENTRIES,
    *sequences.ENTRIES,
    *graphs.ENTRIES,
    *tables.ENTRIES,
    *densities.ENTRIES,
]
