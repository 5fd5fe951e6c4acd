"""Optional libraries, imported when they are needed."""

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """Import a module of an extra, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        root = module.split(".")[0]
        raise ImportError(f"{root} is missing: pip install 'gspmd_mcmc[{extra}]' brings it") from error
