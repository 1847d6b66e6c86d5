"""The protocol between wrappers: what each tells the transformation directly inside.

A wrapper of this package is a `Transformation`. It calls the optimizer that it wraps by
`update_inner`, and passes on the extra arguments that it was given. Among these is one
of this package, a `Context`. It says whether the step is taken, which only wrappers
outside may know: a loss scale, or `mixed_precision` behind a link. Transformations of
others never see it.

You can write a wrapper of your own in the same way. This one counts the steps that are
taken, whichever wrapper around it decides that:

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import optax_mp
    >>> from optax_mp.core.wrappers import _protocol
    >>> def counted(inner):
    ...     def init(params):
    ...         return jnp.zeros((), jnp.int32), inner.init(params)
    ...
    ...     def update(updates, state, params=None, **extra_args):
    ...         count, state = state
    ...         proceed = _protocol.context_of(extra_args).proceed
    ...         updates, state = _protocol.update_inner(
    ...             inner, "counted", updates, state, params, **extra_args
    ...         )
    ...         return updates, (count + proceed, state)
    ...
    ...     return _protocol.Transformation.of("counted", init, update)
    >>> tx = optax_mp.dynamic_loss_scale(counted(optax.adam(1e-3)))
    >>> params = jnp.ones(3)
    >>> state = tx.init(params)
    >>> for gradient in (jnp.ones(3), jnp.full(3, jnp.inf), jnp.ones(3)):
    ...     updates, state = tx.update(gradient, state, params)
    >>> int(state.inner_state[0])
    2
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp.core.jax_api._arrays import describe, is_on_host
from optax_mp.core.trees import _tree
from optax_mp.core.trees._descriptions import init_or_describe
from optax_mp.core.wrappers._mistakes import check_init_params
from optax_mp.core.wrappers._updates import Choice, choose_if_on_host

_NAME = "optax_mp_context"  # the extra argument


# Not a pytree, so that it is handed on unchanged.
@dataclass(frozen=True, eq=False)
class Context:
    """What is around a transformation.

    Attributes:
        proceed: bool `[]` or a plain bool, whether the step is taken. If it is not, all
            of its results are dropped, except arrays in host memory: `offload` must not
            change these.
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


def with_context(extra_args: Mapping[str, Any], context: Context) -> dict[str, Any]:
    """Return extra arguments with a context."""
    return {**extra_args, _NAME: context}


def without_context(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that the user passed."""
    return {name: x for name, x in extra_args.items() if name != _NAME}


def as_transformation(
    inner: Any, caller: str, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` as a transformation that takes extra arguments, or raise.

    Args:
        inner: the user's argument, which should be an optax transformation.
        caller: the public function that the user called, for error messages.
        name: the name of its argument, for error messages.
    """
    if isinstance(inner, optax.MultiSteps):
        # Its `gradient_transformation()` would drop the extra arguments.
        update: Any = inner.update
        return optax.GradientTransformationExtraArgs(inner.init, update)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"{caller}: expected `{name}` to be an optax gradient transformation, such "
            f"as `optax.adamw(1e-3)`, got a {type(inner).__name__}; call its factory."
        )
    return optax.with_extra_args_support(inner)


def update_inner(
    inner: Any, caller: str, grads: Any, state: Any, params: Any, /, **extra_args: Any
) -> tuple[Any, Any]:
    """Return (updates, new state) of `inner`, which is told what is around it."""
    if isinstance(inner, Transformation):
        return inner.update(grads, state, params, **extra_args)
    proceed = context_of(extra_args).proceed
    updates, new = inner.update(grads, state, params, **without_context(extra_args))
    _check_shapes(caller, "the update", updates, params)
    _check_shapes(caller, "the state", new, state)
    if proceed is not True and any(map(is_on_host, jax.tree.leaves(state))):
        # An `offload` inside of it was not told that the step may be skipped.
        new = jax.tree.map(partial(choose_if_on_host, proceed), new, state)
    return updates, new


def _check_shapes(
    caller: str, what: str, made: _tree.PyTree, given: _tree.PyTree
) -> None:
    """Raise unless what `inner` made has the shapes of what it was given.

    Skipped if one of them has more leaves, as the state of `optax.monitor` has after
    its first step.
    """
    new, old = jax.tree.leaves(made), tree_leaves_with_path(given)
    if len(new) != len(old):
        return
    for x, (path, y) in zip(new, old, strict=True):
        if getattr(x, "shape", ()) != getattr(y, "shape", ()):
            raise ValueError(
                f"{caller}: expected {what} made by `inner` at {_tree.spell(path)} to "
                f"have the shape of {describe(y)}, got {describe(x)}; call `init` "
                "again for other params."
            )
