"""Sign analysis of jaxprs: known cases, and random programs that may refute it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import optax_mp
from optax_mp.compact._signs import Fact, facts_of


def claimed(function, *given, known=()):
    """Return what is claimed of the outputs; inputs in `known` are not negative."""
    jaxpr = jax.make_jaxpr(function)(*given)
    inputs = [Fact(i in known) for i in range(len(jaxpr.in_avals))]
    return [fact.nonnegative for fact in facts_of(jaxpr, inputs)]


X = np.float32(1.5)
ROW = np.ones(4, np.float32)


@jax.custom_jvp
def custom_square(x):
    return x * x


custom_square.defjvp(lambda primals, tangents: (primals[0] ** 2, tangents[0]))


@jax.custom_vjp
def custom_cube(x):
    return x * x * x


custom_cube.defvjp(lambda x: (x, None), lambda _, g: (g,))

half = jax.jit(lambda x: 0.5 * x)


def is_large(x):
    return (x.sum() > 9) & (x.sum() < jnp.inf)  # roots of infinity would never end


NEVER_NEGATIVE = {
    "abs": jnp.abs,
    "square": jnp.square,
    "a power of 4": lambda x: x**4,
    "exp": jnp.exp,
    "sqrt": jnp.sqrt,
    "x x": lambda x: x * x,
    "c x x": lambda x: 0.1 * x * x,
    "c x d x": lambda x: (0.1 * x) * (0.2 * x),
    "an average of squares": lambda x: 0.9 * jnp.abs(x) + 0.1 * x * x,
    "a power by a float": lambda x: jnp.power(x, 2.0),
    "an einsum": lambda x: jnp.einsum("i,i->i", x, x),
    "an einsum with a sum": lambda x: jnp.einsum("ij,ij->i", *[jnp.outer(x, x)] * 2),
    "a product of one argument in a jit": lambda x: jax.jit(jnp.multiply)(x, 0.5 * x),
    "1 minus a fraction": lambda x: 1 - jnp.full_like(x, 0.9) * 0.5,
    "max with 0": lambda x: jnp.maximum(x, 0.0),
    "min of two squares": lambda x: jnp.minimum(x * x, jnp.abs(x)),
    "where": lambda x: jnp.where(x > 0, x * x, 1.0),
    "clip": lambda x: jnp.clip(x, 0.0, 1.0),
    "zeros": jnp.zeros_like,
    "comparison": lambda x: (x > 0).astype(jnp.float32),
    "sum of squares": lambda x: jnp.sum(x * x),
    "jit": lambda x: jax.jit(lambda y: y * y)(x),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.abs, jnp.square, x),
    "custom_jvp": custom_square,
    "a scan": lambda x: lax.scan(lambda c, y: (c + y * y, y * y), 0.0, x)[0],
    "what a scan stacks": lambda x: lax.scan(lambda c, y: (c + y, y * y), 0.0, x)[1],
    "a while": lambda x: lax.while_loop(is_large, jnp.sqrt, x * x),
    "a scan in a cond": lambda x: lax.cond(
        x.sum() > 0,
        lambda x: lax.scan(lambda c, _: (c * c, c), x, length=2)[0] ** 2,
        jnp.abs,
        x,
    ),
    "remat": jax.checkpoint(lambda x: x * x),
    "a cast": lambda x: (x * x).astype(jnp.bfloat16).astype(jnp.float32),
    "shapes": lambda x: jnp.broadcast_to((x * x)[None], (2, *x.shape)).T.ravel(),
    "a matrix product": lambda x: jnp.outer(x * x, jnp.abs(x)) @ (x * x),
    "a root of a mean": lambda x: jnp.sqrt(jnp.mean(x * x)) / 2,
}
UNKNOWN = {
    "itself": lambda x: x,
    "a difference": lambda x: x * x - 1,
    "a difference of itself": lambda x: x * x - x * x,
    "minus": lambda x: -(x * x),
    "a power of 3 by a float": lambda x: jnp.power(x, 3.0),
    "products of other places": lambda x: jnp.einsum("i,j->ij", x, x).ravel(),
    "products of two calls of a jit": lambda x: half(x) * half(1 - x),
    "1 minus a square": lambda x: 1 - x * x,
    "a negative multiple": lambda x: -0.1 * x * x,
    "x y": lambda x: x * jnp.sin(x),
    "sum": jnp.sum,
    "log": lambda x: jnp.log(x * x),
    "where": lambda x: jnp.where(x > 0, x * x, -1.0),
    "max with -1": lambda x: jnp.maximum(x, -1.0),
    "min with 0": lambda x: jnp.minimum(x, 0.0),
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "a cond with one branch": lambda x: lax.cond(x.sum() > 0, jnp.abs, jnp.sin, x),
    "custom_vjp": custom_cube,
    "a scan that may take no turn": lambda x: lax.scan(
        lambda c, _: (c * c, None), x, length=2
    )[0],
    "a while that may take no turn": lambda x: lax.while_loop(is_large, jnp.sqrt, x),
    "a carry that turns after two turns": lambda x: lax.scan(
        lambda c, _: ((c[1], c[2], x), None), (x * x, x * x, x * x), length=3
    )[0][0],
    "no multiple: a mask": lambda x: x * x.astype(bool).astype(jnp.float32),
    "no multiple: bits": lambda x: x * x.astype(jnp.uint8).astype(jnp.float32),
    "clamp to a negative": lambda x: lax.clamp(0.0, x, -1.0),
    "of a complex number": lambda x: jnp.real(jnp.square(x * 1j)),
}


@pytest.mark.parametrize("name", NEVER_NEGATIVE)
def test_never_negative(name):
    assert claimed(NEVER_NEGATIVE[name], ROW) == [True]


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name):
    assert claimed(UNKNOWN[name], ROW) == [False]


@pytest.mark.parametrize(
    ("function", "known", "want"),
    [
        (lambda x, y: x + y, (0, 1), True),
        (lambda x, y: x + 0.5 * (y - x), (0, 1), True),
        (lambda x, y: x + (y - x) * 2.0, (0, 1), False),
        (lambda x, y: x * y, (0, 1), True),
        (lambda x, y: x * y * x, (1,), True),
        (lambda x, y: x / y * x, (1,), True),
        (lambda x, y: x / y, (0, 1), True),
        (lambda x, y: jnp.maximum(x, y), (1,), True),
        (lambda x, y: jnp.minimum(x, y), (1,), False),
        (lambda x, y: x**y, (0,), True),
        (lambda x, y: x**y, (1,), False),
        (lambda x, y: lax.clamp(x, y, 2.0), (0,), True),
        (lambda x, y: x, (0,), True),
        (lambda x, y: 0.9 * x + 0.1 * y**2, (0,), True),
        (lambda x, y: x + 0.1 * (y * y - x), (0,), True),
        (lambda x, y: (y * y - x) * 0.1 + x, (0,), True),
        (lambda x, y: x - 0.1 * (x - y * y), (0,), True),
        (lambda x, y: x + 0.1 * (y * y - x), (), False),
        (lambda x, y: x + 1.1 * (y * y - x), (0,), False),
        (lambda x, y: x - 0.1 * (y * y - x), (0,), False),
        (lambda x, y: x + 0.1 * (y - x), (0,), False),
        (lambda x, y: y + 0.1 * (y * y - x), (0, 1), False),
        (lambda x, y: jnp.maximum(0.9 * x, jnp.abs(y)), (), True),
    ],
)
def test_what_is_known_of_inputs_is_followed(function, known, want):
    assert claimed(function, X, X, known=known) == [want]


GRADS = jnp.linspace(-1.0, 1.0, 8192).reshape(64, 128)
SQUARES = {
    "x * x": lambda g: g * g,
    "square": jnp.square,
    "x ** 2": lambda g: g**2,
    "power by an int": lambda g: jnp.power(g, 2),
    "power by a float": lambda g: jnp.power(g, 2.0),
    "einsum": lambda g: jnp.einsum("ij,ij->ij", g, g),
}
AVERAGES = {
    "an average": lambda v, s, b2: b2 * v + (1 - b2) * s,
    "a step": lambda v, s, b2: v + (1 - b2) * (s - v),
    "a step the other way": lambda v, s, b2: v - (1 - b2) * (v - s),
}


@pytest.mark.parametrize(
    ("square", "average", "b2"),
    [(x, y, "in Python") for x in SQUARES for y in AVERAGES]
    + [(x, "an average", "traced") for x in SQUARES],
)
def test_a_second_moment_has_unsigned_codes_however_it_is_written(square, average, b2):
    def init(params):
        state = jnp.zeros_like(params), jnp.zeros_like(params)
        return (*state, jnp.float32(0.99)) if b2 == "traced" else state

    def update(grads, state, params=None):
        mean, moment, *rest = state
        moment = AVERAGES[average](moment, SQUARES[square](grads), (*rest, 0.99)[0])
        mean = 0.9 * mean + 0.1 * grads
        return -0.1 * mean / (jnp.sqrt(moment) + 1e-8), (mean, moment, *rest)

    tx = optax_mp.low_bit_state(optax.GradientTransformation(init, update))
    leaves = jax.tree.leaves(tx.init(GRADS))
    codes = [x.dtype.name for x in leaves if x.size == GRADS.size]
    assert codes == ["int8", "uint8"]


# Of the functions above, those from a row to a row, and some more.
UNARY = [
    *[
        function
        for function in (*NEVER_NEGATIVE.values(), *UNKNOWN.values())
        if jax.eval_shape(function, ROW).shape == ROW.shape
    ],
    jnp.sign,
    jnp.tanh,
    lambda x: 1 - x,
    lambda x: x.astype(jnp.int32).astype(jnp.float32),
    lambda x: x[::-1],
    lambda x: x * half(x),
    lambda x: 1 - jax.nn.sigmoid(x),
    lambda x: jnp.pad(x, 1, constant_values=-1.0)[:-2],
    lambda x: lax.scan(lambda c, y: (c + jnp.abs(y), c * y), 0.0, x)[1],
]
BINARY = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.divide,
    jnp.maximum,
    jnp.minimum,
    jnp.power,
    lambda x, y: jnp.where(x > y, x, y),
    lambda x, y: lax.clamp(x, y, x + 1),
    lambda x, y: lax.clamp(0.0, x, y),
    lambda x, y: jnp.concatenate([x[:2], y[:2]]),
    lambda x, y: 0.9 * x + 0.1 * y * y,
    lambda x, y: x + 0.3 * (y - x),
    lambda x, y: x + 0.3 * (jnp.square(y) - x),
    lambda x, y: jax.jit(jnp.multiply)(x, 0.5 * y),
]


def random_program(rng, length):
    """Return a function of two rows that computes a few things from each other."""
    steps = []
    for i in range(length):
        # Mostly among the latest values.
        one, two = (max(0, i + 2 - int(k)) for k in rng.geometric(0.4, 2))
        one, two = min(one, i + 1), min(two, i + 1)
        if rng.uniform() < 0.5:
            steps.append((UNARY[rng.integers(len(UNARY))], (one,)))
        else:
            steps.append((BINARY[rng.integers(len(BINARY))], (one, two)))

    def program(x, y):
        values = [x, y]
        for function, places in steps:
            values.append(function(*(values[place] for place in places)))
        return tuple(values[2:])

    return program


def assert_sound(seed, length=12):
    rng = np.random.default_rng(seed)
    program = random_program(rng, length)
    x, y = rng.standard_normal((2, 40, 4)).astype(np.float32) * 2
    y = np.abs(y)
    claims = claimed(program, x[0], y[0], known=(1,))
    # Op by op: nothing to compile, for programs that run once.
    wrong = []
    for values in zip(*map(np.asarray, (x[:8], y[:8])), strict=True):
        outputs = program(*map(jnp.asarray, values))
        wrong += [
            i
            for i, (claim, out) in enumerate(zip(claims, outputs, strict=True))
            if claim and (np.asarray(out) < 0).any()
        ]
    assert not wrong, jax.make_jaxpr(program)(x[0], y[0])
    return sum(claims)


def test_random_programs_keep_the_claims_made_of_them():
    claims = sum(assert_sound(seed) for seed in range(6))
    assert claims >= 15  # so that there was something to refute
