"""low_bit_state over meshes: the bits of one device, and lines that devices share."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from comparison import as_bits
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import mostly_slow

from optax_mp import MixedPrecisionWarning, low_bit_state

TX = low_bit_state(optax.trace(0.9), min_size=1)
# By their lines, and by whether devices share these: shapes and shardings.
LEAVES = {
    "rows": ((64, 128), P(("a", "b"))),
    "rows, shared": ((64, 128), P("a", "b")),
    "columns": ((128, 2048), P(None, ("a", "b"))),
    "columns, shared": ((1024, 8), P(("a", "b"))),
    "groups": ((4096,), P("a")),
    "groups, shared": ((2400,), P(("a", "b"))),
    "rows of groups": ((8, 1024), P("b", "a")),
    "layers": ((8, 32, 64), P(None, "a", "b")),
    "kernels, shared": ((64, 2, 4), P("b", "a")),
    "uneven parts": ((257, 64), P(None, ("a", "b"))),
}


def mesh_of(kind, count=8):
    kinds = (getattr(AxisType, kind),) * 2
    devices = jax.devices()[:count]
    return jax.make_mesh((2, count // 2), ("a", "b"), axis_types=kinds, devices=devices)


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, (shape, _) in LEAVES.items()
    }


def shardings_on(mesh):
    return {name: NamedSharding(mesh, spec) for name, (_, spec) in LEAVES.items()}


@jax.jit
def state_after_two_steps(params, grads):
    """Updates are sums of products, which XLA may round once or twice."""
    step = lambda state, _: (TX.update(grads, state, params)[1], None)  # noqa: E731
    return jax.lax.scan(step, TX.init(params), length=2)[0]


@functools.cache
def on_one_device():
    return jax.device_get(state_after_two_steps(arrays(0), arrays(1)))


@mostly_slow(
    ("kind", "count"),
    [(kind, count) for kind in ("Auto", "Explicit") for count in (2, 8)],
    lambda kind, count: kind == "Explicit" and count == 8,
)
def test_bits_are_those_of_one_device(kind, count):
    mesh = mesh_of(kind, count)
    shardings = shardings_on(mesh)
    with jax.set_mesh(mesh):
        params, grads = jax.device_put((arrays(0), arrays(1)), (shardings,) * 2)
        state = state_after_two_steps(params, grads)
    assert as_bits(jax.device_get(state)) == as_bits(on_one_device())
    described = TX.init(
        jax.tree.map(
            lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y),
            arrays(0),
            shardings,
        )
    )
    for name, (codes, scales) in state.inner_state.trace.items():
        assert codes.sharding.is_equivalent_to(shardings[name], codes.ndim), name
        form = described.inner_state.trace[name].scales
        assert (form.shape, form.dtype) == (scales.shape, scales.dtype)
        # XLA may put scales of shared lines where it likes.
        if "shared" not in name:
            own = NamedSharding(mesh, form.sharding.spec)
            assert scales.sharding.is_equivalent_to(own, scales.ndim), name


def numbers_sent(program):
    """Return the sizes of arrays that collectives of a compiled program make, by name."""
    name = r"(all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    sent = re.findall(rf"= (.*) {name}", program.as_text())
    return {
        kind: {
            math.prod(map(int, filter(None, shape.split(","))))
            for left in (left for left, x in sent if x == kind)
            for shape in re.findall(r"\w+\[([\d,]*)\]", left)
        }
        for _, kind in sent
    }


def test_only_the_largest_of_shared_lines_are_sent():
    names = "rows", "rows, shared", "columns", "columns, shared", "groups"
    mesh = mesh_of("Auto")
    params = {name: arrays(0)[name] for name in names}
    params = jax.device_put(params, {k: shardings_on(mesh)[k] for k in names})
    state = jax.jit(TX.init)(params)
    program = jax.jit(TX.update).lower(params, state, params).compile()
    # Half of the 64 rows are on a device, and a part of each of the 8 columns.
    assert numbers_sent(program) == {"all-reduce": {32, 8}}


def test_ranks_of_shard_map_that_share_a_line_have_one_scale():
    """To the nearest code: at random each rank counts positions in its own part."""
    tx = low_bit_state(optax.trace(0.9), min_size=1, seed=None)
    names = "rows", "rows, shared", "columns, shared", "groups", "kernels, shared"
    specs = {name: LEAVES[name][1] for name in names}
    # So that ranks have parts of other sizes.
    grads = {k: arrays(1)[k] * np.geomspace(1e-3, 1, LEAVES[k][0][-1]) for k in names}
    grads = jax.tree.map(lambda g: g.astype(np.float32), grads)
    state = tx.init(grads)

    def spec_of_scales(name):
        shape = state.inner_state.trace[name].scales.shape
        entries = zip((*specs[name], None, None), shape, strict=False)
        return P(*(axes if n > 1 else None for axes, n in entries))

    of_arrays = {
        name: q._replace(codes=specs[name], scales=spec_of_scales(name))
        for name, q in state.inner_state.trace.items()
    }
    of_state = jax.tree.map(lambda _: P(), state)
    of_state = of_state._replace(inner_state=optax.TraceState(of_arrays))
    step = lambda grads, state: tx.update(grads, state, grads)[1]  # noqa: E731
    # The check of types would refuse a scale that may differ between ranks.
    on_ranks = jax.shard_map(
        step, mesh=mesh_of("Auto"), in_specs=(specs, of_state), out_specs=of_state
    )
    got, want = jax.jit(on_ranks)(grads, state), jax.jit(step)(grads, state)
    assert as_bits(jax.device_get(got)) == as_bits(jax.device_get(want))


def test_ranks_whose_types_are_silent_are_warned_of():
    """With `check_vma=False` nothing says which ranks share a line."""
    grads = arrays(1)["rows, shared"]
    state = TX.init(grads)
    step = lambda grads: TX.update(grads, state)[0]  # noqa: E731

    def run(**settings):
        spec = {"in_specs": P(None, "a"), "out_specs": P(None, "a")}
        ranks = jax.shard_map(step, mesh=mesh_of("Auto", 2), **spec, **settings)
        jax.eval_shape(ranks, jax.ShapeDtypeStruct((64, 256), jnp.float32))

    run()
    message = r"low_bit_state: within `jax.shard_map\(check_vma=False\)`, ranks may"
    with pytest.warns(MixedPrecisionWarning, match=message):
        run(check_vma=False)


def test_each_layer_of_a_stack_is_coded_as_alone():
    """In one array, by `vmap` with a state for each, and in a scan over layers."""
    tx = low_bit_state(optax.trace(0.9), min_size=1, seed=None)
    rng = np.random.default_rng(0)
    stacks = {
        shape: jnp.asarray(rng.standard_normal((3, *shape)), jnp.float32)
        for shape in [(32, 16), (16, 200), (8, 3, 3), (300,)]
    }
    step = lambda grads: tx.update(grads, tx.init(grads), grads)[1]  # noqa: E731
    together = jax.jit(jax.vmap(step))(stacks).inner_state.trace
    scanned = jax.jit(lambda x: jax.lax.map(step, x))(stacks).inner_state.trace
    assert as_bits(scanned) == as_bits(together)
    alone = jax.tree.map(lambda x: x[1], stacks)
    first = jax.tree.map(lambda x: x[1], together)
    assert as_bits(first) == as_bits(jax.jit(step)(alone).inner_state.trace)
    del stacks[300,]  # of two axes it would be three long rows
    stacked = jax.jit(step)(stacks).inner_state.trace
    assert as_bits(stacked) == as_bits({k: together[k] for k in stacks})
