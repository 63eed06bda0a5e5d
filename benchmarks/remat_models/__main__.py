"""Print what twelve models save for their backward pass, with and without auto_remat.

Usage, from the root of the repository::

    python -m benchmarks.remat_models [--write]

No model runs: their derivatives are traced for bfloat16 arrays of published sizes. The figures do
not depend on the machine. ``--write`` also writes the tables into docs/auto_remat.md.
"""

import argparse
import re
from pathlib import Path

from benchmarks.remat_models import measure, policies

PAGE = Path(__file__).parents[2] / "docs" / "auto_remat.md"


def main() -> None:
    """Print the tables, and write them into the docs if ``--write`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="update the tables of the docs")
    text = PAGE.read_text()
    write = parser.parse_args().write
    for head, table in ((measure.HEAD, measure.table()), (policies.HEAD, policies.table())):
        print(f"{table}\n")
        text = re.sub(re.escape(head) + r"(\n\|.*)*", table, text)
    if write:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
