"""Loops of frameworks on eight devices: Linen, NNX, haliax, openpi's rule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from communication import collectives_in, sent_by
from forms import tx_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from low_bit_examples import is_quantized
from recent_flax import recent_nnx
from slow_cases import mostly_slow

import optax_mp

nnx = recent_nnx()
nn = pytest.importorskip("flax.linen")

pytestmark = pytest.mark.usefixtures("no_long_constant_folding")
MESH = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
COMPACT = tx_of("5 bytes")
in_each_form = mostly_slow(
    "name", ["masters", "5 bytes", "scaled, 5 bytes"], "5 bytes".__eq__
)


def specs(tree):
    return [leaf.sharding.spec for leaf in jax.tree.leaves(tree)]


def step_of(tx):
    def step(params, state):
        # Not constants: XLA would know that they are finite.
        grads = jax.tree.map(lambda x: 1 + x.astype(jnp.float32), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def assert_sends_little(compiled, state, name):
    """With a loss scale, whether gradients are finite; the largest of shared lines."""
    sent = sent_by(compiled)
    found = jax.tree.leaves(state, is_leaf=is_quantized)
    scales = jax.tree.leaves([x.scales for x in found if is_quantized(x)])
    lines = sum(x.size for x in scales)
    assert {kind for kind, _, _ in sent} <= {"all-reduce"}, name
    assert len(collectives_in(compiled)) <= 2 * bool(lines) + (
        name == "scaled, 5 bytes"
    ), name
    assert sum(n for _, _, n in sent) <= lines + (name == "scaled, 5 bytes"), name


def linen_params(box):
    """Params as nanodo and MaxText have them, each with the names of its axes."""
    normal, ones = nn.initializers.normal(dtype=jnp.bfloat16), nn.initializers.ones
    make = {
        "embed": (normal, (5025, 64), (None, "fsdp")),
        "up": (normal, (256, 512), ("fsdp", None)),
        "down": (normal, (512, 256), (None, "fsdp")),
        "heads": (normal, (128, 64), (None, "fsdp")),
        "norm": (ones, (256,), ("fsdp",)),
    }
    key = jax.random.key(0)
    return {name: box(f, names)(key, shape) for name, (f, shape, names) in make.items()}


# haliax's own.
@pytest.mark.filterwarnings("ignore:jax.interpreters:DeprecationWarning")
@in_each_form
def test_haliax_states_are_sharded_by_their_axes(name):
    haliax = pytest.importorskip("haliax")
    embed, mlp = haliax.Axis("embed", 512), haliax.Axis("mlp", 1024)

    def init():
        def normal(*axes):
            return haliax.random.normal(jax.random.key(0), axes).astype(jnp.bfloat16)

        params = (normal(embed, mlp), {"down": normal(mlp, embed)})
        return params, tx_of(name).init(params)

    with jax.set_mesh(MESH), haliax.axis_mapping({"embed": "fsdp"}):
        params, state = haliax.named_jit(init)()
        advance = step_of(tx_of(name))
        step = jax.jit(advance).lower(params, state).compile()
        assert_sends_little(step, state, name)
        _, new_state = haliax.named_jit(advance)(params, state)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for leaf in jax.tree.leaves((state, new_state)):
        # All devices share a line along the axis that is sharded, and its scale.
        is_whole = leaf.sharding.is_fully_replicated
        assert leaf.ndim == 0 or not is_whole or 1 in leaf.shape, leaf.shape


@in_each_form
def test_linen_states_are_sharded_by_their_boxes(name):
    is_plain, tx = name == "5 bytes", tx_of(name)
    box = nn.with_partitioning if is_plain else nn.with_logical_partitioning

    def init():
        params = linen_params(box)
        return params, tx.init(params)

    abstract = jax.eval_shape(init)
    assert jax.tree.leaves(nn.get_partition_spec(abstract))
    shardings = nn.get_sharding(abstract, MESH)
    params, state = jax.jit(init, out_shardings=shardings)()
    jax.tree.map(jax.device_put, nn.meta.unbox(state), shardings[1])
    step = jax.jit(step_of(tx)).lower(params, state).compile()
    assert_sends_little(step, state, name)
    params, state = step(params, state)
    assert jax.tree.structure(state) == jax.tree.structure(abstract[1])


@in_each_form
def test_nnx_optimizers_are_described_under_a_mesh(name):
    class Net(nnx.Module):
        def __init__(self, rngs):
            def normal(*names):
                return nnx.with_partitioning(nnx.initializers.normal(), names)

            low = {"param_dtype": jnp.bfloat16, "rngs": rngs}
            self.a = nnx.Linear(128, 64, kernel_init=normal(None, "fsdp"), **low)
            self.b = nnx.Linear(64, 256, kernel_init=normal("fsdp", None), **low)
            self.norm = nnx.RMSNorm(256, rngs=rngs)

    tx = tx_of(name)

    def make(tx=tx):
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with jax.set_mesh(MESH):
        _, abstract = nnx.eval_shape(make)
        for _, variable in nnx.to_flat_state(nnx.state(abstract)):
            assert variable.dtype == variable.get_value().dtype
        nnx.get_partition_spec(nnx.state(abstract))
        _, optimizer = nnx.jit(make)()
    for leaf in jax.tree.leaves(nnx.state(optimizer)):
        is_part = "fsdp" in leaf.sharding.spec or 1 in leaf.shape
        assert leaf.ndim < 2 or is_part, (name, leaf.shape)


def largest_axis(x):
    """Return a sharding by shape, as openpi's rule chooses it."""
    spec = [None] * len(x.shape)
    for axis in np.argsort(x.shape)[::-1]:
        if x.size >= 4096 and x.shape[axis] % 8 == 0:
            spec[axis] = "fsdp"
            break
    return NamedSharding(MESH, PartitionSpec(*spec))


