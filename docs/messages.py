"""The page of all errors and warnings, which `docs/conf.py` makes with the site.

    python docs/messages.py   # prints it

The messages are read from the code, from `raise Error(...)` and `warn(...)`. Parts that
are filled in when it is raised are shown in words, as ‹path›. A longer explanation of
a message has its place in `EXPLANATIONS`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "optax_mp"
SHARED = "Messages of several functions"
# What a shared message is about, by the file or the folder of its code.
HEADINGS = {
    "_mistakes": "Arguments and transforms in the wrong place",
    "_dtypes": "Dtypes",
    "_arguments": "The arguments of an update",
    "_protocol": "The wrapped optimizer",
    "_leaves": "Trees that do not match",
    "_policy": "Policies",
    "_states": "Restored states",
    "jax_api": "Another version of JAX",
    "autocast": "Functions under amp and in reports",
    "checkpoints": "Checkpoints",
    "compact": "Low-bit state",
    "devices": "Many devices",
    "masters": "Master params",
    "reports": "Reports",
    "scaling": "Loss scaling",
}
OTHER = "Other trees"
HEAD = f"""# Errors and warnings

Every error and warning of `optax_mp`, by the function that its text starts with, and
what to do. Search the page for a few words of yours; words in ‹these marks› are filled
in when it is raised. Messages that several functions share come last, under *{SHARED}*.

