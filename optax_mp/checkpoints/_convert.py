"""convert_opt_state: a run's state for another form of the same optimizer."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp.averages import AverageState
from optax_mp.compact import LowBitState, Quantized, StochasticRoundingState
from optax_mp.compact._codes import decode, encode
from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.jax_api._jaxpr import TracedCall
from optax_mp.core.masters import _access, _storage
from optax_mp.core.masters._edits import follow_edits
from optax_mp.core.scaling._state import LossScaleState
from optax_mp.core.trees import _boxes, _tree
from optax_mp.core.trees._leaves import Leaves, is_absent
from optax_mp.core.trees._states import find_states, map_states
from optax_mp.core.wrappers._protocol import as_transformation

_CALLER = "convert_opt_state"
_CAST_FIRST = (
    "it misses its master by the rounding of an update, or was edited. As `params`, "
    "pass `optax_mp.master_params(opt_state, params)`, cast; or, to keep an edit, pass "
    "`optax_mp.follow_params(opt_state, params)` as `opt_state`."
)
_WRAPPERS = (
    _storage.MixedPrecisionState,
    LowBitState,
    StochasticRoundingState,
    LossScaleState,
    AverageState,
)


def convert_opt_state(
    opt_state: optax.OptState,
    params: optax.Params,
    from_tx: optax.GradientTransformation,
    to_tx: optax.GradientTransformation,
) -> optax.OptState:
    """Return a run's optimizer state in the form that another transformation keeps.

    Both transformations must have the same optimizer inside. Around it, each may have
    `mixed_precision` with any storage, `low_bit_state`, `stochastic_rounding`,
    `with_average`, `offload` and a loss scale, or none of them. Counts are copied;
    masters and moments are stored as in the new form, and in the same memory, of the
    device or the host. Parts that only the new form has, such as a loss scale, start as
    in its `init`, and an average starts at the weights. A loss scale with another start
    or hysteresis starts again; new bounds hold from the next step on. Parts that only
    the old form had are dropped. Nested averages are matched from the inside, whatever
    their decays: a new average around the others starts at the weights, and the
    outermost is the first to be dropped.

    This function does not change the params. Three conversions need that:

    - to `Split` after 16-bit updates: a few params then differ from their rounded
      master, and an error says how to cast them first;
    - from float32 params to 16-bit params: build `to_tx` with `param_dtype`, so that
      the masters keep every bit, convert, then cast the params;
    - to plain float32: continue with `master_params(opt_state, params)` as the params.

    Convert stacked states, which `jax.vmap(tx.init)` makes for `release_gradients`,
    under `jax.vmap` as well. Under a trace params are not checked: before you convert
    to `Split`, cast the masters.

    Args:
        opt_state: the state of the run, made by `from_tx`; or its `nnx.Optimizer`.
        params: the params that belong to `opt_state`, or their `nnx.Module`.
        from_tx: the transformation that the run has used so far.
        to_tx: the transformation to continue with.

    Returns:
        A state of `to_tx`. It shares no buffer with `opt_state` or `params`.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if `opt_state` is not a state of `from_tx`, or if the two
            transformations have different optimizers inside.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
        >>> adamw = optax.adamw(1e-3)
        >>> before = optax_mp.mixed_precision(adamw)
        >>> state = before.init(params)
        >>> after = optax_mp.mixed_precision(
        ...     optax_mp.low_bit_state(adamw), storage=optax_mp.Split(bits=8)
        ... )
        >>> state = optax_mp.convert_opt_state(state, params, before, after)
        >>> state.master_params["w"].dtype.name
        'int8'
    """
    given = opt_state, params
    names = "opt_state, params, from_tx, to_tx"
    opt_state, params, leaves = _access.read_arguments(
        opt_state, params, _CALLER, names
    )
    from_tx = as_transformation(from_tx, _CALLER, "from_tx")
    to_tx = as_transformation(to_tx, _CALLER, "to_tx")
    for _, state in find_states(opt_state, _storage.MixedPrecisionState):
        _storage.counter_of(state, _CALLER)
    _check_made_by(opt_state, from_tx, params)
    with jax.numpy_dtype_promotion("standard"):
        converted = _convert(opt_state, leaves, params, from_tx, to_tx)
    # Arrays that were not changed are copied, so that all three can be donated.
    converted = _tree.copy_shared(converted, (opt_state, params))
    return _in_boxes(converted, *given, from_tx, to_tx)


def _convert(
    opt_state: optax.OptState, leaves: Leaves, params: Any, from_tx: Any, to_tx: Any
) -> optax.OptState:
    """Return the state in the new form, which may share arrays with the old one."""
    own = list(_wrappers_in(opt_state))
    has_masters = any(
        isinstance(x, _storage.MixedPrecisionState) and jax.tree.leaves(x.master_params)
        for _, x in own
    )
    weights = _masters(opt_state, leaves) if has_masters else params
    if any(isinstance(x, StochasticRoundingState) for _, x in own):
        # As the inner optimizer saw them.
        weights = _tree.cast_floating(weights, jnp.float32)
    with _no_warning_of_cast_params():
        # The run's masters will replace the ones made here.
        template = to_tx.init(params)
    if not find_states(template, _storage.MixedPrecisionState):
        # Without masters the moments have the dtype of the params that `init` is given.
        template = to_tx.init(_arrays.to_device_tree(weights))
    name = "that of `to_tx`, which must have the same optimizer inside"
    inner = Leaves.of(_unwrap(template), caller=_CALLER, name=name)
    values = inner.match_arrays(
        _unwrap(opt_state), "the optimizer's part of `opt_state`"
    )
    starts = _starts_of_scales(from_tx, params)
    old = [_Old(at, x, starts.pop(0) if _is_scale(x) else []) for at, x in own]
    new = list(_wrappers_in(template))
    filled = _fill(template, iter(values), _Wrappers(old, new, weights, leaves))
    return _replace_masters(filled, weights, leaves) if has_masters else filled


@contextlib.contextmanager
def _no_warning_of_cast_params() -> Iterator[None]:
    """Ignore the warning of masters that begin at params which were cast."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mixed_precision: param .* at `init`, which")
        yield


