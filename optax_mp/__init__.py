"""Mixed-precision training for any optax optimizer."""

from optax_mp._dtypes import half_dtype
from optax_mp._master_access import (
    MixedPrecisionState,
    master_params,
    replace_master_params,
)
from optax_mp._master_weights import mixed_precision
from optax_mp._policy import Policy, get_policy
from optax_mp._storage import FullCopy
from optax_mp._tree import all_finite, cast_floating, nonfinite_paths, select_tree

__version__ = "0.1.0"

__all__ = [
    "FullCopy",
    "MixedPrecisionState",
    "Policy",
    "all_finite",
    "cast_floating",
    "get_policy",
    "half_dtype",
    "master_params",
    "mixed_precision",
    "nonfinite_paths",
    "replace_master_params",
    "select_tree",
]
