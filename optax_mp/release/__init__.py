"""Gradient release: the step of stacked layers, inside the backward pass of their scan.

- `_release`: the public function, from a loss and an optimizer, and what it refuses. An
  optimizer that needs the gradients of all layers is found in a trace of its update.
- `_scan`: the scan over layers, whose backward pass takes the steps.

To JAX, the new layers and their state are the "gradients" of the old ones. So nothing
but arrays and derivative rules is needed, and the rules work within `jit` and
`jax.checkpoint`.
"""
