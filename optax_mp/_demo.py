"""The model, the data and the training loop of `python -m optax_mp`."""

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_mp
from optax_mp._scaled_gradients import loss_scale_state

ASCII_SIZE = 128
STEPS_PER_CALL = 25  # So that the host costs nothing next to the steps themselves.
HELD_OUT_WINDOWS = 256

LossFunction = Callable[[optax.Params, jax.Array], jax.Array]
GradFunction = Callable[
    [optax.OptState, optax.Params, jax.Array], tuple[jax.Array, optax.Updates]
]
Report = Callable[[str, int, float | None], None]


@dataclass(frozen=True)
class Settings:
    """What all runs of a demo have in common.

    How much naive low precision loses depends on the peak learning rate, since
    rounding swallows an update that is small against its weight. With seed 0 the naive
    bfloat16 run ends 0.161 above float32 at 1e-3, 0.095 at 2e-3, 0.079 at 3e-3, 0.054
    at 5e-3 and 0.018 at 1e-2. So 3e-3 is a middle, lower than the 5e-3 that serves
    float32 best here (1.369) and the 1e-2 that serves naive bfloat16 best (1.417).
    Large models need far lower rates.
    """

    steps: int = 3000
    seed: int = 0
    width: int = 64
    layer_count: int = 2
    head_count: int = 4
    context: int = 64
    batch_size: int = 4
    peak_learning_rate: float = 3e-3
    final_learning_rate: float = 3e-5
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Check what the command line can set."""
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}, expected at least 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, expected 0 to 2**32 - 1.")


DEFAULTS = Settings()


@dataclass(frozen=True)
class Run:
    """One way to train the model.

    Attributes:
        name: what the table calls it.
        param_dtype: the dtype of the params, and so of activations and gradients.
        transform: makes the run's optimizer from the AdamW that all runs share.
        value_and_grad: makes the run's gradient function from the loss function.
    """

    name: str
    param_dtype: str
    transform: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    value_and_grad: Callable[[LossFunction], GradFunction]


def unchanged(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner`: plain optax."""
    return inner


def unscaled_value_and_grad(loss: LossFunction) -> GradFunction:
    """Return JAX's own value and gradient, which need nothing of the state."""
    return lambda opt_state, params, batch: jax.value_and_grad(loss)(params, batch)


