"""Ranges of settings: each check raises a ValueError that names the setting and its value."""

import math


def positive(**settings: float) -> None:
    """Each must be a finite number above 0."""
    for name, value in settings.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be finite and > 0, got {value}")


def not_negative(**settings: float) -> None:
    """Each must be a finite number, 0 or above."""
    for name, value in settings.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and >= 0, got {value}")


def decay(**settings: float) -> None:
    """Each must be a decay, in [0, 1); 0 forgets at once."""
    for name, value in settings.items():
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be in [0, 1), got {value}")
