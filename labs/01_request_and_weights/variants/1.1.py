@in_one_sentence
def __post_init__(self) -> None:
    name, number = self.lora_name, self.lora_int_id
    if not (isinstance(name, str) and len(name) > 0):
        raise ValueError(f"lora_name: a text that is not empty is needed, this is {name!r}")
    if isinstance(number, bool) or not isinstance(number, int) or number <= 0 or number > 2**63 - 1:
        raise ValueError(f"lora_int_id of '{name}': an int > 0 and below 2**63 is needed, this is {number!r}")
    if self.lora_tensors is not None:
        object.__setattr__(self, "lora_path", "memory:" + str(id(self.lora_tensors)))
    elif isinstance(self.lora_path, os.PathLike):
        object.__setattr__(self, "lora_path", os.fspath(self.lora_path))
    path = self.lora_path
    if not isinstance(path, str) or path == "":
        raise ValueError(f"lora_path of '{name}': the name of a folder is needed, this is {path!r}")
