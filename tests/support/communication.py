"""What a compiled program sends between devices."""

import math
import re

COLLECTIVE = re.compile(
    r"= (\(?[^=]*?\)?) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+[0-9]+[a-z0-9]*)\[([0-9,]*)\]")


def collectives_in(compiled):
    """Return (arrays, kind) of each collective, as the program has them."""
    return COLLECTIVE.findall(re.sub(r"/\*.*?\*/", "", compiled.as_text()))


def sent_by(compiled):
    """Return (kind, dtype, elements) of each array that is sent, sorted."""
    return sorted(
        (kind, dtype, math.prod(int(n) for n in shape.split(",") if n))
        for arrays, kind in collectives_in(compiled)
        for dtype, shape in ARRAY.findall(arrays)
    )


def large(sent):
    """Return what is sent of more than one element."""
    return [(kind, dtype, n) for kind, dtype, n in sent if n > 1]