SHAPES = {
    "embed": (50257, 768),
    "head": (768, 50257),
    "w": (256, 1024),
    "k": (1024, 128),
    "norm": (768,),
}


def described(name):
    dtype = jnp.float32 if name == "norm" else jnp.bfloat16
    return jax.ShapeDtypeStruct(SHAPES[name], dtype)


@in_each_form
def test_a_rule_by_shape_for_params_and_state_shardings_for_the_state(name):
    params = {name: described(name) for name in SHAPES}
    shardings = jax.tree.map(largest_axis, params)
    params = jax.tree.map(lambda x, s: x.update(sharding=s), params, shardings)
    tx = tx_of(name)
    chosen = optax_mp.state_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: x.update(sharding=s), jax.eval_shape(tx.init, params), chosen
    )
    again = optax_mp.state_shardings(
        tx, {name: described(name) for name in SHAPES}, shardings
    )
    assert again == chosen
    assert specs(tx.init(params)) == specs(state)
    init = jax.jit(tx.init).lower(params).compile().output_shardings
    for x, found in zip(*map(jax.tree.leaves, (state, init)), strict=True):
        assert found.is_equivalent_to(x.sharding, x.ndim), (name, x, found)
    out = shardings, chosen
    step = jax.jit(step_of(tx), out_shardings=out).lower(params, state).compile()
    assert_sends_little(step, state, name)


def test_zero1_and_offload_say_where_their_state_is():
    whole = NamedSharding(MESH, PartitionSpec())
    params = {"w": described("w"), "norm": described("norm")}
    tx = optax_mp.zero1(COMPACT, MESH, "fsdp")
    chosen = optax_mp.state_shardings(tx, params, whole)
    arrays = jax.tree.map(
        lambda x: jax.device_put(jnp.ones(x.shape, x.dtype), whole), params
    )
    for x, want in zip(*map(jax.tree.leaves, (tx.init(arrays), chosen)), strict=True):
        assert x.sharding.is_equivalent_to(want, x.ndim), (x.shape, want)
    if jax.__version_info__ >= (0, 10):
        tx = optax_mp.offload(COMPACT)
        chosen = optax_mp.state_shardings(tx, params, whole)
        assert chosen.master_params["w"].memory_kind == "pinned_host"
        assert chosen.inner_state.step_count.memory_kind == "device"


# Axes that do not divide into lines or groups of one length on eight devices.
UNEVEN = (1024, 2056), (128, 2080), (64, 264), (2880, 2880), (6, 128, 5504), (3, 64, 96)


@mostly_slow("axis", [-1, -2], (-1).__eq__)
def test_nothing_is_gathered_where_axes_do_not_divide(axis):
    params = []
    for shape in UNEVEN:
        spec = [None] * len(shape)
        spec[axis] = "fsdp"
        where = NamedSharding(MESH, PartitionSpec(*spec))
        params.append(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where))
    state = COMPACT.init(params)
    for x in jax.tree.leaves(state):
        assert not x.ndim or x.sharding.spec[axis] == "fsdp" or 1 in x.shape, x
    step = jax.jit(step_of(COMPACT)).lower(params, state).compile()
    assert_sends_little(step, state, "5 bytes")
