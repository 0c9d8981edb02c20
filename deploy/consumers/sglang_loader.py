"""SGLang loads shards that shardprep prepared. NOT RUN HERE.

An example to start from: no SGLang and no GPU were at hand, so nothing but its syntax is checked.
It assumes SGLang about 0.5, with these names:

  sglang.srt.model_loader.loader: BaseModelLoader, _initialize_model, and get_model_loader(), which
    takes a class for load_config.load_format, so that an offline engine is started by
      sglang.Engine(model_path=DIR, load_format=ShardprepModelLoader, tp_size=8)
  the order of its ShardedStateLoader: post-process the empty model first, so that parameters have
    the kernel's shapes, then copy tensors by name; the shuffle of the empty weights costs a moment

Expectations come from the environment, SHARDPREP_EXPECT="profile=aiter-interleaved,width=384".
SGLang calls its kernels with gate and up interleaved when SGLANG_USE_AITER_MOE_GU_ITLV is set: the
gate mode of the artefact must agree, or the output is fluent garbage. It names the scales
`w13_weight_scale_inv`, which `shardprep prepare --naming sglang` writes where that scheme is known;
with other names the renaming below is used.

DIR holds the ranks of this node: `shardprep fetch URI --rank 0-7 --into DIR --expect ...`.
"""

import os

import torch
from sglang.srt.distributed import get_tensor_model_parallel_rank
from sglang.srt.model_loader.loader import BaseModelLoader, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype

import shardprep_artifact


def parameter_name(name, parameters):
    """The engine's name of a routed-expert tensor."""
    if name not in parameters and name.endswith("_weight_scale"):
        return name + "_inv"
    return name


def check_gate_mode(artifact):
    interleaved = os.environ.get("SGLANG_USE_AITER_MOE_GU_ITLV", "1").lower() in ("1", "true")
    want = "INTERLEAVE" if interleaved else "SEPARATED"
    if artifact.is_shuffled and artifact.gate_mode != want:
        raise shardprep_artifact.ArtifactError("gate_mode", want, artifact.gate_mode,
                                               artifact.directory)


class ShardprepModelLoader(BaseModelLoader):
    """Streams the tensors of this process's rank into the model."""

    def download_model(self, model_config):
        """Nothing: `shardprep fetch` has verified the files while it downloaded them."""

    def load_model(self, *, model_config, device_config):
        artifact = shardprep_artifact.open_artifact(
            model_config.model_path, get_tensor_model_parallel_rank(),
            os.environ["SHARDPREP_EXPECT"])
        check_gate_mode(artifact)
        with set_default_torch_dtype(model_config.dtype), torch.device(device_config.device):
            model = _initialize_model(model_config, self.load_config)
            model.load_weights(artifact.torch_tensors(artifact.carried()))
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if method is not None:
                    method.process_weights_after_loading(module)
        self.copy_experts(artifact, dict(model.named_parameters()))
        return model.eval()

    def copy_experts(self, artifact, parameters):
        for name, tensor in artifact.torch_tensors(artifact.experts()):
            parameter = parameters[parameter_name(name, parameters)]
            # Equal counts of bytes, or the engine's padded extents are not the artefact's: a copy
            # into a larger parameter would leave the rest of it as it was.
            size_bytes = parameter.numel() * parameter.element_size()
            if size_bytes != artifact.info(name).size_bytes:
                raise shardprep_artifact.ArtifactError(
                    f"bytes of {name}", size_bytes, artifact.info(name).size_bytes)
            parameter.data.view(torch.uint8).view(-1).copy_(tensor.reshape(-1))
            if artifact.is_shuffled and "_scale" not in name:
                parameter.is_shuffled = True
