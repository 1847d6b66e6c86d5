"""Random cases by the thousand: `python tests/support/random_cases.py FIRST LAST`.

A seed is a structure: a tree in boxes, an optimizer of optax, a form, what is around
it. Its programs are compiled once and run on many values. Faults are printed with the
seed; `run(seed)` repeats one.
"""

import dataclasses
import importlib.util
import math
import pickle
import sys
import traceback
import warnings
from collections import Counter
from typing import Any, NamedTuple

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import as_bits, avals
from flax import linen, nnx
from optimizers import NO_SCALARS, OPTIMIZERS, PER_EXAMPLE, extra_arguments

import optax_mp

STEPS, VALUES = 3, 512


class Pair(NamedTuple):
    """A container with fields, one named as one of an optimizer's state."""

    mu: Any
    master_params: Any


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

SHAPES = ((), (4,), (0,), (3, 0), (1,), (2, 3), (2, 3, 4), (64, 128))
# As models have them, or a part of it where the whole would fill the memory.
OF_MODELS = {
    "GPT-2": (768, 192),
    "GPT-2 XL": (1600, 64),
    "Llama, a head of each layer": (4, 128, 128),
    "Gemma, attention in Flax": (256, 8, 64),
    "BERT, positions": (512, 96),
    "ViT-Ti": (192, 192),
    "ViT-B, a norm": (768,),
    "ResNet-50, first": (7, 7, 3, 64),
    "ResNet-50, a block": (3, 3, 64, 64),
    "ResNet-50, last": (1000, 64),
    "gpt-oss": (2880, 64),
}
# Their own limits: line searches that compare gradients, and updates of two kinds.
LEFT_OUT = (*PER_EXAMPLE, "lbfgs")
INSIDE = {
    "bare": lambda tx: tx,
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "MultiSteps": lambda tx: optax.GradientTransformationExtraArgs(
        optax.MultiSteps(tx, 2).init, optax.MultiSteps(tx, 2).update
    ),
    "decay": lambda tx: optax.chain(
        tx, optax.add_decayed_weights(-0.01, lambda p: jax.tree.map(jnp.ndim, p))
    ),
    "8 bits": lambda tx: optax_mp.low_bit_state(tx, min_size=1),
    "finite": lambda tx: optax.apply_if_finite(tx, 2),
}
AROUND = {
    "nothing": lambda tx: tx,
    "dynamic": lambda tx: optax_mp.dynamic_loss_scale(tx, init_scale=2.0**8),
    "static": lambda tx: optax_mp.static_loss_scale(tx, 4.0),
    "link": lambda tx: optax.chain(optax_mp.dynamic_loss_scale(init_scale=8.0), tx),
}


def on_devices(f):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "data")
    spec = jax.P("data")
    return jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec)


# How the members of a batch of models are computed.
MAPS = {
    "vmap": jax.vmap,
    "scan": lambda f: lambda *xs: jax.lax.map(lambda x: f(*x), xs),
    "shard_map": on_devices,
}


