"""Optional libraries, imported when they are needed."""

import importlib
import importlib.util
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import a module of an extra; raise an ImportError that says how to get it if it is missing."""
    require(module, extra=extra)
    return importlib.import_module(module)


def require(*modules: str, extra: str) -> None:
    """Raise an ImportError unless the libraries of these modules are installed; import nothing."""
    for root in (module.split(".")[0] for module in modules):
        if importlib.util.find_spec(root) is None:
            raise ImportError(f"{root} is missing: pip install 'gspmd_mcmc[{extra}]' brings it")
