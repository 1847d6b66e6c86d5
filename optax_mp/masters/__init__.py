"""Masters: high-precision weights in the optimizer state, around any optimizer.

`mixed_precision` (`_transform.py`; one step of it is in `_step.py`) runs an optimizer
on float32 masters of low-precision params. `MixedPrecisionState` (`_state.py`) holds
the masters in the form that a storage (`storage/`) gives them. `master_params` and
`replace_master_params` (`_access.py`) read and replace them, wherever the state is
nested. `_checks.py` has the errors for what does not belong together, `_param_dtype.py`
what users declare about the dtypes of their params.
"""

from optax_mp.masters._access import master_params, replace_master_params
from optax_mp.masters._state import MixedPrecisionState
from optax_mp.masters._transform import mixed_precision
from optax_mp.masters.storage import FullCopy, Split, Storage

__all__ = [
    "FullCopy",
    "MixedPrecisionState",
    "Split",
    "Storage",
    "master_params",
    "mixed_precision",
    "replace_master_params",
]
