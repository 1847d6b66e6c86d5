"""Policies: parsing, casting, exceptions, and use as plain values."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_mp


def dtypes(policy):
    return tuple(
        jnp.dtype(d).name
        for d in (policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    )


@pytest.mark.parametrize(
    ("name", "want"),
    [
        (
            "params=float32,compute=bfloat16,output=float32",
            ("float32", "bfloat16", "float32"),
        ),
        ("p=f32,c=bf16", ("float32", "bfloat16", "bfloat16")),
        ("output=f32, compute=f16, params=f16", ("float16", "float16", "float32")),
        ("c=bf16", ("float32", "bfloat16", "bfloat16")),
        ("half", ("bfloat16",) * 3),
        ("bf16", ("bfloat16",) * 3),
        ("full", ("float32",) * 3),
        ("p=f8_e4m3fn,c=bf16,o=f32", ("float8_e4m3fn", "bfloat16", "float32")),
        ("float8_e5m2", ("float8_e5m2",) * 3),
    ],
)
def test_names_of_policies(name, want):
    policy = optax_mp.get_policy(name)
    assert dtypes(policy) == want
    assert optax_mp.get_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("param=f32", "expected the keys params, p.*, got 'param' in 'param=f32'"),
        ("p=f32,c=bf16,", "expected the keys .*, got '' in 'p=f32,c=bf16,'"),
        ("p=f33", "expected 'p' in 'p=f33' to be a floating dtype .*, got 'f33'"),
        ("int32", "expected `name` to be a floating dtype .*, got 'int32'"),
        ("p=f8", "to be a floating dtype .*, got 'f8'; short names are .*e4m3fn"),
        ("p=f32,params=bf16", "expected `param_dtype` once, got it twice in 'p=f32,p"),
    ],
)
def test_an_unknown_name_says_what_is_known(name, message):
    with pytest.raises(ValueError, match=message):
        optax_mp.get_policy(name)


def test_every_short_name_in_the_hint_is_accepted():
    with pytest.raises(ValueError, match="short names are") as caught:
        optax_mp.get_policy("nonsense")
    hint = str(caught.value).split("short names are ")[1].rstrip(".")
    for name in hint.replace(" and", ",").split(", "):
        assert optax_mp.get_policy(name.strip(", ")).param_dtype


def test_get_policy_wants_a_string():
    with pytest.raises(TypeError, match="to be a string such as .*optax_mp.Policy"):
        optax_mp.get_policy(jnp.bfloat16)


def test_policies_are_plain_hashable_values():
    policy = optax_mp.Policy(np.dtype("float32"), "bf16", jnp.float32, ["*norm*"])
    same = optax_mp.Policy("float32", jnp.bfloat16, "f32", ("*norm*",))
    assert policy == same
    assert hash(policy) == hash(same)
    assert pickle.loads(pickle.dumps(policy)) == policy == copy.deepcopy(policy)
    assert str(policy) == "params=float32,compute=bfloat16,output=float32"
    cast = jax.jit(lambda p, x: p.cast_to_compute(x), static_argnums=0)
    assert cast(policy, {"x": jnp.ones(2)})["x"].dtype == jnp.bfloat16
    with pytest.raises(AttributeError):
        policy.param_dtype = jnp.float16


def test_with_output_dtype_changes_nothing_else():
    policy = optax_mp.get_policy("bf16", keep_f32=("*bias",))
    changed = policy.with_output_dtype("f32")
    assert dtypes(changed) == ("bfloat16", "bfloat16", "float32")
    assert changed.keep_f32 == ("*bias",)


PARAMS = {
    "layers": [{"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}],
    "final_norm": {"scale": jnp.ones(2)},
    "step": jnp.arange(2),
}


@pytest.mark.parametrize(
    "keep_f32",
    [("*norm*", "*/bias"), ("*Norm*", "*/BIAS"), lambda path, leaf: leaf.ndim < 2],
)
def test_exceptions_stay_float32_in_params_and_computation(keep_f32):
    policy = optax_mp.Policy("bf16", "f16", "bf16", keep_f32)
    for cast, low in (
        (policy.cast_to_param, "bfloat16"),
        (policy.cast_to_compute, "float16"),
    ):
        tree = cast(PARAMS)
        assert tree["layers"][0]["kernel"].dtype == low
        assert tree["layers"][0]["bias"].dtype == jnp.float32
        assert tree["final_norm"]["scale"].dtype == jnp.float32
        assert tree["step"].dtype == jnp.int32
    assert policy.cast_to_output(PARAMS)["final_norm"]["scale"].dtype == jnp.bfloat16


def test_exceptions_are_raised_to_float32_from_half():
    policy = optax_mp.get_policy("bf16", keep_f32="*norm*")
    half = optax_mp.cast_floating(PARAMS, "bf16")
    assert policy.cast_to_compute(half)["final_norm"]["scale"].dtype == jnp.float32


# Patterns that match too little


def norm(size=4):
    return {"scale": jnp.ones(size), "bias": jnp.ones(size)}


BLOCK = {"norm": norm(8), "kernel": jnp.ones((4, 8))}
NET = {"norm": norm(), "blocks": {"0": BLOCK, "1": BLOCK}, "out": jnp.ones((4, 3))}
STACKED = {"norm": norm(), "blocks": {"norm": jax.tree.map(lambda x: x[None], norm())}}
HEADS = {
    "out": {"kernel": jnp.ones((4, 99)), "bias": jnp.ones(99)},
    "attention": {"out": {"kernel": jnp.ones((2, 2, 4)), "bias": jnp.ones(4)}},
}
LEFT = {
    "norms": (NET, "norm/*", r"'blocks/0/norm/bias', .* 'blocks/1/norm/bias' and 1 more"),
    "one of them": (NET, "norm/scale", "'blocks/0/norm/scale', 'blocks/1/norm/scale';"),
    "a prefix": (NET, "norm*", "and 1 more; match all with '[*]norm[*]'"),
    "letters": ({"Norm": norm(), "a": {"norm": norm()}}, "norm/*", "'a/norm/bias'"),
    "a stack": (STACKED, "norm/*", "'blocks/norm/bias', 'blocks/norm/scale';"),
    "an exact path": ({"norm": jnp.ones(2), "a": [{"norm": jnp.ones(2)}]},) + (
        "norm", "'a/0/norm'",
    ),
    "further in": ({"a": NET, "b": {"a": NET}}, "a/norm/*", "'b/a/norm/bias'"),
    "by the box": ({"n": {"value": jnp.ones(2)}, "a": {"n": {"value": jnp.ones(2)}}},) + (
        "n", "'a/n';",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_a_pattern_that_matches_only_the_outermost_says_what_it_leaves(case):
    tree, pattern, left = LEFT[case]
    policy = optax_mp.get_policy("bf16", keep_f32=(pattern,))
    casts = {
        "mixed_precision": optax_mp.mixed_precision(
            optax.sgd(0.1), param_dtype=policy
        ).init,
        "Policy.cast_to_param": policy.cast_to_param,
    }
    for name, cast in casts.items():
        message = f"^{name}: the pattern .* matches '.*', but not .*{left}"
        with pytest.warns(optax_mp.MixedPrecisionWarning, match=message) as caught:
            cast(tree)
        assert len(caught) == 1


@pytest.mark.parametrize(
    ("tree", "patterns"),
    [
        *((NET, (x,)) for x in ("*norm*", "*norm/*", "blocks/*/norm/*", "blocks/0/*")),
        ({"n": {"value": jnp.ones(2)}}, ("n/value",)),
        # Another pattern keeps what one leaves.
        (NET, ("norm/*", "blocks/*/norm/*")),
        # Layers of one name that are not alike, and numbers.
        (HEADS, ("out/*",)),
        (HEADS, ("out/bias",)),
        # Whose biases have one length by chance.
        (
            HEADS | {"out": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}},
            ("out/*",),
        ),
        ({"scale": jnp.float32(1), "norm": norm()}, ("scale",)),
        # A name that ends in the same letters is another key.
        ({"norm": norm(), "subnorm": norm()}, ("norm/*",)),
        # Integers and absent leaves.
        ({"norm": jnp.ones(2), "a": {"norm": jnp.ones(2, int)}}, ("norm",)),
        ({"norm": jnp.ones(2), "a": {"norm": jnp.ones(2)}, "b": None}, ("norm",)),
    ],
)
def test_a_pattern_that_chooses_is_not_warned_of(tree, patterns):
    optax_mp.get_policy("bf16", keep_f32=patterns).cast_to_param(tree)


def test_a_function_may_keep_the_outermost_alone():
    policy = optax_mp.get_policy("bf16", keep_f32=lambda p, _: p.startswith("norm/"))
    tree = policy.cast_to_param(NET)
    assert tree["norm"]["bias"].dtype == jnp.float32
    assert tree["blocks"]["0"]["norm"]["bias"].dtype == jnp.bfloat16


@pytest.mark.parametrize("keep_f32", [3, (jnp.ones,), None])
def test_exceptions_must_be_patterns_or_a_predicate(keep_f32):
    with pytest.raises(TypeError, match="expected `keep_f32` to be patterns .*, got"):
        optax_mp.Policy("bf16", "bf16", "bf16", keep_f32)


def test_policy_names_the_field_with_the_wrong_dtype():
    message = "Policy: expected `compute_dtype` to be .*, got int32"
    with pytest.raises(ValueError, match=message):
        optax_mp.Policy("bf16", jnp.int32, "bf16")
