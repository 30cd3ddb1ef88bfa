"""Sentences that close a user's error."""

from looped.errors import first_line


def test_what_others_raised_is_told_in_one_line():
    assert first_line(ValueError("a\nb")) == "ValueError: a"
    assert first_line(KeyError()) == "KeyError: no reason given"
