"""Opens a directory of fetched shards for one rank, refuses what does not fit, and yields tensors.

A shuffle changes neither shape nor dtype, so an engine that loads the wrong artefact computes
fluent garbage without an error. Therefore a caller states what it expects, at least the layout
profile and the padded width, and gets tensors only when the artefact agrees:

    artifact = open_artifact("/models/fetched", rank=3,
                             expect={"profile": "aiter-separated", "width": 384})
    for name, tensor in artifact.torch_tensors():
        ...

The directory is one that `shardprep fetch` made, or a whole prepared one. One file, standard
library only, Python 3.9 or later on Linux; torch is imported by the methods that return its
tensors, and by nothing else. numpy is not used.

What has been checked once open_artifact() returns: the manifest's own digest, its fingerprint,
every stated expectation, that the rank is there, size and SHA-256 of its rank manifests and of the
copied files, size and whole header of every data file. The bytes of the data files were verified
while they were fetched; check_digests() does it again, at the speed of SHA-256.

Every refusal is an ArtifactError. Objects are immutable and may be shared between threads.
"""

import concurrent.futures
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import struct
from typing import (TYPE_CHECKING, Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple,
                    Union)

if TYPE_CHECKING:
    import torch

__all__ = ["Artifact", "ArtifactError", "TensorInfo", "compare_versions", "open_artifact"]

FORMAT_VERSION = "1"
CHUNK_BYTES = 16 << 20
MAX_DOCUMENT_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000
REPLICATED_RANK = -1
ROW_MAJOR = "row-major"

# Expectations, and how each value reads: those of `shardprep fetch --expect`.
TEXT, NUMBER, VERSION, HASH = "text", "number", "version", "hash"
EXPECTATION_KINDS: Mapping[str, str] = {
    "backend": TEXT, "activation": TEXT, "arch": TEXT, "tp": NUMBER, "ep": NUMBER,
    "profile": TEXT, "width": NUMBER, "hidden": NUMBER, "gate_mode": TEXT, "aiter": VERSION,
    "fingerprint": HASH, "content": HASH,
}
REQUIRED_EXPECTATIONS = ("profile", "width")

# Bits of one element of a safetensors dtype.
DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

# The torch dtype of a parameter that holds a safetensors dtype. Packed FP4 and E8M0 scales are
# bits: engines hold them as uint8 or view them as a dtype of their own, which changes no byte.
TORCH_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "F4": "uint8", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "uint8", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "I16": "int16", "U16": "uint16", "F16": "float16",
    "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32", "C64": "complex64",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}

_SEAL = re.compile(rb'^ "document_sha256": "([0-9a-f]{64})"', re.MULTILINE)
_VERSION = re.compile(r"(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?"
                      r"(?:\+[A-Za-z0-9.]+)?")


