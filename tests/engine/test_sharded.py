"""take_step on sharded arrays: the bits of one device, and no collective."""

import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest
from communication import sent_by
from comparison import as_bits
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from sharded_arrays import arrays, compact, mesh_of, shardings
from steps import by_take_step

import optax_mp
from optax_mp import _warnings
from optax_mp.engine import _layout

pytestmark = [
    pytest.mark.usefixtures("no_long_constant_folding"),
    pytest.mark.filterwarnings(
        "ignore:optax_mp. the sharding of low-bit arrays is not known"
    ),
]


def assert_has_kernels(step, *args):
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3


def steps(step, params, state, grads):
    """Return params and state after two steps, and the last compiled one."""
    step = jax.jit(step)
    for _ in range(2):
        params, state = step(params, state, grads)
    return (params, state), step.lower(params, state, grads)


def sharded(kind):
    """Return shardings, an optimizer, and params, state and gradients on a mesh."""
    placed, tx = shardings(mesh_of(kind)), compact()
    params, grads = (jax.device_put(arrays(i), placed) for i in (0, 1))
    return placed, tx, (params, tx.init(params), grads)


def on_one_device(tx):
    params, grads = arrays(0), arrays(1)
    return steps(by_take_step(tx), params, tx.init(params), grads)[0]


@pytest.mark.slow
def test_where_shardings_are_given():
    placed, tx, args = sharded("Auto")
    step = by_take_step(tx, param_shardings=placed)
    got, lowered = steps(step, *args)
    assert as_bits(got) == as_bits(on_one_device(tx))
    assert not sent_by(lowered.compile())
    assert got[0]["both"].sharding.spec == PartitionSpec("a", "b")
    assert_has_kernels(step, *args)


@pytest.mark.slow
def test_where_types_say_it():
    with jax.set_mesh(mesh_of("Explicit")):
        _, tx, args = sharded("Explicit")
        got, _ = steps(by_take_step(tx), *args)
        assert as_bits(got) == as_bits(on_one_device(tx))
        assert_has_kernels(by_take_step(tx), *args)


@pytest.mark.slow
def test_where_nothing_is_known():
    _, tx, args = sharded("Auto")
    step = jax.jit(by_take_step(tx))  # within another `jit`

    def outer(*args):
        return step(*args)

    got, _ = steps(outer, *args)
    assert as_bits(got) == as_bits(on_one_device(tx))
    traced = jax.jit(outer).trace(*args)
    for platform in ("tpu", "cuda"):
        _warnings.warn_once.cache_clear()
        with pytest.warns(optax_mp.MixedPrecisionWarning, match="pass `param_shard"):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert not re.search("tpu_custom_call|triton", text)


@pytest.mark.slow
def test_where_arguments_say_it():
    _, tx, args = sharded("Auto")
    step = by_take_step(tx)
    assert_has_kernels(step, *args)
    with jax.set_mesh(mesh_of("Auto")):
        assert_has_kernels(step, *args)
    traced = jax.jit(step).trace(*args)
    assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
    report = optax_mp.step_report(tx, *args[::-1])
    assert {row.tpu for row in report.rows} == {"kernel, not proved here"}


@pytest.mark.slow
def test_where_arguments_disagree():
    """A state that is not sharded as its param is."""
    placed, tx, (params, state, _) = sharded("Auto")
    state = jax.device_put(state, NamedSharding(mesh_of("Auto"), PartitionSpec()))
    traced = jax.jit(by_take_step(tx)).trace(params, state, params)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in text
    given = tx, params, state, params
    for row in optax_mp.step_report(*given).rows:
        assert row.tpu == "layout not known, or uneven"
    known = optax_mp.step_report(*given, param_shardings=placed)
    assert {row.tpu for row in known.rows} == {"kernel, not proved here"}