@dataclasses.dataclass
class Case:
    """A structure, drawn from a seed."""

    seed: int

    def __post_init__(self):
        """Draw everything but values."""
        rng = self.rng = np.random.default_rng(self.seed)

        def pick(*xs):
            return xs[rng.integers(len(xs))]

        self.is_model = self.seed % 2 == 1
        self.x64 = rng.random() < 0.15
        self.name = pick(*[x for x in OPTIMIZERS if x not in LEFT_OUT])
        self.inside = pick(*INSIDE, "bare", "8 bits")
        self.around = pick(*AROUND)
        self.box = pick("none", "none", *BOXES)
        self.storage = pick(
            optax_mp.FullCopy(), optax_mp.Split(16), optax_mp.Split(8), None
        )
        self.grad_dtype = pick("float32", "params", "bfloat16")
        if self.around != "nothing":
            self.grad_dtype = "float32"
        choices = [None, "float32"]
        if self.storage == optax_mp.FullCopy():
            choices.append("params")
        self.update_dtype = pick(*choices)
        low = ["bfloat16", "bfloat16", "float16"]
        if self.update_dtype == "params" and self.around != "link":
            low.append("float8_e5m2")
        dtypes = [*low, "float32"] + ["float64"] * self.x64
        if self.box == "none" and self.name != "sam":
            dtypes += ["int32", "None"]
        shapes = [*OF_MODELS.values()] if self.is_model else SHAPES
        shapes = [x for x in shapes if x or self.name not in NO_SCALARS]
        count = int(rng.integers(1, 5))
        self.leaves = [(pick(*dtypes), pick(*shapes)) for _ in range(count)]
        self.leaves[0] = (pick(*low), self.leaves[0][1])
        self.container = pick(list, tuple, dict, "nested", "Haiku")
        # A rank sees only its part of a link's mark: docs/design/mark.md.
        self.map = pick(*MAPS) if self.around != "link" else "vmap"

    def __repr__(self):
        """Return what was drawn."""
        drawn = {k: v for k, v in vars(self).items() if k != "rng"}
        return f"Case({drawn})"

    def tree(self, make):
        """Return a tree with what `make` returns for the dtype and shape of a leaf."""
        leaves = [make(*leaf) for leaf in self.leaves]
        if self.container == "nested":
            return Pair({"a": leaves[0]}, [tuple(leaves[1:])])
        if self.container == "Haiku":
            return {f"net/~/layer_{i}": {"w": x} for i, x in enumerate(leaves)}
        if self.container is dict:
            return {f"w{i}": x for i, x in enumerate(leaves)}
        return self.container(leaves)

    def arrays(self, seed, dtype=None, is_bad=None, count=None):
        """Return params, or gradients in a dtype; `count` of each if that is given."""
        rng = np.random.default_rng((self.seed, seed))
        leading = () if count is None else (count,)

        def make(own, shape):
            shape = (*leading, *shape)
            if own == "None" or own == "int32" and dtype:
                return None
            if own == "int32":
                return jnp.asarray(rng.integers(0, 9, shape), own)
            powers = 2.0 ** rng.integers(
                -6, 3, leading + (1,) * (len(shape) - 1) * bool(leading)
            )
            x = rng.standard_normal(shape) * powers
            if is_bad is not None:
                x = np.where(is_bad.reshape(-1, *(1,) * (x.ndim - 1)), np.nan, x)
            own = own if dtype in (None, "params") else dtype
            array = jnp.asarray(x, "float32").astype(own)
            # Mapped, because boxes of frameworks know the axes of an array.
            box = BOXES[self.box]
            return box(array) if count is None else jax.vmap(box)(array)

        return self.tree(make)

    def transformation(self):
        """Return the optimizer inside, the form, and all of it."""
        inner = INSIDE[self.inside](OPTIMIZERS[self.name]())
        inner = optax.with_extra_args_support(inner)
        if self.storage is None:
            form = optax_mp.stochastic_rounding(inner)
        else:
            form = optax_mp.mixed_precision(
                inner, storage=self.storage, update_dtype=self.update_dtype
            )
        return inner, form, optax.with_extra_args_support(AROUND[self.around](form))


def unscaled_state(case, state):
    """Return the state of the form, within the state of a loss scale."""
    if case.around == "link":
        return state[1]
    return state.inner_state if case.around in ("dynamic", "static") else state


def applied(params, updates):
    return jax.tree.map(
        lambda p, u: p if u is None else optax.apply_updates(p, u),
        params,
        updates,
        is_leaf=lambda x: x is None,
    )


