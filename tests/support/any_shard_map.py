"""`shard_map` where this JAX has it, and one that needs no types of what varies."""

import functools

import jax

if hasattr(jax, "shard_map"):
    shard_map = unchecked_before_types = jax.shard_map
else:
    from jax.experimental.shard_map import shard_map

    # Before JAX 0.7 no type says what is the same on all ranks, and the check of it
    # fails where a `lax.cond` stands, as it does for float32 gradients.
    unchecked_before_types = functools.partial(shard_map, check_rep=False)
