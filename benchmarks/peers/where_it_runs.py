"""Write the table of docs/guide/where_it_runs.md: trainers of others, in three forms.

    python benchmarks where_it_runs [TRAINER ...]

Each trainer comes from its package, with the lines changed that the page names. It runs
in float32, with masters, and compact, each in a process of its own, half of the way, is
saved, restored, and goes on; and the whole way at once. Packages that are not installed
are skipped, and their rows stay. Takes half an hour on two cores.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "where_it_runs.md"
START, END = "<!-- where_it_runs.py writes from here -->", "<!-- to here -->"
FORMS = ("float32", "masters", "compact")


class Form(NamedTuple):
    """What a user adds: a wrapper of the optimizer, and a cast of the params."""

    wrap: Callable[[Any], Any]
    cast: Callable[[Any], Any]


class Outcome(NamedTuple):
    """The loss (or reward) at the end, and what a resumed run has at the end."""

    value: Any
    resumed: str


def form_of(name: str) -> Form:
    """Return a form; in float32, nothing changes."""
    import jax.numpy as jnp

    import optax_mp

    if name == "float32":
        return Form(lambda tx: tx, lambda params: params)
    policy = optax_mp.get_policy("p=bf16")
    common: dict[str, Any] = {"param_dtype": policy, "update_dtype": jnp.float32}

    def compact(tx: Any) -> Any:
        storage = optax_mp.Split(bits=8)
        return optax_mp.mixed_precision(
            optax_mp.low_bit_state(tx), storage=storage, **common
        )

    masters = lambda tx: optax_mp.mixed_precision(tx, **common)  # noqa: E731
    return Form(masters if name == "masters" else compact, policy.cast_to_param)


def change(module: str, form: Form, *edits: tuple[str, str]) -> None:
    """Edit the text of a module when it is imported; it may call `wrap` and `cast`."""

    class Loader(SourceFileLoader):
        def exec_module(self, module: Any) -> None:
            text = Path(self.path).read_text()
            for old, new in edits:
                assert text.count(old) == 1, f"{self.path}: {text.count(old)} {old!r}"
                text = text.replace(old, new)
            vars(module).update(wrap=form.wrap, cast=form.cast)
            exec(compile(text, self.path, "exec"), vars(module))

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if name != module:
                return None
            spec: Any = PathFinder.find_spec(name, path)
            spec.loader = Loader(name, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder())


def by_state(start: Any, run: Callable[[Any], tuple[Any, Any]]) -> Outcome:
    """Run twice; and once more from a saved state for the second time."""
    import jax
    import numpy as np

    half, _ = run(start)
    leaves, treedef = jax.tree.flatten(half)
    saved = pickle.dumps([np.asarray(x) for x in leaves])
    end, value = run(half)
    loaded = [jax.numpy.asarray(x) for x in pickle.loads(saved)]
    again, _ = run(treedef.unflatten(loaded))
    return Outcome(float(value), compare(again, end))


def compare(some: Any, others: Any) -> str:
    """Say whether two trees of arrays are equal, bit for bit."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True)
    equal = all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
    return "equal" if equal else "**differs**"


def rejax_ppo(form: Form) -> Outcome:
    """PPO on CartPole; the reward."""
    import jax

    change(
        "rejax.algos.ppo",
        form,
        ("tx = optax.chain(", "tx = (lambda *links: wrap(optax.chain(*links)))("),
        (
            '        return {"actor_ts": actor_ts,',
            "        actor_ts = actor_ts.replace(params=cast(actor_ts.params))\n"
            "        critic_ts = critic_ts.replace(params=cast(critic_ts.params))\n"
            '        return {"actor_ts": actor_ts,',
        ),
    )
    from rejax.algos.ppo import PPO

    algo = PPO.create(
        env="CartPole-v1", total_timesteps=32_768, eval_freq=32_768, num_envs=16,
        num_steps=64, num_epochs=4, num_minibatches=4, learning_rate=1e-3,
        skip_initial_evaluation=True,
    )  # fmt: skip

    @jax.jit
    def train(state: Any) -> Any:
        state, (_, rewards) = algo.train(train_state=state)
        return state, rewards.mean()

    return by_state(algo.init_state(jax.random.PRNGKey(0)), train)


