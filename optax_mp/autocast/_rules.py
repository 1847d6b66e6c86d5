"""Which rule each operation follows: the default table, and the rules of a user.

A rule is for a primitive or for a `jax.named_scope`. A scope's rule wins over a
primitive's, and the outermost scope's over others.
"""

import functools
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from optax_mp.autocast._lattice import takes_part
from optax_mp.core import _dtypes
from optax_mp.core.jax_api._arrays import describe
from optax_mp.core.jax_api._jaxpr import Equation, is_literal
from optax_mp.jaxprs import _primitives
from optax_mp.jaxprs._control_flow import WITH_REGIONS, can_convert, hides_product
from optax_mp.jaxprs._search import jaxprs_within
from optax_mp.jaxprs._source import scopes

# A rule is one of these words, or a user's function. The docstring of `amp` says what
# they mean.
Rule = str | Callable[..., Any]
WORDS = ("low", "f32", "f32_if_f16", "widest", "rounded", "own", "as_written")
_NO_8_BITS = (
    "amp has no products in 8 bits: use bfloat16, or qwix, Transformer Engine or "
    "flax.linen.Fp8DotGeneralOp."
)
_WIDE = (np.float32, np.float64)
# Keys that do not name a primitive.
DEFAULT = "amp_default"
STOP = "amp_stop"
RECIPROCAL = "reciprocal"
BIAS_ADD = "bias_add"

default_amp_rules: Mapping[Any, Rule] = MappingProxyType(
    _primitives.AMP_WORDS
    # 1 / x, which is large if x is small.
    | {RECIPROCAL: "f32"}
    # x @ w + b: a float32 b would make everything that follows float32. It is added in
    # float32, so that its gradient is summed over the batch in float32.
    | {BIAS_ADD: "rounded"}
    # No rule is listed for scatters, which may sum many small gradients in one place;
    # products of sparse matrices, which are scatters inside; reductions by a function;
    # random bits, fft, linear algebra, kernels and callbacks, which have no 16-bit form
    # that is safe. Those named here have products inside; as they are listed, they
    # raise no warning. `linear_solve` is lineax's.
    | dict.fromkeys(
        ("custom_linear_solve", "linear_solve", "pallas_call", "ffi_call"), "as_written"
    )
    | {DEFAULT: "as_written"}
)


class Rules:
    """The rules of one `amp`, by name, checked."""

    def __init__(self, rules: Any, compute_dtype: DTypeLike) -> None:
        """Read `rules` as a user gives them."""
        dtype = _dtypes.floating_dtype(compute_dtype, "amp: `compute_dtype`")
        if _dtypes.bits(dtype) != 16:
            advice = "call `fun` itself." if _dtypes.bits(dtype) > 16 else _NO_8_BITS
            raise ValueError(
                "amp: expected `compute_dtype` to be bfloat16 or float16, got "
                f"{dtype.name}; {advice}"
            )
        if not isinstance(rules, Mapping):
            raise TypeError(
                "amp: expected `rules` to be a mapping such as default_amp_rules | "
                f"{{'tanh': 'f32'}}, got {rules!r}."
            )
        self.compute_dtype = dtype
        self._by_name: dict[str, Rule] = {DEFAULT: "as_written"}
        self._by_name |= {_name(key): rule for key, rule in rules.items()}
        # The name of a primitive never names a scope: the whole backward pass is in a
        # scope named "transpose".
        operations = {*default_amp_rules, *_primitives.primitive_names()}
        operations |= {
            key.name for key in rules if isinstance(key, _primitives.Primitive)
        }
        for name, rule in self._by_name.items():
            _check_rule(name, rule, name in operations)
        self._names_to_find = self._by_name.keys() - operations - {STOP}
        # A name without parts, such as `"/"`, would match everywhere.
        self._by_scope = [
            (name, parts, rule)
            for name, rule in ({STOP: "as_written"} | self._by_name).items()
            if name not in operations and (parts := scope_parts(name))
        ]
        # Cached, because many equations are in the same scope.
        self._in_scopes = functools.lru_cache(maxsize=1024)(self._look_up)

    def scope_rule_of(self, equation: Equation, around: Rule | None) -> Rule | None:
        """Return the rule of the scopes of an equation, or None without one.

        Args:
            equation: the equation.
            around: the rule of the scopes of the equations around it.
        """
        if around is not None:
            return around
        return next((rule for _, rule in self._in_scopes(scopes(equation))), None)

    def warnings_of_names(self, equations: Iterable[Equation]) -> tuple[str, ...]:
        """Return a warning of the names in the rules that no equation has."""
        missing = set(self._names_to_find)
        for equation in equations if missing else ():
            missing -= {name for name, _ in self._in_scopes(scopes(equation))}
            missing.discard(equation.primitive.name)
        if not missing:
            return ()
        return (
            "expected each name in `rules` to be a primitive of JAX, or a scope of the "
            f"function, got {', '.join(map(repr, sorted(missing)))}; correct it, or "
            "remove its rule.",
        )

    def _look_up(self, stack: str) -> list[tuple[str, Rule]]:
        """Return names and rules for the scopes in a name stack, outermost first."""
        parts = scope_parts(stack)
        return [
            (name, rule)
            for start in range(len(parts))
            for name, of_rule, rule in self._by_scope
            if parts[start : start + len(of_rule)] == of_rule
        ]

    def rule_of(
        self, equation: Equation, scope: Rule | None, adds_bias: bool = False
    ) -> tuple[Rule, str]:
        """Return the rule that an equation follows in a scope, and the reason.

        Rules are the words of `amp`, and `"regions"` and `"cast"`.
        """
        # With the rule `"as_written"`, an equation is bound whole, with its regions.
        if scope != "as_written":
            if can_convert(equation):
                return "regions", "inside"
            if equation.primitive.name == "convert_element_type":
                return "cast", "cast"
        rule, why = self._named(equation, scope, adds_bias)
        if self._is_unknown(equation, scope):
            return "as_written", "unknown"
        if not any(map(takes_part, equation.invars)):
            return "as_written", "inputs"
        if rule in ("f32", "as_written") or (callable(rule) and why == "rule"):
            return rule, why
        params = equation.params
        if jaxprs_within(equation) or params.get("out_dtype") is not None:
            return "as_written", "parameters"
        if rule == "low" and "preferred_element_type" in params:
            if not all(map(self._can_be_low, equation.outvars)):
                return "as_written", "parameters"
            if not _is_free(params.get("precision")):
                return "as_written", "precision"
            if not all(map(self._can_be_low, equation.invars[:2])):
                return "as_written", "inputs"
        return rule, why

    def _named(
        self, equation: Equation, scope: Rule | None, adds_bias: bool
    ) -> tuple[Rule, str]:
        """Return the rule, and whether it comes from the scope or the primitive."""
        name = equation.primitive.name
        own, why = self._by_name.get(name, self._by_name[DEFAULT]), "rule"
        # Reciprocals and biases are exceptions from the default "widest" only. A user's
        # rule for `div` or `add` is for all of them.
        if own == "widest" and name == "div" and is_literal(equation.invars[0]):
            own = self._by_name.get(RECIPROCAL, own)
        if own == "widest" and adds_bias:
            own = self._by_name.get(BIAS_ADD, own)
        # A scope decides only where amp has a choice: an fft has no 16-bit form. Beside
        # a function for a scope, there may be no other rules.
        has_choice = own != "as_written" or (
            callable(scope) and name in _primitives.AMP_WORDS
        )
        if scope is not None and has_choice:
            own, why = scope, "scope"
        if own == "f32_if_f16":
            own = "f32" if self.compute_dtype == "float16" else "widest"
        return own, why

    def _is_unknown(self, equation: Equation, scope: Rule | None) -> bool:
        """Return whether amp leaves products that it does not know how to change."""
        name = equation.primitive.name
        if name in self._by_name or name in WITH_REGIONS:
            return False
        if scope in ("as_written", "f32") or not _has_float32(equation):
            return False
        return hides_product(
            equation,
            lambda x: _has_float32(x) and _is_free(x.params.get("precision")),
        )

    def _can_be_low(self, atom: Any) -> bool:
        return takes_part(atom) or atom.aval.dtype == self.compute_dtype


