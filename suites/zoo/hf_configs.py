"""Configurations of many architectures, of published sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pytest_fxbucket.cli.hugging_face.read_config import as_json


@dataclass(frozen=True)
class Configured:
    """A configuration, and the outcome that it must have."""

    config: str
    """Of its class, less ``Config``."""
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    told: str | None = None
    """What init must say, as an expression; None: the plan passes."""

    def values(self) -> dict[str, Any]:
        """As in a ``config.json``."""
        import transformers

        config = getattr(transformers, f"{self.config}Config")(**self.settings)
        config.architectures = [self.model]
        values: dict[str, Any] = as_json(config.to_dict())
        return values


def _qwen_vl(text: str) -> dict[str, Any]:
    """Of both Qwen-VL, whose text models are told apart by their ``model_type``."""
    return {
        "image_token_id": 151655,
        "text_config": {
            "model_type": text,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
    }


CONFIGS = {
    "llama": Configured(
        "Llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "dtype": "bfloat16",
        },
    ),
    "llama_tied": Configured(
        "Llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    "mistral": Configured("Mistral", "MistralForCausalLM", {"dtype": "bfloat16"}),
    "qwen2": Configured(
        "Qwen2",
        "Qwen2ForCausalLM",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Configured(
        "Qwen3",
        "Qwen3ForCausalLM",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "gemma2": Configured("Gemma2", "Gemma2ForCausalLM", {}),
    "gemma3_text": Configured("Gemma3Text", "Gemma3ForCausalLM", {}),
    "phi3": Configured("Phi3", "Phi3ForCausalLM", {}),
    "gpt2": Configured("GPT2", "GPT2LMHeadModel", {}),
    "gpt_neox": Configured("GPTNeoX", "GPTNeoXForCausalLM", {}),
    "opt": Configured("OPT", "OPTForCausalLM", {}),
    "bloom": Configured("Bloom", "BloomForCausalLM", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "mixtral": Configured("Mixtral", "MixtralForCausalLM", {}),
    "qwen2_moe": Configured("Qwen2Moe", "Qwen2MoeForCausalLM", {}),
    "qwen3_moe": Configured(
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    ),
    "deepseek_v3": Configured("DeepseekV3", "DeepseekV3ForCausalLM", {}),
    "gpt_oss": Configured("GptOss", "GptOssForCausalLM", {}),
    "bert": Configured("Bert", "BertForMaskedLM", {}),
    "roberta": Configured("Roberta", "RobertaForMaskedLM", {}),
    "deberta_v2": Configured(
        "DebertaV2",
        "DebertaV2ForMaskedLM",
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 256},
    ),
    "t5": Configured("T5", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}),
    "bart": Configured("Bart", "BartForConditionalGeneration", {}),
    "mamba": Configured("Mamba", "MambaForCausalLM", {}),
    "mamba2": Configured("Mamba2", "Mamba2ForCausalLM", {}),
    "jamba": Configured("Jamba", "JambaForCausalLM", {}),
    "qwen3_next": Configured("Qwen3Next", "Qwen3NextForCausalLM", {}),
    "modernbert": Configured("ModernBert", "ModernBertForMaskedLM", {}),
    "vit": Configured("ViT", "ViTForImageClassification", {}),
    "swin": Configured("Swin", "SwinForImageClassification", {}),
    "convnext": Configured("ConvNext", "ConvNextForImageClassification", {}),
    "dinov2": Configured("Dinov2", "Dinov2Model", {}),
    "clip": Configured("CLIP", "CLIPModel", {}),
    "siglip": Configured("Siglip", "SiglipModel", {}),
    "segformer": Configured("Segformer", "SegformerForSemanticSegmentation", {}),
    "resnet": Configured("ResNet", "ResNetForImageClassification", {}),
    "vit_mae": Configured("ViTMAE", "ViTMAEForPreTraining", {}),
    "whisper": Configured("Whisper", "WhisperForConditionalGeneration", {}),
    "wav2vec2": Configured("Wav2Vec2", "Wav2Vec2ForCTC", {}),
    "hubert": Configured("Hubert", "HubertForCTC", {}),
    "ast": Configured("AST", "ASTForAudioClassification", {}),
    "llava": Configured("Llava", "LlavaForConditionalGeneration", {"image_token_index": 31999}),
    "qwen2_vl": Configured(
        "Qwen2VL",
        "Qwen2VLForConditionalGeneration",
        _qwen_vl("qwen2_vl_text"),
        told="image_grid_thw",
    ),
    "qwen2_5_vl": Configured(
        "Qwen2_5_VL",
        "Qwen2_5_VLForConditionalGeneration",
        _qwen_vl("qwen2_5_vl_text"),
        told="image_grid_thw",
    ),
    "idefics3": Configured(
        "Idefics3",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "llama",
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "vocab_size": 128259,
            }
        },
        told="no padding is told by values",
    ),
    "gemma3": Configured(
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
            }
        },
    ),
    "paligemma": Configured("PaliGemma", "PaliGemmaForConditionalGeneration", {}),
    "blip2": Configured(
        "Blip2",
        "Blip2ForConditionalGeneration",
        {
            "image_token_index": 50265,
            "text_config": {
                "model_type": "opt",
                "vocab_size": 50304,
                "hidden_size": 2560,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "ffn_dim": 10240,
                "word_embed_proj_dim": 2560,
            },
        },
    ),
    "smolvlm": Configured("SmolVLM", "SmolVLMForConditionalGeneration", {}, told="no padding is told by values"),
    "internvl": Configured("InternVL", "InternVLForConditionalGeneration", {}),
    "qwen2_audio": Configured("Qwen2Audio", "Qwen2AudioForConditionalGeneration", {}, told="other inputs"),
    "mllama": Configured("Mllama", "MllamaForConditionalGeneration", {}, told="aspect_ratio_ids"),
    "detr": Configured("Detr", "DetrForObjectDetection", {}, told="timm"),
}
