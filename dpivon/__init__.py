"""dpivon: private Bayesian deep learning in small, readable pieces.

Each file has one idea; the book's chapters build them step by step. The gradient of one example is seen by `gradients`
alone, and only a clipped, noised sum leaves `mechanism`; every optimizer works on that sum and nothing else. One other
number is released: `temperature.private` chooses it on examples that training has not seen.
"""

__version__ = "0.4.0"
