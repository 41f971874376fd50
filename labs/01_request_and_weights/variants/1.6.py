def pair_up(
    tensors: dict[str, torch.Tensor],
    peft_helper: PEFTHelper,
    vocab_size: int | None = None,
    weights_mapper: WeightsMapper | None = None,
    skip_prefixes: list[str] | None = None,
) -> Pairs:
    pairs = {}
    for name in tensors:
        tensor = tensors[name]
        if is_left_out(name, skip_prefixes):
            continue
        plain_name, kind, read = read_tensor(name, tensor, peft_helper)
        module, is_lora_a = parse_fine_tuned_lora_name(plain_name, weights_mapper)
        trained_as = parse_fine_tuned_lora_name(plain_name)[0]
        if read is tensor:
            check_tensor(name, tensor, vocab_size)
        if not kind:
            kind = "lora_A" if is_lora_a else "lora_B"
        key = (module, trained_as)
        if key not in pairs:
            pairs[key] = {}
        if kind in pairs[key]:
            raise ValueError(f"there is another tensor for the place of {name}: it is there twice")
        pairs[key][kind] = read
    if len(pairs) == 0:
        raise ValueError("there are no LoRA weights in the adapter")
    return pairs


def to_weights(
    pairs: Pairs,
    peft_helper: PEFTHelper,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> dict[str, LoRALayerWeights]:
    loras = {}
    for (module, trained_as), pair in pairs.items():
        if module in loras:
            raise ValueError(f"{module} has a second name, {trained_as}: it is there twice")
        check_pair(module, pair, peft_helper.ranks)
        a, b = pair["lora_A"], pair["lora_B"]
        lora = LoRALayerWeights.from_config(trained_as, peft_helper, rank=a.shape[-2])
        if a.device.type != "meta":
            check_numbers(module, pair, lora.scaling, dtype)
        lora.module_name = module
        lora.lora_a = a
        lora.lora_b = b
        lora.beside = {}
        for kind, tensor in pair.items():
            if kind not in ("lora_A", "lora_B"):
                lora.beside[kind] = tensor * lora.scaling
        loras[module] = lora
    for lora in loras.values():
        lora.replace_tensors(lambda tensor: tensor.to(device=device, dtype=dtype))
    return loras
