"""The laboratory of heldin: reproductions, studies, benchmarks, other libraries' models, figures.

It lives beside the library in the repository and is not part of the wheel. heldin never imports it.
"""
