"""What a model of transformers is fed: the lines of a function that draws a batch, and the sizes that they need.

The model's own forward says what it takes, its name what it is trained for. Two rows for each rank, and few tokens: how many
there are changes no collective.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.cli.hugging_face.small import plain_range

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, LENGTH = 2, 32
GRID = 4
"""Patches along each side of an image that is a grid of them."""
_WAVE_FRAMES, _FRAMES = 25, 64
_CLASSES = {
    "ForSequenceClassification": ("(rows,)", ("classes", "rows")),
    "ForImageClassification": ("(rows,)", ("classes", "rows")),
    "ForAudioClassification": ("(rows,)", ("classes", "rows")),
    "ForVideoClassification": ("(rows,)", ("classes", "rows")),
    "ForTokenClassification": ("text", ("classes",)),
    "ForSemanticSegmentation": ("(image[0], *image[2:])", ("classes",)),
}
"""By the end of a model's name: the shape of its labels, and the sizes that drawing them needs."""
_TOKENS = ("MTModel", "LM", "LMHeadModel", "LMHead", "ForConditionalGeneration", "ForPreTraining", "ForSpeechToText")

Sizes = dict[str, Any]
"""Keyword arguments of the function that draws: numbers, and shapes."""


@dataclass(frozen=True)
class BatchSource:
    """How a batch is drawn."""

    lines: tuple[str, ...]
    """Of a function with a ``generator`` and :attr:`sizes`; they fill a dict ``drawn``."""
    sizes: Sizes
    gives_loss: bool
    """Whether the model computes its own loss of that batch."""


def fed(model_class: type[PreTrainedModel], values: Mapping[str, Any], image_tokens: int = 0) -> BatchSource:
    """What ``model_class`` with a configuration of ``values`` is fed; ``image_tokens`` stand for each image in the text."""
    takes = set(inspect.signature(model_class.forward).parameters)
    lines, sizes = [], Sizes()
    for line, more in _drawn(model_class, takes, values, image_tokens):
        lines.append(line)
        sizes |= more
    gives = any('"labels"' in line or '"start_positions"' in line or '"return_loss"' in line for line in lines)
    return BatchSource(
        tuple(lines), sizes, gives or model_class.__name__.endswith(("ForMaskedImageModeling", "ForPreTraining"))
    )


def keys_of(lines: Iterable[str]) -> list[str]:
    """Keys of the batch that ``lines`` draw."""
    return list(dict.fromkeys(key for line in lines for key in re.findall(r'^drawn\["(\w+)"\]', line)))


def has_image_tokens(model_class: type[PreTrainedModel], values: Mapping[str, Any]) -> bool:
    """Whether images stand in the text as tokens."""
    return hasattr(model_class, "get_image_features") and image_token(values) is not None


def image_token(values: Mapping[str, Any]) -> int | None:
    """The token that stands for a part of an image."""
    found: int | None = values.get("image_token_id", values.get("image_token_index"))
    return found


def _drawn(
    model_class: type[PreTrainedModel], takes: set[str], values: Mapping[str, Any], image_tokens: int
) -> Iterator[tuple[str, Sizes]]:
    name, main = model_class.__name__, model_class.main_input_name
    if "input_ids" in takes:
        yield from _text(values, takes, image_tokens)
    if "image_grid_thw" in takes:
        yield from _patches(values)
    elif "pixel_values" in takes and not _is_text_alone(model_class, values):
        shape = _pixels(name, values)
        yield 'drawn["pixel_values"] = torch.randn(image, generator=generator)', {"image": shape}
    if main in ("input_values", "input_features") or ("input_features" in takes and "audio_config" in values):
        key = main if main != "input_ids" else "input_features"
        yield f'drawn["{key}"] = torch.randn(sound, generator=generator)', {"sound": _sound(key, values)}
    if main not in ("input_ids", "pixel_values", "input_values", "input_features"):
        yield (
            f'drawn["{main}"] = torch.randn(rows, generator=generator)  # to be written: what the model takes',
            {"rows": (ROWS,)},
        )
    yield from _labels(name, takes, values, image_tokens)


def _is_text_alone(model_class: type[PreTrainedModel], values: Mapping[str, Any]) -> bool:
    return model_class.main_input_name == "input_ids" and _vision(values) is None