Warnings have the category `optax_mp.MixedPrecisionWarning`. They come while a function
is traced or set up, never from a compiled step.
"""
# What functions and variables that fill in a part of a message give, in words.
WORDS = {
    "describe": "dtype and shape",
    "summarize": "what was passed",
    "spell": "path",
    "keystr": "path",
    "type": "type",
    "call": "the call",
    "keep": "what was passed",
    "shown": "what was passed",
    "expected": "what fits",
    "where": "path",
    "fault": "the scale is at its floor / too many steps in a row were skipped",
}
# Parts of an expression that say nothing to a reader.
NO_WORDS = {"self", "jnp", "jax", "repr", "str", "sorted", "join", "__name__", "name"}
MOST_CHARACTERS = 120  # of alternatives that are written out
# Longer explanations, each by words of the messages that it is for.
EXPLANATIONS = {
    "to round to the param": """A param that misses its master by a rounding or an edit
        cannot be a part of it. To keep the masters, cast them first, and continue with
        the result: `params = jax.tree.map(lambda m, p: m.astype(p.dtype),
        optax_mp.master_params(opt_state, params), params)`.""",
    "state of `jax.vmap(tx.init)`": """As `jax.vmap(lambda state, params:
        convert_opt_state(state, params, from_tx, to_tx))(opt_state, params)`.""",
    "each name in `rules`": """A scope counts if the function enters it in this call,
        outside of derivative rules.""",
    "in which a state has lost its class": """A checkpoint that is restored without a
        template has dicts in place of states, and so has `nnx.state` of an
        `nnx.Optimizer`: pass the optimizer itself.""",
    "for the unscaled gradients": """The gradients were probably never scaled, or they
        were clipped or unscaled before `tx.update`, which divides them by the scale.
        Clip inside: `optax_mp.dynamic_loss_scale(optax.chain(clip, ...))`.""",
    "the scale is at its floor": """With the loss as `value`, a NaN of the model or its
        data does not lower the scale. If the loss is finite in these steps, the scale
        is too large even at `min_scale`. If a lower scale ends a series of skipped
        steps, start lower or raise `max_skipped`. Otherwise look for a NaN of the model
        or its data, or a learning rate at which training diverges.""",
    "holds no loss scale": """Float16 values below 6e-8 become 0. If the loss is scaled
        in another way, ignore this warning: `warnings.filterwarnings("ignore",
        "value_and_grad: .*float16", optax_mp.MixedPrecisionWarning)`.""",
    "in which values below 6e-8 become 0": """`value_and_grad` returns gradients in
        float32, still scaled, and `dynamic_loss_scale` unscales them. If you scale the
        loss yourself, cast them to float32, unscale them, and pass the result.""",
    "got an fp8 scale": """An fp8 layer of Flax returns the next value of its scales in
        the place of their gradients. Put it into the params yourself, or train with
        `TrainState`.""",
    "`master_dtype`, the second argument": """With masters as narrow as the params, no
        param has a master. Masters are float32 by default; the dtype of params in
        training is the keyword `param_dtype`.""",
    "begin from rounded weights": """With `param_dtype`, call `init` with the float32
        weights, which become the masters, and cast the params after it.""",
    "If `equinox.apply_updates` promoted it": """`equinox.apply_updates` adds float32
        updates without casting back. `update_dtype="params"` needs the storage
        `optax_mp.FullCopy()`. Among the params, a Python number must be an array.""",
    "a shared line of the state": """A rank has whole lines where params are
        replicated, or sharded along other axes than the lines. Without `check_vma`, no
        type says which ranks share a line.""",
    "numbers of the state are stored in codes": """Arrays of other dtypes than float32,
        histories, and copies of the weights are not.""",
    "of the state in host memory": """In shardings and in descriptions of arrays, pass
        `memory_kind="pinned_host"`. Before a loop or a branch, move what it carries
        with `jax.device_put`. Put no `offload` into another.""",
    "to be of each device's own loss": """In JAX 0.8, `jax.lax.pvary`. Or pass
        `check_vma=False` to `jax.shard_map`.""",
    "a leading axis of": """With `exchange_dtype`, `zero1` sums the gradients of the
        devices: `jax.vmap` over the parts of the batch makes them.""",
    "that JAX sums over ranks": """Each rank would take a step of its own, and the
        layers would differ. `jax.jit` with sharded arrays also sums gradients.""",
    "without a loss scale, got one": """A step has one loss scale, in the state of
        `rest`: `release_gradients(loss, tx)(opt_state, layers, rest, ...,
        rest_state=rest_state)`.""",
    "unchanged to one `scan_layers`": """Pass tied layers to one scan, as `(layers,
        layers)`. Keep the scan out of loops and branches. In place of micro-batches use
        a larger batch, with `jax.checkpoint` in the block.""",
    "to update each array by itself": """`max_norm` clips by the norm of all gradients.
        With `by_layer=True`, `tx` computes such a norm for each layer.""",
    "that reads an array of them": """The block may return other values as outputs,
        such as the norm of its weights.""",
}
# Functions that make the texts of warnings of `amp`, which others give to `warn`.
MAKERS = ("_warning_of_unknown", "warnings_of_names")


class Message(NamedTuple):
    """An error or a warning.

    Attributes:
        function: the public function that it starts with; empty if several share it.
        topic: the heading for it if several functions share it.
        kind: the class of the error, or "Warning".
        text: what it says.
        fix: what to do.
    """

    function: str
    topic: str
    kind: str
    text: str
    fix: str


class Module:
    """The code of a file, in which the text of messages is looked up."""

    def __init__(self, path: Path) -> None:
        """Read and parse a file."""
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        names = path.stem, path.parent.name
        self.topic = next((HEADINGS[x] for x in names if x in HEADINGS), OTHER)
        every = [x for x in ast.walk(self.tree) if isinstance(x, ast.FunctionDef)]
        self.scopes = [self.tree, *every]
        self.functions = {x.name: x for x in every}

    def messages(self) -> Iterator[Message]:
        """Yield the messages in order."""
        for function in self.scopes:
            for node in own_nodes(function):
                for kind, argument in raised(node):
                    for text in self.texts(argument, function):
                        yield message(kind, text, self.topic)
            if getattr(function, "name", "") in MAKERS:
                for node in own_nodes(function):
                    if isinstance(node, ast.JoinedStr):
                        (text,) = self.texts(node, function)
                        yield message("Warning", f"amp: {text}", self.topic)

    def texts(
        self, node: ast.AST, scope: ast.AST, without: frozenset[str] = frozenset()
    ) -> list[str]:
        """Return what an expression can say, looking up variables and functions.

        Those in `without` are being looked up.
        """
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [node.value]
        if isinstance(node, ast.JoinedStr):
            first, *rest = node.values
            start = self.start(first, scope, without)
            return [start + "".join(self.part(x, scope, without) for x in rest)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self.part(x, scope, without) for x in (node.left, node.right)]
            return ["".join(sides)]
        values: list[ast.AST] = []
        name = ast.unparse(getattr(node, "func", node)).rpartition(".")[2]
        if name in without:
            return []
        if isinstance(node, ast.ListComp | ast.Subscript):
            values = [node.elt if isinstance(node, ast.ListComp) else node.value]
        elif isinstance(node, ast.IfExp):
            values = [node.body, node.orelse]
        elif isinstance(node, ast.Name):
            values = assigned(name, scope) or assigned(name, self.tree)
        elif isinstance(node, ast.Call):
            scope = self.functions.get(name, self.tree)
            values = returned(scope)
        inside = without | {name}
        return [x for value in values for x in self.texts(value, scope, inside)]

    def start(self, node: ast.AST, scope: ast.AST, without: frozenset[str]) -> str:
        """Return the first part of a text, which another function may have begun."""
        if not isinstance(node, ast.FormattedValue):
            return self.part(node, scope, without)
        name = ast.unparse(node.value)
        is_own = not name.isidentifier() or name in without or assigned(name, scope)
        found = [] if is_own else [x for y in self.scopes for x in assigned(name, y)]
        inside = without | {name}
        texts = {x for value in found for x in self.texts(value, self.tree, inside)}
        begun = [x for x in texts if re.match(r"(\w+|‹caller›): ", x)]
        return begun[0] if len(begun) == 1 else self.part(node, scope, without)

    def part(self, node: ast.AST, scope: ast.AST, without: frozenset[str]) -> str:
        """Return a part of a text; what is not in the code, in words."""
        inside = node.value if isinstance(node, ast.FormattedValue) else node
        found = list(dict.fromkeys(self.texts(inside, scope, without)))
        if len(found) == 1:
            return found[0]
        words = " / ".join(x.strip() or "nothing" for x in found)
        is_short = found and len(words) < MOST_CHARACTERS and "‹" not in words
        return f"‹{words if is_short else in_words(inside)}›"


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef):
            yield node
            yield from own_nodes(node)


def raised(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield (class of error, or "Warning"; its text) if a node raises or warns."""
    call = node.exc if isinstance(node, ast.Raise) else node
    if not (isinstance(call, ast.Call) and call.args):
        return
    name = ast.unparse(call.func).rpartition(".")[2]
    if isinstance(node, ast.Raise):
        yield name if name[0].isupper() else "Error", call.args[0]
    elif name == "warn":
        yield "Warning", call.args[0]


