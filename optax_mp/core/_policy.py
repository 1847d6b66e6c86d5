"""Policy: which dtype params, computation and outputs have, and the three casts."""

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path
from jax.typing import DTypeLike

from optax_mp.core import _dtypes
from optax_mp.core._warnings import warn
from optax_mp.core.trees import _tree
from optax_mp.core.trees._leaves import is_absent

_NAMES = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
_KEYS = {key: field for name, field in _NAMES.items() for key in (name, name[0])}
_MOST_SHOWN = 3  # paths in a warning
_EXAMPLE = "'params=float32,compute=bfloat16,output=float32'"


@dataclass(frozen=True)
class Policy:
    """The dtypes of a model's params, computation and outputs.

    A plain, hashable value: it can be a static argument of `jit` or a dictionary key.
    Casts touch floating arrays only; integers, keys, strings, None and static leaves
    pass through.

    Attributes:
        param_dtype: what params are stored in.
        compute_dtype: what the model computes in.
        output_dtype: what the model returns.
        keep_f32: leaves that stay float32 when cast to the param or compute dtype.
            Either patterns, such as `("*norm*", "*/bias")`, for whole paths such as
            `layers/0/bias`, ignoring case and a final `/value` of Flax's boxes; or a
            predicate of (path string, leaf). `mixed_precision` and `cast_to_param` warn
            of a pattern that matches nothing, and of one that matches only the
            outermost of several norms, as `norm/*` does.

    Raises:
        ValueError: if a dtype is not floating. A cast raises it if its dtype is float64
            while JAX's 64-bit types are off.
        TypeError: if `keep_f32` is not patterns or a predicate.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax_mp
        >>> policy = optax_mp.Policy("bfloat16", "bfloat16", "float32", ("*norm*",))
        >>> params = {"norm": jnp.ones(2), "dense": jnp.ones(2)}
        >>> params = policy.cast_to_param(params)
        >>> params["norm"].dtype.name, params["dense"].dtype.name
        ('float32', 'bfloat16')
    """

    param_dtype: DTypeLike
    compute_dtype: DTypeLike
    output_dtype: DTypeLike
    keep_f32: tuple[str, ...] | Callable[[str, Any], bool] = ()

    def __post_init__(self) -> None:
        """Check and normalise the fields once."""
        for name in _NAMES.values():
            dtype = _dtypes.floating_dtype(getattr(self, name), f"Policy: `{name}`")
            object.__setattr__(self, name, dtype)
        if callable(self.keep_f32):
            return
        keep: Any = self.keep_f32
        is_single = isinstance(keep, str) or not isinstance(keep, Iterable)
        patterns = (keep,) if is_single else tuple(keep)
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(
                "Policy: expected `keep_f32` to be patterns such as ('*norm*', "
                f"'*/bias') or a function of (path string, leaf), got {keep!r}."
            )
        object.__setattr__(self, "keep_f32", patterns)

    def param_dtype_of(self, path: str, leaf: Any) -> jnp.dtype:
        """Return what a floating leaf at `path` (`layers/0/bias`) is stored in."""
        return self._apply_keep_f32(self.param_dtype, path, leaf)

    def cast_to_param(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Cast floating leaves to `param_dtype`, and leaves of `keep_f32` to float32.

        Finite values out of range become the largest finite value, as in
        `mixed_precision`, because an infinite param stays infinite. No array is shared
        with `tree`, so that a step may donate the result. Warns of patterns in
        `keep_f32` that match nothing, or only the outermost of several alike leaves.
        """
        warn_unmatched_patterns(self, tree, "Policy.cast_to_param")
        return _tree.copy_shared(
            self._cast(tree, "param_dtype", _dtypes.saturating_cast), tree
        )

    def cast_to_compute(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Cast floating leaves to `compute_dtype`, leaves of `keep_f32` to float32."""
        return self._cast(tree, "compute_dtype", _tree.cast_floating)

    def cast_to_output(self, tree: _tree.PyTree) -> _tree.PyTree:
        """Cast floating leaves to `output_dtype`."""
        return _tree.cast_floating(tree, self._available("output_dtype"))

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Return the same policy with another output dtype."""
        return replace(self, output_dtype=output_dtype)

    def _apply_keep_f32(self, dtype: DTypeLike, path: str, leaf: Any) -> jnp.dtype:
        """Return `dtype`, or float32 for a leaf of `keep_f32`."""
        if callable(self.keep_f32):
            is_kept = _dtypes.is_floating(leaf) and self.keep_f32(path, leaf)
        else:
            is_kept = any(_matches(path, pattern) for pattern in self.keep_f32)
        return jnp.dtype(jnp.float32 if is_kept else dtype)

    def _available(self, field: str) -> jnp.dtype:
        return _dtypes.check_available(getattr(self, field), f"Policy: `{field}`")

    def _cast(
        self, tree: _tree.PyTree, field: str, cast: Callable[[Any, jnp.dtype], Any]
    ) -> _tree.PyTree:
        dtype = self._available(field)

        def cast_leaf(path: tuple[Any, ...], leaf: Any) -> Any:
            if not _dtypes.is_floating(leaf):
                return leaf
            return cast(leaf, self._apply_keep_f32(dtype, _tree.slash_path(path), leaf))

        return jax.tree_util.tree_map_with_path(cast_leaf, tree)

    def __str__(self) -> str:
        """Return the name that `get_policy` reads; it does not contain `keep_f32`."""
        dtypes = {name: getattr(self, field) for name, field in _NAMES.items()}
        return ",".join(f"{name}={dtype.name}" for name, dtype in dtypes.items())


def warn_unmatched_patterns(policy: Policy, params: _tree.PyTree, caller: str) -> None:
    """Warn of patterns in `keep_f32` that match too little.

    That is, no floating leaf of `params`, or only the outermost of several alike:
    `norm/*` matches `norm/scale`, but not `blocks/0/norm/scale`.

    Args:
        policy: the policy.
        params: the params of a model. The check is skipped for a single array, and for
            a part of a model, with None or `optax.MaskedNode()` for the rest.
        caller: the public function that the user called.
    """
    if callable(policy.keep_f32) or _dtypes.is_floating(params):
        return
    leaves = tree_leaves_with_path(params, is_leaf=is_absent)
    if any(is_absent(leaf) for _, leaf in leaves):
        return
    shapes = {
        _tree.slash_path(path): leaf.shape
        for path, leaf in leaves
        if _dtypes.is_floating(leaf)
    }
    for pattern in policy.keep_f32 if shapes else ():
        matched = [path for path in shapes if _matches(path, pattern)]
        if not matched:
            shown = map(_without_box, shapes)
            likest = get_close_matches(pattern.strip("*/"), list(shown), cutoff=0)
            nearest = ", ".join(map(repr, likest))
            warn(
                f"{caller}: the pattern {pattern!r} in `keep_f32` matches no floating "
                f"leaf; the nearest paths are {nearest}. Match the whole path, with *."
            )
        elif left := _left_within(policy.keep_f32, matched, shapes):
            first, *others = map(_without_box, (matched[0], *left))
            more = f" and {len(left) - _MOST_SHOWN} more" * (len(left) > _MOST_SHOWN)
            missed = ", ".join(map(repr, others[:_MOST_SHOWN])) + more
            warn(
                f"{caller}: the pattern {pattern!r} in `keep_f32` matches {first!r}, "
                f"but not {missed}; match all with {'*' + pattern!r}, or pass a "
                "function of (path string, leaf)."
            )


def _left_within(
    patterns: tuple[str, ...], matched: list[str], shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """Return the deeper leaves that no pattern keeps, if they are like `matched`.

    Their paths end in the same keys. As an output layer and layers of attention may
    both be called `out`, all of them must also have the same shape, or a stack of it.
    In layers that have only vectors, such as norms, the lengths may differ.
    """
    names = {path.lower(): path for path in matched}
    left: list[str] = []
    for path, shape in shapes.items():
        ends = _tails(path.lower()) & names.keys()
        if not ends or any(_matches(path, pattern) for pattern in patterns):
            continue
        own = [shapes[names[end]] for end in ends]
        is_vector = len(shape) == 1 and all(
            _is_of_vectors(names[x], shapes) for x in ends
        )
        if not is_vector and not all(x and x in (shape, shape[1:]) for x in own):
            return []
        left.append(path)
    return left


def _is_of_vectors(path: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Return whether a leaf is in a layer that has only vectors."""
    layer = _without_box(path).rpartition("/")[0]
    own = [x for other, x in shapes.items() if other.startswith(f"{layer}/")]
    return bool(layer) and all(len(x) == 1 for x in own)


def _tails(path: str) -> set[str]:
    """Return the ends of a path that begin at a key, but not the whole path."""
    keys = path.split("/")
    return {"/".join(keys[i:]) for i in range(1, len(keys))}


def _without_box(path: str) -> str:
    return path.removesuffix("/value")


def _matches(path: str, pattern: str) -> bool:
    # Boxes of Flax (NNX's Variables, Linen's Partitioned) hold their array in `value`,
    # which `nnx.Optimizer` shows to `init`, but not to `update`.
    names = (path, _without_box(path))
    pattern = pattern.lower()  # `RMSNorm_0` is also a norm
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for name in names)


