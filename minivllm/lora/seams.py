"""Where options, sources, GPU code and old names plug into the core. vLLM (v0.22.1) decides by flags inside vllm/lora/.

The core asks these only where its own way has come to an end. A layer of an unknown class is such a place, or a path
that is no folder. So a plain adapter on a CPU never runs what is plugged in.
`minivllm.lora` (its `__init__`) imports what there is, and each part adds itself here.
"""

from collections.abc import Callable
from typing import Any

# Wrapper classes that `from_layer` asks, in order, when no plain one fits a layer.
wrappers: list[type] = []

# Plain wrapper -> the one that takes its place where adapters are fully sharded (`fully_sharded_loras`).
sharded_wrappers: dict[type, type] = {}

# Called once with (model, wrapped modules, LoRAConfig) when a model's linears have been wrapped.
model_options: list[Callable[..., None]] = []

# Field of an adapter's config beyond those of A and B -> what reads it: (PEFTHelper, value) -> None.
config_readers: dict[str, Callable[..., None]] = {}

# The same fields -> what is wrong with one: (value, PEFTHelper, LoRAConfig) -> sentences.
config_checks: dict[str, Callable[..., list[str]]] = {}

# Part of a tensor's name that is not plain -> what reads such a tensor. It is called with (name, tensor, PEFTHelper)
# and gives what `adapter_tensors.read_tensor` says.
tensor_readers: dict[str, Callable[..., tuple[str, str | None, Any]]] = {}

# Name of a file in an adapter's folder -> what reads it into the adapter: (path, LoRAModel, device, dtype) -> None.
folder_files: dict[str, Callable[..., None]] = {}

# End of a weights file's name -> what finds the tensors in it. The core reads .safetensors.
file_formats: dict[str, Callable[..., Any]] = {}

# Last part of a module's name -> further names that trainers have for parts of it.
part_names: dict[str, tuple[str, ...]] = {}

# Field of a request that brings an adapter in the place of a folder -> what reads it into a LoRAModel. It is called
# with (request, LoRAConfig, the model's longest context) and the parameters of `LoRAModel.from_local_checkpoint`.
request_readers: dict[str, Callable[..., Any]] = {}

# What makes a local folder of a path that is none, such as a hub id; the first answer counts. None: it is no path of
# this source's kind. FileNotFoundError says why the source cannot give the folder of one that is.
sources: list[Callable[[str], str | None]] = []

# Name of a punica backend -> what makes it.
backends: dict[str, Callable[..., Any]] = {}

# Name under which an option keeps something beside A and B -> what refuses it, called with (wrapped layer, weights).
beside_checks: dict[str, Callable[..., None]] = {}

# Called with (model manager, whether requests are text). What it gives says what prompts of an adapter that is not
# plain may be: see `minivllm.options.traits`.
traits_readers: list[Callable[[Any, bool], Any]] = []

# Called with (name, base model, known names) for a name that no adapter has. Gives a LoRARequest, or raises.
name_finders: list[Callable[..., Any]] = []
