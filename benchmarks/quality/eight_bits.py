"""8-bit products against amp in bfloat16: what they cost, keep and lose.

    python benchmarks eight_bits                     # all but the compiled programs
    python benchmarks eight_bits --only compiled     # wants compilers, as below
    python benchmarks eight_bits --only training --steps-factor 0.1
    python benchmarks eight_bits --json FILE

Parts: training (final held-out losses over seeds), depth (errors of gradients by
layer), and compiled (bytes and products of a training step for an H100 and a TPU v6e
that are not there), which needs the packages that `accelerators` names.

On a CPU 8-bit products are emulated, so nothing is timed. The models that are trained
here are small, so products of any shape run in 8 bits in these, also in attention;
`amp` itself leaves small and odd ones in 16. That is harder than what users run.
"""

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import accelerators  # first: it sets what the compilers want to know
import amp as transformer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import record
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from the_demo import (
    Settings,
    attention,
    drawer,
    init_params,
    make_adamw,
    read_corpus,
    rms_norm,
)

import optax_mp

DEFAULTS = Settings()
F8, BF16 = "float8_e4m3fn", "bfloat16"
ENDS = optax_mp.default_amp_rules | {"first": "not_f8", "last": "not_f8"}
FORMS: dict[str, dict[str, Any]] = {
    "amp, bf16": {"compute_dtype": BF16},
    "amp, f8": {"compute_dtype": F8},
    "amp, f8, first and last layer in bf16": {"compute_dtype": F8, "rules": ENDS},
}
# nanoGPT's command for CPUs: https://github.com/karpathy/nanoGPT, README.
NANOGPT = replace(
    DEFAULTS, steps=2000, width=128, layer_count=4, batch_size=12,
    peak_learning_rate=1e-3, final_learning_rate=1e-4,
)  # fmt: skip
DEMO = replace(DEFAULTS, steps=1200)
SEEDS = 3
DEPTH = 12
STEP = transformer.Size(8, 1024, 768, 12, 4096, 1)
# For TPUs jaxlib 0.10.2 cannot write the program of that one as text.
SMALL_STEP = transformer.Size(4, 512, 512, 8, 2048, 1)


@contextlib.contextmanager
def any_shape() -> Iterator[None]:
    """Let products of any shape run in 8 bits."""
    module = "optax_mp.autocast._eight_bits"
    with mock.patch(f"{module}.SMALLEST", 1), mock.patch(f"{module}.MULTIPLE", 1):
        yield


def scoped_loss(settings: Settings, params: Any, windows: jax.Array) -> jax.Array:
    """Return the loss of the demo's transformer, with a scope for each layer."""
    windows = windows.astype(jnp.int32)
    x = params["characters"][windows[:, :-1]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope("first" if i == 0 else "layer"):
            normed = rms_norm(x, layer["attention_norm"])
            x += attention(normed, layer, settings.head_count)
            hidden = jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ layer["mlp_in"])
            x += hidden @ layer["mlp_out"]
    with jax.named_scope("last"):
        logits = rms_norm(x, params["final_norm"]) @ params["logits"]
    return optax.softmax_cross_entropy_with_integer_labels(
        logits, windows[:, 1:]
    ).mean()


def text_task(settings: Settings) -> tuple[Any, Any, Any, Any]:
    """Return init, draw, loss and held-out windows of the demo's text."""
    text, held_out = map(jnp.asarray, read_corpus(settings.context))
    init = functools.partial(init_params, settings=settings)
    loss = functools.partial(scoped_loss, settings)
    return init, drawer(text, settings), loss, held_out


def digits_task() -> tuple[Any, Any, Any, Any]:
    """Return the same of a conv net on digits, of which one product is in 8 bits."""
    import convergence  # needs scikit-learn

    task = convergence.digits()

    def loss(params: Any, batch: Any) -> jax.Array:
        with jax.named_scope("first"), jax.named_scope("last"):
            return task.loss(params, batch)

    return task.init, task.draw, loss, task.held_out


