"""GPUs as their makers publish them: what a guess of step times starts from where nobody has measured."""

from collections.abc import Mapping
from dataclasses import dataclass

_GIB = 2**30
_GEN4_BYTES_PER_S, _GEN5_BYTES_PER_S = 26e9, 55.6e9
"""What PCIe x16 carries from host to device, measured on an A100 and an H100."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One GPU. `flops`: dense bfloat16 operations a second; `memory_bytes_per_s`: of its own memory;
    `pcie_bytes_per_s`: from host memory, see `transfer_efficiency` of GPU profiles for how much of it weights reach;
    `link_bytes_per_s`: to the other GPUs of a node, one way, by NVLink or else PCIe.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bytes_per_s: float
    pcie_bytes_per_s: float
    link_bytes_per_s: float


def _card(
    name: str,
    gib: int,
    tera_flops: float,
    memory_gb_per_s: float,
    pcie_bytes_per_s: float,
    nvlink_gb_per_s: float | None = None,
) -> Card:
    return Card(
        name=name,
        memory_bytes=gib * _GIB,
        flops=tera_flops * 1e12,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        pcie_bytes_per_s=pcie_bytes_per_s,
        link_bytes_per_s=pcie_bytes_per_s if nvlink_gb_per_s is None else nvlink_gb_per_s * 1e9,
    )


CARDS: Mapping[str, Card] = {
    card.name: card
    for card in (
        _card("A10", 24, 125, 600, _GEN4_BYTES_PER_S),
        _card("A100", 80, 312, 2039, _GEN4_BYTES_PER_S, 300),
        _card("B200", 180, 2250, 8000, _GEN5_BYTES_PER_S, 900),
        _card("H100", 80, 989, 3350, _GEN5_BYTES_PER_S, 450),
        _card("H20", 96, 148, 4000, _GEN5_BYTES_PER_S, 450),
        _card("H200", 141, 989, 4800, _GEN5_BYTES_PER_S, 450),
        _card("H800", 80, 989, 3350, _GEN5_BYTES_PER_S, 200),
        _card("L4", 24, 121, 300, _GEN4_BYTES_PER_S),
        _card("L40S", 48, 362, 864, _GEN4_BYTES_PER_S),
    )
}
"""By name, which is also the GPU type that a guess for it is of. Where there are several, the SXM form, with NVLink."""
