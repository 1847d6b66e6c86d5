"""Reinforcement learning of a small policy on text: the trainer and its sampler.

    python benchmarks reinforcement --json FILE
    python benchmarks reinforcement --steps 20 --seeds 0

In reinforcement learning of language models, one program samples and another computes
the same probabilities to train. Both have the same params, but add in another order,
and so their log-probabilities differ by roundings: `optax_mp` cannot change that, the
dtype can (https://arxiv.org/abs/2510.26788).

The demo's transformer, pretrained on its novel, goes on with groups of eight texts for
each prompt. A text is rewarded for vowels and other letters in turn. The sampler keeps
keys and values, and adds each product in two halves, as over two devices. The trainer
takes two steps of PPO for each batch, at a constant learning rate, with the sampler's
log-probabilities as those of the old policy. All forms see the same prompts and the
same random numbers.

"mismatch" is the mean distance of the two log-probabilities of a sampled letter before
the first step of a batch, in nats, and "KL" the mean of exp(d) - 1 - d, with this
distance d: an estimate of the divergence. "return" is the mean reward of the last fifth
of the batches, "above" its distance to float32's with a 95% interval over seeds.
"""

import argparse
import sys
from statistics import fmean
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from finetune import PRETRAINING, interval, pretrained
from the_demo import Form, read_corpus, rms_norm, scaled
from the_demo import predict as trainer_logits

import optax_mp

STEPS, SEEDS, RATE = 100, (0, 1, 2, 3, 4), 1e-4
PROMPTS, GROUP, PROMPT_LENGTH, LENGTH = 16, 8, 8, 32
EPOCHS, CLIP = 2, 0.2
HEADS = PRETRAINING.head_count
IS_VOWEL = np.isin(np.arange(128), [ord(x) for x in "aeiouAEIOU"])
IS_LETTER = np.array([chr(i).isalpha() for i in range(128)])
FORMS = (
    Form("float32", "float32"),
    Form("plain bf16", "bfloat16"),
    Form("masters, bf16", "bfloat16", optax_mp.mixed_precision),
    Form("masters, f16, loss scale", "float16", scaled, optax_mp.value_and_grad),
)


