"""A scan over layers whose backward pass takes the step of each layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from optax_mp._dtypes import at_least_float32
from optax_mp._jax._arrays import is_traced
from optax_mp._jax._contact import is_traced_by_jit
from optax_mp._jax._dataflow import depending_outputs
from optax_mp._jax._jaxpr import evaluate, is_literal
from optax_mp._tree import is_floating, is_inexact
from optax_mp.leafwise._take_step import take_step


def scan_layers(
    block: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Scan a block over stacked layers, as `jax.lax.scan` does.

    In the loss of `release_gradients`, the backward pass of this scan takes the
    optimizer's step of each layer. With arrays alone in `xs` it is `jax.lax.scan`, so
    one loss serves training with and without gradient release, and evaluation.

    Args:
        block: from the carry and a slice of `xs` to the new carry and an output. It
            may close over other params. Put here what changes the weights or the
            computation of a layer: casts, `jax.checkpoint`, `optax_mp.amp`, and
            `jax.vmap` over examples.
        carry: the first carry.
        xs: the layers that the loss was given, or a pytree of them and of arrays, such
            as `(layers, keys)`.
        reverse: whether to begin with the last layer.
        unroll: how many layers an iteration of the loop computes.

    Returns:
        The last carry, and the outputs, stacked.

    Raises:
        ValueError: if released layers are scanned within `jax.vmap` or `jax.grad`.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> layers = jnp.array([2.0, 3.0])
        >>> carry, _ = optax_mp.scan_layers(lambda x, w: (w * x, None), 1.0, layers)
        >>> float(carry)
        6.0
    """
    leaves, treedef = jax.tree.flatten(xs, is_leaf=_is_released)
    released = [x for x in leaves if _is_released(x)]
    if not released:
        return lax.scan(block, carry, xs, reverse=reverse, unroll=unroll)
    others = [x for x in leaves if not _is_released(x)]
    first, carry_def = jax.tree.flatten(carry)
    if any(is_traced(x) and not is_traced_by_jit(x) for x in (*first, *others)):
        raise ValueError(
            "scan_layers: released layers are scanned within `jax.vmap` or `jax.grad`, "
            "expected one scan for the whole batch; transform the layer instead, as "
            "`jax.vmap(layer, in_axes=(0, None))` in the block."
        )
    out_def: Any = None

    def flat_block(carry: list[Any], weights: list[Any], others: list[Any]) -> Any:
        nonlocal out_def
        rest, layers = iter(others), iter(weights)
        slices = [next(layers if _is_released(x) else rest) for x in leaves]
        result = block(carry_def.unflatten(carry), treedef.unflatten(slices))
        outputs, out_def = jax.tree.flatten(result)
        return outputs

    stacks = [x.stack for x in released]
    slices = [x.pinned(_at(x.layers, 0)) for x in stacks], _at(others, 0)
    first = _strong(flat_block, first, slices)
    layer = _Layer.of(flat_block, first, slices)
    scan = _stepping_scan(layer, stacks, len(first), reverse=reverse, unroll=unroll)
    return out_def.unflatten(
        scan([x.token for x in released], first, others, layer.consts)
    )


class Stack:
    """Stacked layers, their optimizer and its state.

    Attributes:
        tx: the optimizer.
        layers: a tree of arrays with a leading axis of layers.
        opt_state: the state of `tx` for each layer, stacked.
        shardings: how the weights of a layer are sharded, a tree like them; or None.
        is_stepped: whether the backward pass was traced, and so takes steps.
    """

    def __init__(self, tx: Any, layers: Any, opt_state: Any, shardings: Any) -> None:
        self.tx, self.layers, self.opt_state = tx, layers, opt_state
        self.shardings = shardings
        self.is_stepped = False
        # References, because a backward pass returns gradients and nothing else.
        self._refs = jax.tree.map(jax.new_ref, (layers, opt_state))

    def step(self, grads: Any, opt_state: Any, weights: Any) -> tuple[Any, Any]:
        """Return (weights, opt_state) of one layer after its step."""
        grads = as_differentiated(self.pinned(grads))
        return take_step(
            self.tx, grads, opt_state, weights, param_shardings=self.shardings
        )

    def store(self, layers: Any, opt_state: Any) -> None:
        """Keep what the steps of all layers made."""
        self.is_stepped = True
        refs, new = jax.tree.leaves(self._refs), jax.tree.leaves((layers, opt_state))
        for ref, x in zip(refs, new, strict=True):
            ref[...] = x

    def result(self) -> tuple[Any, Any]:
        """Return (layers, opt_state) after the backward pass."""
        return jax.tree.map(jax.freeze, self._refs)

    def pinned(self, tree: Any) -> Any:
        """Return arrays of one layer in row-major order, if shardings are known.

        To gather shards of the last axis, XLA for GPUs wants this axis first in memory,
        and transposes all layers and their state before and after the loop.
        """
        if self.shardings is None:
            return tree

        def pin(x: Any, sharding: Any) -> Any:
            if jnp.ndim(x) < 2:
                return x
            rows, spec = Layout(tuple(range(x.ndim))), sharding.spec
            # Without `shard_map`, the constraint would gather the array.
            return jax.shard_map(
                lambda part: with_layout_constraint(part, rows),
                mesh=sharding.mesh,
                in_specs=spec,
                out_specs=spec,
            )(x)

        return jax.tree.map(pin, tree, self.shardings)


