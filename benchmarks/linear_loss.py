"""Times `linear_loss`, jaxnorm's linear cross-entropy, and the losses of other libraries.

``python -m benchmarks.linear_loss`` measures the cross-entropy of a linear layer's logits, and its
gradients, and prints a table of microseconds and GB of temporary memory. It takes the options of
`benchmarks.run`, and writes to the same folder.
"""

import sys
from collections.abc import Sequence

from benchmarks import run, tables
from benchmarks.providers import LINEAR_LOSSES

PROVIDERS = ("jaxnorm", *LINEAR_LOSSES, "jnp", "optax", "quack", "liger")
OWN = ("linear_loss", "--workers", "4", "--ops", "linear_cross_entropy", "--providers", *PROVIDERS)


def main(argv: Sequence[str]) -> int:
    status = run.main([*OWN, *argv])
    print(tables.listing("linear_loss", [run.folder_of(run.parse([*OWN, *argv]))]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
