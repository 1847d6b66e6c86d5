"""amp over models of many libraries: what runs in 16 bits, and at which error.

    python benchmarks libraries                # the table, Markdown
    python benchmarks libraries --only haiku   # libraries whose name contains this
    python benchmarks libraries --json FILE    # also the table as data

Each model is a small one with random weights and inputs, and its loss is run as it is
written, under `optax_mp.amp`. A share is one of the FLOPs of matrix products and
convolutions with 16-bit results, in a loss alone and with its gradient; the body of a
while loop counts once, and products that a solver asks for in full precision count as
float32. Errors are relative, of the gradient by norm, against float32, compiled
without XLA's excess precision. In float16 the loss is scaled. A library that is not
installed is left out, with a note.
"""

import argparse
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import record
from amp import exactly, relative_error
from library_models import MODELS, Model, Problem

import optax_mp

HALVES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
# A loss scale that overflows is made smaller, as `dynamic_loss_scale` does.
LOSS_SCALES = {"bf16": (1.0,), "f16": (1024.0, 32.0, 1.0)}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot")


def products(jaxpr: Any, runs: int = 1) -> Iterator[tuple[str, float]]:
    """Yield the dtype and the FLOPs of each product, also in inner jaxprs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in PRODUCTS:
            yield equation.outvars[0].aval.dtype.name, runs * flops(equation)
        repeats = equation.params.get("length", 1)  # of a scan
        for param in equation.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(inner, "jaxpr", inner)  # closed or open
                if hasattr(inner, "eqns"):
                    yield from products(inner, runs * repeats)


def flops(equation: Any) -> float:
    """Return the FLOPs of a product in one run."""
    left, right = (math.prod(atom.aval.shape) for atom in equation.invars[:2])
    out = math.prod(equation.outvars[0].aval.shape)
    params, shapes = equation.params, [atom.aval.shape for atom in equation.invars]
    if equation.primitive.name == "conv_general_dilated":
        return 2 * out * right / shapes[1][params["dimension_numbers"].rhs_spec[0]]
    if equation.primitive.name == "ragged_dot":
        return 2 * left * shapes[1][-1]
    (contracted, _), _ = params["dimension_numbers"]
    return 2 * out * math.prod(shapes[0][axis] for axis in contracted)


def low_share(fun: Callable[..., Any], *args: Any) -> float:
    """Return the share of products' FLOPs with 16-bit results."""
    found = list(products(jax.make_jaxpr(fun)(*args).jaxpr))
    total = sum(cost for _, cost in found)
    low = sum(cost for dtype, cost in found if dtype in ("bfloat16", "float16"))
    return low / total if total else math.nan


def measure(of: Model, problem: Problem, truth: Any, half: str) -> record.Row:
    """Return the row of a model in one dtype."""
    row: record.Row = {
        "library": of.library,
        "version": metadata.version(of.package),
        "model": of.kind,
        "dtype": half,
        "runs": "yes",
    }
    low = optax_mp.amp(problem.loss, compute_dtype=HALVES[half])
    args = problem.params, *problem.inputs
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            row["forward low"] = low_share(low, *args)
            row["gradient low"] = low_share(jax.value_and_grad(low), *args)
        value, grads = scaled_gradient(low, args, LOSS_SCALES[half])
    except Exception as error:
        traceback.print_exc(limit=3)
        return row | {"runs": f"no: {type(error).__name__}"}
    row["error of loss"] = relative_error(value, truth[0])
    row["error of gradient"] = relative_error(grads, truth[1])
    if any("amp: the while loop" in str(each.message) for each in found):
        row["runs"] = "yes, warns of a loop"
    return row


def scaled_gradient(
    fun: Callable[..., jax.Array], args: Any, scales: Sequence[float]
) -> tuple[jax.Array, Any]:
    """Return value and gradient with the first of these loss scales that is finite."""
    value, grads = jnp.float32(jnp.nan), None
    for scale in scales:
        scaled = jax.value_and_grad(lambda *args, scale=scale: fun(*args) * scale)
        value, grads = exactly(scaled, *args)
        value, grads = jax.tree.map(lambda x, s=scale: x / s, (value, grads))
        if optax_mp.all_finite(grads):
            break
    return value, grads


def measure_all(only: str) -> list[record.Row]:
    """Return a row for each installed model and each dtype."""
    rows: list[record.Row] = []
    for each in MODELS:
        if only.lower() not in each.library.lower():
            continue
        try:
            problem = each.build()
        except ImportError as error:
            print(f"Left out: {each.library}, {each.kind}: {error}.")
            continue
        print(f"{each.library}: {each.kind}", file=sys.stderr, flush=True)
        args = problem.params, *problem.inputs
        truth = exactly(jax.value_and_grad(problem.loss), *args)
        rows += [measure(each, problem, truth, half) for half in HALVES]
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="libraries whose name contains this")
    record.add_option(parser)
    args = parser.parse_args()
    rows = measure_all(args.only)
    print(record.heading(jax.devices()), record.as_markdown(rows), sep="\n\n")
    table = {"models of other libraries under amp": rows}
    record.finish(args.json, table, record.machine_of(jax.devices()))


if __name__ == "__main__":
    main()
