"""What the wrappers of this package tell the transformation directly inside.

They pass it one extra argument, a `Context`, if that transformation is of this package
as well. A transformation of others never sees it: the wrapper around it does what the
context asks for.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

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
        is_in_take_step: whether `take_step` or a part of it copies arrays from host
            memory as the step needs them, so that `offload` must not.
        part_shardings: how `zero1` cut the params, by path and shape. Under `jit` with
            automatic sharding it is not known otherwise.
    """

    proceed: Choice = True
    is_in_take_step: bool = False
    part_shardings: Mapping[Any, Any] | None = None


class Plan(NamedTuple):
    """What of a state in host memory may be on the device, and how arrays are sharded.

    Attributes:
        min_size: arrays of fewer elements stay on the device.
        chunk_bytes: how many bytes of the others are on the device at a time, by
            `bytes_on_device`.
        shardings: of the leaves of the state under `jit`; None for those that are not
            known, which are copied whole.
    """

    min_size: int
    chunk_bytes: int
    shardings: Sequence[NamedSharding | None] = ()


class PartStep(NamedTuple):
    """A step of the shards that `zero1` makes of params that are replicated.

    Attributes:
        update: what takes the step.
        grads, opt_state, params, extra_args: its arguments, sharded.
        shardings: how the leaves of the state are sharded; None for those of no param,
            or in place of all if nothing is known.
        cuts: how the arrays are cut; its `gather` takes the new params and state.
    """

    update: Callable[..., tuple[Any, Any]]
    grads: Any
    opt_state: Any
    params: Any
    extra_args: dict[str, Any]
    shardings: list[NamedSharding | None] | None
    cuts: Any


_NONE = Context()


class Transformation(optax.GradientTransformationExtraArgs):
    """A transformation of this package: its `update` may be given a `Context`.

    Attributes:
        offloaded: the plan and the param shardings of the `offload` that it is, or that
            is directly inside.
        in_parts: from gradients, state, params and extra arguments to the `PartStep`
            that `zero1` and `with_average` take.
    """

    offloaded: tuple[Plan, Any] | None = None
    in_parts: Callable[[Any, Any, Any, dict[str, Any]], PartStep] | None = None

    @classmethod
    def around(
        cls, caller: str, inner: Any, init: Any, update: Any, *, is_leafwise: bool
    ) -> "Transformation":
        """Return a wrapper of `inner`.

        Args:
            caller: the public function that the user called.
            inner: the transformation inside.
            init: makes the state, from params that are checked.
            update: takes a step.
            is_leafwise: whether the engine takes it if the state may hold codes.
        """

        def init_fn(params: Any) -> Any:
            return init_or_describe(init, check_init_params(params, caller))

        @functools.wraps(update)
        def update_fn(
            updates: Any, state: Any, params: Any = None, **extra_args: Any
        ) -> tuple[Any, Any]:
            if is_leafwise:
                return update_by_engine(update, updates, state, params, extra_args)
            return update(updates, state, params, **extra_args)

        made = cls(init_fn, update_fn)
        made.offloaded = getattr(inner, "offloaded", None)
        return made


def update_by_engine(
    update: Callable[..., tuple[Any, Any]],
    updates: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
    shardings: Sequence[NamedSharding | None] = (),
) -> tuple[Any, Any]:
    """Return what an update does, leaf by leaf if its state may hold codes.

    Args:
        update: the update of a transformation.
        updates: its arguments, as the next three.
        state: see there.
        params: see there.
        extra_args: see there.
        shardings: of the leaves of the state under `jit`, where they are known.
    """
    if not may_hold_codes(state):
        return update(updates, state, params, **extra_args)
    # Not before: most programs have no use for it.
    from optax_mp.engine import update_leafwise

    return update_leafwise(update, updates, state, params, extra_args, shardings)


def may_hold_codes(state: Any) -> bool:
    """Return whether a state was made to hold low-bit codes.

    `low_bit_state` and `Split` say so in the types of their nodes, which are the same
    wherever an optimizer puts them. A dtype says nothing: any optimizer may count in
    16-bit integers.
    """
    structures = [jax.tree.structure(state)]
    while structures:
        structure = structures.pop()
        node = structure.node_data()
        if node is not None and getattr(node[0], "holds_codes", False):
            return True
        structures += structure.children()
    return False


def context_of(extra_args: Mapping[str, Any]) -> Context:
    """Return the context among the extra arguments of an update."""
    return extra_args.get(_NAME, _NONE)


def with_context(extra_args: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """Return extra arguments with fields of the context set."""
    return {**extra_args, _NAME: replace(context_of(extra_args), **changes)}


def without_context(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that the user passed."""
    return {name: x for name, x in extra_args.items() if name != _NAME}
