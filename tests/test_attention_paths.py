"""The ways of decode attention agree, and the choice between them is measured once and remembered."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxserve.runner import cpu_ops
from mlxserve.runner.attention import paths
from mlxserve.runner.attention.decode import DecodeInputs
from mlxserve.runner.attention.paths import GRID, AttentionShape, GatherFused, GatherMM, PathChoice

SHAPE = AttentionShape(4, 2, 8, 16, 8, mx.float32)
PATHS = (GatherMM(cpu_ops.shifted_exp), GatherFused())


def test_paths_agree() -> None:
    rng = np.random.default_rng(0)
    starts, tables = [0, 7, 8, 40], [(3,), (4,), (5, 6), (9, 8, 7, 2, 1, 10)]
    queries = mx.array(rng.normal(size=(4, 4, 8)), dtype=mx.float32)
    keys = mx.array(rng.normal(size=(11, 2, 8, 8)), dtype=mx.float32)
    values = mx.array(rng.normal(size=(11, 2, 8, 16)), dtype=mx.float32)
    inputs, positions = DecodeInputs.build(starts, tables, 8, 4), mx.array(starts)
    pairs, copies = (path.prepare(inputs, positions, 2, 8)(queries, keys, values, 0.3) for path in PATHS)
    assert mx.allclose(pairs, copies, atol=1e-5)


def test_nearest_measured_point_decides() -> None:
    mm, fused = PATHS
    choice = PathChoice({(1, 2): mm, (1, 64): fused, (8, 2): fused, (8, 16): mm})
    assert [choice(*point).name for point in ((1, 1), (1, 100), (2, 2), (6, 3), (30, 40))] == [
        "gather_mm",
        "gather_fused",
        "gather_mm",
        "gather_fused",
        "gather_mm",
    ]


class TestChoice:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """The points that were measured; the fused path wins for one row."""
        points: list[tuple[int, int]] = []

        def fastest(_: object, shape: AttentionShape, num_rows: int, num_blocks: int) -> str:
            points.append((num_rows, num_blocks))
            return "gather_fused" if num_rows == 1 else "gather_mm"

        monkeypatch.setattr(paths, "_fastest", fastest)
        return points

    def test_is_measured_once(self, measured: list[tuple[int, int]], tmp_path: Path) -> None:
        file = tmp_path / "cache" / "paths.json"
        for _ in range(2):
            choice = paths.choose(PATHS, SHAPE, "CPU", file)
            assert (choice(1, 16).name, choice(8, 16).name) == ("gather_fused", "gather_mm")
        assert measured == list(GRID)
        paths.choose(PATHS, SHAPE, "another device", file)
        assert measured == 2 * list(GRID)
        assert len(json.loads(file.read_text())) == 2

    @pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "\x00", '{"CPU": null}'])
    def test_unusable_files_are_replaced(
        self, measured: list[tuple[int, int]], tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "paths.json"
        file.write_text(content)
        paths.choose(PATHS, SHAPE, "CPU", file)
        assert "cannot be read" in caplog.text
        paths.choose(PATHS, SHAPE, "CPU", file)
        assert measured == list(GRID)

    def test_unknown_names_are_measured_anew(self, measured: list[tuple[int, int]], tmp_path: Path) -> None:
        file = tmp_path / "paths.json"
        paths.choose(PATHS, SHAPE, "CPU", file)
        content = json.loads(file.read_text())
        file.write_text(json.dumps({key: dict.fromkeys(names, "gone") for key, names in content.items()}))
        assert paths.choose(PATHS, SHAPE, "CPU", file)(1, 2).name == "gather_fused"
        assert measured == 2 * list(GRID)

    def test_a_folder_that_cannot_be_written_is_no_failure(
        self, measured: list[tuple[int, int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        assert paths.choose(PATHS, SHAPE, "CPU", tmp_path / "file" / "paths.json")(1, 2).name == "gather_fused"
        assert "cannot be" in caplog.text


def test_measuring_names_the_faster_path(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(GatherFused):
        """Does the same a hundred times."""

        def prepare(self, *arguments: object) -> paths.RowAttention:
            attention = super().prepare(*arguments)  # type: ignore[arg-type]

            def repeated(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
                return sum(
                    (attention(queries + 0.01 * i, keys, values, scale) for i in range(100)), start=mx.array(0.0)
                )

            return repeated

    with caplog.at_level(logging.DEBUG):
        assert paths._fastest((Slow("slow"), GatherFused("fast")), SHAPE, 2, 3) == "fast"
    assert "2 rows x 3 blocks: slow" in caplog.text
