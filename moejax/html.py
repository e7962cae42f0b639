"""Pages that are one HTML file: a template, with scripts and data in it."""

import json
import re
from pathlib import Path
from typing import Any


def filled(template: Path, **parts: str) -> str:
    """Returns a template in which each {{NAME}} is the part of that name."""
    text = template.read_text("utf-8")
    return re.sub(r"{{([A-Z]+)}}", lambda match: parts[match[1]], text)


def embed(data: Any) -> str:
    """Returns JSON that is safe in a script element: it begins no tag and no comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
