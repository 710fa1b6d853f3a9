"""dpivon: private Bayesian deep learning in small, readable pieces.

Each file has one idea; the book's chapters build them step by step. Data is seen by `gradients` alone, and only a
clipped, noised sum leaves `mechanism`; every optimizer works on that sum and nothing else.
"""

__version__ = "0.4.0"
