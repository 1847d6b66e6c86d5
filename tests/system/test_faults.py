"""Long runs on gradients with every fault, against the plain NumPy system in faults.py.

After each of 5000 steps (50 000 of one case in the slow run) all params, masters and counters are
bit for bit what the reference has, and every so often all moments; so nothing is lost,
nothing is NaN, and a skipped step moves nothing.
"""

import functools

import faults
import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import avals
from reference import LossScaleRule
from slow_cases import mostly_slow

import optax_mp

CHUNK = 1000
SPLIT = optax_mp.Split(bits=16)

dynamic = functools.partial(
    optax_mp.dynamic_loss_scale, init_scale=2.0**10, **faults.LIVELY
)


def momentum():
    limit = float(faults.LIMIT)
    return optax.chain(
        optax.clip(limit),
        optax.trace(0.5),
        optax.add_decayed_weights(0.25),
        optax.scale(-(2.0**-4)),
    )


def adamw():
    limit = float(faults.LIMIT)
    rule = optax.adamw(2.0**-4, b1=0.5, b2=0.5, eps=2.0**-20, weight_decay=2.0**-4)
    return optax.chain(optax.clip(limit), rule)


def start_late(state):
    """Return the state with the count at which the reference starts AdamW."""
    if not optax.tree.get_all_with_path(state, "mu"):
        return state
    return optax.tree.set(state, count=jnp.asarray(faults.AdamW.START))


KERNEL = 5
LOW_COUNT = KERNEL + 1  # and a scalar
COUNT = LOW_COUNT + 3  # and a float32 leaf

SHORT, LONG = 5 * CHUNK, 50 * CHUNK
# In the default run, short: one around the optimizer, one in a chain.
BY_DEFAULT = {"float16, adamw", "a link"}


def as_tree(flat, dtype=jnp.float32):
    """Return params or gradients of which `flat` has all numbers."""
    return {
        "kernel": flat[:KERNEL].astype(dtype),
        "scalar": flat[KERNEL].astype(dtype),
        "empty": jnp.zeros((0, 3), dtype),
        "norm": flat[LOW_COUNT:],
        "none": None,
    }


def as_flat(tree):
    """Return the numbers of params, masters or moments in float32."""
    parts = (tree["kernel"], tree["scalar"], tree["norm"])
    return jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in parts])


# What is tested, the dtype of params and of gradients, and what the reference is told.
masters = optax_mp.mixed_precision
CASES = {
    "float16, adamw": (
        lambda: dynamic(masters(adamw())), "float16", "float16", {"rule": faults.AdamW}
    ),
    "bfloat16, split": (
        lambda: dynamic(masters(momentum(), storage=SPLIT)),
        "bfloat16", "bfloat16", {"split_bits": 16},
    ),
    "a link": (
        lambda: optax.chain(dynamic(), masters(momentum())),
        "bfloat16", "float32", {"is_link": True},
    ),
}  # fmt: skip


def first_weights():
    weights = np.random.default_rng(1).standard_normal(COUNT).astype(np.float32)
    weights[0] = -0.0
    return weights


def reference_system(dtype, grad_dtype, rule=faults.Momentum, **told):
    return faults.System(
        weights=first_weights(),
        low_count=LOW_COUNT,
        dtype=jnp.dtype(dtype),
        rule=rule(COUNT),
        scaling=LossScaleRule(2.0**10, **faults.LIVELY),
        grad_dtype=jnp.dtype(grad_dtype),
        **told,
    )


def scale_state(state):
    """Return the state of the loss scale, around or a link."""
    return state if isinstance(state, optax_mp.LossScaleState) else state[0]


def without_scale(state):
    """Return the rest of the state."""
    is_around = isinstance(state, optax_mp.LossScaleState)
    return state.inner_state if is_around else state[1]


