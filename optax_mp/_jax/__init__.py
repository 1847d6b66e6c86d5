"""The only folder that uses more than the public API of JAX.

It imports nothing else of the package but its warnings.

- `_contact`: names of classes and texts of programs in JAX, each tested at first use.
- `_jaxpr`: read, run and trace jaxprs, also of a call of a function of pytrees.
- `_source`: the scopes and lines where an equation is written.
- `_primitives`: facts of each primitive, in one table; products and their FLOPs.
- `_control_flow`: equations with jaxprs inside, which values go where in them, and
  searches along these. Add support for another one here.
- `_dataflow`: which outputs of a jaxpr depend on its inputs, and how: decayed as in an
  average, or unchanged; and the shardings that it asks for.
- `_arrays`: one array: whether it is traced, its type, sharding and memory; how to
  shard it like another; and how to compute it once.
- `_experimental`: the door to `jax.experimental`, and layouts, which need it.
"""
