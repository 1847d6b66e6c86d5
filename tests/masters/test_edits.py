"""Params that the loop edits between steps: the edit is the new master."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits, avals
from guide import names_of
from reference import rounded
from slow_cases import mostly_slow
from steps import by_update, take_rounded_steps

import optax_mp

FORMS = {
    "FullCopy": {"update_dtype": jnp.float32},
    "Split(16)": {"storage": optax_mp.Split(16)},
    "Split(8)": {"storage": optax_mp.Split(8)},
}
# One leaf is larger than 4,096 elements, one is stacked, one is its own master.
SHAPES = {"w": (80, 64), "layers": (3, 16, 8), "bias": (5,)}


def weights(dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    tree = {k: jnp.asarray(rng.normal(size=s), dtype) for k, s in SHAPES.items()}
    return tree | {"own": jnp.ones(3)}


def gradients(i, dtype=jnp.float32):
    # Powers of two, so that they are the same in every dtype.
    rng = np.random.default_rng(100 + i)
    return jax.tree.map(
        lambda p: jnp.asarray(rng.choice([-0.5, 0.25, 1.0], p.shape), dtype), weights()
    )


def halve(params):
    return jax.tree.map(lambda p: p / 2, params)


EDITS = {
    "ReLoRA": lambda p: p | {"w": p["w"] + 0.25, "layers": jnp.zeros_like(p["layers"])},
    "QK-clip": lambda p: p | {"w": p["w"] * jnp.bfloat16(0.99)},
    "a unit in the last place": lambda p: jax.tree.map(
        lambda x: jnp.nextafter(x, jnp.zeros_like(x)), p
    ),
    "pruned": lambda p: p | {"w": jnp.where(p["w"] > 0, p["w"], 0)},
    "loaded": lambda p: weights("bfloat16", seed=1),
}


@pytest.mark.parametrize("form", ["FullCopy", "Split(16)"])
def test_edits_of_any_size_are_masters_whatever_gradients_are(form):
    """After steps with 16-bit gradients, of one size and of another."""
    tx = optax_mp.mixed_precision(
        optax.inject_hyperparams(optax.sgd)(learning_rate=1e-3), **FORMS[form]
    )
    params, step = weights("bfloat16"), jax.jit(by_update(tx))
    state = jax.jit(tx.init)(params)
    for i in range(3):
        params, state = step(params, state, gradients(i, "bfloat16"))
    read = jax.jit(optax_mp.master_params)
    state.inner_state.hyperparams["learning_rate"] *= 0
    for edit in EDITS.values():
        edited = jax.jit(edit)(params)
        after, new_state = step(edited, state, gradients(4, "bfloat16"))
        assert as_bits(after) == as_bits(edited)
        if form == "FullCopy":
            masters = read(new_state, after)
            trees = map(jax.tree.leaves, jax.device_get((params, edited, masters)))
            for old, new, master in zip(*trees, strict=True):
                np.testing.assert_array_equal(master[old != new], new[old != new])


@pytest.mark.parametrize("form", FORMS)
def test_with_16_bit_updates_follow_params_tells_of_an_edit(form):
    """Without it `FullCopy` cannot tell an edit from a rounding, and undoes it."""
    settings = FORMS[form] | {"update_dtype": None}
    tx = optax.chain(
        optax.clip(10.0), optax_mp.mixed_precision(optax.sgd(0.0), **settings)
    )
    params, grads = weights("bfloat16"), gradients(0, "bfloat16")
    step = jax.jit(by_update(tx))
    params, state = step(params, jax.jit(tx.init)(params), grads)
    edited = jax.jit(halve)(params)
    followed = jax.jit(optax_mp.follow_params)(state, edited)
    assert as_bits(followed) == as_bits(optax_mp.follow_params(state, edited))
    assert avals(followed) == avals(state)
    after, _ = step(edited, followed, grads)
    assert as_bits(after) == as_bits(edited)
    undone, _ = step(edited, state, grads)
    assert (as_bits(undone) == as_bits(edited)) == (form != "FullCopy")
    # What is not edited keeps its master.
    same = optax_mp.follow_params(state, params)
    masters = (optax_mp.master_params(x, params) for x in (same, state))
    assert as_bits(next(masters)) == as_bits(next(masters))


@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
def test_roundings_of_16_bit_updates_are_no_edits():
    """Masters stay, at learning rate 0, when updates become exact."""
    sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    tx = optax_mp.mixed_precision(sgd)
    params, state = take_rounded_steps(tx)
    masters = jax.device_get(state.master_params["w"])
    target = rounded(masters, jnp.bfloat16).astype(jnp.float32)
    assert np.count_nonzero(target != np.asarray(params["w"], np.float32)) > 10

    state.inner_state.hyperparams["learning_rate"] *= 0
    tx = optax_mp.dynamic_loss_scale(tx, init_scale=1.0)
    state = tx.init(params)._replace(inner_state=state)
    ones, step = {"w": jnp.ones(65536)}, jax.jit(by_update(tx))
    for _ in range(2):
        params, state = step(params, state, ones)
        # After one exact update each param is its master, and edits are followed.
        found = optax_mp.master_params(state, params)["w"]
        assert as_bits(found) == as_bits(masters)
        assert as_bits(params["w"]) == as_bits(target.astype(jnp.bfloat16))
    params, state = step(halve(params), state, ones)
    assert as_bits(params["w"]) == as_bits(target.astype(jnp.bfloat16) / 2)


@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
def test_frozen_leaves_without_gradients_hide_no_edit():
    tx = optax_mp.mixed_precision(optax.sgd(0.0))
    params = weights("bfloat16")
    state, grads = tx.init(params), gradients(0) | {"bias": None}
    step = jax.jit(by_update(tx))
    for _ in range(2):
        edited = halve(params)
        params, state = step(edited, state, grads)
        assert as_bits(params) == as_bits(edited)


@pytest.mark.filterwarnings("ignore::optax_mp.MixedPrecisionWarning")
def test_a_rounded_leaf_stays_rounded_without_a_gradient():
    tx = optax_mp.mixed_precision(optax.sgd(0.1))
    params = {"a": weights("bfloat16")["w"], "b": weights("bfloat16")["w"]}
    state, low = tx.init(params), jnp.full_like(params["a"], 0.01)
    zero = jnp.zeros(low.shape)
    for grads in {"a": low, "b": low}, {"a": zero, "b": None}, {"a": zero, "b": zero}:
        updates, new = tx.update(grads, state, params)
        params, state, old = optax.apply_updates(params, updates), new, state
    assert as_bits(state.master_params["b"]) == as_bits(old.master_params["b"])


def test_follow_params_is_found_in_any_nesting_and_shares_no_buffer():
    params = weights("bfloat16")
    masters = optax_mp.mixed_precision(optax.adam(0.1))
    labels = {"w": "a", "layers": "a", "bias": "b", "own": "b"}
    edited = halve(params)
    for tx in (
        optax.partition({"a": masters, "b": masters}, labels),
        optax_mp.dynamic_loss_scale(optax.MultiSteps(masters, 2)),
    ):
        state = optax_mp.follow_params(tx.init(params), edited)
        found = optax_mp.master_params(state, edited)
        assert as_bits(found) == as_bits(optax_mp.cast_floating(edited, "float32"))
        held = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}
        assert not held & {x.unsafe_buffer_pointer() for x in jax.tree.leaves(edited)}


@mostly_slow("dtype", ["bfloat16", "float16"], lambda dtype: dtype == "bfloat16")
def test_no_step_is_taken_for_an_edit(dtype):
    """Masters stay as in bare float32 training, with steps of every size."""
    rng = np.random.default_rng(0)
    start = {"w": jnp.asarray(rng.normal(size=100_000), dtype)}
    tx, bare = optax_mp.mixed_precision(optax.sgd(1.0)), optax.sgd(1.0)
    wide = optax_mp.cast_floating(start, "float32")
    params, state = start, tx.init(start)
    bare_state = bare.init(wide)
    step, bare_step = jax.jit(by_update(tx)), jax.jit(by_update(bare))
    for _ in range(20):
        sizes = np.exp2(rng.integers(-12, 2, 100_000))
        grads = {"w": jnp.asarray(rng.normal(size=100_000) * sizes, jnp.float32)}
        params, state = step(params, state, grads)
        wide, bare_state = bare_step(wide, bare_state, grads)
    apart = np.abs(np.asarray(state.master_params["w"] - wide["w"]))
    # Where a weight shrank to 2^-15 (2^-12) of what it was, it moved by 2^-24 of that.
    assert np.count_nonzero(apart) <= 10
    assert apart.max() < 2.0**-20


def test_a_relora_reset_holds_as_the_page_of_adapters_makes_it():
    """After 16-bit updates the next step would undo it, as the page says."""
    merge = names_of("adapters.md", "merge_adapters")["merge_adapters"]
    rng, dtypes = np.random.default_rng(0), {"w": (4, 4), "a": (4, 2), "b": (2, 4)}
    start = {k: jnp.asarray(rng.normal(size=s), "bfloat16") for k, s in dtypes.items()}
    grads = {k: jnp.sign(x) for k, x in start.items()}

    def train(tx, params, grads):
        state, step = tx.init(params), jax.jit(by_update(tx))
        for _ in range(3):
            params, state = step(params, state, grads)
        params, state = merge(params, state)
        return step(params, state, grads)

    adam = optax.adam(2**-6)
    wide = [optax_mp.cast_floating(x, "float32") for x in (start, grads)]
    want, _ = train(adam, *wide)
    for update_dtype, is_kept in (jnp.float32, True), (None, False):
        tx = optax_mp.mixed_precision(adam, update_dtype=update_dtype)
        params, state = train(tx, start, grads)
        masters = optax_mp.master_params(state, params)
        apart = {k: float(abs(masters[k] - want[k]).max()) for k in want}
        # The merged weights were rounded once.
        assert (apart["b"] < 1e-6) == (apart["w"] < 0.02) == is_kept
