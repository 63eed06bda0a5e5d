"""Times `linear_loss` beside jaxnorm's linear cross-entropy and other libraries' losses.

``python -m benchmarks.linear_loss`` measures the cross-entropy of a linear layer's logits, and its
gradients, and prints a table of milliseconds and GB of temporary memory. It takes the options of
`benchmarks.run`, and writes to the same folder. ``--again`` repeats measurements.
"""

import sys
from collections.abc import Sequence

from benchmarks import run, tables

PROVIDERS = (
    *("jaxnorm", "jaxnorm_2048", "linear_loss", "linear_loss_2048", "linear_loss_plain"),
    *("linear_loss_plain_2048", "jnp", "optax", "quack", "liger"),
)


def main(argv: Sequence[str]) -> int:
    own = ["linear_loss", "--workers", "4", "--ops", "linear_cross_entropy"]
    given = run.parse([*own, "--providers", *PROVIDERS, *argv])
    status = run.measured(given)
    print(tables.linear_losses([run.folder_of(given)]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
