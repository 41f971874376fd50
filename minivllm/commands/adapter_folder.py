"""`--adapter-folder` and `--lora-root`: requests name the adapters in a folder. See vllm/plugins/lora_resolvers."""

import os

from minivllm.sources.resolver import FilesystemResolver, LoRAResolverRegistry


def register_folder(
    folder: str | None, base_model_name: str | None, model: str | None
) -> FilesystemResolver | None:
    """Let requests name the adapters in a folder, None = in none. FileNotFoundError if it is not there.

    base_model_name   what the adapters' configs call the model where that is not what its folder is called
    model             as for `resolve_model`
    """
    if folder is None:
        if base_model_name is not None:
            raise ValueError("--base-model-name is about the adapters in --adapter-folder; pass that too")
        return None
    if base_model_name is None and model is not None and not os.path.isdir(model):
        base_model_name = model  # a Hugging Face id, of which the engine knows the copy's folder alone
    if base_model_name is None and model is None:
        from minivllm.models.demo_model import MODEL_NAME as base_model_name  # its folder's name says more
    resolver = FilesystemResolver(folder, [base_model_name] if base_model_name else [])
    LoRAResolverRegistry.register_resolver(f"folder '{folder}'", resolver)
    return resolver
