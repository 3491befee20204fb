"""A configuration file of transformers, and the model class that it is of; nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.hugging_face.small import merged
from pytest_fxbucket.errors import PlanError, UsageError, named

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HEADS = (
    *("IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM"),
    *("ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION"),
    *("SEMANTIC_SEGMENTATION", "SEQUENCE_CLASSIFICATION", "PRETRAINING"),
)
"""Tasks to look for a model class in, in this order, if ``architectures`` names none: ``MODEL_FOR_..._MAPPING``."""


@dataclass(frozen=True)
class DescribedModel:
    """What a configuration file describes."""

    path: Path
    config: PreTrainedConfig
    model_class: type[PreTrainedModel]

    @property
    def values(self) -> dict[str, Any]:
        """Every field, as JSON has it: keys are text, sequences lists."""
        plain: dict[str, Any] = as_json(self.config.to_dict())
        return plain

    def with_changes(self, changes: Mapping[str, Any]) -> PreTrainedConfig:
        """The configuration with ``changes``, table by table."""
        return type(self.config).from_dict(merged(self.config.to_dict(), changes))


def as_json(value: Any) -> Any:
    """``value`` with text for keys and lists for sequences; infinities stay numbers."""
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, list | tuple) else value


def described_by(given: Path) -> DescribedModel:
    """What ``given``, a JSON file or a folder with a ``config.json``, describes.

    Raises :class:`UsageError` for what is no such file, :class:`PlanError` for a model that transformers does not have.
    """
    path = given / "config.json" if given.is_dir() else given
    written = _json(path)
    transformers = _transformers()
    kind = written.get("model_type")
    if not isinstance(kind, str):
        raise UsageError(f'--hf {path} has no "model_type", so it is no configuration of transformers; expected a config.json')
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    if kind not in CONFIG_MAPPING_NAMES:
        close = get_close_matches(kind, list(CONFIG_MAPPING_NAMES), n=1)
        hint = f'; the nearest that it has is "{close[0]}"' if close else ""
        own = "; its code is elsewhere (auto_map): write a factory for it, and give that to fxbucket init" * (
            "auto_map" in written
        )
        raise PlanError(f'{path}: transformers {transformers.__version__} has no model_type "{kind}"{own or hint}')
    try:
        config = CONFIG_MAPPING[kind].from_json_file(path)
    except Exception as error:  # whatever a configuration raises on values that it does not take
        raise PlanError(f"{path}: {CONFIG_MAPPING[kind].__name__} does not take it: {named(error)}") from error
    model_class = _model_class(config, written, path)
    if getattr(model_class, "is_dummy", False):  # what transformers has in the place of a class whose libraries are missing
        lacking = " and ".join(model_class._backends)
        raise PlanError(f"{path}: {model_class.__name__} needs {lacking}, which cannot be imported; install what it needs")
    return DescribedModel(path, config, model_class)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--hf {path} cannot be read: {error.strerror or error}; expected a folder or JSON of a config"
        ) from error
    except ValueError as error:
        raise UsageError(f"--hf {path} is no JSON: {error}; expected a folder or JSON of a config") from error
    if not isinstance(found, dict):
        raise UsageError(f"--hf {path} is a JSON {type(found).__name__}, where an object with a model_type was expected")
    return found


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            f"--hf needs transformers, which cannot be imported ({error}); pip install 'pytest-fxbucket[models]'"
        ) from error
    return transformers


def _model_class(config: PreTrainedConfig, written: Mapping[str, Any], path: Path) -> type[PreTrainedModel]:
    """The class that ``architectures`` names first, or the first that fits."""
    import transformers
    from transformers.models.auto import modeling_auto

    for name in written.get("architectures") or ():
        try:
            found = getattr(transformers, name, None)
        except (ImportError, RuntimeError) as error:  # imported at this first use, with whatever its file needs
            raise _not_imported(path, f'"{name}"', error) from error
        if found is None:
            close = get_close_matches(name, dir(transformers), n=1)
            hint = f'; the nearest that it has is "{close[0]}"' if close else ""
            raise PlanError(
                f'{path}: architectures names "{name}", which transformers {transformers.__version__} has not{hint}'
            )
        return found  # type: ignore[no-any-return]  # transformers has no types here
    for head in (*(f"MODEL_FOR_{one}_MAPPING" for one in _HEADS), "MODEL_MAPPING"):
        mapping = getattr(modeling_auto, head)
        if type(config) in mapping:
            try:
                cls = mapping[type(config)]
            except (ImportError, RuntimeError) as error:
                raise _not_imported(path, f"its model for {type(config).__name__}", error) from error
            return cls[0] if isinstance(cls, tuple) else cls  # type: ignore[no-any-return]  # transformers has no types here
    raise PlanError(f'{path}: transformers has no model for {type(config).__name__}; name one in "architectures"')


def _not_imported(path: Path, what: str, error: Exception) -> PlanError:
    return PlanError(f"{path}: transformers cannot import {what}: {' '.join(str(error).split())[:200]}")