TASKS: dict[str, tuple[Callable[[], Any], Settings]] = {
    "the demo's transformer": (lambda: text_task(DEMO), DEMO),
    "the same at nanoGPT's sizes for CPUs": (lambda: text_task(NANOGPT), NANOGPT),
    "conv net on digits": (digits_task, replace(DEFAULTS, steps=500)),
}


def final_losses(task: Any, settings: Settings, form: dict[str, Any]) -> list[float]:
    """Train once for each seed; return the held-out losses, computed in float32."""
    init, draw, loss, held_out = task
    tx, under_amp = make_adamw(settings), optax_mp.amp(loss, **form)

    @jax.jit
    def run(seed: jax.Array) -> jax.Array:
        first, batches = jax.random.split(jax.random.key(seed))
        params = init(first)

        def step(carry: Any, number: jax.Array) -> tuple[Any, None]:
            params, state = carry
            batch = draw(jax.random.fold_in(batches, number))
            grads = jax.grad(under_amp)(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        numbers = jnp.arange(settings.steps)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), numbers)
        return loss(params, held_out)

    return [float(run(seed)) for seed in range(SEEDS)]


def measure_training(steps_factor: float) -> list[record.Row]:
    """Return the mean final losses of every task and form."""
    rows = []
    for title, (make, settings) in TASKS.items():
        task = make()
        settings = replace(settings, steps=max(1, int(settings.steps * steps_factor)))
        base = None
        for name, form in FORMS.items():
            if "first" in name and title.startswith("conv"):
                continue  # its one product is the last layer
            with any_shape():
                losses = final_losses(task, settings, form)
            mean = float(np.mean(losses))
            base = mean if base is None else base
            rows.append(
                {
                    "model, form": f"{title}: {name}",
                    "steps": settings.steps,
                    "held-out loss": mean,
                    "of each seed": losses,
                    "to bf16": mean / base,
                }
            )
            print(rows[-1], flush=True)
    return rows


def measure_depth() -> list[record.Row]:
    """Return the error of the gradient of each layer, at random weights."""
    settings = replace(NANOGPT, layer_count=DEPTH)
    init, draw, loss, _ = text_task(settings)
    params, batch = init(jax.random.key(0)), draw(jax.random.key(1))
    truth = jax.jit(jax.grad(loss))(params, batch)

    def errors(form: dict[str, Any]) -> list[float]:
        with any_shape():
            fun = jax.grad(optax_mp.amp(loss, **form))
            found = transformer.exactly(fun, params, batch)
        pairs = zip(found["layers"], truth["layers"], strict=True)
        return [transformer.relative_error(*pair) for pair in pairs]

    columns = {name: errors(form) for name, form in FORMS.items()}
    return [
        {"layer": i, **{name: column[i] for name, column in columns.items()}}
        for i in range(DEPTH)
    ]


def device_of(target: str) -> Any:
    """Return a device that XLA can compile for."""
    if target == "gpu":
        return accelerators.devices_of("gpu")[0]
    return topologies.get_topology_desc("v6e:2x2", "tpu").devices[0]


