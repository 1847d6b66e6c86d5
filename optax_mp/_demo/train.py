"""The training loop of `python -m optax_mp`."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_mp._demo.model import init_params, make_loss, mean_loss
from optax_mp._demo.runs import GradFunction, Run
from optax_mp._demo.settings import Settings
from optax_mp._demo.text import Corpus
from optax_mp._tree import cast_floating
from optax_mp.loss_scale._state import loss_scale_state

# So many that the host takes no time next to the steps, even on a GPU, where a step
# takes a few milliseconds.
STEPS_PER_CALL = 25


class Moment(NamedTuple):
    """Where a run stands.

    Attributes:
        step: how many steps it has made, or passed by, from all seeds together.
        loss: the mean over those since the moment before; None while it compiles.
        loss_scale: the loss scale; None for a run without one.
        skipped: how many steps had gradients that were not finite; None without a loss
            scale.
        is_last: whether the run ends here.
    """

    step: int
    loss: float | None = None
    loss_scale: float | None = None
    skipped: int | None = None
    is_last: bool = False

    @property
    def is_diverged(self) -> bool:
        """Whether all later losses are NaN too; a loss scale would skip such steps."""
        is_nan = self.loss is not None and math.isnan(self.loss)
        return is_nan and self.loss_scale is None


Report = Callable[[str, Moment], None]


@dataclass(frozen=True)
class Curve:
    """The values of a run after each of `steps`.

    Attributes:
        steps: numbers of steps.
        losses: means over the training steps since the number before.
        loss_scales: None in a run without a loss scale.
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    loss_scales: tuple[float, ...] | None


@dataclass(frozen=True)
class Result:
    """The result of one run.

    Attributes:
        name: that of the run.
        param_dtype: that of the run.
        held_out_losses: nats per character at the end, on text not trained on; one for
            each seed.
        bytes_per_weight: of params and optimizer state.
        ms_per_step: the median over all calls except the first of each seed, without
            compilation.
        seconds: the whole run, with compilation.
        loss_scale: the last loss scale of the last seed; None for a run without one.
        skipped_steps: how many steps had gradients that were not finite, from all seeds
            together; None without a loss scale.
        curves: the losses and loss scales of the run, for each seed.
    """

    name: str
    param_dtype: str
    held_out_losses: tuple[float, ...]
    bytes_per_weight: float
    ms_per_step: float
    seconds: float
    loss_scale: float | None
    skipped_steps: int | None
    curves: tuple[Curve, ...]

    @property
    def held_out_loss(self) -> float:
        """The mean over seeds."""
        return statistics.fmean(self.held_out_losses)


class Trained(NamedTuple):
    """What training from one seed gave."""

    held_out_loss: float
    moments: list[Moment]
    seconds_per_step: list[float]


def train(run: Run, settings: Settings, corpus: Corpus, report: Report) -> Result:
    """Train the model in one way, and call `report(name, moment)` now and then."""
    report(run.name, Moment(0))
    start_time = time.perf_counter()
    tx = run.transform(make_adamw(settings))
    params, opt_state = init_run(run, settings, tx, seed=settings.seeds[0])
    size = bytes_of((params, opt_state)) / weights_of(params)
    text = jnp.asarray(corpus.train)
    gradients = run.value_and_grad(make_loss(settings, run.compute_dtype))
    train_steps = jax.jit(make_steps(settings, gradients, tx))
    arguments = (params, opt_state, text, batch_key(0), 0, 1)
    compiled = train_steps.lower(*arguments).compile()  # Serves all seeds.

    def train_seed(place: int, seed: int) -> Trained:
        params, opt_state = init_run(run, settings, tx, seed)
        key, moments, times = batch_key(seed), [], []
        for first, stop in call_ranges(settings.steps):
            call_time = time.perf_counter()
            params, opt_state, loss = compiled(
                params, opt_state, text, key, first, stop
            )
            moments.append(moment_of(stop, loss, opt_state))  # Waits for the result.
            times.append((time.perf_counter() - call_time) / (stop - first))
            report(run.name, among_all(moments[-1], place, settings))
            if moments[-1].is_diverged:
                break
        held_out = jnp.asarray(corpus.held_out)
        loss = mean_loss(params, held_out, settings, run.compute_dtype)
        return Trained(float(loss), moments, times[1:] or times)

    trained = [train_seed(*each) for each in enumerate(settings.seeds)]
    times = [seconds for each in trained for seconds in each.seconds_per_step]
    last = [each.moments[-1] for each in trained]
    return Result(
        name=run.name,
        param_dtype=run.param_dtype,
        held_out_losses=tuple(each.held_out_loss for each in trained),
        bytes_per_weight=size,
        ms_per_step=1000 * statistics.median(times),
        seconds=time.perf_counter() - start_time,
        loss_scale=last[-1].loss_scale,
        skipped_steps=sum_or_none([moment.skipped for moment in last]),
        curves=tuple(curve_of(each.moments) for each in trained),
    )