def _in_boxes(
    converted: Any, opt_state: Any, params: Any, from_tx: Any, to_tx: Any
) -> optax.OptState:
    """Return the state in NNX's boxes, if `from_tx` made the old one of such params.

    `nnx.Optimizer` gives `init` and `update` params without boxes.
    """
    params = _boxes.params_of(params, opt_state)
    are_plain = jax.tree.structure(params) == jax.tree.structure(_boxes.plain(params))
    if are_plain or _boxes.is_nnx_optimizer(opt_state):
        return converted

    def structure_by(tx: Any) -> Any:
        with _no_warning_of_cast_params():
            return jax.tree.structure(jax.eval_shape(tx.init, params))

    if jax.tree.structure(opt_state) != structure_by(from_tx):
        return converted
    return jax.tree.unflatten(structure_by(to_tx), jax.tree.leaves(converted))


# What a loss scale starts with, by its settings. Its bounds are not among these.
_STARTS = "scale", "finite_count", "hysteresis_left"


def _is_scale(state: Any) -> bool:
    return isinstance(state, LossScaleState)


def _starts_of_scales(tx: Any, params: Any) -> list[Any]:
    """Return what each loss scale of a transformation starts with."""

    def starts(params: Any) -> list[Any]:
        states = find_states(tx.init(params), LossScaleState)
        return [[getattr(state, name) for name in _STARTS] for _, state in states]

    # In one program, so that the rest of the state is not computed.
    return TracedCall.of(starts, params).run()