class ArtifactError(Exception):
    """Why an artefact is not used: what was looked at, what was expected of it, what was found."""

    def __init__(self, field: str, expected: object, found: object, where: str = "") -> None:
        self.field, self.expected, self.found, self.where = field, expected, found, where
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{field}: expected {expected}, found {found}")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """One tensor of the rank, as its rank manifest describes it."""

    name: str
    dtype: str  # of safetensors, e.g. "U8"
    shape: Tuple[int, ...]  # in elements of dtype
    file: str
    offset: int  # bytes from the start of the file
    size_bytes: int
    layout: str  # e.g. "aiter-16x16"; "row-major" for tensors copied unchanged
    row_order: str  # "as-is" or "gate-up-rows": order of the rows before the layout
    fill: int  # byte that stands where the layout has no input byte
    expert_count: int  # 0 for tensors that were copied unchanged
    # Of one expert's matrix, from the source and as stored.
    native_rows: int
    padded_rows: int
    native_row_bytes: int
    padded_row_bytes: int
    half_count: int  # 2 where gate and up are halves that are padded each on its own
    native_extent: Tuple[int, ...]  # [rows, columns] of one expert's matrix, in elements
    native_crc32c: str  # of the source bytes in the order expert, gate/up, row, column
    block_size: int  # elements per scale block, 0 without block scales

    @property
    def is_expert(self) -> bool:
        """Whether this is a fused tensor of routed experts, prepared for this rank alone."""
        return self.expert_count > 0

    @property
    def is_shuffled(self) -> bool:
        """Whether its bytes already stand in the kernel's order, so must not be shuffled again."""
        return self.is_expert and self.layout != ROW_MAJOR

    @property
    def parameter_shape(self) -> Tuple[int, ...]:
        """The shape of the parameter that holds it: that of bytes where two elements share one."""
        if self.dtype != "F4" or not self.shape:
            return self.shape
        return self.shape[:-1] + (self.shape[-1] // 2,)


class Artifact:
    """The shards of one rank, checked. Made by open_artifact()."""

    def __init__(self, directory: str, rank: int, manifest: Dict[str, Any],
                 files: Sequence["_File"], expert_map: Optional[Dict[str, Any]]) -> None:
        self.directory = directory
        self.rank = rank
        self.manifest = manifest  # the whole manifest.json, 64-bit integers as decimal strings
        # expert-map-rank-{rank}.json under expert parallelism, else None: `logical_experts` has the
        # logical expert of each slot of the fused tensors.
        self.expert_map = expert_map
        self._files = tuple(files)
        self._tensors = {tensor.name: tensor for file in files for tensor in file.tensors}

    # -- What it was prepared for --

    @property
    def fingerprint(self) -> str:
        return self.manifest["layout_fingerprint"]

    @property
    def content_id(self) -> str:
        return self.manifest["content_id"]

    @property
    def backend(self) -> str:
        return self.manifest["kernel_target"]["backend"]

    @property
    def activation(self) -> str:
        return self.manifest["kernel_target"]["activation"]

    @property
    def architecture(self) -> str:
        return self.manifest["kernel_target"]["architecture"]

    @property
    def profile(self) -> str:
        return self.manifest["kernel_target"]["profile"]

    @property
    def gate_mode(self) -> str:
        """"SEPARATED" or "INTERLEAVE": the mode in which the kernel must be called."""
        return self.manifest["gate_mode"]

    @property
    def naming(self) -> str:
        """Naming scheme of the routed-expert tensors; all others keep the checkpoint's names."""
        return self.manifest["naming"]

    @property
    def is_shuffled(self) -> bool:
        """Whether routed experts are in the kernel's order; False for profile "logical"."""
        return self.manifest["is_shuffled"]

    @property
    def minimum_aiter_version(self) -> str:
        """Lowest AITER that computes right numbers from these bytes; empty when any does."""
        return self.manifest["minimum_aiter_version"]

    @property
    def rank_count(self) -> int:
        return self.manifest["rank_count"]

    @property
    def hidden(self) -> int:
        """Native hidden extent of one rank, in elements."""
        return int(self.manifest["extents"]["hidden"])

    @property
    def padded_hidden(self) -> int:
        return int(self.manifest["extents"]["padded_hidden"])

    @property
    def intermediate(self) -> int:
        """Native intermediate extent of this rank, in elements."""
        for shape in self.manifest.get("rank_shapes", ()):  # listed where ranks differ
            if self.rank in shape["ranks"]:
                return int(shape["intermediate"])
        return int(self.manifest["extents"]["intermediate"])

    @property
    def padded_intermediate(self) -> int:
        return int(self.manifest["extents"]["padded_intermediate"])

    @property
    def hidden_pad(self) -> int:
        """padded_hidden - hidden, in elements: what AITER's fused_moe takes as hidden_pad."""
        return self.padded_hidden - self.hidden

    @property
    def intermediate_pad(self) -> int:
        """padded_intermediate - intermediate, in elements: its intermediate_pad."""
        return self.padded_intermediate - self.intermediate

    # -- Tensors --

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor of the rank by name, in the order of files and offsets: replicated last."""
        return self._tensors

    def experts(self) -> List[TensorInfo]:
        """The fused tensors of the routed experts."""
        return [tensor for tensor in self._tensors.values() if tensor.is_expert]

    def carried(self) -> List[TensorInfo]:
        """The tensors that were copied unchanged, under the checkpoint's own names."""
        return [tensor for tensor in self._tensors.values() if not tensor.is_expert]

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ArtifactError("tensor", name, "no tensor of that name", self.directory)
        return self._tensors[name]

    def read_into(self, name: str, buffer: Any) -> TensorInfo:
        """Reads a tensor's bytes into memory that the caller owns, such as a pinned block.

        `buffer` is anything with a writable contiguous buffer of exactly size_bytes bytes.
        """
        tensor = self.info(name)
        view = memoryview(buffer).cast("B")
        if view.nbytes != tensor.size_bytes:
            raise ArtifactError(name, f"a buffer of {tensor.size_bytes} bytes",
                                f"{view.nbytes} bytes")
        _read_exactly(self.directory, tensor.file, tensor.offset, view)
        return tensor

    def read(self, name: str) -> memoryview:
        """A tensor's bytes, flat, in memory of their own; needs no torch."""
        data = bytearray(self.info(name).size_bytes)
        self.read_into(name, data)
        return memoryview(data)

    def torch_tensor(self, name: str, out: Optional["torch.Tensor"] = None) -> "torch.Tensor":
        """A tensor on the CPU with the dtype and shape of its parameter; one read, no other copy.

        `out`, when given, receives the bytes: a contiguous CPU tensor of as many bytes, pinned for
        example. The result of a tensor in the kernel's order carries the attribute
        `is_shuffled = True`, which AITER reads; torch drops it in every operation, so set it again
        on the parameter. Raises ArtifactError when this torch lacks the dtype.
        """
        import torch
        tensor = self.info(name)
        dtype = _torch_dtype(torch, tensor)
        if out is None:
            out = torch.empty(tensor.size_bytes, dtype=torch.uint8)
        size_bytes = out.numel() * out.element_size()
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ArtifactError(name, "a contiguous CPU tensor to read into",
                                f"{tuple(out.shape)} on {out.device}")
        if size_bytes != tensor.size_bytes:
            raise ArtifactError(name, f"{tensor.size_bytes} bytes to read into", size_bytes)
        if size_bytes:
            self.read_into(name, (ctypes.c_ubyte * size_bytes).from_address(out.data_ptr()))
        result = out.reshape(-1).view(torch.uint8).view(dtype).reshape(tensor.parameter_shape)
        if tensor.is_shuffled:
            result.is_shuffled = True
        return result

    def torch_tensors(self, tensors: Optional[Sequence[TensorInfo]] = None
                      ) -> Iterator[Tuple[str, "torch.Tensor"]]:
        """(name, torch_tensor(name)) of the given tensors, or of all, one at a time."""
        for tensor in self._tensors.values() if tensors is None else tensors:
            yield tensor.name, self.torch_tensor(tensor.name)

    # -- Checks --

    def check_digests(self, threads: Optional[int] = None) -> None:
        """Digests every byte of the data files; ArtifactError names the first file and chunk."""
        chunks = [(file, index) for file in self._files for index in range(len(file.chunks))]
        pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count() or 1)
        try:
            for _ in pool.map(lambda task: task[0].check_chunk(self.directory, task[1]), chunks):
                pass
        finally:
            # Chunks that are not begun are dropped, so that a failure is told at once.
            pool.shutdown(wait=True, cancel_futures=True)


