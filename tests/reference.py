"""What the package promises, in plain NumPy and Python: no JAX, no code of its own."""

import ml_dtypes
import numpy as np


def rounded(master, dtype):
    """Return `master` rounded to `dtype`: nearest, ties to even, saturating."""
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.clip(np.asarray(master), -largest, largest).astype(dtype)


def smallest_landing(param):
    """Return below which size a float32 sum with `param` cannot land exactly."""
    exponent = {"bfloat16": -15, "float16": -12}[param.dtype.name]
    return np.abs(param.astype(np.float64)) * 2.0**exponent


def adamw_step(grad, mu, nu, weight, count, lr, b1=0.9, b2=0.999, eps=1e-8, decay=1e-4):
    """Return (mu, nu, weight) after one AdamW step, in float64."""
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * grad**2
    step = (mu / (1 - b1**count)) / (np.sqrt(nu / (1 - b2**count)) + eps)
    return mu, nu, weight - lr * (step + decay * weight)
