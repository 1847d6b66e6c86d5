"""Random programs: scenarios in frameworks' boxes, run in every way that JAX has."""

import dataclasses
import importlib.util
import warnings
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import as_bits, avals
from flax import linen, nnx, serialization
from hypothesis import assume
from hypothesis import strategies as st
from random_trees import (
    HIDDEN,
    LOW,
    Scenario,
    applied,
    by_axes,
    labels,
    leaves_of,
    scenarios,
)

import optax_mp

STEPS, BAD_STEP = 3, 1
FORMS = ("masters", "masters", "stochastic")


class Weight(equinox.Module):
    """A box as Equinox has it."""

    value: Any


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass
class Holder:
    """A pytree node of a user's, which no framework knows."""

    value: Any
    name: str = "held"

    def tree_flatten_with_keys(self):
        """Return the array, and its name as what is static."""
        return [(jax.tree_util.GetAttrKey("value"), self.value)], self.name

    @classmethod
    def tree_unflatten(cls, name, children):
        """Return the node again."""
        return cls(*children, name)


def named(x):
    with warnings.catch_warnings(action="ignore"):
        haliax = importlib.import_module("haliax")
    return haliax.named(x, tuple(f"axis{i}" for i in range(np.ndim(x))))


BOXES = {
    "none": lambda x: x,
    "nnx": nnx.Param,
    "state": nnx.Param,
    "linen": lambda x: linen.Partitioned(x, (None,) * np.ndim(x)),
    "equinox": Weight,
    "holder": Holder,
    "some": lambda x: Holder(x) if np.ndim(x) else x,
}
if importlib.util.find_spec("haliax"):
    BOXES["haliax"] = named