def numpyro_svi(form: Form) -> Outcome:
    """A regression with 128 x 128 weights; minus the ELBO, per observation."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import optax
    from numpyro import distributions as dist
    from numpyro.infer import SVI, Trace_ELBO, autoguide

    x = jax.random.normal(jax.random.PRNGKey(1), (256, 128))
    y = jnp.tanh(x @ jax.random.normal(jax.random.PRNGKey(2), (128, 128)) / 8)

    def model(x: Any, y: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([128, 128]).to_event(2))
        mean = jnp.tanh(x @ w / 8)
        numpyro.sample("y", dist.Normal(mean, 0.1).to_event(2), obs=y)

    guide = autoguide.AutoNormal(model)
    svi = SVI(model, guide, form.wrap(optax.adam(3e-3)), Trace_ELBO())
    state = svi.init(jax.random.PRNGKey(0), x, y)
    count, (params, opt_state) = state.optim_state
    state = state._replace(optim_state=(count, (form.cast(params), opt_state)))

    def train(state: Any) -> Any:
        result = svi.run(None, 1000, x, y, init_state=state, progress_bar=False)
        return result.state, result.losses[-50:].mean() / y.size

    return by_state(state, train)


def brax_env() -> Any:
    """Return an environment of brax: a point that is to be pushed to the origin."""
    import jax
    import jax.numpy as jnp
    from brax.envs import base

    def replicate(tree: Any, devices: Any) -> Any:
        return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)

    # brax 0.14 calls what JAX 0.10 does not have any more.
    jax.device_put_replicated = replicate  # pyright: ignore[reportAttributeAccessIssue]

    class Point(base.Env):
        observation_size, action_size, backend = 4, 2, "none"

        def reset(self, rng: Any) -> Any:
            obs = jax.random.uniform(rng, (4,), minval=-1)
            return base.State(None, obs, jnp.zeros(()), jnp.zeros(()))

        def step(self, state: Any, action: Any) -> Any:
            place, speed = state.obs[:2], 0.9 * state.obs[2:] + 0.1 * action
            obs = jnp.concatenate([place + 0.1 * speed, speed])
            return state.replace(obs=obs, reward=1 - jnp.sum(jnp.square(obs)))

    return Point()


def brax_ppo(form: Form) -> Outcome:
    """PPO on a point mass; the reward."""
    change(
        "brax.training.agents.ppo.train",
        form,
        ("= optax.adam(learning_rate=learning_rate)\n  lr",
         "= wrap(optax.adam(learning_rate=learning_rate))\n  lr"),
        ("optimizer.update(grads, optimizer_state)",
         "optimizer.update(grads, optimizer_state, params)"),
        ("      params=init_params,", "      params=cast(init_params),"),
    )  # fmt: skip
    from brax.training.agents.ppo.train import train

    def run(steps: int, **kwargs: Any) -> Any:
        _, params, metrics = train(
            brax_env(), steps, num_envs=64, episode_length=100, batch_size=64,
            unroll_length=10, num_minibatches=8, num_evals=2, learning_rate=1e-3,
            reward_scaling=0.1, **kwargs,
        )  # fmt: skip
        return params, metrics["eval/episode_reward"]

    params, value = run(60_000)
    _, resumed = run(60_000, restore_params=params)
    return Outcome(float(value), f"params alone: {resumed:.1f}")


def labelled() -> tuple[Any, Any]:
    """Return rows of 64 numbers, and which of 10 directions each is nearest to."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((2048, 64), np.float32)
    return x, (x @ rng.standard_normal((64, 10))).argmax(-1).astype(np.int32)


