"""Prepared files through the rules of the engines' `sharded_state` loaders.

A loader of that kind knows nothing of layouts: it takes the parameters of a model that was just
made, copies each file tensor into the parameter of its name, and wants none left over. vLLM does so
before it shuffles (profile `logical`), SGLang after it has shuffled.
"""

import json
import os
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "e2e")]
from support import TestCase, make_checkpoint, prepare_arguments, read_all_tensors

try:
    import torch
except ImportError:
    torch = None

# Set where torch is known to be installed, so that nothing is left out unseen.
NEED_TORCH = bool(os.environ.get("SHARDPREP_REQUIRE_TORCH"))

# The checkpoint `small-v4`.
HIDDEN, INTERMEDIATE, EXPERTS, VOCABULARY, LAYERS, HASH_LAYERS = 256, 512, 4, 256, 3, 1
HEADS, HEAD, QUERY, OUTPUT_RANK, GROUPS, INDEX_HEADS, INDEX_HEAD = 8, 128, 256, 128, 8, 4, 64
RANKS = 2
NATIVE = INTERMEDIATE // RANKS  # a multiple of the alignment: no pads


class Model:
    """The parameters of one rank, written down from the engine's modules: name -> dtype, shape."""

    def __init__(self):
        self.parameters = {}
        self.add("model.embed_tokens.weight", "bfloat16", VOCABULARY // RANKS, HIDDEN)
        self.add("lm_head.weight", "bfloat16", VOCABULARY // RANKS, HIDDEN)
        self.add("model.norm.weight", "bfloat16", HIDDEN)
        self.add("model.hc_head_fn", "float32", 4, 4 * HIDDEN)
        self.add("model.hc_head_base", "float32", 4)
        self.add("model.hc_head_scale", "float32", 1)
        for layer in range(LAYERS):
            self.layer(f"model.layers.{layer}.", layer)

    def add(self, name, dtype, *shape):
        self.parameters[name] = {"dtype": dtype, "shape": list(shape)}

    def linear(self, name, rows, columns):
        self.add(name + ".weight", "float8_e4m3fn", rows, columns)
        self.add(name + ".weight_scale_inv", "float8_e8m0fnu", -(-rows // 128), -(-columns // 128))

    def compressor(self, name, ratio, width):
        wide = 2 * width if ratio == 4 else width
        self.add(name + "ape", "float32", ratio, wide)
        self.add(name + "fused_wkv_wgate.weight", "bfloat16", 2 * wide, HIDDEN)
        self.add(name + "norm.weight", "bfloat16", width)

    def layer(self, block, number):
        for norm in ("attn_norm", "ffn_norm"):
            self.add(f"{block}{norm}.weight", "bfloat16", HIDDEN)
        for part in ("hc_attn", "hc_ffn"):
            self.add(f"{block}{part}_fn", "float32", 24, 4 * HIDDEN)
            self.add(f"{block}{part}_base", "float32", 24)
            self.add(f"{block}{part}_scale", "float32", 3)
        attention = block + "attn."
        self.linear(attention + "fused_wqa_wkv", QUERY + HEAD, HIDDEN)
        self.add(attention + "q_norm.weight", "bfloat16", QUERY)
        self.add(attention + "kv_norm.weight", "bfloat16", HEAD)
        self.linear(attention + "wq_b", HEADS * HEAD // RANKS, QUERY)
        self.linear(attention + "wo_a", GROUPS * OUTPUT_RANK // RANKS, HEADS * HEAD // GROUPS)
        self.linear(attention + "wo_b", HIDDEN, GROUPS * OUTPUT_RANK // RANKS)
        self.add(attention + "attn_sink", "float32", 64)
        ratio = 4 if number > 0 and number % 2 == 0 else 128
        self.compressor(attention + "compressor.", ratio, HEAD)
        if ratio == 4:
            self.linear(attention + "indexer.wq_b", INDEX_HEADS * INDEX_HEAD, QUERY)
            self.add(attention + "indexer.weights_proj.weight", "bfloat16", INDEX_HEADS, HIDDEN)
            self.compressor(attention + "indexer.compressor.", 4, INDEX_HEAD)
        self.add(block + "ffn.gate.weight", "bfloat16", EXPERTS, HIDDEN)
        if number < HASH_LAYERS:
            self.add(block + "ffn.gate.tid2eid", "int64", VOCABULARY, 6)
        else:
            self.add(block + "ffn.gate.e_score_correction_bias", "float32", EXPERTS)
        self.linear(block + "ffn.shared_experts.gate_up_proj", 2 * NATIVE, HIDDEN)
        self.linear(block + "ffn.shared_experts.down_proj", HIDDEN, NATIVE)
        experts = block + "ffn.experts.routed_experts."
        self.add(experts + "w13_weight", "uint8", EXPERTS, 2 * NATIVE, HIDDEN // 2)
        self.add(experts + "w13_weight_scale", "uint8", EXPERTS, 2 * NATIVE, HIDDEN // 32)
        self.add(experts + "w2_weight", "uint8", EXPERTS, HIDDEN, NATIVE // 2)
        self.add(experts + "w2_weight_scale", "uint8", EXPERTS, HIDDEN, NATIVE // 32)


# Debian's torch has no float8: bytes of the same size stand for it.
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e8m0fnu": 1, "uint8": 1,
              "int64": 8}


@unittest.skipIf(torch is None and not NEED_TORCH, "torch is not installed")
class ShardedStateTest(TestCase):
    """vLLM's model_executor/model_loader/sharded_state_loader.py."""

    def setUp(self):
        super().setUp()
        self.source = make_checkpoint(self.dir / "source", preset="small-v4")
        self.destination = self.dir / "prepared"
        self.state_dict = self.dir / "state_dict.json"
        self.parameters = Model().parameters
        self.state_dict.write_text(json.dumps(self.parameters))

    def arguments(self, *more):
        return prepare_arguments(
            self.source, self.destination, RANKS, "--profile", "logical", "--naming",
            "vllm-routed-experts", "--self-contained", "--slice-dense", "--state-dict",
            self.state_dict, *more)

    def load(self, rank):
        """Copies a rank's files into new parameters; the counts of filled bytes by name."""
        state = {name: torch.zeros(*parameter["shape"], ITEM_BYTES[parameter["dtype"]],
                                   dtype=torch.int16).sub_(1)
                 for name, parameter in self.parameters.items()}
        filled = dict(state)
        for name, tensor in read_all_tensors(self.destination,
                                             f"model-rank-{rank}-part-*.safetensors").items():
            parameter = state.pop(name)  # KeyError: a key that the model has not
            data = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).to(torch.int16)
            self.assertEqual(tuple(tensor.shape), tuple(parameter.shape[:-1]), name)
            parameter.copy_(data.view(parameter.shape))
        self.assertEqual(list(state), [], "parameters that no file fills")
        return filled

    def test_every_parameter_of_every_rank_is_filled_by_the_files_alone(self):
        self.run_ok("shardprep", *self.arguments())
        loaded = [self.load(rank) for rank in range(RANKS)]
        for rank in loaded:
            for name, parameter in rank.items():
                self.assertGreaterEqual(int(parameter.min()), 0, f"{name} has bytes of no file")
        # What is cut differs between ranks, what is whole does not.
        cut, whole = "model.layers.1.attn.wo_b.weight", "model.layers.1.attn.fused_wqa_wkv.weight"
        self.assertFalse(torch.equal(loaded[0][cut], loaded[1][cut]))
        self.assertTrue(torch.equal(loaded[0][whole], loaded[1][whole]))

    def test_ranks_joined_are_the_tensors_of_the_checkpoint(self):
        self.run_ok("shardprep", *self.arguments())
        loaded = [self.load(rank) for rank in range(RANKS)]
        source = read_all_tensors(self.source)
        for name, origin, axis in [("attn.wq_b.weight", "attn.wq_b.weight", 0),
                                   ("attn.wo_b.weight", "attn.wo_b.weight", 1),
                                   ("attn.wo_b.weight_scale_inv", "attn.wo_b.scale", 1),
                                   ("ffn.shared_experts.down_proj.weight",
                                    "ffn.shared_experts.w2.weight", 1)]:
            joined = torch.cat([rank[f"model.layers.1.{name}"] for rank in loaded], axis)
            want = source[f"layers.1.{origin}"]
            self.assertEqual(joined.to(torch.uint8).numpy().tobytes(), bytes(want.data), name)
        gate_up = [rank["model.layers.1.ffn.shared_experts.gate_up_proj.weight"] for rank in loaded]
        for half, origin in enumerate(("w1", "w3")):
            joined = torch.cat([tensor.chunk(2)[half] for tensor in gate_up])
            want = source[f"layers.1.ffn.shared_experts.{origin}.weight"]
            self.assertEqual(joined.to(torch.uint8).numpy().tobytes(), bytes(want.data), origin)

    def test_a_parameter_more_or_less_is_refused_before_a_byte_is_written(self):
        cases = [
            (lambda p: p.pop("model.layers.0.attn.attn_sink"), "is none of the engine's"),
            (lambda p: p.update({"model.layers.0.attn.k_scale": {"dtype": "float32", "shape": []}}),
             "model.layers.0.attn.k_scale: missing"),
            (lambda p: p["lm_head.weight"].update(shape=[VOCABULARY, HIDDEN]), "lm_head.weight"),
        ]
        for change, text in cases:
            with self.subTest(text):
                parameters = json.loads(json.dumps(self.parameters))
                change(parameters)
                self.state_dict.write_text(json.dumps(parameters))
                self.run_refused("shardprep", *self.arguments(),
                                 want=["INVALID_ARGUMENT", text])
                self.assertFalse(self.destination.exists() and list(self.destination.iterdir()))


class PostProcessedTest(TestCase):
    """SGLang's loader copies after post-processing: shuffled tensors, its names for the scales."""

    def test_every_routed_expert_parameter_is_filled(self):
        source = make_checkpoint(self.dir / "source", preset="small-v4")
        prepared = self.dir / "prepared"
        self.run_ok("shardprep", *prepare_arguments(
            source, prepared, RANKS, "--profile", "aiter-interleaved", "--naming", "sglang"))
        for rank in range(RANKS):
            files = read_all_tensors(prepared, f"model-rank-{rank}-part-*.safetensors")
            for layer in range(LAYERS):
                experts = f"model.layers.{layer}.ffn.experts."
                sizes = {"w13_weight": EXPERTS * 2 * NATIVE * HIDDEN // 2,
                         "w13_weight_scale_inv": EXPERTS * 2 * NATIVE * HIDDEN // 32,
                         "w2_weight": EXPERTS * HIDDEN * NATIVE // 2,
                         "w2_weight_scale_inv": EXPERTS * HIDDEN * NATIVE // 32}
                for role, size in sizes.items():
                    self.assertEqual(len(files.pop(experts + role).data), size, role)
            self.assertEqual(list(files), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