def scaled_masters(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` on masters, with a loss scale around.

    It grows sooner than by default, so that it meets its limits in a short run, too.
    """
    return optax_mp.dynamic_loss_scale(
        optax_mp.mixed_precision(inner), growth_interval=100
    )


# The first run is what the others are compared with.
RUNS = (
    Run("float32", "float32", unchanged, unscaled_value_and_grad),
    Run("bf16 naive", "bfloat16", unchanged, unscaled_value_and_grad),
    Run(
        "bf16 + masters", "bfloat16", optax_mp.mixed_precision, unscaled_value_and_grad
    ),
    Run("f16 naive", "float16", unchanged, unscaled_value_and_grad),
    Run("f16 + scale", "float16", scaled_masters, optax_mp.value_and_grad),
)


@dataclass(frozen=True)
class Result:
    """What one run came to.

    Attributes:
        name: that of the run.
        param_dtype: that of the run.
        held_out_loss: nats a character at the end, on text not trained on.
        bytes_per_weight: params and optimizer state, over the number of weights.
        ms_per_step: the median over calls, without compilation.
        skipped_steps: those with gradients that were not finite; None without a scale.
    """

    name: str
    param_dtype: str
    held_out_loss: float
    bytes_per_weight: float
    ms_per_step: float
    skipped_steps: int | None = None


class Corpus(NamedTuple):
    """A text as ASCII codes: all but its last tenth, and windows of that tenth."""

    train: np.ndarray
    held_out: np.ndarray


def read_text(path: Path | None) -> str:
    """Return the text of a file, or without one the help texts of Python itself.

    Raises:
        ValueError: if there is no such text, or it is not readable as UTF-8.
    """
    if path is None:
        try:
            topics = importlib.import_module("pydoc_data.topics").topics
        except ImportError as error:  # Some distributions leave it out.
            raise ValueError(
                "this Python comes without pydoc_data, whose help texts the demo "
                "trains on; give a text of your own with --text FILE."
            ) from error
        return "\n".join(topics[topic] for topic in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"the text {path} cannot be read ({error}), expected a UTF-8 text file."
        ) from error


def make_corpus(text: str, context: int) -> Corpus:
    """Split a text, without its non-ASCII characters, for training and evaluation.

    Raises:
        ValueError: if the held-out tenth would not fill one window.
    """
    codes = np.frombuffer(text.encode("ascii", errors="ignore"), np.uint8)
    window = context + 1  # Each character but the first is predicted.
    if codes.size < 10 * window:
        raise ValueError(
            f"the text has {codes.size} ASCII characters, expected at least "
            f"{10 * window}, of which the last tenth is held out; give a longer one."
        )
    train, held_out = np.split(codes, [codes.size - codes.size // 10])
    window_count = min(HELD_OUT_WINDOWS, held_out.size // window)
    starts = np.linspace(0, held_out.size - window, window_count).astype(int)
    return Corpus(train, held_out[starts[:, None] + np.arange(window)])


def init_params(key: jax.Array, settings: Settings) -> optax.Params:
    """Return float32 params of a decoder-only transformer over ASCII characters."""
    width = settings.width
    keys = iter(jax.random.split(key, 2 + 4 * settings.layer_count))

    def normal(rows: int, columns: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), (rows, columns), jnp.float32)

    def gain() -> jax.Array:
        return jnp.ones(width, jnp.float32)

    def layer() -> dict[str, jax.Array]:
        # Each block adds twice to the residual stream, which is to stay of order 1.
        out_scale = (2 * settings.layer_count) ** -0.5
        return {
            "attention_norm": gain(),
            "attention_in": normal(width, 3 * width, width**-0.5),
            "attention_out": normal(width, width, out_scale * width**-0.5),
            "mlp_norm": gain(),
            "mlp_in": normal(width, 4 * width, width**-0.5),
            "mlp_out": normal(4 * width, width, out_scale * (4 * width) ** -0.5),
        }

    return {
        "characters": normal(ASCII_SIZE, width, 1.0),
        "layers": [layer() for _ in range(settings.layer_count)],
        "final_norm": gain(),
        "logits": normal(width, ASCII_SIZE, width**-0.5),
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    """Normalise the last axis in float32, as is usual in low-precision training."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-6)).astype(x.dtype) * gain


def rotate(x: jax.Array) -> jax.Array:
    """Turn queries or keys by their position, so that attention sees distances."""
    length, half = x.shape[1], x.shape[-1] // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(length)[:, None, None] * frequencies
    cos = jnp.asarray(np.cos(angles), x.dtype)
    sin = jnp.asarray(np.sin(angles), x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [left * cos - right * sin, right * cos + left * sin], axis=-1
    )


def attention(x: jax.Array, layer: dict[str, jax.Array], head_count: int) -> jax.Array:
    """Causal self-attention."""
    batch, length, width = x.shape
    heads = (x @ layer["attention_in"]).reshape(batch, length, 3, head_count, -1)
    query, key, value = jnp.moveaxis(heads, 2, 0)
    # By hand: on CPU `jax.nn.dot_product_attention` refuses float16.
    match = jnp.einsum("bqhd,bkhd->bhqk", rotate(query), rotate(key))
    match = match.astype(jnp.float32) * query.shape[-1] ** -0.5
    is_past = np.tri(length, dtype=bool)
    weights = jax.nn.softmax(jnp.where(is_past, match, -jnp.inf)).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return mixed.reshape(batch, length, width) @ layer["attention_out"]


def predict(params: Any, characters: jax.Array, head_count: int) -> jax.Array:
    """Return the logits of the character after each one."""
    x = params["characters"][characters]
    for layer in params["layers"]:
        x += attention(rms_norm(x, layer["attention_norm"]), layer, head_count)
        hidden = jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ layer["mlp_in"])
        x += hidden @ layer["mlp_out"]
    return rms_norm(x, params["final_norm"]) @ params["logits"]


def make_loss(settings: Settings) -> LossFunction:
    """Return the mean cross-entropy of windows, in float32 whatever the params are."""

    def loss(params: optax.Params, windows: jax.Array) -> jax.Array:
        windows = windows.astype(jnp.int32)
        logits = predict(params, windows[:, :-1], settings.head_count)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), windows[:, 1:]
        ).mean()

    return loss


def make_adamw(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with warmup and cosine decay, decaying matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_learning_rate,
        warmup_steps=settings.steps // 20,
        decay_steps=settings.steps,
        end_value=settings.final_learning_rate,
    )
    return optax.adamw(
        schedule,
        weight_decay=settings.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )


def make_steps(
    settings: Settings, grad_function: GradFunction, tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Return the function that trains from step `first` up to step `stop`.

    Both may be traced, so that one compilation serves calls of any length. The batch
    of a step depends on the seed and on the step's number alone.
    """
    batch_key = jax.random.fold_in(jax.random.key(settings.seed), 1)
    window = np.arange(settings.context + 1)

    def step(
        number: jax.Array, carry: tuple[Any, Any, jax.Array], text: jax.Array
    ) -> tuple[Any, Any, jax.Array]:
        params, opt_state, loss_sum = carry
        starts = jax.random.randint(
            jax.random.fold_in(batch_key, number),
            (settings.batch_size, 1),
            0,
            text.size - settings.context,
        )
        loss, grads = grad_function(opt_state, params, text[starts + window])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss_sum + loss

    def train_steps(params, opt_state, text, first, stop):
        carry = (params, opt_state, jnp.zeros((), jnp.float32))
        params, opt_state, loss_sum = jax.lax.fori_loop(
            first, stop, lambda number, carry: step(number, carry, text), carry
        )
        return params, opt_state, loss_sum / (stop - first)

    return train_steps


def train(run: Run, settings: Settings, corpus: Corpus, report: Report) -> Result:
    """Train the model in one way; `report(name, step, loss)` follows it."""
    report(run.name, 0, None)
    loss = make_loss(settings)
    tx = run.transform(make_adamw(settings))
    init_key = jax.random.fold_in(jax.random.key(settings.seed), 0)
    params = init_params(init_key, settings)
    params = optax_mp.cast_floating(params, run.param_dtype)
    opt_state = tx.init(params)
    text = jnp.asarray(corpus.train)
    train_steps = make_steps(settings, run.value_and_grad(loss), tx)
    compiled = jax.jit(train_steps).lower(params, opt_state, text, 0, 1).compile()

    times = []
    for first in range(0, settings.steps, STEPS_PER_CALL):
        stop = min(first + STEPS_PER_CALL, settings.steps)
        start_time = time.perf_counter()
        params, opt_state, mean_loss = compiled(params, opt_state, text, first, stop)
        mean_loss = float(mean_loss)  # Waits for the result.
        times.append((time.perf_counter() - start_time) / (stop - first))
        report(run.name, stop, mean_loss)

    scale_state = loss_scale_state(opt_state, "demo")
    return Result(
        name=run.name,
        param_dtype=run.param_dtype,
        held_out_loss=float(jax.jit(loss)(params, jnp.asarray(corpus.held_out))),
        bytes_per_weight=bytes_of((params, opt_state)) / weights_of(params),
        ms_per_step=1000 * statistics.median(times),
        skipped_steps=scale_state and int(scale_state.total_skipped),
    )


def bytes_of(tree: Any) -> int:
    """Return the bytes that the arrays of a tree hold."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def weights_of(params: optax.Params) -> int:
    """Return the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
