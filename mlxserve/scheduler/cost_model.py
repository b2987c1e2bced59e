"""How long work takes, learned from measured times."""

import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence

MAX_CELLS = 64
SAMPLES_PER_CELL = 5
LATEST = 9
"""Measurements that tell how fast the machine is just now."""
OBSERVATIONS_PER_FIT = 32
"""A fit takes as long as a hundred predictions. Cells change slowly; what changes faster is in the latest ratios."""
RIDGE = 1e-6
"""Relative to the diagonal: it only decides between combinations that the measurements cannot tell apart."""


class LinearCost:
    """Seconds as a linear function of features, none of which makes work faster: weights are never negative.

    Measurements fall into cells of similar features (half octaves). Each cell keeps its last few and stands for itself
    with the median one, so a hiccup counts for nothing; and since every cell counts once, a thousand decode steps do
    not wash out what the warm-up measured of other loads. The weights minimise the sum of squared relative errors over
    the cells, once a new cell has appeared or every OBSERVATIONS_PER_FIT. So they change slowly; that the whole machine
    became slower or faster shows in the median ratio of the latest measurements to the fit, by which predictions are
    multiplied.
    """

    def __init__(self) -> None:
        self._cells: OrderedDict[tuple[int, ...], deque[tuple[float, tuple[int, ...]]]] = OrderedDict()
        self._weights: list[float] = []
        self._current: list[float] = []
        self._latest: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=LATEST)
        self._ratios: deque[float] = deque(maxlen=LATEST)
        """Of the latest measurements to the fit; the first fit makes them."""
        self._num_until_fit = 0

    @property
    def is_measured(self) -> bool:
        return bool(self._cells)

    def observe(self, features: tuple[int, ...], seconds: float) -> None:
        """Take in one measurement; times that no work can have taken (zero, infinite, NaN) are left out."""
        if not 0.0 < seconds < math.inf:
            return
        key = tuple(round(2 * math.log2(value)) if value > 0 else -1 for value in features)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = deque(maxlen=SAMPLES_PER_CELL)
            self._num_until_fit = 0
        self._num_until_fit -= 1
        cell.append((seconds, features))
        self._cells.move_to_end(key)
        if len(self._cells) > MAX_CELLS:
            self._cells.popitem(last=False)
        self._latest.append((seconds, features))
        if self._weights:
            self._ratios.append(self._ratio(seconds, features))
        self._current = []

    @property
    def weights(self) -> list[float]:
        """Seconds for one of each feature; empty before the first measurement."""
        if not self._current and self._cells:
            if self._num_until_fit < 0:
                self._weights = self._fit()
                self._num_until_fit = OBSERVATIONS_PER_FIT
                self._ratios.clear()
                self._ratios.extend(self._ratio(*measurement) for measurement in self._latest)
            ratio = statistics.median(self._ratios)
            self._current = [ratio * weight for weight in self._weights]
        return self._current

    def predict(self, features: Sequence[int]) -> float:
        """Seconds; 0 before the first measurement."""
        weights = self.weights
        return _dot(weights, features) if weights else 0.0

    def _ratio(self, seconds: float, features: tuple[int, ...]) -> float:
        fitted = _dot(self._weights, features)
        return seconds / fitted if fitted > 0.0 else 1.0

    def _fit(self) -> list[float]:
        medians = [sorted(samples)[(len(samples) - 1) // 2] for samples in self._cells.values()]
        rows = [[value / seconds for value in features] for seconds, features in medians]
        scales = [max(column) or 1.0 for column in zip(*rows, strict=True)]
        rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
        used = list(range(len(scales)))
        while True:
            solution = dict(zip(used, _least_squares([[row[i] for i in used] for row in rows]), strict=True))
            worst = min(used, key=lambda i: solution[i])
            if solution[worst] >= 0.0:
                return [solution.get(i, 0.0) / scale for i, scale in enumerate(scales)]
            used.remove(worst)


def _dot(weights: Sequence[float], features: Sequence[int]) -> float:
    return sum(weight * value for weight, value in zip(weights, features, strict=True))


def _least_squares(rows: list[list[float]]) -> list[float]:
    """The x that minimises |rows @ x - 1|, by the normal equations and Gaussian elimination."""
    size = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    for i in range(size):
        matrix[i][i] += RIDGE * (matrix[i][i] or 1.0)
    for i in range(size):
        # The matrix is positive definite, so elimination needs no row exchanges.
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(matrix[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (matrix[i][size] - known) / matrix[i][i]
    return solution
