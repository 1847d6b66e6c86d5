"""Casts, checks, copies and paths over pytrees: only what `optax.tree` lacks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path
from jax.typing import DTypeLike

from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays

PyTree = Any

# How many arrays of a tree a message shows.
_MOST_SHOWN = 3


def only_inexact(tree: PyTree) -> PyTree:
    """Return `tree` with None for each leaf that JAX does not differentiate."""
    return jax.tree.map(lambda x: x if _dtypes.is_inexact(x) else None, tree)


def in_float32(tree: PyTree) -> PyTree:
    """Return `tree` with its floating arrays in float32, if they are not wider."""
    return jax.tree.map(
        lambda x: (
            x.astype(_dtypes.at_least_float32(x.dtype)) if _dtypes.is_floating(x) else x
        ),
        tree,
    )


def ends_in(leaf: Any, shape: tuple[int, ...]) -> bool:
    """Return whether the last axes of an array have this shape."""
    own = tuple(getattr(leaf, "shape", ()))
    return own[max(0, len(own) - len(shape)) :] == shape


def summarize(tree: PyTree) -> str:
    """Say in short what a tree is, such as `a dict of ['w'] float32[2,3]`."""
    if _arrays.is_array(tree):
        return _arrays.describe(tree)
    kind = type(tree).__name__
    name = f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"
    leaves = tree_leaves_with_path(tree)
    arrays = [
        f"{keystr(path)} {_arrays.describe(x)}"
        for path, x in leaves
        if _arrays.is_array(x)
    ]
    if not arrays:
        return name
    rest = len(arrays) - _MOST_SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"{name} of {', '.join(arrays[:_MOST_SHOWN])}{more}"


def spell(path: tuple[Any, ...]) -> str:
    """Spell a tree path as `jax.tree_util.keystr` does, and the root in words."""
    return keystr(path) or "(the whole tree)"


def slash_path(path: tuple[Any, ...]) -> str:
    """Return a tree path such as `layers/0/bias`, the form that patterns match."""
    return keystr(path, simple=True, separator="/")


def cast_floating(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """Cast the floating-point arrays of `tree`; every other leaf passes through.

    Counters, PRNG keys, flags, strings and static leaves are unchanged, so a whole
    model or optimizer state can be cast in one call. The cast rounds to nearest even.
    As with `astype`, values out of the range of `dtype` become infinity or NaN. Leaves
    that have the dtype are not copied: donate the result or `tree`, not both.

    Args:
        tree: any pytree.
        dtype: a floating dtype, by its JAX name, as an object, or by a short name such
            as `"bf16"`.

    Returns:
        A tree with the structure of `tree`.

    Raises:
        ValueError: if `dtype` is not a floating dtype, or float64 while JAX's 64-bit
            types are off.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> state = {"mean": jnp.zeros(2), "count": jnp.int32(7)}
        >>> half = optax_mp.cast_floating(state, "bfloat16")
        >>> half["mean"].dtype.name, half["count"].dtype.name
        ('bfloat16', 'int32')
    """
    argument = "cast_floating: `dtype`"
    target = _dtypes.check_available(_dtypes.floating_dtype(dtype, argument), argument)
    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(leaf).astype(target) if _dtypes.is_floating(leaf) else leaf
        ),
        tree,
    )


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether every floating or complex value in `tree` is finite.

    It takes one pass over the data, without a sync with the host. Leaves that are not
    floating or complex arrays count as finite.

    Args:
        tree: any pytree.

    Returns:
        bool `[]`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> bool(optax_mp.all_finite({"a": jnp.ones(3), "n": 4}))
        True
        >>> bool(optax_mp.all_finite({"a": jnp.array([1.0, jnp.inf])}))
        False
    """
    return all_true(
        [leaf_finite(x) for x in jax.tree.leaves(tree) if _dtypes.is_inexact(x)]
    )


def leaf_finite(leaf: Any) -> jax.Array:
    """Return whether all of one inexact array `[...]` is finite, as bool `[]`."""
    leaf = jnp.asarray(leaf)
    if not _dtypes.is_floating(leaf):
        return leaf_finite(leaf.real) & leaf_finite(leaf.imag)
    # `lax`, because `jnp` takes twice as long to trace.
    return lax.reduce_and(lax.is_finite(leaf), tuple(range(leaf.ndim)))


def all_true(flags: Sequence[jax.Array]) -> jax.Array:
    """Return whether all flags, each bool `[]`, are True, as one bool `[]`."""
    if not flags:
        return jnp.array(True)
    # The minimum, by a sort. XLA turns `stack(flags).all()` into a chain of hundreds of
    # ands and copies it into every loop that reads the result: for 400 leaves and a
    # `where` on each that takes minutes to compile.
    return lax.sort(jnp.stack(flags))[0]


