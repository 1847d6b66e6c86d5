"""Which arrays of a state are quantized, and how.

`low_bit_state` decides this at `init`, by tracing the optimizer's own `init` and
`update`. Some arrays must stay in full precision, or nearly.

Quantization changes every value a little at every step. In a moment the change fades,
or makes one step a little longer or shorter. In three kinds of arrays it does more
harm. A trace of the update finds them in any optimizer:

- A *history*: a step replaces some of its entries and copies the others, as L-BFGS does
  with its differences of params and of gradients. Copies would be rounded again at each
  step, and the new entries are small differences, which need all bits of their terms.
- A *position*: a sum over the run that each step computes the params from, as MADGRAD
  and COCOB do: the new params are the initial ones plus a function of such sums. An
  error in the sum moves the params, however small the learning rate is. Such a state
  has an *anchor*: the params at the start, or at some step.
- A *record*: an array that no update reads, but the user's loop does:
  `optax.value_and_grad_from_state` reads the gradient that a line search keeps.

If the trace does not decide, the array stays in full precision. That costs memory,
which `memory_report` shows; a wrong guess would cost accuracy, silently. An example is
Adagrad's sum in a chain that also pulls the params towards their initial values.

The `Flow` of an output of a traced function says which inputs it is `reached_by`, which
of those are `decayed` (multiplied by a constant below 1, as in a moving average), and
which arrive `copied` entry by entry, or `concatenated` with entries of others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._dtypes import floating_dtype
from optax_mp._jax._dataflow import Flow, depending_outputs, flows, union_of
from optax_mp._jax._jaxpr import TracedCall, is_dynamic, is_output
from optax_mp._warnings import warn
from optax_mp.compact._blocks import choose_blocks, choose_group
from optax_mp.compact._signs import nonnegative_states
from optax_mp.trees._quantized import Code
from optax_mp.trees._tree import describe, is_array, is_floating, spell
from optax_mp.wrappers._mistakes import check_bool


@dataclass(frozen=True)
class CodeFormat:
    """How arrays are quantized; part of the type of a `LowBitState`.

    Attributes:
        bits: the width of codes.
        product_bits: the width of codes of arrays that reach a matrix product.
        block_size: how many values share a scale; None for a 16-bit float.
        has_shifts: whether small columns are shifted.
    """

    bits: int
    product_bits: int
    block_size: int | None
    has_shifts: bool = True

    @classmethod
    def from_settings(
        cls, bits: Any, block_size: Any, dtype: Any, product_bits: Any, has_shifts: Any
    ) -> "CodeFormat":
        """Check the arguments of `low_bit_state`."""
        has_shifts = check_bool("low_bit_state: `column_scales`", has_shifts)
        if dtype is not None:
            _check_float(dtype, bits, block_size)
            return cls(16, 16, None)
        if product_bits is None:
            product_bits = bits if has_shifts else 16
        for name, value in {"bits": bits, "product_bits": product_bits}.items():
            if not isinstance(value, Integral) or value not in (8, 16):
                raise ValueError(
                    f"low_bit_state: expected `{name}` to be 8 or 16, got {value!r}; "
                    "pass 8 for the smallest state, 16 for the more exact one."
                )
        is_whole = isinstance(block_size, Integral) and not isinstance(block_size, bool)
        if not is_whole or block_size < 1 or block_size & (block_size - 1):
            raise ValueError(
                "low_bit_state: expected `block_size` to be a power of two, got "
                f"{block_size!r}; leave it out for 32."
            )
        bits, product_bits = int(bits), max(int(bits), int(product_bits))
        return cls(bits, product_bits, int(block_size), has_shifts)

    def code(
        self, shape: tuple[int, ...], flow: Flow, i: int, is_unsigned: bool
    ) -> Code:
        """Return how an array is quantized.

        Args:
            shape: its shape.
            flow: what an update does with arrays.
            i: the index of this one there.
            is_unsigned: whether it is never negative.
        """
        if self.block_size is None:
            return BFLOAT16
        # A matrix product is one as Muon's. (An inner product averages errors.) A
        # factorization, as SOAP's, or a solver spreads the error of each entry over
        # whole rows and columns, and may divide by small differences.
        bits = self.product_bits if i in flow.multiplied else self.bits
        bits = 16 if i in flow.factored else bits
        dtype = f"uint{bits}" if is_unsigned else f"int{bits}"
        # An array in a root is never negative, even if that cannot be proved: the root
        # would be NaN.
        stays_positive = is_unsigned or i in flow.rooted
        axis, size = choose_blocks(shape, self.block_size)
        group = choose_group(shape, axis) if self.has_shifts else None
        return Code(dtype, axis, size, stays_positive, group)

    def __str__(self) -> str:
        if self.block_size is None:
            return "bfloat16"
        wide = f", {self.product_bits} in products" * (self.bits < self.product_bits)
        plain = ", no column scales" * (not self.has_shifts)
        return f"{self.bits} bits{wide}, blocks of {self.block_size}{plain}"


def _check_float(dtype: Any, bits: Any, block_size: Any) -> None:
    floating = floating_dtype(dtype, "low_bit_state: `dtype`")
    # In float16 the second moment of a gradient of 1e-4 would be zero.
    if floating != jnp.bfloat16 or (bits, block_size) != (8, 32):
        raise ValueError(
            "low_bit_state: expected `dtype` to be bfloat16, without `bits` and "
            f"`block_size`, got {floating} with bits={bits!r} and "
            f"block_size={block_size!r}; leave out `dtype` for codes in blocks."
        )


# An array of the same shape, without scales.
BFLOAT16 = Code("bfloat16")


def choose_codes(
    inner: Any, params: Any, state: Any, code_format: CodeFormat, min_size: int
) -> list[Code | None]:
    """Return how to quantize each leaf of `inner`'s state; None to leave it."""
    init = TracedCall.of(inner.init, params)
    update = trace_update(inner, params, state)
    leaves = jax.tree.leaves(state)
    # Only these are outputs of `init`, and the lists below have an entry for each.
    arrays = [i for i, leaf in enumerate(leaves) if is_dynamic(leaf)]
    large = [_is_large(leaves[i], min_size) for i in arrays]
    # Masters, averages and other arrays that start as the params are not moments.
    chosen = _without(large, depending_outputs(init.closed))
    never_negative = [False] * len(arrays)
    flow, numbers = Flow(), range(len(arrays))
    if isinstance(update, TracedUpdate):
        results, numbers = flows(update.closed), update.state_inputs
        flow = union_of(results)
        chosen = _without(chosen, need_full_precision(init, update, results))
        if update.is_exact:  # else signed codes, which can hold any values
            jaxprs = init.closed, update.closed
            never_negative = nonnegative_states(*jaxprs, update.param_count)
    elif any(chosen):
        check_without_update(init, large, state, params, update)
        warn(
            "low_bit_state: the state is stored in bfloat16, not in codes, because "
            f"tracing `inner.update(grads, state, params)` raised "
            f"{type(update).__name__}: {update}. Give its other arguments defaults."
        )
        code_format = CodeFormat(16, 16, None)
    facts = compress(zip(arrays, numbers, never_negative, strict=True), chosen)
    codes = {i: code_format.code(leaves[i].shape, flow, n, x) for i, n, x in facts}
    return [codes.get(i) for i in range(len(leaves))]


