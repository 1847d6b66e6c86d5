"""Which kernels there are, and why there is none."""

import os
from importlib import import_module
from typing import Any

from optax_mp._warnings import warn_once
from optax_mp.engine._by_platform import Target, explain
from optax_mp.engine._layout import Part
from optax_mp.engine._tails import ElementwiseTail

UNKNOWN_LAYOUT = "layout not known, or uneven"
_MODULES = {"tpu": "optax_mp.engine._tpu", "cuda": "optax_mp.engine._gpu"}
_SETTING = "OPTAX_MP_KERNELS"
_OFF, _ON = ("0", "false", "off"), ("", "1", "true", "on")


def are_on() -> bool:
    """Return whether the environment lets kernels run; raise for an unknown word."""
    word = os.environ.get(_SETTING, "")
    if word.lower() not in _OFF + _ON:
        raise ValueError(
            f"optax_mp: expected {_SETTING} in the environment to be 0, false or off "
            f"to turn kernels off, or 1, true or on, got {word!r}."
        )
    return word.lower() in _ON


def find_kernel(tail: ElementwiseTail, part: Part, target: Target) -> Any:
    """Return the module of the kernel for a tail, or a string: why it has none.

    Args:
        tail: the tail.
        part: of its arrays.
        target: what the program is lowered for.
    """
    if tail.obstacle is not None:
        return tail.obstacle
    kernels = kernels_for(target)
    if isinstance(kernels, str):
        return kernels
    if tail.reads_repeated:
        return "factors of rows or columns"
    # An array that is sharded would be gathered for a kernel.
    if part.sharding is None and target.device_count > 1:
        return UNKNOWN_LAYOUT
    return kernels.obstacle(tail, part) or kernels


def kernels_for(target: Target) -> Any:
    """Return the module of the kernels for a target, or a string: why it has none."""
    if not are_on():
        return f"{_SETTING}={os.environ[_SETTING]}"
    if target.is_exported:  # kernels do not run on later versions
        return "exported"
    if target.kind in ("TPU v2", "TPU v3"):  # Mosaic compiles no such kernel for them
        return target.kind
    try:
        # Pallas is experimental and slow to import, so import it only for a kernel.
        return import_module(_MODULES[target.platform])
    except Exception as error:
        return warn_of(error)


def warn_of(error: Exception) -> str:
    """Say what an error costs, and return the obstacle that it is."""
    warn_once(
        "optax_mp: no Pallas kernel could be made for a low-bit leaf. XLA compiles its "
        "step, with up to 4 times the memory traffic on a GPU. Try another version of "
        f"JAX; OPTAX_MP_KERNELS=0 turns kernels and this warning off. {explain(error)}"
    )
    return f"no kernel: {explain(error)}"