@partial(jax.tree_util.register_dataclass, data_fields=["token"], meta_fields=["stack"])
@dataclass(frozen=True, eq=False)
class ReleasedLayers:
    """What a loss gets in place of stacked layers, for `scan_layers`.

    Attributes:
        token: a float32 scalar. The loss is differentiated by it, so that the backward
            pass of the scan runs.
        stack: the layers.
    """

    token: jax.Array
    stack: Stack


def as_differentiated(tree: Any) -> Any:
    """Return gradients as `value_and_grad` does: float32, None for what is not inexact.

    Args:
        tree: gradients, or weights in their place.
    """

    def widen(x: Any) -> Any:
        if not is_inexact(x):
            return None
        return x.astype(at_least_float32(x.dtype)) if is_floating(x) else x

    return jax.tree.map(widen, tree)


def _is_released(x: Any) -> bool:
    return isinstance(x, ReleasedLayers)


def _at(tree: Any, index: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree
    )


def _put(tree: Any, new: Any, index: Any) -> Any:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), tree, new
    )


def _strong(block: Any, carry: list[Any], slices: Any) -> list[Any]:
    """Return the first carry; Python numbers in it get the dtypes of the next one."""
    carry = list(map(jnp.asarray, carry))
    if not any(x.weak_type for x in carry):
        return carry
    after = jax.eval_shape(block, carry, *slices)[: len(carry)]
    return [
        x.astype(y.dtype) if x.weak_type else x
        for x, y in zip(carry, after, strict=True)
    ]


# What derivatives need of a layer, besides its inputs.
_SAVED, _SAME = -1, -2


