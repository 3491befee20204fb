"""peft's adapters around small decoders of transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from suites.zoo.draws import labelled
from suites.zoo.hf_causal import COMMON, MASKS, as_traced, causal
from suites.zoo.shelf import Shelf

SHELF = Shelf("peft", __name__)


def tuned(config: str, **settings: Any) -> nn.Module:
    """A Llama with adapters of ``config``, drawn at random where peft would begin with zeros."""
    import peft

    model = peft.get_peft_model(causal("Llama", **COMMON), getattr(peft, config)(task_type="CAUSAL_LM", **settings))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
            assert name
    made: nn.Module = model
    return made


def add(name: str, config: str, refused: dict[str, str] | None = None, **settings: Any) -> None:
    SHELF.add(name, partial(tuned, config, **settings), labelled, rounds=MASKS, as_traced=as_traced, refused=refused or {})


LINEARS = ["q_proj", "v_proj"]
add("lora", "LoraConfig", r=4, target_modules=LINEARS, lora_dropout=0.1)
add("dora", "LoraConfig", r=4, target_modules=LINEARS, use_dora=True)
add("ia3", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
add("prompt_tuning", "PromptTuningConfig", num_virtual_tokens=4)
add("loha", "LoHaConfig", {"": r"q_proj .*value of a tensor"}, r=4, target_modules=LINEARS)
