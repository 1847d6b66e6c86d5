"""One of two processes that train together; a script, given its rank and a port.

Prints a line of JSON for each part, which the parent compares with the other's.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_mp

STEPS, BAD_STEPS, BATCH, WIDTH = 20, (5, 11), 16, 32


def initial_params(seed=0):
    w = jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH), jnp.float16)
    return {"w": w * 0.1, "b": jnp.zeros(WIDTH, jnp.float16)}


def loss(params, x):
    out = jnp.tanh(x @ params["w"]) + params["b"]
    return jnp.mean((out - x[:, ::-1]).astype(jnp.float32) ** 2)


def transformation(axis_name=None):
    inner = optax_mp.mixed_precision(optax.adamw(1e-2))
    return optax_mp.dynamic_loss_scale(
        inner, init_scale=2.0**10, growth_interval=6, axis_name=axis_name
    )


def batches(rank):
    """Yield this rank's part of each batch; bad batches are bad on rank 1 only."""
    numbers = np.random.default_rng(rank)
    for i in range(STEPS):
        part = numbers.normal(size=(BATCH // 2, WIDTH)).astype(np.float16)
        if rank == 1 and i in BAD_STEPS:
            part[0, 0] = np.inf
        yield part


def everywhere(mesh, spec, own):
    return jax.make_array_from_process_local_data(
        NamedSharding(mesh, spec), np.asarray(own)
    )


def trained(rank, mesh, step, params, state):
    """Return (params, state, scale at each step, whether each step was skipped)."""
    scales, held = [], []
    for part in batches(rank):
        before = own_bytes((params, state.inner_state))
        params, state = step(params, state, everywhere(mesh, P("data"), part))
        scales.append(float(state.scale))
        held.append(own_bytes((params, state.inner_state)) == before)
    return params, state, scales, held


def own_bytes(tree):
    return [
        np.asarray(shard.data).tobytes()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def report(part, **facts):
    print(json.dumps({"part": part} | facts), flush=True)


def replicated_params_under_jit(rank, mesh):
    for name, wrap in (
        ("jit", lambda tx: tx),
        ("zero1", lambda tx: optax_mp.zero1(tx, mesh, "data")),
    ):
        tx = wrap(transformation())

        @jax.jit
        def step(params, state, x, tx=tx):
            _, grads = optax_mp.value_and_grad(loss)(state, params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = jax.tree.map(lambda p: everywhere(mesh, P(), p), initial_params())
        params, state, scales, held = trained(
            rank, mesh, step, params, jax.jit(tx.init)(params)
        )
        report(
            name,
            scales=scales,
            held=held,
            skipped=int(state.total_skipped_count),
            nonfinite_index=int(state.nonfinite_index),
            params=[data.hex() for data in own_bytes(params)],
            state_bytes=sum(map(len, own_bytes(state))),
            finite=bool(optax_mp.all_finite(params)),
        )


def main(rank, port):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=2, process_id=rank, local_device_ids=[0]
    )
    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert jax.process_count() == len(jax.devices()) == 2
    replicated_params_under_jit(rank, mesh)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
