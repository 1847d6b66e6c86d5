"""low_bit_state around optimizers of whose state only a part is stored in codes."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_mp

PARAMS = {"w": jnp.full((32, 128), 0.5)}
GRADS = jax.tree.map(lambda x: 0.1 * x, PARAMS)
NORM = optax.monitor({"norm": lambda updates: optax.tree.norm(updates)})


def test_a_monitor_changes_no_code_and_no_update():
    """Before and after the rule. Its state gains a leaf at the first step."""
    adam = optax.adam(1e-3)

    def two_steps(tx):
        tx = optax_mp.low_bit_state(tx)
        state, update = jax.jit(tx.init)(PARAMS), jax.jit(tx.update)
        for _ in range(2):
            updates, state = update(GRADS, state, PARAMS)
        return updates["w"], optax.tree.get_all_with_path(state, "nu")[0][1]["w"]

    (want, bare), (updates, nu) = map(two_steps, (adam, optax.chain(NORM, adam, NORM)))
    assert bare.codes.dtype == jnp.uint8
    assert (updates == want).all() and (nu.codes == bare.codes).all()


SHAPE = (1024, 1024)
MOSTLY_WIDE = {
    "small leaves": (optax.adam(1e-3), {}, [(4095,)] * 300),
    "min_size": (optax.adam(1e-3), {"min_size": 2**21}, [SHAPE]),
    "a history": (optax.lbfgs(memory_size=4, linesearch=None), {}, [SHAPE]),
}


@pytest.mark.parametrize("case", MOSTLY_WIDE)
def test_a_large_state_that_is_mostly_not_coded_is_a_warning(case):
    inner, settings, shapes = MOSTLY_WIDE[case]
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    message = r"^low_bit_state: \d+% of the [\d,]+ numbers of the state.*`min_size` \("
    with pytest.warns(optax_mp.MixedPrecisionWarning, match=message):
        optax_mp.low_bit_state(inner, **settings).init(params)


@pytest.mark.parametrize(
    "shapes", [[(1023,)] * 10, [SHAPE, (1023,)], [], [(8, 8)]], ids=len
)
def test_no_warning_for_a_small_state_or_one_that_is_mostly_coded(shapes):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optax_mp.low_bit_state(optax.adam(1e-3)).init(params)