def among_all(moment: Moment, place: int, settings: Settings) -> Moment:
    """Return a moment of the seed at a place, with the steps of the seeds before it."""
    is_end = moment.step == settings.steps or moment.is_diverged
    return moment._replace(
        step=moment.step + place * settings.steps,
        is_last=is_end and place == len(settings.seeds) - 1,
    )


def sum_or_none(counts: list[int | None]) -> int | None:
    """Return the sum of counts that are all there, or None."""
    there = [count for count in counts if count is not None]
    return sum(there) if there else None


def init_run(
    run: Run, settings: Settings, tx: optax.GradientTransformation, seed: int
) -> tuple[Any, Any]:
    """Return params and optimizer state before the first step."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    params = init_params(key, settings)
    # Cast between two programs: within one, XLA may drop the rounding.
    params = cast_floating(params, run.param_dtype)
    return params, jax.jit(tx.init)(params)


def batch_key(seed: int) -> jax.Array:
    """Return the key that draws all batches of a seed."""
    return jax.random.fold_in(jax.random.key(seed), 1)


def make_schedule(settings: Settings) -> optax.Schedule:
    """Return the learning rate: warmup and cosine decay."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.peak_learning_rate,
        warmup_steps=settings.steps // 20,
        decay_steps=settings.steps,
        end_value=settings.final_learning_rate,
    )


def make_adamw(settings: Settings) -> optax.GradientTransformation:
    """Return AdamW with warmup and cosine decay, decaying matrices only."""
    return optax.adamw(
        make_schedule(settings),
        weight_decay=settings.weight_decay,
        mask=is_matrix,
    )


def is_matrix(params: optax.Params) -> Any:
    """Return which leaves are matrices, for these are decayed."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def make_steps(
    settings: Settings, grad_function: GradFunction, tx: optax.GradientTransformation
) -> Callable[..., Any]:
    """Return the function that trains from step `first` up to step `stop`.

    Both may be traced, so that one compilation serves calls of any length. The batch
    of a step depends on the key and on the step's number alone.
    """
    window = np.arange(settings.context + 1)

    def step(
        number: jax.Array,
        carry: tuple[Any, Any, jax.Array],
        text: jax.Array,
        key: jax.Array,
    ) -> tuple[Any, Any, jax.Array]:
        params, opt_state, loss_sum = carry
        starts = jax.random.randint(
            jax.random.fold_in(key, number),
            (settings.batch_size, 1),
            0,
            text.size - settings.context,
        )
        loss, grads = grad_function(opt_state, params, text[starts + window])
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, opt_state, loss_sum + loss

    def train_steps(params, opt_state, text, key, first, stop):
        carry = (params, opt_state, jnp.zeros((), jnp.float32))
        params, opt_state, loss_sum = jax.lax.fori_loop(
            first, stop, lambda number, carry: step(number, carry, text, key), carry
        )
        return params, opt_state, loss_sum / (stop - first)

    return train_steps


def call_ranges(steps: int) -> Iterator[tuple[int, int]]:
    """Yield the first step of each call, and the one after the last.

    The first call makes only one step, so that curves begin with the untrained model.
    """
    first = 0
    for stop in (1, *range(STEPS_PER_CALL, steps, STEPS_PER_CALL), steps):
        if stop > first:
            yield first, stop
            first = stop


def moment_of(step: int, loss: jax.Array, opt_state: optax.OptState) -> Moment:
    """Return where a run stands, with one transfer from the device."""
    state = loss_scale_state(opt_state, "demo")
    if state is None:
        return Moment(step, float(loss))
    values = jax.device_get((loss, state.scale, state.total_skipped_count))
    return Moment(step, float(values[0]), float(values[1]), int(values[2]))


def curve_of(moments: list[Moment]) -> Curve:
    """Return the curve through all moments."""
    steps, losses, scales, *_ = zip(*moments, strict=True)
    return Curve(steps, losses, None if scales[0] is None else scales)


def bytes_of(tree: Any) -> int:
    """Return the bytes that the arrays of a tree hold."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def weights_of(params: optax.Params) -> int:
    """Return the number of weights."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