def run(seed, values=VALUES):
    """Check one structure on many values, by one of `MAPS`; return how many.

    Of a model, as many as memory takes.
    """
    case = Case(seed)
    if case.is_model:
        size = max(math.prod(shape) for _, shape in case.leaves)
        values = min(values, 2 * max(3, 2**19 // size))
    jax.config.update("jax_enable_x64", bool(case.x64))
    inner, _, tx = case.transformation()
    params = case.arrays(0)
    state = tx.init(params)
    types = avals((params, state))
    check_once(case, tx, params, state)

    def step(grads, state, params):
        if case.around != "nothing":
            scale = optax_mp.loss_scale(state)
            grads = jax.tree.map(lambda g: g * scale, grads)
        extra = extra_arguments(case.name, grads)
        updates, new_state = tx.update(grads, state, params, **extra)
        after = applied(params, updates), new_state
        assert avals(after) == types, "types change"
        return after

    def bare_step(grads, inner_state, masters):
        grads = jax.tree.map(lambda g, m: g.astype(m.dtype), grads, masters)
        extra = extra_arguments(case.name, grads)
        updates, after = inner.update(grads, inner_state, masters, **extra)
        return optax.apply_updates(masters, updates), after

    functions = (tx.init, step, bare_step, optax_mp.master_params)
    init, step, bare_step, masters_of = (jax.jit(MAPS[case.map](f)) for f in functions)
    is_compared = case.storage is not None and case.name != "sam"
    dtypes = {dtype for dtype, _ in case.leaves}
    is_compared &= dtypes.isdisjoint(("int32", "None"))
    # A float32 param has no master, and its update the 16 bits of its gradient.
    has_rounded = case.grad_dtype == "bfloat16" and case.update_dtype != "float32"
    is_compared &= not (has_rounded and dtypes & {"float32", "float64"})
    treedef = jax.tree.structure(params)
    params = case.arrays(0, count=values)
    state = init(params)
    for i in range(STEPS):
        is_bad = (np.arange(values) % 3 == i) & (case.around != "nothing")
        grads = case.arrays(i + 1, case.grad_dtype, is_bad, values)
        # A tree without a floating number has no bad gradient.
        is_bad &= any(x.size for x in jax.tree.leaves(grads))
        after = step(grads, state, params)
        old, new = (unscaled_state(case, x) for x in (state, after[1]))
        assert_same(after[0], params, is_bad, "a skipped step moves params")
        assert_same(new, old, is_bad, "a skipped step moves the state")
        if is_compared and (i or case.update_dtype == "float32"):
            masters = [
                treedef.unflatten(jax.tree.leaves(masters_of(*x)))
                for x in ((state, params), after[::-1])
            ]
            want = bare_step(grads, old.inner_state, masters[0])
            have = masters[1], new.inner_state
            # Remainders of 8 bits are 2^-16 of a weight; else XLA rounds otherwise.
            tolerance = 1e-3 if case.storage == optax_mp.Split(8) else 1e-4
            assert_near(have, want, "the bare optimizer", tolerance, ~is_bad)
        params, state = after
    return values


def numbers(x):
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


def assert_same(have, want, members, what):
    """Raise unless some members of two trees are equal to the last bit."""
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        assert as_bits(numbers(a)[members]) == as_bits(numbers(b)[members]), what


def assert_near(have, want, what, tolerance, members=slice(None)):
    """Raise unless floats are equal but for roundings, and all else is equal."""
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        if a.dtype.itemsize == 1 and not jnp.issubdtype(a.dtype, jnp.floating):
            continue  # codes that are a rounding apart
        a, b = (numbers(x)[members].astype("f8") for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-6, err_msg=what)


def check_once(case, tx, params, state):
    """Check what no values change."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    if case.inside != "MultiSteps":
        described = tx.init(shapes)
        assert jax.tree.structure(described) == jax.tree.structure(state), "described"
    total = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    report = optax_mp.memory_report(state, params)
    assert sum(report.by_role().values()) == total, "memory_report"
    unboxed = dataclasses.replace(case)
    unboxed.box = "none"
    of_plain = jax.eval_shape(tx.init, unboxed.arrays(0))
    assert [x.shape for x in jax.tree.leaves(of_plain)] == [
        x.shape for x in jax.tree.leaves(state)
    ], "a box changes what is kept"
    again = pickle.loads(pickle.dumps(jax.device_get(state)))
    assert jax.tree.structure(again) == jax.tree.structure(state), "pickle"
    if case.storage is None:
        return
    full = dataclasses.replace(case)
    full.storage = optax_mp.FullCopy()
    other = full.transformation()[2]
    there = optax_mp.convert_opt_state(state, from_tx=tx, to_tx=other, params=params)
    back = optax_mp.convert_opt_state(there, from_tx=other, to_tx=tx, params=params)
    assert as_bits(back) == as_bits(state), "convert_opt_state"


def main(first, last):
    """Run seeds and print faults."""
    jax.config.update("jax_num_cpu_devices", 2)
    count: Counter[str] = Counter()
    for seed in range(first, last):
        try:
            with warnings.catch_warnings(action="ignore"):
                count["cases"] += run(seed)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            print(f"seed {seed}: {type(error).__name__} {text}\n  {frame}", flush=True)
            print(f"  {Case(seed)}", flush=True)
            count["faults"] += 1
        count["structures"] += 1
        if seed % 20 == 19:
            jax.clear_caches()
            print(seed, dict(count), flush=True)
    print(dict(count))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
