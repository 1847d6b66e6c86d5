"""Blocks of the guide, to be tested further than that they run."""

import pathlib
import re

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guide"


def names_of(page, name):
    """Run the block of a page that defines `name`, and return all that it defines."""
    blocks = re.findall(
        r"```python\n(.*?)```", (GUIDE / page).read_text(encoding="utf-8"), re.DOTALL
    )
    (block,) = [b for b in blocks if re.search(rf"^(class|def) {name}\(", b, re.M)]
    names = {"__name__": "guide"}
    exec(block, names)
    return names