def scope_parts(name: str) -> tuple[str, ...]:
    """Return the names in `transpose(jvp(layer))/attention`, outermost first."""
    return tuple(re.findall(r"[^/()]+", name))


def _has_float32(equation: Equation) -> bool:
    """Return whether an equation reads float32, also in a reference."""
    return any(getattr(x.aval, "dtype", None) in _WIDE for x in equation.invars)


def _is_free(precision: Any) -> bool:
    """Return whether a product of this `precision` may run in 16 bits."""
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(x in (None, lax.Precision.DEFAULT, lax.Precision.HIGH) for x in asked)


def _check_rule(name: str, rule: Any, is_operation: bool) -> None:
    """Raise if a rule is unknown, or an operation cannot have it."""
    if rule not in WORDS and not (callable(rule) and isinstance(rule, Hashable)):
        advice = _NO_8_BITS if rule in ("f8", "not_f8") else "give it one of these."
        raise ValueError(
            f"amp: expected the rule of {name!r} to be one of {', '.join(WORDS)}, or a "
            f"hashable function, got {rule!r}; {advice}"
        )
    if is_operation and name in (*WITH_REGIONS, "convert_element_type"):
        raise ValueError(
            "amp: expected no rule for casts, loops and other calls, got one for "
            f"{name!r} in `rules`; remove it, or give it to a `jax.named_scope` around "
            "them."
        )


def _name(key: Any) -> str:
    name = key.name if isinstance(key, _primitives.Primitive) else key
    if not isinstance(name, str):
        raise TypeError(
            "amp: expected each key of `rules` to be a primitive, its name, or that "
            f"of a `jax.named_scope`, got {key!r}; remove it."
        )
    return name


def call_function(
    rule: Callable[..., Any], low: Any, equation: Equation, inputs: Sequence[Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the inputs and parameters that a user's function gives an equation."""
    originals = tuple(atom.aval.dtype for atom in equation.invars)
    # A function may ask a literal for its dtype.
    pairs = zip(inputs, originals, strict=True)
    given = [x if isinstance(x, Array) else jnp.asarray(x, dtype) for x, dtype in pairs]
    returned = rule(low, originals, *given, **equation.params)
    match returned:
        case (list() | tuple() as invars, dict() as params):
            if [*map(_kind, invars)] == [*map(_kind, given)]:
                return invars, params
    raise TypeError(
        f"amp: expected the rule of {equation.primitive.name} to return a list of "
        f"{', '.join(map(describe, given))} and a dictionary, got {returned!r}; change "
        "only floating dtypes of the inputs."
    )


def _kind(x: Any) -> tuple[Any, Any]:
    dtype = "floating" if _dtypes.is_floating(x) else getattr(x, "dtype", None)
    return getattr(x, "shape", None), dtype
