"""How the documentation is built: without a network, warnings being errors.

The command is `sphinx-build -W --keep-going -n -b html docs docs/_build`.
"""

import ast
import inspect
import re
import runpy
import shutil
import sys
import textwrap
import tomllib
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.transforms import SphinxTransform

import optax_mp

HERE = Path(__file__).parent

project = "optax_mp"
author = "The optax_mp developers"
copyright = author
release = version = optax_mp.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "myst_nb",
]
exclude_patterns = ["_build", "jupyter_execute", "**.ipynb_checkpoints"]

# Docstrings are written with single backticks for code, as in Markdown.
# Names of this package become links; see `_other_name`.
default_role = "py:obj"
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
# Notebooks are committed with the outputs of the tests that run them.
nb_execution_mode = "off"

html_theme = "sphinx_book_theme"
html_title = f"optax_mp {release}"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
# Known once `[project.urls]` is filled in: buttons to the source, and to run notebooks.
repository = tomllib.loads((HERE.parent / "pyproject.toml").read_text("utf-8"))
repository = repository["project"]["urls"]["Repository"]
if repository.startswith("https://github.com/"):
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": "main",
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# For `-b linkcheck`, which needs a network. Lines of code are no anchors there.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]


def _copy_notebooks() -> None:
    """Put the notebooks where Sphinx looks for pages; the folder is in .gitignore.

    Their links go from `notebooks` to other folders, and from the copies one more up.
    """
    copies = HERE / "notebooks"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
        text = notebook.read_text(encoding="utf-8").replace("](../", "](../../")
        (copies / notebook.name).write_text(text.replace("](../../docs/", "](../"))


def _write_messages() -> None:
    """Make the page of all errors and warnings from the code; it is in .gitignore."""
    page = runpy.run_path(str(HERE / "messages.py"))["page"]()
    (HERE / "messages.md").write_text(page, encoding="utf-8")


def _write_evidence() -> None:
    """Make the pages of data from the results of benchmarks; they are in .gitignore."""
    sys.path.insert(0, str(HERE.parent / "benchmarks" / "page"))
    import evidence

    evidence.write_data(HERE / "evidence")


def _short_signature(app, what, name, obj, options, signature, returns):
    """Return the signature of a function as its source has it, of a class untyped.

    Evaluated, a `DTypeLike` is a union of a dozen types, and optax's types are shown
    under the private modules that they come from.
    """
    del app, name, options
    if what == "class":
        untyped = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(obj).parameters.values()
        ]
        return str(inspect.Signature(untyped)), None
    if what not in ("function", "method") or not inspect.isfunction(obj):
        return signature, returns
    written = ast.parse(textwrap.dedent(inspect.getsource(obj))).body[0]
    if what == "method":
        written.args.args = written.args.args[1:]
    returned = written.returns and ast.unparse(written.returns)
    return f"({ast.unparse(written.args)})", returned


def _skip_fields(app, what, name, obj, skip, options):
    """Leave the fields of a NamedTuple to the docstring, which says what they are."""
    del app, what, name, options
    return True if type(obj).__name__ == "_tuplegetter" else skip


def _as_text(app, what, name, obj, options, lines):
    """Put back the first words of a property, which napoleon takes for a type."""
    del app, name, obj, options
    types = [line for line in lines if line.startswith(":type: ")]
    if what == "property" and types:
        lines.remove(types[0])
        lines[0] = f"{types[0].removeprefix(':type: ')}: {lines[0]}"


def _other_name(app, env, node, shown):
    """Show a name that is not of this package as plain code, without a warning.

    The docs of other projects are not fetched, so names of theirs have no target.
    """
    del app, env
    if node["refdomain"] != "py" or node["reftarget"].startswith("optax_mp."):
        return None
    if isinstance(shown, nodes.literal):
        shown["classes"] = []
    return shown


class _LinkNames(SphinxTransform):
    """Link names of the package in the text to the reference, once in each section."""

    default_priority = 500
    # `zero1` or `zero1(inner, mesh)`, but no nested calls.
    name = re.compile(r"(?:optax_mp\.)?(\w+)(?:\([^()]*\))?")
    linked = (nodes.reference, pending_xref, nodes.title)

    def apply(self):
        """Put references around the names."""
        seen = set()
        for literal in list(self.document.findall(nodes.literal)):
            name = self.name.fullmatch(literal.astext())
            if name is None or name[1] not in optax_mp.__all__:
                continue
            above = list(_ancestors(literal))
            section = next(
                x for x in above if isinstance(x, (nodes.section, nodes.document))
            )
            if (
                any(isinstance(x, self.linked) for x in above)
                or (section, name[1]) in seen
            ):
                continue
            seen.add((section, name[1]))
            link = pending_xref(
                refdomain="py",
                reftype="obj",
                reftarget=f"optax_mp.{name[1]}",
                refdoc=self.env.docname,
                refexplicit=True,
            )
            literal.replace_self(link)
            link += literal


def _allow_breaks(app, pagename, templatename, context, doctree):
    """Let code in text break behind brackets, commas, dots and `=`."""
    del app, pagename, templatename, doctree
    if "body" in context:
        context["body"] = re.sub(
            r'(?<=<span class="pre">)[^<]+',
            lambda code: re.sub(r"(?<=[\w)\]])([(\[,./=])(?=\w)", r"\1<wbr>", code[0]),
            context["body"],
        )


def _ancestors(node):
    while node.parent is not None:
        node = node.parent
        yield node


def _link_to_copies(app, docname, source):
    """Lead links to the notebooks, right in the repository, to their copies."""
    del app
    if docname.startswith("guide/"):
        source[0] = source[0].replace("](../../notebooks/", "](../notebooks/")
    elif not docname.startswith("notebooks/"):
        source[0] = source[0].replace("](../notebooks/", "](notebooks/")


def setup(app):
    """Register what is above."""
    _copy_notebooks()
    _write_messages()
    _write_evidence()
    app.connect("autodoc-process-signature", _short_signature)
    app.connect("autodoc-skip-member", _skip_fields)
    app.connect("autodoc-process-docstring", _as_text, priority=600)
    app.connect("source-read", _link_to_copies)
    app.connect("missing-reference", _other_name)
    app.connect("html-page-context", _allow_breaks)
    app.add_transform(_LinkNames)
