"""Where states lie on eight devices, with and without `zero1`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from communication import large, sent_by
from comparison import as_bits, avals
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from slow_cases import mostly_slow
from steps import by_update

import optax_mp
from optax_mp.devices._shardings import choose_cut

pytestmark = pytest.mark.usefixtures("no_long_constant_folding")
ADAMW = optax.adamw(1e-2)
FORMS = {
    "full copies": lambda: optax_mp.mixed_precision(ADAMW),
    "5.1 bytes": lambda: optax_mp.mixed_precision(
        optax_mp.low_bit_state(ADAMW), storage=optax_mp.Split(8)
    ),
    "scaled": lambda: optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(ADAMW), init_scale=8.0
    ),
}
SLOW_COMPACT = pytest.param("5.1 bytes", marks=pytest.mark.slow)
LAYOUTS = {
    "data": {"w": P(), "v": P(), "b": P()},
    "tensor": {"w": P(None, "model"), "v": P("model"), "b": P()},
    "both": {"w": P("data", "model"), "v": P("model", "data"), "b": P("data")},
}


def mesh_of(data=4, model=2):
    devices = np.array(jax.devices()[: data * model])
    return Mesh(devices.reshape(data, model), ("data", "model"))


def shardings(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def weights(dtype=jnp.bfloat16):
    shapes = {"w": (64, 256), "v": (256, 64), "b": (64,)}
    numbers = np.random.default_rng(7)
    return {k: jnp.asarray(numbers.normal(size=s), dtype) for k, s in shapes.items()}


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"]) ** 2)


def gradients(params, steps, dtype=jnp.float32):
    """Return gradients of several sizes, the same on any mesh."""
    numbers = np.random.default_rng(0)

    def like(param, size):
        return jnp.asarray(numbers.normal(size=param.shape) * size, dtype)

    sizes = [4.0**-i for i in range(steps)]
    return [jax.tree.map(lambda p, size=size: like(p, size), params) for size in sizes]


def compiled_step(tx, params, mesh):
    """Return a training step, compiled for these shardings."""

    def step(params, state, x):
        grads = jax.grad(loss)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x = jax.device_put(jnp.ones((32, 64), jnp.bfloat16), NamedSharding(mesh, P("data")))
    state = jax.jit(tx.init)(params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()


def run(tx, params, grads, state=None, programs=None):
    """Return params and state after these gradients, and so many programs."""
    step = jax.jit(by_update(tx))
    state = jax.jit(tx.init)(params) if state is None else state
    for grad in grads:
        params, state = step(params, state, grad)
    assert programs in (None, step._cache_size())
    return params, state


def run_both(bare, tx, params, grads, **settings):
    """Return what `run` does with `zero1`, after a check that it is as without."""
    want = run(bare, params, grads)
    got = run(tx, params, grads, **settings)
    assert as_bits(got) == as_bits(want)
    return got


def everywhere(mesh, tree):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def lies_as(leaf, sharding):
    return leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def bytes_on_each_device(tree):
    held = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return [n for n in held.values() if n]


@mostly_slow(
    ("name", "count"),
    [*((name, 8) for name in FORMS), ("5.1 bytes", 2)],
    lambda name, count: name == "scaled",
)
def test_results_are_those_of_one_device_and_each_holds_its_part(name, count):
    """Params, masters, codes, scales and counts of steps."""
    bare, params = FORMS[name](), weights()
    grads = gradients(params, 3)
    if name == "scaled":
        grads[1]["w"] = grads[1]["w"].at[3, 5].set(jnp.inf)
    mesh = mesh_of(count, 1)
    tx = optax_mp.zero1(bare, mesh, "data")
    placed = everywhere(mesh, params)
    start = tx.init(placed)
    got, state = run(tx, placed, grads, start, programs=1)
    assert as_bits((got, state)) == as_bits(run(bare, params, grads))
    assert avals(state) == avals(start)
    assert all(lies_as(p, NamedSharding(mesh, P())) for p in got.values())
    for made in (start, jax.jit(tx.init)(placed), state):
        of_all = sum(x.nbytes for x in jax.tree.leaves(made) if x.ndim) // count
        scalars = sum(x.nbytes for x in jax.tree.leaves(made) if not x.ndim)
        assert bytes_on_each_device(made) == [of_all + scalars] * count


@mostly_slow(
    ("dtype", "bits"),
    [("bfloat16", "u16"), ("float32", "u32")],
    lambda dtype, bits: dtype == "bfloat16",
)
def test_params_are_gathered_once_in_their_own_dtype(dtype, bits):
    mesh = mesh_of(8, 1)
    params = everywhere(mesh, weights(dtype))
    tx = optax_mp.zero1(FORMS["scaled"](), mesh, "data")
    sent = large(sent_by(compiled_step(tx, params, mesh)))
    gathered = [(d, n) for kind, d, n in sent if kind == "all-gather"]
    assert gathered == [(bits, n) for n in sorted(p.size for p in params.values())]
    others = {kind for kind, _, _ in sent} - {"all-gather"}
    assert others <= {"all-reduce", "reduce-scatter"}, sent


def test_a_state_that_lies_otherwise_is_named_and_moved():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    tx = optax_mp.zero1(FORMS["full copies"](), mesh, "data")
    params = everywhere(mesh, {"w": jnp.ones((16, 8), jnp.bfloat16)})
    with jax.set_mesh(mesh):
        state, step = tx.init(params), jax.jit(by_update(tx))
        want = step(params, state, params)
        message = r"master_params\['w'\] of the state.*state_shardings\(tx, params\)"
        with pytest.warns(optax_mp.MixedPrecisionWarning, match=message):
            got = step(params, everywhere(mesh, state), params)
    assert as_bits(got) == as_bits(want)
    assert avals(got) == avals(want)


def test_states_are_made_read_and_converted_where_axes_are_explicit():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    params = everywhere(mesh, {"w": jnp.ones((64, 256), jnp.bfloat16)})
    optax_mp.zero1(ADAMW, mesh, "data").init(params)  # which reads no params
    names = "5.1 bytes", "scaled"
    tx, to_tx = (optax_mp.zero1(FORMS[x](), mesh, "data") for x in names)
    params, state = run(tx, params, gradients(params, 3))
    want = optax_mp.master_params(state, params)
    same = optax_mp.replace_master_params(state, params, want)
    assert as_bits(same) == as_bits(state)

    def convert(state, params):
        back = optax_mp.convert_opt_state(state, params, tx, to_tx)
        back = optax_mp.convert_opt_state(back, params, to_tx, to_tx)
        followed = optax_mp.follow_params(back, params).inner_state.master_params
        # Not equal to the masters: `Split` rounds ties differently from a cast.
        return back.inner_state.master_params, followed["w"].astype(jnp.bfloat16)

    for function in convert, jax.jit(convert):
        assert as_bits(function(state, params)) == as_bits((want, params))


@pytest.mark.slow
def test_leaves_that_do_not_divide_are_handled():
    mesh = mesh_of(8, 1)
    shapes = {"odd": (3, 5), "second": (7, 16), "none": (0, 8), "scalar": ()}
    params = {k: jnp.ones(s, jnp.bfloat16) for k, s in shapes.items()}
    params |= {"norm": jnp.ones(12), "count": jnp.int32(3), "nothing": None}
    params = everywhere(mesh, params)
    bare = FORMS["full copies"]()
    where = jax.tree.map(lambda p: p.sharding, params | {"count": jnp.int32(3)})
    tx = optax_mp.zero1(bare, mesh, "data", param_specs=where)
    grads = [g | {"count": None} for g in gradients(params, 3)]
    results = [jax.jit(x.update)(grads[0], x.init(params), params) for x in (bare, tx)]
    # A weight that stays has an update of -0.0 from zero1.
    results = jax.tree.map(lambda x: x + 0, results)
    assert as_bits(results[0]) == as_bits(results[1])
    masters = results[1][1].master_params
    assert lies_as(masters["second"], NamedSharding(mesh, P(None, "data")))
    assert lies_as(masters["odd"], NamedSharding(mesh, P()))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "both"])
def test_params_sharded_otherwise_keep_their_layout(layout):
    mesh = mesh_of()
    where = shardings(mesh, LAYOUTS[layout])
    params = jax.device_put(weights(), where)
    bare = FORMS["full copies"]()
    tx = optax_mp.zero1(bare, mesh, "data", param_specs=where)
    got, state = run_both(bare, tx, params, gradients(params, 3), programs=1)
    for name, param in got.items():
        assert lies_as(param, where[name])
    masters = {k: m.sharding.spec for k, m in state.master_params.items()}
    if layout == "tensor":
        assert masters["w"] == P("data", "model")
        assert masters["v"] in (P(("model", "data")), P(("model", "data"), None))
    else:
        assert all(lies_as(state.master_params[k], where[k]) for k in params)
    sent = sent_by(compiled_step(tx, params, mesh))
    assert "all-to-all" not in {k for k, _, _ in sent} or layout != "tensor"


def test_params_that_lie_otherwise_than_said_are_an_error():
    mesh = mesh_of()
    tx = optax_mp.zero1(ADAMW, mesh, "data")
    params = jax.device_put(weights(), shardings(mesh, LAYOUTS["tensor"]))
    message = r"\['v'\], which is bfloat16\[256,64\], to be sharded as .*param_specs=jax.tree.map"
    with pytest.raises(ValueError, match=message):
        tx.init(params)


@pytest.mark.parametrize("form", ["full copies", SLOW_COMPACT])
def test_a_run_goes_on_with_and_without_and_on_other_devices(form):
    """The first step after a restore on another mesh is that of the old one."""
    grads, bare = gradients(weights(), 3), FORMS[form]()
    want = run(bare, weights(), grads)
    mesh, other = mesh_of(8, 1), mesh_of(4, 1)
    tx = optax_mp.zero1(bare, mesh, "data")
    params, state = run(tx, everywhere(mesh, weights()), grads[:1])
    params, state = run(bare, params, grads[1:2], state)
    params, state = everywhere(other, (params, state))
    tx = optax_mp.zero1(bare, other, "data")
    params, state = run(tx, params, grads[2:], state)
    assert as_bits((params, state)) == as_bits(want)
    parts = state.master_params["w"]
    assert lies_as(parts, NamedSharding(other, P("data")))
    masters = optax_mp.master_params(state, params)
    assert as_bits(masters) == as_bits(optax_mp.master_params(*want[::-1]))


@pytest.mark.slow
def test_wrappers_of_optax_work_inside():
    mesh = mesh_of(8, 1)
    params = everywhere(mesh, weights())
    grads = gradients(params, 3)
    labels = {"w": "a", "v": "b", "b": "a"}
    parts = {"a": optax_mp.mixed_precision(ADAMW), "b": optax.set_to_zero()}
    mixed = optax_mp.mixed_precision
    for bare in (
        optax.MultiSteps(mixed(ADAMW), 2).gradient_transformation(),
        optax.partition(parts, labels),
        optax.chain(optax_mp.dynamic_loss_scale(init_scale=1.0), mixed(ADAMW)),
    ):
        _, state = run_both(bare, optax_mp.zero1(bare, mesh, "data"), params, grads)
        for leaf in jax.tree.leaves(state):
            assert leaf.ndim == 0 or lies_as(leaf, NamedSharding(mesh, P("data")))


@pytest.mark.slow
def test_float16_and_float8_and_extreme_params_land_as_without():
    mesh = mesh_of(8, 1)
    extreme = [-0.0, 0.0, 1e-30, -1e30, 3e38, jnp.inf, jnp.nan, 1.0]
    for dtype in ("float16", "float8_e4m3fn"):
        with np.errstate(all="ignore"):  # 3e38 is infinite in float16
            params = {"x": jnp.tile(jnp.asarray(extreme, dtype), 8)}
        update_dtype = "params" if dtype.startswith("float8") else None
        inner = optax_mp.mixed_precision(optax.sgd(1.0), update_dtype=update_dtype)
        bare = optax_mp.dynamic_loss_scale(inner, init_scale=1.0)
        values = np.random.default_rng(1).normal(size=(4, 64)) * 1e-3
        grads = [{"x": jnp.asarray(v, jnp.float32)} for v in values]
        grads[1]["x"] = grads[1]["x"].at[0].set(jnp.nan)  # a skipped step
        tx = optax_mp.zero1(bare, mesh, "data")
        run_both(bare, tx, everywhere(mesh, params), grads)


@pytest.mark.slow
def test_two_axes_may_go_along_two_axes_of_an_array():
    mesh = mesh_of()
    params = {"w": jnp.ones((4, 6), jnp.bfloat16), "v": jnp.ones((16, 3), jnp.bfloat16)}
    params, bare = everywhere(mesh, params), FORMS["full copies"]()
    tx = optax_mp.zero1(bare, mesh, ("data", "model"))
    got, state = run_both(bare, tx, params, gradients(params, 3))
    for tree in (state.master_params, state.inner_state[0].nu):
        assert lies_as(tree["w"], NamedSharding(mesh, P("data", "model")))
        assert lies_as(tree["v"], NamedSharding(mesh, P(("data", "model"))))
    assert all(lies_as(p, NamedSharding(mesh, P())) for p in got.values())


def test_a_skipped_step_changes_no_bit():
    mesh = mesh_of(8, 1)
    tx = optax_mp.zero1(FORMS["scaled"](), mesh, "data")
    values = jnp.resize(jnp.bfloat16([-0.0, -jnp.inf, 1.5, 3e38]), (8, 4))
    params = everywhere(mesh, {"w": values})
    grads = {"w": jnp.full((8, 4), jnp.nan)}
    new, _ = jax.jit(by_update(tx))(params, tx.init(params), grads)
    assert as_bits(new) == as_bits(params)


def test_what_is_sharded_over_the_axis_is_not_cut_again():
    specs = P("data"), P(None, "data"), P("model")
    cuts = [choose_cut(mesh_of(), ("data",), (64, 64), spec) for spec in specs]
    assert [cut is None for cut in cuts] == [True, True, False]