def open_artifact(directory: Union[str, "os.PathLike[str]"], rank: int,
                  expect: Union[str, Mapping[str, object]], *,
                  allow_unstated: bool = False) -> Artifact:
    """Opens the shards of one rank in a directory, when they are what the caller expects.

    `expect` has the keys and values of `shardprep fetch --expect`, as "profile=..,width=.." or as a
    mapping: backend, activation, arch, tp, ep, profile, width, hidden, gate_mode, aiter (the
    version at hand), fingerprint, content. `width` and `hidden` are the padded extents of one rank.
    Profile and width must be stated unless `allow_unstated`. Raises ArtifactError.
    """
    stated = _parse_expectations(expect)
    try:
        return _open(os.fspath(directory), rank, stated, allow_unstated)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ArtifactError("manifests", "complete documents", repr(error),
                            os.fspath(directory)) from error


def _open(directory: str, rank: int, stated: Mapping[str, str],
          allow_unstated: bool) -> Artifact:
    text, manifest = _load_document(directory, "manifest.json")
    _check_seal(text)
    _check_manifest(manifest)
    for key, value in stated.items():
        _check_expectation(manifest, key, value)
    missing = [key for key in REQUIRED_EXPECTATIONS if key not in stated]
    if missing and not allow_unstated:
        raise ArtifactError(missing[0], "a stated value, because files of another one load without "
                            "an error and compute garbage", f"none stated; the artefact has "
                            f"{_manifest_value(manifest, missing[0])}")
    files = _rank_files(directory, rank, manifest)
    for reference in manifest["copied_files"]:
        _load_referenced(directory, reference)
    for file in files:
        file.check_header(directory, manifest)
    return Artifact(directory, rank, manifest, files, _expert_map(directory, rank, manifest))


