"""Trees of arrays: params, gradients, and the states of optimizers.

- `_tree`: casts, checks, copies and descriptions of the leaves of any tree.
- `_boxes`: framework boxes around single arrays.
- `_leaves`: the leaves of one tree with their paths, and other trees matched to it.
- `_typed`: NamedTuples whose type carries a setting.
- `_states`: find and map states, and find the param of each leaf.
- `_descriptions`: shapes, dtypes and shardings of a state, without its arrays.
"""
