"""Finds the modules behind environment and harness ids, in the form in which verifiers loads them.

verifiers resolves a plugin by a top-level module name, so a dotted module (`meshrl.environments.harness`, or one
inside a user's own package) is imported here once and entered in `sys.modules` under its name with underscores;
verifiers then finds that very module. Nothing is loaded twice and nothing of verifiers is changed.
"""

from __future__ import annotations

import importlib
import sys

BUNDLED = {
    "reverse_text": "meshrl.environments.reverse_text",
}
"""Short names of the tasksets in this package."""


def plugin_id(module_id: str) -> str:
    """Returns the id under which verifiers finds `module_id`: a bundled short name, a dotted module, or an id of its
    own.

    Raises ModuleNotFoundError when a bundled or dotted module does not exist.
    """
    short = module_id.replace("-", "_").lower()
    dotted = BUNDLED.get(short, module_id)
    if "." not in dotted or "/" in dotted:
        return module_id
    module = importlib.import_module(dotted)
    alias = dotted.replace(".", "_").lower()
    sys.modules.setdefault(alias, module)
    return alias
