"""8-bit products over four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from communication import sent_by
from jax import shard_map
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp
from optax_mp.autocast import _eight_bits

pytestmark = pytest.mark.slow

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
X, W = (np.random.default_rng(i).normal(size=(256, 256)) for i in range(2))
FUN = optax_mp.amp(jnp.matmul, compute_dtype="float8_e4m3fn")


@pytest.fixture(autouse=True)
def half_the_smallest(monkeypatch):
    """Let products of 256 rows, columns and contracted entries run in 8 bits."""
    monkeypatch.setattr(_eight_bits, "SMALLEST", _eight_bits.SMALLEST // 2)


def loss(x, w):
    return jnp.sum(jnp.sin(FUN(x, w)))


def put(x, *spec):
    return jax.device_put(jnp.float32(x), NamedSharding(MESH, P(*spec)))


def sizes_of_all_reduces(fun, *args):
    sent = sent_by(jax.jit(fun).lower(*args).compile())
    return [n for kind, _, n in sent if kind == "all-reduce"]


def test_sharded_rows_cost_a_scalar_each():
    args = put(X, "data", None), put(W)
    # Every device has all of the weight. The sum and the weight's gradient are summed
    # with or without amp.
    found = sizes_of_all_reduces(jax.value_and_grad(loss, (0, 1)), *args)
    # The sum, the rows, and their gradient, which two products read.
    assert found.count(1) <= 4, found
    assert len(found) - found.count(1) <= 1, found
    one = jax.jit(jax.value_and_grad(loss, (0, 1)))
    for got, want in zip(
        jax.tree.leaves(one(*args)), jax.tree.leaves(one(put(X), put(W))), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2 * np.abs(want).max())


def test_in_shard_map_each_shard_has_its_own_scale():
    def spread(x, w):
        specs = P("data"), P()
        return shard_map(FUN, mesh=MESH, in_specs=specs, out_specs=P("data"))(x, w)

    x = np.concatenate([X * 4**i for i in range(4)])
    args = put(x, "data", None), put(W)
    assert sizes_of_all_reduces(spread, *args) == []
    got = np.asarray(jax.jit(spread)(*args)).reshape(4, 256, 256)
    for i in range(4):
        want = np.asarray(jax.jit(FUN)(jnp.float32(X * 4**i), jnp.float32(W)))
        np.testing.assert_allclose(
            got[i], want, rtol=1e-2, atol=1e-2 * np.abs(want).max()
        )
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(spread(args[0], w)))))
    assert np.isfinite(gradient(args[1])).all()


def test_explicitly_sharded_arrays_have_one_scale():
    mesh = jax.make_mesh((2, 2), ("x", "y"), (jax.sharding.AxisType.Explicit,) * 2)

    def gradients(**sharding):
        fun = functools.partial(jnp.einsum, "ij,jk->ik", **sharding)
        low = optax_mp.amp(fun, compute_dtype="float8_e4m3fn")
        # Of size 1, so that sums of parts in bfloat16 change no sine by much.
        total = lambda x, w: jnp.sum(jnp.sin(low(x, w) / 16))  # noqa: E731
        return jax.jit(jax.grad(total, (0, 1)))

    want = gradients()(jnp.float32(X), jnp.float32(W))
    with jax.set_mesh(mesh):
        for specs in ((P("x", None), P(None, "y")), (P("x", "y"), P("y", None))):
            args = [
                jax.device_put(jnp.float32(x), NamedSharding(mesh, spec))
                for x, spec in zip((X, W), specs, strict=True)
            ]
            got = gradients(out_sharding=P("x", None))(*args)
            assert tuple(each.sharding.spec for each in got) == specs
            for a, b in zip(got, want, strict=True):
                a, b = np.asarray(a), np.asarray(b)
                assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(b)
