"""Operations tuned for MLX's CPU backend, used only there; exact to float32 noise.

MLX's exp on CPU takes 11 ns an element, one at a time: at 512 tokens the exponentials of SwiGLU and softmax cost more
than all matrix products. The exp below is made of operations that MLX vectorises when it compiles them.
"""

from collections.abc import Iterable
from types import ModuleType

import mlx.core as mx
from mlx_lm.models import activations

_LOG2_E = 1.4426950408889634
# 2**f on [-0.5, 0.5] as a polynomial, the Taylor series of exp(f * ln 2) to degree 6: relative error 2.5e-7.
_COEFFICIENTS = (
    1.0,
    0.6931471805599453,
    0.2402265069591007,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.00015403530393381608,
)


def _exp(x: mx.array) -> mx.array:
    """exp of a float32 array: 2**n by building the exponent bits, times 2**f by the polynomial."""
    y = mx.clip(x * _LOG2_E, -126.0, 126.0)
    n = mx.floor(y + 0.5)
    f = y - n
    power = mx.array(_COEFFICIENTS[-1])
    for coefficient in reversed(_COEFFICIENTS[:-1]):
        power = power * f + coefficient
    return power * mx.left_shift(n.astype(mx.int32) + 127, 23).view(mx.float32)


@mx.compile
def shifted_exp(scores: mx.array, maximum: mx.array) -> mx.array:
    """exp(scores - maximum), float32."""
    return _exp(scores - maximum)


@mx.compile
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * x / (1.0 + _exp(-gate))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x; takes the place of mlx_lm.models.activations.swiglu, to which it leaves other types than float32.

    Models in half precision may run in this process beside ours, and must stay in it.
    """
    return _swiglu(gate, x) if gate.dtype == x.dtype == mx.float32 else activations.swiglu(gate, x)


def install(modules: Iterable[ModuleType]) -> None:
    """Use the tuned SwiGLU in these modules of mlx-lm, which each hold it under the name they imported it by."""
    for module in set(modules):
        if getattr(module, "swiglu", None) is activations.swiglu:
            module.swiglu = swiglu  # type: ignore[attr-defined]
