def parse_fine_tuned_lora_name(name: str, weights_mapper: WeightsMapper | None = None) -> tuple[str, bool]:
    plain = name[len(PEFT_PREFIX) :] if name.startswith(PEFT_PREFIX) else name
    if weights_mapper is not None:
        mapped = weights_mapper._map_name(plain)
        if mapped is not None:
            plain = mapped
    parts = plain.split(".")
    last = parts.pop()
    sides = {"lora_embedding_A": True, "lora_embedding_B": False}
    if last == "weight":
        last = parts.pop() if parts else ""
        sides = {"lora_A": True, "lora_B": False}
    module = ".".join(parts)
    if module == "" or last not in sides:
        raise ValueError(unsupported(name))
    return module, sides[last]