def assigned(name: str, scope: ast.AST) -> list[ast.AST]:
    """Return what a function or a module assigns to a variable."""
    found: list[ast.AST] = []
    for node in own_nodes(scope):
        if not isinstance(node, ast.Assign | ast.NamedExpr):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name) and target.id == name:
            found.append(node.value)
    return found


def returned(function: ast.AST) -> list[ast.AST]:
    """Return what a function returns."""
    if not isinstance(function, ast.FunctionDef):
        return []
    found = [x.value for x in own_nodes(function) if isinstance(x, ast.Return)]
    return [x for x in found if x is not None]


def in_words(node: ast.AST) -> str:
    """Return words for what is only known when a message is raised."""
    names = [
        x.id if isinstance(x, ast.Name) else x.attr
        for x in ast.walk(node)
        if isinstance(x, ast.Name | ast.Attribute)
    ]
    for name in names:
        if name in WORDS:
            return WORDS[name]
    words = [x for x in names if x not in NO_WORDS] or names or ["…"]
    return words[0].strip("_").lower().replace("_", " ")


def message(kind: str, text: str, topic: str) -> Message:
    """Split a text into the function, what is wrong, and what to do."""
    text = " ".join(text.split())
    function, colon, rest = text.partition(": ")
    named = re.fullmatch(r"(\w+)(\(.*\))?|‹(name|caller)›", function)
    if colon and named and function != "optax_mp":
        text = rest
    function = function if colon and named and function.isidentifier() else ""
    function = "" if function == "optax_mp" else function
    # The fix comes behind the word "expected", or else behind the fault.
    start = max(0, text.lower().find("expected"))
    hidden = re.sub(r"\([^()]*\)|`[^`]*`", lambda x: "_" * len(x[0]), text)
    end = re.search(r"(?:; |\. |: (?=put|pass|use|call))(?=.)", hidden[start:])
    if end is None:
        return Message(function, topic, kind, text, "")
    wrong, fix = text[: start + end.start()], text[start + end.end() :]
    return Message(function, topic, kind, wrong + ".", fix[0].upper() + fix[1:])


def page() -> str:
    """Return the page; raise if an explanation is for no message."""
    paths = sorted(PACKAGE.rglob("*.py"))
    every = [x for path in paths for x in Module(path).messages()]
    # Errors that JAX or this package catches itself have neither.
    every = [
        x
        for x in dict.fromkeys(every)
        if (x.fix or "expected" in x.text) and len(x.text) > 9
    ]
    unused = [
        x for x in EXPLANATIONS if not any(x in f"{y.text} {y.fix}" for y in every)
    ]
    if unused:
        raise ValueError(f"EXPLANATIONS: no message has the words {unused}")
    lines = [HEAD]
    for function in sorted({x.function for x in every if x.function}, key=str.lower):
        lines.append(f"## `{function}`\n")
        lines += [in_markdown(x) for x in every if x.function == function]
        lines.append("")
    lines.append(f"## {SHARED}\n")
    shared = {x.topic for x in every if not x.function}
    for topic in [x for x in (*HEADINGS.values(), OTHER) if x in shared]:
        lines.append(f"### {topic}\n")
        lines += [in_markdown(x) for x in every if (x.function, x.topic) == ("", topic)]
        lines.append("")
    return "\n".join(lines)


def in_markdown(each: Message) -> str:
    """Return an item of a list."""
    text, fix = (without_markup(x) for x in (each.text, each.fix))
    whole = f"{each.text} {each.fix}"
    more = [" ".join(y.split()) for x, y in EXPLANATIONS.items() if x in whole]
    parts = [f"*Fix:* {fix}"] * bool(fix) + list(map(without_markup, more))
    return "\n\n  ".join([f"- **{each.kind}**: {text}", *parts])


def without_markup(text: str) -> str:
    """Escape what Markdown would read as markup, outside of code."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*<_\[\]])", r"\\\1", x) for x in parts[::2]]
    return "`".join(parts)


if __name__ == "__main__":
    print(page(), end="")
