"""Gradient release: the step of stacked layers, inside the backward pass of their scan.

- `_release`: the public function, from a loss and an optimizer. To clip, or to skip a
  step of all layers, it runs the loss twice: first to measure gradients, then to step.
- `_scan`: the scan over layers, whose backward pass takes the steps.
- `_layers`: what the loss gets in place of its layers.
- `_checks`: what is refused. An optimizer that needs the gradients of all layers is
  found in a trace of its update.
- `_uses`: how often a traced loss scans its layers.

To JAX, the new layers and their state are the "gradients" of the old ones. So nothing
but arrays and derivative rules is needed, and the rules work within `jit` and
`jax.checkpoint`.
"""
