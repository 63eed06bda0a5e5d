"""The command line of `python -m benchmarks.run`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks import processes, workloads
from benchmarks.blocks import BLOCKS
from benchmarks.losses import LOSSES
from benchmarks.models import MODELS
from benchmarks.providers import PROVIDERS
from benchmarks.suites import SUITES, Selection

MIXED = ("float32", "bfloat16")


def parse(argv: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The arguments; prints what was wrong with them and exits with 2 where they are bad."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        type=suite,
        default=list(SUITES),
        help=f"out of {', '.join(SUITES)} (default: all)",
    )
    names: dict[str, tuple[list[str], str]] = {
        "providers": (list(PROVIDERS), "whose functions"),
        "ops": (
            [*workloads.OPERATIONS, *BLOCKS, *LOSSES, *MODELS],
            "which operations, blocks, losses and models",
        ),
        "directions": (
            list(workloads.DIRECTIONS),
            "fwd and bwd for kernels, fwd+bwd for api, fwd and fwd+bwd for blocks and loss",
        ),
        "dtypes": (
            ["bfloat16", "float32", "mixed"],
            "mixed: float32 x, bfloat16 output (norms); float32 residual, bfloat16 x (blocks)",
        ),
    }
    for name, (choices, meaning) in names.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            metavar="NAME",
            choices=choices,
            default=choices,
            help=f"{meaning}: out of {', '.join(choices)} (default: all)",
        )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=shape,
        metavar="ROWSxCOLS",
        help="instead of the suites' own; of the block ada_layer_norm BATCHxLENGTHxCOLS, of "
        "linear_cross_entropy ROWSxFEATURESxCLASSES",
    )
    parser.add_argument(
        "--quick", action="store_true", help="few shapes, one training step of each variant"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure what has a row already; the last row counts"
    )
    parser.add_argument(
        "--workers",
        type=workers,
        metavar="N",
        help="processes of a side that compile at the same time, and then measure one after the "
        "other (default: on a GPU half of the cores, at most 8; else 1)",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        metavar="SECONDS",
        default=processes.LIMIT_S,
        help="that a process may take to compile its batch, or to measure a cell; then it is ended "
        "and the row says where it was (default: %(default).0f)",
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="FOLDER",
        help="where the CSV files are (default: benchmarks/results/ and the device's name)",
    )
    parser.add_argument(
        "--commit", metavar="HASH", help="of the kernels, for the CSV (default: what git says)"
    )
    return parser.parse_args(argv)


def selection(given: argparse.Namespace) -> Selection:
    return Selection(
        providers=tuple(given.providers),
        ops=tuple(given.ops),
        directions=tuple(given.directions),
        dtypes=tuple(MIXED if name == "mixed" else (name, name) for name in given.dtypes),
        shapes=None if given.shapes is None else tuple(given.shapes),
        quick=given.quick,
    )


def suite(text: str) -> str:
    if text not in SUITES:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected one of {', '.join(SUITES)}")
    return text


def shape(text: str) -> workloads.Shape:
    sizes = text.split("x")
    if len(sizes) < 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected ROWSxCOLS, such as 8192x4096")
    return tuple(map(int, sizes))


def workers(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected 1 or more processes")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected seconds, more than 0")
    return value


def folder(text: str) -> Path:
    path = Path(text)
    if path.is_file() or path.suffix == ".csv":
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected a folder, which gets a CSV for each suite"
        )
    return path
