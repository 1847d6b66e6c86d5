"""Facts that a program has about its arrays while lowered. Tried at its first use.

See `optax_mp._jax._contact`: these are texts and names of programs that JAX may change.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from optax_mp._jax._contact import BFLOAT, FLOAT, MESH, Ask, tried
from optax_mp._jax._primitives import Primitive, mlir

_CONVERT = "stablehlo.convert"
# Shardy's text for axes of an array, each over none, one or more axes of a mesh whose
# devices are in the program's order. A text that says more does not match.
_SHARDING = re.compile(r"#sdy\.sharding<mesh<\[([^]]*)\]>, \[([^]?:]*)\]>")

# Hands on a value to a function while a program is lowered.
_read = Primitive("optax_mp_read")
_read.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(
    _read, lambda _, value, *, read: [value, read(value)][:1], cacheable=False
)


def _read_lowered(read: Ask, function: Ask, argument: Any) -> Any:
    """Return what is read of the result of a function while that is lowered."""
    found: list[Any] = []

    def program(x: Any) -> Any:
        return _read.bind(function(x), read=lambda value: found.append(read(value)))

    jax.jit(program).trace(argument).lower(lowering_platforms=("tpu",))
    return found[0]


def _about_converts(ask: Ask) -> bool:
    return _read_lowered(ask, lambda x: x.astype("float32"), BFLOAT)[1] == "bfloat16"


@tried(
    _about_converts,
    None,
    "low-bit steps read gradients in float32: take them in 16 bits",
)
def widened_from(value: Any) -> tuple[Any, Any] | None:
    """Return the 16-bit array that a float32 one was converted from, and its dtype.

    A loop or `value_and_grad` converts gradients, for example. XLA would write the
    float32 array to memory for a kernel, at twice the size. None if it was not
    converted.
    """
    made_by: Any = getattr(value, "owner", None)
    if getattr(made_by, "name", None) != _CONVERT:
        return None
    (source,) = made_by.operands
    types = [str(getattr(x.type, "element_type", "")) for x in (source, value)]
    narrow = {"bf16": jnp.dtype("bfloat16"), "f16": jnp.dtype("float16")}
    is_widened = types[0] in narrow and types[1] == "f32"
    return (source, narrow[types[0]]) if is_widened else None


def _about_shardings(ask: Ask) -> bool:
    sharded = FLOAT.update(sharding=NamedSharding(MESH, PartitionSpec(("a", "b"))))
    found = _read_lowered(ask, lambda x: x, sharded)
    return found == ({"a": 2, "b": 2}, [("a", "b")])


@tried(
    _about_shardings,
    None,
    "low-bit steps over several devices have no kernels: pass `param_shardings` "
    "to `take_step`",
)
def sharding_of(value: Any) -> tuple[dict[str, int], list[tuple[str, ...]]] | None:
    """Return how `jit` shards an argument of the program; None for any other value.

    The body of a loop and a `jit` within one are functions whose arguments say nothing.

    Returns:
        The sizes of the axes of a mesh, and the mesh axes of each axis of the array.
    """
    function: Any = getattr(getattr(value, "owner", None), "owner", None)
    attributes: Any = getattr(function, "attributes", ())
    if "arg_attrs" not in attributes:
        return None
    of_argument = attributes["arg_attrs"][value.arg_number]
    text = str(of_argument["sdy.sharding"]) if "sdy.sharding" in of_argument else ""
    if (match := _SHARDING.fullmatch(text)) is None:
        return None
    sizes = {name: int(n) for name, n in re.findall(r'"([^"]+)"=(\d+)', match[1])}
    axes = re.findall(r"\{([^}]*)\}", match[2])
    return sizes, [tuple(re.findall('"([^"]+)"', axis)) for axis in axes]