def _without(chosen: list[bool], excluded: list[bool]) -> list[bool]:
    return [a and not b for a, b in zip(chosen, excluded, strict=True)]


def _is_large(leaf: Any, min_size: int) -> bool:
    # Dequantized values are float32, and `inner` may expect the dtype that it made.
    is_float32 = is_array(leaf) and leaf.dtype == jnp.float32
    return is_float32 and leaf.ndim > 0 and leaf.size >= min_size


class TracedUpdate(NamedTuple):
    """One update of an optimizer, from (gradients, state, params) to (updates, state).

    Attributes:
        closed: the jaxpr.
        param_count: how many arrays the gradients have, and the params.
        state_inputs: the indices of the state among the inputs.
        is_exact: False if the update was given a made-up loss. Dependences are the same
            with any loss, but signs may differ.
    """

    closed: Any
    param_count: int
    state_inputs: range
    is_exact: bool


def trace_update(inner: Any, params: Any, state: Any) -> TracedUpdate | Exception:
    """Trace `inner.update`, or return the error that it raised.

    An optimizer that needs extra arguments gets those that optax's own optimizers take.
    Only the caller of `update` knows any others.
    """
    # Codes must not depend on this setting. Strict promotion is an error in `update`.
    with jax.numpy_dtype_promotion("standard"):
        try:
            return _trace(inner, params, state, {})
        except Exception as error:  # of any type: `inner` may be a user's code
            try:
                return _trace(inner, params, state, _made_up_arguments(params))
            except Exception:
                return error


def _trace(
    inner: Any, params: Any, state: Any, extra_args: dict[str, Any]
) -> TracedUpdate:
    def update(args: Any) -> Any:
        gradients, state, params = args
        updates, new_state = inner.update(gradients, state, params, **extra_args)
        # By path: a state may gain leaves at the first step, as `optax.monitor` does.
        new_leaves = dict(tree_leaves_with_path(new_state))
        return updates, [new_leaves[path] for path, _ in tree_leaves_with_path(state)]

    traced = TracedCall.of(update, (params, state, params))
    before = sum(map(is_dynamic, jax.tree.leaves(params)))
    inputs = range(before, len(traced.arrays) - before)
    if sum(map(is_output, traced.unflatten_outputs()[1])) != len(inputs):
        raise ValueError("its new state has other arrays")
    return TracedUpdate(traced.closed, before, inputs, not extra_args)


