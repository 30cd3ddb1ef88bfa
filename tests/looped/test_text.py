"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.text import clock, short


@pytest.mark.parametrize(
    ("number", "text"), [(4.64e17, "4.64e17"), (1e9, "1e9"), (2e-5, "2e-5"), (0.014, "0.014"), (150, "150")]
)
def test_short(number, text):
    assert short(number) == text


@given(st.floats(-1e300, 1e300))
def test_short_reads_back_to_four_digits(number):
    assert math.isclose(float(short(number)), number, rel_tol=6e-4, abs_tol=1e-300)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (4.4, "4 s"), (61, "1 min"), (3599, "1 h 0 min"), (4800, "1 h 20 min")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text
