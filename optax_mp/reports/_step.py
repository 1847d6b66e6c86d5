"""step_report: which leaves `take_step` computes in a kernel, and why others not."""

from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.tree_util import tree_leaves_with_path

from optax_mp._jax._traced import is_output
from optax_mp._table import align_columns
from optax_mp._tree import spell
from optax_mp.leafwise._engine import CutStep
from optax_mp.leafwise._take_step import WholeStep

KERNEL = "kernel"


@dataclass(frozen=True)
class StepRow:
    """How `take_step` computes the step of one param.

    Attributes:
        path: of the param.
        dtype: of the param.
        shape: of the param.
        tpu: `"kernel"`, or why XLA computes it on a TPU.
        gpu: the same for a GPU.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> tx = optax_mp.mixed_precision(optax.sgd(0.1), storage=optax_mp.Split(8))
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> report = optax_mp.step_report(tx, params, tx.init(params), params)
        >>> report.rows[0].path, report.rows[0].tpu, report.rows[0].gpu
        ("['w']", 'kernel', 'kernel')
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    tpu: str
    gpu: str


@dataclass(frozen=True)
class StepReport:
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
        'nothing in few bits'
    """

    rows: tuple[StepRow, ...]

    def __str__(self) -> str:
        """Return the table: one line for params of one kind."""
        groups: dict[Any, list[StepRow]] = {}
        for row in self.rows:
            kind = (row.dtype, row.shape, row.tpu, row.gpu)
            groups.setdefault(kind, []).append(row)
        cells = [["param", "dtype", "shape", "TPU", "GPU"]]
        for (dtype, shape, tpu, gpu), rows in groups.items():
            more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            size = "x".join(map(str, shape))
            cells.append([f"{rows[0].path}{more}", dtype, size, tpu, gpu])
        return "\n".join(align_columns(cells, left=5))


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
    are enough. Where a reason stands, XLA computes the step. If the `params` given here
    are sharded, that is the reason unless it is known how they are in `jit`.

    What only a compiler knows is not in it: TPU v2 and v3 have no kernels, nor have
    programs of `jax.export`; under `vmap` there are none.

    Args:
        tx: see `take_step`, as for the others.
        grads: the gradients, or descriptions of them.
        opt_state: the state.
        params: the params.
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
        ...     "head": jax.ShapeDtypeStruct((512, 1000), jnp.bfloat16),
        ...     "norm": jax.ShapeDtypeStruct((512,), jnp.bfloat16),
        ...     "w": jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),
        ... }
        >>> opt_state = jax.eval_shape(tx.init, params)
        >>> print(optax_mp.step_report(tx, params, opt_state, params))
        param     dtype     shape     TPU                  GPU
        ['bias']  bfloat16  8192      one axis             kernel
        ['head']  bfloat16  512x1000  kernel               rows not of whole blocks
        ['norm']  bfloat16  512       under 4096 elements  under 4096 elements
        ['w']     bfloat16  512x512   kernel               kernel
    """
    are_sharded = [_is_sharded(leaf) for leaf in jax.tree.leaves(params)]
    found: list[dict[str, str]] = []

    def trace(grads: Any, opt_state: Any, params: Any) -> None:
        whole = WholeStep.of(
            "step_report", tx, grads, opt_state, params, param_shardings, extra_args
        )
        found.extend(_found(CutStep.of(*whole), are_sharded))

    jax.eval_shape(trace, grads, opt_state, params)
    return StepReport(
        tuple(
            StepRow(spell(path), leaf.dtype.name, leaf.shape, each["tpu"], each["cuda"])
            for (path, leaf), each in zip(
                tree_leaves_with_path(params), found, strict=True
            )
        )
    )


def _is_sharded(leaf: Any) -> bool:
    return len(getattr(getattr(leaf, "sharding", None), "device_set", ())) > 1


def _found(cut_step: CutStep | str, are_sharded: list[bool]) -> list[dict[str, str]]:
    """Return for each param what a kernel meets on each platform."""
    if isinstance(cut_step, str):
        return [dict.fromkeys(("tpu", "cuda"), cut_step) for _ in are_sharded]
    end_of = {i: end for end in cut_step.ends for i in end.outputs}
    # The params are the last of the step's results.
    count = sum(map(is_output, cut_step.traced.outputs))
    found = []
    for i, is_sharded in enumerate(are_sharded, start=count - len(are_sharded)):
        end = end_of.get(i)
        found.append(
            {
                platform: "not changed element by element"
                if end is None
                else cut_step.obstacle(end, platform, is_sharded) or KERNEL
                for platform in ("tpu", "cuda")
            }
        )
    return found
