"""PPO on two control tasks, five seeds under `vmap`, in seven forms.

    python benchmarks control
    python benchmarks control --json FILE

Cart-pole and pendulum are written here in JAX, with the equations of Gymnasium's
CartPole-v1 and Pendulum-v1, and their rewards (for the pendulum, a tenth of them). The
policy and the value are nets of two layers of 128. A seed sets the first weights, the
environments and the order of batches, the same for all forms. The returns of a form are
compared with float32's, seed by seed, after 100 updates and after 300. Under `vmap` all
seeds round with the same random numbers.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from finetune import FULL, SPLIT8, interval, loss_scale, masters
from the_demo import Form

import optax_mp

UPDATES, SEEDS, SHOWN, TRAILING = 300, 5, (100, 300), 20
ENVIRONMENTS, LENGTH, EPOCHS, BATCHES, WIDTH, RATE = 32, 128, 4, 4, 128, 1e-3
LAMBDA, CLIP = 0.95, 0.2
FORMS = (
    Form("float32", "float32"),
    Form("plain bf16", "bfloat16"),
    Form("masters", "bfloat16", optax_mp.mixed_precision),
    Form("compact", "bfloat16", masters(SPLIT8, bits=8)),
    Form(
        "compact, no column scales",
        "bfloat16",
        masters(SPLIT8, bits=8, column_scales=False),
    ),
    Form(
        "masters, bf16 moments to nearest",
        "bfloat16",
        masters(FULL, dtype=jnp.bfloat16, seed=None),
    ),
    Form("f16, loss scale", "float16", loss_scale(), optax_mp.value_and_grad),
)


class Task(NamedTuple):
    """An environment.

    Attributes:
        outputs: how many numbers the policy gives.
        limit: of steps in an episode.
        discount: of rewards, a step later.
        start: from a key to a state.
        observe: from a state to what the nets see.
        step: from state and action to the next state, the reward, and the end.
        discrete: whether an action is one of `outputs`, or a number.
    """

    outputs: int
    limit: int
    discount: float
    start: Callable[[jax.Array], jax.Array]
    observe: Callable[[jax.Array], jax.Array]
    step: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    discrete: bool


def step_cart_pole(state: jax.Array, action: jax.Array) -> Any:
    """Push the cart by 10 newtons for 0.02 seconds."""
    x, speed, angle, turning = state
    force = jnp.where(action == 1, 10.0, -10.0)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    pushed = (force + 0.05 * turning**2 * sin) / 1.1
    turned = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    pushed -= 0.05 * turned * cos / 1.1
    change = jnp.stack([speed, pushed, turning, turned])
    state = state + 0.02 * change
    fallen = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 12 * np.pi / 180)
    return state, jnp.float32(1), fallen


def step_pendulum(state: jax.Array, action: jax.Array) -> Any:
    """Turn the pendulum by at most 2 newton metres for 0.05 seconds."""
    angle, turning = state
    torque = jnp.clip(action[0], -2, 2)
    upright = (angle + np.pi) % (2 * np.pi) - np.pi
    reward = -0.1 * (upright**2 + 0.1 * turning**2 + 0.001 * torque**2)
    turning = jnp.clip(turning + 0.05 * (15 * jnp.sin(angle) + 3 * torque), -8, 8)
    return jnp.stack([angle + 0.05 * turning, turning]), reward, jnp.bool_(False)


TASKS = {
    "cart-pole": Task(
        2,
        500,
        0.99,
        lambda key: jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05),
        lambda state: state,
        step_cart_pole,
        discrete=True,
    ),
    "pendulum": Task(
        1,
        200,
        0.95,
        lambda key: jax.random.uniform(key, (2,), minval=-1) * np.array([np.pi, 1]),
        lambda s: jnp.stack([jnp.cos(s[0]), jnp.sin(s[0]), s[1] / 8]),
        step_pendulum,
        discrete=False,
    ),
}


def init_net(key: jax.Array, inputs: int, outputs: int, last: float) -> list[Any]:
    """Return a net of two hidden layers."""
    sizes = (inputs, WIDTH, WIDTH, outputs)
    initial = jax.nn.initializers.orthogonal
    return [
        {
            "weight": initial(last if i == 2 else 2**0.5)(k, sizes[i : i + 2]),
            "bias": jnp.zeros(sizes[i + 1]),
        }
        for i, k in enumerate(jax.random.split(key, 3))
    ]


def apply_net(layers: list[Any], x: jax.Array) -> jax.Array:
    """Return a net's outputs in float32; it computes in the dtype of its weights."""
    *hidden, last = layers
    x = x.astype(last["weight"].dtype)
    for layer in hidden:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    return (x @ last["weight"] + last["bias"]).astype(jnp.float32)


