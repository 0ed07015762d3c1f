"""Data sheets of GPUs and shapes of models that profiles are derived from."""

from typing import Final

from ebbtide.simulator.engines.roofline import DeviceSheet, ModelShape

#: NVIDIA H100 SXM data sheet: 80 GB HBM3 at 3.35 TB/s, 989 TFLOP/s bf16 without sparsity, PCIe 5.0 x16 (64 GB/s).
H100: Final = DeviceSheet("H100", 80e9, 3.35e12, 989e12, 64e9)
#: The H800 SXM has the H100's memory and cores, and slower links between GPUs.
H800: Final = DeviceSheet("H800", 80e9, 3.35e12, 989e12, 64e9)
#: Key and value, bf16.
_KV: Final = 2 * 2
#: What DeepSeek-V3's attention keeps of a token in each layer: 512 of the latent and 64 of the position, bf16.
_LATENT: Final = (512 + 64) * 2


def _dense(name: str, weights: float, layers: int, heads: int, kv_heads: int) -> ModelShape:
    """A model with grouped queries and heads of 128; `weights` of its safetensors."""
    kv_bytes = _KV * layers * kv_heads * 128
    return ModelShape(name, weights, layers=layers, heads=heads, head_dim=128, kv_bytes=kv_bytes)


#: From the models' config.json and the sizes of their safetensors on Hugging Face.
QWEN3_8B: Final = _dense("Qwen3-8B", 8.19e9, 36, 32, 8)
QWEN3_14B: Final = _dense("Qwen3-14B", 14.77e9, 40, 40, 8)
QWEN3_32B: Final = _dense("Qwen3-32B", 32.76e9, 64, 64, 8)
QWEN25_7B: Final = _dense("Qwen2.5-7B", 7.62e9, 28, 28, 4)
QWEN25_14B: Final = _dense("Qwen2.5-14B", 14.77e9, 48, 40, 8)
QWEN25_32B: Final = _dense("Qwen2.5-32B", 32.76e9, 64, 40, 8)
QWEN2_VL_72B: Final = _dense("Qwen2-VL-72B", 73.4e9, 80, 64, 8)
#: 48 layers of 128 experts, 8 of them for a token: 3 matrices of 2048 x 768 each.
QWEN3_30B_A3B: Final = ModelShape(
    "Qwen3-30B-A3B",
    weights=30.53e9 - 48 * 128 * 3 * 2048 * 768,
    experts=48 * 128 * 3 * 2048 * 768,
    expert_share=8 / 128,
    layers=48,
    heads=32,
    head_dim=128,
    kv_bytes=48 * _KV * 4 * 128,
)
#: 26 of 27 layers with 64 experts, 6 of them for a token: 3 matrices of 2048 x 1408 each.
MOONLIGHT: Final = ModelShape(
    "Moonlight-16B-A3B",
    weights=15.96e9 - 26 * 64 * 3 * 2048 * 1408,
    experts=26 * 64 * 3 * 2048 * 1408,
    expert_share=6 / 64,
    layers=27,
    heads=16,
    head_dim=192,
    kv_bytes=27 * _LATENT,
)
#: 60 of 61 layers with 384 experts, 8 of them for a token: 3 matrices of 7168 x 2048 each; FP8 weights.
KIMI_K2: Final = ModelShape(
    "Kimi-K2",
    weights=1.026e12 - 60 * 384 * 3 * 7168 * 2048,
    experts=60 * 384 * 3 * 7168 * 2048,
    expert_share=8 / 384,
    layers=61,
    heads=64,
    head_dim=192,
    kv_bytes=61 * _LATENT,
    weight_bytes=1.0,
)
#: By whose names profiles are derived.
GPUS: Final = (H100, H800)
MODELS: Final = (
    *(QWEN3_8B, QWEN3_14B, QWEN3_32B, QWEN3_30B_A3B),
    *(QWEN25_7B, QWEN25_14B, QWEN25_32B, QWEN2_VL_72B, MOONLIGHT, KIMI_K2),
)
