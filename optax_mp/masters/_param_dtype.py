"""Which dtype each param has in training, as the user declares it."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_mp._dtypes import check_available, floating_dtype
from optax_mp._policy import Policy
from optax_mp._tree import is_floating, slash_path, spell

DTypeRule = Callable[[tuple[Any, ...], Any], jnp.dtype | None]
DeclaredDType = DTypeLike | Policy | Callable[[str, Any], DTypeLike | None] | None


def read_param_dtype(declared: DeclaredDType, argument: str) -> DTypeRule:
    """Return a function that gives the dtype of each leaf in training.

    Args:
        declared: a dtype for all floating leaves, a `Policy`, a function of (path
            string, leaf), or None for the dtype that each leaf has.
        argument: what to call it in an error.

    Returns:
        A function of (path, leaf); it returns None for a leaf that is not floating.

    Raises:
        ValueError: if a dtype is not floating. So does the returned function.
    """
    by_leaf: Any = None
    for_all = None
    if isinstance(declared, Policy):
        by_leaf = declared.param_dtype_of
    # Dtypes such as `jnp.bfloat16` are callable, too: they are types.
    elif callable(declared) and not isinstance(declared, type):
        by_leaf = declared
    elif declared is not None:
        for_all = floating_dtype(cast(DTypeLike, declared), argument)

    def rule(path: tuple[Any, ...], leaf: Any) -> jnp.dtype | None:
        if not is_floating(leaf):
            return None
        dtype = by_leaf(slash_path(path), leaf) if by_leaf else for_all
        if dtype is None:
            return leaf.dtype
        where = f"{argument} for {spell(path)}"
        dtype = floating_dtype(dtype, where)
        if dtype == leaf.dtype:
            # NumPy's float64 is float32 to JAX.
            return jax.dtypes.canonicalize_dtype(dtype)
        return check_available(dtype, where)

    return rule
