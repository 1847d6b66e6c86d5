"""What the core uses beyond the public API of JAX.

It imports only the warnings of this package.

- `_contact`: facts about JAX, each tested at its first use.
- `_jaxpr`: trace a call of a function of pytrees, and run a jaxpr.
- `_shardings`: the shardings that a function asks for its outputs.
- `_arrays`: one array: whether it is traced, its type, sharding and memory; how to
  shard it like another; and how to compute it once.
- `_extend`: the door to `jax.extend`, and to tracers.
- `_experimental`: the door to `jax.experimental`, and layouts, which need it.
"""
