"""Whether arrays of params and state are apart, so that both may be donated."""

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path


def keeps_params():
    """Return a rule whose state is the params, twice and in a copy."""
    return optax.GradientTransformationExtraArgs(
        lambda params: (params, params, jax.tree.map(jnp.asarray, params)),
        lambda updates, state, params=None, **extra: (updates, state),
    )


def check_no_buffer_is_shared(form, tx, params):
    """Compare the addresses of params and of a state from `init`, and in `jit`."""
    for state in (tx.init(params), jax.jit(tx.init)(params)):
        seen = {}
        for path, x in tree_leaves_with_path((params, state)):
            other = seen.setdefault(x.unsafe_buffer_pointer(), keystr(path))
            assert other == keystr(path), f"{form}: {keystr(path)} is {other}"
