"""Models of transformers in float64 throughout, so that nothing of an error hides below float32's rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Float64(TorchDispatchMode):
    """Where code asks torch for float32, it gets float64; transformers' norms, routers and softmaxes ask for it."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator with float64 in place of float32."""
        return func(
            *args,
            **{name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()},
        )


@contextmanager
def in_float64() -> Iterator[None]:
    """Let verl's engines build and train models in float64 while active; verl's configs know no such dtype."""
    from verl.utils.torch_dtypes import PrecisionType

    with Float64(), mock.patch.object(PrecisionType, "to_dtype", return_value=torch.float64):
        yield