def _made_up_arguments(params: optax.Params) -> dict[str, Any]:
    # Optax's line searches refuse an argument that their `value_fn` does not name.
    def loss(params: Any, *_: Any, obj_fn: Any = None, grad_fn: Any = None) -> Any:
        leaves = [x for x in jax.tree.leaves(params) if is_floating(x)]
        return sum((jnp.sum(jnp.square(x)) for x in leaves), jnp.zeros(()))

    arguments = {"value": jnp.zeros(()), "grad": params, "value_fn": loss}
    return arguments | {"obj_fn": loss, "grad_fn": lambda params, *_: params}


def need_full_precision(
    init: TracedCall, update: TracedUpdate, results: list[Flow]
) -> list[bool]:
    """Return for each array of a state whether it must stay in full precision.

    Args:
        init: `inner.init`, from the params to the state.
        update: `inner.update`.
        results: the flow of its outputs.
    """
    # Arrays are numbered as inputs of the update, before and after it.
    numbers = update.state_inputs
    updates = results[: len(results) - len(numbers)]
    new = dict(zip(numbers, results[len(updates) :], strict=True))
    # An average fades. A sum or a maximum lasts; so does a copy of the last params or
    # gradient, until the next step.
    lasting = {i for i in numbers if i not in new[i].decayed}
    exact = _histories(new, lasting) | _records(updates, new, lasting)
    exact |= _positions(updates, new, lasting, _anchors(init, update, new))
    return [i in exact for i in numbers]


def _histories(new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the histories, and the arrays that their entries are made of."""
    histories: set[int] = set()
    for i, flow in new.items():
        # A history may also be several arrays, each copied to the next.
        previous = flow.copied & new.keys() - {i}
        if previous or i in flow.concatenated:
            histories |= {i} | previous
    # Arrays that entries are computed from, such as the last params, must be exact.
    while True:
        sources = {j for i in histories for j in new[i].reached_by & lasting}
        if sources <= histories:
            return histories
        histories |= sources


def _positions(
    updates: list[Flow], new: dict[int, Flow], lasting: set[int], anchors: set[int]
) -> set[int]:
    """Return the sums that, together with an anchor, give an update."""
    sums = {i for i in lasting if i in new[i].reached_by}
    anchored = [flow.reached_by for flow in updates if flow.reached_by & anchors]
    return {i for read in anchored for i in read & sums}


def _records(updates: list[Flow], new: dict[int, Flow], lasting: set[int]) -> set[int]:
    """Return the arrays that nothing else is computed from."""
    others = [(None, flow) for flow in updates] + [*new.items()]
    read = {j for i, flow in others for j in flow.reached_by if j != i}
    return lasting - read


def _anchors(init: TracedCall, update: TracedUpdate, new: dict[int, Flow]) -> set[int]:
    """Return the arrays that start as the params, and that only params replace."""
    params = set(range(update.state_inputs.stop, len(update.closed.in_avals)))
    initial = zip(new, flows(init.closed), strict=True)
    start_as_params = [i for i, flow in initial if flow.reached_by]
    return {i for i in start_as_params if new[i].reached_by <= params | {i}}


def check_without_update(
    init: TracedCall, large: Sequence[bool], state: Any, params: Any, error: Exception
) -> None:
    """Raise if a state may have such arrays, but its update could not be traced.

    Args:
        init: `inner.init`.
        large: for each array of its state whether it might be quantized.
        state: the result of `init`.
        params: its argument.
        error: why the update could not be traced.
    """
    # A position needs an anchor, and a history holds several params or gradients.
    largest = max((x.size for x in jax.tree.leaves(params) if is_array(x)), default=0)
    arrays = [x for x in tree_leaves_with_path(state) if is_dynamic(x[1])]
    pairs = zip(arrays, flows(init.closed), strict=True)
    for (path, leaf), flow in compress(pairs, large):
        if flow.copied or leaf.size > largest:
            what = "starts as a copy of a" if flow.copied else "is larger than any"
            raise ValueError(
                "low_bit_state: expected an update that can be traced, because the "
                f"state holds {describe(leaf)} at {spell(path)}, which {what} param, "
                f"as in L-BFGS, got {type(error).__name__}: {error}; give its "
                "other arguments defaults, or leave it out of `low_bit_state`."
            )