def compile_for(target: str, fun: Callable[..., Any], *args: Any) -> Any:
    """Return a function of arrays of these shapes, compiled for a device."""
    mesh = Mesh(np.array([device_of(target)]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    return jax.jit(fun).lower(*placed).compile()


def eight_bit_products(text: str) -> int:
    """Return how many products in the text of a program have 8-bit operands."""
    count = 0
    for computation in text.split("\n\n"):
        shapes = dict(re.findall(r"%([\w.\-]+) = \(?(\w+)\[", computation))
        names = re.findall(
            r" (?:dot|convolution)\(%([\w.\-]+), %([\w.\-]+)", computation
        )
        count += sum(
            all(shapes.get(name, "").startswith("f8") for name in pair)
            for pair in names
        )
    return count


def written_products(fun: Callable[..., Any], *args: Any) -> int:
    """Return how many products of a function have 8-bit operands as JAX traces it."""
    report = optax_mp.precision_report(fun, *args)
    return sum(each.dtype.startswith("float8") for each in report.products)


def step_of_mlp(dtype: str) -> tuple[Any, Any]:
    """Return the gradient of two large layers, and its arguments."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.gelu(x @ params["up"]) @ params["down"])

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"up": shape((2048, 8192)), "down": shape((8192, 2048))}
    fun = optax_mp.amp(loss, compute_dtype=dtype)
    return jax.value_and_grad(fun, (0, 1)), (params, shape((8192, 2048)))


def step_of_transformer(dtype: str, size: transformer.Size = STEP) -> tuple[Any, Any]:
    """Return the gradient of a transformer of one block, and its arguments."""
    loss = functools.partial(transformer.loss, size=size)
    params = jax.eval_shape(functools.partial(transformer.init, size))
    tokens = jax.ShapeDtypeStruct((size.batch, size.length), jnp.int32)
    fun = optax_mp.amp(loss, compute_dtype=dtype)
    return jax.value_and_grad(fun), (params, tokens)


def bytes_of(compiled: Any) -> float:
    """Return the bytes that a program without kernels moves."""
    costs = compiled.cost_analysis()
    return costs["bytes accessed"] if costs else accelerators.bytes_moved(compiled)


def measure_compiled() -> list[record.Row]:
    """Return bytes, temporaries and 8-bit products of compiled steps."""
    rows: list[record.Row] = []
    on_gpu = {"two layers": step_of_mlp, "transformer": step_of_transformer}
    small = functools.partial(step_of_transformer, size=SMALL_STEP)
    on_tpu = {"two layers": step_of_mlp, "small transformer": small}
    for target, device, steps in (("gpu", "H100", on_gpu), ("tpu", "TPU v6e", on_tpu)):
        for name, make in steps.items():
            for form, dtype in (("amp, bf16", BF16), ("amp, f8", F8)):
                fun, args = make(dtype)
                compiled = compile_for(target, fun, *args)
                moved = bytes_of(compiled)
                first = moved if dtype == BF16 else rows[-1]["moved GB"] * 1e9
                found = eight_bit_products(compiled.as_text())
                temporaries = compiled.memory_analysis().temp_size_in_bytes
                rows.append(
                    {
                        "step": f"{device}, {name}: {form}",
                        "moved GB": moved / 1e9,
                        "to bf16": moved / first,
                        "temporaries MiB": temporaries / 2**20,
                        "8-bit products traced": written_products(fun, *args),
                        "compiled": found,
                    }
                )
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Read the options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ("training", "depth", "compiled")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--steps-factor", type=float, default=1.0)
    record.add_option(parser)
    args = parser.parse_args()
    measured: dict[str, tuple[str, Callable[[], list[record.Row]]]] = {
        "training": (
            f"final held-out losses, {SEEDS} seeds, products of any shape in 8 bits",
            lambda: measure_training(args.steps_factor),
        ),
        "depth": (
            "error of the gradient of each layer, by norm, at random weights",
            measure_depth,
        ),
        "compiled": ("training steps compiled for hardware not here", measure_compiled),
    }
    wanted = (args.only,) if args.only else ("training", "depth")
    chosen = [part for part in measured if part.startswith(wanted)]
    tables: record.Tables = {}
    for part in chosen:
        title, measure = measured[part]
        rows = tables[title] = measure()
        print(f"\n### {title}\n\n{record.as_markdown(rows)}", flush=True)
    is_compiled = args.only == "compiled"
    machine = record.machine_of(jax.devices("cpu")[:1])
    record.finish(
        args.json, tables, "no machine: compiled, not run" if is_compiled else machine
    )


if __name__ == "__main__":
    main()
