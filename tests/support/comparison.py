"""Trees compared to the last bit, and by their types."""

import jax
import jax.numpy as jnp
import numpy as np

import optax_mp


def as_bits(tree):
    """Return the bytes of every leaf with dtype and shape: equal means bit-equal."""
    out = []
    for leaf in jax.tree.leaves(tree):
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        out.append((array.dtype.name, array.shape, array.tobytes()))
    return out


def avals(tree):
    """Return structure, dtypes, shapes and weak types: equal means no recompilation."""
    return jax.tree.structure(tree), [
        (leaf.dtype, leaf.shape, getattr(leaf, "weak_type", False))
        for leaf in jax.tree.leaves(tree)
    ]


def check_alike(got, want, codes=1e-3, wider=2e-2):
    """Check (params, state) where the last place of a sum may differ.

    XLA makes one rounding of a product and a sum, or two, as it fuses them.
    """
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        wide = [np.asarray(x).astype(np.float64) for x in (a, b)]
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(*wide, rtol=1e-5, atol=1e-9)
        else:
            share = codes if a.dtype.itemsize == 1 else wider
            differing = wide[0] != wide[1]
            assert differing.sum() <= max(4, share * differing.size), (a.dtype, a.shape)
    masters = [
        jax.tree.leaves(optax_mp.master_params(state, params))
        for params, state in (got, want)
    ]
    for a, b in zip(*masters, strict=True):
        # Where a code differs a step is 8% another, of a hundredth of a master.
        np.testing.assert_allclose(*map(np.asarray, (a, b)), rtol=1e-3, atol=1e-9)
