"""The names of experts' tensors in checkpoints, which hold a layer's experts one by one."""

EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""The linear layers of an expert, and what Mixtral's checkpoints call them."""
_HERE, _MIXTRAL = "mlp.experts", "block_sparse_moe.experts"


def expert_names(prefix: str, projection: str, expert: int) -> tuple[str, ...]:
    """The names that a linear layer of one of the experts at `prefix` may have."""
    before = prefix.removesuffix(_HERE)
    return f"{before}{_HERE}.{expert}.{projection}", f"{before}{_MIXTRAL}.{expert}.{EXPERTS[projection]}"
