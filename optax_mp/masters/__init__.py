"""Masters: high-precision weights in the optimizer state, around any optimizer.

`mixed_precision` (`_transform.py`) runs an optimizer on float32 masters of
low-precision params. `MixedPrecisionState` holds the masters in
the form of a storage: `Storage` (both in `_storage.py`) is its interface, `FullCopy`
keeps the whole master, `Split` only the bits that a 16-bit param lacks.
`master_params`, `replace_master_params` and `follow_params` (`_access.py`)
read and change masters, wherever the state is nested. `_settings.py` raises if storage,
state and params do not fit together.
"""

from optax_mp.masters._storage import AverageState, Storage

__all__ = ["AverageState", "Storage"]
