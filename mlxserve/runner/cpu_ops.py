"""Operations tuned for MLX's CPU backend, used only there; exact to float32 noise.

MLX's exp on CPU takes 11 ns an element, one at a time: at 512 tokens the exponentials of SwiGLU and softmax cost more
than all matrix products. The exp below is made of operations that MLX vectorises when it compiles them.
"""

from collections.abc import Iterable
from types import ModuleType

import mlx.core as mx
from mlx_lm.models import activations

from mlxserve.runner.compiled import CompiledByShape

# By value: install() may put ours in its place, in the module of mlx-lm it comes from too.
_stock_swiglu = activations.swiglu

_LOG2_E = 1.4426950408889634
# Adding 1.5 * 2**23 to a small float rounds it to a whole number and leaves the number in the low bits. The compiler
# vectorises that; floor() it calls for one element at a time, which makes the whole three times as slow.
_ROUNDING = 12582912.0


def _exp(x: mx.array) -> mx.array:
    """exp of a float32 array up to 88, as 2**n * 2**f, with -0.5 <= f <= 0.5 by a polynomial.

    The polynomial is the one of degree 5 with the least relative error among those that are exact at 0: 9.1e-8, and
    1.9e-7 as float32 computes it. Rounding of x * log2(e) adds |x| * 6e-8. n is added to the exponent bits; the
    rounding constant has none below bit 22, so the shift leaves nothing of it.
    """
    y = mx.maximum(x * _LOG2_E, -125.0)
    shifted = y + _ROUNDING
    f = y - (shifted - _ROUNDING)
    power = 0.009671513183108407 + f * 0.0013264728768904305
    power = 0.24022242077091394 + f * (0.05550733744478206 + f * power)
    power = 1.0 + f * (0.6931469775951131 + f * power)
    return (power.view(mx.int32) + mx.left_shift(shifted.view(mx.int32), 23)).view(mx.float32)


_shifted_exp = CompiledByShape(lambda scores, maximum: _exp(scores - maximum), max_traces=256)


def shifted_exp(scores: mx.array, maximum: mx.array) -> mx.array:
    """exp(scores - maximum), float32, for scores up to the maximum."""
    result: mx.array = _shifted_exp((*scores.shape, *maximum.shape), scores, maximum)
    return result


@mx.compile
def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    return gate * x / (1.0 + _exp(mx.minimum(-gate, 87.0)))


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """silu(gate) * x; takes the place of mlx_lm.models.activations.swiglu, to which it leaves other types than float32.

    Models in half precision may run in this process beside ours, and must stay in it.
    """
    return _swiglu(gate, x) if gate.dtype == x.dtype == mx.float32 else _stock_swiglu(gate, x)


def install(modules: Iterable[ModuleType]) -> None:
    """Use the tuned SwiGLU in these modules of mlx-lm, which each hold it under the name they imported it by."""
    for module in set(modules):
        if getattr(module, "swiglu", None) is _stock_swiglu:
            module.swiglu = swiglu  # type: ignore[attr-defined]
