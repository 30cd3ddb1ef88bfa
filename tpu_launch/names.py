"""Names that Cloud TPU and Kubernetes ask for, beside those of `looped.slices`.

Source of the runtime versions: https://cloud.google.com/tpu/docs/runtimes, "PyTorch and JAX".
"""

from __future__ import annotations

import hashlib
import re

from looped.errors import UserError
from looped.slices import GENERATIONS, Slice

RUNTIME_VERSIONS = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Image of a TPU VM by generation: plain Ubuntu, in which the start-up script installs everything."""

SWEEP_LABEL, SHARE_LABEL = "looped-sweep", "looped-share"


def cloud_names(wanted: Slice) -> tuple[str, str]:
    """Returns (accelerator type, runtime version) of one slice; `UserError` where Cloud TPU has none by itself."""
    accelerator, generation = wanted.accelerator_type, wanted.generation.name
    if accelerator is None or generation not in RUNTIME_VERSIONS:
        with_both = ", ".join(name for name in GENERATIONS if name in RUNTIME_VERSIONS)
        raise UserError(
            f"slice is {wanted.name}, which Cloud TPU gives out through Kubernetes alone; take --engine gke, or a slice"
            f" of {with_both}."
        )
    return accelerator, RUNTIME_VERSIONS[generation]


def sweep_key(output: str) -> str:
    """Ten letters that stand for a sweep's folder in the names of its machines."""
    return hashlib.sha256(output.rstrip("/").encode()).hexdigest()[:10]


def machine_name(output: str, share: int, shares: int) -> str:
    """The name of the machines of one share: a function of folder and share, so that nothing is created twice.

    A DNS label, short enough for Kubernetes to add indices: `looped-1f0e9b3c5a-3-of-8`.
    """
    return f"looped-{sweep_key(output)}-{share}-of-{shares}"


def parse_machine_name(name: str) -> tuple[str, int, int] | None:
    """(sweep key, share, shares) of a name that `machine_name` made; None for any other."""
    match = re.fullmatch(r"looped-([0-9a-f]{10})-(\d{1,5})-of-(\d{1,5})", name, re.ASCII)
    return (match[1], int(match[2]), int(match[3])) if match else None
