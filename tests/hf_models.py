"""Small random models of Transformers, from their configs: nothing is downloaded."""

import torch

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True}
GROUPED = {
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
}
SHARED = {**QWEN, "shared_expert_intermediate_size": 40}
FAMILIES = {
    "qwen2_moe": SHARED,
    "qwen3_moe": QWEN,
    "qwen3_next": {
        **SHARED,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": {
        **GROUPED,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "glm4_moe": GROUPED,
    "olmoe": {"num_experts": 8, "norm_topk_prob": False},
    "gpt_oss": {"num_local_experts": 8, "layer_types": ["sliding_attention", "full_attention"]},
}


def config(family, **changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | changes))


def model(family, dtype=torch.float32, device="cpu", **changes):
    """A model in evaluation mode whose experts weigh as much as what lies beside them."""
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(config(family, **changes))
    with torch.no_grad():
        for name, weight in [*made.named_parameters(), *made.named_buffers()]:
            if name.endswith(("_proj", "bias")) or weight.ndim == 2:
                weight.normal_(std=1.0 if weight.ndim < 2 else max(weight.shape[-1], 1) ** -0.5)
            if name.endswith("correction_bias"):
                weight.mul_(0.1)
    return made.to(device=device, dtype=dtype).eval()


def prompts(device="cpu", count=2, length=7):
    return torch.randint(1, SHAPE["vocab_size"], (count, length), device=device)


def experts_of(made):
    return [m for m in made.modules() if hasattr(m, "gate_up_proj")]
