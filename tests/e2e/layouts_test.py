"""The end-to-end tests' own shuffles give the bytes that AITER's functions gave."""

import hashlib
import json
import math
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
import layouts

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "aiter_shuffles.json"
LARGEST_INPUT_BYTES = 200_000


def input_bytes(seed, size):
    """The golden file's generator: the top byte of splitmix64."""
    mask = (1 << 64) - 1
    result = bytearray(size)
    for i in range(size):
        z = ((seed << 40) + i + 1) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        result[i] = (z ^ (z >> 31)) >> 56
    return bytes(result)


def golden_cases(layout):
    """(case, input, experts, rows of an expert, columns) of the small cases of one layout."""
    for case in json.loads(GOLDEN.read_text())["cases"]:
        shape = case["input_shape"]
        if case.get("layout") != layout or math.prod(shape) > LARGEST_INPUT_BYTES:
            continue
        experts = case["args"].get("experts_cnt", shape[0] if len(shape) == 3 else 1)
        rows = math.prod(shape[:-1]) // experts
        yield case, input_bytes(case["seed"], math.prod(shape)), experts, rows, shape[-1]


class LayoutsTest(unittest.TestCase):
    def test_every_layout_agrees_with_aiter(self):
        for layout in (layouts.WEIGHT, layouts.WEIGHT_GATE_UP, layouts.SCALE, layouts.SCALE_EXPERT,
                       layouts.SCALE_GATE_UP, layouts.SCALE_N32K4):
            compared = 0
            for case, data, experts, rows, columns in golden_cases(layout):
                with self.subTest(case["name"]):
                    if case["args"].get("gate_up") and layout == layouts.SCALE_N32K4:
                        data = alternated(data, experts, rows, columns)
                    stored = layouts.shuffle(layout, data, experts, rows, columns)
                    self.assertEqual(len(stored), math.prod(case["output_shape"]))
                    self.assertEqual(layouts.unshuffle(layout, stored, experts, rows, columns),
                                     data)
                    # e8m0_shuffle leaves what it pads uninitialised.
                    if layout != layouts.SCALE or len(stored) == len(data):
                        self.assertEqual(hashlib.sha256(stored).hexdigest(), case["output_sha256"])
                        compared += 1
            self.assertGreaterEqual(compared, 2, layout)

    def test_a_wrong_fill_byte_is_found(self):
        stored = bytearray(layouts.shuffle(layouts.SCALE_EXPERT, bytes(32 * 5), 1, 32, 5))
        stored[stored.index(layouts.FILL[layouts.SCALE_EXPERT])] = 0
        with self.assertRaisesRegex(AssertionError, "fill byte"):
            layouts.unshuffle(layouts.SCALE_EXPERT, bytes(stored), 1, 32, 5)


def alternated(data, experts, rows, columns):
    size = rows * columns
    return b"".join(layouts.alternate_halves(data[i * size:(i + 1) * size], rows, columns)
                    for i in range(experts))


if __name__ == "__main__":
    unittest.main(verbosity=2)
