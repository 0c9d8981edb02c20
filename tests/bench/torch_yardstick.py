#!/usr/bin/python3
"""What a straightforward torch script needs for the same work, as a yardstick.

  torch_yardstick.py shuffle [--repetitions N]
      Prints as JSON the bytes per second of `x.view().permute().contiguous()` on one thread, for
      the geometries that shuffle_bench measures: a rank of 8 of a model with hidden size 7168 and
      intermediate size 3072.
  torch_yardstick.py job --source DIR --destination DIR --ranks N
      Slices, fuses, shuffles, hashes and saves the routed experts of a DeepSeek-V4 checkpoint in
      MXFP4, one file for each layer and rank, durably. Prints as JSON the seconds of the work,
      torch's import not counted, and of the import. Every file is a safetensors file with the tensors
      w13_weight, w2_weight, w13_weight_scale and w2_weight_scale of layout aiter-separated.
"""

import argparse
import hashlib
import json
import mmap
import os
import pathlib
import re
import statistics
import struct
import sys
import time

IMPORT_START = time.monotonic()
import torch

IMPORT_SECONDS = time.monotonic() - IMPORT_START

EXPERT = re.compile(r"(layers\.\d+|mtp\.\d+)\.ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)$")
# name -> experts, rows and byte columns of a rank
WEIGHTS = {"w13": (24, 768, 3584), "w2": (48, 7168, 192)}
SCALES = {"w13_scale": (128, 768, 224), "w2_scale": (256, 7168, 12)}


def shuffle_weight(x):
    """aiter-16x16 of [experts, rows, byte columns]."""
    experts, rows, columns = x.shape
    tiles = x.view(experts, rows // 16, 16, columns // 32, 2, 16)
    return tiles.permute(0, 1, 3, 4, 2, 5).contiguous()


def shuffle_scale(x):
    """aiter-e8m0 of [rows, columns], padded to 256 rows and 8 columns."""
    rows, columns = x.shape
    padded = x
    if rows % 256 or columns % 8:
        padded = torch.full((-(-rows // 256) * 256, -(-columns // 8) * 8), 127, dtype=torch.uint8)
        padded[:rows, :columns] = x
    rows, columns = padded.shape
    tiles = padded.view(rows // 32, 2, 16, columns // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous()


def rate(function, x, repetitions):
    seconds = []
    for _ in range(1 + repetitions):
        start = time.monotonic()
        function(x)
        seconds.append(time.monotonic() - start)
    return x.numel() / statistics.median(seconds[1:])


def measure_shuffles(repetitions):
    torch.set_num_threads(1)
    rates = {}
    for name, shape in WEIGHTS.items():
        x = torch.randint(0, 256, shape, dtype=torch.uint8)
        rates[name] = rate(shuffle_weight, x, repetitions)
    for name, (experts, rows, columns) in SCALES.items():
        x = torch.randint(0, 256, (experts * rows, columns), dtype=torch.uint8)
        rates[name] = rate(shuffle_scale, x, repetitions)
    return rates


class Source:
    """The tensors of the checkpoint's files, as views of mapped bytes."""

    def __init__(self, directory):
        self.tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            (size,) = struct.unpack("<Q", mapped[:8])
            data = torch.frombuffer(mapped, dtype=torch.uint8)
            for name, entry in json.loads(mapped[8:8 + size]).items():
                begin, end = entry.get("data_offsets", (0, 0))
                if end > begin:
                    self.tensors[name] = (data[8 + size + begin:8 + size + end], entry["shape"])

    def layers(self):
        """Layer -> number of its experts."""
        layers = {}
        for name in self.tensors:
            found = EXPERT.match(name)
            if found:
                layer = found.group(1)
                layers[layer] = max(layers.get(layer, 0), int(found.group(2)) + 1)
        return layers

    def matrix(self, layer, expert, which, kind):
        data, shape = self.tensors[f"{layer}.ffn.experts.{expert}.{which}.{kind}"]
        return data.view(*shape)


def rank_tensors(source, layer, experts, rank, ranks):
    """name -> shuffled tensor."""
    def rows(which, kind, expert):
        matrix = source.matrix(layer, expert, which, kind)
        width = matrix.shape[0] // ranks
        return matrix[rank * width:(rank + 1) * width]

    def columns(which, kind, expert):
        matrix = source.matrix(layer, expert, which, kind)
        width = matrix.shape[1] // ranks
        return matrix[:, rank * width:(rank + 1) * width]

    def fused(kind):
        w13 = torch.stack([torch.cat([rows("w1", kind, e), rows("w3", kind, e)])
                           for e in range(experts)])
        w2 = torch.stack([columns("w2", kind, e) for e in range(experts)])
        return w13, w2

    w13, w2 = fused("weight")
    w13_scale, w2_scale = fused("scale")
    return {"w13_weight": shuffle_weight(w13), "w2_weight": shuffle_weight(w2),
            "w13_weight_scale": shuffle_scale(w13_scale.flatten(0, 1)),
            "w2_weight_scale": shuffle_scale(w2_scale.flatten(0, 1))}


def save(path, tensors):
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "U8", "shape": list(tensor.shape),
                        "data_offsets": [end, end + tensor.numel()]}
        end += tensor.numel()
    text = json.dumps(header).encode()
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for piece in (struct.pack("<Q", len(text)), text,
                      *(memoryview(tensor.numpy().reshape(-1)) for tensor in tensors.values())):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def run_job(options):
    start = time.monotonic()
    source = Source(options.source)
    options.destination.mkdir()
    digests = {}
    for layer, experts in source.layers().items():
        for rank in range(options.ranks):
            path = options.destination / f"{layer}-rank-{rank}.safetensors"
            digests[path.name] = save(path, rank_tensors(source, layer, experts, rank,
                                                         options.ranks))
    (options.destination / "digests.json").write_text(json.dumps(digests))
    return {"seconds": time.monotonic() - start, "import_seconds": IMPORT_SECONDS}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    shuffle = commands.add_parser("shuffle")
    shuffle.add_argument("--repetitions", type=int, default=5)
    job = commands.add_parser("job")
    job.add_argument("--source", type=pathlib.Path, required=True)
    job.add_argument("--destination", type=pathlib.Path, required=True)
    job.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    if options.command == "shuffle":
        result = measure_shuffles(options.repetitions)
    else:
        result = run_job(options)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