DTypeRule = Callable[[tuple[Any, ...], Any], jnp.dtype | None]
DeclaredDType = DTypeLike | Policy | Callable[[str, Any], DTypeLike | None] | None


def read_param_dtype(declared: DeclaredDType, argument: str) -> DTypeRule:
    """Return a function that gives the dtype of each leaf in training.

    Args:
        declared: a dtype for all floating leaves, a `Policy`, a function of (path
            string, leaf), or None for the dtype that each leaf has.
        argument: what to call it in an error.

    Returns:
        A function of (path, leaf); it returns None for a leaf that is not floating.

    Raises:
        ValueError: if a dtype is not floating. So does the returned function.
    """
    by_leaf: Any = None
    for_all = None
    if isinstance(declared, Policy):
        by_leaf = declared.param_dtype_of
    # Dtypes such as `jnp.bfloat16` are also callable: they are types.
    elif callable(declared) and not isinstance(declared, type):
        by_leaf = declared
    elif declared is not None:
        for_all = _dtypes.floating_dtype(cast(DTypeLike, declared), argument)

    def rule(path: tuple[Any, ...], leaf: Any) -> jnp.dtype | None:
        if not _dtypes.is_floating(leaf):
            return None
        dtype = by_leaf(_tree.slash_path(path), leaf) if by_leaf else for_all
        if dtype is None:
            return leaf.dtype
        where = f"{argument} for {_tree.spell(path)}"
        dtype = _dtypes.floating_dtype(dtype, where)
        if dtype == leaf.dtype:
            # NumPy's float64 is float32 to JAX.
            return jax.dtypes.canonicalize_dtype(dtype)
        return _dtypes.check_available(dtype, where)

    return rule


