"""The flow of owners through families of ATen ops. Each module registers its functions."""

from . import images, index, products, reduce, shapes

__all__ = ["images", "index", "products", "reduce", "shapes"]
