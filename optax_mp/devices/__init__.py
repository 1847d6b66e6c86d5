"""Training on many devices.

JAX itself shards arrays and computations. `zero1` (`_zero1.py`) makes it shard the
state of an optimizer over devices that hold the same params. `_shardings.py` finds out
how the params are sharded, decides how each array is cut, and has `state_shardings`,
which says how a state should be sharded.

`sum_gradients` (`_sum.py`) adds gradients in float32 that are sent in 16 bits, under
`shard_map`; `zero1` does the same with sharded arrays.

`offload` (`_offload.py`) keeps the state of an optimizer in host memory.
"""