def get_policy(
    name: str, *, keep_f32: tuple[str, ...] | Callable[[str, Any], bool] = ()
) -> Policy:
    """Read a policy from its name.

    A single dtype (`"bf16"`, `"float16"`, `"half"`, `"float8_e4m3fn"`) is used for
    params, computation and outputs. Otherwise name them, in any order:
    `"params=float32,compute=bfloat16,output=float32"`, or `"p=f32,c=bf16"` in short.
    By default, params are float32, computation has the dtype of the params, and outputs
    have the dtype of the computation.

    Args:
        name: the name.
        keep_f32: leaves that stay float32, as in `Policy`.

    Returns:
        The policy.

    Raises:
        TypeError: if `name` is not a string.
        ValueError: if a key or a dtype is unknown, or a key occurs twice.

    Example:
        >>> import optax_mp
        >>> str(optax_mp.get_policy("p=f32,c=bf16"))
        'params=float32,compute=bfloat16,output=bfloat16'
    """
    if not isinstance(name, str):
        raise TypeError(
            f"get_policy: expected `name` to be a string such as {_EXAMPLE}, got "
            f"{name!r}; from dtypes, build optax_mp.Policy(...) directly."
        )
    if "=" not in name:
        dtype = _dtypes.floating_dtype(name.strip(), "get_policy: `name`")
        return Policy(dtype, dtype, dtype, keep_f32)
    dtypes: dict[str, jnp.dtype] = {}
    for part in name.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS:
            raise ValueError(
                f"get_policy: expected the keys {', '.join(_KEYS)}, as in {_EXAMPLE}, "
                f"got {key!r} in {name!r}."
            )
        if _KEYS[key] in dtypes:
            raise ValueError(
                f"get_policy: expected `{_KEYS[key]}` once, got it twice in {name!r}."
            )
        dtypes[_KEYS[key]] = _dtypes.floating_dtype(
            value, f"get_policy: {key!r} in {name!r}"
        )
    params = dtypes.get("param_dtype", jnp.dtype(jnp.float32))
    compute = dtypes.get("compute_dtype", params)
    return Policy(params, compute, dtypes.get("output_dtype", compute), keep_f32)
