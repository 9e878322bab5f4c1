"""The type checker that tests/conftest.py switches on: beartype, for signatures that name shapes.

`Float[Tensor, "N I R P"]` is checked at every call, letters compared across arguments and result. Signatures without
shapes are left alone: at the door the caller's mistakes are answered by the library's own ValueErrors, not by beartype.
"""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

from beartype import beartype
from jaxtyping import AbstractArray

Function = TypeVar("Function", bound=Callable[..., Any])


def check(function: Function) -> Function:
    """`function`, its arguments and result checked where one of them names a shape."""
    return beartype(function) if any(map(_names_a_shape, function.__annotations__.values())) else function


def _names_a_shape(hint: object) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(_names_a_shape, get_args(hint)))
