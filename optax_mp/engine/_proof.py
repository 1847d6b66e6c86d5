"""Prove a kernel at its first use: on the device, against XLA, bit by bit.

A kernel's form takes two steps on a small array, and so do its equations as XLA
compiles them. The array has several tiles and runs, the last of each cut short, and
special numbers among random ones. If a bit differs, XLA computes tails of that form.

Compilers make one operation of a product and a sum, and a product of a division by a
scalar, each in its own way. For exact comparisons the results of products, and
divisors, go through an operation on their bits, with a zero that no compiler knows. The
kernel as it is used must be the same but for last places.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_mp._jax._jaxpr import ShapedArray
from optax_mp._warnings import warn_once
from optax_mp.engine._by_platform import Target, explain
from optax_mp.engine._chunks import Chunk, run_tail
from optax_mp.engine._layout import Part
from optax_mp.engine._program import Program, Value, can_open
from optax_mp.engine._tails import ElementwiseTail

# At most so many rows, columns, and indices of other axes.
_ROWS, _COLUMNS, _OTHERS = 128 + 33, 4096 + 512, 2
_TINY = float(np.finfo(np.float32).tiny)
_SPECIAL = (0.0, -0.0, _TINY, -_TINY, _TINY / 8, 1e-30, 3e38, np.inf, -np.inf, np.nan)
# Of the kernel as it is used, one element in a hundred may be farther from XLA's than
# so many numbers.
NEAR, _SHARE = 16, 0.01

PROVED, NOT_PROVED = "kernel", "kernel, not proved here"
# The result for a kind of device and a form, in words.
_found: dict[Hashable, str] = {}
# The results of XLA, of the kernel run exactly, and of the kernel as it is used.
Compared = tuple[np.ndarray, np.ndarray, np.ndarray]


def proof_of(kernel: Any, tail: ElementwiseTail, part: Part, target: Target) -> str:
    """Return `PROVED` if a kernel is right for a tail, else why it is not used.

    `NOT_PROVED` if no device of the target is here.
    """
    form = _form_of(tail, part, target)
    if form not in _found and target.device is not None:
        _found[form] = _prove(kernel, tail, part, target)
    return _found.get(form, NOT_PROVED)


def _prove(kernel: Any, tail: ElementwiseTail, part: Part, target: Target) -> str:
    """Return `PROVED`; else warn of the first difference, and say why not."""
    try:
        # In a thread, because another program is being lowered in this one.
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(compare, kernel, tail, part, target.device).result()
        wrong = next(filter(None, map(first_difference, found)), None)
    except Exception as error:
        wrong = explain(error)
    if wrong is None:
        return PROVED
    warn_once(
        f"optax_mp: on a {target.kind} a kernel for low-bit state does not compute "
        f"what XLA does: {wrong}. XLA computes such leaves, with up to 4 times the "
        "bytes moved on a GPU. Please report it; OPTAX_MP_KERNELS=0 turns kernels off."
    )
    return f"not what XLA computes on a {target.kind}"


def compare(
    kernel: Any, tail: ElementwiseTail, part: Part, device: Any
) -> list[Compared]:
    """Return each output of two steps of a tail, as XLA and a kernel compute it."""
    part, exact = _small(part), _exact(tail)
    # XLA is to round to 16 bits where the program says so, as kernels do.
    written = {"xla_allow_excess_precision": False}

    def run_by_xla(tail: ElementwiseTail, part: Part, args: Any) -> list[Any]:
        return run_tail(tail, Chunk.whole(part), args)

    with jax.default_device(device):
        want = _two_steps(exact, part, run_by_xla, written)
        got, used = (_two_steps(x, part, kernel.run_tail) for x in (exact, tail))
    return list(zip(want, got, used, strict=True))


def _small(part: Part) -> Part:
    most = [_OTHERS] * len(part.shape)
    most[-2:] = [_ROWS, max(_COLUMNS, 4096 + part.block_size)][-len(most) :]
    shape = tuple(map(min, part.shape, most))
    return replace(part, shape=shape, origin=shape)  # as of a shard that begins there


class _Zero(Value):
    """A zero that no compiler knows."""


def _exact(tail: ElementwiseTail) -> ElementwiseTail:
    """Return a tail that reads one more zero, which fixes all roundings."""
    zero = _Zero(ShapedArray((), jnp.int32))
    program = Program([*tail.reads, zero], can_open)
    fixed: dict[Any, Any] = {}

    def fix(x: Any, shape: tuple[int, ...]) -> Any:
        return program.trace(partial(_through_bits, shape), x, zero)

    for node in tail.nodes:
        (old,), name = node.outputs, node.equation.primitive.name
        inputs = [fixed.get(x, x) if isinstance(x, Value) else x for x in node.inputs]
        shape = old.aval.shape
        is_rounded = old.aval.dtype == jnp.float32 and old.aval.ndim > 0
        if is_rounded and name == "div":
            inputs[1] = fix(inputs[1], shape)
        (new,) = program.add(node.equation, inputs)
        is_rounded &= name in ("mul", "square", "integer_pow", "div")
        fixed[old] = fix(new, shape) if is_rounded else new
    outputs = [fixed[x] for x in tail.outputs]
    return replace(tail, nodes=program.nodes, reads=program.inputs, outputs=outputs)


def _through_bits(shape: tuple[int, ...], x: jax.Array, zero: jax.Array) -> jax.Array:
    x = x if x.shape else lax.broadcast_in_dim(x, shape, ())
    zeros = lax.broadcast_in_dim(zero, shape, ())
    bits = lax.bitwise_xor(lax.bitcast_convert_type(x, jnp.int32), zeros)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _two_steps(
    tail: ElementwiseTail, part: Part, run: Callable[..., Any], options: Any = None
) -> list[np.ndarray]:
    """Return the outputs of two steps; what the first replaces the second reads."""
    step = jax.jit(partial(run, tail, part), compiler_options=options)
    random, made = np.random.default_rng(0), []
    for _ in range(2):
        args = [_numbers(value, part, random) for value in tail.reads]
        for at, read in tail.replaced.items() if made else ():
            args[read] = made[at - len(tail.outputs)]
        made += jax.device_get(step(args))
    return made


def _numbers(value: Value, part: Part, random: np.random.Generator) -> np.ndarray:
    """Return random numbers of many sizes, with special ones in some blocks."""
    aval = value.aval
    if isinstance(value, _Zero):
        return np.zeros((), np.int32)
    shape, dtype = part.shape_of(aval.shape), jnp.dtype(aval.dtype)
    if dtype in (jnp.bool_, jnp.int32):  # counts, and indices of branches
        return random.integers(0, 2, shape).astype(dtype)
    if part.block_of(aval.shape)[0] > 1:
        return random.integers(0, 9, shape).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        bounds = jnp.iinfo(dtype)
        return random.integers(bounds.min, int(bounds.max) + 1, shape, dtype)
    numbers = random.normal(size=shape) * 2.0 ** random.integers(-12, 2, shape)
    if aval.shape != part.whole:  # of scalars and scales, which are not negative
        numbers = np.asarray(abs(numbers))
        numbers.flat[5::99] = 0
    else:
        places = np.linspace(0, numbers.size, 8 * len(_SPECIAL), False, dtype=int)
        numbers.flat[places] = np.resize(_SPECIAL, places.size)
    with np.errstate(over="ignore"):
        return numbers.astype(dtype)


def first_difference(found: Compared) -> str | None:
    """Return the first difference of an output, in words; None if it is right."""
    want, got, used = found
    is_wrong, is_far = distance(want, got) > 0, distance(want, used) > NEAR
    if not is_wrong.any() and is_far.mean() > _SHARE:
        got, is_wrong = used, is_far
    if not is_wrong.any():
        return None
    at = tuple(map(int, np.argwhere(is_wrong)[0]))
    return f"expected {want.dtype} {want[at]} at {at}, got {got[at]}"


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return how many numbers of their dtype lie between the numbers of two arrays."""
    bits = [x.view(f"i{a.dtype.itemsize}").astype(np.int64) for x in (a, b)]
    if not jnp.issubdtype(a.dtype, jnp.floating):
        around = 1 << 8 * a.dtype.itemsize
        return np.minimum((bits[0] - bits[1]) % around, (bits[1] - bits[0]) % around)
    least = np.iinfo(f"i{a.dtype.itemsize}").min
    # Of another sign and both zero, they are one apart. One NaN is like another.
    ordered = [np.where(x < 0, least - x - 1, x) for x in bits]
    return np.where(np.isnan(a) & np.isnan(b), 0, abs(ordered[0] - ordered[1]))


def _form_of(tail: ElementwiseTail, part: Part, target: Target) -> Hashable:
    """Return a key for tails that are the same on a small array, but for constants."""
    part = _small(part)

    def types(values: Sequence[Any]) -> Hashable:
        return tuple((x.aval.dtype, part.shape_of(x.aval.shape)) for x in values)

    nodes = tuple(
        (x.equation.primitive, types(x.inputs), types(x.outputs)) for x in tail.nodes
    )
    of_part = part.shape, part.block_size, part.group_size, part.axis
    return target.kind, *of_part, nodes, types(tail.outputs)
