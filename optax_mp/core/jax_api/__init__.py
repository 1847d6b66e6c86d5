"""What the core uses beyond the public API of JAX.

It imports only the warnings of this package.

- `_contact`: facts about JAX, each tested at its first use.
- `_jaxpr`: trace a call of a function of pytrees, and run a jaxpr.
- `_shardings`: the shardings that a function asks for its outputs.
- `_arrays`: one array: whether it is traced, its type, sharding and memory; how to
  shard it like another; and how to compute it once.
- `_extend`: the door to `jax.extend`, and to tracers.
- `_experimental`: the door to `jax.experimental`, and layouts, which need it.

Everything that the whole package reads of JAX and that JAX may change without a
deprecation, by the file that reads it:

- `core/jax_api/_extend.py`: the classes of jaxprs, literals, primitives and tracers,
  the sources of equations, and where a primitive gets its rules. Taken from there:
  by `core/jax_api/_arrays.py` for two primitives of our own, by
  `core/jax_api/_jaxpr.py`, `jaxprs/_tracing.py`, `jaxprs/_search.py`,
  `jaxprs/_control_flow.py`, `jaxprs/_hidden.py`, `autocast/_demand.py`,
  `autocast/_run.py` and `reports/_precision.py` for jaxprs.
- `core/jax_api/_experimental.py`: used by `core/jax_api/_arrays.py` (`xla_metadata`)
  and `release/_layers.py` (`layout`).
- `core/jax_api/_contact.py`: the class of a value that `jit` traces; the axes of
  `shard_map` in the type of an array. Both are tried before they are trusted.
- `core/jax_api/_jaxpr.py`: how a primitive takes its parameters, and the configuration
  and the source that an equation was traced with.
- The names of primitives and of their parameters: `core/jax_api/_shardings.py`,
  `jaxprs/_primitives.py` (the table), `jaxprs/_control_flow.py`, `jaxprs/_search.py`,
  `autocast/_plan.py`, `autocast/_rules.py` and `reports/_precision_walk.py`.
- `jaxprs/_hidden.py`: the methods of an object that hides a jaxpr.
- `jaxprs/_source.py`: named scopes, lines of code, and the names of arguments; tried
  before they are trusted.
- Switches of JAX's configuration: `core/jax_api/_arrays.py` (`jax_disable_jit`) and
  `release/_checks.py` (`jax_scan3`).
"""
