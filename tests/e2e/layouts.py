"""AITER's shuffles as views and permutations of small arrays, independent of shardprep's code.

An array is a flat bytes object with a shape beside it. A layout is the list of source positions in
the order of the output, for one expert's [rows, columns] matrix of bytes (gate rows first, up rows
behind) or, where AITER takes all experts as one matrix, for that matrix.
"""

import functools
import itertools
import math

PADDING = -1
SCALE_COLUMNS_MULTIPLE = 8
E8M0_ROWS_MULTIPLE = 256

WEIGHT, WEIGHT_GATE_UP = "aiter-16x16", "aiter-16x16-gate-up"
SCALE, SCALE_EXPERT, SCALE_GATE_UP = "aiter-e8m0", "aiter-e8m0-expert", "aiter-e8m0-gate-up"
SCALE_N32K4, ROW_MAJOR = "aiter-n32k4", "row-major"

# Byte where a layout has no source byte.
FILL = {SCALE: 0x00, SCALE_EXPERT: 0x7F, SCALE_GATE_UP: 0x7F}
ROLES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
# Layouts of the four roles.
PROFILES = {
    "aiter-separated": (WEIGHT, SCALE, WEIGHT, SCALE),
    "aiter-interleaved": (WEIGHT_GATE_UP, SCALE_GATE_UP, WEIGHT, SCALE_EXPERT),
    "aiter-gfx1250": (WEIGHT, SCALE_N32K4, WEIGHT, SCALE_N32K4),
    "logical": (ROW_MAJOR, ROW_MAJOR, ROW_MAJOR, ROW_MAJOR),
}


def round_up(value, multiple):
    return -(-value // multiple) * multiple


def permuted_positions(shape, order):
    """Source position of each element of an array of `shape` after permuting its axes."""
    strides = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    ranges = [[i * strides[axis] for i in range(shape[axis])] for axis in order]
    return [sum(offsets) for offsets in itertools.product(*ranges)]


def _views(layout, rows, columns):
    """The view and the order of its axes by which AITER permutes a padded matrix."""
    return {
        ROW_MAJOR: ((rows, columns), (0, 1)),
        WEIGHT: ((rows // 16, 16, columns // 32, 2, 16), (0, 2, 3, 1, 4)),
        WEIGHT_GATE_UP: ((2, rows // 32, 16, columns // 16, 16), (1, 0, 3, 2, 4)),
        SCALE: ((rows // 32, 2, 16, columns // 8, 2, 4), (0, 3, 5, 2, 4, 1)),
        SCALE_EXPERT: ((rows // 32, 2, 16, columns // 8, 2, 4), (0, 3, 5, 2, 4, 1)),
        SCALE_GATE_UP: ((2, rows // 32, 16, columns // 8, 2, 4), (1, 3, 5, 2, 4, 0)),
        SCALE_N32K4: ((rows // 32, 32, columns // 4, 4), (0, 2, 1, 3)),
    }[layout]


@functools.lru_cache(maxsize=None)
def positions(layout, rows, columns):
    """Where each output byte comes from; PADDING where it comes from nowhere."""
    padded_rows = round_up(rows, E8M0_ROWS_MULTIPLE) if layout == SCALE else rows
    padded_columns = round_up(columns, SCALE_COLUMNS_MULTIPLE) if layout in FILL else columns
    result = []
    for position in permuted_positions(*_views(layout, padded_rows, padded_columns)):
        row, column = divmod(position, padded_columns)
        inside = row < rows and column < columns
        result.append(row * columns + column if inside else PADDING)
    return result


def _matrices(layout, experts, rows):
    """How many matrices a tensor is, and the rows of each."""
    return (1, experts * rows) if layout == SCALE else (experts, rows)


def shuffle(layout, data, experts, rows, columns):
    """The stored bytes of a tensor of `experts` matrices."""
    count, matrix_rows = _matrices(layout, experts, rows)
    size, fill = matrix_rows * columns, FILL.get(layout)
    order = positions(layout, matrix_rows, columns)
    return b"".join(bytes(fill if position == PADDING else data[i * size + position]
                          for position in order) for i in range(count))


def unshuffle(layout, stored, experts, rows, columns):
    """The inverse. Every byte that comes from nowhere must be the layout's fill."""
    count, matrix_rows = _matrices(layout, experts, rows)
    size, fill = matrix_rows * columns, FILL.get(layout)
    order = positions(layout, matrix_rows, columns)
    if len(stored) != count * len(order):
        raise AssertionError(f"{len(stored)} bytes in {layout}, want {count * len(order)}")
    result = bytearray(count * size)
    for i in range(count):
        for offset, position in enumerate(order, i * len(order)):
            if position != PADDING:
                result[i * size + position] = stored[offset]
            elif stored[offset] != fill:
                raise AssertionError(f"fill byte {offset} is {stored[offset]}, want {fill}")
    return bytes(result)


def alternate_halves(data, rows, columns):
    """Rows g0, g1, .., u0, u1, .. of one expert as g0, u0, g1, u1, .."""
    half = rows // 2
    return b"".join(data[row * columns:(row + 1) * columns]
                    for pair in zip(range(half), range(half, rows)) for row in pair)


def matrix_part(data, columns, row_range, column_range):
    """Rows and columns of a row-major matrix of bytes."""
    return b"".join(data[row * columns + column_range.start:row * columns + column_range.stop]
                    for row in row_range)


def pad_matrix(data, rows, columns, padded_rows, padded_columns):
    """A matrix with zero columns and rows behind it."""
    tail = bytes(padded_columns - columns)
    lines = [data[row * columns:(row + 1) * columns] + tail for row in range(rows)]
    return b"".join(lines) + bytes((padded_rows - rows) * padded_columns)
