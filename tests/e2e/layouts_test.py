"""The end-to-end tests' own shuffles give the bytes that AITER's functions gave."""

import hashlib
import json
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
import layouts

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "aiter_shuffles.json"
LARGEST_INPUT_BYTES = 200_000
E8M0_FILL = 0


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


class LayoutsTest(unittest.TestCase):
    def cases(self, layout):
        for case in json.loads(GOLDEN.read_text())["cases"]:
            size = 1
            for extent in case["input_shape"]:
                size *= extent
            if case.get("layout") == layout and size <= LARGEST_INPUT_BYTES:
                yield case, input_bytes(case["seed"], size)

    def test_weights_agree_with_aiter(self):
        count = 0
        for case, data in self.cases("aiter-16x16"):
            with self.subTest(case["name"]):
                experts, rows, columns = ([1] + case["input_shape"])[-3:]
                shuffled = layouts.shuffle_weights(data, experts, rows, columns)
                self.assertEqual(hashlib.sha256(shuffled).hexdigest(), case["output_sha256"])
                self.assertEqual(layouts.unshuffle_weights(shuffled, experts, rows, columns), data)
                count += 1
        self.assertGreater(count, 2)

    def test_scales_agree_with_aiter(self):
        count = 0
        for case, data in self.cases("aiter-e8m0"):
            with self.subTest(case["name"]):
                rows, columns = len(data) // case["input_shape"][-1], case["input_shape"][-1]
                shuffled = layouts.shuffle_scales(data, rows, columns, E8M0_FILL)
                if len(shuffled) == len(data):  # AITER leaves the rest uninitialised
                    self.assertEqual(hashlib.sha256(shuffled).hexdigest(), case["output_sha256"])
                    count += 1
                scales, beyond = layouts.unshuffle_scales(shuffled, rows, columns, E8M0_FILL)
                self.assertEqual(scales, data)
                self.assertEqual(beyond, len(shuffled) - len(data))
        self.assertGreater(count, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
