"""The scopes and lines where an equation is written."""

import os
import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from optax_mp.core.jax_api import _jaxpr
from optax_mp.core.jax_api._contact import Ask, tried

_JAX = os.path.dirname(jax.__file__) + os.sep
_OPTAX_MP = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")
# Libraries of layers. The line of the model that calls them is more useful.
_LAYERS = {"e3nn_jax", "equinox", "flax", "haiku", "optax", "penzai"}
# Their frames stand between a function and its caller.
_DECORATORS = {"jaxtyping", "beartype", "typeguard", "wrapt"}
# Functions that a user calls to cast. JAX makes all other casts itself.
_CASTS = {"astype", "asarray", "array", "convert_element_type"}
# How JAX marks scopes of a backward pass, and calls the place of a function.
_TRANSPOSE, _SOURCE = "transpose", "func_src_info"


def scopes(equation: _jaxpr.Equation) -> str:
    """Return the names that `jax.named_scope` gave an equation, as JAX writes them.

    The outermost comes first, as in `transpose(jvp(layer))/attention`.
    """
    stack = equation.source_info.name_stack
    return str(stack) if stack.stack else ""


def _about_a_gradient(ask: Ask) -> bool:
    equations = jax.make_jaxpr(jax.grad(lambda x: x * x))(1.0).eqns
    return set(map(ask, equations)) == {True, False}


@tried(
    _about_a_gradient,
    False,
    "reports of precision take backward passes for forward passes",
)
def is_transposed(equation: Any) -> bool:
    """Return whether an equation is of the backward pass of a gradient."""
    parts = equation.source_info.name_stack.stack
    return any(_TRANSPOSE in str(getattr(part, "name", part)) for part in parts)


def source_line(equation: _jaxpr.Equation) -> str:
    """Return the line that an equation comes from, such as `model.py:12`, or `""`."""
    return source_lines(equation).user


def function_of(equation: _jaxpr.Equation) -> str:
    """Return the outer function where an equation was made, and the line in it.

    For an equation in the `update_fn` of `clip_by_global_norm`, that is
    `clip_by_global_norm (_clipping.py:96)`.
    """
    frames = [x for x in _frames(equation) if not x.file_name.startswith(_JAX)]
    closures = (x for x in frames if ".<locals>" in x.function_name)
    frame = next(closures, frames[0] if frames else None)
    if frame is None:
        return "a function"
    return f"{frame.function_name.partition('.<locals>')[0]} ({_line_of(frame)})"


class SourceLines(NamedTuple):
    """The lines that an equation comes from; `""` if one is unknown.

    Attributes:
        user: the innermost line outside of JAX and of libraries of layers; if there is
            none, the library's.
        library: the innermost line outside of JAX, if a library of layers has it.
    """

    user: str = ""
    library: str = ""


def source_lines(equation: _jaxpr.Equation) -> SourceLines:
    """Return the line of a model that an equation comes from, and a library's."""
    library = ""
    for frame in _frames(equation):
        package = _package(frame.file_name)
        if package is None:
            continue
        line = _line_of(frame)
        if package not in _LAYERS:
            return SourceLines(line, library)
        library = library or line
    return SourceLines(library)


def _package(file: str) -> str | None:
    """Return the installed package of a file; `""` for a user's, None for JAX's."""
    if file.startswith((_JAX, _OPTAX_MP)):
        return None
    parts = file.split(os.sep)
    for name in _PACKAGES:
        if name in parts[:-1]:
            package = parts[parts.index(name) + 1]
            return None if package in _DECORATORS else package
    return None if file.startswith(_STANDARD_LIBRARY) else ""


def is_promotion(equation: _jaxpr.Equation) -> bool:
    """Return whether JAX or a layer made a cast in order to promote its inputs."""
    names = []
    for frame in _frames(equation):
        # Its last part, because later versions of Python give qualified names.
        names.append(frame.function_name.split(".")[-1])
        if "promote" in frame.function_name:
            return True
        # A comprehension is a separate frame inside the function; skip it.
        if not frame.file_name.startswith(_JAX) and names[-1][0] != "<":
            break
    return bool(names) and _CASTS.isdisjoint(names)


@tried(
    lambda ask: __file__ in ask(jax.make_jaxpr(lambda x: x)(1.0).jaxpr),
    "",
    "reports may name lines of JAX",
)
def place_of(jaxpr: Any) -> str:
    """Return the name, file and line of the function that a jaxpr was traced from."""
    return getattr(getattr(jaxpr, "debug_info", None), _SOURCE, None) or ""


def is_function_of_jax(jaxpr: _jaxpr.AnyJaxpr) -> bool:
    """Return whether a jaxpr is of a function in JAX, such as `jnp.einsum`.

    JAX traces it once for all calls, so its lines belong to the first call.
    """
    return _JAX in place_of(_jaxpr.open_jaxpr(jaxpr)[0])


def _frames(equation: _jaxpr.Equation) -> Iterator[Any]:
    """Yield the frames of the trace where an equation was made, innermost first."""
    traceback = equation.source_info.traceback
    yield from traceback.frames if traceback is not None else ()


def _line_of(frame: Any) -> str:
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
