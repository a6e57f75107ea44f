"""How settings are read: YAML files, dotted overrides, and faults explained as field, value, remedy.

Which settings there are is in the files beside this one.
"""

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ConfigDict
from yaml.constructor import ConstructorError


class ConfigError(ValueError):
    """Bad input. The message is complete: field, value, remedy."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True,
                              coerce_numbers_to_str=True)


class OnceOnly(yaml.SafeLoader):
    """A key that stands twice in a mapping is a fault: YAML would take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConstructorError(None, None, f"{key.value!r} stands twice in one mapping", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping of parts; an empty file is an empty mapping."""
    try:
        content = yaml.load(path.read_text(), OnceOnly)
    except FileNotFoundError:
        raise ConfigError(f"config: there is no file {path}. Give a YAML file, as jobs/quickstart.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} cannot be read ({error}). Give a readable YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not valid YAML. Mend it at the place named here: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config: {path} holds a {type(content).__name__}. It must be a mapping of parts, as `run:`")
    return content


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`--part.field value` or `--part.field=value`."""
    result: dict[str, Any] = {}
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or "." not in word:
            raise ConfigError(f"command line: {word!r} is not understood. Overrides are written --part.field value")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not words:
                raise ConfigError(f"command line: --{name} has no value. Write --{name} VALUE")
            text = words.pop(0)
        place = result
        *parents, last = name.replace("-", "_").split(".")
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"command line: --{name} goes into {parent}, which another override made a value")
        place[last] = override_value(text)
    return result


def override_value(text: str) -> Any:
    """Lists, mappings and null as in YAML; numbers, true and false as in JSON; all else is text. What YAML makes of a
    name (`2026-12-01` a date, `on` a truth, `010` an eight) was never meant on a command line."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if value is None or isinstance(value, (list, dict)):
        return value
    try:
        return json.loads(text)
    except ValueError:
        return value if isinstance(value, str) else text


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with what `over` gives, mapping by mapping."""
    both = {**base, **over}
    for key in base.keys() & over.keys():
        if isinstance(base[key], dict) and isinstance(over[key], dict):
            both[key] = merged(base[key], over[key])
    return both


def explain(settings: type[BaseModel], item: Any) -> str:
    """One fault as `field: what is wrong with which value. Remedy`."""
    field = ".".join(str(part) for part in item["loc"]) or "config"
    value = item.get("input")
    shown = repr(value if not isinstance(value, dict) or len(str(value)) < 80 else "{...}")
    match item["type"]:
        case "extra_forbidden":
            known = _fields_at(settings, item["loc"][:-1])
            close = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(sorted(known))}"
            return f"{field}: there is no such field (value {shown}). {hint}"
        case "value_error":
            said = str(item["ctx"]["error"])  # many name their field themselves, and more precisely
            return said if field == "config" or said.startswith(f"{field}.") else f"{field}: {said}"
        case "literal_error":
            return f"{field}: {shown} is not one of {item['ctx']['expected']}. Take one of these"
        case _:
            return f"{field}: {item['msg']}, not {shown}. Change it in the file or with --{field} VALUE"


def _fields_at(settings: type[BaseModel], location: tuple) -> list[str]:
    """Field names of the part at `location`."""
    for part in location:
        field = settings.model_fields.get(part)
        options = [field.annotation, *get_args(field.annotation)] if field else []
        inner = next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)
        if inner is None:
            return []
        settings = inner
    return list(settings.model_fields)
