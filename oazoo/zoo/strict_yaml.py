"""YAML of plain values, without what makes it ambiguous or large: repeated keys and aliases are refused."""

from __future__ import annotations

from typing import Any

import yaml
from yaml import YAMLError

__all__ = ["YAMLError", "load_yaml"]


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses repeated keys (YAML keeps the last one silently) and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} appears twice")
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """The values of a document.

    Raises:
        YAMLError: no YAML, a key that comes twice, an alias, or a value that is not plain.
    """
    return yaml.load(text, Loader=_StrictLoader)
