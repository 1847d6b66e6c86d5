"""Random pytrees, dtypes, gradients and nestings, as hypothesis strategies."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp

pytest.importorskip("hypothesis")

from hypothesis import strategies as st

LOW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
SPLITTABLE = ("bfloat16", "float16")
HIDDEN = ("int32", "int8", "bool", "key", "None", "MaskedNode")
# Few, since eager JAX compiles each operation once for each.
SHAPES = ((), (4,), (0,))


class Pair(NamedTuple):
    """A container with fields, one named as one of an optimizer's state."""

    mu: Any
    master_params: Any


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a leaf is to be; drawn first, so that a tree can be shrunk and printed."""

    dtype: str
    shape: tuple[int, ...] = ()

    @property
    def is_low(self):
        return self.dtype in LOW

    @property
    def has_infinities(self):
        return self.dtype == "float32" or (self.is_low and "fn" not in self.dtype)

    @property
    def is_inexact(self):
        return self.is_low or self.dtype in ("float32", "complex64")


def is_leaf(node):
    return isinstance(node, Leaf)


def trees(dtypes, max_leaves=5):
    """Return a strategy of trees of `Leaf`s."""
    leaf = st.builds(Leaf, st.sampled_from(dtypes), st.sampled_from(SHAPES))

    def containers(child):
        return st.one_of(
            st.dictionaries(st.sampled_from("abc"), child, max_size=3),
            st.lists(child, max_size=3),
            st.tuples(child, child),
            st.builds(Pair, child, child),
            st.sampled_from([{}, [], ()]),
        )

    return st.recursive(leaf, containers, max_leaves=max_leaves)


def leaves_of(tree):
    return jax.tree.leaves(tree, is_leaf=is_leaf)


def float_values(rng, shape, dtype, zero=-0.0):
    """Return finite values of a floating dtype, among them zeros."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-2, 2, shape)
    values = np.where(rng.random(shape) < 0.1, zero, values)
    if shape and values.size:
        values[0] = zero
    return jnp.asarray(np.asarray(values, np.float32)).astype(dtype)


def array_of(rng, leaf, zero=-0.0):
    """Return what a leaf stands for as a param."""
    if leaf.dtype == "None":
        return None
    if leaf.dtype == "MaskedNode":
        return optax.MaskedNode()
    if leaf.dtype == "key":
        return jax.random.split(jax.random.key(int(rng.integers(99))), leaf.shape)
    if leaf.dtype == "complex64":
        real, imag = (float_values(rng, leaf.shape, "float32", zero) for _ in "ab")
        return jax.lax.complex(real, imag)
    if leaf.is_inexact:
        return float_values(rng, leaf.shape, leaf.dtype, zero)
    return jnp.asarray(np.asarray(rng.integers(0, 2, leaf.shape), leaf.dtype))


def params_of(tree, seed, with_infinities=False):
    """Return params with the values that belong to a seed."""
    rng = np.random.default_rng(seed)

    def param_of(leaf):
        array = array_of(rng, leaf)
        if not (with_infinities and leaf.has_infinities and array.size > 1):
            return array
        # As in the mask of an attention; the first value is a zero.
        return array.at[-1].set(float(rng.choice([-np.inf, np.inf])))

    return jax.tree.map(param_of, tree, is_leaf=is_leaf)


def gradient_of(rng, leaf, dtype, of_hidden):
    """Return a gradient: floating ones in `dtype`, or in that of the param."""
    if leaf.dtype in ("None", "MaskedNode"):
        return array_of(rng, leaf)
    if not leaf.is_inexact:
        if of_hidden == "None":
            return None
        if of_hidden == "float0":
            return np.zeros(leaf.shape, jax.dtypes.float0)
        return jnp.zeros(leaf.shape, jnp.int32)
    # Not -0.0: alone, that marks a skipped step.
    if leaf.dtype == "complex64" or dtype == "params":
        return array_of(rng, leaf, zero=0.0)
    return float_values(rng, leaf.shape, dtype, zero=0.0)


def gradients_of(tree, seed, dtype, of_hidden):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: gradient_of(rng, x, dtype, of_hidden), tree, is_leaf=is_leaf
    )


def by_axes(params):
    """Return a mask that hides some leaves."""
    return jax.tree.map(lambda x: np.ndim(x) != 1, params)


def labels(params):
    return jax.tree.map(lambda x: "a" if np.ndim(x) else "b", params)


# Rules that treat every element by itself.
RULES = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(0.1, weight_decay=0.1),
    "lion": lambda: optax.lion(0.01),
    "rmsprop": lambda: optax.rmsprop(0.1, momentum=0.9),
}

