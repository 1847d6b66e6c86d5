"""Write the table of docs/guide/where_it_runs.md: which loops run with which state.

    python benchmarks/where_it_runs.py

A cell is a test of tests/loops: it runs if that passes. Takes some minutes.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "where_it_runs.md"
START, END = "<!-- where_it_runs.py writes from here -->", "<!-- to here -->"
FORMS = {"plain optax": "bare", "masters": "FullCopy", "compact": "5.1 bytes"}
PACKAGES = ("jax", "optax", "flax", "haliax", "orbax-checkpoint", "equinox")
NNX = "test_nnx_loops.py::test_"
LOOPS = "test_loops.py::test_"
DEVICES = "test_loops_on_devices.py::test_"
# Each row's test.
ROWS = {
    "`nnx.Optimizer` in `nnx.jit`": NNX + "a_compiled_step_is_that_of_plain_trees",
    "the same in `nnx.cond`": NNX + "in_a_branch",
    "`nnx.Optimizer(wrt=nnx.LoRAParam)`": (
        "test_recipes.py::test_only_adapters_have_a_state"
    ),
    "float32 model, dtypes of the state read and restored (Tunix)": LOOPS
    + "a_float32_model_trains",
    "`nnx.eval_shape` of an optimizer under `jax.set_mesh`": (
        DEVICES + "nnx_optimizers_are_described_under_a_mesh"
    ),
    "Linen boxes, `nn.get_partition_spec`, `nn.get_sharding`, `tree.map` over "
    "state and shardings (MaxText, nanodo)": DEVICES
    + "linen_states_are_sharded_by_their_boxes",
    "haliax's `named_jit` with FSDP": DEVICES
    + "haliax_states_are_sharded_by_their_axes",
    "FSDP by shapes (openpi), the state by `state_shardings`": (
        DEVICES + "a_rule_by_shape_for_params_and_state_shardings_for_the_state"
    ),
    "`tx.init` of `ShapeDtypeStruct`s": (
        "test_boxes.py::test_descriptions_give_descriptions"
    ),
    "weights that the loop edits": LOOPS + "weights_that_the_loop_halves_stay_halved",
    "`TrainState.create`, then `.replace(params=pretrained)`": LOOPS
    + "pretrained_weights_in_a_train_state_stay",
    "scan over layers with float32 norms, by the recipe": LOOPS
    + "layers_in_a_scan_with_float32_norms",
    "integer params, whose gradients are None": LOOPS
    + "integer_params_without_gradients_pass",
}


def main() -> None:
    """Run each test in each form, print the table, and write it into the page."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    passed = passed_tests(
        [f"{row}[{form}]" for row in ROWS.values() for form in FORMS.values()]
    )
    lines = ["| loop | " + " | ".join(FORMS) + " |", "|---" * (len(FORMS) + 1) + "|"]
    for loop, row in ROWS.items():
        cells = [
            "runs" if f"{row}[{form}]" in passed else "**fails**"
            for form in FORMS.values()
        ]
        lines.append(f"| {loop} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    lines += ["", f"{versions}, {time.strftime('%Y-%m-%d')}"]
    table = "\n".join(lines)
    print(table)
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n\n{table}\n\n{END}{after}")


def passed_tests(tests: Sequence[str]) -> set[str]:
    """Run those that are tests of pytest, and return which of them pass."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rA", "-m", ""]
    chosen = [f"tests/loops/{test}" for test in tests]
    printed = subprocess.run(
        [*command, *chosen], capture_output=True, text=True, cwd=ROOT
    ).stdout
    print(printed.splitlines()[-1], file=sys.stderr)
    start = "PASSED tests/loops/"
    lines = [line for line in printed.splitlines() if line.startswith(start)]
    return {line.removeprefix(start) for line in lines}


if __name__ == "__main__":
    main()
