"""The sizes of tiny models of transformers' families, by attribute name for all families, and exceptions for single families."""

# Tokens per row, how many of them are padding in a padded row, and tokens for a decoder.
TOKENS, PADDED, TARGETS = 17, 5, 9
VOCABULARY, FIRST_WORD, FIRST_SPECIAL = 128, 10, 100

# {type of config: class} of text and vision models of composite families, for which transformers has no task.
PARTS = {
    "aimv2_text_model": "Aimv2TextModel", "align_text_model": "AlignTextModel", "align_vision_model": "AlignVisionModel",
    "altclip_text_model": "AltCLIPTextModel", "altclip_vision_model": "AltCLIPVisionModel",
    "blip_2_vision_model": "Blip2VisionModel", "blip_text_model": "BlipTextLMHeadModel",
    "blip_vision_model": "BlipVisionModel", "chinese_clip_text_model": "ChineseCLIPTextModel",
    "clap_text_model": "ClapTextModel", "clipseg_text_model": "CLIPSegTextModel",
    "clipseg_vision_model": "CLIPSegVisionModel", "clvp_decoder": "ClvpForCausalLM",
    "ernie4_5_vl_moe_vision": "Ernie4_5_VLMoeVisionTransformerPretrainedModel", "flava_image_model": "FlavaImageModel",
    "flava_text_model": "FlavaTextModel", "git_vision_model": "GitVisionModel",
    "groupvit_text_model": "GroupViTTextModel", "groupvit_vision_model": "GroupViTVisionModel",
    "instructblip_vision_model": "InstructBlipVisionModel", "janus_vision_model": "JanusVisionModel",
    "llama4_vision_model": "Llama4VisionModel", "metaclip_2_text_model": "MetaClip2TextModel",
    "minimax_m3_vl_vision": "MiniMaxM3VLVisionModel", "mllama_text_model": "MllamaForCausalLM",
    "molmo2_vision": "Molmo2VisionModel", "owlv2_text_model": "Owlv2TextModel", "owlvit_text_model": "OwlViTTextModel",
    "paddleocr_vl_vision": "PaddleOCRVisionModel", "pix2struct_text_model": "Pix2StructTextModel",
    "pp_formulanet_vision": "PPFormulaNetVisionModel", "siglip_text_model": "SiglipTextModel",
    "siglip2_text_model": "Siglip2TextModel", "step3p5_vision": "Step3p7VisionModel",
    "unlimited_ocr_vision": "UnlimitedOcrVisionModel", "xclip_text_model": "XCLIPTextModel",
    "xclip_vision_model": "XCLIPVisionModel",
}  # fmt: skip

# {attribute: size}. Attributes have the name that transformers uses for all families (see `attribute_map` of configs).
SIZES = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64, "hidden_dim": 64, "dim": 64, "emb_dim": 64,
    "embedding_size": 64, "word_embed_proj_dim": 64, "encoder_hidden_size": 64, "out_hidden_size": 64,
    "text_hidden_size": 64, "hidden_size_global": 64, "backbone_hidden_size": 64, "projector_hidden_size": 64, "projection_dim": 64,
    "intermediate_size": 48, "d_ff": 48, "d_inner": 48, "n_inner": 48, "ffn_dim": 48, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "ffn_hidden_size": 48, "dim_ff": 48, "dff": 48, "mlp_dim": 48, "intermediate_size_mlp": 48,
    "dense_intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "num_hidden_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_layers": 2, "n_layers": 2, "n_layer": 2, "layers": 2, "depth": 2, "num_global_layers": 1,
    "max_window_layers": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "num_attention_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_heads": 4, "n_heads": 4,
    "n_head": 4, "attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "swa_num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "swa_num_key_value_heads": 2,
    "head_dim": 16, "d_kv": 16, "d_head": 16, "swa_head_dim": 16, "query_pre_attn_scalar": 16,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
    "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "context_length": 64,
    "max_source_positions": 64, "max_target_positions": 64,
    "sliding_window": 6, "attention_window_size": 6, "sliding_window_size": 6, "local_attention": 6,
    "attention_window": 4, "attention_chunk_size": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "n_shared_experts": 1,
    "num_shared_experts": 1, "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "moe_top_k": 2, "n_group": 1, "topk_group": 1,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 8, "state_size": 8, "mamba_chunk_size": 8, "chunk_size": 8, "n_groups": 2, "mamba_n_groups": 1,
    "mamba_dt_rank": 8, "time_step_rank": 8,
    "patch_size": 8, "image_size": 32, "num_labels": 3, "hidden_size_per_layer_input": 8, "mm_tokens_per_image": 4,
    "num_mel_bins": 16, "num_frames": 8,
}  # fmt: skip
EVEN_IF_NONE = ("head_dim", "num_key_value_heads")
ROPE = {"rope_type": "default", "rope_theta": 1e4}

# Arguments that a family needs for a config that can be shrunk.
REQUIRED = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        },
    },
}  # fmt: skip

