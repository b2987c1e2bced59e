"""mx.compile for functions that meet ever new shapes.

MLX keeps what it traced for every shape a compiled function has seen, and for ever: some 40 KB for the few operations
of an exponential, 5 MB for a decode step over 30 layers.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import mlx.core as mx


class CompiledByShape:
    """A function compiled once for each key, of which the `max_traces` used last are kept.

    The caller's key must tell apart all shapes of the arguments.
    """

    def __init__(self, function: Callable[..., Any], max_traces: int) -> None:
        self._function = function
        self._max_traces = max_traces
        self._traces: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def __call__(self, key: Hashable, *arguments: Any) -> Any:
        trace = self._traces.pop(key, None)
        if trace is None:
            if len(self._traces) >= self._max_traces:
                self._traces.popitem(last=False)
            # MLX finds traces by function object and drops them with it: each key needs a function of its own.
            trace = mx.compile(lambda *arguments: self._function(*arguments))
        self._traces[key] = trace
        return trace(*arguments)
