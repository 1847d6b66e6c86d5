"""Which kernels there are, and why there is none."""

import functools
import os
from typing import Any

import jax

from optax_mp._jax._by_platform import Target
from optax_mp._warnings import warn_once
from optax_mp.leafwise._layout import Layout

UNKNOWN_LAYOUT = "layout not known, or uneven"


def find_kernel(layout: Layout, target: Target) -> Any:
    """Return the module of the kernel for an end, or a string: why it has none.

    Args:
        layout: of the end.
        target: what the program is lowered for.
    """
    if layout.end.obstacle is not None:
        return layout.end.obstacle
    # Kernels do not run on later versions.
    if target.is_exported:
        return "exported"
    kernels = kernels_for(target.platform)
    if isinstance(kernels, str):
        return kernels
    # An array that is sharded would be gathered for a kernel.
    if layout.sharding is None and target.device_count > 1:
        return UNKNOWN_LAYOUT
    return kernels.obstacle(layout.end, layout.part) or kernels


def kernels_for(platform: str) -> Any:
    """Return the module of the kernels for a platform, or a string: why it has none."""
    if os.environ.get("OPTAX_MP_KERNELS") == "0":
        return "OPTAX_MP_KERNELS=0"
    if platform == "tpu" and _is_old_tpu():
        return "TPU v2 or v3"
    try:
        return _import_kernels(platform)
    except Exception as error:
        return warn_of(error)


def _import_kernels(platform: str) -> Any:
    # Pallas is experimental and slow to import, so import it only for a kernel.
    if platform == "tpu":
        from optax_mp.leafwise import _tpu as kernels
    else:
        from optax_mp.leafwise import _gpu as kernels
    return kernels


@functools.cache
def _is_old_tpu() -> bool:
    """Return whether this machine has TPUs for which Mosaic compiles no such kernel."""
    try:
        kind = jax.local_devices(backend="tpu")[0].device_kind
    except RuntimeError:
        return False
    return kind in ("TPU v2", "TPU v3")


def warn_of(error: Exception) -> str:
    """Say what an error costs, and return the obstacle that it is."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    warn_once(
        "optax_mp: this version of JAX could not make a kernel for a leaf that is "
        "stored in few bits, and XLA alone compiles its step. That takes more "
        "operations on a TPU, and moves 1.5 times as many bytes on a GPU. Another "
        "version of JAX may do better; OPTAX_MP_KERNELS=0 makes no kernels, and no "
        f"warning. {text}"
    )
    return "no kernel by this version of JAX"
