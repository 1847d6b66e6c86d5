"""Casts, checks and selection over trees of anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import as_bits

import optax_mp


def mixed_tree():
    return {
        "f32": jnp.linspace(-1, 1, 5),
        "f16": jnp.ones(2, jnp.float16),
        "numpy": np.linspace(0, 1, 3, dtype=np.float32),
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "key": jax.random.key(3),
        "complex": jnp.ones(2, jnp.complex64),
        "none": None,
        "string": "name",
        "function": jax.nn.relu,
        "python": 1e-5,
        "empty": jnp.zeros((0, 4)),
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_only_floating_arrays_are_cast(dtype):
    tree = mixed_tree()
    cast = optax_mp.cast_floating(tree, dtype)
    for name in ("f32", "f16", "numpy", "empty"):
        assert cast[name].dtype == dtype
        assert cast[name].shape == tree[name].shape
    for name in set(tree) - {"f32", "f16", "numpy", "empty"}:
        assert cast[name] is tree[name]


def test_cast_floating_rejects_integers():
    message = "cast_floating: expected `dtype` to be a floating .*, got int32"
    with pytest.raises(ValueError, match=message):
        optax_mp.cast_floating({}, jnp.int32)


def test_cast_floating_rejects_float64_without_x64():
    with pytest.raises(
        ValueError, match="^cast_floating: `dtype` is float64, but JAX's"
    ):
        optax_mp.cast_floating(mixed_tree(), "float64")


def test_cast_floating_to_float64_with_x64(x64):
    cast = optax_mp.cast_floating(mixed_tree(), "float64")
    assert cast["f16"].dtype == cast["numpy"].dtype == jnp.float64


FLOATS = ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "complex64"]


@pytest.mark.parametrize(
    ("bad", "dtype"), [*((np.nan, x) for x in FLOATS), (np.inf, "float16")]
)
def test_one_bad_value_anywhere_is_found(dtype, bad):
    clean = {"a": jnp.zeros((3, 70), dtype), "b": [jnp.ones((), dtype)], "n": 3}
    # The largest values must not look like an overflow, whatever the check sums.
    if dtype != "complex64":
        clean["c"] = jnp.full((70,), jnp.finfo(dtype).max, dtype)
    check = jax.jit(optax_mp.all_finite)
    clean_arrays = {k: v for k, v in clean.items() if k != "n"}
    assert bool(check(clean_arrays))
    assert bool(optax_mp.all_finite(clean))
    for index in [(0, 0), (1, 35), (2, 69)]:
        dirty = dict(clean_arrays, a=clean["a"].at[index].set(bad))
        assert not bool(check(dirty))
        assert optax_mp.nonfinite_paths(dirty) == ["['a']"]


def test_what_is_no_float_counts_as_finite():
    assert bool(optax_mp.all_finite(mixed_tree()))
    assert bool(optax_mp.all_finite({}))
    assert bool(optax_mp.all_finite({"zero_size": jnp.zeros((0,))}))
    assert optax_mp.nonfinite_paths(mixed_tree()) == []


def test_all_finite_is_no_rounding_error_of_what_it_is_compiled_with():
    x, y = jnp.linspace(0.1, 3, 1000), jnp.linspace(7, 0.3, 1000)
    assert bool(jax.jit(lambda x, y: optax_mp.all_finite(x * y))(x, y))
    assert not bool(jax.jit(lambda x, y: optax_mp.all_finite(x * y / 0))(x, y))


def test_nonfinite_paths_under_jit_says_where_to_call_it():
    message = r"\['w'\] to be .*, got a traced float32\[2\]; .*all_finite"
    with pytest.raises(TypeError, match=message):
        jax.jit(optax_mp.nonfinite_paths)({"w": jnp.ones(2)})


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_takes_one_side_whole(pred):
    new = mixed_tree()
    old = dict(new, f32=new["f32"] * 2, int=new["int"] + 1, key=jax.random.key(4))
    want = new if pred else old
    got = optax_mp.select_tree(jnp.array(pred), new, old)
    arrays = {name for name, leaf in new.items() if hasattr(leaf, "dtype")}
    assert all(got[name] is want[name] for name in got.keys() - arrays)
    new, old, want, got = ({k: x[k] for k in arrays} for x in (new, old, want, got))
    assert as_bits(got) == as_bits(want)
    assert as_bits(jax.jit(optax_mp.select_tree)(jnp.array(pred), new, old)) == as_bits(
        want
    )


def test_select_tree_under_vmap_chooses_for_each():
    new, old = jnp.ones((3, 2)), jnp.zeros((3, 2))
    pred = jnp.array([True, False, True])
    got = jax.vmap(optax_mp.select_tree)(pred, new, old)
    np.testing.assert_array_equal(got[:, 0], [1, 0, 1])


@pytest.mark.parametrize(
    ("new", "old", "message"),
    [
        ({"a": 1}, {"b": 1}, "pytree structure error"),
        (
            [jnp.ones(2)],
            [jnp.ones(2, jnp.bfloat16)],
            r"path \[0\] has type float32\[2\]",
        ),
        ([jnp.ones(())], [1.0], r"leaf \[0\] to .*, got .* in `on_true` and 1.0 in"),
        (["x"], ["y"], "or the same, got 'x' in `on_true` and 'y' in `on_false`"),
    ],
)
def test_select_tree_names_the_leaf_that_differs(new, old, message):
    with pytest.raises((TypeError, ValueError), match=message):
        optax_mp.select_tree(jnp.array(True), new, old)
