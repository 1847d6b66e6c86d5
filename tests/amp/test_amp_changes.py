"""What a function changes in its arguments under amp reaches them, or raises a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import mostly_slow

from optax_mp import amp

X = np.random.default_rng(0).standard_normal((8, 4), np.float32)


def counter(nnx):
    """Return the smallest NNX module that changes; two names stand for one count."""

    class Counter(nnx.Module):
        def __init__(self):
            self.count = self.same = nnx.RngCount(jnp.uint32(0))
            self.mean = nnx.BatchStat(jnp.zeros(4))
            self.weight = nnx.Param(jnp.eye(4))
            self.is_training = True

        def __call__(self, x):
            y = x @ self.weight[...]
            self.count[...] += 1
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * y.mean(0)
            self.same[...] += 1
            return jnp.where(jnp.arange(4) < self.count[...] % 4, 0, y)

    return Counter()


def loss(model, x):
    y = model(x)
    return jnp.mean(y**2), y == 0


def state_of(nnx, model):
    """Return statistics and counts, which a forward pass changes."""
    return jax.tree.leaves(nnx.state(model, (nnx.BatchStat, nnx.RngCount)))


WAYS = {
    "eager": lambda nnx, fun: fun,
    "jit": lambda nnx, fun: nnx.jit(nnx.value_and_grad(fun, has_aux=True)),
}


@mostly_slow("way", WAYS, lambda way: way == "jit")
def test_an_nnx_module_changes_under_amp_as_without(way):
    nnx = pytest.importorskip("flax.nnx")
    states, masks = [], []
    for wrap in (amp, lambda fun: fun):
        model = counter(nnx)
        start = state_of(nnx, model)
        run = WAYS[way](nnx, wrap(loss))
        outs = [run(model, X) for _ in range(2)]
        dropped = [np.asarray(x[1] if way == "eager" else x[0][1]) for x in outs]
        assert not np.array_equal(*dropped)
        states.append(state_of(nnx, model))
        masks.append(dropped)
    np.testing.assert_array_equal(*masks)
    for before, low, full in zip(start, *states, strict=True):
        assert not np.array_equal(before, full)
        assert low.dtype == full.dtype
        # Four roundings of bfloat16, of 2^-8 each.
        np.testing.assert_allclose(low, full, rtol=0, atol=2**-6 * np.abs(full).max())


def test_changes_of_a_captured_module_are_an_error():
    nnx = pytest.importorskip("flax.nnx")
    model = counter(nnx)
    with pytest.raises(Exception, match="different trace level"):
        amp(lambda x: loss(model, x))(X)


def test_a_change_of_a_static_attribute_raises_a_warning():
    nnx = pytest.importorskip("flax.nnx")
    model = counter(nnx)

    def evaluated(model, x):
        model.is_training = False
        return model(x)

    with pytest.warns(UserWarning, match="class Counter, which is lost") as found:
        amp(evaluated)(model, X)
    assert found[0].filename == __file__
