"""A device without a GPU, which counts what a host waits for: its tensors say that they are on "meta", and are computed
on the CPU.

A wait is whatever needs a value of the device's, or a copy that does not go on by itself: from the device to the host,
or to the device from memory that is not pinned. Shapes that depend on values (boolean masks, `nonzero`) are waits too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_SHAPED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}


class FakeTensor(torch.Tensor):
    """A tensor of the fake device; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=DEVICE, **layout)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} outside of `counted`")


class Waits(list[str]):
    """What a host waited for, in order. `order`: "wait" for each of them, "upload" for each copy to the device that it
    did not wait for, and "pass" for each forward pass that began, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def note(self, what: str) -> None:
        self.append(what)
        self.order.append("wait")


class _Computed(TorchDispatchMode):
    """Runs operations on tensors of the device, and counts those that a host waits for."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        with self:
            made = function.decompose(*args, **kwargs)  # in inference mode torch does not
        if made is not NotImplemented:
            return made
        leaves = tree_leaves((args, kwargs))
        given = [one for one in leaves if isinstance(one, FakeTensor)]
        name = function.name().partition(".")[0]
        to_host = name == "aten::_local_scalar_dense" or torch.device("cpu") in leaves
        if given and (to_host or name in _SHAPED_BY_VALUES or _is_masked(name, args) or _crosses(name, args)):
            self._waits.note(name)
        if given and name == "aten::embedding":
            self._waits.order.append("pass")
        out = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        return tree_map(lambda one: _fake(one, given), out) if given and not to_host else out


class _Made(TorchFunctionMode):
    """Makes tensors on the device, and pinned memory, which torch would refuse without a GPU."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits
        self._pinned: dict[int, torch.Tensor] = {}

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            made = function(*args, **kwargs)
            self._pinned[made.untyped_storage()._cdata] = made
            return made
        if function is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            self._waits.note("tolist")
            return args[0].inner.tolist()
        to_device = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.device) and one == DEVICE]
        if not to_device or any(isinstance(one, FakeTensor) for one in args):
            return function(*args, **kwargs)
        if function in {torch.tensor, torch.as_tensor, torch.Tensor.to}:
            pinned = isinstance(args[0], torch.Tensor) and args[0].untyped_storage()._cdata in self._pinned
            if pinned and kwargs.get("non_blocking"):
                self._waits.order.append("upload")
            else:
                self._waits.note("a copy to the device")
        args = tuple(one for one in args if one not in to_device)
        kwargs = {name: one for name, one in kwargs.items() if one not in to_device}
        made = args[0] if function is torch.Tensor.to and len(args) == 1 else function(*args, **kwargs)
        return FakeTensor(made.clone())


@contextmanager
def counted() -> Iterator[Waits]:
    """What the host waits for inside."""
    waits = Waits()
    with torch.inference_mode(), _Made(waits), _Computed(waits):
        yield waits


def _is_masked(name: str, args: Any) -> bool:
    """Whether it is indexed by a mask, whose numbers of elements only the device knows."""
    indexed = name in {"aten::index", "aten::index_put_", "aten::index_put"}
    return indexed and any(one is not None and one.dtype in {torch.bool, torch.uint8} for one in args[1])


def _crosses(name: str, args: Any) -> bool:
    """Whether it copies more than a number from host to device, or anything from device to host."""
    if name != "aten::copy_":
        return False
    target, source = args[:2]
    return isinstance(target, FakeTensor) != isinstance(source, FakeTensor) and bool(
        source.dim() or isinstance(source, FakeTensor)
    )


def _inner(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _fake(value: Any, given: list[FakeTensor]) -> Any:
    """A result: the tensor that an operation changed in place, or a new one."""
    if not isinstance(value, torch.Tensor):
        return value
    same = [one for one in given if one.inner is value]
    return same[0] if same else FakeTensor(value)
