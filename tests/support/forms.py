"""The forms of params and state that people train with, and what each promises.

A form is a line of `FORMS`. Each property in `tests/properties` is run for every form
that promises it; by default for those that are marked `often`, which between them have
every mechanism once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from slow_cases import mostly_slow

import optax_mp
from optax_mp import Split, low_bit_state, mixed_precision, stochastic_rounding

Transformation = optax.GradientTransformationExtraArgs
# Moments, decay, and a schedule, in powers of two: their products are exact, so that
# one rounding of a product and a sum, which XLA makes in some programs, is that of two.
# One product is not, and clipped before it is added.
RULE = optax.chain(
    optax.scale_by_rms(0.5, eps=2.0**-20),
    optax.clip(8.0),
    optax.trace(0.5),
    optax.add_decayed_weights(2.0**-4),
    optax.scale_by_learning_rate(lambda n: jnp.where(n < 2, 2.0**-6, 2.0**-7)),
)
AUTO = jax.sharding.AxisType.Auto
MESH = functools.cache(lambda: jax.make_mesh((8,), ("data",), axis_types=(AUTO,)))


@dataclasses.dataclass(frozen=True)
class Form:
    """What is made of a rule, and what it promises.

    Attributes:
        name: what tests and failures call it.
        make: from a rule to what is trained with.
        bare: from a rule to what trains the same in float32 without this package, if
            that is not the rule.
        dtype: of the params that are no norm.
        near: how far masters may end from float32 training, in shares of its way.
            At 0 they are equal to the bit.
        bits: of the remainder that `Split` keeps; 0 with full copies, None without
            masters.
        bytes: of the state for a weight of a large matrix, with moments.
        scale: where a loss scale is, "around" or as a "link", if there is one.
        leafwise: whether a leaf is stepped without looking at the others.
        random: whether it rounds at random.
        averaged: whether it keeps an average.
        on_mesh: whether its state is cut over eight devices.
        on_host: whether its state is in host memory.
        has_cond: whether its rule has a branch.
        in_8_bits: whether `p + u` is rounded to 8 bits, so that params lag behind.
        only_floats: whether it takes no integers, as what optax has around it does not.
        often: whether the default run has it.
    """

    name: str
    make: Callable[[Any], Any]
    bare: Callable[[Any], Any] | None = None
    dtype: str = "bfloat16"
    near: float = 0.0
    bits: int | None = 0
    bytes: float = 12
    scale: str | None = None
    leafwise: bool = True
    random: bool = False
    averaged: bool = False
    on_mesh: bool = False
    on_host: bool = False
    has_cond: bool = False
    in_8_bits: bool = False
    only_floats: bool = False
    often: bool = False

    def __repr__(self) -> str:
        return self.name

    def of(self, rule: Any) -> Transformation:
        """Return the form of a rule."""
        return optax.with_extra_args_support(_plain(self.make(rule)))

    @functools.cached_property
    def tx(self) -> Transformation:
        return self.of(RULE)

    @functools.cached_property
    def in_float32(self) -> Transformation:
        return optax.with_extra_args_support(_plain((self.bare or _plain)(RULE)))

    @property
    def is_dynamic(self) -> bool:
        return self.scale is not None and "static" not in self.name


def _plain(tx: Any) -> Any:
    return optax.GradientTransformationExtraArgs(tx.init, tx.update)


low = functools.partial(low_bit_state, min_size=100)
scaled = functools.partial(optax_mp.dynamic_loss_scale, init_scale=8.0)
averaged = functools.partial(optax_mp.with_average, decay=0.5)
hosted = functools.partial(optax_mp.offload, min_size=256)


def split(bits: int, rule: Any) -> Transformation:
    return mixed_precision(rule, storage=Split(bits))


def compact(rule: Any) -> Transformation:
    return split(8, low(rule))


def after_link(*links: Any) -> Transformation:
    return optax.chain(scaled(), *links)


def clipped(rule: Any) -> Transformation:
    # More than the norm of any gradients here: a product with less is not exact.
    return optax.chain(optax.clip_by_global_norm(2.0**10), rule)


def grouped(rule: Any, frozen: Any = None) -> Transformation:
    groups = {"a": rule, "b": rule, "frozen": optax.set_to_zero()}
    labels = {"embed": "a", "layers": "a", "twin": "a", "head": "frozen"}
    return optax.partition(
        groups, lambda params: {name: labels.get(name, "b") for name in params}
    )


def injected(rule: Any) -> Transformation:
    def make(share):
        return optax.chain(rule, optax.scale(share))

    return optax.inject_hyperparams(make)(share=0.5)


def multi_steps(rule: Any) -> Transformation:
    return optax.MultiSteps(rule, 2).gradient_transformation()


def finite(rule: Any) -> Transformation:
    return optax.apply_if_finite(rule, 9)


def cut(rule: Any) -> Transformation:
    return optax_mp.zero1(rule, MESH(), "data")


# Codes of 8 bits are 3% to 8% apart, remainders of 8 bits 2^-16 of the weight.
_CODED, _CUT, _AT_RANDOM = 0.1, 1e-2, 0.5
_5_BYTES = dict(near=_CODED, bits=8, bytes=3, random=True)
_SKIPS = dict(scale="around", leafwise=False)
_LINKED = dict(scale="link", leafwise=False)
_NO_MASTERS = dict(bits=None)

_ALL = [
    # Masters.
    Form("masters", mixed_precision, often=True),
    Form("Split(16)", functools.partial(split, 16), bits=16, bytes=10),
    Form(
        "Split(8)", functools.partial(split, 8), bits=8, bytes=9, near=_CUT, random=True
    ),
    Form("float16, link", lambda x: after_link(mixed_precision(x)), dtype="float16", **_LINKED),
    Form(
        "float8", lambda x: mixed_precision(x, update_dtype="params"), dtype="float8_e4m3fn", in_8_bits=True
    ),
    Form("float32, link", lambda x: after_link(mixed_precision(x)), dtype="float32", bytes=8, **_LINKED),
    # Codes, and no masters.
    Form("low-bit", low, dtype="float32", only_floats=True, bytes=2, near=_CODED, random=True, **_NO_MASTERS),
    Form("masters, 16 bits", lambda x: mixed_precision(low(x, bits=16)), bytes=8, near=_CUT),
    Form("5 bytes", compact, **_5_BYTES),
    Form("stochastic", stochastic_rounding, bytes=8, near=_AT_RANDOM, random=True, **_NO_MASTERS),
    Form("stochastic, low-bit", lambda x: stochastic_rounding(low(x)), bytes=2, near=_AT_RANDOM, random=True, **_NO_MASTERS),
    # Loss scales.
    Form("scaled", lambda x: scaled(mixed_precision(x)), **_SKIPS),
    Form("scaled, static", lambda x: optax_mp.static_loss_scale(mixed_precision(x), 8.0), **_SKIPS),
    Form("scaled, no masters", scaled, dtype="float32", only_floats=True, bytes=8, **_SKIPS, **_NO_MASTERS),
    Form("link, Split(16)", lambda x: after_link(split(16, x)), bits=16, bytes=10, often=True, **_LINKED),
    Form("scaled, 5 bytes", lambda x: scaled(compact(x)), **_5_BYTES, **_SKIPS),
    Form("link, 5 bytes", lambda x: after_link(compact(x)), **_5_BYTES, **_LINKED),
    Form("link, stochastic, low-bit", lambda x: after_link(stochastic_rounding(low(x))), bytes=2, near=_AT_RANDOM, random=True, often=True, **_LINKED, **_NO_MASTERS),
    # Averages.
    Form("average", lambda x: averaged(mixed_precision(x)), bytes=16, averaged=True),
    Form("average, no masters", averaged, dtype="float32", bytes=12, averaged=True, only_floats=True, **_NO_MASTERS),
    Form("average, scaled", lambda x: averaged(scaled(split(16, x))), bits=16, bytes=14, averaged=True, **_SKIPS),
    Form("scaled, average, 5 bytes", lambda x: scaled(averaged(compact(x))), averaged=True, often=True, **_SKIPS, **_5_BYTES | {"bytes": 7}),
    Form("link, average", lambda x: after_link(averaged(mixed_precision(x))), bytes=16, averaged=True, **_LINKED),
    # Many devices, and host memory.
    Form("zero1, scaled", lambda x: cut(scaled(mixed_precision(x))), on_mesh=True, often=True, **_SKIPS),
    Form("zero1, 5 bytes", lambda x: cut(compact(x)), on_mesh=True, **_5_BYTES),
    Form("scaled, offload", lambda x: scaled(hosted(mixed_precision(x))), on_host=True, **_SKIPS),
    Form("offload, 5 bytes", lambda x: hosted(compact(x)), on_host=True, **_5_BYTES),
    # Wrappers of optax, inside and outside.
    Form("link, groups", lambda x: after_link(grouped(mixed_precision(x))), grouped, **_LINKED),
    Form("link, clipped", lambda x: after_link(clipped(mixed_precision(x))), clipped, **_LINKED),
    Form("scaled, injected", lambda x: scaled(mixed_precision(injected(x))), injected, **_SKIPS),
    Form("link, flatten", lambda x: after_link(mixed_precision(optax.flatten(x))), optax.flatten, **_LINKED),
    Form("scaled, MultiSteps inside", lambda x: scaled(mixed_precision(multi_steps(x))), multi_steps, bytes=16, has_cond=True, **_SKIPS),
    Form("scaled, MultiSteps around", lambda x: scaled(multi_steps(mixed_precision(x))), multi_steps, bytes=16, has_cond=True, only_floats=True, **_SKIPS),
    Form("apply_if_finite", lambda x: finite(mixed_precision(x)), finite, leafwise=False, has_cond=True, only_floats=True),
]  # fmt: skip
# Host memory needs JAX 0.10.
FORMS = [x for x in _ALL if not x.on_host or jax.__version_info__ >= (0, 10)]


def forms_that(
    promise: Callable[[Form], bool] = lambda form: True,
    by_default: Callable[[Form], bool] = lambda form: form.often,
) -> Any:
    """Parametrise a property over the forms that promise it.

    All of a form's properties run one after the other: they share its programs.
    """
    promising = [form for form in FORMS if promise(form)]
    return mostly_slow("form", promising, by_default, ids=str, scope="module")


def named(*names: str) -> list[Form]:
    """Return forms by their names."""
    by_name = {form.name: form for form in FORMS}
    return [by_name[name] for name in names]


def tx_of(name: str) -> Transformation:
    """Return the transformation of a form."""
    return named(name)[0].tx


# Params and gradients


@jax.tree_util.register_pytree_node_class
class Box:
    """A node of which nothing is known but its child, without keys."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def tree_flatten(self) -> Any:
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


