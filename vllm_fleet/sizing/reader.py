"""Reading a config.json: needed keys by any of their names, with clear complaints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_fleet.jsontext import parsed

from .errors import SizingError

#: Larger numbers are mistakes in a config.json, not models.
MOST, MOST_LAYERS = 10**8, 1000
LAYER_COUNTS = frozenset(
    {
        "num_hidden_layers",
        "num_layers",
        "depth",
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
    }
)


class Keys:
    """A mapping of a config with its place in the file, for messages."""

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "config.json",
        defaults: Mapping[str, Any] | None = None,
        defaulted: list[str] | None = None,
    ) -> None:
        self.data = data
        self.where = where
        self.defaults = defaults or {}
        #: keys that were absent and taken from the model class's published defaults
        self.defaulted = defaulted if defaulted is not None else []

    def get(self, *names: str, default: Any = None) -> Any:
        """The first name that is there and not null."""
        for name in names:
            if self.data.get(name) is not None:
                return self.data[name]
        for name in names:
            if self.defaults.get(name) is not None:
                if name not in self.defaulted:
                    self.defaulted.append(name)
                return self.defaults[name]
        return default

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least``; refused when missing or of another kind."""
        value = self.get(*names, default=default)
        if value is None:
            other = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise SizingError(
                f"{self.where}: key {names[0]!r}{other} is missing; the model cannot be sized "
                "without it. Fetch the config.json of the repository again; it is incomplete."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SizingError(
                f"{self.where}: {names[0]}: {value!r} is not a whole number of {least} or more."
            )
        most = MOST_LAYERS if names[0] in LAYER_COUNTS else MOST
        if value > most:
            raise SizingError(f"{self.where}: {names[0]}: {value} is more than any model has.")
        return value

    def maybe(self, *names: str) -> int | None:
        """A whole number of 1 or more, or None where it is absent, null or 0."""
        value = self.get(*names)
        if value is None or (value == 0 and not isinstance(value, bool)):
            return None
        return self.number(*names)

    def share(self, name: str, value: Any) -> float:
        """``value`` of key ``name`` as a number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MOST:
            raise SizingError(f"{self.where}: {name}: {value!r} is not a number above 0.")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        """A true or false value."""
        value = self.get(*names, default=default)
        if not isinstance(value, bool):
            raise SizingError(f"{self.where}: {names[0]}: {value!r} is neither true nor false.")
        return value

    def names(self, name: str) -> list[str] | None:
        """A list of texts."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise SizingError(f"{self.where}: {name}: a list of names is wanted.")
        return value

    def inner(self, name: str) -> Keys | None:
        """A nested mapping, or None."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise SizingError(f"{self.where}: {name}: a mapping is wanted, not {value!r}.")
        return Keys(value, f"{self.where}: {name}", None, self.defaulted)


def load_config(path: str | Path) -> tuple[dict[str, Any], Path | None]:
    """config.json of a file or a weights directory, and the directory when it is one.

    ``hf_quant_config.json`` beside it is put in as ``quantization_config`` when the config has
    none. Raises SizingError for GGUF, missing or unreadable files.
    """
    place = Path(path)
    if place.suffix == ".gguf" or (
        place.is_dir() and any(place.glob("*.gguf")) and not (place / "config.json").exists()
    ):
        raise SizingError(
            f"{place}: GGUF weights are not sized (vLLM serves them only as an experiment). Use "
            "the original safetensors repository of the model."
        )
    directory = place if place.is_dir() else None
    file = place / "config.json" if directory else place
    if not file.is_file():
        what = "has no config.json" if directory else "does not exist"
        raise SizingError(f"{place} {what}. Give a config.json or a directory with weights.")
    try:
        data = parsed(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SizingError(f"{file}: not readable as JSON: {error}. Fetch it again.") from error
    if not isinstance(data, dict):
        raise SizingError(f"{file}: a JSON object is wanted.")
    if "quantization_config" not in data:
        beside = file.with_name(f"{file.name.removesuffix('config.json')}hf_quant_config.json")
        if beside.is_file():
            try:
                quant = parsed(beside.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise SizingError(
                    f"{beside}: not readable as JSON: {error}. Fetch it again."
                ) from error
            if isinstance(quant, dict):
                inner = quant.get("quantization", quant)
                data = {**data, "quantization_config": {"quant_method": "modelopt", **inner}}
    return data, directory