def select_tree(pred: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Return `on_true` if the scalar `pred` holds, else `on_false`.

    This is one `lax.cond` over the whole tree: a `where` on each leaf reads both trees,
    and can take minutes to compile for hundreds of leaves. Leaves that are not arrays
    must be equal on both sides and pass through.

    Args:
        pred: bool `[]`, or a plain bool.
        on_true: any pytree.
        on_false: a pytree of the same structure, shapes and dtypes.

    Returns:
        A tree with the structure of both.

    Raises:
        TypeError: if `pred` is not a bool scalar; from JAX, if a shape or dtype
            differs.
        ValueError: if a static leaf differs; from JAX, if the structure does.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> new, old = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
        >>> optax_mp.select_tree(jnp.array(False), new, old)["w"].tolist()
        [0.0, 0.0]
    """
    if not (isinstance(pred, bool) or (_arrays.is_array(pred) and pred.shape == ())):
        raise TypeError(
            f"select_tree: expected `pred` to be a bool scalar, got {summarize(pred)}; "
            "call `select_tree(pred, on_true, on_false)`."
        )
    tree_map_with_path(_check_static, on_true, on_false)
    arrays = (
        jax.tree.map(lambda x: x if _arrays.is_array(x) else None, tree)
        for tree in (on_true, on_false)
    )
    chosen = lax.cond(pred, _first, _second, tuple(arrays))
    return jax.tree.map(lambda x, new: x if new is None else new, on_false, chosen)


def _check_static(path: tuple[Any, ...], a: Any, b: Any) -> None:
    """Raise if two leaves that are not both arrays differ; `lax.cond` checks arrays."""
    if not (
        _arrays.is_array(a)
        and _arrays.is_array(b)
        or a is b
        or (not _arrays.is_array(a) and a == b)
    ):
        raise ValueError(
            f"select_tree: expected leaf {keystr(path)} to be an array in both trees, "
            f"or the same, got {a!r} in `on_true` and {b!r} in `on_false`."
        )


# Named, not lambdas: an eager `lax.cond` is compiled once for each function object.
def _first(pair: tuple[PyTree, PyTree]) -> PyTree:
    return pair[0]


def _second(pair: tuple[PyTree, PyTree]) -> PyTree:
    return pair[1]


def nonfinite_paths(tree: PyTree) -> list[str]:
    """Return the paths of the leaves of `tree` that hold an infinity or a NaN.

    Use it to find the layer that overflowed, when a step was skipped. It waits for the
    values, so call it outside `jit`.

    Args:
        tree: any pytree of concrete arrays, such as gradients.

    Returns:
        The paths as `jax.tree_util.keystr` writes them, in the order of the leaves.

    Raises:
        TypeError: if called under `jit`, where there are no values to check.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> grads = {"dense": {"kernel": jnp.array([jnp.nan])}, "bias": jnp.zeros(1)}
        >>> optax_mp.nonfinite_paths(grads)
        ["['dense']['kernel']"]
    """
    suspects = [x for x in tree_leaves_with_path(tree) if _dtypes.is_inexact(x[1])]
    for path, leaf in suspects:
        if _arrays.is_traced(leaf):
            raise TypeError(
                f"nonfinite_paths: expected leaf {keystr(path)} to be concrete, got a "
                f"traced {_arrays.describe(leaf)}; call it outside jit, or use "
                "`all_finite`."
            )
    finite = jax.device_get([leaf_finite(leaf) for _, leaf in suspects])
    return [keystr(suspects[i][0]) for i, ok in enumerate(finite) if not ok]


def spread_prefix(params: Any, prefix: Any, name: str) -> list[Any]:
    """Return for each param the leaf that stands for it in a prefix of their tree."""
    own = jax.tree.structure(params)
    try:
        spread = jax.tree.broadcast(prefix, params, is_leaf=lambda x: x is None)
    except ValueError as error:
        caller, _, name = name.partition(": ")
        raise ValueError(
            f"{caller}: expected {name} to have the structure of the params, {own}, or "
            f"of a prefix of it, got {jax.tree.structure(prefix)}; pass "
            "`jax.tree.map(lambda p: p.sharding, params)`."
        ) from error
    return own.flatten_up_to(spread)


def copy_shared(state: PyTree, others: PyTree) -> PyTree:
    """Copy each array of `state` that `others` or another of its leaves also holds.

    All of them can then be donated. Some optimizers keep the params given to `init`, or
    the same zeros in two places. Under `jit` a copy costs nothing. An array of a weak
    type is also copied, and its copy has the strong type.
    """
    seen = {id(leaf) for leaf in jax.tree.leaves(others)}

    def copy_if_seen(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):  # NumPy arrays cannot be donated.
            return leaf
        # A weak type would become a strong one at the first step.
        if id(leaf) in seen or getattr(leaf, "weak_type", False):
            leaf = jnp.array(leaf, leaf.dtype, copy=True)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(copy_if_seen, state)
