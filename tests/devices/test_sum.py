"""Sums of gradients over devices, against NumPy's in the order of the devices."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from communication import ARRAY, collectives_in
from comparison import as_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import mostly_slow

import optax_mp
from optax_mp.devices import _sum

SHAPES = {"first": (64, 16), "second": (3, 64), "odd": (5, 7), "s": (), "none": (0, 3)}
# The dimension of each that eight devices divide.
CUT = {"first": 0, "second": 1}


def hand_out(count, shapes=SHAPES, dtype="bfloat16", spread=10):
    """Return gradients of so many devices, along a leading axis, and zeros."""
    rng = np.random.default_rng(count)

    def values(shape):
        # So far apart that the order of additions matters.
        size = 2.0 ** rng.integers(-spread, spread + 1, (count, *shape))
        numbers = rng.normal(size=(count, *shape)) * size
        return np.where(rng.random(shape) < 0.1, -0.0, numbers)

    return {name: jnp.asarray(values(shape), dtype) for name, shape in shapes.items()}


def in_order(stacked, dtype="bfloat16"):
    """Return the float32 sum of what is sent, in the order of the devices."""
    sent = np.asarray(stacked).astype(jnp.dtype(dtype)).astype(np.float32)
    return functools.reduce(np.add, sent)


def mesh_of(*sizes, kind=AxisType.Auto):
    names = ("data", "model")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def summed(mesh, *, axis="data", check=True, **settings):
    """Return a program that sums what each device has."""

    def on_each(grads):
        own = jax.tree.map(lambda g: g[0], grads)
        return optax_mp.sum_gradients(own, axis, **settings)

    def spec(name):
        is_part = settings.get("scatter") and name in CUT
        return P(*[None] * CUT[name], axis) if is_part else P()

    specs = {name: spec(name) for name in SHAPES}
    return jax.jit(
        jax.shard_map(
            on_each, mesh=mesh, in_specs=P(axis), out_specs=specs, check_vma=check
        )
    )


@mostly_slow(
    ("dtype", "sent", "check"),
    [
        ("bfloat16", "bfloat16", True),
        ("float16", "float16", False),
        ("float32", "bfloat16", True),
        ("float32", "float32", True),
    ],
    lambda dtype, sent, check: dtype == sent == "bfloat16",
)
@pytest.mark.parametrize("scatter", [True, False])
def test_sums_are_those_of_float32_bit_for_bit(dtype, sent, check, scatter):
    grads = hand_out(8, dtype=dtype)
    program = summed(mesh_of(8), check=check, scatter=scatter, exchange_dtype=sent)
    found = program(grads)
    for name, stacked in grads.items():
        wanted = in_order(stacked, sent)
        wanted = wanted if scatter else wanted.astype(jnp.dtype(sent))
        assert as_bits(found[name]) == as_bits(jnp.asarray(wanted)), name


@pytest.mark.slow
def test_two_axes_may_be_summed_over():
    grads = hand_out(8)
    found = summed(mesh_of(4, 2), axis=("data", "model"))(grads)
    wanted = jax.tree.map(lambda g: in_order(g).astype(ml_dtypes.bfloat16), grads)
    assert as_bits(found) == as_bits(jax.tree.map(jnp.asarray, wanted))


def test_the_error_does_not_grow_with_the_devices():
    (stacked,) = hand_out(64, {"w": (4096,)}, spread=0).values()
    exact = np.asarray(stacked, np.float64).sum(0)

    def error(found):
        return np.abs(np.asarray(found, np.float64) - exact).max() / np.abs(exact).max()

    def ours(scatter):
        each = functools.partial(
            optax_mp.sum_gradients, axis_name="data", scatter=scatter
        )
        return jax.jit(jax.vmap(each, axis_name="data"))(stacked)

    assert error(ours(True).reshape(-1)) < 1e-7
    assert error(ours(False)[0]) < 2.0**-8


def bytes_of(compiled):
    """Return the bytes that a device sends to others by each kind, on eight devices."""
    found = {}
    for arrays, kind in collectives_in(compiled):
        for dtype, shape in ARRAY.findall(arrays):
            size = math.prod(int(n) for n in shape.split(",") if n)
            size *= 8 if dtype == "pred" else int(dtype.strip("bfsu"))
            found[kind] = found.get(kind, 0) + size // 8
    return found


def test_no_more_is_sent_than_by_a_scatter_in_16_bits():
    grads = hand_out(8)
    weights = sum(g.size // 8 for name, g in grads.items() if name in CUT)
    sent = bytes_of(summed(mesh_of(8), scatter=True).lower(grads).compile())
    # All parts of all devices, and arrays that are padded.
    assert sent["all-to-all"] <= 2 * weights + 200
    assert sent["all-gather"] <= 200 and set(sent) == {"all-to-all", "all-gather"}
    sent = bytes_of(summed(mesh_of(8)).lower(grads).compile())
    assert sum(sent.values()) <= 2 * (2 * weights + 200)


def test_gradients_that_jax_has_summed_are_an_error():
    mesh = mesh_of(8)
    params, x = jnp.ones((8, 4)), jnp.ones((16, 8))

    def make(vary):
        def on_each(params, x):
            grads = jax.grad(lambda p: jnp.mean(x @ p))(vary(params))
            return optax_mp.sum_gradients({"w": grads}, "data")

        specs = P(), P("data")
        return jax.jit(jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P()))

    message = r"leaf \['w'\].* is equal on all devices of \['data'\].*pcast\(params"
    with pytest.raises(ValueError, match=message):
        make(lambda p: p)(params, x)
    if hasattr(jax.lax, "pcast"):
        vary = functools.partial(jax.lax.pcast, axis_name="data", to="varying")
        found = np.asarray(make(vary)(params, x)["w"])
        np.testing.assert_array_equal(found.astype(np.float32), 2.0)


@pytest.mark.parametrize(
    ("grads", "dtype", "message"),
    [
        (jnp.ones(8), "f8_e4m3fn", "`exchange_dtype` to be bf.*, got float8_e4m3fn"),
        (
            {"n": jnp.ones((1, 8), int)},
            "bf16",
            r"leaf \['n'\] to be .*, got int32\[8\]",
        ),
    ],
)
def test_mistakes_are_errors(grads, dtype, message):
    each = functools.partial(
        optax_mp.sum_gradients, axis_name="data", exchange_dtype=dtype
    )
    with pytest.raises(ValueError, match=message):
        jax.vmap(each, axis_name="data")(grads)


# zero1 also sums.

PARAMS = {"first": (64, 16), "second": (3, 64), "odd": (5, 7)}


@mostly_slow(
    ("axes", "sizes", "specs", "kind"),
    [
        (("data",), (8,), None, AxisType.Auto),
        (("data",), (8,), None, AxisType.Explicit),
        (("data", "model"), (4, 2), None, AxisType.Auto),
        (("data",), (4, 2), {"first": P(None, "model"), "second": P()}, AxisType.Auto),
        (("data",), (4, 2), {"first": P("data"), "second": P()}, AxisType.Auto),
    ],
    lambda axes, sizes, specs, kind: sizes == (8,) and kind == AxisType.Auto,
)
def test_zero1_sums_and_takes_the_same_step(axes, sizes, specs, kind):
    mesh = mesh_of(*sizes, kind=kind)
    count = math.prod(mesh.shape[name] for name in axes)
    params = jax.tree.map(lambda g: g[0], hand_out(1, PARAMS))
    grads = hand_out(count, PARAMS)
    grads["first"] = grads["first"].astype(jnp.float32)
    specs = {"odd": P()} | (specs or {"first": P(), "second": P()})
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    bare = optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(optax.adamw(1e-2)), init_scale=8.0
    )
    tx = optax_mp.zero1(bare, mesh, axes, param_specs=places, exchange_dtype="bf16")
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, places)
        stacked = jax.device_put(grads, NamedSharding(mesh, P(axes)))
        state = jax.jit(tx.init)(placed)
        program = jax.jit(tx.update).lower(stacked, state, placed).compile()
        updates, state = program(stacked, state, placed)
    sums = jax.tree.map(in_order, grads)
    wanted = jax.jit(lambda g, p: bare.update(g, bare.init(p), p))(sums, params)
    assert as_bits(state) == as_bits(wanted[1])
    # A weight that stays has an update of -0.0 from zero1.
    assert as_bits(jax.tree.map(lambda u: u + 0, updates)) == as_bits(
        jax.tree.map(lambda u: u + 0, wanted[0])
    )
    weights = sum(p.size for p in params.values())
    sent = bytes_of(program)
    assert set(sent) <= {"all-to-all", "all-gather", "all-reduce"}
    assert sent["all-to-all"] <= 2 * weights and sent.get("all-reduce", 0) <= 64


def test_zero1_takes_no_gradients_that_are_summed():
    params = {"w": jnp.ones((8, 4), jnp.bfloat16)}
    tx = optax_mp.zero1(optax.sgd(1.0), mesh_of(8), "data", exchange_dtype="bf16")
    message = r"gradient at \['w'\] to have a leading axis of 8.*, got bfloat16\[8,4\]"
    with pytest.raises(ValueError, match=message):
        tx.update(params, tx.init(params), params)


def test_a_sum_of_negative_zeros_is_one():
    patterns = _sum.as_pattern(jnp.full((4, 3), -0.0), "bfloat16")
    assert jnp.signbit(_sum.sum_patterns(patterns, "bfloat16")).all()
