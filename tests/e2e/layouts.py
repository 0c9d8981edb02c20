"""AITER's shuffles as views and permutations of small arrays, independent of shardprep's code.

Each function takes what AITER's Python takes and returns the same bytes. An array is a flat bytes
object with a shape beside it; a permutation is done on a list of source positions.
"""

import functools
import itertools
import math

PADDING = -1


def permuted_positions(shape, order):
    """Source position of each element of an array of `shape` after permuting its axes."""
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    ranges = [[i * strides[axis] for i in range(shape[axis])] for axis in order]
    return [sum(offsets) for offsets in itertools.product(*ranges)]


@functools.lru_cache(maxsize=None)
def weight_positions(rows, columns):
    """shuffle_weight(w, (16, 16)) of one expert of bytes: where each output byte comes from."""
    view = (rows // 16, 16, columns // 32, 2, 16)
    return permuted_positions(view, (0, 2, 3, 1, 4))


@functools.lru_cache(maxsize=None)
def scale_positions(rows, columns):
    """e8m0_shuffle of a [rows, columns] scale: rows are padded to 256, columns to 8."""
    padded_rows = -(-rows // 256) * 256
    padded_columns = -(-columns // 8) * 8
    view = (padded_rows // 32, 2, 16, padded_columns // 8, 2, 4)
    positions = permuted_positions(view, (0, 3, 5, 2, 4, 1))
    return [row * columns + column if row < rows and column < columns else PADDING
            for row, column in (divmod(position, padded_columns) for position in positions)]


def shuffle_weights(data, experts, rows, columns):
    size = rows * columns
    positions = weight_positions(rows, columns)
    return b"".join(bytes(map(data[expert * size:(expert + 1) * size].__getitem__, positions))
                    for expert in range(experts))


def shuffle_scales(data, rows, columns, fill):
    return bytes(fill if position == PADDING else data[position]
                 for position in scale_positions(rows, columns))


def unshuffle_weights(data, experts, rows, columns):
    size = rows * columns
    positions = weight_positions(rows, columns)
    result = bytearray(experts * size)
    for expert in range(experts):
        base = expert * size
        for offset, position in enumerate(positions):
            result[base + position] = data[base + offset]
    return bytes(result)


def unshuffle_scales(data, rows, columns, fill):
    """The scale and the number of bytes beyond it; each of those must be `fill`."""
    result, beyond = bytearray(rows * columns), 0
    for offset, position in enumerate(scale_positions(rows, columns)):
        if position != PADDING:
            result[position] = data[offset]
        elif data[offset] == fill:
            beyond += 1
        else:
            raise AssertionError(f"byte {offset} beyond the scale is {data[offset]}, want {fill}")
    return bytes(result), beyond


def matrix_part(data, columns, row_range, column_range):
    """Rows and columns of a row-major matrix of bytes."""
    return b"".join(data[row * columns + column_range.start:row * columns + column_range.stop]
                    for row in row_range)


def pad_matrix(data, rows, columns, padded_rows, padded_columns):
    """A matrix with zero columns and rows behind it."""
    tail = bytes(padded_columns - columns)
    lines = [data[row * columns:(row + 1) * columns] + tail for row in range(rows)]
    return b"".join(lines) + bytes((padded_rows - rows) * padded_columns)
