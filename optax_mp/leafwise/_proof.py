"""Prove a kernel at its first use: on the device, against XLA, bit by bit.

A kernel's form is run on a small array, two steps in a row, and so are its equations as
XLA compiles them. The array has several tiles or runs, the last of each cut short, and
special numbers among random ones. If any bit differs, XLA computes ends of that form.
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp._jax._by_platform import Target, explain
from optax_mp._warnings import warn_once
from optax_mp.leafwise import _chunks
from optax_mp.leafwise._ends import End
from optax_mp.leafwise._evaluator import Part

# Rows, columns, and other axes: with two tiles of rows, and a part of a run at the end.
_ROWS, _COLUMNS, _LEADING = 33, 4096 + 512, 2
_STEPS = 2
_TINY = np.finfo(np.float32).tiny
_SPECIAL = (0.0, -0.0, _TINY, -_TINY, _TINY / 8, 1e-30, 1e30, np.inf, -np.inf, np.nan)

# Why a form is not used, or None, by the kind of device and the form.
_found: dict[Hashable, str | None] = {}


class Difference(NamedTuple):
    """What a kernel and XLA make of one output.

    Attributes:
        dtype: of the output.
        count: how many elements differ.
        size: of how many.
        first: the first that differs, in words; empty if none does.
    """

    dtype: str
    count: int
    size: int
    first: str


def obstacle(kernel: Any, end: End, part: Part, target: Target) -> str | None:
    """Return why a kernel is not used for an end; None if it may be.

    If no device of the target is here, nothing can be said.
    """
    if target.device is None:
        return None
    key = target.kind, _form_of(end, part)
    if key not in _found:
        _found[key] = None  # what is compared has kernels of its own
        _found[key] = _prove(kernel, end, part, target)
    return _found[key]


def is_proved(end: End, part: Part, target: Target) -> bool:
    """Return whether a form was compared on such a device, and is right."""
    return _found.get((target.kind, _form_of(end, part)), "") is None


def _prove(kernel: Any, end: End, part: Part, target: Target) -> str | None:
    try:
        # In a thread: this runs while another program is lowered.
        with ThreadPoolExecutor(1) as thread:
            run = thread.submit(compare, kernel, end, part, target.device)
            wrong = [x.first for x in run.result() if x.first]
    except Exception as error:
        wrong = [explain(error)]
    if not wrong:
        return None
    warn_once(
        f"optax_mp: on a {target.kind} a kernel for low-bit state is not what XLA "
        f"computes: {wrong[0]}. XLA computes such steps in this process, with up to "
        "1.5 times the memory traffic on a GPU, and more operations on a TPU. Please "
        "report it. OPTAX_MP_KERNELS=0 turns kernels off, and this warning."
    )
    return f"not what XLA computes on a {target.kind}"


def compare(kernel: Any, end: End, part: Part, device: Any) -> list[Difference]:
    """Return for each output of an end how a kernel's differs from XLA's."""
    part = _small(part)
    with jax.default_device(device):
        # XLA is to round to 16 bits where the program says so, as the kernel does.
        as_written = {"xla_allow_excess_precision": False}
        by_xla = _jitted(_by_xla, end, part, compiler_options=as_written)
        by_kernel = _jitted(kernel.run_end, end, part)
        made = [_two_steps(run, end, part) for run in (by_kernel, by_xla)]
    found = [list(map(_difference, *each)) for each in zip(*made, strict=True)]
    # Of the first step that differs, if one does.
    return next((x for x in found if any(y.count for y in x)), found[-1])


def _by_xla(end: End, part: Part, args: Sequence[Any]) -> list[Any]:
    return _chunks.run_end(end, _chunks.Cuts.whole(part), args)


def _jitted(run_end: Any, end: End, part: Part, **settings: Any) -> Any:
    rank = len(part.shape)

    def run(*args: Any) -> Any:
        return run_end(end, replace(part, origin=args[:rank]), args[rank:])

    # As of a shard that begins anywhere.
    jitted = jax.jit(run, **settings)
    return functools.partial(jitted, *map(np.int32, part.shape))


def _small(part: Part) -> Part:
    most = [_LEADING] * len(part.shape)
    most[-2:] = [_ROWS, max(_COLUMNS, 4096 + part.block_size)][-len(most) :]
    return replace(part, shape=tuple(map(min, part.shape, most)))


def _two_steps(run: Callable[..., Any], end: End, part: Part) -> list[list[np.ndarray]]:
    """Return the outputs of each step; what they replace is read in the next."""
    made: list[list[np.ndarray]] = []
    random = np.random.default_rng(0)
    for _ in range(_STEPS):
        args = [_numbers(value.aval, part, random) for value in end.reads]
        for at, read in end.replaced.items() if made else ():
            args[read] = made[-1][at]
        made.append(jax.device_get(run(*args)))
    return made


def _numbers(aval: Any, part: Part, random: np.random.Generator) -> np.ndarray:
    """Return random numbers of all sizes, and special ones in a few blocks."""
    shape, dtype = part.shape_of(aval.shape), jnp.dtype(aval.dtype)
    if dtype == jnp.bool_:
        return random.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(dtype, jnp.integer):
        # A count of steps is small; a key or a code is anything.
        bounds = (1, 9) if dtype == jnp.int32 else (jnp.iinfo(dtype).min, None)
        most = bounds[1] or int(jnp.iinfo(dtype).max) + 1
        return random.integers(bounds[0], most, shape, dtype)
    numbers = random.normal(size=shape) * 2.0 ** random.integers(-12, 2, shape)
    if aval.shape == part.whole:
        places = np.linspace(0, numbers.size, 8 * len(_SPECIAL), False, dtype=int)
        numbers.flat[places] = np.resize(_SPECIAL, places.size)
    elif aval.shape:  # of scales, which are not negative
        numbers = abs(numbers)
        numbers.flat[:: max(1, numbers.size // 3)] = 0
    else:
        numbers = abs(numbers)
    with np.errstate(over="ignore"):
        return np.asarray(numbers).astype(dtype)


def _difference(a: np.ndarray, b: np.ndarray) -> Difference:
    bits = f"u{a.dtype.itemsize}"
    is_other = a.view(bits) != b.view(bits)
    if jnp.issubdtype(a.dtype, jnp.floating):  # one NaN is like another
        is_other &= ~(np.isnan(a) & np.isnan(b))
    first, at = "", int(np.argmax(is_other)) if is_other.any() else None
    if at is not None:
        place = tuple(map(int, np.unravel_index(at, a.shape)))
        first = f"{a.dtype} at {place} is {a.flat[at]}, expected {b.flat[at]}"
    return Difference(str(a.dtype), int(is_other.sum()), a.size, first)


def _form_of(end: End, part: Part) -> Hashable:
    """Return a key for ends that are the same on a small array, but for constants."""
    part = _small(part)

    def named(values: Sequence[Any]) -> Iterator[Hashable]:
        return ((x.aval.dtype, part.shape_of(x.aval.shape)) for x in values)

    nodes = (
        (x.equation.primitive, *named(x.inputs), *named(x.outputs)) for x in end.nodes
    )
    return part.shape, part.block_size, *nodes, tuple(named(end.outputs))
