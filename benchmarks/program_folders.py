"""Folders of compiled Triton kernels: where they are, and for what they were compiled.

This module does not import JAX or torch, like `providers`. `triton_programs` fills the folders and
runs the kernels.
"""

import json
import os
from pathlib import Path
from typing import Any

#: The environment variable that names the folder, with one folder of kernels for each side in
#: `SIDES`.
VARIABLE = "TRITON_PROGRAMS"

#: Compute capability times ten, multiprocessors, and bytes of shared memory that a block may have.
GPUS = {
    "a100": (80, 108, 163 * 1024),
    "l4": (89, 58, 99 * 1024),
    "h100": (90, 132, 227 * 1024),
}

#: The sides whose processes run such kernels, each with the GPU for which they were compiled.
SIDES = {"triton_sm80": "a100", "triton_sm90": "h100"}

ABOUT = "about.json"


def about(folder: Path) -> dict[str, Any]:
    """Return a description of a folder's kernels: their source, their compiler and their GPU."""
    read: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return read


def of_side(side: str) -> Path:
    """Return the folder of a side's kernels, or raise ModuleNotFoundError."""
    folder = Path(os.environ.get(VARIABLE, "."), side)
    if not (folder / ABOUT).exists():
        raise ModuleNotFoundError(
            f"the environment has {VARIABLE}={os.environ.get(VARIABLE)!r}; expected a folder that "
            f"has {side}/{ABOUT}: python -m benchmarks.triton_programs makes one"
        )
    return folder


def software(side: str) -> str:
    """Return the software that compiled a side's kernels, and the GPU they are for."""
    found = about(of_side(side))
    capability, sms, _ = found["gpu"]
    return f"{found['software']} (for sm_{capability}, {sms} multiprocessors)"