@pytest.mark.slow
def test_where_types_do_not_say_all():
    """Over some axes of a mesh only, or of some arrays: nothing is gathered."""
    tx, rows = compact(), PartitionSpec("a", "b")
    kinds = [jax.sharding.AxisType[kind] for kind in ("Explicit", "Auto")]
    some = jax.make_mesh((2, 4), ("a", "b"), axis_types=tuple(kinds))
    step = by_take_step(tx)
    for mesh, of_grads in ((some, rows), (mesh_of("Explicit"), PartitionSpec())):
        with jax.set_mesh(mesh):
            params, grads = ({"w": arrays(i)["both"]} for i in (0, 1))
            args = params, tx.init(params), grads
            want = jax.jit(step)(*args)
            placed = tuple(
                jax.tree.map(
                    lambda x, spec=spec, mesh=mesh: jax.device_put(
                        x, NamedSharding(mesh, spec if x.ndim else PartitionSpec())
                    ),
                    arg,
                )
                for arg, spec in zip(args, (rows, rows, of_grads), strict=True)
            )
            compiled = jax.jit(step).lower(*placed).compile()
            assert as_bits(compiled(*placed)) == as_bits(want)
            assert not sent_by(compiled)
            lowered = jax.jit(step).trace(*placed).lower(lowering_platforms=("tpu",))
            assert "tpu_custom_call" not in lowered.as_text()


@pytest.mark.slow
def test_where_ranks_agree_on_a_skipped_step():
    """An effect of the name of an axis, which is none on what is computed."""
    names = ("a", "b")
    tx = optax_mp.dynamic_loss_scale(compact(), axis_name=names)
    params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)}
    args = params, jax.eval_shape(tx.init, params), params
    specs = jax.tree.map(
        lambda x: PartitionSpec("a", "b") if x.ndim else PartitionSpec(), args
    )
    step = by_take_step(tx)
    with jax.set_mesh(mesh_of("Auto")):
        sharded = jax.shard_map(step, in_specs=specs, out_specs=specs[:2])
        traced = jax.jit(sharded).trace(*args)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in text


@pytest.mark.slow
def test_where_a_part_is_manual():
    """Types say in another way there what devices hold; chunks are not for it."""
    tx = compact()
    mesh = mesh_of("Auto")
    params = {"w": jax.ShapeDtypeStruct((16384, 4096), jnp.float16)}
    args = params, jax.eval_shape(tx.init, params), params
    specs = jax.tree.map(
        lambda x: PartitionSpec("a") if x.ndim else PartitionSpec(),
        args,
    )
    step = by_take_step(tx)
    with jax.set_mesh(mesh):
        for axes in ({"a"}, {"a", "b"}):
            sharded = jax.shard_map(
                step, in_specs=specs, out_specs=specs[:2], axis_names=axes
            )
            traced = jax.jit(sharded).trace(*args)
            assert "stablehlo" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_shardings_that_do_not_fit_are_named():
    mesh = jax.make_mesh((1,), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = {"w": jnp.ones((4, 4))}
    tx = optax.adam(1e-3)
    state = tx.init(params)
    with pytest.raises(ValueError, match="`param_shardings` to have the structure"):
        optax_mp.take_step(tx, params, state, params, param_shardings={"v": rows})
    with pytest.raises(TypeError, match="`param_shardings` to hold .*, got P"):
        optax_mp.take_step(
            tx, params, state, params, param_shardings=PartitionSpec("data")
        )
    for fitting in (rows, {"w": rows}, jax.tree.map(lambda p: p.sharding, params)):
        optax_mp.take_step(tx, params, state, params, param_shardings=fitting)


@pytest.mark.parametrize(("count", "divides"), [(8, True), (64, True), (128, False)])
def test_no_shard_of_a_kernel_begins_within_a_block(count, divides):
    mesh = AbstractMesh((count,), ("a",))
    end = types.SimpleNamespace(shape=(64, 2048), axis=1, block_size=32, group_size=16)
    columns = NamedSharding(mesh, PartitionSpec(None, "a"))
    assert _layout._divides(columns, end) == divides
    # Nor within a group of rows.
    end = types.SimpleNamespace(shape=(2048, 64), axis=1, block_size=16, group_size=32)
    assert _layout._divides(columns.update(spec=PartitionSpec("a")), end) == divides
