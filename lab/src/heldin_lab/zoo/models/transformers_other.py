"""Hugging Face transformers that read images, sound, video, and several of these."""

from __future__ import annotations

from typing import Any

import torch

from heldin_lab.zoo.entry import Batch, Named

from .transformers_text import LENGTH, SIZE, SMALL, hugging_face

__all__ = ["ENTRIES"]

LAYERS: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
IMAGE = {**LAYERS, "image_size": 16, "patch_size": 4}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
SPEECH = {
    **LAYERS,
    "vocab_size": SIZE,
    "conv_dim": [8, 8],
    "conv_stride": [4, 2],
    "conv_kernel": [8, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "mask_time_prob": 0.3,
    "mask_feature_prob": 0.2,
    "mask_feature_length": 2,
    "mask_feature_min_masks": 0,
    "layerdrop": 0.0,
}
TOWER = {"text_config": {**SMALL, "projection_dim": 8}, "projection_dim": 8}


def images(m: int, size: int = 16) -> Named:
    return {"pixel_values": torch.randn(m, 3, size, size)}


def video(m: int) -> Batch:
    return {"pixel_values": torch.randn(m, 2, 3, 16, 16)}


def sound(m: int) -> Batch:
    return {"input_values": torch.randn(m, 200)}


def both(m: int) -> Batch:
    return {**images(m), "input_ids": torch.randint(3, SIZE, (m, LENGTH))}


def series(m: int) -> Batch:
    return {"past_values": torch.randn(m, 16, 2)}


PATCHED = {
    "num_input_channels": 2,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "patch_stride": 4,
    "d_model": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "ffn_dim": 32,
}

ENTRIES = [
    hugging_face("ViTForImageClassification", IMAGE, images),
    hugging_face("DeiTForImageClassification", IMAGE, images),
    hugging_face("BeitForImageClassification", {
        **IMAGE, "use_relative_position_bias": True
    }, images),
    hugging_face("Data2VecVisionForImageClassification", IMAGE, images),
    hugging_face("Dinov2ForImageClassification", {**IMAGE, "mlp_ratio": 2}, images),
    hugging_face("ViTMAEForPreTraining", {
        **IMAGE, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32,
    }, images),
    hugging_face("SwinForImageClassification", {**SWIN, "window_size": 2}, images),
    hugging_face("Swinv2ForImageClassification", {**SWIN, "window_size": 4}, images),
    hugging_face("ConvNextForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2
    }, images),
    hugging_face("ConvNextV2ForImageClassification", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2
    }, images),
    hugging_face("ResNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"
    }, images),
    hugging_face("RegNetForImageClassification", {
        "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8
    }, images),
    hugging_face("MobileNetV2ForImageClassification", {
        "depth_multiplier": 0.25, "image_size": 32
    }, lambda m: images(m, 32)),
    hugging_face("MobileViTForImageClassification", {
        "hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 8],
        "num_attention_heads": 2, "image_size": 64, "patch_size": 2,
    }, lambda m: images(m, 64)),
    hugging_face("SegformerForSemanticSegmentation", {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
        "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2], "decoder_hidden_size": 16,
    }, images),
    hugging_face("PvtForImageClassification", {
        "image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2], "sequence_reduction_ratios": [2, 2, 1, 1],
    }, lambda m: images(m, 32)),
    hugging_face("PoolFormerForImageClassification", {
        "hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3],
        "strides": [2, 2], "padding": [1, 1],
    }, images),
    hugging_face("LevitForImageClassification", {
        "image_size": 32, "hidden_sizes": [16, 16, 16], "num_attention_heads": [1, 2, 2],
        "depths": [1, 1, 1], "key_dim": [8, 8, 8],
        "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 2, 4, 2, 2]],
    }, lambda m: images(m, 32)),
    hugging_face("YolosForObjectDetection", {
        **IMAGE, "image_size": [16, 16], "num_detection_tokens": 3
    }, images),
    hugging_face("DPTForDepthEstimation", {
        **IMAGE, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8, "head_in_index": -1, "reassemble_factors": [2, 1, 1, 0.5],
    }, images),
    hugging_face("TimesformerForVideoClassification", {**IMAGE, "num_frames": 2}, video),
    hugging_face("VivitForVideoClassification", {
        **IMAGE, "num_frames": 2, "tubelet_size": [1, 4, 4]
    }, video),
    hugging_face("VideoMAEForVideoClassification", {
        **IMAGE, "num_frames": 2, "tubelet_size": 1
    }, video),
    hugging_face("Wav2Vec2ForCTC", SPEECH, sound, mixes=False),
    hugging_face("Wav2Vec2ForSequenceClassification", {
        **SPEECH, "classifier_proj_size": 8
    }, sound, mixes=False),
    hugging_face("HubertForCTC", SPEECH, sound, mixes=False),
    hugging_face("WavLMForCTC", SPEECH, sound, mixes=False),
    hugging_face("SEWForCTC", {**SPEECH, "squeeze_factor": 2}, sound, mixes=False),
    hugging_face("ASTForAudioClassification", {
        **LAYERS, "num_mel_bins": 16, "max_length": 24, "patch_size": 8, "frequency_stride": 8,
        "time_stride": 8,
    }, lambda m: {"input_values": torch.randn(m, 24, 16)}),
    hugging_face("WhisperForConditionalGeneration", {
        "vocab_size": SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "num_mel_bins": 8, "max_source_positions": 10,
        "max_target_positions": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }, lambda m: {
        "input_features": torch.randn(m, 8, 20), "decoder_input_ids": torch.randint(3, SIZE, (m, 5))
    }),
    hugging_face("Speech2TextForConditionalGeneration", {
        "vocab_size": SIZE, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32, "input_feat_per_channel": 8, "conv_channels": 16,
        "max_source_positions": 40, "max_target_positions": 40,
    }, lambda m: {
        "input_features": torch.randn(m, 20, 8), "decoder_input_ids": torch.randint(3, SIZE, (m, 5))
    }),
    hugging_face("CLIPVisionModelWithProjection", {**IMAGE, "projection_dim": 8}, images),
    hugging_face("CLIPTextModelWithProjection", {**SMALL, "projection_dim": 8}, lambda m: {
        "input_ids": torch.randint(3, SIZE, (m, LENGTH))
    }),
    hugging_face("CLIPModel", {**TOWER, "vision_config": {**IMAGE, "projection_dim": 8}}, both,
                 mixes=True),
    hugging_face("ViltForQuestionAnswering", {
        **IMAGE, "vocab_size": SIZE, "max_position_embeddings": 40, "num_labels": 3
    }, both),
    hugging_face("LlavaForConditionalGeneration", {
        "text_config": {
            "model_type": "llama", **SMALL, "num_key_value_heads": 2, "head_dim": 8
        },
        "vision_config": {"model_type": "clip_vision_model", **IMAGE},
        "image_token_id": 31, "vision_feature_layer": -1,
    }, lambda m: {
        **images(m), "input_ids": torch.cat(
            [torch.full((m, 16), 31), torch.randint(3, 30, (m, LENGTH))], 1
        )
    }),
    hugging_face("PatchTSTForPrediction", PATCHED, series),
    hugging_face("PatchTSMixerForPrediction", PATCHED, series),
    hugging_face("DecisionTransformerModel", {
        "state_dim": 3, "act_dim": 2, "hidden_size": 16, "max_ep_len": 20, "n_layer": 1,
        "n_head": 2, "n_positions": 40,
    }, lambda m: {
        "states": torch.randn(m, 5, 3), "actions": torch.randn(m, 5, 2),
        "rewards": torch.randn(m, 5, 1), "returns_to_go": torch.randn(m, 5, 1),
        "timesteps": torch.randint(0, 20, (m, 5)), "attention_mask": torch.ones(m, 5).long(),
    }),
]  # fmt: skip
