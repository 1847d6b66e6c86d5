"""AdamW with 8-bit moments and masters of 24 bits, as one would write it by hand.

What XLA makes of these equations is what the compact form is measured by: no optimizer
is wrapped, and nothing is checked. A line is the last axis of an array, or the one
before it where the last is more than eight times as long. Each line of a moment has a
scale, its largest value. A value is

    sign(code) * (code / top) ** 2 * scale,  top = 127 or, for squares, 255

and a master is its param with 8 bits more. Both are rounded at random, right on
average, by a hash of the place, the leaf and the step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

RATE, B1, B2, EPS, DECAY = 1e-3, 0.9, 0.999, 1e-8, 1e-4
MEAN_TOP, SQUARE_TOP = 127, 255
TINY = 2.0**-126


class Moment(NamedTuple):
    """A moment in 8 bits.

    Attributes:
        codes: int8 or, of what has no sign, uint8, in the shape of the param.
        scales: bfloat16, 1 along the axis of the lines.
    """

    codes: jax.Array
    scales: jax.Array


class Leaf(NamedTuple):
    """The state of one param.

    Attributes:
        remainder: int8, the bits of the master beyond the param's.
        mean: of the gradients.
        square: the mean of their squares.
    """

    remainder: jax.Array
    mean: Moment
    square: Moment


class ByHandState(NamedTuple):
    """The state of all params.

    Attributes:
        count: int32 scalar, the number of steps.
        leaves: a `Leaf` for each param, in the order of the tree.
    """

    count: jax.Array
    leaves: tuple[Leaf, ...]


def by_hand(max_norm: float | None = None) -> optax.GradientTransformation:
    """Return this AdamW for bfloat16 params.

    Args:
        max_norm: what the norm of all gradients is clipped to, if it is.
    """

    def init(params: Any) -> ByHandState:
        leaves = tuple(first_leaf(p) for p in jax.tree.leaves(params))
        return ByHandState(jnp.int32(0), leaves)

    def update(grads: Any, state: ByHandState, params: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        if max_norm is not None:
            factor = jnp.minimum(1, max_norm / optax.global_norm(grads))
            grads = jax.tree.map(lambda g: g * factor, grads)
        count = state.count + 1
        flat, treedef = jax.tree.flatten(params)
        keys = [mixed(count.astype(jnp.uint32) * 31 + i) for i in range(len(flat))]
        rows = zip(jax.tree.leaves(grads), state.leaves, flat, keys, strict=True)
        stepped = [step_leaf(*row, count) for row in rows]
        updates = treedef.unflatten([update for update, _ in stepped])
        return updates, ByHandState(count, tuple(leaf for _, leaf in stepped))

    return optax.GradientTransformation(init, update)


def first_leaf(param: jax.Array) -> Leaf:
    """Return the state of a param before the first step."""
    shape = list(param.shape)
    shape[line_axis(param.shape)] = 1
    mean, square = (
        # Scales of their own: buffers are donated once.
        Moment(jnp.zeros(param.shape, dtype), jnp.zeros(shape, jnp.bfloat16))
        for dtype in ("int8", "uint8")
    )
    return Leaf(jnp.zeros(param.shape, jnp.int8), mean, square)


def state_shardings(params: Any, shardings: Any) -> ByHandState:
    """Return how the state is sharded: as the params, with lines shared by devices."""

    def of_leaf(param: jax.Array, sharding: NamedSharding) -> Leaf:
        names = [*sharding.spec] + [None] * (len(param.shape) - len(sharding.spec))
        names[line_axis(param.shape)] = None
        scales = NamedSharding(sharding.mesh, PartitionSpec(*names))
        moment = Moment(sharding, scales)
        return Leaf(sharding, moment, moment)

    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True)
    leaves = tuple(of_leaf(*pair) for pair in pairs)
    whole = NamedSharding(leaves[0].remainder.mesh, PartitionSpec())
    return ByHandState(whole, leaves)


def step_leaf(
    grad: jax.Array, leaf: Leaf, param: jax.Array, key: jax.Array, count: jax.Array
) -> tuple[jax.Array, Leaf]:
    """Return the float32 update of a param, and its new state."""
    master = joined(param, leaf.remainder)
    mean = B1 * decoded(leaf.mean, MEAN_TOP) + (1 - B1) * grad
    square = B2 * decoded(leaf.square, SQUARE_TOP) + (1 - B2) * grad * grad
    steps = count.astype(jnp.float32)
    root = jnp.sqrt(square / (1 - B2**steps))
    way = mean / (1 - B1**steps) / (root + EPS) + DECAY * master
    new, remainder = parted(master - RATE * way, key + 2)
    leaf = Leaf(
        remainder,
        encoded(mean, MEAN_TOP, jnp.int8, key),
        encoded(square, SQUARE_TOP, jnp.uint8, key + 1),
    )
    return new.astype(jnp.float32) - param.astype(jnp.float32), leaf


def line_axis(shape: tuple[int, ...]) -> int:
    """Return along which axis values share a scale."""
    return -2 if len(shape) > 1 and shape[-1] > 8 * shape[-2] else -1


def decoded(moment: Moment, top: int) -> jax.Array:
    """Return the values of a moment."""
    share = moment.codes.astype(jnp.float32) / top
    return share * jnp.abs(share) * moment.scales.astype(jnp.float32)


def encoded(values: jax.Array, top: int, dtype: Any, key: jax.Array) -> Moment:
    """Return a moment with these values, rounded at random."""
    sizes = jnp.abs(values)
    scales = jnp.max(sizes, axis=line_axis(values.shape), keepdims=True)
    scales = scales.astype(jnp.bfloat16)
    share = sizes / jnp.maximum(scales.astype(jnp.float32), TINY)
    squares = jnp.minimum(share, 1) * top**2
    below = jnp.floor(jnp.sqrt(squares))
    # The next code's square is larger by 2 * below + 1.
    is_above = squares - below**2 > uniform(values.shape, key) * (2 * below + 1)
    codes = below + is_above.astype(jnp.float32)
    if top == SQUARE_TOP:  # a step divides by the root
        codes = jnp.where(values > 0, jnp.maximum(codes, 1), 0)
    else:
        codes = jnp.where(values < 0, -codes, codes)
    return Moment(codes.astype(dtype), scales)


def joined(param: jax.Array, remainder: jax.Array) -> jax.Array:
    """Return the master of a param and its remainder."""
    high = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.int32) << 16
    low = remainder.astype(jnp.int32) << 8
    return lax.bitcast_convert_type(high + low, jnp.float32)


def parted(master: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the nearest param and the remainder of a master in 24 bits."""
    noise = (uniform(master.shape, key) * 256).astype(jnp.int32)
    bits = (lax.bitcast_convert_type(master, jnp.int32) + noise) & ~255
    high = (bits + 2**15) >> 16
    param = lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return param, ((bits - (high << 16)) >> 8).astype(jnp.int8)


def uniform(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return float32 numbers in [0, 1), by a hash of their place."""
    place, stride = jnp.uint32(0), 1
    for axis in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, axis)
        place = place + along * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    bits = lax.bitcast_convert_type(mixed(place ^ key) >> 8, jnp.int32)
    return bits.astype(jnp.float32) * 2.0**-24


def mixed(bits: jax.Array) -> jax.Array:
    """Return a hash of uint32 numbers."""
    # https://github.com/skeeto/hash-prospector
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 15)