INSIDE = {
    "bare": lambda rule: rule(),
    "chain": lambda rule: optax.chain(optax.clip_by_global_norm(1.0), rule()),
    "MultiSteps": lambda rule: optax.MultiSteps(rule(), 2),
    "apply_if_finite": lambda rule: optax.apply_if_finite(rule(), 3),
    "masked": lambda rule: optax.masked(rule(), by_axes),
    "partition": lambda rule: optax.partition(
        {"a": rule(), "b": optax.sgd(0.01)}, labels
    ),
    "inject_hyperparams": lambda rule: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(rule(), optax.scale(learning_rate))
    )(learning_rate=0.5),
    "low_bit_state": lambda rule: optax_mp.low_bit_state(rule(), min_size=4),
    "ema": lambda rule: optax.chain(rule(), optax.ema(0.9)),
    "frozen": lambda rule: optax.partition(
        {"a": rule(), "b": optax.set_to_zero()}, labels
    ),
    "schedule": lambda rule: optax.chain(
        rule(), optax.scale_by_schedule(lambda count: 1.0 / (1 + count))
    ),
}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        tree: of `Leaf`s.
        rule: a key of `RULES`.
        inside: a key of `INSIDE`, what stands between `mixed_precision` and the rule.
        storage: of masters.
        update_dtype: as `mixed_precision` takes it.
        grad_dtype: of floating gradients; "params" for each param's own.
        of_hidden: what the gradients of integers, flags and keys are.
        seed: of all values.
        with_infinities: whether some params are infinite. Weight decay makes them NaN.
    """

    tree: Any
    rule: str
    inside: str
    storage: Any
    update_dtype: str | None
    grad_dtype: str
    of_hidden: str
    seed: int
    with_infinities: bool

    def inner(self):
        return INSIDE[self.inside](RULES[self.rule])

    def transformation(self, form="masters", rate=None):
        inner = self.inner()
        if rate is not None:
            inner = optax.chain(inner, optax.scale(rate))
        if form == "stochastic":
            return optax_mp.stochastic_rounding(inner, seed=0)
        return optax_mp.mixed_precision(
            inner, storage=self.storage, update_dtype=self.update_dtype
        )

    def params(self):
        return params_of(self.tree, self.seed, self.with_infinities)

    def gradients(self, step):
        seed = (self.seed, step + 1)
        return gradients_of(self.tree, seed, self.grad_dtype, self.of_hidden)


def as_real(leaf):
    return Leaf("float32", leaf.shape) if leaf.dtype == "complex64" else leaf


@st.composite
def scenarios(
    draw, hidden=HIDDEN, insides=tuple(INSIDE), max_leaves=5, infinities=(True, False)
):
    """Return a strategy of scenarios."""
    storage = draw(st.sampled_from([optax_mp.FullCopy(), optax_mp.Split(16)]))
    splits = storage != optax_mp.FullCopy()
    if splits and draw(st.booleans()):
        storage = optax_mp.Split(8)
    # Few with float8, whose updates can have one dtype only.
    has_float8 = not splits and draw(st.sampled_from([False, False, False, True]))
    low = LOW if has_float8 else SPLITTABLE
    dtypes = (*low, "float32", "complex64", *hidden)
    tree = draw(trees(dtypes, max_leaves))
    if is_leaf(tree) and tree.dtype == "None":
        tree = [tree]  # by itself it would be no params at all
    # Mostly with a leaf that has a master.
    if draw(st.sampled_from([True, True, True, False])):
        tree = [Leaf(draw(st.sampled_from(low)), (4,)), tree]
    inside = draw(st.sampled_from(sorted(insides)))
    if inside in ("MultiSteps", "inject_hyperparams"):
        # Of one, accumulators are real; of the other, hyperparameters would be complex.
        tree = jax.tree.map(as_real, tree, is_leaf=is_leaf)
    has_float8 = any(x.dtype in LOW[2:] for x in leaves_of(tree))
    update_dtypes = [None, "float32"] if splits else [None, "float32", "params"]
    if has_float8:
        update_dtypes = ["params"]
    return Scenario(
        tree=tree,
        rule=draw(st.sampled_from(sorted(RULES))),
        inside=inside,
        storage=storage,
        update_dtype=draw(st.sampled_from(update_dtypes)),
        grad_dtype=draw(st.sampled_from(["params", "float32", "bfloat16", "float16"])),
        of_hidden=draw(st.sampled_from(["None", "float0", "int32"])),
        seed=draw(st.integers(0, 99)),
        with_infinities=draw(st.sampled_from(infinities)),
    )


def applied(params, updates):
    """Return optax.apply_updates, on trees with leaves that it does not know."""
    leaves, treedef = jax.tree.flatten(params)
    changes = treedef.flatten_up_to(updates)
    return treedef.unflatten(
        optax.apply_updates(x, u) if jnp.issubdtype(x.dtype, jnp.inexact) else x
        for x, u in zip(leaves, changes, strict=True)
    )
