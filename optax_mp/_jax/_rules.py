"""The JAX API that defines an operation: its primitive, its rules, and its lowering."""

from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

__all__ = ["Primitive", "ad", "batching", "ir", "mlir"]
