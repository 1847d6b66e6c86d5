"""Small functions of every kind that amp meets, and a reader of what it made of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, shard_map
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from programs import Operation, operations

import optax_mp

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half the distance between 1 and the next number."""


def autocast(fun: Callable[..., Any], dtype: Any = "bfloat16") -> Callable[..., Any]:
    return optax_mp.amp(fun, compute_dtype=jnp.dtype(dtype))


def shapes(tree: Any) -> tuple[Any, list[Any]]:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


class Case(NamedTuple):
    """A function of float32 params and more, and what amp makes of it.

    Without further words: every product is low, forward and backward.
    """

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    # Products that stay in float32 although their precision is free: in the function,
    # and in its gradient, which computes them again and adds their transposes.
    float32_products: tuple[int, int] = (0, 0)
    # Errors that are allowed, in units of roundings to the compute dtype (2**-8 in
    # bfloat16, 2**-11 in float16), relative, by norm: of outputs, and of the gradient
    # of each param.
    output_roundings: float = 3.0
    gradient_roundings: float = 4.0


CASES: dict[str, Case] = {}


def case(*arguments: Any, **expected: Any) -> Callable[[Any], Any]:
    """Put the function into the table, with the arguments that it is called with."""

    def register(fun: Any) -> Any:
        CASES[fun.__name__] = Case(fun, arguments, **expected)
        return fun

    return register


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32)


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Return seeded params; matrices keep the size of what they multiply."""
    return {
        name: normal(*shape, seed=7 + i)
        / np.float32(np.sqrt(shape[-2]) if len(shape) > 1 else 4)
        for i, (name, shape) in enumerate(shapes.items())
    }


X = normal(4, 8)  # a batch of four
SEQUENCE = normal(2, 6, 8, seed=1)
TIME = normal(12, 4, 8, seed=2)  # time first
IDS = np.array([3, 0, 3, 9, 1, 3], np.int32)
IMAGES = normal(2, 8, 8, 3, seed=3)
KEY = np.array([0, 7], np.uint32)
CAPTURED = normal(8, 8, seed=4) / np.float32(3)


# Layers


@case(weights(w1=(8, 16), b1=(16,), w2=(16, 8), b2=(8,)), X)
def mlp(params, x):
    x = jnp.maximum(x @ params["w1"] + params["b1"], 0)
    return x @ params["w2"] + params["b2"]


@case(weights(q=(8, 8), k=(8, 8), v=(8, 8), out=(8, 8)), SEQUENCE)
def attention(params, x):
    q, k, v = (
        (x @ params[name]).reshape(*x.shape[:2], 2, 4).swapaxes(1, 2) for name in "qkv"
    )
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2
    scores = jnp.where(np.tri(6, dtype=bool), scores, -1e30)
    scores = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = scores / scores.sum(-1, keepdims=True) @ v
    return mixed.swapaxes(1, 2).reshape(x.shape) @ params["out"]


def normalize(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + bias


@case(weights(w1=(8, 8), scale=(8,), bias=(8,), w2=(8, 8)), X)
def layer_norm(params, x):
    x = normalize(x @ params["w1"], params["scale"], params["bias"])
    return x @ params["w2"]


@case(
    weights(conv1=(3, 3, 3, 4), conv2=(3, 3, 4, 4), w=(16, 5)),
    IMAGES,
    gradient_roundings=7.0,
)
def conv_net(params, x):
    def convolve(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims
        )

    x = jax.nn.relu(convolve(x, params["conv1"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jnp.tanh(convolve(x, params["conv2"]))
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return x.reshape(2, -1) @ params["w"]


@case(weights(table=(10, 8), w=(8, 8)), IDS)
def embedding(params, ids):
    return params["table"][ids] @ params["w"]


@case(weights(w1=(8, 16), w2=(16, 8)), X, KEY)
def dropout(params, x, key):
    x = jax.nn.relu(x @ params["w1"])
    keep = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.75, x.shape)
    return jnp.where(keep, x / 0.75, 0) @ params["w2"]


@case(weights(w=(3, 8, 8)), X, np.array([1, 0, 3], np.int32))
def ragged_dot(params, x, sizes):
    return lax.ragged_dot(x, params["w"], sizes)


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def wide_output(params, x):
    x = jnp.dot(x, params["w1"], preferred_element_type=jnp.float32)
    return jnp.dot(x, params["w2"], preferred_element_type=jnp.float32)


@case(weights(w1=(8, 8), router=(8, 4), w2=(8, 8)), X, float32_products=(1, 3))
def stopped_router(params, x):
    x = x @ params["w1"]
    with optax_mp.amp_stop():
        gate = x @ params["router"]
    return (x @ params["w2"]) * jnp.repeat(gate, 2, axis=1)


# Activations


def activation(name, fun):
    @case(weights(w1=(8, 8), w2=(8, 8)), X)
    def activated(params, x):
        return fun(x @ params["w1"]) @ params["w2"]

    CASES[name] = CASES.pop("activated")


activation("gelu", jax.nn.gelu)
activation("log_softmax", jax.nn.log_softmax)


@case(weights(w1=(8, 8), w2=(8, 4)), X, np.array([0, 3, 1, 1], np.int32))
def cross_entropy(params, x, labels):
    logits = jax.nn.silu(x @ params["w1"]) @ params["w2"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return {"loss": -picked.mean(), "right": (logits.argmax(-1) == labels).mean()}


# Loops and branches


@case(weights(w=(3, 8, 8), b=(3, 8)), X)
def scan_over_layers(params, x):
    def layer(x, params):
        return x + jnp.tanh(x @ params["w"] + params["b"]), None

    return lax.scan(layer, x, params)[0]


@case(weights(into=(8, 8), back=(8, 8), b=(8,)), TIME, gradient_roundings=7.0)
def rnn(params, xs):
    def step(h, x):
        h = jnp.tanh(x @ params["into"] + h @ params["back"] + params["b"])
        return h, h

    return lax.scan(step, jnp.zeros((4, 8)), xs)


@case(weights(w=(3, 8, 8)), X)
def remat_in_scan(params, x):
    @functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False
    )
    def layer(x, w):
        return x + jnp.sin(x @ w), None

    return lax.scan(layer, x, params["w"])[0]


@case(weights(w1=(8, 8), w2=(8, 8)), X, np.bool_(True))
def cond(params, x, left):
    return lax.cond(
        left, lambda x: x @ params["w1"], lambda x: jnp.tanh(x) @ params["w2"], x
    )


@case(weights(w=(8, 8)), X)
def while_loop(params, x):
    # The largest singular value, as in spectral normalization. A while loop has no
    # reverse mode.
    w = lax.stop_gradient(params["w"])

    def improve(state):
        i, v = state
        v = w.T @ (w @ v)
        return i + 1, v / jnp.sqrt(jnp.sum(v * v))

    start = 0, jnp.ones(8) / jnp.sqrt(8.0)
    _, v = lax.while_loop(lambda state: state[0] < 5, improve, start)
    return x @ params["w"] / jnp.linalg.norm(w @ v)


# Transformations inside


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def nested_jit(params, x):
    @jax.jit
    def inner(x, w):
        return jnp.tanh(jax.jit(jnp.dot)(x, w))

    return inner(inner(x, params["w1"]), params["w2"])


@case(weights(w=(8, 8), b=(8,)), X)
def vmap(params, x):
    def one(x, b):
        return jnp.tanh(x @ params["w"] + b)

    return jax.vmap(jax.vmap(one, (0, None)), (None, 0))(
        x, jnp.stack([params["b"], -params["b"]])
    )


@case(weights(w=(8, 8)), X)
def sharded(params, x):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))

    def shard(w, x):
        return lax.psum(jnp.tanh(x @ w).sum(0), "data")

    specs = PartitionSpec(), PartitionSpec("data")
    return shard_map(shard, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
        params["w"], x
    )


@jax.custom_vjp
def clipped_product(x, w):
    return jnp.exp(jnp.tanh(x @ w))


def _clipped_forward(x, w):
    y = clipped_product(x, w)
    return y, (x, w, y)


def _clipped_backward(residuals, g):
    x, w, y = residuals
    g = jnp.clip(g * y, -1, 1)
    with jax.named_scope("own_rule"):
        g = g * jnp.log1p(jnp.exp(x @ w))
    return g @ w.T, x.T @ g


clipped_product.defvjp(_clipped_forward, _clipped_backward)


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def custom_vjp(params, x):
    return clipped_product(x @ params["w1"], params["w2"])


@jax.custom_jvp
def bounded_product(x, w):
    return jnp.tanh(x @ w)


@bounded_product.defjvp
def _bounded_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = bounded_product(x, w)
    with jax.named_scope("own_rule"):
        slope = jnp.exp(jnp.log1p(-y * y))
    return y, slope * (dx @ w + x @ dw)


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def custom_jvp(params, x):
    return bounded_product(x @ params["w1"], params["w2"])


def _double_kernel(x, out):
    out[...] = 2 * x[...]


@jax.custom_vjp
def double(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(_double_kernel, out_shape=shape, interpret=True)(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def pallas(params, x):
    return double(x @ params["w1"]) @ params["w2"]


# What runs as written, between products


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def fft(params, x):
    return jnp.fft.irfft(jnp.fft.rfft(x @ params["w1"])[:, ::-1], 8) @ params["w2"]


@case(weights(w=(8, 8)), X, IDS)
def sort_scatter_cumsum(params, x, ids):
    y = x @ params["w"]
    spread = jnp.zeros((10, 8)).at[ids[:4]].add(y)
    return jnp.sort(y), spread, jnp.cumsum(y, axis=0), jnp.argsort(x)


@case(weights(w=(3, 8, 8)), X)
def callbacks_in_scan(params, x):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        jax.debug.callback(lambda top: None, x.max())
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        half = jax.pure_callback(
            lambda top: np.asarray(top) / np.float32(2),
            shape,
            lax.stop_gradient(jnp.abs(x).max()),
        )
        return x / (1 + half), half

    return lax.scan(layer, x, params["w"])


@case(weights(a=(8, 8), w=(8, 8)), X)
def linear_solve(params, x):
    # Diagonally dominant: the error of the product does not grow in the solve.
    return jnp.linalg.solve(4 * jnp.eye(8) + params["a"], (x @ params["w"]).T)


@case(weights(w1=(8, 8), w2=(8, 8)), X)
def highest_precision(params, x):
    return jnp.dot(x @ params["w1"], params["w2"], precision="highest")


# Functions that have nothing for amp to do.
UNTOUCHED: dict[str, Case] = {
    "reductions": Case(lambda x: (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-6), (X,)),
    "integers": Case(
        lambda i: (i @ i.T, i.sum(), jnp.sort(i)), (np.ones((3, 3), int),)
    ),
    "scan": Case(lambda x: lax.scan(lambda c, y: (c + y, c * y), x[0], x), (X,)),
    "while_loop": Case(
        lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x * 2 + 1, abs(x)),
        (X,),
    ),
    "cond": Case(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), (X,)),
    "jit": Case(lambda x: jax.jit(lambda x: jnp.tanh(x).sum())(x), (X,)),
    "highest_product": Case(lambda x: jnp.dot(x, x.T, precision="highest"), (X,)),
    "stopped": Case(lambda x: optax_mp.amp_stop(lambda x: x @ x.T)(x), (X,)),
    "half": Case(lambda x: jnp.dot(x.astype("bfloat16"), x.T.astype("bfloat16")), (X,)),
    "closure": Case(lambda x: x * jnp.asarray(CAPTURED[0]) + CAPTURED[1], (X,)),
}


def objective(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns a float32 scalar, and the outputs of `fun`.

    The scope makes JAX 0.5 write `transpose(` on what transposition makes; later ones
    write it anyhow.
    """

    @jax.named_scope("case")
    def scalar(*args: Any) -> tuple[Any, Any]:
        outputs = fun(*args)
        total = jnp.zeros(())
        for leaf in jax.tree.leaves(outputs):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                slopes = np.cos(np.arange(leaf.size, dtype=np.float32))
                total += jnp.sum(leaf.astype(jnp.float32) * slopes.reshape(leaf.shape))
        return total, outputs

    return scalar


PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}


def products(jaxpr: Any, highest: bool = False) -> list[Operation]:
    """Return the products of floats, of a free precision or with `highest`."""
    return [
        operation
        for operation in operations(jaxpr)
        if operation.name in PRODUCTS
        and all(jnp.issubdtype(d, jnp.floating) for d in operation.inputs[:2])
        and ("HIGHEST" in str(operation.equation.params["precision"])) == highest
    ]


def runs_in(operation: Operation, dtype: Any) -> bool:
    """Return whether a product reads and writes that dtype only."""
    return all(d == dtype for d in operation.inputs[:2] + operation.outputs)


SENSITIVE = set(
    "exp exp2 expm1 log log1p pow rsqrt tan sinh cosh asin acos atan asinh acosh atanh "
    "erf_inv lgamma digamma reduce_sum reduce_prod cumsum cumprod cumlogsumexp "
    "reduce_window_sum".split()
)
SENSITIVE_IN_FLOAT16 = {"integer_pow", "square"}


def is_sensitive(operation: Operation, dtype: Any) -> bool:
    """Return whether the operation needs float32 and reads the compute dtype."""
    name = operation.name
    return any(d == dtype for d in operation.inputs) and (
        name in SENSITIVE
        or (dtype == jnp.float16 and name in SENSITIVE_IN_FLOAT16)
        or (name == "div" and hasattr(operation.equation.invars[0], "val"))
    )


def compiled(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Compile `fun`, rounding where the jaxpr does.

    XLA on CPU otherwise leaves out roundings to 16 bits. Level 0 halves the time to
    compile.
    """
    options = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
    return jax.jit(fun).lower(*args).compile(compiler_options=options)


# Five roundings to bfloat16 in a row, of 2^-8 of a value each, for what has two or three
# products. A term that is lost, taken twice or transposed is off by far more.
A_FEW_ROUNDINGS = 5 * 2.0**-8


def error(got: Any, want: Any) -> float:
    """Return the largest relative error of a leaf, by norm; of integers, none."""
    worst = 0.0
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if jnp.issubdtype(y.dtype, jnp.floating):
            x, y = (np.asarray(z, np.float64) for z in (x, y))
            distance = np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-12)
            worst = max(worst, distance if np.isfinite(distance) else np.inf)
    return worst
