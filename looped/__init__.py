"""Looped language models in JAX, and what one more recurrence is worth."""

__version__ = "0.1.0"
