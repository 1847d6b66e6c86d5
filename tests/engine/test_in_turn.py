"""On one CPU device large leaves are stepped in turn, in each other's memory."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from slow_cases import mostly_slow

import optax_mp
from optax_mp.engine import _in_turn
from optax_mp.engine._by_platform import call_by_platform

# Leaves that are alike, axes that do not divide, a vector that stays as it is, and a
# leaf without elements.
SHAPES = {
    "kernel": (128, 128),
    "twin": (128, 128),
    "head": (33, 1031),
    "bias": (4099,),
    "none": (0, 128),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Smaller leaves wait than otherwise."""
    monkeypatch.setattr(_in_turn, "_LARGE", 2**13)


def low_bit(inner, **settings):
    low = optax_mp.low_bit_state(inner, **settings)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def jitted(inner):
    """Return a transformation whose update is compiled by itself."""
    return optax.GradientTransformation(inner.init, jax.jit(inner.update))


FORMS = {
    "AdamW": lambda: low_bit(optax.adamw(1e-2)),
    "a Split alone": lambda: optax_mp.mixed_precision(
        optax.adamw(1e-2), storage=optax_mp.Split(16)
    ),
    "clipped by the norm of all": lambda: low_bit(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    ),
    "Adafactor": lambda: low_bit(optax.adafactor(1e-2)),
    "jitted": lambda: low_bit(jitted(optax.adamw(1e-2))),
    "loss scale": lambda: optax_mp.dynamic_loss_scale(low_bit(optax.adamw(1e-2))),
    "MultiSteps": lambda: optax.MultiSteps(low_bit(optax.adamw(1e-2)), 2),
    "labels": lambda: low_bit(
        optax.multi_transform(
            {"a": optax.adamw(1e-2), "b": optax.sgd(1e-2, momentum=0.9)},
            {name: "a" if name < "j" else "b" for name in SHAPES},
        )
    ),
}


def tree(seed, scale, shapes):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)
        for name, shape in shapes.items()
    }


def compiled(tx, params):
    """Return a compiled step that donates, as people write it, and a state."""

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    return step.lower(params, state, params).compile(), state


def after_steps(tx, shapes=SHAPES, count=2):
    params = tree(0, 1, shapes)
    step, state = compiled(tx, params)
    for seed in range(count):
        params, state = step(tree(seed + 1, 10.0**-seed, shapes), state, params)
    return params, state


def temporaries(tx, shapes):
    """Return the bytes of temporaries per weight."""
    params = tree(0, 1, shapes)
    step, _ = compiled(tx, params)
    size = sum(x.size for x in params.values())
    return step.memory_analysis().temp_size_in_bytes / size


def assert_next_to(got, want):
    """XLA may contract differently: then a few codes are others."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        distance = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
        assert np.count_nonzero(distance) <= 1 + 3e-4 * distance.size


@mostly_slow("form", FORMS, "AdamW".__eq__)
def test_the_numbers_are_those_of_leaves_at_once(form, monkeypatch):
    in_turn = after_steps(FORMS[form]())
    monkeypatch.setattr(_in_turn, "_LARGE", 10**9)
    assert_next_to(in_turn, after_steps(FORMS[form]()))


@mostly_slow("form", ["a Split alone", "loss scale", "jitted"], "loss scale".__eq__)
def test_leaves_share_their_memory(form, monkeypatch):
    shapes = {f"layer {i}": (256, 512) for i in range(6)}
    in_turn = temporaries(FORMS[form](), shapes)
    monkeypatch.setattr(_in_turn, "_LARGE", 10**9)
    assert in_turn < temporaries(FORMS[form](), shapes) / 2


def test_some_functions_are_not_inlined():
    """Those that are marked, wherever a step calls them, and what leaves wait for."""
    params = tree(0, 1, {name: SHAPES[name] for name in ("kernel", "twin")})
    tx = optax_mp.dynamic_loss_scale(low_bit(optax.adam(1e-2)))
    state = tx.init(params)
    lines = jax.jit(tx.update).lower(params, state, params).as_text().splitlines()
    calls = [re.match(r".* call @(.*?)(_\d+)?\(", x) for x in lines]
    both = [(x[1], "inlineable" in x.string) for x in calls if x]
    assert collections.Counter(name for name, is_apart in both if is_apart) == {
        "_coded_with_shifts_outlined": 4,
        "_rounding_keys_outlined": 1,
        "advance_outlined": 2,
        "false_once_done": 6,
    }
    assert ("decode", False) in both  # others are not marked


def test_a_number_that_is_not_finite_stays_in_its_leaf():
    """A leaf waits for the one before, and reads nothing of it."""
    tx = low_bit(optax.adamw(1e-2))
    params = tree(0, 1, SHAPES)
    step, state = compiled(tx, params)
    grads = tree(1, 1, SHAPES)
    want, _ = jax.tree.map(np.asarray, step(grads, state, params))
    params = tree(0, 1, SHAPES)
    grads["head"] = jnp.full_like(grads["head"], jnp.nan)
    grads["kernel"] = jnp.full_like(grads["kernel"], jnp.inf)
    got, _ = step(grads, jax.jit(tx.init)(params), params)
    for name in SHAPES.keys() - {"head", "kernel"}:
        assert as_bits(got[name]) == as_bits(want[name])


def test_codes_of_which_a_number_is_made_come_first():
    def step(*leaves):
        codes = [jnp.round(x * 7).astype(jnp.int8) for x in leaves]
        total = jnp.sum(codes[1].astype(jnp.float32))
        scaled = [jnp.round(jnp.tanh(x * total) * 9).astype(jnp.int8) for x in leaves]
        return [*codes, *scaled]

    leaves = [tree(i, 1, SHAPES)["head"] for i in range(3)]
    (call,) = jax.make_jaxpr(jax.jit(step))(*leaves).eqns
    run = lambda *x: call_by_platform(call, x, lambda _: None)  # noqa: E731
    assert as_bits(jax.jit(run)(*leaves)) == as_bits(jax.jit(step)(*leaves))


@pytest.mark.filterwarnings("error:optax_mp. a low-bit step")
def test_a_leaf_that_is_equal_on_all_ranks_stays_so():
    spec = dict(zip("ab", map(jax.sharding.PartitionSpec, ("i", None)), strict=True))
    tx = optax_mp.low_bit_state(optax.adam(0.1))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,), out_specs=spec)
    def step(x):
        return optax_mp.take_step(tx, x, tx.init(x), x)[0]

    jax.jit(step).lower({"a": jnp.ones((1024, 256)), "b": jnp.ones((512, 256))})


def test_several_devices_wait_for_nothing(monkeypatch):
    """They would have to send each other an element of each leaf."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shapes = {f"layer {i}": (512, 512) for i in range(4)}
    params = jax.device_put(tree(0, 1, shapes), rows)

    def program():
        return compiled(FORMS["a Split alone"](), params)[0].as_text()

    with_turns = program()
    monkeypatch.setattr(_in_turn, "_LARGE", 10**9)
    assert with_turns.count("all-reduce") == program().count("all-reduce")
