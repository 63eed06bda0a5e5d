"""The sample of cases that `make test` runs."""

import zlib
from collections.abc import Iterable

from functions import FUNCTIONS

#: Values of parameters that each sample meets: functions, implementations, dtypes, transformations.
AXES = {
    *FUNCTIONS,
    *("xla", "mosaic", "triton"),
    *("float64", "float32", "bfloat16", "float16", "complex64", "int8", "int32", "bool"),
    *("checkpoint", "cond", "grad", "jit", "jvp", "names", "remat", "save_policy", "scan", "vmap"),
    *("auto", "explicit", "manual"),
}


def chosen(cases: Iterable[str], every: int, offset: int = 0) -> set[str]:
    """Return a sample of the cases of all tests.

    The sample has the first and the last case of each test, and about one in `every` of the others.
    A hash chooses them. If every N-th case were chosen, one parameter could have the same value in
    all of them. The first cases with the values in `AXES` that are still missing are added.

    Args:
      cases: the ids of cases, in the order of collection.
      offset: another sample for each number from 0 to ``every - 1``. Each case is in one of them.
    """
    cases = [*cases]
    first = {case.partition("[")[0]: case for case in reversed(cases)}
    last = {case.partition("[")[0]: case for case in cases}
    found = {case for case in cases if zlib.crc32(case.encode()) % every == offset % every}
    found |= {*first.values(), *last.values()}
    missing = AXES - words(found)
    for case in cases:
        if new := missing & words([case]):
            found.add(case)
            missing -= new
    return found


def words(cases: Iterable[str]) -> set[str]:
    """Return the values of all parameters in the ids of cases."""
    return {word for case in cases for word in case.partition("[")[2].rstrip("]").split("-")}
