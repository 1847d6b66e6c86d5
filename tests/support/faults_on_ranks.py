"""Faults on one rank of four; run as a script with four forced host devices.

python faults_on_ranks.py STEPS
"""

import functools
import sys

import faults
import jax
import jax.numpy as jnp
import numpy as np
import optax
from faulty_runs import CHUNK, SPLIT, adamw, around, dynamic, momentum, start_late
from jax import shard_map
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from reference import LossScaleRule

import optax_mp

RANKS = 4
MESH = Mesh(np.array(jax.devices()), ("data",))


def as_tree(low, norm, dtype):
    return {"kernel": low.astype(dtype), "norm": norm}


def one_step(tx, grad_dtype, averaged, low_count):
    """Return a step of one rank, from (params, state) and its gradients and faults."""

    def step(carry, given):
        params, state = carry
        raw, is_fault, fault = given
        scaled = jnp.where(is_fault, fault, raw * state.scale).astype(grad_dtype)
        if averaged:
            scaled = jax.lax.psum(scaled, "data") * 0.25
        norm = scaled[low_count:].astype(jnp.float32)
        grads = as_tree(scaled[:low_count], norm, grad_dtype)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        masters = optax_mp.master_params(state, params)
        seen = (
            params["kernel"].astype(jnp.float32),
            masters["kernel"],
            params["norm"],
            jnp.stack([jnp.float32(x) for x in state[:6]]),
        )
        # One axis more, along which ranks are put together.
        return (params, state), jax.tree.map(lambda x: x[None], seen)

    return step


def system(weights, low_count, dtype, grad_dtype, **told):
    told = {"rule": faults.Momentum, "settings": faults.LIVELY} | told
    rule = told["rule"](len(weights))
    scaling = LossScaleRule(2.0**10, **told["settings"])
    return faults.System(
        weights=weights,
        low_count=low_count,
        dtype=jnp.dtype(dtype),
        rule=rule,
        scaling=scaling,
        grad_dtype=jnp.dtype(grad_dtype),
        split_bits=told.get("split_bits"),
    )


def assert_same(name, have, want):
    have, want = np.asarray(have, np.float32), np.asarray(want, np.float32)
    differs = (have.view(np.uint32) != want.view(np.uint32)).reshape(len(have), -1)
    where = differs.any(1).argmax()
    assert not differs.any(), f"{name}, step {where}: {have[where]} {want[where]}"


def parts_of_params_skip_together(steps, tx, dtype, grad_dtype, **told):
    """Each rank has a part of the params, and alone sees the faults in it."""
    rng = np.random.default_rng(2)
    low, norm = 2 * RANKS, RANKS
    weights = rng.standard_normal(low + norm).astype(np.float32)
    whole = system(weights, low, dtype, grad_dtype, **told)
    # Of each step, and of each rank its own, in the order of the reference.
    given = faults.make_faults(3, steps, low + norm)
    params = as_tree(jnp.asarray(weights[:low]), jnp.asarray(weights[low:]), dtype)
    carry = params, start_late(tx.init(params))
    step = one_step(tx, grad_dtype, averaged=False, low_count=2)

    def scan(carry, kernel, norm):
        given = [jnp.concatenate(x, 1) for x in zip(kernel, norm, strict=True)]
        return jax.lax.scan(step, carry, tuple(given))

    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), carry)
    steps_first = P(None, "data")
    run = jax.jit(
        shard_map(
            scan,
            mesh=MESH,
            in_specs=(specs, steps_first, steps_first),
            out_specs=(specs, steps_first),
        )
    )
    for i in range(0, steps, CHUNK):
        part = [x[i : i + CHUNK] for x in given]
        kernel, norm = ([x[:, :low] for x in part], [x[:, low:] for x in part])
        carry, (kernel, masters, norm, counters) = run(carry, kernel, norm)
        rows = []
        for each in zip(*part, strict=True):
            finite = whole.step(*each)
            rows.append((whole.low, whole.weights, [*whole.counters(), finite]))
        want = [np.array(x) for x in zip(*rows, strict=True)]
        for rank in range(RANKS):
            assert_same(f"counters of rank {rank}", counters[:, rank], want[2])
        assert_same("params", np.reshape(kernel, (len(want[0]), -1)), want[0])
        assert_same("masters", np.reshape(masters, (-1, low)), want[1][:, :low])
        assert_same("norm", np.reshape(norm, (len(want[0]), -1)), want[1][:, low:])
    assert all(whole.scaling.events.values()), whole.scaling.events


