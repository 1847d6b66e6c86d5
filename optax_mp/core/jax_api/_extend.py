"""The door to JAX for those who extend it: its jaxprs, primitives and tracers.

Every other file takes these names from here. If a version of JAX moves one of them,
only its line here changes.
"""

from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer
from jax.extend import source_info_util as source_info_util
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import Primitive as Primitive
from jax.extend.core import primitives as primitives
from jax.extend.linear_util import WrappedFun as WrappedFun
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir

try:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr
except ImportError:  # Then there is one class, a `Jaxpr` that has its constants.
    ClosedJaxpr = Jaxpr