def _vision(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The configuration of the part that takes images; None if no part does."""
    found = next((values[key] for key in ("vision_config", "vision_cfg") if isinstance(values.get(key), Mapping)), None)
    return found or (values if "image_size" in values or "patch_size" in values else None)


def text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the part that takes and gives text."""
    names = ("text_config", "decoder", "language_config", "llm_config", "qformer_config")
    found = next((values[key] for key in names if isinstance(values.get(key), Mapping)), None)
    # A configuration that has a vocabulary itself is the text's, whatever parts it has.
    return values if found is None or values.get("vocab_size") else text_values(found)


def _text(values: Mapping[str, Any], takes: set[str], image_tokens: int) -> Iterator[tuple[str, Sizes]]:
    text = text_values(values)
    low, high = plain_range(values, int(text.get("vocab_size") or 256))
    positions = [text[key] for key in ("max_position_embeddings", "n_positions", "max_target_positions") if text.get(key)]
    positions = [one for one in positions if isinstance(one, int) and one > 0]
    length = min(LENGTH, *positions) if positions else LENGTH
    shape = (ROWS, length + image_tokens)
    yield "tokens = torch.randint(*plain, text, generator=generator)", {"plain": (low, high), "text": shape}
    if image_tokens:
        line = "tokens[:, 1 : 1 + image_tokens] = image_token  # where the image stands in the text"
        yield line, {"image_tokens": image_tokens, "image_token": image_token(values)}
    if "labels" not in takes and isinstance(text.get("eos_token_id"), int):
        yield "tokens[:, -1] = end  # where a text is summed up", {"end": text["eos_token_id"]}
    yield 'drawn["input_ids"] = tokens', {}
    for key in ("token_type_ids", "mm_token_type_ids"):
        if key in takes and image_tokens:
            yield f'drawn["{key}"] = (tokens == image_token).long()', {}


def _pixels(name: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    sees = _vision(values) or {}
    size = sees.get("image_size") or values.get("image_size") or sees.get("pretrained_img_size") or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = next((int(sees[key]) for key in ("num_channels", "in_channels", "in_chans") if sees.get(key)), 3)
    # These take several images with each text, which is one more dimension.
    if name.startswith(("Idefics", "SmolVLM")):
        return (ROWS, 1, channels, height, width)
    if "num_frames" in sees:
        return (ROWS, int(sees["num_frames"]), channels, height, width)
    return (ROWS, channels, height, width)


def _patches(values: Mapping[str, Any]) -> Iterator[tuple[str, Sizes]]:
    """Images as rows of patches, and a grid that says where the patches lie."""
    sees = _vision(values) or {}
    channels = next((int(sees[key]) for key in ("in_channels", "in_chans", "num_channels") if sees.get(key)), 3)
    patch = channels * sees.get("temporal_patch_size", 2) * sees.get("patch_size", 14) ** 2
    yield 'drawn["pixel_values"] = torch.randn(patches, generator=generator)', {"patches": (ROWS * GRID**2, patch)}
    yield 'drawn["image_grid_thw"] = torch.tensor(grid)', {"grid": ((1, GRID, GRID),) * ROWS}


def _sound(key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    hears = values.get("audio_config") or values
    mels = next(
        (hears[one] for one in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim") if one in hears), 0
    )
    if key == "input_features":
        # A Whisper has bins before frames, and exactly two frames for each position, since a convolution halves them.
        frames = 2 * hears["max_source_positions"] if hears.get("max_source_positions") else _FRAMES
        by_bin = "max_source_positions" in hears and "input_feat_per_channel" not in hears
        return (ROWS, mels, min(frames, 3000)) if by_bin else (ROWS, min(frames, 3000), mels)
    if mels and hears.get("max_length"):
        return (ROWS, hears["max_length"], mels)
    # A raw wave: the strides' product is the samples of a frame, and 400 is what wav2vec 2.0 sees of it at once.
    return (ROWS, _WAVE_FRAMES * prod(hears.get("conv_stride") or [320]) + 400)


def _labels(name: str, takes: set[str], values: Mapping[str, Any], image_tokens: int) -> Iterator[tuple[str, Sizes]]:
    """Labels, by what the model's name says that it is trained for; nothing of a model without a loss."""
    classes = len(values.get("id2label") or (0, 1))
    if name.endswith("ForMaskedImageModeling"):
        sees = _vision(values) or {}
        sides, patch = sees.get("image_size", 224), sees.get("patch_size", 16)
        high, wide = sides if isinstance(sides, list) else (sides, sides)
        patches = (high // patch) * (wide // patch)
        yield 'drawn["bool_masked_pos"] = torch.rand(patches, generator=generator) < 0.5', {"patches": (ROWS, patches)}
    elif name.endswith("ForQuestionAnswering"):
        for key in ("start_positions", "end_positions"):
            yield f'drawn["{key}"] = torch.randint(text[1], text[:1], generator=generator)', {}
    elif "labels" in takes:
        for ends, (drawn, sizes) in _CLASSES.items():
            if name.endswith(ends):
                known = {"classes": classes, "rows": ROWS}
                yield f'drawn["labels"] = torch.randint(classes, {drawn}, generator=generator)', {k: known[k] for k in sizes}
                return
        yield from _written_labels(name, takes, values, image_tokens)
    elif "return_loss" in takes:
        yield 'drawn["return_loss"] = True', {}
    elif {"decoder_input_ids", "input_ids"} <= takes:
        yield 'drawn["decoder_input_ids"] = tokens.clone()', {}


def _written_labels(name: str, takes: set[str], values: Mapping[str, Any], image_tokens: int) -> Iterator[tuple[str, Sizes]]:
    """Labels that are tokens; none for CTC, whose loss looks at their values."""
    if name.endswith(_TOKENS) and "input_ids" in takes and values.get("is_encoder_decoder") is not True:
        yield 'drawn["labels"] = tokens.clone()', {}
        if image_tokens:
            yield 'drawn["labels"][:, 1 : 1 + image_tokens] = -100  # no loss of the image', {}
        if "next_sentence_label" in takes:
            yield 'drawn["next_sentence_label"] = torch.randint(2, text[:1], generator=generator)', {}
    elif name.endswith(_TOKENS):
        # Of the text only the first line's sizes are needed: the range of tokens, and the shape.
        _, sizes = next(_text(values, takes, 0))
        yield 'drawn["labels"] = torch.randint(*plain, text, generator=generator)', sizes
