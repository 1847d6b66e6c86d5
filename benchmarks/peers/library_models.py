"""Small models of many libraries, with random weights and inputs, for `libraries.py`.

Each library is imported only where its model is built, because it may not be installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

KEY = jax.random.key(0)


@dataclass(frozen=True)
class Problem:
    """A loss of params and inputs."""

    loss: Callable[..., jax.Array]
    params: Any
    inputs: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Model:
    """A model of a library.

    Attributes:
        library: its name.
        package: its name on PyPI.
        kind: what the model is.
        build: imports the library, and returns the problem.
    """

    library: str
    package: str
    kind: str
    build: Callable[[], Problem]


def normal(seed: int, *shape: int) -> jax.Array:
    """Return random inputs."""
    return jax.random.normal(jax.random.key(seed), shape)


def tokens(seed: int, *shape: int) -> jax.Array:
    """Return random tokens of a vocabulary of 128."""
    return jax.random.randint(jax.random.key(seed), shape, 0, 128)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the mean cross entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def transformers_problem(name: str, **settings: Any) -> Problem:
    """Return a language model of transformers, and its cross entropy."""
    transformers = import_module("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=128, **settings)
    head = {"Bert": "FlaxBertForMaskedLM", "GPT2": "FlaxGPT2LMHeadModel"}[name]
    network = getattr(transformers, head)(config, input_shape=(1, 16), seed=0)

    def loss(params: Any, words: jax.Array) -> jax.Array:
        logits = network(words, params=params, train=False).logits
        return cross_entropy(logits, words)

    return Problem(loss, network.params, (tokens(0, 4, 16),))


def _bert() -> Problem:
    return transformers_problem(
        "Bert",
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=16,
    )


def _gpt2() -> Problem:
    return transformers_problem("GPT2", n_embd=64, n_layer=2, n_head=4, n_positions=16)


def _linen() -> Problem:
    nn = import_module("flax.linen")

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
            x = nn.RNN(nn.OptimizedLSTMCell(64))(x)
            return nn.Dense(1)(nn.gelu(nn.Dense(128)(nn.LayerNorm()(x))))

    network, x = Network(), normal(0, 4, 16, 64)
    params = network.init(KEY, x)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((network.apply(params, x) - y) ** 2)

    return Problem(loss, params, (x, normal(1, 4, 16, 1)))


def _nnx() -> Problem:
    nnx = import_module("flax.nnx")

    class Network(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
            self.head = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.first(x)))
            return self.head(nnx.relu(self.second(x)).mean((1, 2)))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params, rest, copy=True)(x), labels)

    return Problem(loss, params, (rest, normal(0, 8, 16, 16, 3), tokens(1, 8) % 10))


def _haiku() -> Problem:
    haiku = import_module("haiku")

    def forward(x: jax.Array) -> jax.Array:
        network = haiku.nets.MobileNetV1(
            strides=(1, 2, 2), channels=(16, 32, 64), num_classes=10, use_bn=False
        )
        return network(x, is_training=True)

    network = haiku.without_apply_rng(haiku.transform(forward))
    x = normal(0, 8, 32, 32, 3)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return cross_entropy(network.apply(params, x), labels)

    return Problem(loss, network.init(KEY, x), (x, tokens(1, 8) % 10))


def _equinox() -> Problem:
    eqx = import_module("equinox")

    class Network(eqx.Module):
        attention: Any
        norm: Any
        cell: Any
        head: Any

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 3)
            self.attention = eqx.nn.MultiheadAttention(4, 64, key=keys[0])
            self.norm = eqx.nn.LayerNorm(64)
            self.cell = eqx.nn.GRUCell(64, 64, key=keys[1])
            self.head = eqx.nn.MLP(64, 1, 128, 2, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = x + self.attention(*[jax.vmap(self.norm)(x)] * 3)
            step = lambda state, x: (self.cell(x, state), None)  # noqa: E731
            return self.head(jax.lax.scan(step, jnp.zeros(64), x)[0])

    params, static = eqx.partition(Network(KEY), eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    return Problem(loss, params, (normal(0, 8, 16, 64), normal(1, 8, 1)))


def neural_ode(**settings: Any) -> Problem:
    """Return an MLP whose ODE diffrax solves."""
    diffrax, eqx = import_module("diffrax"), import_module("equinox")
    network = eqx.nn.MLP(8, 8, 64, 2, jnp.tanh, key=KEY)
    params, static = eqx.partition(network, eqx.is_inexact_array)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        solve = lambda start: diffrax.diffeqsolve(  # noqa: E731
            diffrax.ODETerm(lambda t, y, args: eqx.combine(args, static)(y)),
            diffrax.Tsit5(),
            *(0.0, 1.0, 0.1, start, params),
            **{name: make(diffrax) for name, make in settings.items()},
        )
        return jnp.mean((jax.vmap(solve)(x).ys[:, -1] - y) ** 2)

    return Problem(loss, params, (normal(0, 16, 8), normal(1, 16, 8)))


def _diffrax() -> Problem:
    return neural_ode()


def _diffrax_backsolve() -> Problem:
    return neural_ode(adjoint=lambda diffrax: diffrax.BacksolveAdjoint())


def _diffrax_adaptive() -> Problem:
    return neural_ode(
        stepsize_controller=lambda diffrax: diffrax.PIDController(rtol=1e-3, atol=1e-3)
    )


def _lineax() -> Problem:
    lineax = import_module("lineax")

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        features = jnp.tanh(x @ params["first"]) @ params["second"]
        matrix = features.T @ features / len(x) + 0.1 * jnp.eye(16)
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        vector = features.T @ y / len(x)
        weights = lineax.linear_solve(operator, vector, lineax.Cholesky()).value
        return jnp.mean((features @ weights - y) ** 2)

    params = {"first": normal(0, 16, 64) / 4, "second": normal(1, 64, 16) / 8}
    return Problem(loss, params, (normal(2, 64, 16), normal(3, 64)))


def _optimistix() -> Problem:
    optimistix = import_module("optimistix")

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def layer(z: jax.Array, params: Any) -> jax.Array:
            return jnp.tanh(z @ params["inner"] + x @ params["outer"])

        solver = optimistix.FixedPointIteration(rtol=1e-2, atol=1e-2)
        found = optimistix.fixed_point(
            layer, solver, jnp.zeros((16, 32)), params, max_steps=64, throw=False
        )
        return jnp.mean((found.value @ params["head"] - y) ** 2)

    params = {
        "inner": normal(0, 32, 32) / 16,
        "outer": normal(1, 8, 32) / 3,
        "head": normal(2, 32, 1) / 6,
    }
    return Problem(loss, params, (normal(3, 16, 8), normal(4, 16, 1)))


def _tfp() -> Problem:
    tfp = import_module("tensorflow_probability.substrates.jax")

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        features = jnp.tanh(x @ params["weights"])
        kernel = tfp.math.psd_kernels.ExponentiatedQuadratic(
            jnp.exp(params["amplitude"]), jnp.exp(params["length"])
        )
        process = tfp.distributions.GaussianProcess(
            kernel, features, observation_noise_variance=jnp.exp(params["noise"])
        )
        return -process.log_prob(y) / len(y)

    params = {
        "weights": normal(0, 8, 4) / 3,
        **{name: jnp.float32(0) for name in ("amplitude", "length")},
        "noise": jnp.float32(-1),
    }
    return Problem(loss, params, (normal(1, 32, 8), normal(2, 32)))


def _numpyro() -> Problem:
    numpyro = import_module("numpyro")
    dist = import_module("numpyro.distributions")
    guides, infer = (
        import_module("numpyro.infer.autoguide"),
        import_module("numpyro.infer"),
    )

    def network(x: jax.Array, y: jax.Array) -> None:
        shapes = {"first": (8, 32), "second": (32, 32), "third": (32, 1)}
        for name, shape in shapes.items():
            prior = dist.Normal(jnp.zeros(shape), shape[0] ** -0.5).to_event(2)
            x = x @ numpyro.sample(name, prior)
            x = x if name == "third" else jnp.tanh(x)
        numpyro.sample("y", dist.Normal(x[:, 0], 0.5), obs=y)

    guide = guides.AutoNormal(network)
    elbo = infer.Trace_ELBO(num_particles=4)
    svi = infer.SVI(network, guide, numpyro.optim.Adam(1e-3), elbo)
    x, y = normal(0, 64, 8), normal(1, 64)
    params = svi.get_params(svi.init(KEY, x, y))

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return elbo.loss(jax.random.key(1), params, network, guide, x, y) / len(x)

    return Problem(loss, params, (x, y))


def _brax() -> Problem:
    networks = import_module("brax.training.agents.ppo.networks")
    losses = import_module("brax.training.agents.ppo.losses")
    types = import_module("brax.training.types")
    made = networks.make_ppo_networks(16, 4, policy_hidden_layer_sizes=(64, 64))
    keys = jax.random.split(KEY, 2)
    params = losses.PPONetworkParams(
        made.policy_network.init(keys[0]), made.value_network.init(keys[1])
    )
    steps, count = 8, 16
    data = types.Transition(
        observation=normal(0, steps, count, 16),
        action=normal(1, steps, count, 4),
        reward=normal(2, steps, count),
        discount=jnp.ones((steps, count)),
        next_observation=normal(3, steps, count, 16),
        extras={
            "policy_extras": {
                "raw_action": normal(4, steps, count, 4),
                "log_prob": normal(5, steps, count) - 4,
                "distribution_params": normal(6, steps, count, 8),
            },
            "state_extras": {"truncation": jnp.zeros((steps, count))},
        },
    )

    def loss(params: Any, data: Any) -> jax.Array:
        return losses.compute_ppo_loss(
            params, None, data, jax.random.key(1), made, entropy_cost=1e-2
        )[0]

    return Problem(loss, params, (data,))


MODELS = (
    Model("transformers", "transformers", "BERT, 2 layers", _bert),
    Model("transformers", "transformers", "GPT-2, 2 layers", _gpt2),
    Model("Flax Linen", "flax", "attention, LSTM, LayerNorm", _linen),
    Model("Flax NNX", "flax", "conv net with BatchNorm", _nnx),
    Model("Haiku", "dm-haiku", "MobileNet, 3 blocks", _haiku),
    Model("Equinox", "equinox", "attention, GRU over time", _equinox),
    Model("diffrax", "diffrax", "neural ODE, Tsit5, constant steps", _diffrax),
    Model(
        "diffrax", "diffrax", "neural ODE, Tsit5, backsolve adjoint", _diffrax_backsolve
    ),
    Model(
        "diffrax",
        "diffrax",
        "neural ODE, Tsit5, chosen steps, rtol 1e-3",
        _diffrax_adaptive,
    ),
    Model("lineax", "lineax", "ridge regression on features", _lineax),
    Model(
        "optimistix", "optimistix", "equilibrium of a network, fixed point", _optimistix
    ),
    Model(
        "TensorFlow Probability",
        "tfp-nightly",
        "Gaussian process, marginal likelihood",
        _tfp,
    ),
    Model("NumPyro", "numpyro", "Bayesian network, ELBO", _numpyro),
    Model("Brax", "brax", "PPO networks and loss", _brax),
)
