"""What a matrix was before it was written in the public engine's layout, with F32 scales."""

import json
from collections.abc import Mapping

from colibri.errors import ContainerError, UsageError
from colibri.formats import Format
from colibri.shard import Shard
from colibri.strictjson import parse_object

KEY = "colibri"  # of __metadata__, in public files that colibri wrote


def hint_name(layer: int, projection: str) -> str:
    """The name under which all of a layer's experts share a hint."""
    return f"model.layers.{layer}.mlp.experts.{projection}"


def write_hints(forms: Mapping[str, Format]) -> dict[str, str]:
    """Metadata that says which format each of these matrices had."""
    text = {name: str(form) for name, form in sorted(forms.items())}
    return {KEY: json.dumps(text, separators=(",", ":"))}


def read_hints(shard: Shard) -> dict[str, Format]:
    """Formats by matrix name; empty for files that colibri did not write."""
    where = f"{shard.path}: __metadata__.{KEY}"
    text = shard.metadata.get(KEY, "{}").encode("utf-8", "surrogatepass")
    found = parse_object(text, where, ContainerError)
    try:
        return {name: Format.parse(text) for name, text in found.items()}
    except (UsageError, AttributeError) as why:
        raise ContainerError(f"{where}: {why}") from why
