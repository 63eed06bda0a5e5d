"""``python -m jaxnorm``: print a report on this machine.

With ``--check``, also compare all public functions with float64 references. On a GPU, also time a
few calls.
"""

import argparse
import os
from collections.abc import Sequence

from jaxnorm.calls import backends
from jaxnorm.tools import machine, selfcheck, wall_time


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status: 1 if ``--check`` found a wrong value, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxnorm",
        description="Prints versions, devices, and which implementation runs each function here.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run every function, forward and backward, against float64; on a GPU, time a few "
        "against XLA (half a minute)",
    )
    options = parser.parse_args(arguments)
    print(machine.report())
    return _check() if options.check else 0


def _check() -> int:
    print("\nvalues and gradients: the worst error, in units of its bound (above 1 is wrong)\n")
    outcomes = selfcheck.run()
    print(selfcheck.report(outcomes))
    wrong = [outcome for outcome in outcomes if not outcome.is_right]
    print(f"\n{len(outcomes) - len(wrong)} of {len(outcomes)} are right")
    if not any(outcome.has_kernel for outcome in outcomes):
        here = backends.local_platform()
        print(f"No kernel was checked: on {here}, all of this is XLA's.")
    elif not wrong:
        print("\nwall time of jitted calls, forward and backward, with the host's part of it\n")
        print(wall_time.report())
    return 1 if wrong else 0


if __name__ == "__main__":
    # Do not preallocate memory: ``--check`` starts several processes that share a GPU. By default,
    # each of them would reserve three quarters of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    raise SystemExit(main())