def compare_versions(a: str, b: str) -> int:
    """Negative, zero or positive as version `a` is older than, equal to or newer than `b`.

    The order of PEP 440, in which a local part does not count:
    0.1.6.dev1 < 0.1.6rc1 < 0.1.6 == 0.1.6.0+rocm < 0.1.6.post2.
    """
    left, right = _version_key(a), _version_key(b)
    return (left > right) - (left < right)


# -- Expectations --

def _parse_expectations(expect: Union[str, Mapping[str, object]]) -> Dict[str, str]:
    pairs: List[Tuple[str, str]] = []
    if isinstance(expect, str):
        for item in filter(None, expect.split(",")):
            key, equals, value = item.partition("=")
            if not equals:
                raise ArtifactError("expect", "key=value", item)
            pairs.append((key, value))
    else:
        pairs = [(key, str(value)) for key, value in expect.items()]
    stated: Dict[str, str] = {}
    for key, value in pairs:
        if key not in EXPECTATION_KINDS:
            raise ArtifactError("expect", "one of " + ", ".join(EXPECTATION_KINDS), key)
        if key in stated:
            raise ArtifactError("expect", f"{key} once", "twice")
        _check_stated_value(key, value)
        stated[key] = value
    return stated


def _check_stated_value(key: str, value: str) -> None:
    kind = EXPECTATION_KINDS[key]
    want = {TEXT: r".+", NUMBER: r"[1-9]\d{0,8}", VERSION: _VERSION.pattern,
            HASH: r"[0-9a-f]{64}"}[kind]
    if not re.fullmatch(want, value, re.DOTALL):
        raise ArtifactError("expect", f"{key} to be a {kind}", repr(value))


def _manifest_value(manifest: Mapping[str, Any], key: str) -> str:
    kernel, extents = manifest["kernel_target"], manifest["extents"]
    parallel = manifest["parallel_layout"]
    return str({
        "backend": kernel["backend"], "activation": kernel["activation"],
        "arch": kernel["architecture"], "profile": kernel["profile"],
        "tp": parallel["tensor_parallel_size"], "ep": parallel["expert_parallel_size"],
        "width": extents["padded_intermediate"], "hidden": extents["padded_hidden"],
        "gate_mode": manifest["gate_mode"], "aiter": manifest["minimum_aiter_version"],
        "fingerprint": manifest["layout_fingerprint"], "content": manifest["content_id"],
    }[key])


def _check_expectation(manifest: Mapping[str, Any], key: str, value: str) -> None:
    found = _manifest_value(manifest, key)
    if key == "aiter":
        if not found:
            raise ArtifactError(key, value, "that the artefact states no version that it needs")
        if compare_versions(value, found) < 0:
            raise ArtifactError(key, value, f"that the artefact needs {found} or later")
    elif found != value:
        raise ArtifactError(key, value, found)