def _wrappers_in(
    tree: _tree.PyTree, at: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the states of our wrappers, outermost first, each with its position.

    The position is the path in the state of the bare optimizer. Wrappers directly
    around each other have the same position, and so have the wrappers of two forms
    around the same part.
    """
    nodes = tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, _WRAPPERS))
    for path, node in nodes:
        if isinstance(node, _WRAPPERS):
            yield (*at, *path), node
            yield from _wrappers_in(node.inner_state, (*at, *path))


# State in host memory is brought to the device leaf by leaf and put back, so that the
# device never holds all of it.
def _masters(opt_state: optax.OptState, leaves: Leaves) -> _tree.PyTree:
    """Return the masters, in the memory where the state has them."""
    values = list(leaves.values)
    states = [
        state for _, state in find_states(opt_state, _storage.MixedPrecisionState)
    ]
    for i, _, stored, master in _access.decode_all(leaves, states):
        is_kept_there = any(map(_arrays.is_on_host, jax.tree.leaves(stored)))
        values[i] = _arrays.to_host(master) if is_kept_there else master
    return leaves.unflatten(values)


def _unwrap(state: optax.OptState) -> _tree.PyTree:
    """Return the state of the optimizer inside, dequantized."""

    def unwrap(node: Any) -> Any:
        if not isinstance(node, Quantized):
            return node.inner_state
        return _arrays.with_memory_of(decode(_arrays.to_device_tree(node)), node.codes)

    return map_states(unwrap, state, (*_WRAPPERS, Quantized))


@dataclass(frozen=True)
class _Old:
    """The state of a wrapper in the old form.

    Attributes:
        position: as `_wrappers_in` yields it.
        state: the state.
        starts: what it started with, if it is a loss scale.
    """

    position: tuple[Any, ...]
    state: Any
    starts: list[Any]


def _match(
    old: Sequence[_Old], new: Sequence[tuple[tuple[Any, ...], Any]], kind: type
) -> list[_Old | None]:
    """Return for each new wrapper of a kind the old one that it continues, or None.

    It is the old one at the same position. Wrappers around each other are matched from
    the inside. If no new one has the position of an old one, those inside or around
    that position continue it.
    """
    old = [x for x in old if isinstance(x.state, kind)]
    positions = [at for at, x in new if isinstance(x, kind)]
    moved = [x for x in old if x.position not in positions]
    matched: list[_Old | None] = []
    for i, at in enumerate(positions):
        within = positions[i + 1 :].count(at)
        same = [x for x in old if x.position == at]
        if same:
            matched.append(same[-1 - within] if within < len(same) else None)
            continue
        near = [x for x in moved if _is_within(at, x.position)]
        near = near[-1:] or [x for x in moved if _is_within(x.position, at)]
        matched.append(near[0] if near else None)
    return matched


def _is_within(inner: tuple[Any, ...], outer: tuple[Any, ...]) -> bool:
    return inner[: len(outer)] == outer


class _Wrappers:
    """The old wrappers' states, which fill in the new wrappers' states.

    Wrappers of one kind may be nested, or in the groups of a partition. Averages and
    flags are matched by param, averages from the innermost on. All other fields are
    matched by position.
    """

    def __init__(
        self,
        old: Sequence[_Old],
        new: Sequence[tuple[tuple[Any, ...], Any]],
        weights: _tree.PyTree,
        leaves: Leaves,
    ) -> None:
        self._leaves = leaves
        kinds = LowBitState, StochasticRoundingState, LossScaleState
        self._matched = {kind: iter(_match(old, new, kind)) for kind in kinds}
        self._starts = Leaves.of(weights, caller=_CALLER).values
        self._exact: list[list[Any]] = [[] for _ in leaves.values]
        self._counts: list[Any] = [None for _ in leaves.values]
        averages, wanted = (
            self._averages_in(states)
            for states in ([x.state for x in old], [x for _, x in new])
        )
        # Those that are missing are the outermost.
        self._averages: list[list[Any]] = [
            [*[None] * (len(b) - len(a)), *a[max(0, len(a) - len(b)) :]]
            for a, b in zip(averages, wanted, strict=True)
        ]
        for state in [x.state for x in old]:
            if not isinstance(state, _storage.MixedPrecisionState):
                continue
            stored = leaves.match(state.master_params, "the masters")
            for i, _ in _present(stored):
                exact = state.last_exact
                if exact is None:
                    # `Split` rounds ties differently from a cast. That is not an edit.
                    master = _arrays.to_device_tree(self._starts[i])
                    param = _access.put_beside(leaves.values[i], master)
                    followed = follow_edits(master, param)
                    exact = jnp.array_equal(followed, master, equal_nan=True)
                self._exact[i].append(exact)
                self._counts[i] = state.step_count

    def _averages_in(self, states: Sequence[Any]) -> list[list[Any]]:
        """Return the averages of each param with their counts, outermost first."""
        found: list[list[Any]] = [[] for _ in self._leaves.values]
        for state in states:
            if isinstance(state, AverageState):
                average = self._leaves.match(state.average, "the average")
                for i, x in _present(average):
                    found[i].append((x, state.step_count))
        return found

    def fields_for(self, node: Any) -> Any:
        """Return a new wrapper's state with the run's fields."""
        if isinstance(node, AverageState):
            return self._with_average(node)
        if isinstance(node, _storage.MixedPrecisionState):
            return self._with_own_fields(node)
        (matched,) = (x for kind, x in self._matched.items() if isinstance(node, kind))
        old = next(matched)
        if old is None:
            return node
        # Of the new type, which may say other settings.
        fields = old.state._asdict() | {"inner_state": node.inner_state}
        if _is_scale(node):
            # An old value may contradict a new constant: then it starts again.
            now = [getattr(node, name) for name in _STARTS]
            is_kept = jnp.array(list(map(jnp.array_equal, old.starts, now))).all()
            for name, start in zip(_STARTS, now, strict=True):
                fields[name] = jnp.where(is_kept, fields[name], start)
        return type(node)(**fields)

    def _with_average(self, state: AverageState) -> AverageState:
        """Return a state with the run's average, or else the weights."""
        values, count = [], state.step_count
        for i, old in _present(self._leaves.match(state.average, "the average")):
            new = self._starts[i]
            if (kept := self._averages[i].pop(0)) is not None:
                new, count = kept
            values.append(
                _arrays.with_memory_of(
                    _arrays.to_device_tree(new).astype(old.dtype), old
                )
            )
        # Keep the structure: one `MaskedNode` may hide a whole branch of params.
        average = jax.tree.unflatten(jax.tree.structure(state.average), values)
        return state._replace(average=average, step_count=count)

    def _with_own_fields(
        self, state: _storage.MixedPrecisionState
    ) -> _storage.MixedPrecisionState:
        """Return a state with a `last_exact` that holds for all of its params.

        It also continues the run's random numbers.
        """
        stored = self._leaves.match(state.master_params, "the masters")
        present = [i for i, _ in _present(stored)]
        flags = [flag for i in present for flag in self._exact[i]]
        if state.last_exact is not None and flags:
            last_exact = jnp.array(_arrays.to_device_tree(flags)).all()
            last_exact = _arrays.with_memory_of(last_exact, state.last_exact)
            state = state._replace(last_exact=last_exact)
        counts = [self._counts[i] for i in present if self._counts[i] is not None]
        if state.step_count is not None and counts:
            state = state._replace(step_count=counts[0])
        return state


def _present(values: list[Any]) -> list[tuple[int, Any]]:
    """Return the index and the value of each param that has a value."""
    return [(i, x) for i, x in enumerate(values) if not is_absent(x)]


def _fill(
    template: _tree.PyTree, values: Iterator[Any], wrappers: _Wrappers
) -> _tree.PyTree:
    """Return the template with `values` for the leaves of the bare optimizer.

    Args:
        template: a state of the new form.
        values: the leaves of the bare optimizer's state, in order.
        wrappers: fills in the fields of our wrappers.
    """

    def fill(node: Any) -> Any:
        if isinstance(node, Quantized):
            codes = encode(
                _arrays.to_device_tree(next(values)), _arrays.to_device_tree(node), None
            )
            return _arrays.with_memory_of(codes, node)
        if not isinstance(node, _WRAPPERS):
            # `map` visits leaves in the order that `values` are in.
            value = next(values)
            if _dtypes.is_floating(value) and value.dtype != node.dtype:
                value = _arrays.to_device_tree(value).astype(node.dtype)
            return _arrays.with_memory_of(value, node)
        node = wrappers.fields_for(node)
        return node._replace(inner_state=_fill(node.inner_state, values, wrappers))

    kinds = (*_WRAPPERS, Quantized)
    return jax.tree.map(fill, template, is_leaf=lambda node: isinstance(node, kinds))


def _replace_masters(opt_state: Any, weights: _tree.PyTree, leaves: Leaves) -> Any:
    """Return a state of the new form with the masters of the run."""
    values = leaves.match(weights, "the masters")

    def replace(i: int, storage: _storage.Storage, old: jax.Array) -> jax.Array:
        master = _arrays.to_device_tree(values[i]).astype(old.dtype)
        if storage.param_is_part:
            where = f"{_CALLER}: expected the master of {_tree.spell(leaves.paths[i])}"
            param = leaves.values[i]
            _access.check_param_is_rounded(storage, master, param, where, _CAST_FIRST)
        return master

    return _access.map_masters(replace, opt_state, leaves)


def _check_made_by(state: Any, tx: optax.GradientTransformation, params: Any) -> None:
    # Only traced, because a call of `init` would allocate a second state.
    expected = TracedCall.of(tx.init, params).unflatten_outputs()
    _refuse_stacked(state, expected)
    kept, wanted = (
        [
            _storage.storage_of(node, _CALLER)
            for _, node in find_states(x, _storage.MixedPrecisionState)
        ]
        for x in (state, expected)
    )
    if kept != wanted:
        names = [", ".join(map(str, x)) for x in (wanted, kept)]
        want, got = (f"masters in {x}" if x else "no masters" for x in names)
        raise ValueError(
            f"{_CALLER}: expected `opt_state` with {want}, as `from_tx` makes it, got "
            f"{got}; pass the transformation that made it as `from_tx`."
        )
    # Dtypes of floats may differ: some optimizers change them at their first step.
    made = Leaves.of(expected, caller=_CALLER, name="a state of `from_tx`")
    made.match_arrays(state, "`opt_state`")


def _refuse_stacked(state: Any, expected: Any) -> None:
    """Raise if numbers of a state are arrays, as `jax.vmap(tx.init)` makes them."""
    wanted = {
        path: x for path, x in tree_leaves_with_path(expected) if not jnp.shape(x)
    }
    for path, x in tree_leaves_with_path(state):
        if path in wanted and len(jnp.shape(x)) > 0:
            raise ValueError(
                f"{_CALLER}: expected `opt_state` as `from_tx.init` makes it, got "
                f"{_arrays.describe(x)} at {_tree.spell(path)}, a scalar there; "
                "convert a state of `jax.vmap(tx.init)` by `jax.vmap` over state and "
                "params."
            )
