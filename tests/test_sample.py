"""The sample of cases that `make test` runs meets whatever the whole suite meets."""

import pytest
import sample
from conftest import CASES


@pytest.mark.parametrize("offset", range(6))
def test_a_sample_meets_each_test_and_each_function(request, offset):
    cases = request.config.stash[CASES]
    found = sample.chosen(cases, 6, offset)
    assert sample.AXES & sample.words(cases) == sample.AXES & sample.words(found)
    tests = {case.partition("[")[0] for case in cases}
    assert {case.partition("[")[0] for case in found} == tests


def test_samples_cover_all_cases():
    cases = [f"test_{i}[{j}]" for i in range(3) for j in range(40)]
    every = [sample.chosen(cases, 4, offset) for offset in range(4)]
    assert set().union(*every) == {*cases}
    assert all({"test_0[0]", "test_2[39]"} <= found for found in every)
    assert all(len(found) < len(cases) // 2 for found in every)


def test_a_missing_value_is_added():
    cases = ["test[xla-1]", "test[triton-float16]", "test[xla-2]"]
    assert cases[1] in sample.chosen(cases, 10**9)
