"""A precision report in words: a table, one line, and what to change."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from optax_mp._table import align_columns
from optax_mp.reports._precision_rows import PrecisionProduct

Products = Sequence[PrecisionProduct]
# By how much a table is cut. The report itself holds all.
_MOST_ROWS, _MOST_CAUSES, _CAUSE_WIDTH = 12, 4, 56

_REMEDIES = {
    "argument": "pass {it} in bfloat16, cast back what is computed with {it}, or set "
    "the `dtype` of the layer",
    "constant": "make {it} in the dtype of the other values",
    "operation": "make {it} in the dtype of the other values (`dtype=x.dtype`)",
    "cast": "leave {it} out, or cast back before the product",
    "result": "leave out `preferred_element_type`, or cast the result back",
    "literal": "write a Python number, which takes the dtype of what it meets",
    "promotion": "set the `dtype` of the layer to bfloat16",
    "gradient": "cast the output to bfloat16",
}
_KEPT = {
    "precision": "`precision=` keeps {} in float32, also under `amp`: leave it out "
    "where 16 bits suffice",
    "scope": "`amp_stop` keeps {} in float32",
    "parameters": "their parameters keep {} in float32, also under `amp`",
    "inputs": "`amp` leaves {} as written, as an operand is neither float32 nor "
    "bfloat16: cast it, if it need not be complex, or of another width",
    "rule": "`amp` has no 16-bit form of {}, such as of a sparse product: cast the "
    "operands yourself where 16 bits suffice",
}
# For a reason that is not among these.
_KEPT_ANYHOW = "`amp` leaves {} as written"


def shares_of(products: Iterable[PrecisionProduct]) -> dict[str, float]:
    """Return the share of each dtype in the FLOPs of products, the largest first."""
    flops: dict[str, int] = {}
    for each in products:
        flops[each.dtype] = flops.get(each.dtype, 0) + each.flops
    total = sum(flops.values())
    largest = sorted(flops.items(), key=lambda item: -item[1])
    return {dtype: count / total if total else 0.0 for dtype, count in largest}


def describe_shares(products: Products) -> str:
    """Return one line: how much is in which dtype, and why."""
    if not products:
        return "no matrix products or convolutions"
    parts = [f"{_percent(x)} in {name}" for name, x in shares_of(products).items()]
    wide = [each for each in products if each.is_wide]
    line = f"FLOPs of products: {', '.join(parts)}"
    if not wide:
        return line
    line += f"; {len(wide)} of {len(products)} products are float32 or wider"
    causes = _causes([each for each in wide if each.causes])
    if causes:
        line += f", most because of {causes[0]}"
        line += f" and {len(causes) - 1} more" if causes[1:] else ""
    return line


def table_of(products: Products, kept_bytes: dict[str, int]) -> list[str]:
    """Return the lines of the tables: shares of dtypes, and the float32 products."""
    passes = [
        [each for each in products if not each.is_backward],
        [each for each in products if each.is_backward],
        products,
    ]
    shares = list(map(shares_of, passes))
    cells = [["FLOPs of products in", "forward", "backward", "all", "products"]]
    for dtype in shares[-1]:
        percents = [_percent(x.get(dtype, 0.0)) if x else "-" for x in shares]
        count = sum(each.dtype == dtype for each in products)
        cells.append([dtype, *percents, str(count)])
    lines = align_columns(cells, left=1)
    if kept_bytes:
        sizes = ", ".join(f"{format_bytes(x)} {k}" for k, x in kept_bytes.items())
        lines.append(f"kept for the backward pass: {sizes}")
    wide = [each for each in products if each.is_wide]
    return [*lines, "", *_table_of_wide(wide, products)] if wide else lines


def _table_of_wide(wide: Products, products: Products) -> list[str]:
    """Return a table of float32 products, most FLOPs first.

    The products of a line and those of their gradients are together in a row.
    """
    total = sum(each.flops for each in products) or 1
    groups = _group(wide, lambda each: (_place(each), _pattern(_cause(each))))
    cells = [("float32 at", "because of", "shapes", "runs", "FLOPs", "share")]
    for (place, _), group in groups[:_MOST_ROWS]:
        flops = sum(each.flops for each in group)
        runs = str(sum(each.count for each in group))
        size, share = _engineering(flops), _percent(flops / total)
        (cause,) = _causes(group)
        cells.append((place, _shorten(cause), _shapes(group), runs, size, share))
    left_out = len(groups) - _MOST_ROWS
    more = [f"... and {left_out} more"] if left_out > 0 else []
    return [*align_columns(cells, left=3), *more]


def _place(product: PrecisionProduct) -> str:
    place = product.line or product.primitive
    if product.library_line and product.library_line != product.line:
        place += f" ({product.library_line})"
    return place


def _cause(product: PrecisionProduct) -> str:
    return str(product.causes[0]) if product.causes else "-"


def _shapes(group: Products) -> str:
    """Return the shapes of what the products of a row multiply."""
    forward = [each for each in group if not each.is_backward] or group
    found = dict.fromkeys(each.shapes[:2] for each in forward)
    left, right = (f"[{','.join(map(str, shape))}]" for shape in next(iter(found)))
    return f"{left} {right}" + (" ..." if len(found) > 1 else "")


def advice_of(products: Products) -> list[str]:
    """Return what to change so that products run in 16 bits, one sentence each."""
    wide = [each for each in products if each.is_wide]
    free = [each for each in wide if not each.kept_by]
    lines = []
    if free:
        which = "all" if len(free) == len(wide) else f"{len(free)} of these"
        lines.append(
            f"wrap the function, or the part that has them: `optax_mp.amp(fun)` runs "
            f"{which} {_count(wide)} in bfloat16, whatever made them float32"
        )
    caused = [each for each in free if each.causes]
    for kinds, group in _group(caused, _kinds):
        remedies = "; and ".join(_remedy(kind, group) for kind in kinds)
        lines.append(f"or, for {_count(group)}: {remedies}")
    for reason, group in _group([x for x in wide if x.kept_by], lambda x: x.kept_by):
        lines.append(_KEPT.get(reason, _KEPT_ANYHOW).format(_count(group)))
    return lines


def _kinds(product: PrecisionProduct) -> tuple[str, ...]:
    """Return the kinds of causes of a product, each of which needs a remedy."""
    return tuple(dict.fromkeys(cause.kind for cause in product.causes))


def _remedy(kind: str, products: Products) -> str:
    """Return what to do with all causes of a kind: each alone makes float32."""
    exact: dict[str, set[str]] = {}
    flops: Counter[str] = Counter()
    for product in products:
        for name in [str(x) for x in product.causes if x.kind == kind]:
            exact.setdefault(_pattern(name), set()).add(name)
            flops[_pattern(name)] += product.flops
    names = [
        next(iter(exact[pattern])) if len(exact[pattern]) == 1 else pattern
        for pattern, _ in flops.most_common()
    ]
    is_float32, are_float32 = " is float32", " are float32"
    if kind == "cast":  # "a cast to float32 at ..." says so itself.
        is_float32 = are_float32 = ""
    if len(names) == 1:
        (name,) = names
        return f"{name}{is_float32}; {_REMEDIES[kind].format(it='it')}"
    left_out = len(names) - _MOST_CAUSES
    shown = names[:_MOST_CAUSES] + ([f"{left_out} more"] if left_out > 0 else [])
    listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
    both = "both" if len(names) == 2 else "them all"
    return f"{listed}{are_float32}; {_REMEDIES[kind].format(it=both)}"


def _causes(products: Products) -> list[str]:
    """Return the main causes of products, those of all layers in one, largest first."""
    names = []
    for pattern, group in _group(products, lambda each: _pattern(_cause(each))):
        exact = {_cause(each) for each in group}
        names.append(exact.pop() if len(exact) == 1 else pattern)
    return names


def _pattern(path: str) -> str:
    """Return a path with stars for the numbers of layers."""
    return re.sub(r"\[('?)\d+\1\]", "[*]", re.sub(r"_\d+(?=['/])", "_*", path))


def _group(
    products: Products, key: Callable[[PrecisionProduct], Any]
) -> list[tuple[Any, Products]]:
    """Return products in groups, the group of most FLOPs first."""
    groups: dict[Any, list[PrecisionProduct]] = {}
    for each in products:
        groups.setdefault(key(each), []).append(each)
    pairs: list[tuple[Any, Products]] = list(groups.items())
    return sorted(pairs, key=lambda pair: -sum(each.flops for each in pair[1]))


def format_bytes(count: int) -> str:
    """Return bytes in the largest unit that they fill."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def _percent(share: float) -> str:
    """Return a share in percent; 0% and 100% are none and all."""
    if 0 < share < 0.001:
        return "<0.1%"
    if 0.999 < share < 1:
        return ">99.9%"
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def _engineering(count: int) -> str:
    """Return a number with a prefix, such as `1.5G`."""
    power = min((len(str(count)) - 1) // 3, 5)
    return f"{count / 1000**power:.3g}{('', 'k', 'M', 'G', 'T', 'P')[power]}"


def _count(products: Products) -> str:
    return f"{len(products)} product" + ("s" if len(products) != 1 else "")


def _shorten(text: str) -> str:
    """Return the end of a text that is too wide, as it says most of a path."""
    width = _CAUSE_WIDTH
    return text if len(text) <= width else "..." + text[3 - width :]
