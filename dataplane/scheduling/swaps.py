"""KV swaps where models share a slot's time: when KV comes in at the cost of other models', and what a slice must last
for it. Pure.

KV memory is shared by all models of a slot, and only one of them decodes. If their KV together exceeds it, a model that
begins its slice finds part of its sequences in host memory, and memory full of KV of models that wait. Two rules let it
decode all of its batch:

1. It swaps out KV of models that wait, as long as its own then arrives within the slice. Later it would only take
   memory from the next slice.
2. A slice lasts `SLICE_SWAPS` times as long as the transfers of a model's KV, beyond the load of its weights. Unlike
   that load they are not hidden: the batch is complete only after them.
"""

SLICE_SWAPS = 4.0
"""So that KV transfers, out and in, take at most a quarter of a slice."""


def pays_off(swap_s: float, left_s: float) -> bool:
    """Whether KV whose swap takes `swap_s`, in exchange for KV of others, comes within the `left_s` of the slice."""
    return swap_s <= left_s


def slice_load_s(load_s: float, swap_s: float) -> float:
    """How long the load of a model is for the length of slices, if its KV takes `swap_s` to come in."""
    return load_s + SLICE_SWAPS * swap_s