def in_halves(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Return a product that is added in two halves, each rounded to the dtype."""
    half = x.shape[-1] // 2
    return x[..., :half] @ weights[:half] + x[..., half:] @ weights[half:]


def turned(x: jax.Array, place: jax.Array) -> jax.Array:
    """Rotate queries or keys of one place, as the trainer does those of all."""
    half = x.shape[-1] // 2
    angles = place * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (of(angles).astype(x.dtype) for of in (jnp.cos, jnp.sin))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def sampler_logits(
    params: Any, cache: Any, letters: jax.Array, place: jax.Array
) -> tuple[jax.Array, Any]:
    """Return the logits after one letter of each text, and the cache with it."""
    x, new_cache = params["characters"][letters], []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        joined = in_halves(rms_norm(x, layer["attention_norm"]), layer["attention_in"])
        query, key, value = jnp.moveaxis(joined.reshape(len(x), 3, HEADS, -1), 1, 0)
        keys = keys.at[:, place].set(turned(key, place))
        values = values.at[:, place].set(value)
        new_cache.append((keys, values))
        scores = jnp.einsum("bhd,bkhd->bhk", turned(query, place), keys)
        scores = scores.astype(jnp.float32) * query.shape[-1] ** -0.5
        is_past = jnp.arange(LENGTH) <= place
        shares = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf)).astype(x.dtype)
        mixed = jnp.einsum("bhk,bkhd->bhd", shares, values).reshape(x.shape)
        x += in_halves(mixed, layer["attention_out"])
        hidden = in_halves(rms_norm(x, layer["mlp_norm"]), layer["mlp_in"])
        x += in_halves(jax.nn.gelu(hidden), layer["mlp_out"])
    return in_halves(rms_norm(x, params["final_norm"]), params["logits"]), new_cache


def sample(params: Any, prompts: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
    """Continue prompts; return whole texts, and log-probabilities of all letters."""
    dtype = params["characters"].dtype
    size = params["characters"].shape[1] // HEADS
    empty = jnp.zeros((len(prompts), LENGTH, HEADS, size), dtype)
    cache = [(empty, empty) for _ in params["layers"]]

    def step(carry: Any, place: jax.Array) -> Any:
        letters, cache, key = carry
        logits, cache = sampler_logits(params, cache, letters, place)
        key, now = jax.random.split(key)
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        drawn = jax.random.categorical(now, logs).astype(jnp.int32)
        is_given = place + 1 < PROMPT_LENGTH
        given = prompts[:, jnp.minimum(place + 1, PROMPT_LENGTH - 1)]
        new = jnp.where(is_given, given, drawn)
        found = jnp.take_along_axis(logs, new[:, None], 1)[:, 0]
        return (new, cache, key), (new, found)

    first = prompts[:, 0], cache, key
    _, (letters, logs) = jax.lax.scan(step, first, jnp.arange(LENGTH - 1))
    texts = jnp.concatenate([prompts[:, :1], letters.T], axis=1)
    return texts, logs.T[:, PROMPT_LENGTH - 1 :]


def trainer_logs(params: Any, texts: jax.Array) -> jax.Array:
    """Return the trainer's log-probabilities of the letters after the prompts."""
    logits = trainer_logits(params, texts[:, :-1], HEADS).astype(jnp.float32)
    logs = jax.nn.log_softmax(logits)
    found = jnp.take_along_axis(logs, texts[:, 1:, None], -1)[..., 0]
    return found[:, PROMPT_LENGTH - 1 :]


def rewards_of(texts: jax.Array) -> jax.Array:
    """Return the share of letters after the prompt that alternate with their next."""
    vowel, letter = jnp.asarray(IS_VOWEL)[texts], jnp.asarray(IS_LETTER)[texts]
    pairs = letter[:, 1:] & letter[:, :-1] & (vowel[:, 1:] != vowel[:, :-1])
    return pairs[:, PROMPT_LENGTH - 1 :].mean(1)


def loss(params: Any, batch: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Return PPO's clipped loss of texts, their log-probabilities and their gains."""
    texts, old, gains = batch
    ratio = jnp.exp(trainer_logs(params, texts) - old)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    gains = gains[:, None]
    return -jnp.minimum(ratio * gains, clipped * gains).mean()


def program_of(form: Form, text: jax.Array) -> Any:
    """Return the optimizer of a form, and its training on one batch, in one jit."""
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
    tx, gradients = form.wrap(adam), form.value_and_grad(loss)

    @jax.jit
    def batch(params: Any, state: Any, key: jax.Array) -> Any:
        where, chance = jax.random.split(key)
        starts = jax.random.randint(where, (PROMPTS, 1), 0, text.size - PROMPT_LENGTH)
        prompts = text[starts + np.arange(PROMPT_LENGTH)].astype(jnp.int32)
        texts, old = sample(params, jnp.repeat(prompts, GROUP, 0), chance)
        rewards = rewards_of(texts)
        groups = rewards.reshape(PROMPTS, GROUP)
        gains = groups - groups.mean(1, keepdims=True)
        gains = (gains / (groups.std(1, keepdims=True) + 1e-3)).reshape(-1)
        apart = trainer_logs(params, texts) - old
        for _ in range(EPOCHS):
            _, grads = gradients(state, params, (texts, old, gains))
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        kl = jnp.mean(jnp.expm1(apart) - apart)
        return params, state, (jnp.abs(apart).mean(), kl, rewards.mean())

    return tx, batch


def train(form: Form, start: Any, steps: int, seeds: tuple[int, ...]) -> Any:
    """Return mismatch, divergence and reward of all batches, a list for each seed."""
    text = jnp.asarray(read_corpus(LENGTH)[0])
    tx, batch = program_of(form, text)
    found = []
    for seed in seeds:
        params = optax_mp.cast_floating(start, form.dtype)
        state, curve = jax.jit(tx.init)(params), []
        for number in range(steps):
            key = jax.random.fold_in(jax.random.key(seed), number)
            params, state, measured = batch(params, state, key)
            curve.append([float(x) for x in measured])
        found.append(curve)
        print(form.name, seed, np.mean(curve, 0), curve[-1], file=sys.stderr)
    return np.asarray(found)


def rows_of(curves: dict[str, np.ndarray]) -> list[record.Row]:
    """Return a row for each form."""
    rows = []
    ends = {name: x[:, -(x.shape[1] // 5) :, 2].mean(1) for name, x in curves.items()}
    for name, curve in curves.items():
        mismatch, kl, _ = curve.mean((0, 1))
        row = {"form": name, "mismatch": f"{mismatch:.1e}", "KL": f"{kl:.1e}"}
        by_seed = [f"{x:.1e}" for x in curve[..., 0].mean(1)]
        row |= {"mismatch by seed": by_seed, "return": f"{fmean(ends[name]):.3f}"}
        if name != "float32":
            row["return, above"] = interval(ends[name] - ends["float32"])
        rows.append(row | {"curve": curve[..., 2].mean(0).tolist()})
    return rows


def main() -> None:
    """Read the options and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    record.add_option(parser)
    args = parser.parse_args()
    start = pretrained(PRETRAINING)
    curves = {
        form.name: train(form, start, args.steps, tuple(args.seeds)) for form in FORMS
    }
    tables = {f"PPO on text, {args.steps} batches": rows_of(curves)}
    print(record.heading(jax.devices()))
    for title, rows in tables.items():
        print(f"\n### {title}\n\n{record.as_markdown(rows)}")
    record.finish(args.json, tables, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
