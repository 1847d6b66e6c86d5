"""Masters: high-precision weights in the optimizer state, around any optimizer.

- `_transform`: `mixed_precision`, which runs an optimizer on float32 masters.
- `_settings`: its arguments, and whether a state and params fit them.
- `_storage`: the state, and how a master is kept: `FullCopy` or `Split`.
- `_split`: the arithmetic of `Split`.
- `_edits`: masters of params that were edited outside of the optimizer.
- `_access`: `master_params`, `replace_master_params` and `follow_params`, which read
  and change masters, wherever the state is nested.
"""
