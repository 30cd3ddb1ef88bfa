"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from looped.text import clock, one_line, short


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


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (" two\r\nlines\u2028", "two lines"),
        ("\x1b[2J\0a\ud800", "[2J a"),
        ("φ 🙂", "φ 🙂"),
        ("\n", ""),
        (12, "12"),
    ],
)
def test_one_line(text, line):
    assert one_line(text) == line


@given(st.text(st.characters(codec=None)), st.integers(1, 20))
def test_one_line_is_printable_and_no_longer_than_asked(text, most):
    line = one_line(text, most)
    assert line.isprintable()
    assert len(line) <= most
    assert (line == one_line(text)) == (len(one_line(text)) <= most)