@dataclass(frozen=True)
class _Layer:
    """A block of one layer with its derivative, as functions of lists of arrays.

    Inputs are the carry, the slices of one layer, and `consts`; outputs are the new
    carry, and what is stacked. Those that are floating are differentiated.

    Attributes:
        consts: what the block closes over.
        run: from inputs to outputs.
        saving: a jaxpr, from inputs to outputs and what derivatives need.
        pull_def: the structure of the function that computes derivatives.
        needs: for each array in it, which input it is, if that can be read again;
            `_SAVED`, or `_SAME` if it is the same in all layers.
        floats: which inputs are differentiated.
        float_outputs: which outputs are.
        treedef: of the inputs.
    """

    consts: list[Any]
    run: Callable[[list[Any]], list[Any]]
    saving: Any
    pull_def: Any
    needs: list[int]
    floats: list[bool]
    float_outputs: list[bool]
    treedef: Any

    @classmethod
    def of(cls, block: Any, carry: list[Any], slices: Any) -> "_Layer":
        """Trace a block."""
        # What it closes over and is differentiated becomes an input.
        convert: Any = jax.closure_convert
        closed, consts = convert(block, carry, *slices)
        inputs, treedef = jax.tree.flatten((carry, slices, list(consts)))
        floats = list(map(is_inexact, inputs))

        def run(inputs: Any) -> list[Any]:
            carry, slices, consts = treedef.unflatten(inputs)
            return closed(carry, *slices, *consts)

        def save(inputs: Any) -> Any:
            def of_floats(chosen: list[Any]) -> Any:
                outputs = run(_merge(floats, chosen, inputs))
                return list(filter(is_inexact, outputs)), outputs

            chosen = _choose(floats, inputs)
            _, pull, outputs = jax.vjp(of_floats, chosen, has_aux=True)
            return outputs, pull

        saving, (outputs, pull) = jax.make_jaxpr(save, return_shape=True)(inputs)
        varying = len(inputs) - len(consts)
        needs = _needs(saving, len(outputs), len(carry), varying)
        pull_def, float_outputs = jax.tree.structure(pull), map(is_inexact, outputs)
        return cls(
            list(consts),
            run,
            saving,
            pull_def,
            needs,
            floats,
            list(float_outputs),
            treedef,
        )

    def save(self, inputs: Any) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the outputs, and what is to be saved: of each layer, and of one."""
        count = len(self.float_outputs)
        made = evaluate(self.saving, jax.tree.leaves(inputs))
        both = list(zip(made[count:], self.needs, strict=True))
        saved = [x for x, need in both if need == _SAVED]
        return made[:count], saved, [x for x, need in both if need == _SAME]

    def pull(self, inputs: Any, saved: Any, same: Any, cotangents: Any) -> Any:
        """Return the gradients of the inputs, None where one is not differentiated.

        Args:
            inputs: with anything in the place of the carry.
            saved: what `save` returned for this layer.
            same: what it returned for one layer.
            cotangents: the gradients of the outputs that are differentiated.
        """
        leaves, rest = jax.tree.leaves(inputs), {_SAVED: iter(saved), _SAME: iter(same)}
        needed = [next(rest[i]) if i in rest else leaves[i] for i in self.needs]
        (grads,) = self.pull_def.unflatten(needed)(cotangents)
        nothing = [None] * len(leaves)
        return self.treedef.unflatten(_merge(self.floats, grads, nothing))


def _choose(flags: Sequence[bool], values: Any) -> list[Any]:
    return [x for flag, x in zip(flags, values, strict=True) if flag]


def _merge(flags: Sequence[bool], chosen: Any, others: Any) -> list[Any]:
    """Return `others`, with the values of `chosen` at the flags."""
    new = iter(chosen)
    return [next(new) if flag else x for flag, x in zip(flags, others, strict=True)]


def _needs(saving: Any, outputs: int, carry: int, varying: int) -> list[int]:
    """Return `_Layer.needs`.

    Args:
        saving: the jaxpr.
        outputs: how many of its outputs are those of the layer.
        carry: how many of its inputs are the carry.
        varying: how many differ from layer to layer.
    """
    jaxpr = saving.jaxpr
    place_of = {var: i for i, var in enumerate(jaxpr.invars) if i >= carry}
    inputs = [i < varying for i in range(len(jaxpr.invars))]
    varies = depending_outputs(saving, inputs)

    def need(at: int) -> int:
        atom = jaxpr.outvars[at]
        is_input = not is_literal(atom) and atom in place_of
        return place_of[atom] if is_input else _SAVED if varies[at] else _SAME

    return [need(at) for at in range(outputs, len(jaxpr.outvars))]


def _stepping_scan(
    layer: _Layer, stacks: list[Stack], carried: int, **settings: Any
) -> Callable[..., list[Any]]:
    """Return the scan, as a function of tokens, the first carry, slices and constants.

    Args:
        layer: the block of one layer.
        stacks: the layers.
        carried: how many arrays the carry has.
        settings: of `lax.scan`.
    """
    layers = [stack.layers for stack in stacks]

    def forward(run: Any, carry: Any, others: Any, consts: Any) -> tuple[Any, Any]:
        def body(carry: Any, slices: Any) -> tuple[Any, Any]:
            weights = list(map(Stack.pinned, stacks, slices[0]))
            outputs, saved = run((carry, (weights, slices[1]), consts))
            return outputs[:carried], (outputs[carried:], saved)

        return lax.scan(body, carry, (layers, others), **settings)

    @jax.custom_vjp
    def scan(tokens: Any, carry: Any, others: Any, consts: Any) -> list[Any]:
        def run(inputs: Any) -> Any:
            return layer.run(jax.tree.leaves(inputs)), None

        carry, (stacked, _) = forward(run, carry, others, consts)
        return [*carry, *stacked]

    def scan_fwd(tokens: Any, carry: Any, others: Any, consts: Any) -> Any:
        # XLA computes no more of this layer than is needed.
        first = carry, (_at(layers, 0), _at(others, 0)), consts
        *_, same = layer.save(first)
        carry, (stacked, saved) = forward(
            lambda inputs: layer.save(inputs)[:2], carry, others, consts
        )
        return [*carry, *stacked], (saved, same, others, consts)

    def scan_bwd(kept: Any, cotangents: Any) -> Any:
        saved, same, others, consts = kept
        flags = layer.float_outputs
        after = _choose(flags[:carried], cotangents[:carried])
        of_stacked = _choose(flags[carried:], cotangents[carried:])

        def body(loop: Any, slices: Any) -> tuple[Any, Any]:
            after, totals, layers, states = loop
            index, saved, others, of_stacked = slices
            weights = _at(layers, index)
            inputs = [0] * carried, (list(map(Stack.pinned, stacks, weights)), others)
            before, (grads, of_others), of_consts = layer.pull(
                (*inputs, consts), saved, same, [*after, *of_stacked]
            )
            stepped = map(Stack.step, stacks, grads, _at(states, index), weights)
            weights, new_states = map(list, zip(*stepped, strict=True))
            loop = (
                _choose(layer.floats[:carried], before),
                jax.tree.map(jnp.add, totals, of_consts),
                _put(layers, weights, index),
                _put(states, new_states, index),
            )
            return loop, of_others

        count = jax.tree.leaves(layers)[0].shape[0]
        totals = jax.tree.map(jnp.zeros_like, consts)
        loop = after, totals, layers, [stack.opt_state for stack in stacks]
        slices = jnp.arange(count), saved, others, of_stacked
        backward = settings | {"reverse": not settings["reverse"]}
        loop, of_others = lax.scan(body, loop, slices, **backward)
        before, of_consts, *stepped = loop
        for stack, *results in zip(stacks, *stepped, strict=True):
            stack.store(*results)
        nothing = [None] * carried
        before = _merge(layer.floats[:carried], before, nothing)
        return [jnp.zeros(())] * len(stacks), before, of_others, of_consts

    scan.defvjp(scan_fwd, scan_bwd)
    return scan