def no_bit_differs(old, new):
    """Return whether two trees are the same, also in zeros and denormal numbers."""

    def bits_of(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")

    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    same = [(bits_of(a) == bits_of(b)).all() for a, b in pairs]
    return jnp.stack(same).all()


def scan_over(tx, grad_dtype):
    """Return a scan over gradients and faults, with what is seen after each step."""

    def step(carry, given):
        params, state = carry
        raw, is_fault, fault = given
        scale = scale_state(state).scale
        scaled = jnp.where(is_fault, fault, raw * scale)
        scaled = scaled.astype(grad_dtype).astype(jnp.float32)
        # The float32 leaf has float32 gradients, of the same values.
        grads = as_tree(scaled, grad_dtype)
        updates, new_state = tx.update(grads, state, params)
        moved = optax.apply_updates(params, updates)
        scaling, inner = scale_state(new_state), without_scale(new_state)
        masters = optax_mp.master_params(new_state, moved)
        counters = jnp.stack([jnp.float32(x) for x in scaling[:5]])
        is_still = no_bit_differs((params, without_scale(state)), (moved, inner))
        is_sound = optax_mp.all_finite((moved, masters, new_state))
        seen = as_flat(moved), as_flat(masters), counters, scaling.last_finite
        return (moved, new_state), (*seen, is_still, is_sound)

    return jax.jit(functools.partial(jax.lax.scan, step))


def run(tx, grad_dtype, params, given):
    """Yield (params and state, what was seen at each step) after each chunk.

    What holds for every transformation is looked at here.
    """
    scan = scan_over(tx, grad_dtype)
    carry = params, start_late(tx.init(params))
    start = avals(carry)
    for i in range(0, len(given[0]), CHUNK):
        carry, seen = scan(carry, tuple(x[i : i + CHUNK] for x in given))
        *seen, is_still, is_sound = map(np.asarray, seen)
        assert avals(carry) == start
        assert is_sound.all()
        assert (is_still | seen[-1]).all()
        # Not because nothing ever moves.
        assert is_still.mean() < 0.5
        yield carry, seen


def reference_run(system, given):
    """Return what `run` shows, from the reference."""
    rows = []
    for raw, is_fault, fault in zip(*given, strict=True):
        finite = system.step(raw, is_fault, fault)
        params = system.weights.copy()
        params[: system.low_count] = system.low
        rows.append((params, system.weights, system.counters(), finite))
    return [np.array(x) for x in zip(*rows, strict=True)]


def assert_same_steps(seen, wanted):
    names = ("params", "masters", "counters", "finite")[-len(seen) :]
    for name, have, want in zip(names, seen, wanted, strict=True):
        have, want = have.astype(np.float32), want.astype(np.float32)
        differs = have.view(np.uint32) != want.view(np.uint32)
        differs = differs.reshape(len(have), -1)
        assert not differs.any(), (
            f"{name} differ first at step {differs.any(1).argmax()}: "
            f"{have[differs.any(1).argmax()]} {want[differs.any(1).argmax()]}"
        )


def assert_same_moments(state, reference):
    for name, want in reference.items():
        # AdamW's own count comes before that of a schedule.
        _, have = optax.tree.get_all_with_path(state, name)[0]
        have = np.asarray(as_flat(have) if isinstance(have, dict) else have)
        assert have.dtype == want.dtype, name
        assert have.tobytes() == want.tobytes(), name


@mostly_slow(
    ("case", "steps"),
    [*((case, SHORT) for case in CASES), ("float16, adamw", LONG)],
    lambda case, steps: case in BY_DEFAULT and steps == SHORT,
)
def test_faults_leave_what_the_reference_has(case, steps):
    build, dtype, grad_dtype, told = CASES[case]
    given = faults.make_faults(len(case), steps, COUNT)
    system = reference_system(dtype, grad_dtype, **told)
    chunks = run(
        build(), grad_dtype, as_tree(jnp.asarray(first_weights()), dtype), given
    )
    for i, (carry, seen) in enumerate(chunks):
        part = tuple(x[i * CHUNK : (i + 1) * CHUNK] for x in given)
        assert_same_steps(seen, reference_run(system, part))
        assert_same_moments(carry[1], system.state)
    assert 0.03 * steps < system.scaling.total_skipped_count < 0.9 * steps
    assert all(system.scaling.events.values()), system.scaling.events
