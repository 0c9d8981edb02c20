"""vLLM loads shards that shardprep prepared: `--load-format shardprep`. NOT RUN HERE.

An example to start from: no vLLM and no GPU were at hand, so nothing but its syntax is checked. It
assumes vLLM about 0.28 to 0.32, with these names:

  vllm.model_executor.model_loader.register_model_loader, .base_loader.BaseModelLoader, whose
    load_model() constructs the model, calls load_weights() and then
    process_weights_after_loading(); out-of-tree loaders register through the entry point group
    `vllm.general_plugins` (function `register` below)
  vllm.model_executor.layers.quantization.mxfp4, whose Mxfp4MoEMethod calls
    convert_weight_to_mxfp4_moe_kernel_format() to shuffle, then builds its kernel

The prepared tensors are what that conversion returns, so it is replaced, while the model is loaded,
by one that hands back what is there. Everything else is the engine's own: carried tensors keep the
checkpoint's names and go through model.load_weights(). Check against your version: the signature of
the conversion, the parameters' path (`experts.` or `experts.routed_experts.`, see --naming) and,
with gate mode INTERLEAVE, that AITER_BF16_FP8_MOE_BOUND=0 is what your engine sets.

  vllm serve DIR --load-format shardprep --tensor-parallel-size 8 --model-loader-extra-config \
    '{"expect": "profile=aiter-interleaved,width=384,aiter=0.1.18"}'

DIR holds the ranks of this node: `shardprep fetch URI --rank 0-7 --into DIR --expect ...`.
"""

import contextlib
import os

from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.quantization import mxfp4
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

import shardprep_artifact

CONVERSION = "convert_weight_to_mxfp4_moe_kernel_format"


def parameter_view(tensor, parameter, name):
    """The tensor as the parameter's dtype. The same bytes: E8M0 and packed FP4 are one byte each.

    A weight has the parameter's shape. A shuffled scale need not: AITER makes it a matrix over all
    experts and its columns a multiple of eight.
    """
    is_scale = name.endswith("_scale")
    if tensor.element_size() != parameter.element_size() or (
            not is_scale and tensor.shape != parameter.shape):
        raise shardprep_artifact.ArtifactError(
            name, f"{tuple(parameter.shape)} {parameter.dtype}",
            f"{tuple(tensor.shape)} {tensor.dtype}")
    return tensor.view(parameter.dtype)


@contextlib.contextmanager
def without_conversion():
    """Keeps the engine from shuffling what is shuffled already."""
    original = getattr(mxfp4, CONVERSION)

    def keep(*arguments, w13, w2, w13_scale, w2_scale, w13_bias=None, w2_bias=None, **options):
        for weight in (w13, w2):
            weight.is_shuffled = True
        return w13, w2, w13_scale, w2_scale, w13_bias, w2_bias

    setattr(mxfp4, CONVERSION, keep)
    try:
        yield
    finally:
        setattr(mxfp4, CONVERSION, original)


def check_pads(artifact, layer_name, layer):
    """The engine computes its kernels' pads from its own extents: they must be the artefact's."""
    wanted = (("hidden_size", artifact.padded_hidden),
              ("intermediate_size_per_partition", artifact.padded_intermediate))
    for attribute, want in wanted:
        found = getattr(layer, attribute)
        if found != want:
            raise shardprep_artifact.ArtifactError(attribute, want, found, layer_name)


@register_model_loader("shardprep")
class ShardprepModelLoader(BaseModelLoader):
    """Streams the tensors of this process's rank into the model."""

    def __init__(self, load_config):
        super().__init__(load_config)
        self.expect = (load_config.model_loader_extra_config or {}).get("expect", "")

    def download_model(self, model_config):
        """Nothing: `shardprep fetch` has verified the files while it downloaded them."""

    def load_model(self, *arguments, **options):
        with without_conversion():
            return super().load_model(*arguments, **options)

    def load_weights(self, model, model_config):
        parallel = get_current_vllm_config().parallel_config
        rank = (parallel.data_parallel_rank * parallel.tensor_parallel_size +
                get_tensor_model_parallel_rank())
        artifact = shardprep_artifact.open_artifact(model_config.model, rank, self.expect)
        if artifact.gate_mode == "INTERLEAVE":
            os.environ.setdefault("AITER_BF16_FP8_MOE_BOUND", "0")
        model.load_weights(artifact.torch_tensors(artifact.carried()))
        parameters = dict(model.named_parameters())
        for name, tensor in artifact.torch_tensors(artifact.experts()):
            module, _, role = name.rpartition(".")
            parameter = parameters[name]
            check_pads(artifact, module, model.get_submodule(module))
            parameter.data = parameter_view(tensor, parameter, name).to(parameter.device)
            if artifact.is_shuffled and not role.endswith("_scale"):
                parameter.is_shuffled = True


def register():
    """The entry point: importing this module has registered the loader."""
