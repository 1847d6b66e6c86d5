"""A call as a jaxpr of its arrays; what is no array passes through it."""

import jax
import jax.numpy as jnp
import numpy as np

from optax_mp.core.jax_api._arrays import describe
from optax_mp.core.jax_api._jaxpr import TracedCall, evaluate, is_dynamic, is_output

DESCRIBED = jax.ShapeDtypeStruct((2,), jnp.float32)
ARGUMENT = {
    "array": jnp.arange(3.0),
    "numpy": np.ones(2, np.float16),
    "number": 2,
    "text": np.array(["a"]),
    "described": DESCRIBED,
    "no tangent": np.zeros(2, jax.dtypes.float0),
    "none": None,
    "function": jnp.tanh,
}


def double(x):
    arrays = {k: v * 2 if is_dynamic(v) else v for k, v in x.items()}
    return arrays | {"made": x["array"].sum(), "described": x["described"]}


def test_what_is_no_array_passes_through():
    call = TracedCall.of(double, ARGUMENT)
    assert len(call.closed.jaxpr.invars) == len(call.arrays) == 2
    leaves = jax.tree.leaves(ARGUMENT)
    assert [describe(leaves[i]) for i in call.places] == ["float32[3]", "float16[2]"]
    got, want = call.run(), double(ARGUMENT)
    assert got.keys() == want.keys()
    for name in ("array", "numpy", "made"):
        assert np.array_equal(got[name], want[name])
        assert got[name].dtype == want[name].dtype
    for name in ("number", "text", "described", "no tangent", "none", "function"):
        assert got[name] is ARGUMENT[name]
    described = call.unflatten_outputs()
    assert is_output(described["array"]) and not is_output(described["described"])
    assert described["numpy"].dtype == jnp.float16


def test_other_inputs_may_be_chosen_and_the_call_may_have_a_name():
    call = TracedCall.of(double, ARGUMENT, lambda x: x is ARGUMENT["array"], "step")
    (equation,) = call.closed.eqns
    assert equation.params["name"] == "step"
    assert call.arrays == [ARGUMENT["array"]]
    (doubled, _, _) = evaluate(call.closed, [jnp.ones(3)])
    assert np.array_equal(doubled, [2, 2, 2])
