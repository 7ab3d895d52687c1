"""What the comparison of remapping with its rivals runs: the paper's models and GPU, its wires, its arrivals.

The step times of the paper's GH200 are not published. Llama-2-13b's are those measured on an H100 (Aegaeon's artifact,
`llama2_13b_chat/H100`); another model's grow with its weights, and its term per context token with its KV. The time of
a layer that follows for OPT-13b, 0.46 ms with 40 requests, agrees with the paper's remark that m = alpha + 2 takes over
at alpha = 9 of 40, which puts it between 0.41 and 0.47 ms at 450 GB/s.
"""

from dataclasses import dataclass, replace

from dataplane.scheduling.costs import LatencyModel

GPU_BYTES = 97_871 * 2**20
"""GH200's 96 GB as its driver counts them."""
ACTIVATIONS_BYTES = 10**9
"""An assumption: what an engine of the paper's takes beside weights and KV."""

H100_13B = LatencyModel(
    prefill_base_s=7.5250e-03,
    prefill_per_token_s=4.0821e-05,
    prefill_per_token2_s=0.0,
    decode_base_s=1.2504e-02,
    decode_per_context_token_s=1.4507e-07,
    decode_per_sequence_s=1.1451e-04,
)
_WEIGHTS_13B_BYTES = 2 * 13.0e9
_KV_13B_BYTES = 2 * 2 * 40 * 5120


@dataclass(frozen=True, kw_only=True)
class SharedModel:
    """A model on a slot that others share. `layers_bytes`: of all its layers; `kv_bytes`: reserved for its KV."""

    name: str
    latency: LatencyModel
    layers: int
    layers_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int

    @property
    def layer_bytes(self) -> int:
        """Of one layer."""
        return self.layers_bytes // self.layers


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Between host and GPU. `bytes_per_s` one way; `both_bytes_per_s`: both ways together, half each."""

    name: str
    bytes_per_s: float
    both_bytes_per_s: float


GRACE_HOPPER = Wire(name="Grace Hopper", bytes_per_s=427e9, both_bytes_per_s=366e9)
"""As the paper measured: of the 450 GB/s, 427 come through; both ways the host's memory is the limit."""
PCIE_5 = Wire(name="PCIe 5", bytes_per_s=55.6e9, both_bytes_per_s=100e9)
PCIE_4 = Wire(name="PCIe 4", bytes_per_s=25e9, both_bytes_per_s=45e9)
"""What both ways reach together on PCIe, nine tenths of twice one way, is an assumption."""
WIRES = (GRACE_HOPPER, PCIE_5, PCIE_4)


def shared_model(
    name: str, *, parameters: float, layers: int, embedding_parameters: float, kv_width: int, gpu_share: float
) -> SharedModel:
    """A 16-bit model. `kv_width`: numbers that a layer's keys of one token have; `gpu_share`: its memory (table 1)."""
    weights_bytes = round(2 * parameters)
    kv_bytes_per_token = 2 * 2 * layers * kv_width
    size = weights_bytes / _WEIGHTS_13B_BYTES
    latency = replace(
        H100_13B,
        prefill_per_token_s=H100_13B.prefill_per_token_s * size,
        decode_base_s=H100_13B.decode_base_s * size,
        decode_per_context_token_s=H100_13B.decode_per_context_token_s * kv_bytes_per_token / _KV_13B_BYTES,
        decode_per_sequence_s=H100_13B.decode_per_sequence_s * size,
    )
    return SharedModel(
        name=name,
        latency=latency,
        layers=layers,
        layers_bytes=round(weights_bytes - 2 * embedding_parameters),
        kv_bytes=round(gpu_share * GPU_BYTES) - weights_bytes - ACTIVATIONS_BYTES,
        kv_bytes_per_token=kv_bytes_per_token,
    )


OPT_13B = shared_model(
    "OPT-13b", parameters=12.85e9, layers=40, embedding_parameters=0.268e9, kv_width=5120, gpu_share=0.35
)
LLAMA_2_13B = shared_model(
    "Llama-2-13b", parameters=13.02e9, layers=40, embedding_parameters=0.328e9, kv_width=5120, gpu_share=0.35
)
LLAMA_3_8B = shared_model(
    "Llama-3-8b", parameters=8.03e9, layers=32, embedding_parameters=1.05e9, kv_width=1024, gpu_share=0.20
)
OPT_30B = shared_model(
    "OPT-30b", parameters=29.97e9, layers=48, embedding_parameters=0.375e9, kv_width=7168, gpu_share=0.65
)
OPT_6_7B = shared_model(
    "OPT-6.7b", parameters=6.66e9, layers=32, embedding_parameters=0.214e9, kv_width=4096, gpu_share=0.15
)

COMBINATIONS = {
    "C1": (OPT_13B, LLAMA_2_13B, LLAMA_3_8B),
    "C2": (OPT_30B, OPT_6_7B),
    "OPT-13b": (OPT_13B,),
}
"""Table 1, and the single model of sections 7.4 to 7.6."""