def tunix(form: Form) -> Outcome:
    """A classifier of NNX; the loss."""
    import jax
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx
    from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig

    x, y = labelled()
    batches = [{"x": x[i::16], "y": y[i::16]} for i in range(16)]

    def loss(model: Any, x: Any, y: Any) -> Any:
        logits = model(x).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def train(folder: str, steps: int) -> Any:
        layers = [(64, 256), (256, 256), (256, 10)]
        rngs = nnx.Rngs(0)
        first, second, third = (nnx.Linear(*sizes, rngs=rngs) for sizes in layers)
        model = nnx.Sequential(first, nnx.relu, second, nnx.relu, third)
        options = ocp.CheckpointManagerOptions(save_interval_steps=100)
        config = TrainingConfig(
            eval_every_n_steps=1000, max_steps=steps, checkpoint_root_directory=folder,
            checkpointing_options=options, pbar_description=None,
        )  # fmt: skip
        trainer = PeftTrainer(model, form.wrap(optax.adam(1e-3)), config)
        nnx.update(model, form.cast(nnx.state(model, nnx.Param)))
        trainer.with_loss_fn(loss).train(batches * (steps // 16 + 1))
        state = nnx.state((model, trainer.optimizer))
        return jax.device_get(jax.tree.leaves(state)), loss(model, x, y)

    with tempfile.TemporaryDirectory() as once, tempfile.TemporaryDirectory() as halves:
        state, value = train(once, 400)
        train(halves, 200)
        again, _ = train(halves, 400)
    return Outcome(float(value), compare(again, state))


def fit(
    form: Form, params: Any, tx: Any, logits: Any, gradient: Any, steps: int
) -> Outcome:
    """Run the loop of a guide: `logits(params, x)` are fitted to labels; the loss."""
    import jax
    import jax.numpy as jnp
    import optax

    x, y = map(jnp.asarray, labelled())

    def loss(params: Any, x: Any, y: Any) -> Any:
        found = logits(params, x).astype("float32")
        return optax.softmax_cross_entropy_with_integer_labels(found, y).mean()

    def step(carry: Any, i: Any) -> Any:
        params, opt_state = carry
        rows = (jnp.arange(128) + 128 * i) % len(x)
        grads = gradient(loss)(params, x[rows], y[rows])
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    @jax.jit
    def train(carry: Any) -> Any:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(steps))
        return carry, loss(carry[0], x, y)

    return by_state((form.cast(params), tx.init(params)), train)


def keras(form: Form) -> Outcome:
    """A classifier of Keras."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax
    import keras as keras_3
    import optax

    keras_3.utils.set_random_seed(0)
    dense = keras_3.layers.Dense
    layers = [dense(256, "relu"), dense(256, "relu"), dense(10)]
    model = keras_3.Sequential([keras_3.Input((64,)), *layers])
    params = [variable.value for variable in model.trainable_variables]
    logits = lambda params, x: model.stateless_call(params, [], x)[0]  # noqa: E731
    return fit(form, params, form.wrap(optax.adam(1e-3)), logits, jax.grad, 200)


class Trainer(NamedTuple):
    """A row of the table: the package, what runs, and what the numbers are."""

    package: str
    run: Callable[[Form], Outcome]
    title: str


TRAINERS = {
    "brax_ppo": Trainer("brax", brax_ppo, "brax, PPO; reward"),
    "rejax": Trainer("rejax", rejax_ppo, "rejax, PPO; reward"),
    "numpyro": Trainer("numpyro", numpyro_svi, "numpyro, SVI; -ELBO"),
    "tunix": Trainer("google-tunix", tunix, "Tunix, `PeftTrainer`; loss"),
    "keras": Trainer("keras", keras, "Keras 3, its guide's loop for JAX; loss"),
}


def row_of(name: str) -> str | None:
    """Return the row of a trainer, or None if its package is not installed."""
    package, _, title = TRAINERS[name]
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        print(f"{name}: skipped, because {package} is not installed.", file=sys.stderr)
        return None
    outcomes = []
    for form in FORMS:
        command = [sys.executable, __file__, name, "--form", form]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        outcomes.append(Outcome(*lines[-2:]) if len(lines) > 1 else None)
        if not outcomes[-1]:
            print(done.stderr[-2000:], file=sys.stderr)
        print(name, form, outcomes[-1], file=sys.stderr)
    cells = [f"{x.value}; {x.resumed}" if x else "**fails**" for x in outcomes]
    return f"| {title} ({version}) | {' | '.join(cells)} |"


def main(names: Sequence[str]) -> None:
    """Run trainers, and write their rows into the page."""
    new = filter(None, map(row_of, names or TRAINERS))
    rows = {row.split(" (")[0]: row for row in new}
    before, _, rest = PAGE.read_text().partition(START)
    table, _, after = rest.partition(END)
    old = {row.split(" (")[0]: row for row in table.splitlines() if " (" in row}
    head = ["| trainer | " + " | ".join(FORMS) + " |", "|---" * (len(FORMS) + 1) + "|"]
    versions = ", ".join(f"{x} {metadata.version(x)}" for x in ("jax", "optax"))
    lines = [
        *head,
        *(old | rows).values(),
        "",
        f"{versions}, CPU, {time.strftime('%Y-%m-%d')}",
    ]
    PAGE.write_text("\n".join([before + START, "", *lines, "", END + after]))


if __name__ == "__main__":
    if "--form" in sys.argv:
        outcome = TRAINERS[sys.argv[1]].run(form_of(sys.argv[3]))
        print(f"{outcome.value:.4g}", outcome.resumed, sep="\n")
    else:
        main(sys.argv[1:])
