"""What the wrappers of this package tell the transformation directly inside.

They pass it one extra argument, a `Context`, if that transformation is of this package
as well. A transformation of others never sees it: the wrapper around it does what the
context asks for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from optax_mp.trees._descriptions import init_or_describe
from optax_mp.wrappers._mistakes import check_init_params

# Whether to take a step: a plain bool if it is not traced.
Choice = jax.Array | bool
_NAME = "optax_mp_context"  # the extra argument


# No pytree, so that it is handed on unchanged.
@dataclass(frozen=True, eq=False)
class Context:
    """What is around a transformation.

    Attributes:
        proceed: whether the step is taken. If it is not, all of its results are
            dropped, but for arrays in host memory: `offload` must not change these.
    """

    proceed: Choice = True


_NONE = Context()


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation of this package: its `update` may be given a `Context`."""

    @classmethod
    def of(cls, caller: str, init: Any, update: Any) -> "Transformation":
        """Return the transformation that a public function makes.

        Args:
            caller: the public function.
            init: makes the state, from params that are checked.
            update: takes a step.
        """

        def init_fn(params: Any) -> Any:
            return init_or_describe(init, check_init_params(params, caller))

        return cls(init_fn, update)


def context_of(extra_args: Mapping[str, Any]) -> Context:
    """Return the context among the extra arguments of an update."""
    return extra_args.get(_NAME, _NONE)


def with_context(extra_args: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return extra arguments with fields of the context set."""
    return {**extra_args, _NAME: replace(context_of(extra_args), **changes)}


def without_context(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that the user passed."""
    return {name: x for name, x in extra_args.items() if name != _NAME}
