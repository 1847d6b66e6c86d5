"""`take_step` on sharded arrays, in a process that has eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from comparison import as_bits
from forced_devices import run_named
from jax.sharding import NamedSharding, PartitionSpec

import optax_mp

SPECS = {
    "rows": PartitionSpec(("a", "b")),
    "both": PartitionSpec("a", "b"),
    "last": PartitionSpec(None, "b"),
    "uneven": PartitionSpec("b"),
}
# The shards of the last have 10 rows, which are no whole tiles.
SHAPES = {
    "rows": (64, 384),
    "both": (64, 512),
    "last": (3, 32, 512),
    "uneven": (40, 128),
}
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute")


def compact():
    low = optax_mp.low_bit_state(optax.adamw(1e-2), min_size=1)
    return optax_mp.mixed_precision(low, storage=optax_mp.Split(8))


def mesh_of(kind):
    kinds = (jax.sharding.AxisType[kind],) * 2
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=kinds)


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=s), "bfloat16") for k, s in SHAPES.items()}


def shardings(mesh):
    specs = {
        k: SPECS[k] if k != "last" else PartitionSpec(None, None, "b") for k in SPECS
    }
    return {k: NamedSharding(mesh, spec) for k, spec in specs.items()}


def steps(step, params, state, grads):
    """Return params and state after two steps, and the last compiled one."""
    step = jax.jit(step)
    for _ in range(2):
        params, state = step(params, state, grads)
    return (params, state), step.lower(params, state, grads)


def on_one_device(tx):
    params, grads = arrays(0), arrays(1)

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params)

    return steps(step, params, tx.init(params), grads)[0]


def where_shardings_are_given():
    tx = compact()
    mesh = mesh_of("Auto")
    placed = shardings(mesh)
    params, grads = (jax.device_put(arrays(i), placed) for i in (0, 1))

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params, param_shardings=placed)

    got, lowered = steps(step, params, tx.init(params), grads)
    assert as_bits(got) == as_bits(on_one_device(tx))
    text = lowered.compile().as_text()
    assert not [name for name in COLLECTIVES if name in text]
    assert got[0]["both"].sharding.spec == PartitionSpec("a", "b")
    assert_has_kernels(step, params, tx.init(params), grads)


def where_types_say_it():
    tx = compact()
    mesh = mesh_of("Explicit")
    with jax.set_mesh(mesh):
        placed = shardings(mesh)
        params, grads = (jax.device_put(arrays(i), placed) for i in (0, 1))

        def step(params, state, grads):
            return optax_mp.take_step(tx, grads, state, params)

        got, _ = steps(step, params, tx.init(params), grads)
        want = on_one_device(tx)
        assert as_bits(got) == as_bits(want)
        assert_has_kernels(step, params, tx.init(params), grads)


def where_nothing_is_known():
    tx = compact()
    mesh = mesh_of("Auto")
    params, grads = (jax.device_put(arrays(i), shardings(mesh)) for i in (0, 1))

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params)

    got, _ = steps(step, params, tx.init(params), grads)
    assert as_bits(got) == as_bits(on_one_device(tx))
    traced = jax.jit(step).trace(params, tx.init(params), grads)
    assert "tpu_custom_call" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    given = tx, grads, tx.init(params), params
    for row in optax_mp.step_report(*given).rows:
        assert row.tpu == "layout not known, or uneven"
    known = optax_mp.step_report(*given, param_shardings=shardings(mesh))
    assert {row.tpu for row in known.rows} == {"kernel"}


def where_types_do_not_say_all():
    """Over some axes of a mesh only, or of some arrays: nothing is gathered."""
    tx, rows = compact(), PartitionSpec("a", "b")
    kinds = [jax.sharding.AxisType[kind] for kind in ("Explicit", "Auto")]
    some = jax.make_mesh((2, 4), ("a", "b"), axis_types=tuple(kinds))

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params)

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
            assert not [name for name in COLLECTIVES if name in compiled.as_text()]
            lowered = jax.jit(step).trace(*placed).lower(lowering_platforms=("tpu",))
            assert "tpu_custom_call" not in lowered.as_text()


def where_ranks_agree_on_a_skipped_step():
    """An effect of the name of an axis, which is none on what is computed."""
    names = ("a", "b")
    tx = optax_mp.dynamic_loss_scale(compact(), axis_name=names)
    params = {"w": jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)}
    args = params, jax.eval_shape(tx.init, params), params
    specs = jax.tree.map(
        lambda x: PartitionSpec("a", "b") if x.ndim else PartitionSpec(), args
    )

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params)

    with jax.set_mesh(mesh_of("Auto")):
        sharded = jax.shard_map(step, in_specs=specs, out_specs=specs[:2])
        traced = jax.jit(sharded).trace(*args)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "tpu_custom_call" in text


def where_a_part_is_manual():
    """Types say in another way there what devices hold; chunks are not for it."""
    tx = compact()
    mesh = mesh_of("Auto")
    params = {"w": jax.ShapeDtypeStruct((16384, 4096), jnp.float16)}
    args = params, jax.eval_shape(tx.init, params), params
    specs = jax.tree.map(
        lambda x: PartitionSpec("a") if x.ndim else PartitionSpec(),
        args,
    )

    def step(params, state, grads):
        return optax_mp.take_step(tx, grads, state, params)

    with jax.set_mesh(mesh):
        for axes in ({"a"}, {"a", "b"}):
            sharded = jax.shard_map(
                step, in_specs=specs, out_specs=specs[:2], axis_names=axes
            )
            traced = jax.jit(sharded).trace(*args)
            assert "stablehlo" in traced.lower(lowering_platforms=("tpu",)).as_text()


def assert_has_kernels(step, *args):
    lowered = jax.jit(step).trace(*args).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3


CHECKS = [
    where_shardings_are_given,
    where_types_say_it,
    where_nothing_is_known,
    where_types_do_not_say_all,
    where_a_part_is_manual,
    where_ranks_agree_on_a_skipped_step,
]

if __name__ == "__main__":
    run_named(CHECKS, 8)
