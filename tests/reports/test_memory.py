"""memory_report: bytes as the arrays have them, and roles that say their use."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hosted_steps import needs_memories

from optax_mp import (
    Split,
    dynamic_loss_scale,
    low_bit_state,
    memory_report,
    mixed_precision,
    offload,
    static_loss_scale,
)

BF16 = jnp.dtype("bfloat16")
SHAPES = {"dense": {"kernel": (32, 64), "bias": (64,)}, "norm": (64,)}
WEIGHTS = 32 * 64 + 64 + 64
LABELS = {"dense": {"kernel": "a", "bias": "b"}, "norm": "b"}
MASK = {"dense": {"kernel": True, "bias": False}, "norm": False}


def numpy_params(dtype=BF16):
    return jax.tree.map(
        lambda s: np.ones(s, dtype), SHAPES, is_leaf=lambda s: isinstance(s, tuple)
    )


def structs(dtype=BF16):
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, numpy_params(dtype)))


def nbytes(*trees):
    """Return the bytes of all arrays, as NumPy or JAX say."""
    leaves = jax.tree.leaves(trees)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return sum(
        (jax.random.key_data(x) if is_key else x).nbytes
        for x, is_key in zip(leaves, keys, strict=True)
    )


def planned(tx, params):
    return memory_report(jax.eval_shape(tx.init, params), params)


def owners(report, role):
    return {row.param for row in report.rows if row.role == role}


def adam():
    return optax.adamw(1e-3)


OPTIMIZERS = {
    "chain": optax.chain(optax.clip(1.0), adam(), optax.trace(0.9)),
    "masked": optax.masked(adam(), MASK),
    "partition": optax.partition({"a": adam(), "b": optax.sgd(0.1, 0.9)}, LABELS),
    "inject": optax.inject_hyperparams(optax.adam)(1e-3),
    "multisteps": optax.MultiSteps(adam(), 2),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=2),
    "sm3": optax.sm3(0.1),
    "lbfgs": optax.scale_by_lbfgs(3),
    "noise": optax.add_noise(0.1, 0.1, jax.random.key(0)),
    "sgd": optax.sgd(0.1),
}
WRAPPERS = {
    "bare": lambda tx: tx,
    "masters": mixed_precision,
    "split": lambda tx: mixed_precision(tx, storage=Split(8)),
    "scaled": lambda tx: dynamic_loss_scale(mixed_precision(tx)),
}


@pytest.mark.parametrize(
    ("tx", "total"),
    [
        (mixed_precision(adam()), 14),
        (mixed_precision(adam(), storage=Split(16)), 12),
        (mixed_precision(adam(), storage=Split(8)), 11),
        (adam(), 6),
        # Two scales of 2 bytes for each of 32 rows, and for each array of one axis.
        (
            mixed_precision(low_bit_state(adam(), min_size=1), storage=Split(8)),
            5 + 4 * 34 / WEIGHTS,
        ),
        (mixed_precision(optax.sgd(0.1)), 6),
    ],
)
def test_bytes_per_weight_of_known_set_ups(tx, total):
    report = planned(tx, structs())
    rest = report.by_role().get("rest", 0)
    assert report.weights == WEIGHTS
    assert report.total_bytes - rest == total * WEIGHTS
    assert report.bytes_per_weight == (total * WEIGHTS + rest) / WEIGHTS


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:mixed_precision. `inner` does not train")
def test_the_total_is_that_of_all_leaves_each_counted_once(name, wrapper):
    tx, params = WRAPPERS[wrapper](OPTIMIZERS[name]), numpy_params()
    state = tx.init(jax.tree.map(jnp.asarray, params))
    report = memory_report(state, params)
    assert report.total_bytes == nbytes(params, state)
    assert len(report.rows) == len(jax.tree.leaves((params, state)))
    for parts in (report.by_role(), report.by_leaf()):
        assert sum(parts.values()) == report.total_bytes


def test_leaves_that_are_not_floating_arrays_count_as_they_are_or_not_at_all():
    params = {
        "w": np.ones(8, BF16),
        "complex": np.ones(3, np.complex64),
        "table": np.zeros(5, np.int8),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 3),
        "none": None,
        "masked": optax.MaskedNode(),
        "scalar": 2.5,
        "name": "gelu",
        "function": jnp.tanh,
        "float0": np.zeros(4, jax.dtypes.float0),
    }
    report = memory_report((params, None, 3, "static"), params)
    own = 3 * 8 + 5 + 2 * 4 + 3 * 4 * 4
    assert report.weights == 8
    assert report.total_bytes == 2 * (16 + own)
    assert report.float32_bytes == 2 * (32 + own)
    dtypes = {row.dtype: row.bytes for row in report.rows}
    assert (dtypes["complex64"], dtypes["key<fry>"]) == (24, 8)
    str(report)


@needs_memories
def test_state_in_host_memory_has_a_column():
    params = jax.tree.map(jnp.asarray, numpy_params())
    inner = mixed_precision(adam(), storage=Split(8))
    report = memory_report(offload(inner, min_size=100).init(params), params)
    kernel = 32 * 64
    assert report.host_bytes == (1 + 4 + 4) * kernel
    assert report.total_bytes == memory_report(inner.init(params), params).total_bytes
    for row in report.rows:
        is_there = row.param == "['dense']['kernel']" and row.role != "params"
        assert row.host_bytes == (row.bytes if is_there else 0), row
    lines = str(report).splitlines()
    assert lines[0].endswith("on the host")
    assert lines[1].endswith(" 0 B")
    assert lines[2].split()[-2:] == ["2.0", "KiB"]
    assert lines[-2].split()[-2:] == ["18.0", "KiB"]
    assert "host" not in str(memory_report(inner.init(params), params))


def test_codes_count_under_their_field_and_scales_apart():
    params = {"w": jnp.ones((512, 256), BF16), "b": jnp.ones(8, BF16)}
    compact = mixed_precision(low_bit_state(adam(), min_size=100), storage=Split(8))
    report, n = planned(compact, params), 512 * 256
    roles = report.by_role()
    rest = roles.pop("rest")
    assert roles == {
        "params": 2 * (n + 8),
        "remainders": n + 8,
        "mu": n + 4 * 8,
        "nu": n + 4 * 8,
        "scales": 2 * 2 * 512,
    }
    assert report.by_leaf()["['w']"] == 5 * n + 2 * 2 * 512
    assert report.float32_bytes == 12 * (n + 8) + rest


def test_wrong_arguments_are_refused():
    params = structs()
    with pytest.raises(
        TypeError, match=r"memory_report: expected `opt_state` .*`tx.init\(params"
    ):
        memory_report(adam(), params)
    for tx in OPTIMIZERS.values():
        if tx is not OPTIMIZERS["sgd"]:
            with pytest.raises(
                TypeError, match=r"call `memory_report\(opt_state, param"
            ):
                memory_report(params, jax.eval_shape(tx.init, params))
    for nothing in ({}, None, {"f": jnp.tanh, "x": 1.0}):
        with pytest.raises(
            ValueError, match=r"expected .*, got .* has no arrays; pass what"
        ):
            memory_report((), nothing)
    integers = memory_report((), {"i": np.zeros(3, np.int32)})
    assert np.isnan(integers.bytes_per_weight)
    assert " -" in str(integers).splitlines()[1]


CHAIN, WITHOUT_NORM = OPTIMIZERS["chain"], optax.masked(mixed_precision(adam()), MASK)
# Its state is a tree like params, with no field of its own.
LIKE_PARAMS = optax.GradientTransformation(
    lambda params: params, lambda updates, state, params=None: (updates, state)
)
ROLES = {
    "plain": (adam(), "mu nu rest"),
    "masters": (mixed_precision(adam()), "masters mu nu rest"),
    "chain": (mixed_precision(CHAIN, storage=Split()), "remainders mu nu trace rest"),
    "multisteps": (
        dynamic_loss_scale(optax.MultiSteps(mixed_precision(adam()), 2)),
        "masters mu nu acc_grads rest",
    ),
    "masked": (WITHOUT_NORM, "masters mu nu rest"),
    "partition": (mixed_precision(OPTIMIZERS["partition"]), "masters mu nu trace rest"),
    "inject": (
        static_loss_scale(mixed_precision(OPTIMIZERS["inject"])),
        "masters mu nu rest",
    ),
    "labels": (optax.partition({"a": LIKE_PARAMS}, "a"), "state"),
    "adafactor": (OPTIMIZERS["adafactor"], "v_row v_col v rest"),
    "sm3": (OPTIMIZERS["sm3"], "mu nu"),
}


@pytest.mark.parametrize("name", ROLES)
def test_roles_are_fields_of_the_innermost_state(name):
    tx, roles = ROLES[name]
    assert list(planned(tx, structs()).by_role()) == ["params", *roles.split()]


MLP = eqx.nn.MLP(2, 2, 4, 2, dtype=BF16, key=jax.random.key(0))
PARAMS = {
    "tuple": (jnp.ones((2, 3), BF16), [jnp.ones(5, BF16)]),
    "names of fields": {"mu": jnp.ones((2, 3), BF16), "count": {"mu": jnp.ones(5)}},
    "module": eqx.filter(MLP, eqx.is_array),
    "array": jnp.ones((2, 3), BF16),
}


@pytest.mark.parametrize("name", PARAMS)
def test_roles_do_not_depend_on_how_params_are_kept(name):
    params = PARAMS[name]
    report = planned(mixed_precision(CHAIN), params)
    assert list(report.by_role()) == "params masters mu nu trace rest".split()
    assert owners(report, "nu") == owners(report, "params")
    assert report.by_role()["nu"] == report.weights * 4
    assert owners(report, "rest") == {""}
