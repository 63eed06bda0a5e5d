"""Helpers that the tests of `memory_report`'s advice share."""

import pytest


def told(report, function=""):
    """Return the rows that have advice to use `function`; by default, all rows that have advice."""
    prefix = f"{function}:" if function else ""
    return [row for row in report if row.advice and row.advice.startswith(prefix)]


def functions_of(report):
    """Return the names of the functions that a report advises to use."""
    return {row.advice.partition(":")[0] for row in told(report)}


def assert_true(before, after, function):
    """Assert that the advice to use `function` is true.

    `before` and `after` are the reports before and after the advice is followed. Following it
    reduces the saved bytes by the number that it states, within 10 %. The report of the changed
    code does not have this advice any more.
    """
    saves = sum(row.saves for row in told(before, function))
    assert saves > 0
    assert before.total - after.total == pytest.approx(saves, rel=0.1)
    assert not told(after, function)
