"""Boxes that the package has never seen, and descriptions of states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from forms import tx_of

import optax_mp


@jax.tree_util.register_pytree_node_class
class Opaque:
    """A node of which nothing is known but its child, without keys."""

    def __init__(self, array):
        """Hold an array."""
        self.array = array

    def tree_flatten(self):
        return (self.array,), "opaque"

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@dataclasses.dataclass(frozen=True)
class Axis:
    """An axis as haliax has it."""

    name: str
    size: int


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Named:
    """A box that checks its axes, as haliax's `NamedArray` does."""

    array: Any
    axes: tuple[Axis, ...]

    def __post_init__(self):
        """Check the axes."""
        assert tuple(axis.size for axis in self.axes) == self.array.shape

    def tree_flatten(self):
        return (self.array,), self.axes

    @classmethod
    def tree_unflatten(cls, axes, children):
        new = object.__new__(cls)
        object.__setattr__(new, "array", children[0])
        object.__setattr__(new, "axes", axes)
        return new


@jax.tree_util.register_pytree_node_class
class Stubborn(Opaque):
    """A box that takes arrays of one shape only."""

    @classmethod
    def tree_unflatten(cls, _, children):
        if getattr(children[0], "shape", (128, 256)) not in [(128, 256), ()]:
            raise ValueError("another shape")
        return cls(*children)


def named(x):
    axes = [Axis(f"axis{i}", size) for i, size in enumerate(x.shape)]
    return Named(x, tuple(axes))


def params_in(box):
    low = jnp.linspace(-1, 1, 128 * 256).reshape(128, 256).astype(jnp.bfloat16)
    params = {"w": box(low), "count": box(jnp.int32(1))}
    return params if box is Stubborn else params | {"norm": box(jnp.ones(256))}


@pytest.mark.parametrize("box", [named, Stubborn])
def test_scales_stand_alone_where_a_box_takes_one_shape(box):
    """It knows the sizes of its axes, or takes nothing else."""
    state = tx_of("5 bytes").init(params_in(box))
    nu = state.inner_state.inner_state[0].nu["w"]
    assert type(nu.codes) is type(box(jnp.ones((128, 256))))
    assert isinstance(nu.scales, jax.Array)
    assert nu.scales.shape == (128, 1)


def test_a_module_of_one_array_is_quantized():
    eqx = pytest.importorskip("equinox")
    w = jnp.ones((128, 256), jnp.bfloat16)
    # Its fields are not what the class is made of.
    params = {"embed": eqx.nn.Embedding(weight=w), "w": w}
    tx = tx_of("5 bytes")
    state = tx.init(params)
    grads = jax.tree.map(jnp.ones_like, params)
    _, new_state = jax.jit(tx.update)(grads, state, params)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    of_embedding, of_w, _ = optax_mp.memory_report(state, params).by_leaf().values()
    assert of_embedding == of_w
