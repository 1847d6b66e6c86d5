"""The optimizer that is wrapped: what may be one, and what it sees of each leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_mp._leaves import is_absent
from optax_mp._tree import PyTree, is_array, is_floating, is_inexact


def as_transformation(
    inner: Any, caller: str, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` in the form that takes extra arguments; the others are for errors.

    Args:
        inner: what should be a transformation.
        caller: the public function at work.
        name: of its argument.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: `{name}` is a {type(inner).__name__}, expected an optax "
            "gradient transformation; call its factory first, as `optax.adamw(1e-3)`."
        )
    return optax.with_extra_args_support(inner)


def own_master(param: Any) -> Any:
    """Return what `inner` sees of a leaf without a master: itself, or nothing."""
    if not is_inexact(param):
        return optax.MaskedNode()
    # NumPy's float64 is float32 to JAX.
    param = param if isinstance(param, jax.Array) else jnp.asarray(param)
    # Moments made from a weakly typed value would turn strong at the first update.
    is_weak = getattr(param, "weak_type", False)
    return jnp.asarray(param, param.dtype) if is_weak else param


def in_precision_of(seen: Any, grad: Any) -> Any:
    """Return the gradient in the dtype of what `inner` sees as its param."""
    if is_absent(seen):
        return seen
    if is_absent(grad) or not (is_floating(grad) and is_floating(seen)):
        return grad
    return lax.convert_element_type(grad, seen.dtype)


def without_aliases(state: PyTree, others: PyTree) -> PyTree:
    """Copy what `state` shares with `others` or holds twice, so all can be donated.

    Some optimizers keep the params given to `init`, or the same zeros in two places.
    """
    taken = {id(leaf) for leaf in jax.tree.leaves(others)}

    def own(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        if id(leaf) in taken:
            leaf = jnp.array(leaf, copy=True)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)
