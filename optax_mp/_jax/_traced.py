"""A call of a function of pytrees, as a jaxpr of their arrays."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from optax_mp._jax._arrays import is_array
from optax_mp._jax._contact import is_carry_error
from optax_mp._jax._jaxpr import evaluate

PyTree = Any

# Raised by a function that looks at the numbers of its arrays.
NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
)


def is_dynamic(leaf: Any) -> bool:
    """Return whether a leaf is an array that a jaxpr can compute with.

    A `ShapeDtypeStruct` is not, nor is an array of strings, although they have a shape
    and a dtype.
    """
    if isinstance(leaf, Tracer):
        return True
    if not is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return leaf.dtype != jax.dtypes.float0


@dataclass(frozen=True)
class TracedCall:
    """A traced call. Leaves that are not arrays pass through it unchanged.

    Attributes:
        closed: the jaxpr, from the arrays among the inputs to those among the outputs.
        arrays: the arrays among the inputs.
        places: the indices of these among the leaves of the argument.
        leaf_count: how many leaves the argument has.
        outputs: the leaves that the function returned. In the place of an array there
            is an object with its shape and dtype, and `is_output` is true for it.
        treedef: the structure of what the function returned.
    """

    closed: Any
    arrays: list[Any]
    places: list[int]
    leaf_count: int
    outputs: list[Any]
    treedef: Any

    @classmethod
    def of(
        cls,
        function: Callable[[Any], Any],
        argument: PyTree,
        is_input: Callable[[Any], bool] = is_dynamic,
        jit_name: str | None = None,
    ) -> "TracedCall":
        """Trace `function(argument)`.

        Args:
            function: the function.
            argument: its only argument.
            is_input: which leaves are inputs of the jaxpr; by default, all arrays.
            jit_name: the name of a call of `jit` around the function; None for no call.
        """
        leaves, argument_def = jax.tree.flatten(argument)
        places = [i for i, leaf in enumerate(leaves) if is_input(leaf)]
        outputs: list[Any] = []
        treedef: Any = None

        def flat_function(arrays: list[Any]) -> list[Any]:
            nonlocal outputs, treedef
            filled = list(leaves)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            result = function(argument_def.unflatten(filled))
            returned, treedef = jax.tree.flatten(result)
            # Not the tracers themselves: they must not outlive the trace.
            outputs = [
                _OutputArray(x.shape, x.dtype) if is_dynamic(x) else x for x in returned
            ]
            pairs = zip(returned, outputs, strict=True)
            return [x for x, output in pairs if isinstance(output, _OutputArray)]

        traced: Any = flat_function
        if jit_name is not None:
            flat_function.__name__ = flat_function.__qualname__ = jit_name
            traced = jax.jit(flat_function)
        arrays = [_as_jax(leaves[i]) for i in places]
        closed = jax.make_jaxpr(traced)(arrays)
        return cls(closed, arrays, places, len(leaves), outputs, treedef)

    def run(self) -> Any:
        """Return what the function returned, computed as one program of `jit`."""
        program = jax.jit(lambda arrays: evaluate(self.closed, arrays))
        return self.unflatten(program(self.arrays))

    def unflatten(self, values: Sequence[Any]) -> Any:
        """Return what the function returned, with `values` for its arrays."""
        arrays = iter(values)
        leaves = [
            next(arrays) if isinstance(x, _OutputArray) else x for x in self.outputs
        ]
        return self.treedef.unflatten(leaves)

    def unflatten_outputs(self) -> Any:
        """Return what the function returned, with descriptions of its arrays."""
        return self.treedef.unflatten(self.outputs)


@contextlib.contextmanager
def explain_carry_error(caller: str) -> Iterator[None]:
    """Raise another error for JAX's on a loop whose carry changes its dtype."""
    try:
        yield
    except TypeError as error:
        message = str(error)
        # Unless it was explained within.
        if "JAX says" not in message and is_carry_error(error):
            raise TypeError(
                f"{caller}: expected each loop in `fun` to return its carry in the "
                "dtype that it takes, got another, as from a scan over layers of "
                "bfloat16 params with float32 norms; run `optax_mp.amp` over float32, "
                "as in `amp(lambda *args: fun(*cast_floating(args, jnp.float32)))`, "
                "set the `dtype` of the layers to bfloat16, or cast the carry back. "
                f"JAX says: {message}"
            ) from error
        raise


class _OutputArray(jax.ShapeDtypeStruct):
    """Stands for an array among the outputs."""


def is_output(leaf: Any) -> bool:
    """Return whether a leaf of `TracedCall.outputs` stands for an array."""
    return isinstance(leaf, _OutputArray)


def _as_jax(x: Any) -> Any:
    # Only NumPy arrays: a mutable reference (`jax.Ref`) must not become an array.
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
