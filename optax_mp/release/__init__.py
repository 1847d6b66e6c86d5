"""Gradient release: the step of stacked layers, inside the backward pass of their scan.

- `_release`: the public function, from a loss and an optimizer; what it refuses.
- `_scan`: the scan over layers, whose backward pass takes the steps.

The gradients never exist as a whole. So an optimizer that needs all of them is refused:
`_jax._dataflow.origins` finds it in a trace of the update.
"""
