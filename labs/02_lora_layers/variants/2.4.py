def from_layer(
    layer: nn.Module,
    max_loras: int,
    lora_config: LoRAConfig,
    packed_modules_list: list[str],
    model_config: object | None = None,
) -> nn.Module:
    parts = len(packed_modules_list)
    wrapper = next((one for one in [*LINEAR_WRAPPERS, *wrappers] if one.takes(layer, parts)), None)
    if wrapper is None:
        return layer
    wrapped = wrapper(layer)
    wrapped.create_lora_weights(max_loras, lora_config)
    return wrapped