SCALED = {
    "dynamic": lambda tx: optax_mp.dynamic_loss_scale(tx, init_scale=2.0),
    "static": lambda tx: optax_mp.static_loss_scale(tx, 4.0),
    "link": lambda tx: optax.chain(optax_mp.dynamic_loss_scale(init_scale=2.0), tx),
}
AROUND = {
    "nothing": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "masked": lambda tx: optax.masked(tx, by_axes),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.set_to_zero()}, labels
    ),
    **SCALED,
}
WAYS = (
    *("eager",) * 6,
    "jit",
    "scan",
    "donate",
    "rates",
    "export",
    "saved",
    "described",
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A scenario, what is around its transformation and params, and how it runs."""

    scenario: Scenario
    form: str
    around: str
    box: str
    way: str

    def transformation(self, rate=None):
        tx = self.scenario.transformation(self.form, rate)
        return optax.with_extra_args_support(AROUND[self.around](tx))

    def boxed(self, tree):
        """Return a tree with each array, or absent gradient, in a box."""
        hidden = (optax.MaskedNode, type(None))
        leaves, treedef = jax.tree.flatten(
            tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
        box = BOXES[self.box]
        tree = treedef.unflatten(x if isinstance(x, hidden) else box(x) for x in leaves)
        return nnx.State({"all": tree}) if self.box == "state" else tree

    def gradients(self, step):
        """Return gradients, which are NaN in one step if something skips it."""
        grads = self.scenario.gradients(step)
        if self.around in SCALED:  # as `value_and_grad` gives them
            grads = jax.tree.map(
                lambda x: x.astype(jnp.float32) if _is_plain(x) else x, grads
            )
        if step != BAD_STEP or self.around not in (*SCALED, "apply_if_finite"):
            return grads
        return jax.tree.map(lambda x: x + jnp.nan if is_number(x) else x, grads)


def is_number(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def _is_plain(x):
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


@st.composite
def programs(draw):
    """Return a strategy of programs."""
    scenario, form = draw(scenarios()), draw(st.sampled_from(FORMS))
    around, box = (draw(st.sampled_from(sorted(x))) for x in (AROUND, BOXES))
    dtypes = {x.dtype for x in leaves_of(scenario.tree)}
    splits = scenario.storage != optax_mp.FullCopy()
    has_float8 = not dtypes.isdisjoint(LOW[2:])
    if has_float8 or "complex64" in dtypes:
        form = "masters"  # stochastic rounding takes neither
    # Optax's own limits: of dtypes that a `cond` returns, or that have no order; and of
    # gradients that are None.
    hidden = not dtypes.isdisjoint(HIDDEN)
    optax_alone = set(AROUND) - {"nothing", "static", "dynamic", "link"}
    refused = (
        splits or form == "stochastic" or has_float8 or "complex64" in dtypes or hidden
    )
    if around in optax_alone and refused:
        around = draw(st.sampled_from(["nothing", "dynamic", "static"]))
    if around == "link" and (has_float8 or not dtypes & set(LOW)):
        around = "dynamic"
    assume(any(is_number(x) and x.size for x in jax.tree.leaves(scenario.params())))
    if scenario.of_hidden == "float0":  # which `jit` does not take
        scenario = dataclasses.replace(scenario, of_hidden="None")
    return Program(scenario, form, around, box, draw(st.sampled_from(WAYS)))


def stepped(tx, grads, params, state, scaled):
    """Return params and state after a step, of scaled gradients if there is a scale."""
    if scaled:
        scale = optax_mp.loss_scale(state)
        grads = jax.tree.map(lambda x: x * scale if is_number(x) else x, grads)
    updates, new_state = tx.update(grads, state, params)
    return applied(params, updates), new_state


def run_eagerly(program, boxed, rate=None):
    """Return what each step ends with."""
    tx = program.transformation(rate)
    box = program.boxed if boxed else lambda tree: tree
    params = box(program.scenario.params())
    state, out = tx.init(params), []
    for step in range(STEPS):
        grads = box(program.gradients(step))
        params, state = stepped(tx, grads, params, state, program.around in SCALED)
        out.append((params, state))
    return out


def run(program):
    """Return what the last step of the program ends with, in boxes."""
    tx = program.transformation()
    params = program.boxed(program.scenario.params())
    grads = [program.boxed(program.gradients(step)) for step in range(STEPS)]
    state = tx.init(params)

    def step(grads, params, state):
        return stepped(tx, grads, params, state, program.around in SCALED)

    if program.way == "scan":
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)

        def body(carry, grads):
            return step(grads, *carry), None

        scan = jax.jit(lambda carry, grads: jax.lax.scan(body, carry, grads)[0])
        return scan((params, state), stacked)
    if program.way == "described":
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        want, have = (avals(x) for x in (state, tx.init(shapes)))
        assert have[0] == want[0], "init of descriptions has another structure"
        assert [x[:2] for x in have[1]] == [x[:2] for x in want[1]]
    if program.way == "export":
        step = exported(step, (grads[0], params, state))
    elif program.way in ("jit", "donate"):
        step = jax.jit(step, donate_argnums=(1, 2) if program.way == "donate" else ())
    for x in grads:
        params, state = step(x, params, state)
        if program.way == "saved":
            state = saved_and_restored(state)
    return params, state


def exported(step, args):
    """Return a step that went through `jax.export`, whose trees are flat."""
    leaves, treedef = jax.tree.flatten(args)
    out_treedef = jax.tree.structure(jax.eval_shape(step, *args))
    plain = jax.jit(lambda *xs: jax.tree.leaves(step(*treedef.unflatten(xs))))
    call = jax.export.export(plain)(*leaves).call
    return lambda *args: out_treedef.unflatten(call(*jax.tree.leaves(args)))


def saved_and_restored(state):
    """Return a state that went through NumPy, or bytes as Flax writes them."""
    try:
        restored = serialization.from_bytes(state, serialization.to_bytes(state))
        return jax.tree.map(jnp.asarray, restored)
    except (TypeError, ValueError):  # of keys, and of nodes that Flax does not know
        return jax.tree.map(jnp.asarray, jax.device_get(state))


def as_numbers(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_near(program, have, want):
    """Raise unless two results differ by roundings alone, or not at all if eager."""
    is_exact = program.way in ("eager", "saved", "described")
    is_coarse = program.scenario.inside == "low_bit_state"
    is_coarse |= program.form == "stochastic"
    for pair in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        a, b = map(as_numbers, pair)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), (a.dtype, b.dtype)
        if as_bits(a) == as_bits(b):
            continue
        if is_exact:
            same = np.isnan(a.astype(float)) & np.isnan(b.astype(float))
            assert ((a == b) | same).all(), f"bits of a {a.dtype} differ: {a}, {b}"
        elif a.dtype.kind in "iub":
            # Codes and remainders may differ, counts not.
            assert a.dtype.itemsize <= 2, f"counts differ: {a}, {b}"
        else:
            kind = complex if a.dtype.kind == "c" else float
            tol = 0.1 if is_coarse else {1: 0.5, 2: 2e-2}.get(a.dtype.itemsize, 2e-5)
            np.testing.assert_allclose(a.astype(kind), b.astype(kind), tol, 5 * tol)


def check(program):
    """Raise unless boxes and ways change nothing, and a bad step changes nothing."""
    if program.way == "rates":
        return check_rates(program)
    steps = run_eagerly(program, boxed=False)
    tx = program.transformation()
    params = program.scenario.params()
    start = tx.init(params), params
    assert avals(steps[-1][1]) == avals(steps[0][1])
    if program.form == "masters":
        assert avals(steps[-1]) == avals(start[::-1])
    assert avals(steps[-1][0]) == avals(params)
    if program.around in SCALED and program.form == "masters":
        assert as_bits(steps[BAD_STEP][0]) == as_bits(steps[BAD_STEP - 1][0])
    return assert_near(program, run(program), steps[-1])


def check_rates(program):
    """Raise unless learning rates can be mapped over."""

    def whole(rate):
        return run_eagerly(program, boxed=True, rate=rate)[-1]

    rates = jnp.array([0.5, 1.5])
    both = jax.jit(jax.vmap(whole))(rates)
    for i, rate in enumerate(rates):
        assert_near(program, jax.tree.map(lambda x, i=i: x[i], both), whole(rate))
