"""What a loss gets in place of stacked layers: their arrays, and how they are stepped.

`ReleasedLayers` is a pytree, so it passes through `jit`, `jax.checkpoint` and `amp`.
Only `scan_layers` may read it. Any other use in a loss is an error that says what to
do.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._experimental import experimental
from optax_mp.core.trees import _tree
from optax_mp.core.wrappers._choose import choose_step, no_link_before
from optax_mp.core.wrappers._protocol import update_inner
from optax_mp.core.wrappers._updates import apply_updates


class Stack(NamedTuple):
    """What `release_gradients` is given for one stack of layers.

    Attributes:
        tx: the optimizer.
        opt_state: its state for each layer, stacked.
        layers: the layers, stacked.
        shardings: how these are sharded, a tree like them or a prefix of one; or None.
    """

    tx: optax.GradientTransformationExtraArgs
    opt_state: Any
    layers: Any
    shardings: Any


@dataclass(eq=False)
class Stepper:
    """How the backward pass steps each layer of one stack. Equal only to itself.

    Attributes:
        tx: the optimizer.
        kinds: of layers and state: dtypes, or the implementations of random keys.
        shardings: how the weights of a layer are sharded, a tree like them; or None.
        measures: whether the backward pass only measures gradients, and takes no step.
        skips: whether a step is skipped if the factor or a gradient is not finite.
        is_used: whether a backward pass was traced. If not, no layer takes a step.
    """

    tx: Any
    kinds: Any
    shardings: Any
    measures: bool = False
    skips: bool = False
    is_used: bool = False

    def step(
        self, grads: Any, opt_state: Any, weights: Any, factor: Any
    ) -> tuple[Any, Any]:
        """Return (weights, opt_state) of one layer after its step.

        If gradients are only measured, there are no weights to write, and the state is
        what `measure` returns.
        """
        # Without the barrier XLA may drop the rounding of 16-bit gradients, and send
        # float32 between devices.
        grads = _tree.in_float32(lax.optimization_barrier(self.in_rows(grads)))
        grads = times(grads, factor)
        if self.measures:
            return None, measure(grads)

        def update(opt_state: Any, extra_args: dict[str, Any]) -> Any:
            args = grads, opt_state, weights
            return update_inner(self.tx, "release_gradients", *args, **extra_args)

        # Also by the gradients of this pass: by another rounding than in the first one
        # they may overflow.
        proceed = _tree.all_finite((grads, factor)) if self.skips else True
        with no_link_before():
            updates, opt_state = choose_step(proceed, update, opt_state, {})
        return apply_updates(weights, updates), opt_state

    def in_rows(self, tree: Any) -> Any:
        """Return arrays of one layer in row-major order, if shardings are known.

        To gather shards of the last axis, XLA for GPUs wants this axis first in memory,
        and transposes all layers and their state before and after the loop.
        """

        def place(x: Any, sharding: Any) -> Any:
            # A weight without a gradient, such as an integer, has None.
            if x is None or sharding is None or x.ndim < 2:
                return x
            in_rows = partial(with_major_to_minor, order=tuple(range(x.ndim)))
            mesh, spec = sharding.mesh, sharding.spec
            # Without `shard_map`, the constraint would gather the array.
            return jax.shard_map(in_rows, mesh=mesh, in_specs=spec, out_specs=spec)(x)

        if self.shardings is None:
            return tree
        return jax.tree.map(place, tree, self.shardings, is_leaf=lambda x: x is None)


def times(tree: Any, factor: Any) -> Any:
    """Multiply gradients by a factor; None leaves them unchanged."""
    return tree if factor is None else jax.tree.map(lambda x: x * factor, tree)


def measure(grads: Any) -> jax.Array:
    """Return the sum of squares of gradients, and 1 if one of them is not finite.

    Two numbers, because squares of finite gradients can overflow: the first decides how
    much is clipped, the second whether a step is skipped.
    """
    squares = optax.tree.norm(grads, squared=True)
    return jnp.stack([jnp.float32(squares), jnp.float32(~_tree.all_finite(grads))])


def _refuse(self: Any, *_: Any) -> NoReturn:
    raise TypeError(
        "release_gradients: expected a loss that passes its layers to `scan_layers`, "
        "got one that reads an array of them; use `optax_mp.scan_layers` in place of "
        "`jax.lax.scan`."
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class ReleasedLayers:
    """What a loss gets in place of stacked layers, for `scan_layers`.

    Attributes:
        float_layers: the layers as floats, because the "gradients" of these arrays are
            the arrays after the step, and JAX differentiates only floats.
        float_state: the state of their optimizer as floats; or zeros [layers, 2], in
            whose place `measure` returns its numbers.
        factor: what gradients are multiplied by, a float32 scalar; or None.
        stepper: how they are stepped. It is static.
    """

    float_layers: Any
    float_state: Any
    factor: Any
    stepper: Stepper = field(metadata={"static": True})

    @classmethod
    def of(cls, layers: Any, opt_state: Any, stepper: Stepper, factor: Any) -> Any:
        """Return layers and state as floats."""
        return cls(_as_floats(layers), _as_floats(opt_state), factor, stepper)

    @property
    def layers(self) -> Any:
        """The stacked layers."""
        return _from_floats(self.float_layers, self.stepper.kinds[0])

    @property
    def opt_state(self) -> Any:
        """The state of their optimizer, stacked."""
        return _from_floats(self.float_state, self.stepper.kinds[1])

    __getitem__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        # Python and JAX look for methods with underscores that no class needs to have.
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(self)


def release(
    stack: Stack, factor: Any, *, measures: bool, skips: bool
) -> ReleasedLayers:
    """Return what the loss gets in place of a stack of layers.

    Args:
        stack: the layers and their optimizer.
        factor: what gradients are multiplied by; or None.
        measures: whether the backward pass only measures gradients.
        skips: whether a step is skipped if the factor or a gradient is not finite.
    """
    tx, opt_state, layers, shardings = stack
    if measures:
        opt_state = jnp.zeros((len(jax.tree.leaves(layers)[0]), 2), jnp.float32)
    if shardings is not None:  # of one layer
        spread = spread_shardings(layers, shardings, "release_gradients")
        shardings = jax.tree.structure(layers).unflatten(
            x and NamedSharding(x.mesh, PartitionSpec(*x.spec[1:])) for x in spread
        )
    kinds = jax.tree.map(_kind_of, (layers, opt_state))
    stepper = Stepper(tx, kinds, shardings, measures, skips)
    return ReleasedLayers.of(layers, opt_state, stepper, factor)


def is_released(x: Any) -> bool:
    """Return whether this is `ReleasedLayers`."""
    return isinstance(x, ReleasedLayers)


# Of 8-bit floats this one has all exponents, so that no conversion drops a bit.
_FLOAT_OF_SIZE = {1: "float8_e5m2", 2: "bfloat16", 4: "float32", 8: "float64"}


def _kind_of(x: Any) -> Any:
    """Return the dtype of an array, or the implementation of random keys."""
    return jax.random.key_impl(x) if is_key(x) else x.dtype


def _as_floats(tree: Any) -> Any:
    """Return arrays with the same bits, of dtypes that JAX differentiates."""

    def convert(x: Any) -> Any:
        if _dtypes.is_inexact(x):
            return x
        x = jax.random.key_data(x) if is_key(x) else x
        if x.dtype == np.bool_:
            return x.astype(jnp.float32)
        return lax.bitcast_convert_type(x, _FLOAT_OF_SIZE[x.dtype.itemsize])

    return jax.tree.map(convert, tree)


def _from_floats(tree: Any, kinds: Any) -> Any:
    """Return the arrays that `_as_floats` was given."""

    def convert(x: Any, kind: Any) -> Any:
        if isinstance(kind, np.dtype):
            if kind == np.bool_ or jnp.issubdtype(kind, jnp.inexact):
                return lax.convert_element_type(x, kind)
            return lax.bitcast_convert_type(x, kind)
        data = lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(data, impl=kind)

    return jax.tree.map(convert, tree, kinds)


def with_major_to_minor(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Return an array whose axes lie in memory in this order, the last one densely."""
    layout = experimental("layout")
    return layout.with_layout_constraint(x, layout.Layout(order))


def spread_shardings(
    params: Any, shardings: Any, caller: str
) -> list[NamedSharding | None]:
    """Return the sharding of each param, None where a mesh is not known.

    Args:
        params: the params.
        shardings: a tree of shardings like these, or a prefix of one.
        caller: the public function that the user called, for error messages.
    """
    leaves = _tree.spread_prefix(params, shardings, f"{caller}: `param_shardings`")
    for leaf in leaves:
        if not isinstance(leaf, Sharding):
            raise TypeError(
                f"{caller}: expected `param_shardings` to hold shardings, got {leaf!r};"
                " pass `jax.tree.map(lambda p: p.sharding, params)`."
            )
    return [leaf if isinstance(leaf, NamedSharding) else None for leaf in leaves]


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` is an array of typed PRNG keys."""
    return _arrays.is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
