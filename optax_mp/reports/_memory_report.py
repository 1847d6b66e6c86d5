"""memory_report: the bytes of optimizer state and params, and what they are for."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from jax.tree_util import DictKey, GetAttrKey, keystr, tree_leaves_with_path

from optax_mp import _table
from optax_mp.compact._quantized import Quantized
from optax_mp.core import _dtypes
from optax_mp.core.jax_api import _arrays
from optax_mp.core.masters._storage import MixedPrecisionState
from optax_mp.core.trees import _states, _tree
from optax_mp.core.trees._boxes import plain_trees
from optax_mp.core.wrappers._mistakes import check_state_first

_PARAMS, _SCALES, _REST = "params", "scales", "rest"
# Roles that plain float32 training does not have.
_OF_FORMS = {"masters", "remainders", _SCALES}
# Fields of wrappers: they hold the state of another transform, and are not its role.
_WRAPPER_FIELDS = (".inner_state", ".inner_states", ".inner_opt_state")


@dataclass(frozen=True)
class MemoryRow:
    """The memory of one array of the params or of the optimizer state.

    Attributes:
        role: `"params"`; `"masters"`, or `"remainders"` where the param holds the rest
            of its master; the field of the optimizer's state, such as `"mu"`, `"nu"` or
            `"trace"`; `"scales"` of a low-bit state; or `"rest"`: counts, the loss
            scale, keys and other scalars.
        path: the path of the array in the params or in the state.
        param: the path of the param that it belongs to, or `""` if it belongs to none.
        dtype: the name of the dtype.
        bytes: the size of the array.
        float32_bytes: the size of its counterpart in plain float32 training.
        host_bytes: `bytes` if it is in the memory of the host, as `offload` keeps it,
            else 0.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
        >>> row = optax_mp.memory_report(optax.adam(1e-3).init(params), params).rows[2]
        >>> row.role, row.path, row.param, row.dtype, row.bytes, row.float32_bytes
        ('mu', "[0].mu['w']", "['w']", 'bfloat16', 8, 16)
    """

    role: str
    path: str
    param: str
    dtype: str
    bytes: int
    float32_bytes: int
    host_bytes: int = 0


@dataclass(frozen=True)
class MemoryReport(_table.Report):
    """What `memory_report` counted. Printed, it is a table of the roles.

    Attributes:
        rows: one row for each array, params first.
        weights: the number of elements of all floating params.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jnp.ones(1024)}
        >>> state = optax.sgd(0.1, momentum=0.9).init(params)
        >>> report = optax_mp.memory_report(state, params)
        >>> report.total_bytes, report.by_role()
        (8192, {'params': 4096, 'trace': 4096})
        >>> report.by_leaf()
        {"['w']": 8192}
    """

    rows: tuple[MemoryRow, ...]
    weights: int

    @property
    def total_bytes(self) -> int:
        """The bytes of all rows."""
        return sum(row.bytes for row in self.rows)

    @property
    def host_bytes(self) -> int:
        """The bytes of arrays in host memory; the others are on a device."""
        return sum(row.host_bytes for row in self.rows)

    @property
    def float32_bytes(self) -> int:
        """The bytes of plain float32 training with the same optimizer."""
        return sum(row.float32_bytes for row in self.rows)

    @property
    def bytes_per_weight(self) -> float:
        """All bytes divided by all weights; NaN if no param is floating."""
        return self.total_bytes / self.weights if self.weights else math.nan

    def by_role(self) -> dict[str, int]:
        """Return the bytes of each role: params first, scales and rest last."""
        return {role: part.total_bytes for role, part in self._roles()}

    def by_leaf(self) -> dict[str, int]:
        """Return the bytes of each param with its state; `""` for all other arrays."""
        return {param: part.total_bytes for param, part in self._by("param")}

    def _roles(self) -> list[tuple[str, "MemoryReport"]]:
        """Return a report of each role, in the order of `by_role`."""
        last = {_SCALES: 1, _REST: 2}
        return sorted(self._by("role"), key=lambda item: last.get(item[0], 0))

    def _by(self, field: str) -> list[tuple[str, "MemoryReport"]]:
        """Return a report of the rows with each value of a field."""
        groups = _table.grouped(self.rows, lambda row: getattr(row, field)).items()
        return [(x, MemoryReport(tuple(rows), self.weights)) for x, rows in groups]

    def _parts(self) -> list[str | _table.Table]:
        cells = [["role", "dtype", "size", "bytes per weight", "share", "on the host"]]
        for role, part in [*self._roles(), ("total", self)]:
            dtypes = ", ".join(dict.fromkeys(row.dtype for row in part.rows))
            sizes = [
                _table.format_bytes(x) for x in (part.total_bytes, part.host_bytes)
            ]
            per_weight = _ratio(part.total_bytes, self.weights, ".2f")
            share = _ratio(part.total_bytes, self.total_bytes, ".1%")
            cells.append([role, dtypes[:34], sizes[0], per_weight, share, sizes[1]])
        cells[-1][1] = f"{self.weights:,} weights"
        if not self.host_bytes:
            cells = [row[:-1] for row in cells]
        plain = self.float32_bytes
        size, per_weight = (
            _table.format_bytes(plain),
            _ratio(plain, self.weights, ".2f"),
        )
        times = _ratio(plain, self.total_bytes, ".2f")
        last = f"plain float32: {size}, {per_weight} bytes per weight ({times} times as"
        return [_table.Table(cells, left=2), f"{last} much)"]

    def plot(self, ax: Any = None) -> Any:
        """Draw bytes per weight by role, beside plain float32 training.

        Args:
            ax: Matplotlib axes; by default, of a new figure.

        Returns:
            The axes.
        """
        ax, tops = _table.axes_or_new(ax), np.zeros(2)
        for role, part in self._roles():
            heights = np.array([part.total_bytes, part.float32_bytes])
            heights = heights / (self.weights or 1)
            ax.bar(["this", "plain float32"], heights, bottom=tops, label=role)
            tops += heights
        ax.set_ylabel("bytes per weight")
        ax.margins(y=0.3)  # for the legend
        ax.legend(ncols=3, loc="upper center")
        return ax


def memory_report(opt_state: optax.OptState, params: optax.Params) -> MemoryReport:
    """Count the bytes of optimizer state and params, by what they are for.

    Only shapes and dtypes are read. With trees from `jax.eval_shape` you can plan a
    model on a machine that could not hold it.

    Arrays in host memory, as `offload` keeps them, have their own column. Trees
    from `jax.eval_shape` show the memory from JAX 0.12 on; before, only arrays and
    `jax.ShapeDtypeStruct` with a `NamedSharding` of that `memory_kind` do.

    The report compares with plain float32 training by the same optimizer: every
    floating array of params and state in float32, without masters, remainders and
    scales. Integers, keys and complex arrays count with their own size. Gradients and
    activations are not counted.

    Args:
        opt_state: the state of any optax optimizer for `params`: arrays, NumPy arrays
            or `jax.ShapeDtypeStruct`. Sharded arrays count over all devices together,
            replicated ones once. An `nnx.Optimizer` is also accepted.
        params: the params, of the same kinds. Leaves that are not arrays are not
            counted. The `nnx.Module` that the optimizer trains is also accepted.

    Returns:
        The report. Printed, it is a table.

    Raises:
        ValueError: if `params` holds no array.
        TypeError: if `opt_state` is the optimizer itself, or state and params are
            swapped.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import optax
        >>> import optax_mp
        >>> params = {"w": jax.ShapeDtypeStruct((2**15, 2**20), jnp.bfloat16)}
        >>> tx = optax_mp.mixed_precision(optax.adamw(3e-4))
        >>> print(optax_mp.memory_report(jax.eval_shape(tx.init, params), params))
        role     dtype                        size  bytes per weight   share
        params   bfloat16                 64.0 GiB              2.00   14.3%
        masters  float32                 128.0 GiB              4.00   28.6%
        mu       float32                 128.0 GiB              4.00   28.6%
        nu       float32                 128.0 GiB              4.00   28.6%
        rest     int32, bool                   5 B              0.00    0.0%
        total    34,359,738,368 weights  448.0 GiB             14.00  100.0%
        plain float32: 384.0 GiB, 12.00 bytes per weight (0.86 times as much)
    """
    opt_state, params = plain_trees(opt_state, params)
    call = "memory_report(opt_state, params)"
    check_state_first(opt_state, params, "memory_report", call)
    arrays = [
        (path, x) for path, x in tree_leaves_with_path(params) if _arrays.is_array(x)
    ]
    if not arrays or _states.holds_state(params):
        raise ValueError(
            "memory_report: expected `params` to be arrays, got "
            f"{_tree.summarize(params)}, which is a state or has no arrays; pass what "
            "`tx.init` gets."
        )
    rows = [_row(_PARAMS, path, path, x) for path, x in arrays]
    rows += _state_rows(opt_state, params)
    weights = sum(x.size for _, x in arrays if _dtypes.is_floating(x))
    return MemoryReport(tuple(rows), weights)


def _state_rows(opt_state: _tree.PyTree, params: _tree.PyTree) -> Iterator[MemoryRow]:
    param_paths = [path for path, _ in tree_leaves_with_path(params)]
    quantized = {path for path, _ in _states.find_states(opt_state, Quantized)}
    masters = {}
    for path, state in _states.find_states(opt_state, MixedPrecisionState):
        # A state that was built by hand does not name its storage.
        is_part = getattr(state.storage, "param_is_part", False)
        role = "remainders" if is_part else "masters"
        masters[(*path, GetAttrKey("master_params"))] = role
    owners = _states.find_owners(opt_state, params)
    leaves = tree_leaves_with_path(opt_state)
    for (path, leaf), owner in zip(leaves, owners, strict=True):
        if not _arrays.is_array(leaf):
            continue
        param = None if owner is None else param_paths[owner]
        above = [path[:end] for end in range(len(path) + 1)]
        coded = next((start for start in above if start in quantized), None)
        part = None if coded is None else path[len(coded)].name
        if part == _SCALES:
            role = _SCALES
        elif roles := [masters[start] for start in above if start in masters]:
            role = roles[-1]  # of the innermost, if one is in another's state
        elif param is None and not leaf.shape:
            # Counts, loss scales and keys are too small for their own roles.
            role = _REST
        else:
            role = _field(_before_param(coded or path, param))
        yield _row(role, path, param, leaf, quantized=part == "codes")


def _before_param(path: _states.Path, param: _states.Path | None) -> _states.Path:
    """Return the path within a state up to where the path of a param begins."""
    # A quantized array is in the place of the whole box of the param.
    for end in (param, param[:-1]) if param else ():
        for i in range(len(path) - len(end), -1, -1):
            if end and path[i : i + len(end)] == end:
                return path[:i]
    return path


def _field(path: _states.Path) -> str:
    """Return the innermost field, or else dict key, that `path` leads through."""
    places = [i for i, x in enumerate(path, 1) if keystr((x,)) in _WRAPPER_FIELDS]
    inside = path[max(places, default=0) :]  # labels of a partition are not roles
    fields = [x.name for x in inside if isinstance(x, GetAttrKey)]
    keys = [str(x.key) for x in inside if isinstance(x, DictKey)]
    name = (fields or keys or ["state"])[-1]
    # L-BFGS and others keep previous params in their state.
    return "params in state" if name == _PARAMS else name


def _row(
    role: str,
    path: _states.Path,
    param: _states.Path | None,
    leaf: Any,
    quantized: bool = False,
) -> MemoryRow:
    count = -(
        -leaf.size * _dtypes.bits(leaf.dtype) // 8
    )  # two codes of 4 bits in a byte
    plain = 4 * leaf.size if quantized or _dtypes.is_floating(leaf) else count
    owner = "" if param is None else _tree.spell(param)
    plain = 0 if role in _OF_FORMS else plain
    on_host = count if is_stored_on_host(leaf) else 0
    name = _arrays.describe(leaf).split("[")[0]
    return MemoryRow(role, _tree.spell(path), owner, name, count, plain, on_host)


def _ratio(a: int, b: int, form: str) -> str:
    return format(a / b, form) if b else "-"


def is_stored_on_host(x: Any) -> bool:
    """Return whether an array is in host memory, whatever its type says.

    With a `SingleDeviceSharding` among the `out_shardings` of `jit`, JAX 0.10 to 0.12
    move an array to the device and leave its type as it was.
    """
    if isinstance(x, jax.Array) and not _arrays.is_traced(x):
        return x.sharding.memory_kind == _arrays.HOST_KIND
    return _arrays.is_on_host(x)
