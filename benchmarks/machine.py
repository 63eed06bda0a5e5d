"""What figures were measured on: GPU, driver, and the commit of the kernels."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
_KERNELS = ("jaxnorm", "kernels")


@dataclasses.dataclass(frozen=True)
class Machine:
    """Attributes: the device's name, the GPU driver's version ("" on a CPU)."""

    device: str
    driver: str = ""

    @property
    def folder(self) -> str:
        """Its name as a folder of results: "NVIDIA H200" is nvidia_h200."""
        return re.sub(r"\W+", "_", self.device.lower())


def here() -> Machine:
    """The first NVIDIA GPU, or the CPU. Asks the driver: JAX would take the GPU's memory."""
    if shutil.which("nvidia-smi") is None:
        return Machine("cpu")
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    if answer.returncode:
        return Machine("cpu")
    device, driver = answer.stdout.strip().split(", ")
    return Machine(device, driver)


def commit() -> str:
    """Short hash of HEAD, with "-dirty" where the kernels differ from it; "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=7", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--", *_KERNELS) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    asked = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
