def optimize(self) -> Self:
    if self.scaling == 1:
        return self
    self.lora_b = torch.mul(self.lora_b, self.scaling)
    self.scaling = 1
    return self