# Stacked layers; one over 4,096 elements; one far longer than it is wide; a row.
SHAPES = {
    "embed": (80, 64),
    "layers": (3, 16, 8),
    "twin": (3, 16, 8),  # has the values and the gradients of the one before
    "head": (8, 72),
    "bias": (5,),
    "scalar": (),
    "norm": (8,),
    "box": (16, 24),
}


def values(seed: int) -> dict[str, Any]:
    """Return a tree of float32 arrays for all floating params, in NumPy.

    They have few bits, so that their means and squares are exact.
    """
    rng = np.random.default_rng(seed)
    drawn = {k: np.rint(32 * rng.normal(size=s)) / 32 for k, s in SHAPES.items()}
    made = {k: np.asarray(x, np.float32) for k, x in drawn.items()}
    return made | {"twin": made["layers"], "box": Box(made["box"])}


def params_of(form: Form) -> Any:
    """Return the leaves that people have, on the devices of the form."""
    made: dict[str, Any] = jax.tree.map(lambda x: jnp.asarray(x, form.dtype), values(0))
    made |= {"norm": jnp.ones(SHAPES["norm"]), "count": jnp.int32(3), "absent": None}
    made["bias"] = made["bias"].at[0].set(-0.0)
    if form.only_floats:
        del made["count"]
    return placed(form, made)


def gradients(form: Form, step: int) -> dict[str, Any]:
    """Return float32 gradients of a step."""
    made = values(step + 1) | {"absent": None}
    return made if form.only_floats else made | {"count": None}


def placed(form: Form, tree: Any) -> Any:
    """Return a tree on the devices of a form."""
    if not form.on_mesh:
        return tree
    everywhere = jax.sharding.NamedSharding(MESH(), jax.P())
    return jax.device_put(tree, everywhere)


def floating(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves that are trained."""
    return {name: tree[name] for name in SHAPES}


def widened(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the leaves that are trained, in float32 and NumPy."""
    return jax.tree.map(lambda x: np.asarray(x).astype(np.float32), floating(tree))
