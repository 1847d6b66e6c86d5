"""Tools for jaxprs, beyond what the core needs to trace and run them.

It imports nothing else of the package but `core/jax_api`.

- `_search`: look into jaxprs, at any depth.
- `_control_flow`: equations with jaxprs inside, and which values go where in them. Add
  support for another one here.
- `_hidden`: equations whose jaxpr is in an object, of `jax.experimental.hijax`.
- `_follow`: from facts of the inputs of a jaxpr to facts of its outputs.
- `_dependence`: which inputs an output is computed from.
- `_tracing`: make jaxprs that go inside an equation.
- `_primitives`: facts of each primitive, in one table; products and their FLOPs.
- `_source`: the scopes and lines where an equation is written.
"""
