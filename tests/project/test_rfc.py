"""The masters proposed to optax are `mixed_precision`, bit for bit."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import as_bits, avals
from slow_cases import mostly_slow

import optax_mp

PATH = Path(__file__).parents[2] / "examples" / "with_master_params.py"
spec = importlib.util.spec_from_file_location("with_master_params", PATH)
rfc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rfc)

STEPS = 4
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "sgd": lambda: optax.sgd(1e-2, 0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clipped lion": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.lion(optax.linear_schedule(1e-2, 0, 9))
    ),
    "masked muon": lambda: optax.masked(optax.contrib.muon(1e-2), MASK),
}
SHAPES = {"w": (96, 64), "norm": (64,), "scale": (), "half": (33,), "tiny": (5,)}
MASK = {name: name in ("w", "half") for name in SHAPES}


def params_in(dtype):
    """Return a tree of several dtypes, with a mask and one leaf over 4,096 elements."""
    random = np.random.default_rng(0)
    dtypes = dict.fromkeys(SHAPES, dtype) | {"norm": "float32", "half": "float16"}
    params = {
        name: jnp.asarray(random.normal(size=shape), dtypes[name])
        for name, shape in SHAPES.items()
    }
    # Subnormals of float16, and what is not finite.
    params["tiny"] = jnp.asarray([1e-6, -3e-7, -jnp.inf, jnp.nan, -0.0], dtype)
    return params


def gradients(params):
    random = np.random.default_rng(1)
    return jax.tree.map(
        lambda p: jnp.asarray(random.normal(size=(STEPS, *p.shape)), p.dtype), params
    )


def run(tx, params, stacked, how):
    """Return (params, state) after some steps."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(
            lambda g: g.dtype, grads
        )
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    if how == "scan":
        return jax.lax.scan(step, carry, stacked)[0]
    stepped = jax.jit(step) if how == "jit" else step
    for i in range(STEPS):
        carry, _ = stepped(carry, jax.tree.map(lambda g, i=i: g[i], stacked))
    return carry


DEFAULT = ("adamw", "bfloat16", "scan")
CASES = [
    DEFAULT,
    ("clipped lion", "float16", "jit"),
    *((name, "bfloat16", "jit") for name in OPTIMIZERS),
]


@mostly_slow(("name", "dtype", "how"), CASES, lambda *case: case == DEFAULT)
def test_the_proposal_is_mixed_precision_bit_for_bit(name, dtype, how):
    params = params_in(dtype)
    grads = gradients(params)
    small, ours = (
        run(wrap(OPTIMIZERS[name]()), params, grads, how)
        for wrap in (rfc.with_master_params, optax_mp.mixed_precision)
    )
    # The proposal does not tell edits from roundings.
    ours = ours[0], ours[1]._replace(last_exact=None)
    assert as_bits(small) == as_bits(ours)
    assert as_bits(small[0]) != as_bits(params)


def test_descriptions_give_a_described_state():
    tx, params = rfc.with_master_params(optax.sgd(1e-2)), params_in("bfloat16")
    described = tx.init(jax.eval_shape(lambda: params))
    assert avals(described) == avals(tx.init(params))


def test_its_state_goes_on_in_any_form_of_this_package():
    params = {"w": params_in("bfloat16")["w"], "norm": jnp.ones(64)}
    grads = optax_mp.cast_floating(gradients(params), "float32")
    adamw = optax.adamw(1e-2)
    params, state = run(rfc.with_master_params(adamw), params, grads, "scan")

    tx = optax_mp.mixed_precision(adamw)
    loaded = jax.eval_shape(tx.init, params)._replace(**state._asdict())
    split = optax_mp.mixed_precision(adamw, storage=optax_mp.Split(16))
    converted = optax_mp.convert_opt_state(loaded, params, tx, split)

    masters = optax_mp.master_params(converted, params)
    assert as_bits(masters["w"]) == as_bits(state.master_params["w"])
    assert as_bits(converted.inner_state) == as_bits(state.inner_state)
