"""Quantiles and tail probabilities, from the special functions that come with JAX."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist


def chi2_tail(statistic: float, degrees: int) -> float:
    """Probability that a χ² variable with `degrees` of freedom exceeds `statistic`."""
    import jax
    from jax.scipy.special import gammaincc

    if degrees < 1 or not math.isfinite(statistic):
        return math.nan
    with jax.enable_x64(True):
        return float(gammaincc(degrees / 2, max(statistic, 0.0) / 2))


def f_tail(statistic: float, numerator: int, denominator: int) -> float:
    """Probability that an F variable with these degrees of freedom exceeds `statistic`."""
    import jax
    from jax.scipy.special import betainc

    if numerator < 1 or denominator < 1 or not math.isfinite(statistic):
        return math.nan
    with jax.enable_x64(True):
        share = denominator / (denominator + numerator * max(statistic, 0.0))
        return float(betainc(denominator / 2, numerator / 2, share))


@functools.lru_cache(maxsize=256)
def bootstrap_tail(level: float, units: int) -> float:
    """The tail probability at which a percentile interval is cut so that `units` resampled units cover `level`.

    The plain percentile interval is too narrow by √((n − 1)/n) and takes normal quantiles where Student's belong; this
    is the expanded percentile interval (Hesterberg, 2015, section 5.3).
    """
    t = student_quantile((1 + level) / 2, units - 1)
    return NormalDist().cdf(-t * math.sqrt(units / (units - 1)))


@functools.lru_cache(maxsize=256)
def student_quantile(probability: float, degrees: int) -> float:
    """The `probability` quantile (above one half) of Student's t with `degrees` of freedom, by bisection."""
    import jax
    from jax.scipy.special import betainc

    with jax.enable_x64(True):
        low, high = 0.0, 1e4
        for _ in range(70):
            middle = (low + high) / 2
            tail = 0.5 * float(betainc(degrees / 2, 0.5, degrees / (degrees + middle**2)))
            low, high = (middle, high) if 1 - tail < probability else (low, middle)
    return (low + high) / 2
