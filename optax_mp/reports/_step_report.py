"""step_report: which leaves `take_step` computes in a kernel, and why not others."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._table import Report, Table, grouped
from optax_mp._take_step import bind_step
from optax_mp.trees._boxes import plain, plain_trees
from optax_mp.trees._descriptions import named_sharding
from optax_mp.trees._tree import is_array, spell

# Lines below a table in which their first words occur.
_NOTES = (
    "not proved here: compared with XLA at its first step on a device of that kind",
    "groups of n rows: these share column scales; the kernel takes other sizes",
)


@dataclass(frozen=True)
class StepRow:
    """How `take_step` computes the step of one param.

    Attributes:
        path: of the param.
        dtype: of the param.
        shape: of the param.
        tpu: `"kernel"` if a kernel does on a TPU, and was compared with XLA in this
            process; `"kernel, not proved here"` if it was not; or why XLA does.
        gpu: the same for a GPU.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.Split(8))
        >>> params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
        >>> report = optax_mp.step_report(tx, params, tx.init(params), params)
        >>> report.rows[0].path, report.rows[0].tpu, report.rows[0].gpu
        ("['w']", 'kernel, not proved here', 'kernel, not proved here')
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    tpu: str
    gpu: str


@dataclass(frozen=True)
class StepReport(Report):
    """What `step_report` found. Printed, it is a table.

    Attributes:
        rows: one for each param.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones((64, 64))}
        >>> tx = optax.sgd(0.1)
        >>> report = optax_mp.step_report(tx, params, tx.init(params), params)
        >>> report.rows[0].tpu
        'no low-bit arrays'
    """

    rows: tuple[StepRow, ...]

    def _parts(self) -> list[str | Table]:
        """Return the table: one line for params of one kind."""
        groups = grouped(self.rows, lambda x: (x.dtype, x.shape, x.tpu, x.gpu))
        cells = [["param", "dtype", "shape", "TPU", "GPU"]]
        for (dtype, shape, tpu, gpu), rows in groups.items():
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            size = "x".join(map(str, shape))
            cells.append([f"{rows[0].path}{more}", dtype, size, tpu, gpu])
        told = " ".join(each.tpu + each.gpu for each in self.rows)
        notes = [note for note in _NOTES if " ".join(note.split()[:2]) in told]
        return [Table(cells, left=5, width=56), *notes]


def step_report(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    *,
    param_shardings: Any = None,
    **extra_args: Any,
) -> StepReport:
    """Say which leaves `take_step` computes in a kernel on TPUs and GPUs.

    The step is traced as in `jax.jit`, and nothing is computed: descriptions of arrays
    are enough. A row without a kernel has the reason, and XLA computes that step.
    Sharded params have a kernel only if their layout under `jit` is known: by
    `param_shardings`, or by the shardings of the state and params given here, if these
    are arguments of the function that `jit` compiles.

    At its first use on a device, each kernel is compared with XLA, bit by bit; if they
    differ, XLA computes. Without such a device, or before the first step, the report
    says "not proved here". It cannot know the compiler's limits: TPU v2 and v3 have no
    kernels, nor have programs of `jax.export` and steps under `vmap`.

    Args:
        tx: any optax optimizer or chain.
        grads: the gradients, or descriptions of them.
        opt_state: its state. Or its `nnx.Optimizer`.
        params: the params. Or their `nnx.Module`.
        param_shardings: how the params are sharded under `jit`.
        extra_args: for `tx.update`.

    Returns:
        The report. Printed, it is a table.

    Raises:
        ValueError: if `param_shardings` does not fit the params.
        TypeError: if it holds something else than shardings, or `tx` is no optimizer.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(
        ...     optax_mp.low_bit_state(optax.adamw(0.1)), storage=optax_mp.Split(8)
        ... )
        >>> params = {
        ...     "bias": jax.ShapeDtypeStruct((8192,), jnp.bfloat16),
        ...     "norm": jax.ShapeDtypeStruct((512,), jnp.bfloat16),
        ...     "w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),
        ... }
        >>> opt_state = jax.eval_shape(tx.init, params)
        >>> print(optax_mp.step_report(tx, params, opt_state, params))
        param     dtype     shape    TPU                      GPU
        ['bias']  bfloat16  8192     1-D array                kernel, not proved here
        ['norm']  bfloat16  512      under 4096 elements      under 4096 elements
        ['w']     bfloat16  512x512  kernel, not proved here  kernel, not proved here
        not proved here: compared with XLA at its first step on a device of that kind
    """
    from optax_mp.engine import explain_step

    grads = plain(grads)
    opt_state, params = plain_trees(opt_state, params)
    placed = list(map(named_sharding, jax.tree.leaves((opt_state, params))))

    def bind(grads: Any, opt_state: Any, params: Any) -> tuple[Any, ...]:
        *bound, told, _ = bind_step(
            "step_report", tx, grads, opt_state, params, param_shardings, extra_args
        )
        return *bound, told if any(told) else placed

    leaves = tree_leaves_with_path(params)
    shardings = [getattr(x, "sharding", None) for _, x in leaves]
    counts = [len(getattr(x, "device_set", ())) or 1 for x in shardings]
    decisions = explain_step(bind, (grads, opt_state, params), counts)
    rows = [
        StepRow(spell(path), leaf.dtype.name, leaf.shape, *on_each)
        for (path, x), on_each in zip(leaves, decisions, strict=True)
        for leaf in (x if is_array(x) else jnp.asarray(x),)  # a Python float
    ]
    return StepReport(tuple(rows))