# {model_type: arguments of the config} that replace those that `shrink` derives from the defaults.
_CONVOLUTIONS = {"hidden_sizes": (16, 16), "depths": (1, 1), "num_stages": 2}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8, "embed_dim": 8}  # fmt: skip
_TIMM = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
_WINDOWS = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 4}  # fmt: skip
FAMILIES = {
    "apertus1p5": {"image_token_offset": 128, "audio_token_offset": 160},
    "apertus1p5_text": {"vocab_size": 4256},
    "apertus1p5_vision_tokenizer": {**_VQ, "codebook_size": 32},
    "bamba": {"attn_layer_indices": [1]},
    "blip-2": {"image_token_index": FIRST_SPECIAL, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4], "use_cache": False},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {**ROPE, "mrope_section": [2, 3, 3]} for kind in ("sliding_attention", "full_attention")
        },
    },
    "chameleon": {"vocabulary_map": {"<image>": FIRST_SPECIAL}},
    "convnext": _CONVOLUTIONS,
    "convnextv2": _CONVOLUTIONS,
    "cvt": {"embed_dim": (16, 32, 64), "num_heads": (1, 2, 4), "depth": (1, 2, 3), "drop_path_rate": (0.0, 0.0, 0.0)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "diffusion_gemma_text": {
        "global_head_dim": 16, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4,
    },
    "donut-swin": _WINDOWS,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dory": {
        "num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16},
    "dots3_note_text": {
        "num_attention_heads": 4, "num_key_value_heads": 4,
        **{f"swa_{name}": size for name, size in {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16,
            "qk_nope_head_dim": 8, "v_head_dim": 12,
        }.items()},
    },
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, 4]},
    "emu3": {"vocabulary_map": {"<|extra_200|>": FIRST_SPECIAL, "<image>": FIRST_SPECIAL + 1}},
    "emu3_vqgan": _VQ,
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": None, "vocab_size": VOCABULARY},
    "falcon_h1": {"mamba_d_ssm": 128},
    "fast_vlm": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 64,
            "model_args": {"layers": (1,) * 5, "embed_dims": (32,) * 5, "inference_mode": True},
        },
    },
    "florence_vision": {
        "depths": (1, 1), "patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1),
        "patch_prenorm": (False, True), "embed_dim": (32, 64), "num_heads": (2, 4), "num_groups": (2, 4),
        "window_size": 4,
    },
    "gemma3n_vision": {
        "architecture": "mobilenetv5_base", "model_args": {"channel_multiplier": 0.05}, "hidden_size": 2048,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "glm5_next_text": {"index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2"},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"]},
    "inkling_vision": {"n_layers": 2, "hidden_size": 32},
    "instructblip": {"image_token_index": FIRST_SPECIAL, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": FIRST_SPECIAL, "num_query_tokens": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {**_VQ, "num_embeddings": 32, "image_token_embed_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "kosmos-2": {"latent_query_num": PADDED},
    "levit": {"image_size": 64, "patch_size": 16},
    "lilt": {"hidden_size": 96},
    "llama4_vision_model": {
        "intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64,
    },
    "longcat_flash": {"head_dim": 8, "num_layers": 1, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral_large4_text": {"kv_source_layers": [0, 1, 2]},
    # Without norms float32 is 1e-3 from float64, in eager attention too.
    "mobilebert": {"normalization_type": "layer_norm"},
    "mobilevitv2": {"image_size": 256},
    "molmo2": {"image_patch_id": 100},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32]},
    "muse_spark_audio": {"hidden_sizes": (8, 16, 16, 32), "depths": (1, 1, 1, 1), "num_hidden_layers": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},
    "paddleocr_vl_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]}},
    "pegasus_x": {"num_global_tokens": 2, "block_size": 4},
    "perceiver": {
        "num_latents": 8, "d_latents": 64, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
        "num_cross_attention_heads": 1, "vocab_size": VOCABULARY,
    },
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {**_TIMM, "global_pool": "", "ref_feat_shape": (4, 4)},
        },
    },
    "pp_formulanet_vision": {"decoder_hidden_size": 64},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "hc_lowrank": 8,
    },
    "radio": {"video_temporal_patch_size": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 48), "attn_layers": ("local", "lsh"),
        "attention_head_size": 16, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0,
        "num_buckets": 4,
    },
    "shieldgemma2": {"yes_token_index": 5, "no_token_index": 6},
    "step3p5": {"sliding_window": 6},
    "swin": _WINDOWS,
    "swinv2": {**_WINDOWS, "pretrained_window_sizes": [0, 0]},
    "timm_wrapper": {"architecture": "vit_tiny_patch16_224", "model_args": _TIMM},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "wavtokenizer_encoder": {"hidden_size": 512},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": [1, 1, 1, 1, 1, 1, 1]},
    "visual_bert": {"visual_embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {
        "num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid_sliding"],
        "sliding_window": 6,
    },
}  # fmt: skip