def copies_of_params_stay_equal(steps, tx, dtype, **told):
    """Each rank has all params and gradients of its own, of which the mean is taken."""
    rng = np.random.default_rng(4)
    low, count = 3, 5
    weights = rng.standard_normal(count).astype(np.float32)
    whole = system(weights, low, dtype, "float32", **told)
    # Sums of these are exact, in whatever order they are taken.
    raw = (rng.integers(-512, 512, (steps, RANKS, count)) / 64).astype(np.float32)
    kinds = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 65504, 2.0**120], np.float32)
    fault = rng.choice(kinds, raw.shape)
    is_bad_step = rng.random((steps, 1, 1)) < 0.2
    is_bad_step |= np.repeat(rng.random((steps // 50, 1, 1)) < 0.04, 50, 0)
    is_bad_rank = np.arange(RANKS)[:, None] == rng.integers(RANKS, size=(steps, 1, 1))
    is_fault = is_bad_step & is_bad_rank & (rng.random(raw.shape) < 0.3)
    params = as_tree(jnp.asarray(weights[:low]), jnp.asarray(weights[low:]), dtype)
    carry = params, start_late(tx.init(params))
    carry = jax.tree.map(lambda x: jnp.stack([x] * RANKS), carry)
    step = one_step(tx, "float32", averaged=True, low_count=low)

    def scan(carry, given):
        carry = jax.tree.map(lambda x: x[0], carry)
        carry, seen = jax.lax.scan(step, carry, tuple(x[:, 0] for x in given))
        return jax.tree.map(lambda x: x[None], carry), seen

    specs = P("data"), P(None, "data")
    run = jax.jit(
        shard_map(scan, mesh=MESH, in_specs=specs, out_specs=specs, check_vma=False)
    )
    for i in range(0, steps, CHUNK):
        part = [x[i : i + CHUNK] for x in (raw, is_fault, fault)]
        carry, (kernel, masters, norm, counters) = run(carry, part)
        rows = []
        for each in zip(*part, strict=True):
            scale = whole.scaling.scale
            with np.errstate(invalid="ignore"):
                scaled = np.where(each[1], each[2], each[0] * scale).sum(0) / 4
            finite = whole.step(scaled, np.ones(count, bool), scaled)
            rows.append((whole.low, whole.weights, [*whole.counters(), finite]))
        want = [np.array(x) for x in zip(*rows, strict=True)]
        for rank in range(RANKS):
            assert_same(f"counters of rank {rank}", counters[:, rank], want[2])
            assert_same(f"params of rank {rank}", kernel[:, rank], want[0])
            assert_same(f"masters of rank {rank}", masters[:, rank], want[1][:, :low])
            assert_same(f"norm of rank {rank}", norm[:, rank], want[1][:, low:])
        for leaf in map(np.asarray, jax.tree.leaves(carry)):
            assert all(leaf[0].tobytes() == other.tobytes() for other in leaf)
    assert all(whole.scaling.events.values()), whole.scaling.events


LENGTH_OF_OTHERS = 20 * CHUNK
dynamic_on_ranks = functools.partial(dynamic, axis_name="data")
# Sums over ranks are exact only for scales from 1 on.
FROM_ONE = faults.LIVELY | {"min_scale": 1.0}
CHECKS = {
    "parts, bfloat16": lambda steps: parts_of_params_skip_together(
        steps, around(dynamic_on_ranks, momentum()), "bfloat16", "float32"
    ),
    "parts, float16, adamw": lambda steps: parts_of_params_skip_together(
        steps,
        around(dynamic_on_ranks, adamw()),
        "float16",
        "float16",
        rule=faults.AdamW,
    ),
    "parts, split": lambda steps: parts_of_params_skip_together(
        steps,
        around(dynamic_on_ranks, momentum(), storage=SPLIT),
        "bfloat16",
        "bfloat16",
        split_bits=16,
    ),
    "copies": lambda steps: copies_of_params_stay_equal(
        steps,
        around(functools.partial(dynamic_on_ranks, min_scale=1.0), momentum()),
        "bfloat16",
        settings=FROM_ONE,
    ),
}

if __name__ == "__main__":
    assert len(jax.devices()) == RANKS
    # The first at full length; the others differ from it in what is on each rank.
    steps, *names = sys.argv[1:]
    steps = int(steps)
    for name in names or CHECKS:
        CHECKS[name](steps)
        print(name)
        steps = min(steps, LENGTH_OF_OTHERS)
