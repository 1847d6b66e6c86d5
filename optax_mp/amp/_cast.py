"""The one cast that amp puts into a function."""

from typing import Any

import jax
import numpy as np
from jax import lax


def cast(x: Any, dtype: Any) -> Any:
    """Return `x` in another dtype, or as it is for None."""
    if dtype is None:
        return x
    if not isinstance(x, jax.Array):
        # A literal stays one.
        return np.asarray(x).astype(dtype)
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)
