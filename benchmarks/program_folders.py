"""Folders of compiled Triton kernels: their paths, and the GPUs for which they were compiled.

Like `providers`, this module imports neither JAX nor torch. `triton_programs` fills the folders and
runs the kernels.
"""

import json
import os
from pathlib import Path
from typing import Any

#: The name of an environment variable. Its value is the path of a folder. For each side in `SIDES`,
#: this folder has a subfolder with compiled kernels.
VARIABLE = "TRITON_PROGRAMS"

#: GPUs for which kernels can be compiled. Each has three numbers: ten times its compute capability,
#: its number of multiprocessors, and the maximum shared memory of a thread block in bytes.
GPUS = {
    "a100": (80, 108, 163 * 1024),
    "l4": (89, 58, 99 * 1024),
    "h100": (90, 132, 227 * 1024),
}

#: A side is a group of benchmark processes. This dict has the sides that run Triton kernels
#: compiled ahead of time. It maps each side to the name (in `GPUS`) of the GPU for which its
#: kernels were compiled.
SIDES = {"triton_sm80": "a100", "triton_sm90": "h100"}

ABOUT = "about.json"


def about(folder: Path) -> dict[str, Any]:
    """Return a description of a folder's kernels: source, compiler and GPU."""
    read: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return read


def of_side(side: str) -> Path:
    """Return the folder with the compiled kernels of `side`, which is a key of `SIDES`.

    Raise ModuleNotFoundError if there is no such folder.
    """
    folder = Path(os.environ.get(VARIABLE, "."), side)
    if not (folder / ABOUT).exists():
        raise ModuleNotFoundError(
            f"the environment has {VARIABLE}={os.environ.get(VARIABLE)!r}; expected a folder that "
            f"has {side}/{ABOUT}: python -m benchmarks.triton_programs makes one"
        )
    return folder


def software(side: str) -> str:
    """Return text on the Triton kernels of `side`, which is a key of `SIDES`.

    The text names their compiler, and the GPU for which they were compiled.
    """
    found = about(of_side(side))
    capability, sms, _ = found["gpu"]
    return f"{found['software']} (for sm_{capability}, {sms} multiprocessors)"
