"""Sums of gradients over micro-batches, against sums of NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

SUM = optax.microbatching.AccumulationType.SUM
WIDTH = 512


def hand_out(count, dtype="bfloat16", seed=0):
    """Return gradients of so many micro-batches: a stack for a param of a tree."""
    rng = np.random.default_rng(seed)
    shapes = {"w": (WIDTH, 16), "b": (7,), "s": ()}
    return {
        name: jnp.asarray(rng.normal(size=(count, *shape)) + 1, dtype)
        for name, shape in shapes.items()
    }


def summed_by(accumulator):
    """Return what `optax.microbatch` makes a sum of a stack of gradients with."""

    def first(grads):
        return jax.tree.map(lambda g: g[0], grads)

    return jax.jit(optax.microbatch(first, 0, 1, accumulator))


def accumulate(grads, accumulator):
    return summed_by(accumulator)(grads)


def exact(grads, keep=slice(None)):
    return {name: np.asarray(g, np.float64)[keep].sum(0) for name, g in grads.items()}


def error(found, wanted):
    """Return the largest error, as a share of the largest sum."""
    return max(
        np.abs(np.asarray(found[name], np.float64) - want).max() / np.abs(want).max()
        for name, want in wanted.items()
    )


@pytest.mark.parametrize(
    ("count", "dtype", "use_mean"), [(2, "float16", False), (64, "bfloat16", True)]
)
def test_sums_and_means_are_of_float32(count, dtype, use_mean):
    grads = hand_out(count, dtype)
    accumulator = optax_mp.gradient_accumulator(use_grad_mean=use_mean)
    found, dropped_count = accumulate(grads, accumulator)
    divisor = count if use_mean else 1
    wanted = {name: x / divisor for name, x in exact(grads).items()}
    assert error(found, wanted) < 1e-6
    assert {x.dtype.name for x in found.values()} == {"float32"}
    assert dropped_count == 0


def test_sums_in_bfloat16_are_right_on_average():
    # Each addition is under half a unit of the sum.
    grads = {"w": jnp.full((48, 4096), 0.015, jnp.bfloat16).at[0].set(4)}
    total = exact(grads)["w"][0]

    @jax.jit
    def sum_and_mean(grads, seed):
        return [
            accumulate(
                grads,
                optax_mp.gradient_accumulator("bf16", use_grad_mean=mean, seed=seed),
            ).grads["w"]
            for mean in (False, True)
        ]

    first, second = (sum_and_mean(grads, jnp.int32(seed)) for seed in (1, 2))
    for found in (first, second):
        for x, wanted in zip(found, (total, total / 48), strict=True):
            assert x.dtype == jnp.bfloat16
            assert abs(np.asarray(x, np.float64).mean() / wanted - 1) < 0.001
    assert (first[0] != second[0]).any()
    assert float(accumulate(grads, SUM)["w"][0]) == 4.0


def test_bad_micro_batches_are_dropped_and_counted():
    rng = np.random.default_rng(3)
    sums, means = (
        summed_by(optax_mp.gradient_accumulator(use_grad_mean=use_mean))
        for use_mean in (False, True)
    )
    for seed in range(6):
        grads = hand_out(8, seed=seed)
        bad = rng.random(8) < seed / 5
        for i in np.flatnonzero(bad):
            name = "wbs"[i % 3]
            values = np.array(grads[name], np.float32)
            values.reshape(8, -1)[i, -1] = [np.inf, np.nan, -np.inf][i % 3]
            grads[name] = jnp.asarray(values, jnp.bfloat16)
        for run, divisor in ((sums, 1), (means, (~bad).sum())):
            found, dropped_count = run(grads)
            assert dropped_count == bad.sum()
            if bad.all():
                assert all(np.isnan(x).all() for x in found.values())
                continue
            wanted = {name: x / divisor for name, x in exact(grads, ~bad).items()}
            assert error(found, wanted) < 1e-6


def loss(params, x):
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)


def test_a_training_step_sees_a_scaled_loss_and_shrinks_the_scale():
    tx = optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(optax.sgd(0.5)), init_scale=64.0, growth_interval=1
    )
    params = {"w": jnp.linspace(-1, 1, 16, dtype="float16").reshape(4, 4)}
    gradients = optax.microbatch(
        optax_mp.value_and_grad(loss), 2, 2, optax_mp.gradient_accumulator()
    )

    @jax.jit
    def step(params, state, x):
        (value, grads), dropped_count = gradients(state, params, x)
        updates, state = tx.update(grads, state, params, dropped_count=dropped_count)
        return value, optax.apply_updates(params, updates), state

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), "float16")
    plain = jax.jit(jax.grad(loss))(params, x.astype(jnp.float32))["w"]
    value, new, state = step(params, jax.jit(tx.init)(params), x)
    assert state.scale == 128.0
    np.testing.assert_allclose(value, loss(params, x.astype(jnp.float32)), rtol=0.01)
    moved = optax_mp.master_params(state, new)["w"] - params["w"].astype(jnp.float32)
    np.testing.assert_allclose(moved, -0.5 * plain, atol=0.01)
    # A bad example is in one of four: examples 0 and 4 are in the first.
    _, new, after = step(new, state, x.at[4, 1].set(jnp.inf))
    assert after.scale == 128.0 and after.last_finite
    assert after.finite_count == after.total_skipped_count == 0
    assert (new["w"] != params["w"]).all()
    _, same, after = step(new, after, jnp.full_like(x, jnp.nan))
    assert after.scale == 64.0 and after.total_skipped_count == 1
    assert (same["w"] == new["w"]).all()
    assert step._cache_size() == 1


def test_gradients_of_examples_are_summed_in_float32():
    grads = hand_out(16)["w"][:, :64]
    total = np.asarray(grads, np.float64).sum(0)
    for use_mean, wanted in ((False, total), (True, total / 16)):
        accumulator = optax_mp.gradient_accumulator(use_grad_mean=use_mean)
        found = accumulator.aggregate(grads)
        assert error({"w": found}, {"w": wanted}) < 1e-6
    gradients = optax.microbatching.micro_grad(
        lambda w, g: jnp.sum(w.astype(jnp.float32) * g),
        microbatch_size=8,
        accumulator=accumulator,
        keep_batch_dim=False,
    )
    (found, dropped_count), _ = jax.jit(gradients)(jnp.ones_like(grads[0]), grads)
    assert error({"w": found}, {"w": wanted}) < 1e-6
    assert dropped_count == 0


def test_sums_in_a_step_are_sharded_as_its_params():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((64, 32), jnp.bfloat16)}
    x = jnp.ones((64, 64), jnp.bfloat16)
    params, x = jax.device_put((params, x), NamedSharding(mesh, P("data")))
    tx = optax_mp.mixed_precision(optax.sgd(1e-3))
    accumulator = optax_mp.gradient_accumulator()

    def step(params, state, x):
        gradients = optax.microbatch(jax.grad(loss), 1, 16, accumulator)
        updates, state = tx.update(gradients(params, x).grads, state, params)
        return optax.apply_updates(params, updates), state

    text = jax.jit(step).lower(params, tx.init(params), x).compile().as_text()
    (carried,) = [line for line in text.splitlines() if " while(" in line]
    assert "f32[8,32]" in carried


def test_each_rank_of_shard_map_has_sums_of_its_own():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((4, 4), jnp.bfloat16)}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 4)), jnp.bfloat16)
    vary = getattr(jax.lax, "pvary", None)
    if hasattr(jax.lax, "pcast"):
        vary = functools.partial(jax.lax.pcast, to="varying")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def gradients(params, x):
        accumulator = optax_mp.gradient_accumulator()
        sums = optax.microbatch(jax.grad(loss), 1, 2, accumulator)
        grads, dropped_count = sums(vary(params, "data"), x)
        return jax.lax.pmean(grads, "data"), jax.lax.psum(dropped_count, "data")

    grads, dropped_count = gradients(params, x)
    wanted = jax.jit(jax.grad(loss))({"w": jnp.ones((4, 4))}, x.astype("float32"))["w"]
    np.testing.assert_allclose(grads["w"], wanted, rtol=0.02, atol=0.02)
    grads, dropped_count = gradients(params, x.at[9].set(jnp.nan))
    assert dropped_count == 1 and np.isfinite(grads["w"]).all()


def test_float64(x64):
    grads = {"w": jnp.full((2, 3), 1e-12).at[0].set(1)}
    accumulator = optax_mp.gradient_accumulator("float64", use_grad_mean=False)
    found = accumulate(grads, accumulator).grads["w"]
    assert found.dtype == jnp.float64 and found[0] == 1 + 1e-12


MAKE = optax_mp.gradient_accumulator


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: MAKE("f16"), ValueError, "`dtype` to be float32.*, got float16"),
        (lambda: MAKE("int8"), ValueError, "to be a floating dtype .*, got 'int8'"),
        (lambda: MAKE("bf16"), TypeError, "got None; pass the number of the step"),
        (
            lambda: MAKE(seed=0.5),
            TypeError,
            "`seed` to be an integer, or None, got 0.5",
        ),
        (
            lambda: accumulate({"n": jnp.ones((2, 3), int)}, MAKE()),
            ValueError,
            r"leaf \['n'\] to be a floating.*, got int32\[3\].*its own accumulator",
        ),
    ],
)
def test_mistakes_are_errors(make, kind, message):
    with pytest.raises(kind, match=message):
        make()