@dataclass(frozen=True)
class Agent:
    """The policy of a task."""

    task: Task

    def init(self, key: jax.Array) -> Any:
        """Return float32 params."""
        inputs = self.task.observe(self.task.start(key)).size
        return {
            "policy": init_net(key, inputs, self.task.outputs, 0.01),
            "value": init_net(jax.random.fold_in(key, 1), inputs, 1, 1.0),
            "log_std": jnp.zeros(self.task.outputs),
        }

    def draw(self, params: Any, seen: jax.Array, key: jax.Array) -> jax.Array:
        """Return actions."""
        means = apply_net(params["policy"], seen)
        if self.task.discrete:
            return jax.random.categorical(key, means)
        std = jnp.exp(params["log_std"].astype(jnp.float32))
        return means + std * jax.random.normal(key, means.shape)

    def log_prob(self, params: Any, seen: jax.Array, action: jax.Array) -> Any:
        """Return the logarithms of the actions' probabilities."""
        means = apply_net(params["policy"], seen)
        if self.task.discrete:
            logs = jax.nn.log_softmax(means)
            return jnp.take_along_axis(logs, action[..., None], -1)[..., 0]
        log_std = params["log_std"].astype(jnp.float32)
        scaled = (action - means) * jnp.exp(-log_std)
        logs = -0.5 * scaled**2 - log_std - 0.5 * np.log(2 * np.pi)
        return logs.sum(-1)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """Return PPO's loss of a batch."""
        seen, action, old, advantage, target = batch
        now = self.log_prob(params, seen, action)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(now - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
        value = apply_net(params["value"], seen)[..., 0]
        return -gain + 0.5 * jnp.mean((value - target) ** 2)


def roll_out(agent: Agent, params: Any, worlds: Any, key: jax.Array) -> Any:
    """Play; return the worlds, what was seen and done, and the returns of episodes."""
    task = agent.task

    def play(worlds: Any, key: jax.Array) -> Any:
        state, age, total, last = worlds
        act, begin = jax.random.split(key)
        seen = jax.vmap(task.observe)(state)
        action = agent.draw(params, seen, act)
        old = agent.log_prob(params, seen, action)
        state, reward, end = jax.vmap(task.step)(state, action)
        age, total = age + 1, total + reward
        # An episode that is cut is not over: its last state still has a value.
        cut = (age >= task.limit) & ~end
        after = apply_net(params["value"], jax.vmap(task.observe)(state))[..., 0]
        reward = reward + task.discount * jnp.where(cut, after, 0.0)
        over = end | cut
        fresh = jax.vmap(task.start)(jax.random.split(begin, ENVIRONMENTS))
        last = jnp.where(over, total, last)
        state = jnp.where(over[:, None], fresh, state)
        worlds = state, jnp.where(over, 0, age), jnp.where(over, 0.0, total), last
        value = apply_net(params["value"], seen)[..., 0]
        return worlds, (seen, action, old, reward, over, value)

    worlds, played = jax.lax.scan(play, worlds, jax.random.split(key, LENGTH))
    seen, action, old, reward, over, value = played
    final = apply_net(params["value"], jax.vmap(task.observe)(worlds[0]))[..., 0]

    def back(carry: Any, row: Any) -> Any:
        following, advantage = carry
        reward, over, value = row
        kept = task.discount * (1.0 - over)
        advantage = reward + kept * following - value + kept * LAMBDA * advantage
        return (value, advantage), advantage

    start = final, jnp.zeros_like(final)
    _, advantage = jax.lax.scan(back, start, (reward, over, value), reverse=True)
    batch = seen, action, old, advantage, advantage + value
    flat = [x.reshape(ENVIRONMENTS * LENGTH, *x.shape[2:]) for x in batch]
    return worlds, flat, worlds[3].mean()


def returns_of(task: Task, form: Form, updates: int, seeds: int) -> np.ndarray:
    """Train from each seed; return the mean return at each update, a row a seed."""
    agent = Agent(task)
    steps = updates * EPOCHS * BATCHES
    adam = optax.adam(optax.linear_schedule(RATE, RATE / 100, steps), eps=1e-5)
    tx = form.wrap(optax.chain(optax.clip_by_global_norm(0.5), adam))
    gradients = form.value_and_grad(agent.loss)

    def learn(carry: Any, batch: Any) -> Any:
        params, state = carry
        _, grads = gradients(state, params, batch)
        changes, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, changes), state), None

    def update(carry: Any, key: jax.Array) -> Any:
        learned, worlds = carry
        play, *orders = jax.random.split(key, 1 + EPOCHS)
        worlds, played, mean = roll_out(agent, learned[0], worlds, play)
        for order in orders:
            shuffled = jax.random.permutation(order, ENVIRONMENTS * LENGTH)
            batches = [x[shuffled].reshape(BATCHES, -1, *x.shape[1:]) for x in played]
            learned, _ = jax.lax.scan(learn, learned, batches)
        return (learned, worlds), mean

    def run(seed: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        params = optax_mp.cast_floating(agent.init(key), form.dtype)
        keys = jax.random.split(jax.random.fold_in(key, 2), ENVIRONMENTS)
        none = jnp.zeros(ENVIRONMENTS)
        worlds = jax.vmap(task.start)(keys), none.astype(int), none, none
        carry = (params, tx.init(params)), worlds
        keys = jax.random.split(jax.random.fold_in(key, 3), updates)
        return jax.lax.scan(update, carry, keys)[1]

    return np.asarray(jax.jit(jax.vmap(run))(jnp.arange(seeds)))


def lines_of(found: dict[str, np.ndarray]) -> list[record.Row]:
    """Return a row for each form, beside float32."""
    float32, lines = found["float32"], []
    for name, returns in found.items():
        line: record.Row = {"form": name}
        for shown in SHOWN:
            last = slice(max(0, shown - TRAILING), shown)
            mean, its = returns[:, last].mean(-1), float32[:, last].mean(-1)
            line[f"return at {shown}"] = interval(mean, 2)
            if name != "float32":
                line[f"to float32 at {shown}"] = interval(mean - its, 2)
        curve = returns.reshape(len(returns), -1, 5).mean(-1).tolist()
        lines.append(line | {"curve": curve})
    return lines


def main() -> None:
    """Train in all forms on all tasks, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    record.add_option(parser)
    args = parser.parse_args()
    print(record.heading(jax.devices()))
    tables: record.Tables = {}
    for title in args.tasks:
        found = {}
        for form in FORMS:
            began = time.perf_counter()
            found[form.name] = returns_of(TASKS[title], form, args.updates, args.seeds)
            took = time.perf_counter() - began
            print(f"{title}: {form.name}, {took:.0f} s", file=sys.stderr)
            tables[title] = lines_of(found)
            record.finish(args.json, tables, record.machine_of(jax.devices()))
        print(f"\n### {title}\n\n{record.as_markdown(tables[title])}", flush=True)


if __name__ == "__main__":
    main()