def _version_key(text: str) -> Tuple[Any, ...]:
    match = _VERSION.fullmatch(text)
    if not match:
        raise ArtifactError("version", "one like 0.1.16", repr(text))
    numbers, phase, pre, post, dev = match.groups()
    release = [int(number) for number in numbers.split(".")]
    while len(release) > 1 and release[-1] == 0:
        release.pop()
    order = {"a": 0, "b": 1, "rc": 2}.get(phase, -1 if dev and not post else 3)
    return (release, order, int(pre or 0), int(post) if post else -1,
            int(dev) if dev else float("inf"))


# -- Documents --

def _load_document(directory: str, name: str) -> Tuple[bytes, Dict[str, Any]]:
    text = _read_small(directory, name)
    return text, _parse_object(text, name)


def _read_small(directory: str, name: str) -> bytes:
    try:
        with open(os.path.join(directory, name), "rb") as file:
            text = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise ArtifactError(name, "a readable file", error.strerror, directory) from error
    if len(text) > MAX_DOCUMENT_BYTES:
        raise ArtifactError(name, f"at most {MAX_DOCUMENT_BYTES} bytes", "more", directory)
    return text


def _parse_object(text: bytes, where: str) -> Dict[str, Any]:
    def unique(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            raise ValueError("a key twice")
        return value

    def refuse(constant: str) -> None:
        raise ValueError(f"the number {constant}")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ArtifactError("content", "JSON", error, where) from error
    if not isinstance(value, dict):
        raise ArtifactError("content", "a JSON object", type(value).__name__, where)
    return value


def _check_seal(text: bytes) -> None:
    """The manifest states the SHA-256 of itself with that statement empty."""
    seals = list(_SEAL.finditer(text))
    if len(seals) != 1:
        raise ArtifactError("document_sha256", "one", len(seals), "manifest.json")
    start, end = seals[0].span(1)
    digest = hashlib.sha256(text[:start] + text[end:]).hexdigest()
    stated = seals[0].group(1).decode()
    if digest != stated:
        raise ArtifactError("document_sha256", digest, f"{stated}: the manifest was changed after "
                            "it was written", "manifest.json")


def _check_manifest(manifest: Mapping[str, Any]) -> None:
    for field, want in (("format_version", FORMAT_VERSION), ("stage", "prepared")):
        if manifest.get(field) != want:
            raise ArtifactError(field, repr(want), repr(manifest.get(field)), "manifest.json")
    for field, kind in (("kernel_target", dict), ("extents", dict), ("parallel_layout", dict),
                        ("rank_manifests", list), ("copied_files", list), ("rank_count", int),
                        ("fingerprint_inputs", str)):
        if not isinstance(manifest.get(field), kind):
            raise ArtifactError(field, kind.__name__, type(manifest.get(field)).__name__,
                                "manifest.json")
    digest = hashlib.sha256(manifest["fingerprint_inputs"].encode()).hexdigest()
    if digest != manifest["layout_fingerprint"]:
        raise ArtifactError("layout_fingerprint", digest, manifest["layout_fingerprint"],
                            "manifest.json")


def _load_referenced(directory: str, reference: Mapping[str, Any]) -> bytes:
    """A small file that the manifest vouches for by size and SHA-256."""
    name = _plain_name(reference["key"])
    text = _read_small(directory, name)
    if len(text) != int(reference["size_bytes"]):
        raise ArtifactError("size", f"{reference['size_bytes']} bytes", f"{len(text)} bytes", name)
    digest = hashlib.sha256(text).hexdigest()
    if digest != reference["sha256"]:
        raise ArtifactError("SHA-256", reference["sha256"], digest, name)
    return text


def _plain_name(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ArtifactError("file name", "a name without a directory", repr(name), "manifest.json")
    return name


def _rank_files(directory: str, rank: int, manifest: Mapping[str, Any]) -> List["_File"]:
    """The data files of a rank, then the replicated ones."""
    if not 0 <= rank < manifest["rank_count"]:
        raise ArtifactError("rank", f"0 to {manifest['rank_count'] - 1}", rank, "manifest.json")
    references = {reference["key"]: reference for reference in manifest["rank_manifests"]}
    own = f"rank-{rank}.json"
    if own not in references:
        raise ArtifactError("rank_manifests", own, "none", "manifest.json")
    if not os.path.exists(os.path.join(directory, own)):
        there = [str(other) for other in range(manifest["rank_count"])
                 if os.path.exists(os.path.join(directory, f"rank-{other}.json"))]
        raise ArtifactError("rank", rank, ", ".join(there) or "none", directory)
    files = _files_of(directory, references[own], rank, f"model-rank-{rank}-part-", manifest)
    if "replicated.json" in references:
        files += _files_of(directory, references["replicated.json"], REPLICATED_RANK,
                           "model-replicated-part-", manifest)
    names = [tensor.name for file in files for tensor in file.tensors]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ArtifactError("tensor", f"{twice} once", "twice", own)
    return files


def _files_of(directory: str, reference: Mapping[str, Any], rank: int, prefix: str,
              manifest: Mapping[str, Any]) -> List["_File"]:
    where = reference["key"]
    document = _rank_document(directory, reference, rank, manifest)
    files = []
    for part, record in enumerate(document["files"]):
        file = _File(record, "replicated" if rank == REPLICATED_RANK else str(rank))
        if file.key != f"{prefix}{part}.safetensors":
            raise ArtifactError(f"file {part}", f"{prefix}{part}.safetensors", file.key, where)
        files.append(file)
    return files


def _rank_document(directory: str, reference: Mapping[str, Any], rank: int,
                   manifest: Mapping[str, Any]) -> Dict[str, Any]:
    """A document that the manifest vouches for, about one rank of this very artefact."""
    document = _parse_object(_load_referenced(directory, reference), reference["key"])
    wanted = (("format_version", FORMAT_VERSION), ("rank", rank),
              ("layout_fingerprint", manifest["layout_fingerprint"]))
    for field, want in wanted:
        if document.get(field) != want:
            raise ArtifactError(field, want, document.get(field), reference["key"])
    return document


def _expert_map(directory: str, rank: int, manifest: Mapping[str, Any]
                ) -> Optional[Dict[str, Any]]:
    own = f"expert-map-rank-{rank}.json"
    for reference in manifest.get("expert_maps", ()):
        if reference["key"] == own:
            return _rank_document(directory, reference, rank, manifest)
    if manifest.get("expert_maps"):
        raise ArtifactError("expert_maps", own, "none", "manifest.json")
    return None


# -- Data files --

class _File:
    """A data file as its rank manifest describes it."""

    def __init__(self, record: Mapping[str, Any], rank: str) -> None:
        self.key: str = record["key"]
        self.rank = rank
        self.size_bytes = int(record["size_bytes"])
        self.chunks: Tuple[str, ...] = tuple(record["chunk_sha256"])
        self.tensors = tuple(_tensor(self.key, tensor) for tensor in record["tensors"])
        joined = b"".join(bytes.fromhex(chunk) for chunk in self.chunks)
        digest = "sha256-16m:" + hashlib.sha256(joined).hexdigest()
        if digest != record["digest"]:
            raise ArtifactError("digest", digest, record["digest"], self.key)
        if len(self.chunks) != -(-self.size_bytes // CHUNK_BYTES):
            raise ArtifactError("chunks", -(-self.size_bytes // CHUNK_BYTES), len(self.chunks),
                                self.key)

    def check_chunk(self, directory: str, index: int) -> None:
        start = index * CHUNK_BYTES
        data = memoryview(bytearray(min(CHUNK_BYTES, self.size_bytes - start)))
        _read_exactly(directory, self.key, start, data)
        found = hashlib.sha256(data).hexdigest()
        if found != self.chunks[index]:
            raise ArtifactError(f"chunk {index}", f"SHA-256 {self.chunks[index]}", found, self.key)

    def check_header(self, directory: str, manifest: Mapping[str, Any]) -> None:
        """Size and header are what the manifests say, tensor by tensor."""
        try:
            found = os.stat(os.path.join(directory, self.key)).st_size
        except OSError as error:
            raise ArtifactError(self.key, f"a file of {self.size_bytes} bytes", error.strerror,
                                directory) from error
        if found != self.size_bytes:
            raise ArtifactError("size", f"{self.size_bytes} bytes", f"{found} bytes", self.key)
        data_start, header = self._read_header(directory)
        metadata = header.pop("__metadata__", {})
        for field, want in (("fingerprint", manifest["layout_fingerprint"]), ("rank", self.rank),
                            ("profile", manifest["kernel_target"]["profile"])):
            if metadata.get(f"shardprep.{field}") != want:
                raise ArtifactError(f"metadata shardprep.{field}", want,
                                    metadata.get(f"shardprep.{field}"), self.key)
        end = data_start
        for tensor in self.tensors:
            want = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                    "data_offsets": [tensor.offset - data_start,
                                     tensor.offset - data_start + tensor.size_bytes]}
            if header.pop(tensor.name, None) != want:
                raise ArtifactError(f"header of {tensor.name}", want, "another", self.key)
            if tensor.offset != end:
                raise ArtifactError(f"offset of {tensor.name}", end, tensor.offset, self.key)
            end += tensor.size_bytes
        if header or end != self.size_bytes:
            raise ArtifactError("tensors", f"those of its rank manifest, {end} bytes",
                                f"{len(header)} more, {self.size_bytes} bytes", self.key)

    def _read_header(self, directory: str) -> Tuple[int, Dict[str, Any]]:
        prefix = bytearray(8)
        _read_exactly(directory, self.key, 0, memoryview(prefix))
        (size,) = struct.unpack("<Q", prefix)
        if size > min(MAX_HEADER_BYTES, self.size_bytes - 8):
            raise ArtifactError("header length", f"at most {self.size_bytes - 8}", size, self.key)
        text = bytearray(size)
        _read_exactly(directory, self.key, 8, memoryview(text))
        if not text.startswith(b"{"):
            raise ArtifactError("header", "JSON that starts with {", bytes(text[:8]), self.key)
        return 8 + size, _parse_object(bytes(text), self.key)


def _tensor(file: str, record: Mapping[str, Any]) -> TensorInfo:
    numbers = ("offset", "size_bytes", "fill", "expert_count", "native_rows", "padded_rows",
               "native_row_bytes", "padded_row_bytes", "half_count", "block_size")
    texts = ("name", "dtype", "layout", "row_order", "native_crc32c")
    try:
        tensor = TensorInfo(
            file=file, shape=tuple(int(extent) for extent in record["shape"]),
            native_extent=tuple(int(extent) for extent in record["native_extent"]),
            **{field: int(record[field]) for field in numbers},
            **{field: str(record[field]) for field in texts})
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError("tensor", "a complete record", repr(error), file) from error
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is None:
        raise ArtifactError(f"dtype of {tensor.name}", "one of safetensors", tensor.dtype, file)
    for extent in tensor.shape:
        bits *= extent
    if bits != 8 * tensor.size_bytes:
        raise ArtifactError(f"size of {tensor.name}", f"{bits / 8:g} bytes", tensor.size_bytes,
                            file)
    return tensor


def _torch_dtype(torch: Any, tensor: TensorInfo) -> Any:
    name = TORCH_DTYPES.get(tensor.dtype)
    dtype = getattr(torch, name, None) if name else None
    if dtype is None:
        raise ArtifactError(f"dtype of {tensor.name}", f"a torch that has {tensor.dtype}",
                            f"torch {torch.__version__}")
    return dtype


def _read_exactly(directory: str, name: str, offset: int, view: memoryview) -> None:
    """Fills the view from a file; a file that ends before is an error, as is one that fails."""
    filled = 0
    try:
        with open(os.path.join(directory, name), "rb", buffering=0) as file:
            while filled < view.nbytes:
                count = os.preadv(file.fileno(), [view[filled:]], offset + filled)
                if count == 0:
                    raise ArtifactError("size", f"{offset + view.nbytes} bytes at least",
                                        f"{offset + filled} bytes", name)
                filled += count
    except OSError as error:
        raise ArtifactError(name, "a readable file", error.strerror, directory) from error
