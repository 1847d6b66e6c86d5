"""Checkpoints: the forms told apart, files that keep every bit, runs that go on."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from slow_cases import mostly_slow
from steps import take_steps
from trained_forms import UNSCALED, gradients, start_of, train

import optax_mp

adamw = optax.adamw(1e-2)
bf16_params = {"w": jnp.ones((4, 32), jnp.bfloat16), "norm": jnp.ones(3)}


def template(tx, params=bf16_params):
    return jax.eval_shape(tx.init, params)


def without_types(tree):
    """Return nested dicts and lists by field name and index, as metadata has them."""
    if hasattr(tree, "_fields"):
        tree = tree._asdict()
    if isinstance(tree, dict):
        return {str(key): without_types(value) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        return [without_types(value) for value in tree]
    return tree


# What fits.


@pytest.mark.parametrize("name", [*UNSCALED, "scaled 5.1 bytes"])
def test_a_checkpoint_of_its_own_form_passes_with_and_without_types(name):
    state = jax.eval_shape(lambda: start_of(name))
    optax_mp.check_checkpoint(state, state)
    optax_mp.check_checkpoint(without_types(state), state)
    optax_mp.check_checkpoint(state, without_types(state))


def test_empty_containers_may_be_there_or_not():
    full = {"a": jnp.ones(1), "b": optax.EmptyState(), "c": None, "d": ()}
    optax_mp.check_checkpoint({"a": jnp.ones(1)}, full)
    optax_mp.check_checkpoint(full, {"a": jnp.ones(1), "e": optax.MaskedNode()})
    optax_mp.check_checkpoint({}, {"c": None})
    optax_mp.check_checkpoint(None, ())


def test_python_numbers_fit_scalars_and_other_leaves_are_not_looked_at():
    optax_mp.check_checkpoint({"n": np.int64(3)}, {"n": 3, "act": jax.nn.relu})
    optax_mp.check_checkpoint({"n": 3, "name": "run"}, {"n": jnp.int32(3)})
    traced = jax.eval_shape(lambda: {"n": 3, "x": 0.5})
    optax_mp.check_checkpoint({"n": 3, "x": 0.5}, traced)
    # Orbax describes them like this:
    described = {"n": np.int64(3), "x": np.float64(0.5)}
    optax_mp.check_checkpoint(described, traced)
    with pytest.raises(ValueError, match=r"\['x'\] to .*, got float64\[\].* round"):
        optax_mp.check_checkpoint(described, {"n": 3, "x": jnp.float32(0.5)})
    with pytest.raises(ValueError, match=r"\['n'\] to be int, got int32\[2\]"):
        optax_mp.check_checkpoint({"n": jnp.arange(2)}, {"n": 3})


def test_keys_of_random_numbers_are_like_their_data():
    key = jax.random.key(0)
    shape = jax.eval_shape(lambda: key)
    for saved in (key, shape, jax.random.key_data(key)):
        optax_mp.check_checkpoint({"key": saved}, {"key": shape})
    optax_mp.check_checkpoint({"key": key}, {"key": jax.random.key_data(key)})
    with pytest.raises(ValueError, match="another shape"):
        optax_mp.check_checkpoint({"key": jnp.zeros(4, jnp.uint32)}, {"key": key})
    with pytest.raises(ValueError, match="would cast"):
        optax_mp.check_checkpoint({"key": jnp.zeros(2, jnp.int32)}, {"key": key})
    other = jax.random.key(0, impl="rbg")
    with pytest.raises(ValueError, match=r"to be key<rbg>\[\], got key<fry>\[\]"):
        optax_mp.check_checkpoint({"key": key}, {"key": other})


# What does not.

masters = optax_mp.mixed_precision(adamw)
split16, split8 = (
    optax_mp.mixed_precision(adamw, storage=optax_mp.Split(bits)) for bits in (16, 8)
)
in_bf16 = jax.eval_shape(
    lambda: optax_mp.cast_floating(masters.init(bf16_params), "bfloat16")
)
MASTER = r"expected \.\S*master_params\['w'\] to be "
REFUSED = {
    "rounded masters": (
        template(masters),
        in_bf16,
        MASTER + r"bfloat16\[4,32\], got float32\[4,32\]: "
        "a restore would round the masters",
    ),
    "widened": (
        in_bf16,
        template(masters),
        MASTER + r"float32\[4,32\], got bfloat16\[4,32\]: saved in "
        "a narrower dtype than the template",
    ),
    "masters for remainders": (
        template(masters),
        template(split16),
        MASTER + r"int16\[4,32\], got float32\[4,32\]: a restore would "
        "cast the masters",
    ),
    "another shape": (
        {"w": jnp.ones((2, 3))},
        {"w": jnp.ones((3, 2))},
        r"\['w'\] to be float32\[3,2\], got float32\[2,3\]: "
        "another shape",
    ),
    "a missing leaf": (
        template(masters, {"norm": bf16_params["norm"]}),
        template(masters),
        MASTER + r"float32\[4,32\], got none",
    ),
    "an additional leaf": (
        template(masters),
        template(masters, {"norm": bf16_params["norm"]}),
        r"expected no \S*\.master_params\['w'\], got float32\[4,32\]",
    ),
    "a loss scale that was not there": (
        template(masters),
        template(optax_mp.dynamic_loss_scale(masters)),
        r"expected \.scale to be float32\[\], got none",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_form_is_refused(case):
    saved, wanted, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as error:
        optax_mp.check_checkpoint(saved, wanted)
    assert str(error.value).startswith("check_checkpoint: ")
    with pytest.raises(ValueError, match="^check_checkpoint: "):
        optax_mp.check_checkpoint(without_types(saved), wanted)


# Files of other kinds.


def goes_on(name, run, restored):
    assert as_bits(restored) == as_bits(run)
    assert jax.tree.structure(restored) == jax.tree.structure(run)
    found = train(name, *restored, range(4, 6))
    assert as_bits(found) == as_bits(train(name, *run, range(4, 6)))


@mostly_slow(
    "name", ["scaled 5.1 bytes", "partition", "float8"], {"float8"}.__contains__
)
def test_pickle_and_msgpack_of_flax_keep_every_bit(name):
    serialization = pytest.importorskip("flax.serialization")
    run = train(name, *start_of(name), range(4))
    restored = pickle.loads(pickle.dumps(jax.device_get(run)))
    optax_mp.check_checkpoint(restored, run)
    goes_on(name, run, restored)
    saved = serialization.to_bytes(run)
    empty = jax.tree.map(jnp.zeros_like, run)
    optax_mp.check_checkpoint(serialization.msgpack_restore(saved), empty)
    goes_on(name, run, serialization.from_bytes(empty, saved))


# Runs that were something else before.


def random_weights():
    rng = np.random.default_rng(7)
    return {
        "w": rng.standard_normal((16, 32), np.float32),
        "norm": rng.standard_normal(3, np.float32),
    }


def grads_of(step):
    grads = gradients(step)
    return {"w": grads["w"], "norm": grads["norm"]}


def steps_of(tx, params, state, steps):
    return take_steps(tx, params, state, map(grads_of, steps))


@pytest.mark.parametrize("storage", [optax_mp.FullCopy(), optax_mp.Split(16)], ids=str)
def test_masters_hold_every_bit_of_a_float32_checkpoint(storage, tmp_path):
    np.savez(tmp_path / "weights.npz", **random_weights())
    with np.load(tmp_path / "weights.npz") as file:
        weights = {name: file[name] for name in file.files}
    policy = optax_mp.get_policy("p=bf16", keep_f32=("norm",))
    tx = optax_mp.mixed_precision(adamw, param_dtype=policy, storage=storage)
    state, params = tx.init(weights), policy.cast_to_param(weights)
    optax_mp.check_checkpoint(template(tx, weights), state)
    assert as_bits(optax_mp.master_params(state, params)) == as_bits(random_weights())
    # And so it trains as the float32 run that starts from the same file.
    params, state = steps_of(tx, params, state, range(5))
    wanted, _ = steps_of(adamw, weights, adamw.init(weights), range(5))
    assert as_bits(optax_mp.master_params(state, params)) == as_bits(wanted)
