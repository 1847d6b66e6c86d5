"""The core: what a step with masters or a loss scale needs, and nothing else.

A wrapper of an optimizer is made of:

- `jax_api`: all uses of JAX beyond its public API.
- `trees`: trees of arrays: paths, leaves, boxes, states.
- `wrappers`: the protocol between wrappers, one update of the optimizer inside, and the
  choice whether to take a step.
- `_dtypes`, `_policy`, `_random_numbers`, `_warnings`.

`masters` and `scaling` are built on these. Nothing here imports another part of the
package.

Docstrings give an array as its dtype and its shape, such as float32 `[...]`:

- `[]` is a scalar.
- `[...]` is the shape of a leaf, the same one everywhere in a docstring. Params and
  what belongs to them are given leaf by leaf.
- `[B, ...]` has one or more axes in front of it, as per-example gradients have.
- `[count]` is one axis, of that length.

A *floating* dtype is real; an *inexact* one is floating or complex.
"""
