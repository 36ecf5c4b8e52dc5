"""Lists the members of transformers' modules, to see whether something replaces one."""

import sys


def members():
    """Returns {name: identity} of the members of transformers' modules and classes, and of the entries of their tables."""
    identities = {}
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "transformers"]:
        for name, value in list(vars(module).items() if module is not None else ()):
            where = f"{module.__name__}.{name}"
            if type(value) is dict and not name.startswith("__"):
                identities |= {f"{where}[{key}]": id(entry) for key, entry in value.items()}
            if not callable(value) or getattr(value, "__module__", None) != module.__name__:
                continue
            identities[where] = id(value)
            if isinstance(value, type):
                identities |= {f"{where}.{key}": id(member) for key, member in vars(value).items()}
    return identities


def changed_members(before):
    """Returns the names of members that were replaced or removed since `before`."""
    after = members()
    return sorted(name for name in before if after.get(name) != before[name])
